"""Between a load and its proof, on either engine: it serves under the mark of the load, and its tokens count once its agent has
proven what drew them."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from colchis.components.agent.engine import Engine
from colchis.components.agent.hashing import Hashing, cut
from colchis.components.errors import BadData, PeerUnavailable
from colchis.components.rollout import Wanted
from colchis.components.weights.deadline import Deadline
from colchis.components.weights.labels import loaded_version, unproven
from colchis.components.weights.manifest import describe
from colchis.components.weights.protocol import EngineState
from tests.contract.replica import TOKENS, Replica, held_proof, scaled
from tests.contract.test_rollout import SAMPLES, check, rolling
from tests.waiting import eventually


def test_tokens_are_drawn_while_the_load_is_proven(replica: Replica, models: dict[str, Path]) -> None:
    """Fault: an engine that waits for its own checksums, and requests in flight that are lost for it. Answers end before the
    proof here, and whoever asked for them waits for it."""
    by_version = {0: models["qwen2_a"], 1: models["qwen2_b"]}
    replica.agent.prepare(1)
    with (
        rolling(replica.engine, models["qwen2_a"], Wanted.at_least(0), "drop", agent=replica.agent) as rolled,
        held_proof(replica, 1) as (hold, activation),
    ):
        assert not replica.paused
        mark = replica.label
        assert loaded_version(mark) == 1
        status = replica.agent.status()
        assert (status.state, status.version, status.ready) == (EngineState.ACTIVATING, None, False)
        assert mark not in status.proven
        assert replica.agent.ready().status_code == 503
        eventually(lambda: not replica.engine.busy(), "nothing is in flight")
        assert not rolled.done()
        hold.open.set()
        proof = activation.result()
        group, stats = rolled.result(60)
    assert (proof.checksums_equal, proof.mark) == (True, mark)
    assert proof.proof_s > proof.pause_s
    assert replica.agent.status().proven[mark] == 1
    assert (stats.requests, stats.faults) == (1, {})
    assert [[v.version for v in t.versions] for t in group] == [[0, 1]] * SAMPLES
    for t in group:
        check(t, by_version)
    replica.serves(1)


def test_tokens_of_a_load_that_is_not_proven_are_refused(
    replica: Replica, models: dict[str, Path], tmp_path: Path
) -> None:
    """Fault: tokens of weights that are no version, which a label said would become one."""
    other = (scaled(replica, 1.25, tmp_path / "other") / "model.safetensors").read_bytes()

    def change_the_copy() -> None:
        file = replica.agent.staged(1) / "model.safetensors"
        file.unlink()
        file.write_bytes(other)

    replica.agent.prepare(1)
    with rolling(replica.engine, models["qwen2_a"], Wanted.at_least(0), "drop", agent=replica.agent) as rolled:
        with held_proof(replica, 1, change_the_copy) as (hold, activation):
            mark = replica.label
            eventually(lambda: not replica.engine.busy(), "nothing is in flight")
            hold.open.set()
            with pytest.raises(BadData, match=r"\d+ of the engine's tensors are not those of weights v1"):
                activation.result()
        status = replica.agent.status()
        assert (status.state, status.version, status.ready) == (EngineState.FAILED, None, False)
        assert mark not in status.proven
        assert replica.label == unproven(1)
        assert replica.agent.bring(1).checksums_equal
        group, stats = rolled.result(60)
    assert stats.faults == {"wrong_version": SAMPLES}
    assert [[v.version for v in t.versions] for t in group] == [[1]] * SAMPLES
    for t in group:
        check(t, {1: models["qwen2_b"]})


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM])
def test_the_agent_ends_before_the_proof(replica: Replica, end: signal.Signals) -> None:
    """Fault: a load that nobody proved, and that the next agent believes; an engine that stays lost to the run."""
    with held_proof(replica, 1) as (hold, activation):
        mark = replica.label
        replica.agent.child.process.send_signal(end)
        if end == signal.SIGTERM:
            hold.open.set()
            proven = activation.result()  # what it had begun, it ends
            assert proven.checksums_equal
        else:
            with pytest.raises(PeerUnavailable):
                activation.result()
    replica.agent.child.process.wait(60)
    assert not replica.paused
    replica.agent.start()
    if end == signal.SIGKILL:
        status = replica.agent.status()
        assert (status.version, status.ready, status.proven) == (None, False, {})
        assert replica.label == mark
        assert Wanted.at_least(0).read(mark) is None
        assert replica.agent.activate(1).mark != mark
    replica.serves(1)


def test_somebody_else_names_the_engine_before_the_proof(replica: Replica) -> None:
    """Fault: other weights that came in since the checksums were made, under the name of those that were proven."""
    with held_proof(replica, 1) as (hold, activation):
        body = {"new_version": "9", "abort_all_requests": False}
        assert replica.engine.client.post("/update_weight_version", json=body).status_code == 200
        hold.open.set()
        with pytest.raises(BadData, match="calls itself '9' after it was told 'loaded-1-"):
            activation.result()
    assert replica.agent.status().state is EngineState.FAILED
    assert replica.label == unproven(1)
    assert replica.agent.bring(1).checksums_equal
    replica.serves(1)


def test_checksums_in_parts_are_those_of_the_whole(replica: Replica, models: dict[str, Path]) -> None:
    """Fault: a tensor that no part asks for, which would never be compared."""
    tensors = describe(sorted(models["qwen2_a"].glob("*.safetensors")))
    engine = Engine(replica.engine.url)
    facts, whole = engine.facts(), engine.checksums(10)
    seen: list[None] = []
    parts = Hashing(engine, lambda: seen.append(None), part_bytes=16 << 10).checksums(facts, tensors, Deadline(30))
    assert parts == whole
    assert parts.whole == replica.engine.checksum()
    assert 3 < len(seen) == len(cut({t.name: t.bytes for t in tensors}, 16 << 10))
    replica.engine.sample(TOKENS, tokens=1)
