"""A reload through the agent, on either engine: what is proven, and what happens to requests in flight."""

from __future__ import annotations

import asyncio
import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import numpy as np
import pytest

from colchis.components.agent.activation import CANARY_KEY, CANARY_TIMEOUT_S
from colchis.components.errors import BadData, PeerUnavailable
from colchis.components.records.boundary import BoundaryRecord
from colchis.components.rollout import Wanted
from colchis.components.weights import activate_all, read_manifest
from colchis.components.weights.labels import unproven
from colchis.components.weights.protocol import EngineState, Probe
from tests.agent.conftest import DEADLINE_S
from tests.contract.conftest import EMBEDDED, Flight
from tests.contract.replica import ASK, LOAD, Replica, held_activation
from tests.faults import Fault
from tests.waiting import eventually

CLOSE = 2e-5
"""Between two float32 implementations of one model."""

Fly = Callable[..., Flight]


def test_a_label_alone_is_no_version(replica: Replica) -> None:
    """Fault: base weights, or those of a stranger, take traffic because their server calls itself by a number."""
    for label in ("7", "none"):
        body = {"new_version": label, "abort_all_requests": False}
        assert replica.engine.client.post("/update_weight_version", json=body).status_code == 200
        told = f"serves no version of ours (its label is '{label}')"
        eventually(lambda told=told: replica.agent.status().reason == told, "a foreign label is noticed")
        status = replica.agent.status()
        assert (status.state, status.version, status.ready) == (EngineState.EMPTY, None, False)
        assert replica.agent.ready().status_code == 503
    replica.agent.activate(0)
    replica.serves(0)


def test_a_version_is_proven_and_agrees_with_transformers(replica: Replica) -> None:
    """Fault: a prediction that holds for one engine only, and log-probabilities that are not the policy's."""
    proof = replica.agent.bring(1)
    assert (proof.predicted, proof.checksums_equal, proof.changed, proof.previous) == (True, True, True, 0)
    assert (proof.flush, proof.version_reported, proof.dirty_load) == (True, "1", False)
    assert proof.cached_tokens_before
    assert proof.cached_tokens_after == 0
    assert replica.gap() < CLOSE
    replica.serves(1)
    assert replica.agent.activate(1) == proof.model_copy(update={"repeated": True})


def test_kind_same_is_a_new_version_of_equal_tensors(replica: Replica) -> None:
    """Fault: a step that trained nothing, which looks like a load that did nothing."""
    replica.agent.bring(1)
    replica.versions.publish(2, replica.versions.folders[1], kind="same")
    before = replica.tensors()
    proof = replica.agent.bring(2, "same")
    assert (proof.changed, proof.version_reported) == (False, "2")
    assert replica.tensors() == before
    replica.serves(2)


@pytest.mark.parametrize("mode", ["retract", "abort"])
def test_requests_in_flight(replica: Replica, fly: Fly, mode: Literal["retract", "abort"]) -> None:
    """Fault: requests that are lost in a reload, tokens under a name that is not proven, and a flush that is refused
    because requests run: the reload would fail whenever there is traffic."""
    with held_activation(replica, 1, at="/pause_generation", pause=mode) as (hold, activation):
        flights = [fly(900, prompt=[5, 3, place]) for place in (2, 3)]
        hold.open.set()
        proof = activation.result()
    assert (proof.checksums_equal, proof.flush, proof.version_reported) == (True, True, "1")
    assert proof.pause_call_s > 0
    for flight in flights:
        answer = flight.answer()
        meta = answer["meta_info"]
        spans = meta["weight_versions"]
        assert (spans[0]["start"], spans[-1]["end"]) == (0, len(answer["output_ids"]))
        if mode == "retract":
            assert (meta["finish_reason"]["type"], len(answer["output_ids"])) == ("length", 900)
            assert replica.drawn_by(answer) == [0, 1]
        else:
            assert meta["finish_reason"]["type"] == "abort"
            assert [span["version"] for span in spans] == ["0"]
    assert replica.gap() < CLOSE
    replica.serves(1)


