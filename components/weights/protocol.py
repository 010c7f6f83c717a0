"""What an agent is asked and what it answers: JSON over HTTP, bearer token, one record per message.

    GET  /status    Status                  POST /prepare   Prepare  -> Prepared
    GET  /ready     200 or 503              POST /verify    Verify   -> Verified
    GET  /live      200                     POST /activate  Activate -> Activated
    GET  /metrics   Prometheus text         POST /probe     Probe    -> Probed

Every answer names the engine in the header `x-colchis-engine`. A refusal is a `Refusal` with the status of its class
(`STATUS_OF`), so that the client raises the error that the agent raised.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from colchis.components.errors import BadConfig, BadData, Bug, ColchisError, PeerUnavailable, Temporary

ENGINE_HEADER = "x-colchis-engine"

STATUS_OF: dict[type[ColchisError], int] = {
    BadData: 422,
    BadConfig: 409,
    PeerUnavailable: 504,
    Temporary: 503,
    Bug: 500,
}
ERROR_OF = {kind.__name__: kind for kind in STATUS_OF}


class Message(BaseModel):
    """Base of all messages: unknown fields are refused on both sides, so a newer peer is noticed."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class EngineState(StrEnum):
    """What the agent knows of its engine."""

    UNREACHABLE = "unreachable"
    """No answer: starting, restarting or gone."""
    EMPTY = "empty"
    """Alive, and serving no version that this agent gave it."""
    SERVING = "serving"
    """Alive, and proven to serve `version`."""
    ACTIVATING = "activating"
    """An activation is under way; the engine may be paused."""
    FAILED = "failed"
    """An activation failed; `reason` says how. Not in the ready set until one succeeds."""


class ServedAdapter(Message):
    """A version that is served as an adapter."""

    name: str
    """What a request gives as `lora_path`."""
    label: str
    """The engine's own label, which names the base; a token under another one is not of this version."""


class Status(Message):
    """GET /status."""

    engine_id: str
    engine_url: str
    pool: str | None
    state: EngineState
    version: int | None
    """Proven for this process of the engine; None otherwise, whatever label the engine shows."""
    run: str | None
    weights_digest: str | None
    adapter: ServedAdapter | None = None
    """How to ask for the version, where it is an adapter; None: it is served whole."""
    reason: str | None = None
    """Why the engine is not ready."""
    prepared: dict[str, list[int]]
    """Run -> versions that are staged and were verified."""
    ready: bool
    boot_id: str
    """Drawn at each start of the agent."""
    engine_start: str | None
    """Differs for each start of the engine; None while it cannot be read."""
    proven: dict[str, int] = {}
    """Labels under which the engine served before it was proven what it holds, of the last loads, and the version that it was."""
    pause_lease_s: float | None = None
    """Seconds until a pause under way is undone; None when the engine is not paused by this agent."""


class Prepare(Message):
    """Fetch and verify a version while the engine goes on serving."""

    run: str
    version: int = Field(ge=0)
    direct: bool = False
    """There is a sender: an engine that can receive a version needs no copy of it here."""
    deadline_s: float = Field(600.0, gt=0)


class FetchedObject(Message):
    """One object of a transfer."""

    key: str
    bytes: int
    seconds: float
    retries: int
    reused: bool
    """It was there, right, and crossed no network."""


class Prepared(Message):
    """Boundary 3."""

    version: int
    weights_digest: str
    """Of the manifest that the staged copy, read back from the disk, agrees with: the version's, or its adapter's where the
    engine serves that. Where a sender has the copy, the manifest's."""
    adapter: str | None = None
    """Name of the adapter, where that was staged."""
    bytes: int
    seconds: float
    mb_per_s: float
    p95_s: float
    retries: int
    objects: list[FetchedObject]
    receivers: int = 0
    """Ranks of an engine that is to receive the version from a sender: its manifest was checked, and nothing was fetched.
    0: it was staged."""
    repeated: bool = False
    """The version was staged by an earlier call, which moved these objects; `seconds` are this call's."""


class Verify(Message):
    """Read the staged copy again under its lock."""

    run: str
    version: int = Field(ge=0)
    deadline_s: float = Field(600.0, gt=0)


class Verified(Message):
    """Boundary 2: the first of its two readings (activate makes the second)."""

    version: int
    weights_digest: str
    adapter: str | None = None
    tensors: int
    bytes: int
    seconds: float


