"""Is this store fit? The few promises that the commit protocol stands on, tried before a run trusts them."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from colchis.components.errors import BadConfig, BadData
from colchis.components.store.payload import Payload
from colchis.components.store.store import Store

WRITERS = 16
ROUNDS = 2


def probe(store: Store) -> None:
    """None when the store keeps what it must; BadConfig with its name and the failed check otherwise.

    About 100 small requests under `probes/<uuid>/`, removed afterwards.
    """
    prefix = f"probes/{uuid.uuid4()}/"
    for check in (_reads_back, _refuses_second_create, _one_creator, _refuses_stale_swap, _one_swapper):
        check(store, prefix)
    for key in store.list(prefix):
        store.delete(key)


def _reads_back(store: Store, prefix: str) -> None:
    """A write is what the next read returns, whole and by range; an overwrite replaces it at once."""
    key = prefix + "read-back"
    for round_ in range(ROUNDS):
        data = uuid.uuid4().bytes * (1024 + round_)
        store.put(key, data)
        if (found := store.get(key).data) != data:
            raise _unfit(store, "read after write", f"the {len(data)} bytes just written", f"{len(found)} other bytes")
        try:
            store.verify(Payload.of("read-back", key, data))
        except BadData as error:
            raise _unfit(store, "read by range", "the bytes just written", str(error)) from error


def _refuses_second_create(store: Store, prefix: str) -> None:
    key = prefix + "second-create"
    if not store.create(key, b"first"):
        raise _unfit(store, "create", "a free key to be created", "a refusal")
    if store.create(key, b"second") or store.get(key).data != b"first":
        raise _unfit(store, "create of an existing key (If-None-Match: *)", "a refusal", "an overwritten object")


def _one_creator(store: Store, prefix: str) -> None:
    for round_ in range(ROUNDS):
        key = f"{prefix}create-{round_}"
        winners = _race(partial(store.create, key))
        check = f"{WRITERS} concurrent creates of one key (If-None-Match: *)"
        if len(winners) != 1:
            raise _unfit(store, check, "exactly one winner", f"{len(winners)}")
        if (found := store.get(key).data) != winners[0]:
            raise _unfit(store, check, f"the object of the winner ({winners[0]!r})", repr(found))


def _refuses_stale_swap(store: Store, prefix: str) -> None:
    key = prefix + "stale-swap"
    store.put(key, b"first")
    stale = store.get(key).etag
    if not store.replace(key, b"second", stale):
        raise _unfit(store, "compare-and-swap (If-Match)", "a swap on the current ETag", "a refusal")
    if store.replace(key, b"third", stale) or store.get(key).data != b"second":
        raise _unfit(store, "compare-and-swap (If-Match) on a stale ETag", "a refusal", "an overwritten object")
    if store.replace(prefix + "absent", b"data", stale):
        raise _unfit(store, "compare-and-swap (If-Match) of an absent key", "a refusal", "a new object")


def _one_swapper(store: Store, prefix: str) -> None:
    for round_ in range(ROUNDS):
        key = f"{prefix}swap-{round_}"
        store.put(key, b"start")
        winners = _race(partial(store.replace, key, etag=store.get(key).etag))
        check = f"{WRITERS} concurrent swaps on one ETag (If-Match)"
        if len(winners) != 1:
            raise _unfit(store, check, "exactly one winner", f"{len(winners)}")
        if (found := store.get(key).data) != winners[0]:
            raise _unfit(store, check, f"the object of the winner ({winners[0]!r})", repr(found))


def _race(write: Callable[[bytes], bool]) -> list[bytes]:
    """The bodies of those of WRITERS threads, started together, whose write says that it won."""
    barrier = threading.Barrier(WRITERS)

    def run(writer: int) -> bytes | None:
        body = f"writer {writer}".encode()
        barrier.wait(timeout=30.0)
        return body if write(body) else None

    with ThreadPoolExecutor(WRITERS) as pool:
        return [body for body in pool.map(run, range(WRITERS)) if body is not None]


def _unfit(store: Store, check: str, expected: str, found: str) -> BadConfig:
    return BadConfig(
        f"object store {store.settings.endpoint} is unfit: check '{check}' expected {expected}, found {found}",
        where=store.settings.bucket,
        hint="use a store with atomic conditional writes: AWS S3, MinIO, Ceph RGW, SeaweedFS 4.20 or later",
    )
