"""Adapters on real SGLang: the files that a run exports, and versions that are served so, over the five boundaries."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from typing import Any

import httpx
import pytest

from colchis.components.errors import BadData
from colchis.components.rollout.client import Completion, Refusal
from colchis.components.store import Store
from colchis.components.trainer.model import load_model
from colchis.components.trainer.probe import sequence_logprobs
from colchis.components.weights.protocol import EngineState
from colchis.workflows.local.weed import Weed
from tests.conftest import fresh_bucket
from tests.engine.processes import EngineProcess
from tests.sglang.adapters import TOKENS, TOLERANCE, Adapter, Pool, Server
from tests.waiting import eventually

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def server(running: Server) -> EngineProcess:
    return running.process


def gap(server: EngineProcess, expected: list[float], name: str | None) -> float:
    """Largest difference of log-probabilities between an adapter on the server and `expected`."""
    body: dict[str, Any] = {"input_ids": TOKENS, "sampling_params": {"max_new_tokens": 1}}
    answer = server.generate(**body, return_logprob=True, logprob_start_len=0, lora_path=name)
    rows = answer["meta_info"]["input_token_logprobs"][1:]
    return max(abs(row[0] - value) for row, value in zip(rows, expected, strict=True))


def test_an_exported_adapter_is_the_policy_that_was_trained(
    server: EngineProcess, model: Path, adapters: list[Adapter]
) -> None:
    """Catches names, a scale or an order of factors that only we understand."""
    base = sequence_logprobs(load_model(model), [TOKENS])[0]
    for number, adapter in enumerate(adapters[:2]):
        body = {"lora_name": f"v{number}", "lora_path": str(adapter.folder)}
        assert server.client.post("/load_lora_adapter", json=body).json()["success"] is True
    for number, adapter in enumerate(adapters[:2]):
        assert gap(server, adapter.logprobs, f"v{number}") < TOLERANCE
        assert gap(server, base, f"v{number}") > 1e-2
    assert gap(server, base, None) < TOLERANCE


def test_what_a_reload_of_adapters_has_to_know(server: EngineProcess, adapters: list[Adapter]) -> None:
    """Facts of SGLang that the activation of an adapter is built on. A change here is news, not a fault."""

    def load(name: str, adapter: Adapter) -> bool:
        body = {"lora_name": name, "lora_path": str(adapter.folder)}
        return server.client.post("/load_lora_adapter", json=body).status_code == 200

    before = server.checksum()
    assert load("x", adapters[0])
    assert server.checksum() == before  # checksums are of the base alone
    assert server.info("weight_version") == "none"  # and so is the label
    assert not load("x", adapters[1])  # a name is never given anew
    assert server.client.post("/unload_lora_adapter", json={"lora_name": "x"}).status_code == 200
    assert gap(server, adapters[0].logprobs, "x") < TOLERANCE  # a request for what was unloaded loads it again
    for name in ("x", "v0", "v1"):
        server.client.post("/unload_lora_adapter", json={"lora_name": name})


@pytest.fixture(scope="module")
def pool(
    running: Server, adapters: list[Adapter], weed: Weed, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Pool]:
    found = Pool([running], adapters, Store(fresh_bucket(weed)), tmp_path_factory.mktemp("agents"))
    yield found
    found.stop()


def test_versions_are_served_as_adapters_over_five_boundaries(pool: Pool) -> None:
    """Fault: an adapter that nobody can prove, a pause that nobody needs, adapters that pile up in the engine."""
    first = pool.reload(0)
    assert first["load"]["adapter"] is None
    for version in (1, 2, 3):
        proof = pool.reload(version)
        manifest = pool.manifests[version]
        assert proof["load"]["adapter"] == proof["transfer"]["adapter"] == manifest.adapter_name
        assert proof["load"]["engine_checksum"] == first["load"]["engine_checksum"], "the base stays"
        assert proof["load"]["checksums_equal"] is True
        assert proof["load"]["pause_s"] == 0
        assert manifest.adapter is not None
        assert proof["transfer"]["bytes"] == sum(f.bytes for f in manifest.adapter.files), "the base was there"
        assert proof["cache"]["max_gap"] < TOLERANCE
    status = pool.agent.status()
    assert (status.version, status.adapter) == (3, pool.served(3))
    assert pool.server.loaded() == pool.names(2, 3)
    assert pool.agent.activate(3).repeated


def test_what_is_in_flight_goes_on_under_the_adapter_it_named(pool: Pool, server: EngineProcess) -> None:
    """Fault: tokens said to be of the new version since the engine bears its name by now."""
    pool.reload(1)
    pool.agent.prepare(2)
    answers: list[Completion | Refusal] = []
    activated = Event()

    def keep_asking() -> None:
        while not activated.is_set():
            answers.extend(pool.ask(1, 16, 56))

    with ThreadPoolExecutor(1) as thread:
        asking = thread.submit(keep_asking)
        eventually(server.busy, "a request runs")
        assert pool.agent.activate(2).pause_s == 0
        activated.set()
        asking.result()
    assert answers
    for answer in answers:
        assert isinstance(answer, Completion)
        assert [(v.version, v.start, v.end) for v in answer.versions] == [(1, 0, 56)]
        assert answer.logprobs == pytest.approx(pool.logprobs(1, answer.token_ids), abs=5e-5)


def test_a_damaged_adapter_is_refused_while_the_old_version_serves(pool: Pool) -> None:
    pool.reload(1)
    manifest = pool.manifests[4]
    assert manifest.adapter is not None
    weights = next(f for f in manifest.adapter.files if f.name.endswith(".safetensors"))
    good = pool.store.get(weights.key).data
    pool.store.put(weights.key, good[:-4] + b"\0\0\0\1")
    try:
        with pytest.raises(BadData, match=r"boundary 1 .*adapter_model\.safetensors"):
            pool.reload(4)
        with pytest.raises(BadData, match=r"adapter_model\.safetensors"):
            pool.agent.prepare(4)
    finally:
        pool.store.put(weights.key, good)
    assert pool.agent.status().version == 1
    assert pool.reload(4)["cache"]["max_gap"] < TOLERANCE


def test_an_adapter_that_does_not_say_what_the_trainer_says_is_refused(pool: Pool) -> None:
    """Fault: layers, a scale or a type that the engine reads in another way; its checksums are those of the base alone."""
    pool.reload(1)
    pool.agent.prepare(5)
    with pytest.raises(BadData, match=r"under adapter .* differ by"):
        pool.agent.activate(5)
    assert pool.agent.ready().status_code == 503
    assert pool.reload(2)["load"]["pause_s"] == 0, "the base was there all the time"


def test_an_agent_that_is_killed_is_followed_by_one_that_knows(pool: Pool) -> None:
    """Fault: an engine that serves well and leaves the ready set, or is paused, since its agent died."""
    pool.reload(2)
    pool.agent.kill()
    pool.agent.start()
    status = pool.agent.status()
    assert (status.state, status.version) == (EngineState.SERVING, 2)
    assert status.adapter == pool.served(2)


def test_an_agent_that_is_killed_between_prepare_and_activate(pool: Pool) -> None:
    """Fault: a version that was prepared and is not there; what is served removed from the disk, and so disowned, since the
    first question to the new agent was to prepare something."""
    pool.reload(1)
    pool.agent.prepare(2)
    pool.agent.kill()
    pool.agent.start()
    proof = pool.agent.activate(2)
    assert (proof.previous, proof.pause_s) == (1, 0)
    pool.agent.kill()
    pool.agent.start()
    pool.agent.prepare(3)
    assert pool.agent.status().version == 2


def test_a_base_that_somebody_changed_is_noticed_and_repaired(pool: Pool) -> None:
    """Fault: an adapter on a base that it was not trained beside, under a label that says otherwise."""
    pool.reload(1)
    body = {"model_path": str(pool.adapters[3].merged), "flush_cache": True}
    assert pool.server.post("/update_weights_from_disk", body).json()["success"]
    pool.agent.prepare(2)
    with pytest.raises(BadData, match="not those of v0 any more"):
        pool.agent.activate(2)
    assert pool.agent.ready().status_code == 503
    assert httpx.get(f"{pool.server.url}/model_info").json()["weight_version"] == "unproven-2"
    proof = pool.reload(2)
    assert proof["load"]["pause_s"] > 0, "the base was loaded again"
    assert proof["cache"]["max_gap"] < TOLERANCE


def test_a_restarted_engine_gets_base_and_adapter_back(pool: Pool) -> None:
    """Fault: an engine that stays empty until the next reload, or gets the adapter without its base."""
    pool.reload(3)
    pool.declare(3)
    pool.server.stop()
    eventually(lambda: pool.agent.ready().status_code == 503, "it is not ready")
    pool.server.start()
    eventually(lambda: pool.agent.ready().status_code == 200, "it is ready again", deadline_s=120)
    assert pool.server.loaded() == pool.names(3)
    (answer,) = pool.ask(3, 1, 4)
    assert isinstance(answer, Completion)
    assert answer.logprobs == pytest.approx(pool.logprobs(3, answer.token_ids), abs=5e-5)
