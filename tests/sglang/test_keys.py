"""Real SGLang whose routes are locked: its agent has the keys, and a stranger in its network cannot change the weights."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from colchis.components.engine.sglang_cpu import launch_command
from colchis.components.errors import BadConfig
from colchis.components.rollout import Engines, Wanted
from colchis.components.store import Store, StoreSettings
from colchis.components.weights.protocol import EngineState, Probe
from colchis.workflows.local.ports import free_port
from colchis.workflows.local.services import Child
from tests.agent.conftest import TOKEN, AgentProcess
from tests.contract.conftest import START_S, bucket, models
from tests.contract.replica import Versions
from tests.contract.test_rollout import SAMPLES, roll
from tests.waiting import eventually

__all__ = ["bucket", "models"]

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(900)]

ADMIN, USER = "admin-key-of-the-tests", "user-key-of-the-tests"
LOCKS = {
    "admin": (["--admin-api-key", ADMIN], {"COLCHIS_ENGINE_ADMIN_KEY": ADMIN}),
    "both": (
        ["--admin-api-key", ADMIN, "--api-key", USER],
        {"COLCHIS_ENGINE_ADMIN_KEY": ADMIN, "COLCHIS_ENGINE_KEY": USER},
    ),
}


@pytest.fixture(scope="module", params=LOCKS)
def lock(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def locked(lock: str, models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Address of a server that was started with the keys of `lock`."""
    port = free_port()
    argv = launch_command(model=models["qwen2_a"], port=port, more=LOCKS[lock][0])
    child = Child("sglang", argv, log=tmp_path_factory.mktemp(lock) / "log", environment={})
    try:
        child.wait_for(f"http://127.0.0.1:{port}/ready", deadline_s=START_S)
        yield f"http://127.0.0.1:{port}"
    finally:
        child.stop()


def status_of(url: str, path: str, key: str | None, **body: object) -> int:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    return httpx.post(url + path, json=body, headers=headers, timeout=60).status_code


def test_the_agent_has_the_keys_and_a_stranger_does_not(
    lock: str, locked: str, bucket: StoreSettings, models: dict[str, Path], tmp_path: Path
) -> None:
    """Fault: an agent that cannot lead an engine whose control routes are locked, or locks that keep nobody out."""
    stranger = {"model_path": str(models["qwen2_b"]), "weight_version": "1"}
    assert status_of(locked, "/update_weights_from_disk", None, **stranger) == 401
    assert status_of(locked, "/pause_generation", None, mode="abort") == 401
    sampled = status_of(locked, "/generate", None, input_ids=[3, 4], sampling_params={"max_new_tokens": 2})
    assert sampled == (200 if lock == "admin" else 401)

    versions = Versions(Store(bucket, deadline_s=20.0), models)
    agent = AgentProcess(tmp_path, locked, bucket, environment=LOCKS[lock][1])
    agent.run = versions.run
    try:
        for version in (0, 1):
            assert agent.bring(version).checksums_equal
            status = agent.status()
            assert (status.version, status.ready, status.state) == (version, True, EngineState.SERVING), status.reason
        probed = agent.ask(lambda a: a.probe(Probe(token_ids=[[3, 7, 11]])))
        assert (probed.version, probed.weight_version) == (1, "1")
        keys = {"": lock == "admin", USER: True, "another": lock == "admin"}
        pools = {key: [Engines([agent.url], token=TOKEN, key=key), Engines.at([locked], key=key)] for key in keys}
        for engines, is_let_in in [(engines, keys[key]) for key, both in pools.items() for engines in both]:
            if is_let_in:
                (arrived, stats) = roll(engines, models["qwen2_b"], Wanted.exactly(1))
                assert (len(arrived), stats.faults) == (SAMPLES, {})
            else:
                with pytest.raises(BadConfig, match="wants a key"):
                    roll(engines, models["qwen2_b"], Wanted.exactly(1))
        assert status_of(locked, "/pause_generation", ADMIN, mode="retract") == 200
        eventually(lambda: agent.ready().status_code == 503, "a pause is noticed behind locks, too")
        assert status_of(locked, "/continue_generation", ADMIN) == 200
    finally:
        agent.child.stop()


def test_an_agent_without_the_keys_says_so(
    lock: str, locked: str, bucket: StoreSettings, models: dict[str, Path], tmp_path: Path
) -> None:
    """Fault: an agent that takes a locked engine for one that is empty, or down."""
    versions = Versions(Store(bucket, deadline_s=20.0), models)
    agent = AgentProcess(tmp_path, locked, bucket, environment={})
    agent.run = versions.run
    try:
        with pytest.raises(BadConfig, match="wants a key"):
            agent.bring(0)
        assert not agent.status().ready
    finally:
        agent.child.stop()