def test_frozen_in_place_by_somebody_else(replica: Replica, fly: Fly) -> None:
    """Fault: SGLang's two truths (new weights over old keys and values, and an error) that end a reload or stay in the
    engine; and a client that paused the engine and died, whose pause nobody ends."""
    replica.agent.prepare(1)
    flight = fly(400)
    assert replica.engine.client.post("/pause_generation", json={"mode": "in_place"}).status_code == 200
    began = time.monotonic()
    proof = replica.agent.activate(1)
    assert time.monotonic() - began < 8, "a paused engine was asked for tokens"
    assert (proof.flush, proof.checksums_equal, proof.version_reported) == (True, True, "1")
    answer = flight.answer()
    assert answer["meta_info"]["completion_tokens"] == 400
    assert unproven(1) not in {span["version"] for span in answer["meta_info"]["weight_versions"]}
    assert replica.gap() < CLOSE
    replica.serves(1)


def test_new_weights_over_an_old_cache(replica: Replica, fly: Fly) -> None:
    """Fault: an answer that says that the load failed, while the weights are new and keys and values are old. Somebody else
    continues the engine in the pause and freezes it again with a request in it, so that it cannot be flushed."""
    with held_activation(replica, 1) as (hold, activation):
        assert replica.engine.client.post("/continue_generation", json={}).status_code == 200
        flight = fly(400)
        assert replica.engine.client.post("/pause_generation", json={"mode": "in_place"}).status_code == 200
        hold.open.set()
        if replica.kind == EMBEDDED:  # it refuses such a load as a whole
            with pytest.raises(BadData, match="answers 400"):
                activation.result()
            assert replica.agent.activate(1).checksums_equal
        else:
            proof = activation.result()
            assert (proof.dirty_load, proof.checksums_equal, proof.cached_tokens_after) == (True, True, 0)
    assert flight.answer()["meta_info"]["completion_tokens"] == 400
    assert replica.gap() < CLOSE
    replica.serves(1)


def test_an_old_cache_that_stays(replica: Replica, fly: Fly) -> None:
    """Fault: the same, and the repair is refused as well: an engine that answers from keys and values of the old weights."""
    if replica.kind == EMBEDDED:
        pytest.skip("it refuses such a load as a whole: test_new_weights_over_an_old_cache")
    with held_activation(replica, 1) as (hold, activation):
        assert replica.engine.client.post("/continue_generation", json={}).status_code == 200
        flight = fly(400)
        assert replica.engine.client.post("/pause_generation", json={"mode": "in_place"}).status_code == 200
        fault = replica.engine_proxy.add(Fault("POST", "/flush_cache", "status", status=400))
        hold.open.set()
        with pytest.raises(BadData, match=r"boundary 5 .*did not flush its cache"):
            activation.result()
    assert fault.applied == 1
    status = replica.agent.status()
    assert (status.version, status.ready, replica.agent.ready().status_code) == (None, False, 503)
    assert Wanted.at_least(0).read(replica.label) is None
    assert flight.answer()["meta_info"]["completion_tokens"] == 400
    assert replica.agent.activate(1).checksums_equal
    assert replica.gap() < CLOSE
    replica.serves(1)


def test_a_load_that_keeps_the_old_cache(replica: Replica) -> None:
    """Fault: keys and values of the old weights under the name of the new version (miles#1750). The engine is told to keep its
    cache, by somebody between it and its agent."""
    replica.agent.prepare(1)
    manifest = read_manifest(replica.store, replica.versions.run, 1)
    flush = (b'"flush_cache":true', b'"flush_cache":false')
    fault = replica.engine_proxy.add(Fault("POST", LOAD, "rewrite", times=2, rewriting=flush))

    async def activate() -> list[BoundaryRecord]:
        async with replica.agent.agents() as agents:
            return await activate_all(agents, manifest, deadline_s=DEADLINE_S)

    if replica.kind == EMBEDDED:  # it forgets prompts with every load
        (record,) = asyncio.run(activate())
        assert (fault.applied, record.proof["cached_tokens_after"]) == (1, 0)
        assert record.proof["cached_tokens_before"]
        replica.serves(1)
        return
    with pytest.raises(BadData, match="tokens of a prompt were still cached after the flush") as refused:
        asyncio.run(activate())
    assert re.findall(r"boundary \d", str(refused.value)) == ["boundary 5"]
    assert fault.applied == 1
    status = replica.agent.status()
    assert (status.version, status.ready, replica.agent.ready().status_code) == (None, False, 503)
    assert Wanted.at_least(0).read(replica.label) is None
    with pytest.raises(BadData, match=r"boundary 5 .*tokens of a prompt were still cached after the flush"):
        replica.agent.activate(1)  # the same once more, in an engine of which nothing is believed by now
    assert fault.applied == 2
    proof = replica.agent.activate(1)
    assert (proof.checksums_equal, proof.cached_tokens_after) == (True, 0)
    assert replica.gap() < CLOSE
    replica.serves(1)


