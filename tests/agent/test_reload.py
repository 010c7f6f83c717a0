"""A reload through a real agent and a real engine: five boundaries passed, and every refusal with the old version kept."""

from __future__ import annotations

import asyncio
import hashlib
import json
import uuid
from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import pytest
import xxhash
from prometheus_client.parser import text_string_to_metric_families

from colchis.components.errors import BadConfig, BadData, PeerUnavailable
from colchis.components.records.boundary import Boundary
from colchis.components.records.run import Serving
from colchis.components.records.weights import TensorEntry, WeightsManifest, weights_digest
from colchis.components.store import Store, StoreSettings, keys
from colchis.components.store.record import sealed
from colchis.components.weights import (
    Agents,
    activate_all,
    prepare_all,
    probe_all,
    read_manifest,
    verify_all,
    verify_published,
)
from colchis.components.weights.checksums import predict
from colchis.components.weights.protocol import EngineState, Probe, Verify
from colchis.components.weights.reference import OPEN_ROUTES, ROUTES
from colchis.workflows.local.weed import Weed
from tests.agent.conftest import DEADLINE_S, TOKEN, AgentProcess, EngineProcess, Versions
from tests.conftest import fresh_bucket
from tests.weights.models import arrays_of, config_of, publish_version, write_weights


@pytest.fixture(scope="module")
def store_settings(weed: Weed) -> StoreSettings:
    """One bucket for this file: its tests share an agent, which knows one store."""
    return fresh_bucket(weed)


