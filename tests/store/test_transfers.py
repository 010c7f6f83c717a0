"""Large objects: whole and verified or not at all, whatever breaks on the way."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import textwrap
import threading
import tracemalloc
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from minio import Minio

from colchis.components.errors import BadConfig, BadData, PeerUnavailable
from colchis.components.store import Payload, Store, StoreSettings, transfers
from colchis.workflows.local.weed import Weed
from tests.disks import small_disk
from tests.faults import Fault, FaultProxy

MIB = 1 << 20


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """5 MiB parts (the least that S3 allows) and 2 MiB ranges, so that small files have many of both."""
    monkeypatch.setattr(transfers, "PART_BYTES", 5 * MIB)
    monkeypatch.setattr(transfers, "RANGE_BYTES", 2 * MIB)


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """17 MiB and a bit: four parts, the last one odd."""
    path = tmp_path_factory.mktemp("large") / "large.bin"
    path.write_bytes(os.urandom(17 * MIB + 12345))
    return path


def leftovers(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_an_independent_client_reads_a_multipart_upload(
    store: Store, store_settings: StoreSettings, other_client: Minio, large: Path
) -> None:
    payload = store.upload("large", large)
    with other_client.get_object(store_settings.bucket, "large") as answer:
        assert answer.read() == large.read_bytes()
    assert payload.bytes == large.stat().st_size
    assert payload.xxh3_128 == Payload.of("x", "x", large.read_bytes()).xxh3_128
    assert payload.sha256 is None


def test_bytes_and_files_make_the_same_payload(store: Store, large: Path) -> None:
    data = large.read_bytes()
    assert store.put_payload("key", data) == store.upload("key", large)
    assert store.read(store.put_payload("key", data)) == data


@pytest.mark.parametrize("size", [0, 1, 2 * MIB - 1, 2 * MIB, 2 * MIB + 1, 16 * MIB, 16 * MIB + 1, 20 * MIB])
def test_sizes_around_the_borders(store: Store, tmp_path: Path, size: int) -> None:
    """Catches a lost or doubled byte at the border of a part, of a range, and between one PUT and multipart."""
    source, target = tmp_path / "source", tmp_path / "target"
    source.write_bytes(os.urandom(size))
    payload = store.upload("key", source)
    transfer = store.download(payload, target)
    assert target.read_bytes() == source.read_bytes()
    assert (transfer.bytes, transfer.retries, transfer.reused) == (size, 0, False)
    assert (payload.sha256 is None) == (size > 16 * MIB)


def test_a_download_replaces_a_wrong_file_and_keeps_a_right_one(store: Store, tmp_path: Path, large: Path) -> None:
    """Resuming a folder fetches only what is missing or wrong."""
    payload = store.upload("key", large)
    target = tmp_path / "folder" / "target"
    store.download(payload, target)
    inode = target.stat().st_ino
    assert store.download(payload, target).reused
    assert target.stat().st_ino == inode
    damaged = bytearray(large.read_bytes())
    damaged[7 * MIB] ^= 1
    target.write_bytes(damaged)
    assert not store.download(payload, target).reused
    assert target.read_bytes() == large.read_bytes()


def test_a_flipped_byte_in_the_store_is_refused(
    store: Store, store_settings: StoreSettings, other_client: Minio, tmp_path: Path, large: Path
) -> None:
    """The file that was there before stays; neither the damaged one nor a temporary one is left."""
    payload = store.upload("runs/r/weights", large, name="weights/model.safetensors")
    damaged = bytearray(large.read_bytes())
    damaged[-1] ^= 0x80
    other_client.put_object(store_settings.bucket, payload.key, io.BytesIO(damaged), len(damaged))
    target = tmp_path / "target"
    target.write_bytes(b"before")
    with pytest.raises(BadData, match=r"'weights/model\.safetensors'.*xxh3-128.*runs/r/weights"):
        store.download(payload, target)
    assert target.read_bytes() == b"before"
    assert leftovers(tmp_path) == ["target"]


@pytest.mark.parametrize("change", [-MIB, -1, 1])
def test_another_size_in_the_store_is_refused(
    store: Store, store_settings: StoreSettings, other_client: Minio, tmp_path: Path, large: Path, change: int
) -> None:
    payload = store.upload("key", large)
    data = (large.read_bytes() + b"more")[: payload.bytes + change]
    other_client.put_object(store_settings.bucket, "key", io.BytesIO(data), len(data))
    with pytest.raises(BadData, match=f"bytes expected {payload.bytes}"):
        store.download(payload, tmp_path / "target")
    assert leftovers(tmp_path) == []


def test_an_absent_payload_is_refused_by_name(store: Store, tmp_path: Path, large: Path) -> None:
    payload = store.upload("runs/r/weights", large, name="weights")
    store.delete(payload.key)
    with pytest.raises(BadData, match=r"'weights' is not in bucket.*runs/r/weights"):
        store.download(payload, tmp_path / "target")
    assert leftovers(tmp_path) == []


def test_bytes_damaged_on_the_way_are_fetched_again(
    faulty: Store, proxy: FaultProxy, tmp_path: Path, large: Path
) -> None:
    payload = faulty.upload("key", large)
    proxy.add(Fault("GET", "/key$", "corrupt"))
    transfer = faulty.download(payload, tmp_path / "target")
    assert (tmp_path / "target").read_bytes() == large.read_bytes()
    assert transfer.retries > 0


@pytest.mark.parametrize("action", ["reset", "truncate", "swallow", "status"])
def test_a_download_through_a_bad_network(
    faulty: Store, proxy: FaultProxy, tmp_path: Path, large: Path, action: str
) -> None:
    """Ranges that break half way are taken up where they broke, and none is missing."""
    payload = faulty.upload("key", large)
    proxy.add(Fault("GET", "/key$", action, times=5))  # type: ignore[arg-type]
    transfer = faulty.download(payload, tmp_path / "target")
    assert (tmp_path / "target").read_bytes() == large.read_bytes()
    assert transfer.retries == 5


@pytest.mark.parametrize(
    ("action", "method", "path"),
    [
        ("swallow", "POST", r"\?uploads"),
        ("status", "POST", r"\?uploads"),
        ("swallow", "PUT", "partNumber=2"),
        ("reset", "PUT", "partNumber=4"),
        ("truncate", "GET", r"key\?.*uploadId="),
        ("swallow", "POST", "uploadId="),
        ("status", "POST", "uploadId="),
        ("swallow", "HEAD", "/key$"),
    ],
)
def test_an_upload_through_a_bad_network(
    faulty: Store, store: Store, proxy: FaultProxy, large: Path, action: str, method: str, path: str
) -> None:
    """Any request of an upload may be lost, or its reply: the object is right and no upload is left open."""
    fault = proxy.add(Fault(method, path, action))  # type: ignore[arg-type]
    payload = faulty.upload("key", large)
    assert fault.applied == 1
    store.verify(payload)
    assert transfers.uploads(store.requests, "") == []


def test_an_upload_that_the_store_forgot_is_made_again(
    faulty: Store, store: Store, proxy: FaultProxy, large: Path
) -> None:
    proxy.add(Fault("PUT", "partNumber=3", "status", status=404, code="NoSuchUpload"))
    store.verify(faulty.upload("key", large))
    assert transfers.uploads(store.requests, "") == []


def test_a_completion_whose_reply_was_lost_is_not_made_again(
    faulty: Store, store: Store, proxy: FaultProxy, large: Path
) -> None:
    """Some stores forget an upload once it is complete: what the object holds tells that it was ours."""
    proxy.add(Fault("POST", "uploadId=", "swallow"))
    proxy.add(Fault("POST", "uploadId=", "status", status=404, code="NoSuchUpload"))
    store.verify(faulty.upload("key", large))
    assert proxy.count("POST", r"\?uploads") == 1


def test_an_upload_that_fails_aborts_itself(
    store_settings: StoreSettings, store: Store, proxy: FaultProxy, large: Path
) -> None:
    """Parts of an abandoned upload are invisible and cost money for ever."""
    impatient = Store(replace(store_settings, endpoint=proxy.url), deadline_s=6.0)
    proxy.add(Fault("PUT", "partNumber=3", "status", until_s=600.0))
    with pytest.raises(PeerUnavailable, match="put part 3"):
        impatient.upload("key", large)
    assert transfers.uploads(store.requests, "") == []
    assert store.find("key") is None


def test_a_file_that_grows_while_it_is_uploaded_is_refused(
    faulty: Store, store: Store, proxy: FaultProxy, tmp_path: Path, large: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checksum of a file that somebody still writes describes nothing."""
    monkeypatch.setattr(transfers, "PARALLEL", 1)  # so that it is not read before it grows
    source = tmp_path / "source"
    source.write_bytes(large.read_bytes())

    def grow() -> None:
        with source.open("ab") as file:
            file.write(b"more")

    proxy.add(Fault("PUT", "partNumber=1", "delay", before=grow))
    with pytest.raises(BadData, match="changed while it was uploaded"):
        faulty.upload("key", source)
    assert store.find("key") is None
    assert transfers.uploads(store.requests, "") == []