@pytest.mark.parametrize("silence", ["status", "swallow"])
def test_a_flush_of_which_nothing_is_heard(replica: Replica, silence: Literal["status", "swallow"]) -> None:
    """Fault: an engine that is named though the prompt which it had cached was never answered after the flush, and a repetition
    that proves less than what it repeats."""
    with held_activation(replica, 1) as (hold, activation):
        fault = replica.engine_proxy.add(Fault("POST", ASK, silence, body=CANARY_KEY))
        hold.open.set()
        with pytest.raises(PeerUnavailable, match=r"boundary 5 .*nobody knows whether a prompt is still cached"):
            activation.result()
    assert fault.applied == 1
    status = replica.agent.status()
    assert (status.version, status.ready, replica.agent.ready().status_code) == (None, False, 503)
    assert replica.label == unproven(1)
    proof = replica.agent.activate(1)
    assert proof.cached_tokens_before
    assert (proof.checksums_equal, proof.cached_tokens_after) == (True, 0)
    replica.serves(1)


def test_a_busy_engine_is_waited_for_after_the_flush(replica: Replica) -> None:
    """Fault: a reload that fails, or proves nothing of the cache, because requests in flight were read again first."""
    late_s = CANARY_TIMEOUT_S + 1
    with held_activation(replica, 1) as (hold, activation):
        replica.engine_proxy.add(Fault("POST", ASK, "delay", seconds=late_s, body=CANARY_KEY))
        hold.open.set()
        proof = activation.result()
    assert proof.proof_s > late_s
    assert (proof.checksums_equal, proof.cached_tokens_after) == (True, 0)
    replica.serves(1)


@pytest.mark.parametrize("damage", ["none", "flipped", "gone"])
def test_a_delta_or_the_longer_way(replica: Replica, tmp_path: Path, damage: str) -> None:
    """Fault: a delta that was applied wrongly and is served (slime#2104, miles#1643), or one that only saves time and ends
    the reload because it is damaged."""
    near = tmp_path / "near"
    shutil.copytree(replica.versions.folders[1], near)
    body = bytearray((near / "model.safetensors").read_bytes())
    numbers = np.frombuffer(body, "<f4", offset=8 + int.from_bytes(body[:8], "little"))
    numbers[::97] += 0.25
    (near / "model.safetensors").write_bytes(body)
    manifest = replica.versions.publish(2, near, base=replica.versions.folders[1])
    assert manifest.delta is not None
    replica.agent.bring(1)
    key = manifest.delta.payload.key
    if damage == "flipped":
        difference = bytearray(replica.store.get(key).data)
        difference[len(difference) // 3] ^= 1
        replica.store.put(key, bytes(difference))
    elif damage == "gone":
        replica.store.delete(key)
    fetched = [o.key for o in replica.agent.prepare(2).objects]
    assert fetched == ([key] if damage == "none" else [f.key for f in manifest.files])
    proof = replica.agent.activate(2)
    assert (proof.checksums_equal, proof.changed) == (True, True)
    assert replica.gap() < CLOSE
    replica.serves(2)


def test_a_version_that_goes_back_takes_no_traffic(replica: Replica) -> None:
    """Fault: a counter that began anew after a failover (miles#2244): the oldest weights would look like the newest."""
    replica.agent.bring(1)
    replica.versions.declare(1)
    replica.serves(1)
    replica.agent.activate(0)
    answer = replica.agent.ready()
    assert (answer.status_code, answer.text) == (503, f"serves v0, run '{replica.versions.run}' declares v1")
    replica.agent.activate(1)
    replica.serves(1)


def test_a_probe_outside_the_vocabulary_is_refused(replica: Replica) -> None:
    """Fault: a boundary that ends the engine which it looks at."""
    for token in (100, 127, 1 << 40, -1):
        with pytest.raises(BadData, match="outside the vocabulary"):
            replica.agent.ask(lambda a, token=token: a.probe(Probe(token_ids=[[3, token]])))
    replica.serves(0)
