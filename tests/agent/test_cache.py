"""One fetch for all agents of a node, and nothing believed that lies in the folder they share."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from colchis.components.agent.cache import NodeCache
from colchis.components.agent.staging import Staging
from colchis.components.errors import BadConfig, BadData, PeerUnavailable
from colchis.components.store import Payload, Store
from colchis.components.weights.deadline import Deadline
from colchis.components.weights.publish import read_manifest
from tests.agent.conftest import AgentProcess, EngineProcess, Versions
from tests.disks import fill, small_disk
from tests.faults import Fault, FaultProxy
from tests.weights.models import RUN


def uploaded(store: Store, folder: Path, name: str, content: bytes) -> Payload:
    (folder / "source").write_bytes(content)
    return store.upload(f"runs/r/{name}", folder / "source")


def staged(folder: Path, cache: Path, store: Store, version: int = 1) -> Path:
    """A version in the staging folder of one agent of the node."""
    staging = Staging(folder, cache=NodeCache(cache))
    try:
        return staging.fill(store, RUN, version, set(), Deadline(30))[0].folder / "model.safetensors"
    finally:
        staging.close()


def test_agents_of_a_node_fetch_an_object_once(
    versions: Versions, through: Store, proxy: FaultProxy, tmp_path: Path
) -> None:
    """Catches a cache that is filled by each, one after the other or at the same time, and one that is a copy more."""
    with ThreadPoolExecutor(3) as pool:
        files = list(pool.map(lambda n: staged(tmp_path / f"agent-{n}", tmp_path / "cache", through), range(3)))
    (payload,) = read_manifest(through, RUN, 1).files
    assert proxy.count("GET", payload.key) == 1
    assert len({file.read_bytes() for file in files}) == 1
    assert len({file.stat().st_ino for file in files}) == 1
    before = [file.stat().st_mtime_ns for file in files]
    staged(tmp_path / "later", tmp_path / "cache", through)
    assert [file.stat().st_mtime_ns for file in files] == before, "agents would read again what they had verified"


def test_a_damaged_object_is_found_and_dropped(versions: Versions, store: Store, tmp_path: Path) -> None:
    """Catches belief in a folder that others can write: the staged copy is read back, and the next try is a fetch."""
    whole = staged(tmp_path / "one", tmp_path / "cache", store).read_bytes()
    (entry,) = (p for p in (tmp_path / "cache").iterdir() if p.is_file() and p.read_bytes() == whole)
    entry.chmod(0o644)
    entry.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(BadData, match="other bytes than the manifest says"):
        staged(tmp_path / "two", tmp_path / "cache", store)
    assert staged(tmp_path / "two", tmp_path / "cache", store).read_bytes() == whole


def test_a_fetch_that_broke_off_leaves_nothing_that_is_believed(
    versions: Versions, through: Store, proxy: FaultProxy, tmp_path: Path
) -> None:
    """Catches half an object under its whole name, and parts that stay for ever."""
    proxy.add(Fault("GET", "model.safetensors|/weights/", "truncate", times=10_000))
    short = Store(through.settings, deadline_s=2.0)
    with pytest.raises(PeerUnavailable):
        staged(tmp_path / "one", tmp_path / "cache", short)
    proxy.clear()
    assert staged(tmp_path / "one", tmp_path / "cache", through).exists()
    assert {p.suffix for p in (tmp_path / "cache").iterdir() if p.is_file()} == {""}


def test_what_a_killed_agent_left_is_removed(
    versions: Versions, store: Store, through: Store, proxy: FaultProxy, engine: EngineProcess, tmp_path: Path
) -> None:
    """Catches a folder that fills up with parts of objects that nobody asks for again."""
    (payload,) = read_manifest(through, RUN, 1).files
    folder = tmp_path / "cache"
    agent = AgentProcess(tmp_path / "agent", engine.url, through.settings, more=["--cache", str(folder)])
    proxy.add(Fault("GET", payload.key, "delay", times=100, before=agent.kill))
    with pytest.raises(PeerUnavailable):
        agent.prepare(1)
    assert [p.suffix for p in folder.iterdir() if p.is_file()] == [".part"]
    NodeCache(folder).download(store, uploaded(store, tmp_path, "x", b"x"), tmp_path / "target", Deadline(5))
    assert [p.suffix for p in folder.iterdir() if p.is_file()] == [""]


def test_whoever_waits_for_another_agent_waits_for_its_own_deadline(
    versions: Versions, store: Store, through: Store, proxy: FaultProxy, tmp_path: Path
) -> None:
    """Catches a slow peer that holds up every agent of its node."""
    payload = uploaded(store, tmp_path, "x", b"x" * 1000)
    asked = threading.Event()
    proxy.add(Fault("GET", "runs/r/x", "delay", seconds=3.0, times=100, before=asked.set))
    cache = NodeCache(tmp_path / "cache")
    slow = threading.Thread(target=lambda: cache.download(through, payload, tmp_path / "one", Deadline(30)))
    slow.start()
    assert asked.wait(10)
    with pytest.raises(PeerUnavailable, match="another agent of this node"):
        cache.download(store, payload, tmp_path / "two", Deadline(0.2))
    slow.join()
    assert cache.download(store, payload, tmp_path / "two", Deadline(5)).reused
    assert (tmp_path / "two").read_bytes() == b"x" * 1000


def test_the_least_used_objects_make_room(store: Store, tmp_path: Path) -> None:
    """Catches a disk that fills up, and an object larger than the cache that stops a reload."""
    payloads = [uploaded(store, tmp_path, f"object-{n}", bytes([n]) * 1000) for n in range(4)]
    cache = NodeCache(tmp_path / "cache", budget_bytes=2500)
    for n in (0, 1):
        cache.download(store, payloads[n], tmp_path / str(n), Deadline(5))
    assert cache.download(store, payloads[0], tmp_path / "again", Deadline(5)).reused
    cache.download(store, payloads[2], tmp_path / "2", Deadline(5))
    assert [cache.download(store, payloads[n], tmp_path / "x", Deadline(5)).reused for n in (0, 2)] == [True, True]
    assert not cache.download(store, payloads[1], tmp_path / "x", Deadline(5)).reused
    large = uploaded(store, tmp_path, "large-object", os.urandom(5000))
    assert not cache.download(store, large, tmp_path / "large", Deadline(5)).reused
    assert cache.download(store, payloads[1], tmp_path / "x", Deadline(5)).reused, "it made room for what never fits"
    assert (tmp_path / "large").stat().st_size == 5000
    assert (tmp_path / "0").read_bytes() == bytes([0]) * 1000, "what was linked stays when the cache lets go"


def test_agents_that_are_started_with_it_fetch_once_and_serve(
    versions: Versions, through: Store, proxy: FaultProxy, engine: EngineProcess, tmp_path: Path
) -> None:
    """Catches an option that goes nowhere; an agent that serves what the other one fetched without reading it back."""
    (payload,) = read_manifest(through, RUN, 1).files
    more = ["--cache", str(tmp_path / "cache")]
    agents = [AgentProcess(tmp_path / f"agent-{n}", engine.url, through.settings, more=more) for n in range(2)]
    try:
        fetched = [agent.prepare(1) for agent in agents]
        assert [(p.bytes, [o.reused for o in p.objects]) for p in fetched] == [(payload.bytes, [False]), (0, [True])]
        assert proxy.count("GET", payload.key) == 1
        proof = agents[1].activate(1)
        assert (proof.version, proof.digest_before) == (1, read_manifest(through, RUN, 1).weights_digest)
    finally:
        for agent in agents:
            agent.child.stop()


@pytest.mark.parametrize("taken", [".", "locks"])
def test_a_folder_may_be_taken_away(store: Store, tmp_path: Path, taken: str) -> None:
    """Catches a reload that fails with the folder that is to make it shorter, and a cache that is none from then on."""
    payload = uploaded(store, tmp_path, "x", b"x" * 1000)
    cache = NodeCache(tmp_path / "cache")
    cache.download(store, payload, tmp_path / "one", Deadline(5))
    shutil.rmtree(tmp_path / "cache" / taken)
    cache.download(store, payload, tmp_path / "two", Deadline(5))
    assert cache.download(store, payload, tmp_path / "three", Deadline(5)).reused
    assert [(tmp_path / name).read_bytes() for name in ("two", "three")] == [b"x" * 1000] * 2


def test_a_folder_that_fails_is_fetched_past(store: Store, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Catches a reload that fails with its cache."""
    payload = uploaded(store, tmp_path, "x", b"x" * 1000)
    cache = NodeCache(tmp_path / "cache")
    shutil.rmtree(tmp_path / "cache")
    (tmp_path / "cache").write_text("no folder any more")
    assert cache.download(store, payload, tmp_path / "target", Deadline(5)).bytes == 1000
    assert "fetched past the cache of this node" in caplog.text


