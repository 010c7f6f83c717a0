"""An engine that restarts holds nothing, and its agent gives it back what its run declares: that, and nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from colchis.components.agent.agent import Agent, AgentSettings
from colchis.components.errors import BadData, PeerUnavailable
from colchis.components.store import Store, StoreSettings
from colchis.components.store.pools import pool_lease
from colchis.components.weights.protocol import Activate, EngineState, Prepare
from colchis.components.weights.publish import read_manifest
from tests.agent.conftest import DEADLINE_S, AgentProcess, EngineProcess, Versions, declare
from tests.agent.sending import SenderProcess
from tests.faults import Fault, FaultProxy
from tests.waiting import eventually
from tests.weights.models import RUN


def test_a_restarted_engine_serves_nothing_until_it_is_filled(
    versions: Versions, agent: AgentProcess, engine: EngineProcess
) -> None:
    """Catches base weights served under the run's version (miles#1724): readiness is by proof for this process."""
    agent.bring(1)
    engine.child.stop()
    eventually(lambda: agent.status().state is EngineState.UNREACHABLE, "a dead engine is noticed")
    assert agent.status().version is None
    engine.start()
    eventually(lambda: agent.status().state is EngineState.EMPTY, "a restarted engine is empty")
    assert agent.status().version is None
    assert agent.ready().status_code == 503
    agent.activate(1)
    assert (agent.status().version, engine.label(), agent.ready().status_code) == (1, "1", 200)


def test_a_restart_under_the_proven_label_is_noticed(
    versions: Versions, agent: AgentProcess, engine: EngineProcess
) -> None:
    """Catches other weights that are believed because their engine was started with the number that was proven."""
    agent.bring(1)
    engine.child.stop()
    engine.start("--model-path", str(versions.folders[0]), "--weight-version", "1")
    assert engine.label() == "1"
    eventually(lambda: agent.status().state is EngineState.EMPTY, "the restart is noticed")
    assert (agent.status().version, agent.ready().status_code) == (None, 503)
    proof = agent.activate(1)
    assert not proof.repeated
    assert (agent.status().version, agent.ready().status_code) == (1, 200)


def test_a_restarted_engine_gets_back_what_its_run_declares(
    store: Store, versions: Versions, agent: AgentProcess, engine: EngineProcess
) -> None:
    """Catches an engine that stands idle until the next reload; also when the agent was restarted with it."""
    digest = agent.bring(1).weights_digest
    declare(store, 1, digest)
    checksum = engine.checksum()
    for agent_too in (False, True):
        engine.child.stop()
        if agent_too:
            agent.kill()
        engine.start()
        if agent_too:
            agent.start()
        eventually(lambda: agent.ready().status_code == 200, "the restarted engine is filled")
        assert (agent.status().version, engine.label(), engine.checksum()) == (1, "1", checksum)
        assert engine.generate()["meta_info"]["weight_version"] == "1"


def test_an_engine_that_was_sent_its_version_gets_it_back_from_the_store(
    store: Store, versions: Versions, agent: AgentProcess, engine: EngineProcess, tmp_path: Path
) -> None:
    """Catches a refill that looks for a staged copy where there never was one, or for the sender."""
    agent.bring(0)
    agent.ask(lambda a: a.prepare(Prepare(run=RUN, version=1, direct=True, deadline_s=DEADLINE_S)))
    sender = SenderProcess(read_manifest(store, RUN, 1), versions.folders[1], agent.url, tmp_path)
    try:
        request = Activate(run=RUN, version=1, kind="full", offer=sender.offer, deadline_s=DEADLINE_S)
        proof = agent.ask(lambda a: a.activate(request))
    finally:
        sender.kill()
    assert proof.direct
    declare(store, 1, proof.weights_digest)
    assert not agent.staged(1).exists()
    engine.child.stop()
    engine.start()
    eventually(lambda: agent.ready().status_code == 200, "the restarted engine is filled")
    assert (agent.status().version, engine.label()) == (1, "1")
    assert agent.staged(1).exists()


@pytest.fixture
def inside(engine: EngineProcess, store_settings: StoreSettings, tmp_path: Path) -> Iterator[Agent]:
    """An agent in this process, of pool `main`, whose refills are ours to ask for."""
    agent = Agent(AgentSettings(engine.url, "engine-0", tmp_path / "staging", pool="main"), store_settings)
    yield agent
    agent.stop()
    agent.close()


