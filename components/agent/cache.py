"""A folder that the agents of one node share: each object of a version crosses the network once for all of them.

<algorithm>-<checksum>           an object, read-only; its time of access is that of its last use, and the oldest go first
<algorithm>-<checksum>.*.part    being fetched
locks/<two hex digits>           held by whoever fetches an object of that checksum, while others wait

It may be emptied at any time, also while agents run. Nothing in it is believed: what an agent stages it reads back.
"""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import time
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from colchis.components.errors import BadConfig, PeerUnavailable
from colchis.components.store import Payload, Store, Transfer
from colchis.components.weights.deadline import Deadline

log = logging.getLogger(__name__)

POLL_S = 0.05
"""Between two looks at a lock that another process holds."""


class NodeCache:
    """Objects by content. `budget_bytes` None: all of the disk but a tenth. BadConfig for a folder that cannot be written."""

    def __init__(self, folder: Path, *, budget_bytes: int | None = None) -> None:
        self.folder = folder.absolute()
        self.budget_bytes = budget_bytes
        try:
            (self.folder / "locks").mkdir(parents=True, exist_ok=True)
            (self.folder / "locks" / "00").open("a").close()
        except OSError as e:
            raise BadConfig(
                f"the cache of the node cannot be written by user {os.geteuid()} ({e.strerror})",
                where=str(self.folder),
                hint="make the folder on each node for the agents' user: install -d -o 10001 -g 10001 -m 0700 FOLDER",
            ) from e

    def download(self, store: Store, payload: Payload, target: Path, deadline: Deadline) -> Transfer:
        """`Store.download` by way of the cache. The transfer says `reused` when another agent had fetched the object.

        An object that has no room here, or a folder that fails meanwhile, is fetched past. PeerUnavailable when whoever fetches
        it takes longer than the deadline; else raises as `Store.download`.
        """
        try:
            return self._through_cache(store, payload, target, deadline)
        except (OSError, BadConfig) as error:  # BadConfig: the disk filled up in this moment
            log.warning("the cache of this node fails (%s); %s is fetched past it", error, payload.key)
            return store.download(payload, target)

    def _through_cache(self, store: Store, payload: Payload, target: Path, deadline: Deadline) -> Transfer:
        started = time.monotonic()
        entry = self._entry(payload)
        with self._locked(entry, deadline):
            if _use(entry, target):
                return Transfer(payload.key, 0, time.monotonic() - started, retries=0, reused=True)
            if not self._make_room(payload.bytes):
                return store.download(payload, target)
            for left in self.folder.glob(f"{entry.name}.*.part"):
                left.unlink(missing_ok=True)  # its writer is gone: the lock is ours
            part = entry.with_name(f"{entry.name}.{uuid.uuid4().hex[:8]}.part")
            try:
                transfer = store.download(payload, part)
                part.chmod(0o444)
                _link(part, target)
                part.rename(entry)
            finally:
                part.unlink(missing_ok=True)
            return transfer

    def forget(self, payloads: Iterable[Payload]) -> None:
        """Drop objects of which one was found damaged."""
        for payload in payloads:
            self._entry(payload).unlink(missing_ok=True)

    def _entry(self, payload: Payload) -> Path:
        algorithm = "sha256" if payload.sha256 else "xxh3"
        return self.folder / f"{algorithm}-{payload.sha256 or payload.xxh3_128}"

    @contextmanager
    def _locked(self, entry: Path, deadline: Deadline) -> Iterator[None]:
        with (self.folder / "locks" / entry.name.partition("-")[2][:2]).open("a") as file:
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
        """Remove the objects that were not used for longest until there is room for another; False when there is none."""
        entries = sorted(self._entries(), key=lambda item: item[0])
        used = sum(size for _, size, _ in entries)
        disk = shutil.disk_usage(self.folder)
        room = disk.free - disk.total // 10
        if self.budget_bytes is not None:
            room = min(self.budget_bytes - used, disk.free)
        for _, size, path in entries:
            if room >= bytes_:
                break
            path.unlink(missing_ok=True)
            room += size
        if room < bytes_:
            log.warning("the cache of this node has no room for %d bytes; they are fetched past it", bytes_)
        return room >= bytes_

    def _entries(self) -> Iterator[tuple[float, int, Path]]:
        for path in self.folder.iterdir():
            with suppress(FileNotFoundError):  # another agent made room
                stat = path.stat()
                if path.is_file() and path.suffix != ".part":
                    yield stat.st_atime, stat.st_size, path


def _use(entry: Path, target: Path) -> bool:
    """Take an object that is there; False when it is not, or is removed in this moment. Only the time of access changes:
    agents tell by the time of change that nobody touched what they verified."""
    try:
        os.utime(entry, ns=(time.time_ns(), entry.stat().st_mtime_ns))
        _link(entry, target)
    except FileNotFoundError:
        return False
    return True


def _link(source: Path, target: Path) -> None:
    """The same bytes under another name: a hard link on the same disk, else a copy."""
    target.unlink(missing_ok=True)
    try:
        os.link(source, target)
    except FileNotFoundError:
        raise
    except OSError:
        shutil.copyfile(source, target)
