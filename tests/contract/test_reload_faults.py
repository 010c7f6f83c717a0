"""Bad days of a reload through the agent, on either engine: what is refused, and who goes on serving what."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from colchis.components.errors import BadConfig, BadData, ColchisError, PeerUnavailable
from colchis.components.records.weights import WeightsManifest
from colchis.components.rollout import Wanted
from colchis.components.store import keys, read_input
from colchis.components.store.inputs import InputManifest
from colchis.components.weights import Agents, activate_all, prepare_all, read_manifest
from colchis.components.weights.manifest import build
from colchis.components.weights.protocol import Activate, EngineState
from colchis.components.weights.publish import publish
from tests.agent.conftest import DEADLINE_S, TOKEN, AgentProcess
from tests.agent.test_faults import eventually
from tests.contract.replica import LOAD, TOKENS, Replica, holding
from tests.faults import Fault
from tests.run.test_wrong_weights import Tensors, another_shape, join, not_a_number, parse, without_a_tensor

ROOT = Path(__file__).parents[2]
CLOCK = ROOT / "tests/run/clock"
DAY_S = 86400


def tensors_of(folder: Path) -> Tensors:
    return parse((folder / "model.safetensors").read_bytes())


def scaled(replica: Replica, factor: float, folder: Path) -> Path:
    """A good version that nobody published: v1 with other numbers."""
    import numpy as np

    shutil.copytree(replica.versions.folders[1], folder)
    tensors = tensors_of(folder)
    for tensor in tensors.values():
        tensor.data = (np.frombuffer(tensor.data, "<f4") * np.float32(factor)).tobytes()
    (folder / "model.safetensors").write_bytes(join(tensors))
    return folder


# What may not be served


def changed(change: Callable[[Tensors], None]) -> Callable[[Replica, dict[str, Path]], None]:
    """v2 as v1, but for a mistake in its tensors."""

    def commit(replica: Replica, models: dict[str, Path]) -> None:
        tensors = tensors_of(models["qwen2_b"])
        change(tensors)
        replica.versions.publish_unchecked(2, tensors)

    return commit


def another_model(name: str) -> Callable[[Replica, dict[str, Path]], None]:
    def commit(replica: Replica, models: dict[str, Path]) -> None:
        replica.versions.publish_unchecked(2, tensors_of(models[name]))

    return commit


def named(name: str) -> Callable[[Replica, dict[str, Path]], None]:
    def commit(replica: Replica, models: dict[str, Path]) -> None:
        replica.versions.publish_unchecked(2, tensors_of(models["qwen2_b"]), name=name)

    return commit


def cut(replica: Replica, models: dict[str, Path]) -> None:
    """A file that was cut before it was committed: its checksums are right."""
    tensors = tensors_of(models["qwen2_b"])
    header_bytes = 2000
    largest = max(len(t.data) for t in tensors.values())
    body = join(tensors)[: -largest // 2]
    assert len(body) > header_bytes
    replica.versions.publish_unchecked(2, tensors, body=body)


def stored(change: Callable[[bytes], bytes]) -> Callable[[Replica, dict[str, Path]], None]:
    """A good v2 whose object was changed in the store after its commit."""

    def commit(replica: Replica, models: dict[str, Path]) -> None:
        manifest = replica.versions.publish_unchecked(2, tensors_of(models["qwen2_b"]))
        key = manifest.files[0].key
        replica.store.put(key, change(replica.store.get(key).data))

    return commit


def one_more(tensors: Tensors) -> None:
    tensors["model.layers.9.mlp.up_proj.weight"] = tensors["model.layers.0.mlp.up_proj.weight"]


def nothing(replica: Replica, models: dict[str, Path]) -> None:
    """Nobody published v2."""


ESCAPE = "colchis-escaped.safetensors"
BAD = {
    "truncated file": (cut, "but its tensors have"),
    "truncated object": (stored(lambda data: data[:-8]), "is not what was committed"),
    "grown object": (stored(lambda data: data + bytes(8 << 20)), "is not what was committed"),
    "flipped bit": (stored(lambda data: data[:-1] + bytes([data[-1] ^ 1])), "is not what was committed"),
    "wrong shape": (changed(another_shape), "has shape"),
    "missing tensor": (changed(without_a_tensor), r"1 tensors are missing, first 'model\.norm\.weight'"),
    "surplus tensor": (changed(one_more), "do not belong to the model"),
    "NaN": (changed(not_a_number), r"'model\.norm\.weight' has 1 infinite or NaN"),
    "other architecture": (another_model("llama"), "do not belong to the model|ties the head"),
    "other names": (another_model("gpt2"), "tensors are missing"),
    "path traversal": (named(f"../../../../{ESCAPE}"), "is not a plain NAME"),
    "absolute path": (named(f"/tmp/{ESCAPE}"), "is not a plain NAME"),
    "no manifest": (nothing, "no such object"),
}


@pytest.mark.parametrize(("commit", "match"), BAD.values(), ids=BAD.keys())
def test_what_may_not_be_served_never_reaches_the_engine(
    replica: Replica, models: dict[str, Path], commit: Callable[[Replica, dict[str, Path]], None], match: str
) -> None:
    """Fault: weights that end the engine (a cut file, a wrong shape), that it takes without a word (a missing tensor, NaN,
    another model's names), or a manifest that chooses where the agent writes."""
    commit(replica, models)
    with pytest.raises(BadData, match=match):
        replica.agent.prepare(2)
    with pytest.raises(BadData, match="not prepared here"):
        replica.agent.activate(2)
    assert replica.agent.status().prepared[replica.versions.run] == [0]
    assert not list((replica.agent.staging / "versions" / replica.versions.run).glob("v00000002*"))
    assert not [p for p in (*replica.agent.folder.parents, Path("/tmp")) if (p / ESCAPE).exists()]
    replica.serves(0)


@pytest.mark.parametrize("name", ["..", "to\\kenizer.json", "nul\0byte"])
def test_a_model_folder_that_leads_elsewhere_is_refused(replica: Replica, name: str) -> None:
    """Fault: configuration and tokenizer come by a manifest as well, whose names are believed."""
    good = read_input(replica.store, replica.versions.model)
    lie = InputManifest(files=[*good.files, good.files[0].model_copy(update={"name": name})])
    replica.store.put(keys.input_manifest(lie.digest), lie.to_bytes())
    replica.versions.model = lie.digest
    replica.versions.publish_unchecked(2, tensors_of(replica.versions.folders[1]))
    with pytest.raises(ColchisError, match="expected a relative path of plain names"):
        replica.agent.prepare(2)
    replica.serves(0)


@contextmanager
def another_agent(
    replica: Replica, folder: Path, *, more: Sequence[str] = (), environment: Mapping[str, str] | None = None
) -> Iterator[AgentProcess]:
    """An agent beside the first, with a buffer of its own. It reaches the store through the proxy."""
    running = AgentProcess(
        folder, replica.agent.engine_url, replica.agent.store, "engine-1", more=more, environment=environment
    )
    running.run = replica.versions.run
    try:
        yield running
    finally:
        running.child.stop()


def test_a_version_larger_than_the_room_is_refused(replica: Replica, tmp_path: Path) -> None:
    """Fault: a disk that is filled until the engine beside it cannot write, or a load of half a file."""
    file_bytes = read_manifest(replica.store, replica.versions.run, 1).file_bytes()
    with another_agent(replica, tmp_path / "small", more=["--budget-bytes", str(file_bytes * 3 // 2)]) as small:
        small.bring(0)
        with pytest.raises(BadConfig, match=rf"v1 need {file_bytes} bytes, \d+ are free for staging.*three versions"):
            small.prepare(1)
        assert not list(small.staging.rglob("*.filling"))
        assert (small.status().version, small.ready().status_code, replica.label) == (0, 200, "0")


def test_what_is_in_the_way_of_the_buffer_is_named(replica: Replica) -> None:
    """Fault: an agent whose disk refuses, and a stage that says only that the agent answered something strange."""
    folder = replica.agent.staging / "versions" / replica.versions.run
    aside = folder.with_name("aside")
    folder.rename(aside)
    folder.write_bytes(b"a file where a folder should be")
    try:
        with pytest.raises(BadConfig, match=f"cannot use it: .*{folder}"):
            replica.agent.prepare(1)
    finally:
        folder.unlink()
        aside.rename(folder)
    assert replica.agent.bring(1).checksums_equal


def test_links_in_the_buffer_are_not_followed(replica: Replica, tmp_path: Path) -> None:
    """Fault: a link in the buffer through which the agent writes, empties or believes what is somebody else's."""
    outside = tmp_path / "outside"
    shutil.copytree(replica.versions.folders[1], outside)
    good = (outside / "model.safetensors").read_bytes()
    before = sorted(p.name for p in outside.iterdir())
    for version in (2, 3):
        replica.versions.publish(version, replica.versions.folders[1])
    half = [replica.agent.staged(version).with_suffix(".filling") for version in (1, 2)]
    half[0].mkdir()
    (half[0] / "model.safetensors").symlink_to(outside / "model.safetensors")
    (half[0] / "folder").mkdir()
    half[1].symlink_to(outside)
    replica.agent.staged(3).symlink_to(outside)
    for version in (1, 2, 3):
        replica.agent.prepare(version)
        staged = replica.agent.staged(version)
        assert not [p for p in (staged, *staged.iterdir()) if p.is_symlink()]
        assert (staged / "model.safetensors").read_bytes() == good
    assert sorted(p.name for p in outside.iterdir()) == before
    assert (outside / "model.safetensors").read_bytes() == good

    file = replica.agent.staged(3) / "model.safetensors"
    file.unlink()
    file.symlink_to(replica.versions.folders[0] / "model.safetensors")
    with pytest.raises(BadData, match="other bytes than the manifest says"):
        replica.agent.activate(3)
    replica.serves(0)


def test_a_damaged_copy_is_fetched_again(replica: Replica) -> None:
    """Fault: a disk that lost a block, after which the version can never be prepared: every try finds the damage."""
    replica.agent.prepare(1)
    file = replica.agent.staged(1) / "model.safetensors"
    raw = bytearray(file.read_bytes())
    raw[-1] ^= 1
    file.write_bytes(raw)
    again = replica.agent.prepare(1)
    assert (again.repeated, again.bytes) == (False, len(raw))
    assert replica.agent.activate(1).checksums_equal
    replica.serves(1)


# Publishers and the store


def test_two_publishers_of_one_version(replica: Replica, tmp_path: Path) -> None:
    """Fault: two histories of one run, of which one replica serves the one and another the other."""
    run, store = replica.versions.run, replica.store
    folders = [scaled(replica, 1 + number / 8, tmp_path / str(number)) for number in range(4)]
    manifests: list[WeightsManifest] = []
    for number, folder in enumerate(folders):
        path = folder / "model.safetensors"
        payload = store.upload(f"{keys.iteration_prefix(run, 2)}train/attempts/{number}/weights/{path.name}", path)
        parts = {"run": run, "version": 2, "base_version": 1, "step": 2, "model": replica.versions.model}
        manifests.append(build(**parts, kind="full", files=[(payload, path)]))  # type: ignore[arg-type]

    def try_to(number: int) -> bool:
        try:
            publish(store, manifests[number])
        except BadData as refusal:
            assert "is published with other content" in str(refusal)  # noqa: PT017
            return False
        return True

    with ThreadPoolExecutor(4) as pool:
        won = list(pool.map(try_to, range(4)))
    assert sum(won) == 1
    winner = won.index(True)
    assert try_to(winner), "the winner may say it again"
    replica.versions.folders[2] = folders[winner]
    assert replica.agent.bring(2).weights_digest == manifests[winner].weights_digest
    replica.serves(2)


PUBLISHER = """
import sys
from pathlib import Path
from colchis.components.store import Store, StoreSettings
from tests.weights.models import publish_version
publish_version(Store(StoreSettings.from_environment()), Path(sys.argv[1]), model=sys.argv[2], version=2, run=sys.argv[3])
"""


def test_a_publisher_dies_between_payload_and_manifest(replica: Replica, tmp_path: Path) -> None:
    """Fault: half a version that is served, or one that is never found because it was asked for too early."""
    run, folder = replica.versions.run, scaled(replica, 1.5, tmp_path / "v2")
    with holding(replica.store_proxy, "PUT", "weights/v00000002/manifest.json") as hold:
        environment = {**os.environ, **replica.agent.store.to_environment()}
        environment["PYTHONPATH"] = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
        argv = [sys.executable, "-c", PUBLISHER, str(folder), replica.versions.model, run]
        publisher = subprocess.Popen(argv, env=environment)
        hold.wait()
        replica.store_proxy.add(Fault("PUT", "weights/v00000002/manifest.json", "reset"))
        publisher.kill()
        publisher.wait()
        assert list(replica.store.list(keys.iteration_prefix(run, 2))), "the payload is there"
        with pytest.raises(BadData, match="no such object"):
            replica.agent.prepare(2)
        replica.serves(0)
    time.sleep(1.0)  # what the proxy held may arrive after all, in its own time
    replica.store.delete(keys.weights_manifest(run, 2))
    replica.versions.publish(2, folder)
    assert replica.agent.bring(2).checksums_equal
    replica.serves(2)


def test_the_store_is_slow_for_one_replica(replica: Replica, tmp_path: Path) -> None:
    """Fault: a reload that goes on without the slow one, stops the others meanwhile, or hides which one it waits for."""
    run, store = replica.versions.run, replica.store
    tensors = tensors_of(replica.versions.folders[1])
    names, files = sorted(tensors), []
    for number in range(3):
        path = tmp_path / f"model-{number + 1:05d}-of-00003.safetensors"
        path.write_bytes(join({name: tensors[name] for name in names[number::3]}))
        key = f"{keys.iteration_prefix(run, 2)}train/attempts/x/weights/{path.name}"
        files.append((store.upload(key, path), path))
    parts = {"run": run, "version": 2, "base_version": 1, "step": 2, "model": replica.versions.model}
    manifest = publish(store, build(**parts, kind="full", files=files))  # type: ignore[arg-type]
    with another_agent(replica, tmp_path / "slow") as slow:
        urls = [replica.agent.url, slow.url]
        # the first agent is not behind the slow way: it is asked before, and has what it needs
        replica.agent.prepare(2)
        replica.store_proxy.add(Fault("GET", r"train/attempts/x/weights/", "delay", seconds=0.4, times=1000))

        async def prepare(deadline_s: float) -> list[object]:
            async with Agents(urls, TOKEN) as agents:
                return list(await prepare_all(agents, manifest, deadline_s=deadline_s))

        with ThreadPoolExecutor(1) as pool:
            slowly = pool.submit(lambda: asyncio.run(prepare(0.7)))
            while not slowly.done():
                answer = replica.engine.sample(TOKENS, tokens=4)
                assert answer["meta_info"]["weight_version"] == "0"
            with pytest.raises(PeerUnavailable, match=rf"boundary 3 \(transfer\).* failed at 1 of 2 .*{slow.url}") as e:
                slowly.result()
        assert replica.agent.url not in str(e.value)
        replica.serves(0)
        replica.store_proxy.clear()
        assert len(asyncio.run(prepare(DEADLINE_S))) == 2
        assert slow.status().prepared == {run: [2]}


def test_one_replica_of_several_does_not_come_through_the_load(replica: Replica) -> None:
    """Fault: a version that takes traffic on one replica while another has not got it (a router that updates one worker,
    sglang#4282); nothing is declared, so the one that has it is not ready."""
    replica.versions.declare(0)
    replica.agent.prepare(1)
    manifest = read_manifest(replica.store, replica.versions.run, 1)
    gone = "http://127.0.0.1:9"

    async def activate(urls: list[str], deadline_s: float) -> list[object]:
        async with Agents(urls, TOKEN) as agents:
            return list(await activate_all(agents, manifest, deadline_s=deadline_s))

    with pytest.raises(PeerUnavailable, match=rf"boundary 4 \(load\).* failed at 1 of 2 engines: {gone}"):
        asyncio.run(activate([replica.agent.url, gone], 2.0))
    answer = replica.agent.ready()
    assert (answer.status_code, answer.text) == (503, f"serves v1, run '{replica.versions.run}' declares v0")
    assert asyncio.run(activate([replica.agent.url], DEADLINE_S))
    replica.versions.declare(1)
    eventually(lambda: replica.agent.ready().status_code == 200, "what is declared is ready")
    replica.serves(1)


# Pauses


def test_a_pause_ends_though_its_client_is_killed(replica: Replica) -> None:
    """Fault: a stage that is killed while the engine is paused on its behalf, and an engine that stays so
    (AReaL#1181)."""
    replica.agent.prepare(1)
    body = Activate(run=replica.versions.run, version=1, kind="full", deadline_s=DEADLINE_S).model_dump_json()
    client = (
        "import sys, urllib.request\n"
        "headers = {'Authorization': 'Bearer ' + sys.argv[3], 'Content-Type': 'application/json'}\n"
        "urllib.request.urlopen(urllib.request.Request(sys.argv[1], sys.argv[2].encode(), headers))\n"
    )
    with holding(replica.engine_proxy, "POST", LOAD) as hold:
        process = subprocess.Popen([sys.executable, "-c", client, f"{replica.agent.url}/activate", body, TOKEN])
        hold.wait()
        assert replica.paused
        assert replica.label == "unproven-1"
        process.kill()
        process.wait()
    eventually(lambda: not replica.paused, "the engine continues")
    eventually(lambda: replica.agent.status().version == 1, "what was asked for is done")
    replica.serves(1)


def test_the_agent_is_killed_in_the_pause(replica: Replica) -> None:
    """Fault: a pause that outlives the agent, and a load that was under way and is believed."""
    replica.agent.prepare(1)
    with holding(replica.engine_proxy, "POST", LOAD) as hold, ThreadPoolExecutor(1) as pool:
        activation = pool.submit(replica.agent.activate, 1)
        hold.wait()
        assert replica.paused
        assert replica.label == "unproven-1"
        replica.agent.kill()
        with pytest.raises(PeerUnavailable):
            activation.result()
        eventually(lambda: not replica.paused, "the watchdog continues the engine")
    # whether the held request still arrives depends on who notices the dead agent first: so one like it does
    live = replica.agent.staging / "live"
    assert replica.engine.update(live, weight_version="unproven-1", flush_cache=True).status_code == 200
    assert replica.holds(1)
    assert Wanted.at_least(0).read(replica.label) is None
    replica.agent.start()
    status = replica.agent.status()
    assert (status.version, status.ready, replica.agent.ready().status_code) == (None, False, 503)
    assert not (replica.agent.staging / "pause.json").exists()
    assert replica.agent.activate(1).checksums_equal
    replica.serves(1)


def test_the_agent_is_terminated_in_the_pause(replica: Replica) -> None:
    """Fault: a rolling update of the agents that leaves engines paused."""
    replica.agent.prepare(1)
    with holding(replica.engine_proxy, "POST", LOAD) as hold, ThreadPoolExecutor(1) as pool:
        activation = pool.submit(replica.agent.activate, 1)
        hold.wait()
        replica.agent.child.process.send_signal(signal.SIGTERM)
        eventually(lambda: not replica.paused, "the agent continues the engine at the signal")
        hold.open.set()
        with pytest.raises(ColchisError):
            activation.result()
    assert replica.agent.child.process.wait(DEADLINE_S) == 143
    assert not replica.paused
    assert Wanted.at_least(0).read(replica.label) is None
    replica.agent.start()
    assert replica.agent.activate(1).checksums_equal
    replica.serves(1)


def test_agent_and_watchdog_die_in_the_pause(replica: Replica) -> None:
    """Fault: a container that is killed takes both along, and nobody is left who knows of the pause."""
    replica.agent.kill()
    (replica.agent.staging / "pause.json").write_text("{}")
    assert replica.engine.client.post("/pause_generation", json={"mode": "retract"}).status_code == 200
    assert replica.paused
    replica.agent.start()
    eventually(lambda: not replica.paused, "the next agent continues the engine")
    replica.serves(0)


def test_a_pause_that_somebody_else_forgot(replica: Replica) -> None:
    """Fault: a replica that is ready and answers nothing: requests are sent to it until their deadlines pass. A client
    paused the engine and was killed."""
    assert replica.engine.client.post("/pause_generation", json={"mode": "retract"}).status_code == 200
    eventually(lambda: replica.agent.ready().status_code == 503, "a paused engine is not ready")
    status = replica.agent.status()
    assert (status.version, status.ready) == (0, False)
    assert "somebody else paused it" in str(status.reason)
    assert replica.engine.client.post("/continue_generation", json={}).status_code == 200
    eventually(lambda: replica.agent.ready().status_code == 200, "it is ready again")
    assert replica.engine.client.post("/pause_generation", json={"mode": "abort"}).status_code == 200
    assert replica.agent.bring(1).checksums_equal
    replica.serves(1)


def test_somebody_else_continues_in_the_pause(replica: Replica) -> None:
    """Fault: tokens that are drawn while weights change, under the name of a version (dynamo#13823)."""
    replica.agent.prepare(1)
    with holding(replica.engine_proxy, "POST", LOAD) as hold, ThreadPoolExecutor(1) as pool:
        activation = pool.submit(replica.agent.activate, 1)
        hold.wait()
        assert replica.engine.client.post("/continue_generation", json={}).status_code == 200
        drawn = replica.engine.sample(TOKENS, tokens=3)["meta_info"]
        assert {span["version"] for span in drawn["weight_versions"]} == {"unproven-1"}
        assert Wanted.at_least(0).read(drawn["weight_version"]) is None
        hold.open.set()
        assert activation.result().checksums_equal
    replica.serves(1)


# Loads that go wrong


def test_a_load_of_other_weights_is_not_believed(replica: Replica, tmp_path: Path) -> None:
    """Fault: an engine that says success and holds something else (sglang#9663, verl#7083): here its files were changed
    between the check and the load."""
    other = (scaled(replica, 1.25, tmp_path / "other") / "model.safetensors").read_bytes()
    replica.agent.prepare(1)
    with holding(replica.engine_proxy, "POST", LOAD) as hold, ThreadPoolExecutor(1) as pool:
        activation = pool.submit(replica.agent.activate, 1)
        hold.wait()
        file = replica.agent.staged(1) / "model.safetensors"
        file.unlink()
        file.write_bytes(other)
        hold.open.set()
        with pytest.raises(BadData, match=r"\d+ of the engine's tensors are not those of weights v1"):
            activation.result()
    status = replica.agent.status()
    assert (status.state, status.version, status.ready) == (EngineState.FAILED, None, False)
    assert not replica.paused
    drawn = replica.engine.sample(TOKENS, tokens=3)["meta_info"]
    assert Wanted.at_least(0).read(drawn["weight_version"]) is None
    assert replica.agent.bring(1).checksums_equal
    replica.serves(1)


def test_a_refused_load_keeps_the_old_version_by_proof(replica: Replica) -> None:
    """Fault: an engine that is lost to the run because it refused what it could not read; here its files went away."""
    replica.agent.prepare(1)
    with holding(replica.engine_proxy, "POST", LOAD) as hold, ThreadPoolExecutor(1) as pool:
        activation = pool.submit(replica.agent.activate, 1)
        hold.wait()
        (replica.agent.staging / "live").unlink()
        hold.open.set()
        with pytest.raises(BadData, match=r"refused|answers 400"):
            activation.result()
    status = replica.agent.status()
    assert (status.state, status.version, status.ready) == (EngineState.FAILED, 0, False)
    assert status.reason
    assert (replica.label, replica.holds(0), replica.paused) == ("0", True, False)
    assert replica.agent.activate(1).checksums_equal
    replica.serves(1)


# Clocks


def test_clocks_that_differ_and_jump(replica: Replica, tmp_path: Path) -> None:
    """Fault: a lease, a proof or a deadline that goes by the wall clock of one pod. The agent's is a day ahead, and jumps
    two days back while the engine is paused."""
    clock = tmp_path / "clock"
    clock.write_text(str(DAY_S))
    path = os.pathsep.join(filter(None, (str(CLOCK), os.environ.get("PYTHONPATH"))))
    with another_agent(replica, tmp_path / "a", environment={"PYTHONPATH": path, "CLOCK_JUMP": str(clock)}) as ahead:
        assert ahead.bring(0).checksums_equal
        ahead.prepare(1)
        with holding(replica.engine_proxy, "POST", LOAD) as hold, ThreadPoolExecutor(1) as pool:
            activation = pool.submit(ahead.activate, 1)
            hold.wait()
            for jump in (-DAY_S, 2 * DAY_S):
                clock.write_text(str(jump))
                assert replica.paused
                left_s = ahead.status().pause_lease_s
                assert left_s is not None
                assert 0 < left_s < 2 * DEADLINE_S
            hold.open.set()
            proof = activation.result()
        assert (proof.checksums_equal, proof.pause_s < DEADLINE_S, proof.load_s >= 0) == (True, True, True)
        clock.write_text(str(-DAY_S))
        ahead.kill()
        ahead.start()
        assert (ahead.status().version, ahead.ready().status_code) == (1, 200)