def test_a_file_that_is_not_there(store: Store, tmp_path: Path) -> None:
    with pytest.raises(BadData, match="No such file"):
        store.upload("key", tmp_path / "absent")


def test_memory_is_bounded(store: Store, tmp_path: Path) -> None:
    """A transfer must not hold the object: weights are larger than a pod's memory."""
    source = tmp_path / "source"
    with source.open("wb") as file:
        for _ in range(72):
            file.write(os.urandom(MIB))
    tracemalloc.start()
    try:
        payload = store.upload("key", source)
        _, upload_peak = tracemalloc.get_traced_memory()
        tracemalloc.reset_peak()
        store.download(payload, tmp_path / "target")
        _, download_peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert upload_peak < (transfers.PARALLEL + 4) * 5 * MIB
    assert download_peak < (transfers.PARALLEL + 4) * 2 * MIB


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 8 MiB."""
    folder = tmp_path / "disk"
    with small_disk(folder, "8m"):
        yield folder


def test_a_full_disk_is_named_and_leaves_nothing(store: Store, tiny_disk: Path, large: Path) -> None:
    payload = store.upload("key", large)
    with pytest.raises(BadConfig, match=f"cannot write {payload.bytes} bytes.*No space left"):
        store.download(payload, tiny_disk / "target")
    assert leftovers(tiny_disk) == []


def test_a_disk_that_fills_up_half_way(store: Store, proxy: FaultProxy, faulty: Store, tiny_disk: Path) -> None:
    """The room that was there at the start may be gone later."""
    payload = faulty.put_payload("key", os.urandom(7 * MIB))
    other = tiny_disk / "other"
    proxy.add(Fault("GET", "/key$", "delay", before=lambda: other.write_bytes(bytes(3 * MIB))))
    with pytest.raises(BadConfig, match="No space left"):
        faulty.download(payload, tiny_disk / "target")
    assert leftovers(tiny_disk) == ["other"]


CHILD = """
    import sys
    from pathlib import Path
    from colchis.components.store import Payload, Store, StoreSettings
    store = Store(StoreSettings.from_environment())
    if sys.argv[1] == "upload":
        store.upload("key", Path(sys.argv[2]))
    else:
        store.download(Payload.model_validate_json(sys.argv[3]), Path(sys.argv[2]))