@pytest.fixture(scope="module")
def shared_agent(
    shared_engine: EngineProcess, store_settings: StoreSettings, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[AgentProcess]:
    agent = AgentProcess(tmp_path_factory.mktemp("agent"), shared_engine.url, store_settings)
    yield agent
    agent.child.stop()


@pytest.fixture
def versions(store: Store, tmp_path: Path) -> Versions:
    """A run of its own for each test."""
    return Versions(store, tmp_path / "models", run=f"run-{uuid.uuid4().hex[:8]}")


@pytest.fixture
def agent(shared_agent: AgentProcess, versions: Versions, engine: EngineProcess) -> AgentProcess:
    shared_agent.run = versions.run
    return shared_agent


def test_five_boundaries(store: Store, versions: Versions, agent: AgentProcess, engine: EngineProcess) -> None:
    """The whole chain for v0, v1 and a `same` v2: catches any boundary that proves nothing or the wrong thing."""

    async def reload(version: int) -> dict[Boundary, dict[str, object]]:
        manifest = read_manifest(store, versions.run, version)
        async with agent.agents() as agents:
            records = [verify_published(store, versions.run, version)]
            records += await prepare_all(agents, manifest, deadline_s=DEADLINE_S)
            records += await verify_all(agents, manifest, deadline_s=DEADLINE_S)
            records += await activate_all(agents, manifest, deadline_s=DEADLINE_S)
            records += await probe_all(agents, manifest, probe=None, tolerance=1e-3, deadline_s=DEADLINE_S)
        assert all(r.ok and r.version == version for r in records)
        for r in records:
            json.dumps(r.headline() | {"engine": r.engine, "version": r.version})
        return {r.boundary: r.proof for r in records}

    digests = set()
    for version in (0, 1, 2):
        proof = asyncio.run(reload(version))
        assert set(proof) == set(Boundary)
        transfer, load, cache = proof[Boundary.TRANSFER], proof[Boundary.LOAD], proof[Boundary.CACHE]
        # the bytes of a `same` version are on the disk already
        assert (transfer["bytes"] == 0) == (version == 2)
        assert load["predicted"] is True
        assert load["checksums_equal"] is True
        assert load["flush"] is True
        if version:
            assert load["changed"] is (version == 1)
        assert (
            load["digest_before"] == load["digest_after"] == read_manifest(store, versions.run, version).weights_digest
        )
        assert engine.label() == str(version)
        if version:
            # the canary was cached under the version before, and not after the flush
            assert cache["cached_tokens_before"] > 0  # type: ignore[operator]
            assert cache["cached_tokens"] == 0
        digests.add(load["engine_checksum"])
    assert len(digests) == 2
    status = agent.status()
    assert (status.state, status.version, status.run, status.ready) == (EngineState.SERVING, 2, versions.run, True)
    assert engine.generate()["meta_info"]["weight_version"] == "2"


def test_prediction_is_what_the_engine_reports(versions: Versions, agent: AgentProcess, engine: EngineProcess) -> None:
    """Catches a prediction that is compared with itself: here it is computed from the trainer's own file."""
    agent.bring(1)
    prediction = predict(versions.folders[1])
    assert prediction is not None
    reported = engine.post("/weights_checker", {"action": "checksum"}).json()["ranks"][0]["checksums"]
    assert prediction.differences(reported) == []
    assert predict(versions.folders[0]).differences(reported) != []  # type: ignore[union-attr]
    assert prediction.differences({**reported, "model.layers.0.mlp.gate_up_proj.weight": "0" * 16}) == [
        "model.layers.0.mlp.gate_up_proj.weight"
    ]


def test_probe_compares_with_the_trainer(store: Store, versions: Versions, agent: AgentProcess) -> None:
    """Boundary 5 as a smoke test: equal log-probabilities pass, those of other weights do not."""
    agent.bring(0)
    tokens = [3, 4, 5, 6]
    logprobs = agent.ask(lambda a: a.probe(Probe(token_ids=[tokens]))).logprobs[0]
    assert len(logprobs) == 3
    manifest = read_manifest(store, versions.run, 0)

    async def probe(expected: list[float]) -> float:
        async with agent.agents() as agents:
            wanted = {"token_ids": [tokens], "logprobs": [expected]}
            records = await probe_all(agents, manifest, probe=wanted, tolerance=1e-3, deadline_s=DEADLINE_S)
        return float(records[0].proof["max_gap"])

    assert asyncio.run(probe(logprobs)) < 1e-5
    with pytest.raises(BadData, match=r"boundary 5 \(cache\).*differ by .* on average"):
        asyncio.run(probe([logprobs[0] + 0.01, *logprobs[1:]]))
    with pytest.raises(BadData, match=r"differ by nan on average"):
        asyncio.run(probe([float("nan"), *logprobs[1:]]))
    with pytest.raises(BadData, match="outside the vocabulary"):
        agent.ask(lambda a: a.probe(Probe(token_ids=[[3, 50]])))


def test_readiness_is_by_declared_version(store: Store, versions: Versions, agent: AgentProcess) -> None:
    """Catches an engine that takes traffic under a version that the run does not declare."""
    agent.bring(0)
    assert agent.ready().status_code == 200
    digest = read_manifest(store, versions.run, 1).weights_digest
    store.put(
        keys.serving(versions.run),
        Serving(run=versions.run, version=1, weights_digest=digest, engines=["e"]).to_bytes(),
    )
    agent.bring(1)
    assert agent.ready().status_code == 200
    agent.bring(0)
    answer = agent.ready()
    assert (answer.status_code, answer.text) == (503, f"serves v0, run '{versions.run}' declares v1")


def test_repeats_do_nothing_twice(versions: Versions, agent: AgentProcess) -> None:
    """Catches a repeated pod that pauses the engine again, or fetches again."""
    first = agent.bring(1)
    prepared = agent.prepare(1)
    assert prepared.repeated
    again = agent.activate(1)
    assert again == first.model_copy(update={"repeated": True})


def metrics_of(agent: AgentProcess) -> dict[str, float]:
    """Samples by name and labels, as Prometheus reads them."""
    families = text_string_to_metric_families(httpx.get(agent.url + "/metrics").text)
    return {sample.name + str(sample.labels or ""): sample.value for family in families for sample in family.samples}


def test_metrics_count_what_happened(versions: Versions, agent: AgentProcess) -> None:
    """Catches a dashboard that shows nothing, or successes only."""
    agent.bring(0)
    before = metrics_of(agent)
    fetched = agent.prepare(1).bytes
    agent.activate(1)
    with pytest.raises(BadData):
        agent.prepare(9)
    after = metrics_of(agent)
    assert (before["colchis_agent_version"], after["colchis_agent_version"], after["colchis_agent_ready"]) == (0, 1, 1)
    grown = {name: value - before.get(name, 0) for name, value in after.items()}
    assert grown["colchis_agent_fetched_bytes_total"] == fetched
    for histogram in ("pause", "load", "proof"):
        assert grown[f"colchis_agent_{histogram}_seconds_count"] == 1
    for call, outcome in (("prepare", "ok"), ("activate", "ok"), ("prepare", "BadData")):
        assert grown["colchis_agent_calls_total" + str({"call": call, "outcome": outcome})] == 1


def test_only_the_token_opens(versions: Versions, agent: AgentProcess) -> None:
    """Catches a route that anybody in the cluster may call."""
    for method, path in [("GET", "/status"), *(("POST", f"/{p}") for p in ("prepare", "verify", "activate", "probe"))]:
        for headers in ({}, {"Authorization": "Bearer wrong"}):
            assert httpx.request(method, agent.url + path, headers=headers, json={}).status_code == 401
    assert httpx.get(agent.url + "/openapi.json").status_code == 401
    assert httpx.get(agent.url + "/live").status_code == 200
    assert httpx.get(agent.url + "/metrics").status_code == 200
    headers = {"Authorization": f"Bearer {TOKEN}"}
    answer = httpx.post(agent.url + "/activate", headers=headers, json={"version": -1, "extra": 1})
    assert (answer.status_code, answer.json()["error"]) == (409, "BadConfig")
    document = httpx.get(agent.url + "/openapi.json", headers=headers).json()
    described = {(method.upper(), path) for path, methods in document["paths"].items() for method in methods}
    assert described == {(r[0], r[1]) for r in ROUTES} | {("GET", r[0]) for r in OPEN_ROUTES}, (
        "docs/agent.md has others"
    )


def test_bad_versions_are_refused_while_the_old_one_serves(
    store: Store, versions: Versions, agent: AgentProcess, engine: EngineProcess, tmp_path: Path
) -> None:
    """Everything that can be wrong with a version, one after the other: none of it reaches the engine."""
    agent.bring(1)
    before = engine.checksum()

    def refused(version: int, match: str) -> None:
        with pytest.raises(BadData, match=match):
            agent.prepare(version)
        assert version not in agent.status().prepared.get(versions.run, [])
        with pytest.raises(BadData, match="not prepared here"):
            agent.activate(version)
        assert (engine.label(), engine.checksum()) == ("1", before)
        assert agent.ready().status_code == 200

    refused(7, "no such object")
    # a byte of an object in the store was changed after the commit
    write_weights(tmp_path / "model.safetensors", arrays_of(versions.config, 5))
    publish_version(store, tmp_path, model=versions.model, version=3, run=versions.run)
    payload = read_manifest(store, versions.run, 3).files[0]
    raw = bytearray(store.get(payload.key).data)
    raw[-5] ^= 1
    store.put(payload.key, bytes(raw))
    refused(3, "is not what was committed")
    store.put(payload.key, bytes(raw[:-8]))
    refused(3, "is not what was committed")
    # weights of another model
    write_weights(tmp_path / "model.safetensors", arrays_of(config_of(vocabulary=51), 0))
    publish_version(store, tmp_path, model=versions.model, version=4, run=versions.run)
    refused(4, "has shape")
    incomplete = arrays_of(versions.config, 2)
    del incomplete["model.layers.1.self_attn.k_proj.bias"]
    write_weights(tmp_path / "model.safetensors", incomplete)
    publish_version(store, tmp_path, model=versions.model, version=5, run=versions.run)
    refused(5, "tensors are missing")
    # a manifest that contradicts itself, and one that was damaged
    document = read_manifest(store, versions.run, 1).model_dump(mode="json") | {"version": 6}
    document["tensors"][0]["shape"] = [1]
    store.put(keys.weights_manifest(versions.run, 6), sealed(document))
    refused(6, "weights_digest")
    store.put(keys.weights_manifest(versions.run, 6), sealed(document).replace(b"6", b"7"))
    refused(6, "the content has sha256")
    assert not list((agent.staging / "versions").rglob("*.filling"))


def test_nan_in_the_store_is_refused(store: Store, versions: Versions, agent: AgentProcess, tmp_path: Path) -> None:
    """Catches an agent that trusts the publisher: the manifest is consistent, the numbers are not finite."""
    arrays = arrays_of(versions.config, 3)
    write_weights(tmp_path / "model.safetensors", arrays)
    publish_version(store, tmp_path, model=versions.model, version=3, run=versions.run)
    good = read_manifest(store, versions.run, 3)
    arrays["model.norm.weight"][0] = np.nan
    write_weights(tmp_path / "model.safetensors", arrays)
    raw = (tmp_path / "model.safetensors").read_bytes()
    payload = store.put_payload("elsewhere/model.safetensors", raw)
    content = arrays["model.norm.weight"].tobytes()
    hashes = {"sha256": hashlib.sha256(content).hexdigest(), "xxh3_128": xxhash.xxh3_128_hexdigest(content)}
    tensors = [
        TensorEntry.model_validate({**t.model_dump(), **(hashes if t.name == "model.norm.weight" else {})})
        for t in good.tensors
    ]
    manifest = WeightsManifest.model_validate(
        {
            **good.model_dump(),
            "tensors": tensors,
            "files": [payload.model_copy(update={"name": "model.safetensors"})],
            "weights_digest": weights_digest(tensors),
        }
    )
    store.put(keys.weights_manifest(versions.run, 3), manifest.to_bytes())
    with pytest.raises(BadData, match=r"'model\.norm\.weight' has 1 infinite or NaN"):
        agent.prepare(3)


@pytest.mark.parametrize("hash_name", ["xxh3_128", "sha256"])
def test_either_hash_is_compared_before_a_version_is_served(
    hash_name: str, store: Store, versions: Versions, agent: AgentProcess, engine: EngineProcess, tmp_path: Path
) -> None:
    """Catches a version of which sha256 was never compared: it arrives by xxh3-128 alone. Of a stacked tensor no checksum of
    the engine would tell."""
    agent.bring(0)
    write_weights(tmp_path / "model.safetensors", arrays_of(versions.config, 3))
    publish_version(store, tmp_path, model=versions.model, version=3, run=versions.run)
    manifest = read_manifest(store, versions.run, 3)
    name = "model.layers.0.self_attn.q_proj.weight"
    tensors = [
        t.model_copy(update={hash_name: getattr(t, hash_name)[::-1]}) if t.name == name else t for t in manifest.tensors
    ]
    changed = manifest.model_copy(update={"tensors": tensors, "weights_digest": weights_digest(tensors)})
    store.put(keys.weights_manifest(versions.run, 3), changed.to_bytes())
    if hash_name == "xxh3_128":
        with pytest.raises(BadData, match=f"'{name}' has other bytes .* xxh3-128"):
            agent.prepare(3)
    else:
        agent.prepare(3)
        with pytest.raises(BadData, match=f"'{name}' has other bytes .* sha256"):
            agent.ask(lambda a: a.verify(Verify(run=versions.run, version=3, deadline_s=DEADLINE_S)))
        agent.prepare(3)
        with pytest.raises(BadData, match=f"'{name}' has other bytes .* sha256"):
            agent.activate(3)  # as for an engine that joins late: no boundary 2 was passed
    assert engine.label() == "0"
    assert agent.status().ready


def test_a_scribbled_buffer_is_not_loaded(versions: Versions, agent: AgentProcess, engine: EngineProcess) -> None:
    """Boundary 2: catches a load of bytes that are not the ones that were verified."""
    agent.bring(0)
    before = engine.checksum()
    agent.prepare(1)
    path = agent.staged(1) / "model.safetensors"
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)
    with pytest.raises(BadData, match="other bytes than the manifest says"):
        agent.activate(1)
    assert (engine.label(), engine.checksum()) == ("0", before)
    assert agent.ready().status_code == 200
    assert not agent.prepare(1).repeated  # fetched again
    path.write_bytes(raw)
    with pytest.raises(BadData, match="other bytes than the manifest says"):
        agent.ask(lambda a: a.verify(Verify(run=agent.run, version=1)))


