"""A lease: one holder at a time, by compare-and-swap, without any two clocks agreeing.

The holder renews by changing the object, often: every `lease_s / RENEWALS`. An observer counts on its own monotonic clock
how long the object has not changed; after `lease_s` it may take the lease over, by If-Match on exactly the object that it
watched. An observer that lives only for a moment, a pod, would never see that much: when by the store's clock the object is
older than `lease_s`, it watches for two renewals that do not come, and that is enough. So a holder that lives keeps its
lease whatever any clock says: nothing in the record is a time.
"""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

from pydantic import Field

from colchis.components.errors import BadConfig, BadData, ColchisError
from colchis.components.store.record import Record
from colchis.components.store.store import Store, Stored


class LeaseRecord(Record):
    """The object. `change` is drawn for each write, so no two contents are equal (ETags may depend on content)."""

    format: Literal[1] = 1
    holder: str = Field(min_length=1)
    lease_s: float = Field(gt=0)
    """What the holder promised: it renews more often than this."""
    change: str
    released: bool = False


logger = logging.getLogger(__name__)

RENEWALS = 6
"""A holder renews its lease so many times before it would be lost."""


@dataclass(frozen=True)
class _Watched:
    data: bytes
    since_s: float
    """Monotonic time of the first look at exactly this content."""


class Lease:
    """`holder` is a name, e.g. a run: several processes of one run may renew one lease. Not thread-safe,
    but for what `kept` does."""

    def __init__(self, store: Store, key: str, holder: str, lease_s: float) -> None:
        if not lease_s > 0:
            raise BadConfig(f"lease of {lease_s} s: expected more than 0", where=key)
        self.store, self.key, self.holder, self.lease_s = store, key, holder, lease_s
        self._watched: _Watched | None = None

    def acquire(self, wait_s: float = 0.0) -> None:
        """Become the holder, waiting up to `wait_s` for another to release it or to fall silent for its `lease_s`.

        BadConfig names the holder when the lease is not free by then. What this object has seen of the lease counts
        in a later call, too. A lease that looks abandoned is watched for as long as that takes, whatever `wait_s` is.
        """
        deadline_s = time.monotonic() + wait_s
        first: bytes | None = None
        while True:
            started_s = time.monotonic()
            stored = self.store.find(self.key)
            if stored is None:
                if self.store.create(self.key, self._record()):
                    return
                continue
            record = self._read(stored)
            if self._is_free(stored, record, started_s):
                if self.store.replace(self.key, self._record(), stored.etag):
                    return
                continue
            first = first or stored.data
            if stored.data == first:  # later it is another: its holder lives
                deadline_s = max(deadline_s, self._decided_s(stored, record))
            if (left_s := deadline_s - time.monotonic()) <= 0:
                raise self._refusal(record, wait_s)
            time.sleep(min(left_s, record.lease_s / 30, 1.0))

    def renew(self) -> None:
        """Change the object, as its holder. BadConfig names the holder when it is another's by now."""
        while True:
            stored = self.store.find(self.key)
            if stored is None:
                raise self._lost("deleted")
            record = self._read(stored)
            if record.released or record.holder != self.holder:
                raise self._lost("released" if record.released else f"held by '{record.holder}'")
            if self.store.replace(self.key, self._record(), stored.etag):
                return

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Renews it in the background while the block runs. A renewal that fails is said, and tried again in its time:
        what the lease protects asks for it by `acquire` before it acts."""
        ended = threading.Event()

        def renew() -> None:
            while not ended.wait(self.lease_s / RENEWALS):
                try:
                    self.renew()
                except ColchisError as error:
                    logger.warning("lease not renewed: %s", error)

        thread = threading.Thread(target=renew, name="lease", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()

    def release(self) -> None:
        """Let go, so that the next holder need not wait. No error when the lease is another's by now."""
        while True:
            stored = self.store.find(self.key)
            if stored is None or self._read(stored).holder != self.holder:
                return
            if self.store.replace(self.key, self._record(released=True), stored.etag):
                return

    def _is_free(self, stored: Stored, record: LeaseRecord, now_s: float) -> bool:
        if record.released or record.holder == self.holder:
            return True
        if self._watched is None or self._watched.data != stored.data:
            self._watched = _Watched(stored.data, time.monotonic())
        patience_s = record.lease_s * 2 / RENEWALS if _looks_abandoned(stored, record) else record.lease_s
        return now_s - self._watched.since_s >= patience_s

    def _decided_s(self, stored: Stored, record: LeaseRecord) -> float:
        """Until when, on the monotonic clock, an abandoned lease has to be watched; the past for one that is not."""
        if self._watched is None or not _looks_abandoned(stored, record):
            return float("-inf")
        return self._watched.since_s + record.lease_s * 2 / RENEWALS + 0.01

    def _record(self, *, released: bool = False) -> bytes:
        record = LeaseRecord(holder=self.holder, lease_s=self.lease_s, change=str(uuid.uuid4()), released=released)
        return record.to_bytes()

    def _read(self, stored: Stored) -> LeaseRecord:
        try:
            return LeaseRecord.from_bytes(stored.data, self.key)
        except BadData as error:
            raise BadData(error.what, where=self.key, hint="delete the object if nobody holds the lease") from error

    def _lost(self, state: str) -> BadConfig:
        return BadConfig(
            f"the lease of '{self.holder}' is lost: it is {state} now",
            where=self.key,
            hint="stop what it protects; a holder that is silent for its lease time loses it",
        )

    def _refusal(self, record: LeaseRecord, wait_s: float) -> BadConfig:
        return BadConfig(
            f"held by '{record.holder}', wanted by '{self.holder}' (waited {wait_s:g} s)",
            where=self.key,
            hint=f"stop '{record.holder}', or wait: its lease is free {record.lease_s:g} s after its last renewal",
        )


def _looks_abandoned(stored: Stored, record: LeaseRecord) -> bool:
    """By the store's clock, which tells whole seconds."""
    return stored.age_s >= record.lease_s + 1