class Predicted(Message):
    """What the tensors of an engine must hash to (`components/weights/checksums.py`)."""

    dtype: str
    checksums: dict[str, str]
    padded: dict[str, str]


class Offer(Message):
    """Where a sender waits for one engine, with a copy of a version."""

    host: str = Field(min_length=1)
    port: int = Field(ge=1, le=65535)
    group: str = Field(min_length=1)
    """Name of the process group; used once."""
    ranks: int = Field(ge=2)
    """Of the group: the sender, which is rank 0, and those of the engine."""
    backend: Literal["gloo", "nccl"]
    bucket_bytes: int = Field(gt=0)
    """Most bytes of one broadcast (`components/weights/buckets.py`)."""
    prediction: Predicted | None
    """Computed from the sender's copy; None where it cannot be."""


class Activate(Message):
    """Make the engine serve a prepared version, in one call."""

    run: str
    version: int = Field(ge=0)
    kind: Literal["full", "same"]
    pause: Literal["retract", "abort"] = "retract"
    offer: Offer | None = None
    """Where the version comes from, for an engine that `Prepared` said is to receive it; None: from the staged copy."""
    deadline_s: float = Field(120.0, gt=0)
    """Also the lease on the pause."""


class Activated(Message):
    """Boundary 4, the acknowledgement of boundary 5, and the second reading of boundary 2."""

    version: int
    previous: int | None
    weights_digest: str
    adapter: str | None = None
    """Name of the adapter that makes the version of the base; no pause is needed then."""
    pause_s: float
    """From the end of the step that was under way, the last to draw tokens, until the engine continued."""
    pause_call_s: float = 0.0
    """What the call took that asked for the pause: until it was answered, requests may have drawn tokens."""
    load_s: float
    proof_s: float = 0.0
    """From the end of the pause until the engine had the version's number, serving under the mark."""
    mark: str | None = None
    """The engine's label in that time; None when nothing was loaded."""
    predicted: bool
    """Whether the engine's checksums could be predicted from the commit."""
    checksums_equal: bool | None
    """Predicted and reported checksums; None when nothing was predicted."""
    checksums: int
    """Tensors that the engine reported."""
    engine_checksum: str
    """Over all of the engine's tensors: equal on replicas of equal parallelism."""
    changed: bool | None
    """Against what the engine served before; None when nothing could be compared."""
    version_reported: str
    """The engine's own label after the load."""
    direct: bool = False
    """The engine received the version from a sender, which has the copy that must be read again."""
    digest_before: str
    digest_after: str | None
    """The staged copy before and after the load; of a version that was received, the manifest's and None."""
    flush: bool
    """The engine acknowledged that its cache was emptied."""
    cached_tokens_before: int | None
    """Of a canary prompt sent twice before the pause: whether the engine caches prefixes at all."""
    cached_tokens_after: int | None
    """Of the same prompt, first request after the flush; None when it could not be asked before, or was not cached then and was
    not answered."""
    dirty_load: bool = False
    """The engine said that weights were updated but its cache was not; the agent flushed it itself."""
    repeated: bool = False
    """The engine served this version already; the numbers are those of the activation that did it."""


class Probe(Message):
    """Log-probabilities of given sequences of tokens, whether or not the engine is ready."""

    token_ids: list[Annotated[list[int], Field(min_length=2)]] = Field(min_length=1)
    deadline_s: float = Field(60.0, gt=0)


class Probed(Message):
    """Boundary 5."""

    version: int | None
    adapter: str | None = None
    weight_version: str
    """As every answer itself says."""
    logprobs: list[list[float]]
    """Per sequence, of token_ids[1:], natural logarithm at temperature 1: float64 [len(token_ids) - 1]."""
    cached_tokens: int | None
    """Of the first request after the flush of the last activation (the canary)."""
    cached_tokens_before: int | None
    seconds: float


class Refusal(Message):
    """Body of every answer that is not 2xx."""

    error: str
    """Name of the error class."""
    what: str
    where: str | None = None
    hint: str | None = None

    @classmethod
    def of(cls, error: ColchisError) -> Refusal:
        """An error as it goes over the wire."""
        return cls(error=error.family, what=error.what, where=error.where, hint=error.hint)

    def to_error(self, by: str) -> ColchisError:
        """The error as it is raised on the other side, naming who refused."""
        return ERROR_OF.get(self.error, Bug)(f"{by}: {self.what}", where=self.where, hint=self.hint)
