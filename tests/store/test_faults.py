"""What the network, the server and the configuration may do to one request, injected from outside."""

from __future__ import annotations

import socket
from dataclasses import replace

import pytest

from colchis.components.errors import BadConfig, BadData, PeerUnavailable
from colchis.components.store import Store, StoreSettings
from tests.faults import Fault, FaultProxy


def test_a_create_whose_reply_was_lost_is_ours(faulty: Store, store: Store, proxy: FaultProxy) -> None:
    """The server did it, we asked again and were told 412: taking that for a loss would leave a commit without owner."""
    proxy.add(Fault("PUT", "/commit$", "swallow"))
    assert faulty.create("commit", b"mine")
    assert proxy.count("PUT", "/commit$") == 2
    assert store.get("commit").data == b"mine"


def test_a_create_lost_to_another_while_our_request_was_lost(faulty: Store, store: Store, proxy: FaultProxy) -> None:
    """412 after a retry is not always our own write."""
    proxy.add(Fault("PUT", "/commit$", "reset", before=lambda: store.put("commit", b"theirs")))
    assert not faulty.create("commit", b"mine")
    assert store.get("commit").data == b"theirs"


def test_a_swap_whose_reply_was_lost_is_ours(faulty: Store, proxy: FaultProxy) -> None:
    faulty.put("key", b"first")
    proxy.add(Fault("PUT", "/key$", "swallow"))
    assert faulty.replace("key", b"second", faulty.get("key").etag)


def test_a_swap_that_was_overtaken_after_its_reply_was_lost(faulty: Store, store: Store, proxy: FaultProxy) -> None:
    """Ours was applied, then replaced: the object there is not ours, so it must not say that it is."""
    faulty.put("key", b"first")
    etag = faulty.get("key").etag
    proxy.add(Fault("PUT", "/key$", "swallow"))
    proxy.add(Fault("PUT", "/key$", "delay", before=lambda: store.put("key", b"third")))
    assert not faulty.replace("key", b"second", etag)
    assert store.get("key").data == b"third"


def test_conflicts_are_tried_again(faulty: Store, proxy: FaultProxy) -> None:
    """AWS answers 409 to concurrent conditional writes; it decides nothing."""
    proxy.add(Fault("PUT", "/key$", "status", times=2, status=409, code="ConditionalRequestConflict"))
    assert faulty.create("key", b"mine")
    assert proxy.count("PUT", "/key$") == 3


@pytest.mark.parametrize(("status", "code"), [(503, "SlowDown"), (500, "InternalError"), (502, ""), (429, "")])
def test_an_overloaded_store_is_waited_for(faulty: Store, proxy: FaultProxy, status: int, code: str) -> None:
    proxy.add(Fault("GET", "/key$", "status", times=3, status=status, code=code))
    faulty.put("key", b"data")
    assert faulty.get("key").data == b"data"
    assert proxy.count("GET", "/key$") == 4


def test_a_store_that_is_away_for_two_seconds(faulty: Store, proxy: FaultProxy) -> None:
    proxy.add(Fault("PUT", "/key$", "status", until_s=2.0))
    faulty.put("key", b"data")
    assert faulty.get("key").data == b"data"


@pytest.mark.parametrize("action", ["reset", "truncate", "swallow"])
def test_broken_replies_are_asked_for_again(faulty: Store, proxy: FaultProxy, action: str) -> None:
    """A body that ends early must never be taken for the whole object."""
    data = bytes(range(256)) * 4096
    faulty.put("key", data)
    proxy.add(Fault("GET", "/key$", action, times=2))  # type: ignore[arg-type]
    assert faulty.get("key").data == data
    assert proxy.count("GET", "/key$") == 3


def test_a_slow_store_is_not_a_dead_one(faulty: Store, proxy: FaultProxy) -> None:
    proxy.add(Fault("GET", "/key$", "delay", seconds=1.5))
    faulty.put("key", b"data")
    assert faulty.get("key").data == b"data"
    assert proxy.count("GET", "/key$") == 1


def test_bytes_damaged_on_the_way_are_read_again(faulty: Store, proxy: FaultProxy) -> None:
    payload = faulty.put_payload("key", b"data" * 1000)
    proxy.add(Fault("GET", "/key$", "corrupt"))
    assert faulty.read(payload) == b"data" * 1000
    proxy.add(Fault("GET", "/key$", "corrupt", times=2))
    with pytest.raises(BadData, match="sha256"):
        faulty.read(payload)


def test_past_the_deadline_the_error_names_endpoint_key_and_last_error(
    store_settings: StoreSettings, proxy: FaultProxy
) -> None:
    proxy.add(Fault("GET", "", "status", until_s=600.0))
    impatient = Store(replace(store_settings, endpoint=proxy.url), deadline_s=1.0)
    with pytest.raises(PeerUnavailable) as caught:
        impatient.get("some/key")
    message = str(caught.value)
    assert proxy.url in message
    assert f"{store_settings.bucket}/some/key" in message
    assert "503 SlowDown" in message
    assert caught.value.exit_code == 69


def test_nobody_listens(store_settings: StoreSettings) -> None:
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{reserved.getsockname()[1]}"
        with pytest.raises(PeerUnavailable, match=r"Could not connect"):
            Store(replace(store_settings, endpoint=url), deadline_s=0.5).put("key", b"data")


def test_a_wrong_secret_is_refused_at_once(store_settings: StoreSettings, proxy: FaultProxy) -> None:
    """Retrying a refusal for a minute hides it, and locks accounts elsewhere."""
    intruder = Store(replace(store_settings, endpoint=proxy.url, secret_key="wrong"))
    for call in (lambda: intruder.get("key"), lambda: intruder.put("key", b""), lambda: intruder.list("")):
        with pytest.raises(BadConfig, match="AWS_SECRET_ACCESS_KEY"):
            call()
    assert len(proxy.seen) == 3


def test_an_unknown_access_key_is_refused_at_once(store_settings: StoreSettings) -> None:
    with pytest.raises(BadConfig, match="AWS_ACCESS_KEY_ID"):
        Store(replace(store_settings, access_key="nobody")).create("key", b"")


def test_a_wrong_bucket_is_refused_at_once_and_not_created(store_settings: StoreSettings, proxy: FaultProxy) -> None:
    lost = Store(replace(store_settings, endpoint=proxy.url, bucket="no-such-bucket"))
    for call in (lambda: lost.put("key", b""), lambda: lost.find("key"), lambda: lost.list("")):
        with pytest.raises(BadConfig, match=r"no bucket 'no-such-bucket'.*COLCHIS_S3_BUCKET"):
            call()
    assert len(proxy.seen) == 3


def test_a_clock_that_is_off_is_named(faulty: Store, proxy: FaultProxy) -> None:
    proxy.add(Fault("GET", "/key$", "status", status=403, code="RequestTimeTooSkewed"))
    with pytest.raises(BadConfig, match="clock"):
        faulty.get("key")