def test_a_disk_that_others_fill(store: Store, through: Store, proxy: FaultProxy, tmp_path: Path) -> None:
    """Catches a budget that is more than the disk has, before a fetch and in the middle of one."""
    first, second, third = (uploaded(store, tmp_path, name, os.urandom(2 << 20)) for name in "abc")
    with small_disk(tmp_path / "disk", "8m"):
        cache = NodeCache(tmp_path / "disk", budget_bytes=1 << 30)
        cache.download(store, first, tmp_path / "target", Deadline(5))
        others = tmp_path / "disk" / "locks" / "others"
        fill(others, left_bytes=2 << 20)
        cache.download(store, second, tmp_path / "target", Deadline(5))
        assert cache.download(store, second, tmp_path / "again", Deadline(5)).reused, "the older one made room"
        others.write_bytes(b"")
        more = tmp_path / "disk" / "locks" / "more"
        proxy.add(Fault("GET", third.key, "delay", before=lambda: fill(more, left_bytes=1 << 16)))
        past = cache.download(through, third, tmp_path / "target", Deadline(5))
        assert (past.bytes, past.reused) == (2 << 20, False)
        assert proxy.count("GET", third.key) >= 2, "the disk was not full while it was fetched"
        assert (tmp_path / "target").stat().st_size == 2 << 20


def test_a_folder_that_cannot_be_made_ends_the_agent(tmp_path: Path, store: Store) -> None:
    """Catches a pod that runs without its cache, or ends with a traceback."""
    (tmp_path / "file").touch()
    with pytest.raises(BadConfig, match="cache of the node cannot be written by user"):
        NodeCache(tmp_path / "file" / "cache")
    agent = [sys.executable, "-m", "colchis.components", "agent", "--engine-url=http://127.0.0.1:9", "--port=0"]
    options = [f"--staging={tmp_path / 'staging'}", f"--cache={tmp_path / 'file'}"]
    environment = {**os.environ, **store.settings.to_environment(), "COLCHIS_AGENT_TOKEN": "token"}
    ended = subprocess.run([*agent, *options], env=environment, capture_output=True, text=True, timeout=60)
    assert ended.returncode == BadConfig.exit_code, ended.stderr
    assert "install -d -o 10001" in ended.stderr
    assert "Traceback" not in ended.stderr