"""


def killed_during(settings: StoreSettings, proxy: FaultProxy, fault: Fault, *arguments: str) -> None:
    """Run CHILD against the proxy and kill it while `fault` holds one of its requests."""
    reached = threading.Event()
    fault.before = reached.set
    proxy.add(fault)
    environment = {**os.environ, **replace(settings, endpoint=proxy.url).to_environment(), "PYTHONPATH": "src"}
    child = subprocess.Popen([sys.executable, "-c", textwrap.dedent(CHILD), *arguments], env=environment)
    try:
        assert reached.wait(60)
    finally:
        child.send_signal(signal.SIGKILL)
        child.wait()


def test_a_download_killed_half_way(
    store: Store, store_settings: StoreSettings, proxy: FaultProxy, tmp_path: Path, large: Path
) -> None:
    """The target is never torn, and the next download removes what the killed one left."""
    payload, target = store.upload("key", large), tmp_path / "target"
    fault = Fault("GET", "bytes|key", "delay", seconds=60.0, times=1)
    killed_during(store_settings, proxy, fault, "download", str(target), payload.model_dump_json())
    assert not target.exists()
    assert len(leftovers(tmp_path)) == 1
    store.download(payload, target)
    assert target.read_bytes() == large.read_bytes()
    assert leftovers(tmp_path) == ["target"]


def test_an_upload_killed_half_way(store: Store, store_settings: StoreSettings, proxy: FaultProxy, large: Path) -> None:
    """Nothing is visible; the owner of the prefix can drop what is left."""
    killed_during(store_settings, proxy, Fault("PUT", "partNumber=2", "delay", seconds=60.0), "upload", str(large))
    assert store.find("key") is None
    assert store.abort_uploads("other/") == 0
    assert store.abort_uploads("key") == 1
    assert transfers.uploads(store.requests, "") == []


def test_the_store_is_killed_in_the_middle_of_an_upload(tmp_path: Path, large: Path) -> None:
    """kill -9 of SeaweedFS while parts are on their way, and a restart: the upload goes on and ends right."""
    weed = Weed(tmp_path / "weed")
    settings = weed.start()
    try:
        store = Store(settings, deadline_s=60.0)
        before = store.put_payload("before", b"acknowledged")
        part_sent = threading.Event()
        store.requests.client.meta.events.register("after-call.s3.UploadPart", lambda **_: part_sent.set())
        result: list[Payload] = []
        upload = threading.Thread(target=lambda: result.append(store.upload("key", large)))
        upload.start()
        assert part_sent.wait(30)
        weed.kill()
        assert weed.start() == settings
        upload.join(60)
        assert not upload.is_alive()
        store.download(result[0], tmp_path / "target")
        assert (tmp_path / "target").read_bytes() == large.read_bytes()
        assert store.read(before) == b"acknowledged"
        assert transfers.uploads(store.requests, "") == []
    finally:
        weed.stop()