def test_kind_must_be_the_commits(versions: Versions, agent: AgentProcess, engine: EngineProcess) -> None:
    agent.bring(0)
    agent.prepare(1)
    with pytest.raises(BadData, match="of kind 'full'"):
        agent.activate(1, "same")
    assert engine.label() == "0"
    assert agent.ready().status_code == 200


def test_old_versions_leave_the_disk(versions: Versions, store: Store, agent: AgentProcess) -> None:
    """Catches a disk that fills: the served version, the one before and the next stay."""
    publish_version(store, versions.folders[0], model=versions.model, version=3, run=versions.run)
    for version in range(4):
        agent.bring(version, "same" if version == 2 else "full")
    staged = sorted(p.name for p in agent.staged(0).parent.iterdir())
    assert staged == ["v00000001", "v00000002", "v00000003"]


def test_agents_are_named_when_they_fail(versions: Versions, store: Store, agent: AgentProcess) -> None:
    """All or none: one agent that is gone fails the boundary, and the error says which."""
    manifest = read_manifest(store, versions.run, 0)
    gone = "http://127.0.0.1:9"

    async def prepare(entries: list[str], token: str = TOKEN) -> None:
        async with Agents(entries, token) as agents:
            await prepare_all(agents, manifest, deadline_s=1.0)

    with pytest.raises(PeerUnavailable, match=rf"boundary 3 \(transfer\) of weights v0 failed at 1 of 2.*{gone}"):
        asyncio.run(prepare([agent.url, gone]))
    with pytest.raises(BadConfig, match="bearer token"):
        asyncio.run(prepare([agent.url], "wrong"))
    with pytest.raises(PeerUnavailable, match="has no address"):
        asyncio.run(prepare(["dns://no-such-name.invalid:9000"]))
    with pytest.raises(BadConfig, match="expected http"):
        Agents(["127.0.0.1:9000"], TOKEN)
