"""A folder that the agents of one node share: each object of a version crosses the network once for all of them.

<algorithm>-<checksum>           an object, read-only; its time of access is that of its last use, and the oldest go first
.<algorithm>-<checksum>.*.part   being fetched, or left by an agent that was killed: removed when room is made
locks/<two hex digits>           held by whoever fetches an object of that checksum, while others wait

It may be emptied at any time, also while agents run. Nothing in it is believed: what an agent stages it reads back.
"""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from colchis.components.errors import BadConfig, PeerUnavailable
from colchis.components.store import Payload, Store, Transfer
from colchis.components.store.transfers import remove_leftovers
from colchis.components.weights.deadline import Deadline

log = logging.getLogger(__name__)

POLL_S = 0.05
"""Between two looks at a lock that another process holds."""


class NodeCache:
    """Objects by content: at most `budget_bytes`, and never the last tenth of the disk. BadConfig for a folder that cannot be
    written."""

    def __init__(self, folder: Path, *, budget_bytes: int | None = None) -> None:
        self.folder = folder.absolute()
        self.budget_bytes = budget_bytes
        try:
            with self._locks().joinpath("00").open("a"):
                pass
        except OSError as e:
            raise BadConfig(
                f"the cache of the node cannot be written by user {os.geteuid()} ({e.strerror})",
                where=str(self.folder),
                hint="make the folder on each node for the agents' user: install -d -o 10001 -g 10001 -m 0700 FOLDER",
            ) from e

    def download(self, store: Store, payload: Payload, target: Path, deadline: Deadline) -> Transfer:
        """`Store.download` by way of the cache. The transfer says `reused` when another agent had fetched the object.

        An object that has no room here is fetched past it, as is everything when the folder fails. PeerUnavailable when whoever
        fetches it takes longer than the deadline; else raises as `Store.download`.
        """
        entry = self._entry(payload)
        try:
            with self._locked(entry, deadline):
                transfer = self._fill(store, payload, entry)
                if transfer is not None and _link(entry, target):
                    return transfer
        except (OSError, BadConfig) as error:  # BadConfig: somebody filled the disk while it was fetched
            log.warning("%s is fetched past the cache of this node: %s", payload.key, error)
        return store.download(payload, target)

    def _fill(self, store: Store, payload: Payload, entry: Path) -> Transfer | None:
        """Have the object here, under its lock; None when there is no room for it."""
        started = time.monotonic()
        with suppress(FileNotFoundError):
            # Only the time of access changes: agents tell by the time of change that nobody touched what they verified.
            os.utime(entry, ns=(time.time_ns(), entry.stat().st_mtime_ns))
            return Transfer(payload.key, 0, time.monotonic() - started, retries=0, reused=True)
        if not self._make_room(payload.bytes):
            log.warning("the cache of this node has no room for %d bytes", payload.bytes)
            return None
        transfer = store.download(payload, entry)
        entry.chmod(0o444)
        return transfer

    def forget(self, payloads: Iterable[Payload]) -> None:
        """Drop objects of which one was found damaged."""
        for payload in payloads:
            self._entry(payload).unlink(missing_ok=True)

    def _entry(self, payload: Payload) -> Path:
        algorithm = "sha256" if payload.sha256 else "xxh3"
        return self.folder / f"{algorithm}-{payload.sha256 or payload.xxh3_128}"

    def _locks(self) -> Path:
        folder = self.folder / "locks"
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    @contextmanager
    def _locked(self, entry: Path, deadline: Deadline) -> Iterator[None]:
        with self._locks().joinpath(entry.name.partition("-")[2][:2]).open("a") as file:
            while True:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if not deadline.left_s():
                        raise PeerUnavailable(
                            f"another agent of this node fetches it, not done within {deadline.seconds:g} s",
                            where=str(entry),
                            hint="look at that agent's log; raise the deadline for a slow store",
                        ) from None
                    time.sleep(POLL_S)
            yield

    def _make_room(self, bytes_: int) -> bool:
        """Remove the objects that were not used for longest until there is room for another; False, and nothing is removed, where
        even that would not do."""
        remove_leftovers(self.folder)
        entries = sorted(self._entries(), key=lambda item: item[0])
        used = sum(size for _, size, _ in entries)
        disk = shutil.disk_usage(self.folder)
        room = disk.free - disk.total // 10  # a node evicts pods below that
        if self.budget_bytes is not None:
            room = min(room, self.budget_bytes - used)
        if room + used < bytes_:
            return False
        for _, size, path in entries:
            if room >= bytes_:
                break
            path.unlink(missing_ok=True)
            room += size
        return room >= bytes_

    def _entries(self) -> Iterator[tuple[float, int, Path]]:
        """When each object was last used, its bytes, its path."""
        for path in self.folder.iterdir():
            with suppress(FileNotFoundError):  # another agent made room
                stat = path.stat()
                if path.is_file() and path.suffix != ".part":
                    yield stat.st_atime, stat.st_size, path


def _link(entry: Path, target: Path) -> bool:
    """The same bytes under another name: a hard link on the same disk, else a copy. False when the object was removed in this
    moment, or there is no room for a copy: whoever fetches it says so."""
    target.unlink(missing_ok=True)
    with suppress(OSError):
        os.link(entry, target)
        return True
    try:
        shutil.copyfile(entry, target)
    except OSError:
        target.unlink(missing_ok=True)
        return False
    return True
