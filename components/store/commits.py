"""The commit protocol: payload first, commit last, first commit wins.

An attempt writes its payload under a prefix that nobody else uses, then creates one object, `commit.json`, with
`If-None-Match: *`. The store lets exactly one attempt do that. Whoever loses reads the winner's commit and returns it
as its own result; its payload stays behind, named by no commit. A process that starts again looks for the commit
first. So a stage may be run twice, at once or later, and has one result.
"""

from __future__ import annotations

import hashlib
import json
import threading
import uuid
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, JsonValue, PrivateAttr, ValidationError

import colchis
from colchis.components.errors import BadData, Bug
from colchis.components.store import keys
from colchis.components.store.keys import StageKey
from colchis.components.store.payload import Payload
from colchis.components.store.record import Record
from colchis.components.store.store import Store


def _unique(payload: list[Payload]) -> list[Payload]:
    names = [entry.name for entry in payload]
    if repeated := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"payload names occur twice: {repeated}")
    return payload


def _finite(outputs: dict[str, JsonValue]) -> dict[str, JsonValue]:
    json.dumps(outputs, allow_nan=False)
    return outputs


class Commit(Record):
    """What one stage (or one shard of it) has decided. Immutable: there is one per StageKey, for ever."""

    format: Literal[1] = 1
    run: str
    iteration: int
    stage: str
    shard: int | None = None
    attempt: str
    """Who wrote it: drawn by the process, never taken from the pod (Argo may run one pod name twice)."""
    created_at: datetime
    """By the clock of the writer: for people, nothing is decided by it."""
    payload: Annotated[list[Payload], AfterValidator(_unique)] = Field(default_factory=list)
    outputs: Annotated[dict[str, JsonValue], AfterValidator(_finite)] = Field(default_factory=dict)
    """Small values that later stages decide by (version, counts, digests)."""
    inputs: dict[str, str] = Field(default_factory=dict)
    """What was consumed: commit key -> digest of that commit."""
    code_version: str

    _digest: str = PrivateAttr(default="")

    @property
    def stage_key(self) -> StageKey:
        return StageKey(self.run, self.iteration, self.stage, self.shard)

    @property
    def key(self) -> str:
        return self.stage_key.commit

    @property
    def digest(self) -> str:
        """sha256 of the body as it is stored: what a consumer writes into its own `inputs`."""
        return self._digest

    def payload_named(self, name: str) -> Payload:
        """The payload called `name`. BadData when this commit has none."""
        for entry in self.payload:
            if entry.name == name:
                return entry
        raise BadData(
            f"commit of {self.stage_key} has no payload '{name}'; it has {[entry.name for entry in self.payload]}",
            where=self.key,
        )

    @classmethod
    def parse(cls, body: bytes, stage: StageKey) -> Commit:
        """The commit in `body`, which must be that of `stage`. BadData names what is wrong."""
        commit = cls.from_bytes(body, stage.commit)
        if commit.stage_key != stage:
            raise BadData(f"commit of {stage} says that it is the one of {commit.stage_key}", where=stage.commit)
        commit._digest = hashlib.sha256(body).hexdigest()
        return commit


def find_commit(store: Store, stage: StageKey) -> Commit | None:
    """The commit of `stage`, or None while nobody has committed. BadData when it is there and wrong."""
    stored = store.find(stage.commit)
    return None if stored is None else Commit.parse(stored.data, stage)


def read_commit(store: Store, stage: StageKey) -> Commit:
    """The commit of `stage`. BadData when nobody has committed."""
    commit = find_commit(store, stage)
    if commit is None:
        raise BadData(
            f"{stage} has not been committed",
            where=stage.commit,
            hint="run that stage first, or again: its pod ended without a commit",
        )
    return commit


class Attempt:
    """One try at a stage. Payload may be stored from several threads; `commit` ends it."""

    def __init__(self, store: Store, stage: StageKey) -> None:
        self.store, self.stage = store, stage
        self.id = str(uuid.uuid4())
        self.prefix = stage.attempt(self.id)
        self._payload: dict[str, Payload | None] = {}
        self._lock = threading.Lock()

    def put(self, name: str, data: bytes) -> Payload:
        """Store bytes as payload `name` of this attempt."""
        self._reserve(name)
        return self._keep(self.store.put_payload(self.prefix + name, data, name=name))

    def upload(self, name: str, path: Path) -> Payload:
        """Store a file as payload `name` of this attempt."""
        self._reserve(name)
        return self._keep(self.store.upload(self.prefix + name, path, name=name))

    def adopt(self, payload: Payload) -> Payload:
        """List an object that exists already: work that an earlier attempt had finished, or an unchanged version."""
        self._reserve(payload.name)
        return self._keep(payload)

    def commit(self, outputs: Mapping[str, JsonValue] | None = None, inputs: Mapping[str, str] | None = None) -> Commit:
        """Commit what was stored. Returns the commit that holds, which is another attempt's when that was first."""
        with self._lock:
            unfinished = [name for name, payload in self._payload.items() if payload is None]
            payload = [payload for payload in self._payload.values() if payload is not None]
        if unfinished:
            raise Bug(f"attempt at {self.stage} commits while {unfinished} is not stored", where=self.prefix)
        document: dict[str, Any] = {
            "run": self.stage.run,
            "iteration": self.stage.iteration,
            "stage": self.stage.stage,
            "shard": self.stage.shard,
            "attempt": self.id,
            "created_at": datetime.now(UTC),
            "payload": sorted(payload, key=lambda entry: entry.name),
            "outputs": dict(outputs or {}),
            "inputs": dict(inputs or {}),
            "code_version": colchis.__version__,
        }
        try:
            body = Commit.model_validate(document).to_bytes()
        except ValidationError as error:
            raise Bug(f"attempt at {self.stage}: outputs are not finite JSON values: {error}") from error
        if self.store.create(self.stage.commit, body):
            return Commit.parse(body, self.stage)
        return read_commit(self.store, self.stage)

    def _reserve(self, name: str) -> None:
        keys.file_name(name)
        with self._lock:
            if name in self._payload:
                raise Bug(f"attempt at {self.stage} stores payload '{name}' twice", where=self.prefix)
            self._payload[name] = None

    def _keep(self, payload: Payload) -> Payload:
        with self._lock:
            self._payload[payload.name] = payload
        return payload
