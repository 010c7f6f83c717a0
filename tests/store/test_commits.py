"""The commit protocol under every order of events that a test can make: one commit, and everybody returns it."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
from botocore.awsrequest import AWSRequest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from colchis.components.errors import BadConfig, BadData, Bug
from colchis.components.store import Attempt, Commit, Payload, StageKey, Store, StoreSettings, find_commit, read_commit
from colchis.components.store.record import sealed
from tests.faults import Fault, FaultProxy

STAGE = StageKey("run", 3, "train")
ITERATIONS = itertools.count(100)
"""Every example of a property test commits an iteration of its own."""


def test_a_commit_says_what_was_stored(store: Store) -> None:
    attempt = Attempt(store, STAGE)
    weights = attempt.put("weights/model.safetensors", b"weights")
    attempt.put("metrics.json", b"{}")
    commit = attempt.commit(outputs={"version": 4, "kind": "full"}, inputs={"runs/run/x/commit.json": "0" * 64})
    assert commit == read_commit(store, STAGE)
    assert commit.digest == read_commit(store, STAGE).digest
    assert commit.payload_named("weights/model.safetensors") == weights
    assert store.read(weights) == b"weights"
    assert [entry.name for entry in commit.payload] == ["metrics.json", "weights/model.safetensors"]
    assert (commit.run, commit.iteration, commit.stage, commit.shard, commit.attempt) == (
        "run",
        3,
        "train",
        None,
        attempt.id,
    )
    assert weights.key.startswith(attempt.prefix)
    with pytest.raises(BadData, match=r"no payload 'state'.*metrics\.json"):
        commit.payload_named("state")


def test_before_a_commit_there_is_nothing(store: Store) -> None:
    """Payload alone decides nothing."""
    Attempt(store, STAGE).put("weights", b"data")
    assert find_commit(store, STAGE) is None
    with pytest.raises(BadData, match="train of iteration 3 of run 'run' has not been committed"):
        read_commit(store, STAGE)


def test_the_second_attempt_returns_the_first_ones_commit(store: Store) -> None:
    first, second = Attempt(store, STAGE), Attempt(store, STAGE)
    first.put("data", b"first")
    second.put("data", b"second")
    won = first.commit(outputs={"by": "first"})
    assert second.commit(outputs={"by": "second"}) == won
    assert store.read(second.commit().payload_named("data")) == b"first"
    assert first.id != second.id


def test_shards_and_stages_do_not_meet(store: Store) -> None:
    for key in (STAGE, StageKey("run", 3, "rollout", 0), StageKey("run", 3, "rollout", 1), StageKey("run", 4, "train")):
        assert Attempt(store, key).commit(outputs={"key": str(key)}).outputs["key"] == str(key)


def test_of_sixteen_attempts_one_commits(store: Store) -> None:
    barrier = threading.Barrier(16)

    def attempt(number: int) -> Commit:
        own = Attempt(store, STAGE)
        own.put("data", str(number).encode())
        barrier.wait(timeout=30)
        return own.commit(outputs={"number": number})

    with ThreadPoolExecutor(16) as pool:
        commits = list(pool.map(attempt, range(16)))
    assert len({commit.digest for commit in commits}) == 1
    winner = commits[0]
    assert store.read(winner.payload_named("data")) == str(winner.outputs["number"]).encode()


def test_a_commit_whose_reply_was_lost(faulty: Store, proxy: FaultProxy) -> None:
    """The attempt that won must not throw its result away because it did not hear of it."""
    proxy.add(Fault("PUT", r"commit\.json$", "swallow"))
    attempt = Attempt(faulty, STAGE)
    assert attempt.commit().attempt == attempt.id


def test_adopted_payload_is_listed_as_it_is(store: Store) -> None:
    """A retried shard lists the groups that an earlier attempt had finished, without copying them."""
    lost = Attempt(store, STAGE)
    lost.put("group-0", b"group 0")
    (key,) = store.list(STAGE.attempts)
    again = Attempt(store, STAGE)
    again.adopt(Payload.of("group-0", key, store.get(key).data))
    again.put("group-1", b"group 1")
    commit = again.commit()
    assert [store.read(entry) for entry in commit.payload] == [b"group 0", b"group 1"]


def test_misuse_is_a_bug_not_a_commit(store: Store) -> None:
    attempt = Attempt(store, STAGE)
    attempt.put("data", b"one")
    with pytest.raises(Bug, match="'data' twice"):
        attempt.put("data", b"two")
    with pytest.raises(Bug, match="finite JSON"):
        attempt.commit(outputs={"loss": float("nan")})
    with pytest.raises(BadConfig, match="relative path"):
        attempt.put("../outside", b"")
    assert find_commit(store, STAGE) is None


def test_a_commit_without_a_payload_that_failed_is_refused(store_settings: StoreSettings, proxy: FaultProxy) -> None:
    """An error that the caller swallowed must not leave a commit that lacks what it was to list."""
    store = Store(StoreSettings(**{**vars(store_settings), "endpoint": proxy.url}), deadline_s=0.5)
    attempt = Attempt(store, STAGE)
    proxy.add(Fault("PUT", "/data$", "status", until_s=600.0))
    with pytest.raises(Exception, match="503"):
        attempt.put("data", b"data")
    with pytest.raises(Bug, match=r"\['data'\] is not stored"):
        attempt.commit()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": 2}, "format"),
        ({"shard": 1}, "says that it is"),
        ({"iteration": 4}, "says that it is"),
        ({"surprise": 1}, "surprise"),
        ({"payload": [{"name": "a", "key": "k", "bytes": 1}]}, "no checksum"),
        ({"payload": [{"name": "a", "key": "k", "bytes": 1, "sha256": "0" * 64}] * 2}, "twice"),
    ],
)
def test_a_commit_that_is_not_one_is_refused(store: Store, change: dict[str, Any], message: str) -> None:
    document = {**Attempt(store, StageKey("run", 3, "train")).commit().model_dump(mode="json"), **change}
    store.put(STAGE.commit, sealed(document))
    with pytest.raises(BadData, match=message) as caught:
        find_commit(store, STAGE)
    assert STAGE.commit in str(caught.value)


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"\xff\xfe", b'{"outputs": {"x": NaN}}'])
def test_a_torn_commit_is_refused(store: Store, body: bytes) -> None:
    store.put(STAGE.commit, body)
    with pytest.raises(BadData, match="cannot be read"):
        read_commit(store, STAGE)


class Turns:
    """Lets the requests of several clients happen in a given order, one at a time."""

    def __init__(self, order: list[int]) -> None:
        self._order, self._changed = list(order), threading.Condition()
        self._busy = False

    def take(self, who: int) -> None:
        with self._changed:
            ready = self._changed.wait_for(lambda: not self._busy and (not self._order or self._order[0] == who), 30)
            assert ready, "the order of requests cannot be followed"
            if self._order:
                self._order.pop(0)
            self._busy = True

    def give(self) -> None:
        with self._changed:
            self._busy = False
            self._changed.notify_all()

    def leave(self, who: int) -> None:
        """Whose attempt has ended takes no more turns."""
        with self._changed:
            self._order = [other for other in self._order if other != who]
            self._changed.notify_all()


@contextmanager
def in_turn(store: Store, who: int, turns: Turns, lost: set[int]) -> Iterator[None]:
    """Requests of this client wait for their turn; replies of those numbered in `lost` never arrive."""
    count = 0

    def before(request: AWSRequest, **_: object) -> None:
        turns.take(who)

    def after(**_: object) -> None:
        nonlocal count
        count += 1
        turns.give()
        if count - 1 in lost:
            raise ConnectionResetError("the reply was lost")

    events = store.requests.client.meta.events
    events.register("before-send.s3", before)
    events.register("response-received.s3", after)
    try:
        yield
    finally:
        turns.leave(who)
        events.unregister("before-send.s3", before)
        events.unregister("response-received.s3", after)


@pytest.fixture
def clients(store_settings: StoreSettings) -> list[Store]:
    return [Store(store_settings, deadline_s=30) for _ in range(2)]


@given(
    order=st.lists(st.integers(0, 1), max_size=14),
    lost=st.tuples(st.sets(st.integers(0, 4), max_size=3), st.sets(st.integers(0, 4), max_size=3)),
)
@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_interleaving_of_two_attempts_gives_one_commit(
    clients: list[Store], order: list[int], lost: tuple[set[int], set[int]]
) -> None:
    """Whatever the order of their requests and whichever replies are lost: one commit, and both return it."""
    turns = Turns(order)
    stage = StageKey("run", next(ITERATIONS), "train")

    def attempt(who: int) -> Commit:
        with in_turn(clients[who], who, turns, lost[who]):
            own = Attempt(clients[who], stage)
            own.put("data", f"payload of {who}".encode())
            return own.commit(outputs={"who": who})

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(attempt, range(2))
    held = read_commit(clients[0], stage)
    assert first == second == held
    assert first.digest == second.digest == held.digest
    assert clients[0].read(held.payload_named("data")) == f"payload of {held.outputs['who']}".encode()
