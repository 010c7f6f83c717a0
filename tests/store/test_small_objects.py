"""Whole small objects and conditional writes, against a real SeaweedFS."""

from __future__ import annotations

import io
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
from minio import Minio

from colchis.components.errors import BadConfig, BadData
from colchis.components.store import Payload, Store, StoreSettings


def race(action: Callable[[int], bool], writers: int = 16) -> list[int]:
    barrier = threading.Barrier(writers)

    def run(writer: int) -> bool:
        barrier.wait(timeout=30)
        return action(writer)

    with ThreadPoolExecutor(writers) as pool:
        return [writer for writer, won in enumerate(pool.map(run, range(writers))) if won]


def test_an_independent_client_reads_what_we_wrote(
    store: Store, store_settings: StoreSettings, other_client: Minio
) -> None:
    """Catches bodies stored with checksum trailers in them, and keys that another client would spell differently."""
    data = bytes(range(256)) * 1000
    store.put("a/b c/ä+%.bin", data)
    payload = store.put_payload("a/payload", data)
    for key in ("a/b c/ä+%.bin", "a/payload"):
        with other_client.get_object(store_settings.bucket, key) as answer:
            assert answer.read() == data
    assert payload.bytes == other_client.stat_object(store_settings.bucket, "a/payload").size


def test_we_read_what_an_independent_client_wrote(
    store: Store, store_settings: StoreSettings, other_client: Minio
) -> None:
    other_client.put_object(store_settings.bucket, "theirs", io.BytesIO(b"data"), 4)
    assert store.get("theirs").data == b"data"


def test_absent_objects(store: Store) -> None:
    """`find` answers None and `get` refuses by key; neither invents an empty object."""
    assert store.find("no/such") is None
    with pytest.raises(BadData, match="no/such"):
        store.get("no/such")
    store.delete("no/such")


def test_empty_objects(store: Store) -> None:
    payload = store.put_payload("empty", b"")
    assert payload.bytes == 0
    assert store.read(payload) == b""
    assert store.get("empty").data == b""


def test_listing_is_sorted_and_crosses_pages(store: Store) -> None:
    """Catches a listing that stops at the first page of 1,000 keys."""
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda number: store.put(f"many/{number:05d}", b""), range(1005)))
    store.put("other", b"")
    assert store.list("many/") == [f"many/{number:05d}" for number in range(1005)]


def test_folders_are_the_next_part_of_the_keys(store: Store) -> None:
    """Catches a listing that reads every object of every run to name the runs."""
    for key in ("runs/b/run.json", "runs/a/run.json", "runs/a/weights/v0", "runs/c", "other/x"):
        store.put(key, b"")
    assert store.folders("runs/") == ["a", "b"]
    assert store.folders("nothing/") == []


def test_create_does_not_overwrite(store: Store) -> None:
    assert store.create("key", b"first")
    assert not store.create("key", b"second")
    assert store.get("key").data == b"first"


@pytest.mark.parametrize("round_", range(3))
def test_of_sixteen_creators_one_wins(store: Store, round_: int) -> None:
    winners = race(lambda writer: store.create("key", f"writer {writer}".encode()))
    assert len(winners) == 1
    assert store.get("key").data == f"writer {winners[0]}".encode()


def test_replace_is_compare_and_swap(store: Store) -> None:
    store.put("key", b"first")
    first = store.get("key")
    assert store.replace("key", b"second", first.etag)
    assert not store.replace("key", b"third", first.etag)
    assert store.get("key").data == b"second"


def test_replace_of_an_absent_key_is_lost(store: Store) -> None:
    """404 on AWS, 412 on SeaweedFS: both mean lost, neither may create the object or raise."""
    store.put("key", b"first")
    etag = store.get("key").etag
    store.delete("key")
    assert not store.replace("key", b"second", etag)
    assert store.find("key") is None


def test_sixteen_counters_lose_no_increment(store: Store) -> None:
    """Catches a compare-and-swap that overwrites: increments of concurrent writers would vanish."""
    store.put("counter", b"0")

    def increment(_: int) -> bool:
        while True:
            now = store.get("counter")
            if store.replace("counter", str(int(now.data) + 1).encode(), now.etag):
                return True

    race(increment)
    assert store.get("counter").data == b"16"


def test_a_flipped_byte_is_refused_by_name(store: Store, store_settings: StoreSettings, other_client: Minio) -> None:
    payload = store.put_payload("runs/r/data.bin", b"x" * 1000, name="data")
    damaged = b"x" * 500 + b"y" + b"x" * 499
    other_client.put_object(store_settings.bucket, payload.key, io.BytesIO(damaged), 1000)
    with pytest.raises(BadData, match=r"'data'.*sha256.*runs/r/data\.bin"):
        store.read(payload)
    with pytest.raises(BadData, match=r"'data'.*sha256.*runs/r/data\.bin"):
        store.verify(payload)
    assert not store.holds(payload)


def test_a_payload_needs_a_checksum() -> None:
    with pytest.raises(ValueError, match="no checksum"):
        Payload(name="a", key="k", bytes=1)


def test_settings_survive_the_environment() -> None:
    settings = StoreSettings("https://s3.example", "bucket", "id", "secret", "eu-1", "virtual", "when_supported", "tok")
    assert StoreSettings.from_environment(settings.to_environment()) == settings
    assert "secret" not in repr(settings)
    assert "tok" not in repr(settings)


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("COLCHIS_S3_ENDPOINT", "127.0.0.1:8333"),
        ("COLCHIS_S3_ADDRESSING", "dns"),
        ("COLCHIS_S3_CHECKSUMS", "sometimes"),
        ("COLCHIS_S3_BUCKET", ""),
        ("AWS_SECRET_ACCESS_KEY", ""),
    ],
)
def test_wrong_settings_name_the_variable(variable: str, value: str) -> None:
    environment = StoreSettings("http://h:1", "bucket", "id", "secret").to_environment()
    with pytest.raises(BadConfig, match=variable):
        StoreSettings.from_environment({**environment, variable: value})


def test_when_supported_checksums_change_no_byte(store_settings: StoreSettings, other_client: Minio) -> None:
    """botocore's CRC trailers must not end up in the object."""
    settings = StoreSettings(**{**vars(store_settings), "checksums": "when_supported"})
    payload = Store(settings).put_payload("key", b"data")
    with other_client.get_object(settings.bucket, "key") as answer:
        assert answer.read() == b"data"
    assert Store(settings).read(payload) == b"data"
