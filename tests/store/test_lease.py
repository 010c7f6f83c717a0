"""Leases: one holder, told apart by what the object does and never by what time it is."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from colchis.components.errors import BadConfig, BadData
from colchis.components.store import Lease, Store, keys
from colchis.components.store.record import sealed
from colchis.components.store.store import Stored
from tests.faults import Fault, FaultProxy

KEY = keys.pool_lease("pool-a")


def test_one_holder_and_the_refusal_names_it(store: Store) -> None:
    Lease(store, KEY, "run a", 60).acquire()
    with pytest.raises(BadConfig, match=r"held by 'run a', wanted by 'run b'.*pools/pool-a/lease\.json"):
        Lease(store, KEY, "run b", 60).acquire()


def test_the_holder_comes_back_under_its_name(store: Store) -> None:
    """Stages of one run are many processes, and hold the pool together."""
    first, second = Lease(store, KEY, "run a", 60), Lease(store, KEY, "run a", 60)
    first.acquire()
    second.acquire()
    first.renew()
    second.renew()


def test_released_is_free_at_once(store: Store) -> None:
    first = Lease(store, KEY, "run a", 60)
    first.acquire()
    first.release()
    Lease(store, KEY, "run b", 60).acquire()
    first.release()  # of another's lease: nothing happens
    with pytest.raises(BadConfig, match="held by 'run b'"):
        first.renew()


def test_a_silent_holder_loses_it_and_hears_of_it(store: Store) -> None:
    first = Lease(store, KEY, "run a", 0.5)
    first.acquire()
    started_s = time.monotonic()
    Lease(store, KEY, "run b", 60).acquire(wait_s=20)
    assert time.monotonic() - started_s >= 0.5
    with pytest.raises(BadConfig, match="the lease of 'run a' is lost: it is held by 'run b' now"):
        first.renew()


def test_a_holder_that_renews_keeps_it(store: Store) -> None:
    """The observer waits three lease times and is refused all the same."""
    holder = Lease(store, KEY, "run a", 2.0)
    holder.acquire()
    with holder.kept(), pytest.raises(BadConfig, match="held by 'run a'"):
        Lease(store, KEY, "run b", 2.0).acquire(wait_s=6.0)


def test_a_renewal_that_fails_is_said_and_tried_again(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    """Fault: a store that is away for a moment ends the renewals without a word, and later the lease."""
    holder = Lease(store, KEY, "run a", 1.2)
    holder.acquire()
    with holder.kept():
        store.delete(KEY)
        until = time.monotonic() + 20
        while "lease not renewed" not in caplog.text:
            assert time.monotonic() < until
            time.sleep(0.05)
        holder.acquire()
        before = store.get(KEY).data
        while store.get(KEY).data == before:
            assert time.monotonic() < until
            time.sleep(0.05)


def test_a_first_look_proves_nothing(store: Store) -> None:
    """A lease written long ago may be renewed any moment: an observer watches it, however old it is."""
    Lease(store, KEY, "run a", 0.6).acquire()
    observer = Lease(store, KEY, "run b", 60)
    with pytest.raises(BadConfig, match="held by 'run a'"):
        observer.acquire()
    time.sleep(0.8)
    observer.acquire()  # the same observer has now watched it for longer than it lasts


def test_an_abandoned_lease_is_taken_by_who_has_just_come(store: Store) -> None:
    """Fault: pods come and go faster than a lease runs out, so that the pool of a run which died is never free again."""
    Lease(store, KEY, "run a", 3.0).acquire()
    time.sleep(4.5)  # the store's clock tells whole seconds
    started_s = time.monotonic()
    Lease(store, KEY, "run b", 60).acquire()
    assert time.monotonic() - started_s >= 1.0, "it watched for two renewals"


def test_a_clock_of_the_store_that_jumps_frees_no_lease(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault: a holder that lives loses its pool because the store's clock says that its lease is old."""
    holder = Lease(store, KEY, "run a", 3.0)
    holder.acquire()
    observed = store.find

    def a_day_later(key: str) -> Stored | None:
        found = observed(key)
        return None if found is None else replace(found, age_s=86_400.0)

    monkeypatch.setattr(store, "find", a_day_later)
    with holder.kept(), pytest.raises(BadConfig, match="held by 'run a'"):
        Lease(store, KEY, "run b", 3.0).acquire(wait_s=4.0)


def test_wall_clocks_play_no_part(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """A jump of the wall clock by a day neither frees a lease nor keeps it; requests are signed by botocore's clock."""
    Lease(store, KEY, "run a", 60).acquire()
    observer = Lease(store, KEY, "run b", 60)
    with pytest.raises(BadConfig, match="held by 'run a'"):
        observer.acquire()
    for jump_s in (86_400.0, -86_400.0):
        monkeypatch.setattr(time, "time", lambda jump_s=jump_s, now=time.time: now() + jump_s)
        with pytest.raises(BadConfig, match="held by 'run a'"):
            observer.acquire()
    assert b"20" not in store.get(KEY).data.split(b'"change"')[0]  # no date in the record


def test_of_sixteen_candidates_one_gets_it(store: Store) -> None:
    """For a free lease, and for one whose holder has fallen silent."""
    for name in ("free", "silent"):
        key = keys.pool_lease(name)
        if name == "silent":
            Lease(store, key, "gone", 0.3).acquire()
        barrier = threading.Barrier(16)

        def acquire(number: int, key: str = key, barrier: threading.Barrier = barrier) -> bool:
            barrier.wait(timeout=30)
            try:
                Lease(store, key, f"run {number}", 60).acquire(wait_s=2.0)
            except BadConfig:
                return False
            return True

        with ThreadPoolExecutor(16) as pool:
            assert sum(pool.map(acquire, range(16))) == 1


def test_lost_replies_do_not_lose_a_lease(faulty: Store, proxy: FaultProxy) -> None:
    lease = Lease(faulty, KEY, "run a", 60)
    for action in (lease.acquire, lease.renew, lease.release):
        fault = proxy.add(Fault("PUT", r"lease\.json$", "swallow"))
        action()
        assert fault.applied == 1


def test_a_deleted_lease_is_lost(store: Store) -> None:
    lease = Lease(store, KEY, "run a", 60)
    lease.acquire()
    store.delete(KEY)
    with pytest.raises(BadConfig, match="deleted"):
        lease.renew()


def test_what_is_no_lease_is_refused(store: Store) -> None:
    store.put(KEY, sealed({}))
    with pytest.raises(BadData, match=r"cannot be read: holder.*lease\.json.*delete the object"):
        Lease(store, KEY, "run a", 60).acquire()
    with pytest.raises(BadConfig, match="more than 0"):
        Lease(store, KEY, "run a", 0)
