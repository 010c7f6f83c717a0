"""The object store, as everything else sees it: whole small objects, conditional writes, verified payloads."""

from __future__ import annotations

from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any

from colchis.components.errors import BadData
from colchis.components.store.payload import SMALL_BYTES, Payload
from colchis.components.store.requests import Absent, Lost, Requests
from colchis.components.store.settings import StoreSettings
from colchis.components.store.transfers import Transfer, abort, download, stored_bytes, upload, uploads, verify

Keys = list[str]


@dataclass(frozen=True)
class Stored:
    """A small object as it was read."""

    data: bytes
    etag: str
    """Opaque token for `replace`, never a checksum."""
    age_s: float = 0.0
    """How long ago it was written when it was read, both by the store's clock, in whole seconds. Ask it nothing that must
    hold when that clock jumps."""


def _age_s(answer: Any) -> float:
    date, written = answer["ResponseMetadata"]["HTTPHeaders"].get("date"), answer.get("LastModified")
    if date is None or written is None:
        return 0.0
    age_s: float = (parsedate_to_datetime(date) - written).total_seconds()
    return max(0.0, age_s)


class Store:
    """One bucket. Every call ends within about `deadline_s` per request that it makes (a part of a large object is a
    request of its own), with PeerUnavailable if the store does not answer. Thread-safe; not to be shared over a fork.
    """

    def __init__(self, settings: StoreSettings, *, deadline_s: float = 60.0) -> None:
        self.settings = settings
        self.requests = Requests(settings, deadline_s)

    def find(self, key: str) -> Stored | None:
        """The object at `key`, or None."""

        def read() -> Stored:
            answer = self.requests.client.get_object(Bucket=self.settings.bucket, Key=key)
            return Stored(data=answer["Body"].read(), etag=answer["ETag"], age_s=_age_s(answer))

        try:
            return self.requests.call("get", key, read)
        except Absent:
            return None

    def get(self, key: str) -> Stored:
        """The object at `key`. BadData when there is none."""
        found = self.find(key)
        if found is None:
            raise BadData(
                f"no such object in bucket '{self.settings.bucket}' of {self.settings.endpoint}",
                where=key,
                hint="what writes it has not run, or the object was deleted",
            )
        return found

    def put(self, key: str, data: bytes) -> None:
        """Write `data` at `key`, over anything that is there."""
        self._put(key, data)

    def create(self, key: str, data: bytes) -> bool:
        """Write `data` unless the key exists: of all who try, exactly one succeeds.

        True: the object there is ours. That includes our own write whose reply was lost, which is told by its content;
        so content that must be told apart (a commit, a lease) carries an id. False: it is somebody else's.
        """
        while True:
            try:
                self._put(key, data, IfNoneMatch="*")
            except Lost:
                winner = self.find(key)
                if winner is None:
                    continue  # deleted between the refusal and our reading: the key is free again
                return winner.data == data
            return True

    def replace(self, key: str, data: bytes, etag: str) -> bool:
        """Write `data` if the object is still the one that was read with `etag` (compare-and-swap).

        True: ours is written, also when its reply was lost. False: it was changed or deleted by somebody; read it
        again. A write that was asked for twice is told by its content, and ETags of some stores depend on content
        only: records that many writers change carry an id of the change.
        """
        tries = 0

        def write() -> None:
            nonlocal tries
            tries += 1
            self.requests.client.put_object(Bucket=self.settings.bucket, Key=key, Body=data, IfMatch=etag)

        try:
            self.requests.call("put", key, write)
        except (Absent, Lost):
            if tries == 1:
                return False
            found = self.find(key)
            return found is not None and found.data == data
        return True

    def list(self, prefix: str) -> Keys:
        """Keys under `prefix`, sorted here. For people and for housekeeping: nothing is decided by a listing."""

        def read() -> list[str]:
            pages = self.requests.client.get_paginator("list_objects_v2").paginate(
                Bucket=self.settings.bucket, Prefix=prefix
            )
            return sorted(entry["Key"] for page in pages for entry in page.get("Contents", ()))

        return self.requests.call("list", prefix, read)

    def folders(self, prefix: str) -> Keys:
        """The next part of every key under `prefix` ("runs/": names of runs), sorted; for people, as `list`."""

        def read() -> list[str]:
            pages = self.requests.client.get_paginator("list_objects_v2").paginate(
                Bucket=self.settings.bucket, Prefix=prefix, Delimiter="/"
            )
            found = (entry["Prefix"] for page in pages for entry in page.get("CommonPrefixes", ()))
            return sorted(name.removeprefix(prefix).rstrip("/") for name in found)

        return self.requests.call("list", prefix, read)

    def delete(self, key: str) -> None:
        """Remove `key`; no error when it is not there."""

        def remove() -> None:
            self.requests.client.delete_object(Bucket=self.settings.bucket, Key=key)

        try:
            self.requests.call("delete", key, remove)
        except Absent:
            return

    def put_payload(self, key: str, data: bytes, *, name: str | None = None) -> Payload:
        """Store bytes as a payload; `name` defaults to the last part of the key. Multipart above 16 MiB."""
        name = name or key.rsplit("/", 1)[-1]
        if len(data) > SMALL_BYTES:
            return upload(self.requests, key, data, name)
        self._put(key, data)
        return Payload.of(name, key, data)

    def upload(self, key: str, path: Path, *, name: str | None = None) -> Payload:
        """Store a file as a payload, in bounded memory. BadData when the file changes meanwhile or cannot be read."""
        name = name or key.rsplit("/", 1)[-1]
        try:
            if path.stat().st_size > SMALL_BYTES:
                return upload(self.requests, key, path, name)
            data = path.read_bytes()
        except OSError as error:
            raise BadData(f"cannot read {path} to upload it: {error.strerror}", where=key) from error
        return self.put_payload(key, data, name=name)

    def download(self, payload: Payload, path: Path) -> Transfer:
        """Fetch a payload to `path`, verified and whole or not at all. A file that is already right stays as it is."""
        return download(self.requests, payload, path)

    def holds(self, payload: Payload) -> bool:
        """Whether the object is there, whole and right: its content is read back, nothing is kept."""
        if stored_bytes(self.requests, payload.key) != payload.bytes:
            return False
        try:
            verify(self.requests, payload)
        except BadData:
            return False
        return True

    def verify(self, payload: Payload) -> None:
        """Read the object back and check it, keeping nothing. BadData names the object when it is absent or differs."""
        verify(self.requests, payload)

    def read(self, payload: Payload) -> bytes:
        """The content of a payload, verified. BadData names the object when it is absent or differs."""
        try:
            return self._read(payload)
        except BadData:
            return self._read(payload)  # it may have been damaged on the way: what differs twice is damaged there

    def _read(self, payload: Payload) -> bytes:
        data = self.get(payload.key).data
        found = payload.checksums()
        found.update(data)
        payload.check(found)
        return data

    def abort_uploads(self, prefix: str) -> int:
        """Abort every unfinished multipart upload under `prefix`, which must be the caller's alone. Returns how many.

        Needed only after a process was killed: an upload that fails aborts itself.
        """

        unfinished = uploads(self.requests, prefix)
        for key, upload_id in unfinished:
            abort(self.requests, key, upload_id)
        return len(unfinished)

    def _put(self, key: str, data: bytes, **condition: Any) -> None:
        def write() -> None:
            self.requests.client.put_object(Bucket=self.settings.bucket, Key=key, Body=data, **condition)

        self.requests.call("put", key, write)
