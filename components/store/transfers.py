"""Large objects: parallel parts in bounded memory, our own checksums on the way, all or nothing.

An upload holds at most PARALLEL + 2 parts in memory, a download at most PARALLEL + 2 ranges.
"""

from __future__ import annotations

import errno
import fcntl
import glob
import os
import shutil
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from colchis.components.errors import BadConfig, BadData, PeerUnavailable
from colchis.components.store.payload import Checksums, Payload
from colchis.components.store.requests import Absent, NoUpload, OutOfRange, Requests

PARALLEL = 8
PART_BYTES = 16 << 20
MOST_PARTS = 10_000
RANGE_BYTES = 8 << 20
VERIFY_BYTES = 256 << 20
CHUNK_BYTES = 256 << 10
ABORT_DEADLINE_S = 10.0


@dataclass(frozen=True)
class Transfer:
    """What one download cost."""

    key: str
    bytes: int
    """Bytes that crossed the network; 0 when the file was already there."""
    seconds: float
    retries: int
    """Requests beyond the first of each range."""
    reused: bool
    """The file was there, with the right size and checksums."""


def part_bytes(size_bytes: int) -> int:
    """Size of all parts but the last: 16 MiB, more when the object would need over 10,000 parts."""
    whole_mib = -(-size_bytes // (MOST_PARTS << 20)) << 20
    return max(PART_BYTES, whole_mib)


# Upload


def upload(requests: Requests, key: str, source: Path | bytes, name: str) -> Payload:
    """Multipart upload of a file or of bytes. An upload that the store has forgotten is made once more."""
    for last_try in (False, True):
        try:
            return _upload(requests, key, source, name)
        except NoUpload as error:
            if last_try:
                raise PeerUnavailable(
                    f"object store {requests.settings.endpoint} lost a multipart upload twice: {error}",
                    where=key,
                    hint="check its disk and its rules for unfinished uploads",
                ) from error
    raise AssertionError("unreachable")


def _upload(requests: Requests, key: str, source: Path | bytes, name: str) -> Payload:
    bucket, client = requests.settings.bucket, requests.client
    starts = 0

    def start() -> str:
        nonlocal starts
        starts += 1
        return str(client.create_multipart_upload(Bucket=bucket, Key=key)["UploadId"])

    upload_id = requests.call("start upload", key, start)
    try:
        checksums = Checksums(sha256=False, xxh3_128=True)
        parts = _send_parts(requests, key, upload_id, source, checksums)
        payload = Payload.measured(name, key, checksums)
        _complete(requests, payload, upload_id, parts)
    except BaseException as error:
        try:
            abort(requests, key, upload_id)
        except (PeerUnavailable, BadConfig) as failure:
            error.add_note(f"multipart upload {upload_id} of {key} is left open: {failure}")
        raise
    if starts > 1:
        _abort_others(requests, key)
    return payload


@dataclass(frozen=True)
class _Part:
    number: int
    bytes: int
    etag: str


def _send_parts(
    requests: Requests, key: str, upload_id: str, source: Path | bytes, checksums: Checksums
) -> list[_Part]:
    cancel = threading.Event()

    def send(number: int, data: bytes) -> _Part:
        def put() -> str:
            answer = requests.client.upload_part(
                Bucket=requests.settings.bucket, Key=key, UploadId=upload_id, PartNumber=number, Body=data
            )
            return str(answer["ETag"])

        return _Part(number, len(data), requests.call(f"put part {number}", key, put, cancel=cancel))

    sent: list[_Part] = []
    pending: deque[Future[_Part]] = deque()
    with ThreadPoolExecutor(PARALLEL, thread_name_prefix="upload") as pool:
        try:
            for number, data in enumerate(_parts(key, source), start=1):
                checksums.update(data)
                pending.append(pool.submit(send, number, data))
                if len(pending) > PARALLEL:
                    sent.append(pending.popleft().result())
            sent.extend(future.result() for future in pending)
        except BaseException:
            cancel.set()
            pool.shutdown(wait=True, cancel_futures=True)
            raise
    return sent


def _parts(key: str, source: Path | bytes) -> Iterator[bytes]:
    if isinstance(source, bytes):
        step = part_bytes(len(source))
        for start in range(0, len(source), step):
            yield source[start : start + step]
        return
    try:
        with source.open("rb", buffering=0) as file:
            before = os.fstat(file.fileno())
            step, read_bytes = part_bytes(before.st_size), 0
            while data := file.read(step):
                read_bytes += len(data)
                yield data
            after = os.fstat(file.fileno())
    except OSError as error:
        raise BadData(f"cannot read {source} to upload it: {error.strerror}", where=key) from error
    if (before.st_size, before.st_mtime_ns) != (read_bytes, after.st_mtime_ns):
        raise BadData(
            f"{source} changed while it was uploaded: {before.st_size} bytes before, {read_bytes} read",
            where=key,
            hint="upload a file only when its writer has closed it",
        )


def _complete(requests: Requests, payload: Payload, upload_id: str, parts: list[_Part]) -> None:
    """Make the object visible, once the store holds every part at the size we sent; then check the whole."""
    bucket, client = requests.settings.bucket, requests.client
    where = {"Bucket": bucket, "Key": payload.key}

    def held() -> dict[int, int]:
        pages = client.get_paginator("list_parts").paginate(**where, UploadId=upload_id)
        return {int(part["PartNumber"]): int(part["Size"]) for page in pages for part in page.get("Parts", ())}

    found = requests.call("list parts", payload.key, held)
    expected = {part.number: part.bytes for part in parts}
    if found != expected or sum(expected.values()) != payload.bytes:
        wrong = sorted(number for number in expected.keys() | found.keys() if expected.get(number) != found.get(number))
        raise NoUpload(f"parts {wrong[:8]} of {payload.key} are not held at the size that was sent")
    body = {"Parts": [{"PartNumber": part.number, "ETag": part.etag} for part in parts]}

    def complete() -> None:
        client.complete_multipart_upload(**where, UploadId=upload_id, MultipartUpload=body)

    try:
        requests.call("complete upload", payload.key, complete)
    except NoUpload:
        # The reply to our completion was lost and it was asked for again, or the store forgot the upload: the content
        # of the object tells which.
        try:
            verify(requests, payload)
        except BadData as error:
            raise NoUpload(f"completing it failed, and: {error}") from error
        return
    if (found_bytes := stored_bytes(requests, payload.key)) != payload.bytes:
        raise BadData(
            f"object '{payload.name}' was stored with {found_bytes} bytes, expected {payload.bytes}",
            where=payload.key,
            hint=f"the store at {requests.settings.endpoint} does not keep what it is given: run the probe",
        )


def abort(requests: Requests, key: str, upload_id: str) -> None:
    """Drop an unfinished upload and its parts; no error when the store does not know it."""

    def drop() -> None:
        requests.client.abort_multipart_upload(Bucket=requests.settings.bucket, Key=key, UploadId=upload_id)

    try:
        requests.call("abort upload", key, drop, deadline_s=min(ABORT_DEADLINE_S, requests.deadline_s))
    except (Absent, NoUpload):
        return


def stored_bytes(requests: Requests, key: str) -> int | None:
    """Size of the object at `key`, or None."""

    def read() -> int:
        return int(requests.client.head_object(Bucket=requests.settings.bucket, Key=key)["ContentLength"])

    try:
        return requests.call("head", key, read)
    except Absent:
        return None


def uploads(requests: Requests, prefix: str) -> list[tuple[str, str]]:
    """(key, upload id) of every unfinished upload under `prefix`."""

    def read() -> list[tuple[str, str]]:
        pages = requests.client.get_paginator("list_multipart_uploads").paginate(
            Bucket=requests.settings.bucket, Prefix=prefix
        )
        return [(str(entry["Key"]), str(entry["UploadId"])) for page in pages for entry in page.get("Uploads", ())]

    return requests.call("list uploads", prefix, read)


def _abort_others(requests: Requests, key: str) -> None:
    """When the reply to a start was lost, that upload is open and nobody knows its id."""
    for other_key, upload_id in uploads(requests, key):
        if other_key == key:
            abort(requests, key, upload_id)


# Download


def download(requests: Requests, payload: Payload, path: Path) -> Transfer:
    """Fetch `payload` into a temporary file beside `path`, verify it, rename it to `path`.

    Bytes damaged on the way are fetched once more; BadData names the object when they differ again. BadConfig when
    the disk cannot hold it. No fsync: after a machine crash the file is verified again before it is used.
    """
    started_s = time.monotonic()
    if _is_right(payload, path):
        return Transfer(payload.key, 0, time.monotonic() - started_s, 0, reused=True)
    retries = 0
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if (free_bytes := shutil.disk_usage(path.parent).free) < payload.bytes:
            raise OSError(errno.ENOSPC, f"No space left on device ({free_bytes} bytes free)")
        with _temporary(path) as file:
            for last_try in (False, True):
                found = payload.checksums()
                retries += _fetch(requests, payload, file, found)
                try:
                    payload.check(found)
                    break
                except BadData:
                    if last_try:
                        raise
                    retries += 1
                    file.truncate(0)
    except OSError as error:
        raise BadConfig(
            f"cannot write {payload.bytes} bytes to {path}: {error.strerror}",
            where=payload.key,
            hint="give the folder more room, or choose another one",
        ) from error
    return Transfer(payload.key, payload.bytes, time.monotonic() - started_s, retries, reused=False)


def verify(requests: Requests, payload: Payload) -> None:
    """Read the stored object back and check it, keeping nothing. BadData when it is absent or differs."""
    found = payload.checksums()
    for start, end in _ranges(payload.bytes, VERIFY_BYTES):
        _read_range(requests, payload, start, end, lambda _, chunk: found.update(chunk))
    payload.check(found)


def _fetch(requests: Requests, payload: Payload, file: BinaryIO, found: Checksums) -> int:
    """All ranges of the object into the file and through `found`, in order. Returns the number of retries.

    One thread writes: several that write into one file spend their time waiting for its lock in the kernel.
    """
    cancel = threading.Event()
    retries = 0

    def fetch(start: int, end: int) -> tuple[list[bytes], int]:
        chunks: list[bytes] = []  # as they came: joining them would touch every byte once more
        tries = _read_range(requests, payload, start, end, lambda _, chunk: chunks.append(chunk), cancel)
        return chunks, tries

    file.seek(0)
    with ThreadPoolExecutor(PARALLEL, thread_name_prefix="download") as pool:
        pending: deque[Future[tuple[list[bytes], int]]] = deque()
        ranges = deque(_ranges(payload.bytes, RANGE_BYTES))
        try:
            while pending or ranges:
                while ranges and len(pending) <= PARALLEL:
                    pending.append(pool.submit(fetch, *ranges.popleft()))
                chunks, tries = pending.popleft().result()
                retries += tries
                for chunk in chunks:
                    file.write(chunk)
                    found.update(chunk)
        except BaseException:
            cancel.set()
            pool.shutdown(wait=True, cancel_futures=True)
            raise
    return retries


def _ranges(size_bytes: int, step: int) -> list[tuple[int, int]]:
    return [(start, min(start + step, size_bytes)) for start in range(0, max(size_bytes, 1), step)]


def _read_range(
    requests: Requests,
    payload: Payload,
    start: int,
    end: int,
    write: Callable[[int, bytes], None],
    cancel: threading.Event | None = None,
) -> int:
    """Bytes [start, end) of the object through `write(offset, chunk)`, in order; a broken reply is taken up where it
    broke. Returns the number of retries."""
    offset, tries = start, 0

    def read() -> None:
        nonlocal offset, tries
        tries += 1
        if tries > 1 and offset == end:
            return
        whole = (offset, end) == (0, payload.bytes)
        part = {} if whole else {"Range": f"bytes={offset}-{end - 1}"}
        answer = requests.client.get_object(Bucket=requests.settings.bucket, Key=payload.key, **part)
        with closing(answer["Body"]) as body:
            if not whole and "ContentRange" not in answer:
                raise BadConfig(f"object store {requests.settings.endpoint} ignores Range", where=payload.key)
            held = answer["ContentLength"] if whole else int(answer["ContentRange"].rpartition("/")[2])
            if held != payload.bytes:
                raise _wrong_size(payload, f"found {held}")
            while chunk := body.read(CHUNK_BYTES):
                write(offset, chunk)
                offset += len(chunk)

    while True:
        reached = offset
        try:
            requests.call("get", payload.key, read, cancel=cancel)
            return tries - 1
        except PeerUnavailable:
            if offset == reached or (cancel is not None and cancel.is_set()):
                raise  # a slow store that moves is not an absent one: the deadline counts from the last progress
        except OutOfRange:
            raise _wrong_size(payload, f"it ends before {end}") from None
        except Absent:
            raise BadData(
                f"object '{payload.name}' is not in bucket '{requests.settings.bucket}'",
                where=payload.key,
                hint="it was committed and then deleted: restore it, or make it again in a new run",
            ) from None


def _wrong_size(payload: Payload, found: str) -> BadData:
    return BadData(
        f"object '{payload.name}' is not what was committed: bytes expected {payload.bytes}, {found}",
        where=payload.key,
        hint="it was changed after it was written: restore it, or make it again in a new run",
    )


def _is_right(payload: Payload, path: Path) -> bool:
    try:
        if path.stat().st_size != payload.bytes:
            return False
        found = payload.checksums()
        with path.open("rb", buffering=0) as file:
            while data := file.read(CHUNK_BYTES):
                found.update(data)
        payload.check(found)
    except (FileNotFoundError, BadData):
        return False
    return True


def remove_leftovers(folder: Path, name: str | None = None) -> None:
    """Remove what killed writers left of the file `name` in `folder`, or of all files there. A writer holds a lock on its file,
    which tells what a living one makes."""
    for left in folder.glob(f".{'*' if name is None else glob.escape(name)}.*.part"):
        with suppress(FileNotFoundError, BlockingIOError), left.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            left.unlink()


@contextmanager
def _temporary(path: Path) -> Iterator[BinaryIO]:
    """A new file beside `path` that becomes `path` when the block ends well, and vanishes otherwise.

    What a killed writer left of it is removed.
    """
    remove_leftovers(path.parent, path.name)
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.part")
    try:
        with temporary.open("xb") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield file
            file.flush()
            temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
