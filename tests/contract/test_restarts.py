"""A pod of the pool, engine and agent in it, that is killed at each point of a reload and started again, on either engine."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest

from colchis.components.engine.sglang_cpu import launch_command
from colchis.components.errors import PeerUnavailable
from colchis.components.rollout import Wanted
from colchis.components.store import Store, StoreSettings
from colchis.components.store.pools import pool_lease
from colchis.components.weights.labels import loaded_version
from colchis.components.weights.protocol import EngineState, Verify
from colchis.workflows.local.ports import free_port
from colchis.workflows.local.services import Child
from tests.agent.conftest import AgentProcess
from tests.contract.conftest import EMBEDDED, START_S, address
from tests.contract.replica import ASK, Replica, Versions, held_activation, held_proof, holding
from tests.contract.test_rollout import check, rolling
from tests.engine.processes import EngineProcess, client_of
from tests.faults import FaultProxy
from tests.waiting import eventually

pytestmark = pytest.mark.timeout(900)

POOL = "main"


class Pod:
    """What a kubelet starts again on the same address: as it was started first, with no version."""

    def __init__(self, kind: str, model: Path, folder: Path, bucket: StoreSettings) -> None:
        self.port, self.log = free_port(), folder / "engine.log"
        self.url = f"http://127.0.0.1:{self.port}"
        self.argv = [sys.executable, "-m", "colchis.components.engine", "--host", "127.0.0.1", "--port", str(self.port)]
        if kind != EMBEDDED:
            self.argv = launch_command(model=model, port=self.port)
        self.engine = self.start_engine()
        self.engine_proxy = FaultProxy(address(self.url))
        self.store_proxy = FaultProxy(address(bucket.endpoint))
        with_proxy = replace(bucket, endpoint=self.store_proxy.url)
        self.agent = AgentProcess(folder, self.engine_proxy.url, with_proxy, more=["--pool", POOL])

    def start_engine(self) -> Child:
        child = Child("engine", self.argv, log=self.log, environment={"OMP_NUM_THREADS": "1"})
        child.wait_for(f"{self.url}/ping", deadline_s=START_S)
        return child

    def kill(self) -> None:
        """All of its processes at once."""
        self.agent.child.process.send_signal(signal.SIGKILL)
        os.killpg(self.engine.process.pid, signal.SIGKILL)
        self.agent.child.process.wait()
        self.engine.stop(grace_s=0)

    def start(self) -> None:
        """The agent is there first, as always: an engine takes longer."""
        self.agent.start()
        self.engine = self.start_engine()

    def stop(self) -> None:
        self.agent.child.stop()
        self.engine.stop()


@pytest.fixture(scope="module")
def pod(
    kind: str, models: dict[str, Path], bucket: StoreSettings, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Pod]:
    """One for all points: each test leaves it started again and whole."""
    pod = Pod(kind, models["qwen2_a"], tmp_path_factory.mktemp("pod"), bucket)
    with pod.engine_proxy, pod.store_proxy:
        yield pod
        pod.stop()


@pytest.fixture
def replica(kind: str, pod: Pod, bucket: StoreSettings, models: dict[str, Path]) -> Iterator[Replica]:
    """The pod serves v0 of a run that holds its pool and declares v0; v1 is published."""
    store = Store(bucket, deadline_s=20.0)
    versions = Versions(store, models)
    pod.agent.run = versions.run
    engine = EngineProcess(pod.engine.process, pod.url, client_of(pod.url))
    replica = Replica(kind, engine, pod.agent, pod.engine_proxy, pod.store_proxy, store, versions)
    lease = pool_lease(store, POOL, versions.run)
    lease.acquire()
    pod.agent.bring(0)
    versions.declare(0)
    yield replica
    lease.release()


POINTS = ["while it fetches", "prepared", "in the pause", "in the proof", "before the probe", "in the probe"]
ACTIVATING, PROVEN = ("in the pause", "in the proof"), ("before the probe", "in the probe")


@pytest.mark.parametrize("point", POINTS)
def test_a_pod_that_is_killed_in_a_reload(replica: Replica, pod: Pod, models: dict[str, Path], point: str) -> None:
    """Fault: an engine that comes back with the weights that it was started with and takes requests (miles#1724), one that
    is believed to have what it had before, a reload that cannot be repeated, and requests in flight that are lost."""
    agent = replica.agent
    draws = point in ACTIVATING
    drawing = rolling(replica.engine, models["qwen2_a"], Wanted.at_least(0), "drop") if draws else nullcontext()
    if point != "while it fetches":
        agent.prepare(1)
    with ThreadPoolExecutor(1) as pool, drawing as rolled:
        if point == "while it fetches":
            with holding(replica.store_proxy, "GET", "weights/model.safetensors") as hold:
                call = pool.submit(agent.prepare, 1)
                hold.wait()
                pod.kill()
                with pytest.raises(PeerUnavailable):
                    call.result()
        elif point in ACTIVATING:
            in_proof = point == "in the proof"
            activating = held_proof(replica, 1, at=ASK) if in_proof else held_activation(replica, 1)
            with activating as (_, activation):
                assert (loaded_version(replica.label) == 1) if in_proof else (replica.label == "unproven-1")
                pod.kill()
                with pytest.raises(PeerUnavailable):
                    activation.result()
        elif point == "in the probe":
            assert agent.activate(1).checksums_equal
            with holding(replica.engine_proxy, "POST", ASK) as hold:
                probe = pool.submit(replica.gap)
                hold.wait()
                pod.kill()
                with pytest.raises(PeerUnavailable):
                    probe.result()
        else:
            if point == "before the probe":
                assert agent.activate(1).checksums_equal
            pod.kill()
        with pytest.raises(PeerUnavailable):
            agent.status()

        pod.start()
        if point in PROVEN:
            # v1 is proven and not declared: only the reload that goes on may bring it back
            assert replica.label == "none"
            eventually(lambda: agent.status().state is EngineState.EMPTY, "what it had is not believed")
        else:
            eventually(lambda: agent.ready().status_code == 200, "it gets what its run declares")
            replica.serves(0)

        # the reload again, from its first boundary
        assert agent.prepare(1).repeated == (point != "while it fetches")
        agent.ask(lambda a: a.verify(Verify(run=agent.run, version=1)))
        assert agent.activate(1).checksums_equal
        assert replica.gap() < 2e-5
        replica.versions.declare(1)
        eventually(lambda: agent.ready().status_code == 200, "what is declared is ready")
        replica.serves(1)
        if rolled is not None:
            group, stats = rolled.result(240)
            assert len(group) == 4
            assert stats.faults.get("connection"), "the pod was killed in the middle of its requests"
            for trajectory in group:
                check(trajectory, {0: models["qwen2_a"], 1: models["qwen2_b"]})