def test_a_restarted_engine_is_not_filled_with_what_nobody_declares(
    store: Store, versions: Versions, engine: EngineProcess, inside: Agent
) -> None:
    """Catches a refill in the middle of a reload, of a version that the run has left, and over what a reload brought."""
    inside.prepare(Prepare(run=RUN, version=1, deadline_s=DEADLINE_S))
    proof = inside.activate(Activate(run=RUN, version=1, kind="full", deadline_s=DEADLINE_S))
    assert inside.refill() is None  # nothing was lost
    engine.child.stop()
    engine.start()
    assert inside.refill() is None  # no run declares it
    declare(store, 0, proof.weights_digest)
    assert inside.refill() is None
    declare(store, 1, "0" * 64)
    assert inside.refill() is None
    assert engine.label() == "none"
    declare(store, 1, proof.weights_digest)
    refilled = inside.refill()
    assert refilled is not None
    assert (refilled.version, refilled.checksums_equal, engine.label()) == (1, True, "1")
    assert inside.refill() is None

    engine.child.stop()
    engine.start()
    assert inside.view().state is EngineState.EMPTY
    inside.prepare(Prepare(run=RUN, version=0, deadline_s=DEADLINE_S))
    inside.activate(Activate(run=RUN, version=0, kind="full", deadline_s=DEADLINE_S))
    assert inside.refill() is None
    assert engine.label() == "0"


def test_a_late_joiner_gets_what_the_run_of_its_pool_declares(
    store: Store, versions: Versions, engine: EngineProcess, inside: Agent
) -> None:
    """Catches a new pod in the place of one that is gone, which stands idle until the next reload; one that serves what it
    was started with; and one that joins a run that has let go of the pool, or holds another."""
    engine.child.stop()
    engine.start("--model-path", str(versions.folders[0]), "--weight-version", "1")
    digest = read_manifest(store, RUN, 1).weights_digest
    assert inside.refill() is None  # nobody holds the pool
    pool_lease(store, "other", RUN).acquire()
    declare(store, 1, digest)
    assert inside.refill() is None
    lease = pool_lease(store, "main", RUN)
    lease.acquire()
    lease.release()
    assert inside.refill() is None
    assert not inside.view().ready
    lease.acquire()
    joined = inside.refill()
    assert joined is not None
    assert (joined.version, joined.checksums_equal, joined.weights_digest) == (1, True, digest)
    assert inside.view().ready
    assert inside.refill() is None


def test_an_engine_that_died_in_its_activation_is_filled_when_it_is_back(
    store: Store, versions: Versions, engine: EngineProcess, tmp_path: Path
) -> None:
    """Catches a failure that outlives the process that it happened in: an engine that nobody fills until the next reload."""
    pool_lease(store, "main", RUN).acquire()
    with FaultProxy(("127.0.0.1", engine.port)) as proxy:
        agent = Agent(AgentSettings(proxy.url, "engine-0", tmp_path / "staging", pool="main"), store.settings)
        agent.prepare(Prepare(run=RUN, version=1))
        declare(store, 1, agent.activate(Activate(run=RUN, version=1, kind="full")).weights_digest)
        agent.prepare(Prepare(run=RUN, version=0))
        proxy.add(Fault("POST", "/update_weights_from_disk", "delay", before=engine.child.stop))
        with pytest.raises(PeerUnavailable):
            agent.activate(Activate(run=RUN, version=0, kind="full", deadline_s=8.0))
        engine.start()
        filled = agent.refill()
        assert filled is not None
        assert (filled.version, engine.label()) == (1, "1")
        assert agent.status().ready
        agent.stop()
        agent.close()


def test_a_damaged_copy_is_not_refilled(
    store: Store, versions: Versions, engine: EngineProcess, inside: Agent, tmp_path: Path
) -> None:
    """Catches a refill that trusts the disk, and one that is tried for ever."""
    inside.prepare(Prepare(run=RUN, version=1, deadline_s=DEADLINE_S))
    proof = inside.activate(Activate(run=RUN, version=1, kind="full", deadline_s=DEADLINE_S))
    declare(store, 1, proof.weights_digest)
    path = tmp_path / "staging" / "versions" / RUN / "v00000001" / "model.safetensors"
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)
    engine.child.stop()
    engine.start()
    with pytest.raises(BadData, match="other bytes than the manifest says"):
        inside.refill()
    assert inside.refill() is None
    assert engine.label() == "none"
