"""Trajectories: one row per sample, token ids in and out, each sampled token with its log-probability and version.

A trained token sequence is one linear episode: the prompt, then model turns and what the environment or its tools
said in between. Token ids are those the engine read and drew; nothing here is ever tokenised a second time.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

import numpy as np
import pyarrow as pa

from colchis.components.errors import BadData
from colchis.components.records import tables

RECORD = "trajectories/1"

LOGPROB_SLACK = 1e-4
"""A log-probability may exceed 0 by no more than fp32 rounding of a log-softmax."""


class SegmentKind(StrEnum):
    """Who wrote a segment."""

    MODEL = "model"
    ENVIRONMENT = "environment"
    TOOL = "tool"


@dataclass(frozen=True, slots=True)
class Segment:
    """Token positions [start, end) after the prompt, written by one party in one turn."""

    kind: SegmentKind
    start: int
    end: int
    seconds: float
    text: str
    """What the tokens say; for a model turn decoded without special tokens. Graders read this."""


@dataclass(frozen=True, slots=True)
class VersionSpan:
    """Token positions [start, end) that were sampled by one policy version."""

    version: int
    start: int
    end: int


def joined(spans: Iterable[VersionSpan]) -> tuple[VersionSpan, ...]:
    """Neighbours of one version as one span; empty ones are gone."""
    found: list[VersionSpan] = []
    for span in spans:
        if span.start == span.end:
            continue
        if found and (found[-1].version, found[-1].end) == (span.version, span.start):
            found[-1] = VersionSpan(span.version, found[-1].start, span.end)
        else:
            found.append(span)
    return tuple(found)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """One sample. Lists over tokens have the length of `token_ids`. BadData when it contradicts itself."""

    id: str
    """`RUN/ITERATION/PROMPT/SAMPLE`; a fork adds `~N`."""
    iteration: int
    prompt_index: int
    """Row of the environment's table."""
    group: int
    """Position of the prompt in this iteration. All samples of a group share it."""
    sample: int
    parent: str | None = None
    """For a fork: id of the trajectory it left."""
    token_ids: list[int]
    """Prompt and everything after it."""
    loss_mask: list[bool]
    """True: sampled by the policy and to be trained."""
    logprobs: list[float]
    """Behaviour log-probabilities of the temperature-scaled distribution; 0 where not sampled."""
    versions: list[VersionSpan]
    segments: list[Segment]
    """Cover [prompt_tokens, len(token_ids)) in order and without gaps."""
    prompt_tokens: int
    finish_reason: str
    """Of the last model turn: `stop` or `length`; `turns` when the episode ran out of model turns."""
    seed: int
    """`sampling_seed` of the first model turn."""
    engine: str
    sampling_digest: str
    """sha256 of the canonical sampling parameters."""
    started_at: str
    seconds: float
    cached_tokens: int

    def __post_init__(self) -> None:
        problem = _problem(self)
        if problem:
            raise BadData(f"trajectory '{self.id}': {problem}")

    @property
    def run(self) -> str:
        return self.id.rsplit("/", 3)[0]

    @property
    def trained_tokens(self) -> int:
        return sum(self.loss_mask)

    @property
    def completion(self) -> str:
        """Text of the last model turn: the answer that graders look at. Empty when the model never spoke."""
        return next((s.text for s in reversed(self.segments) if s.kind is SegmentKind.MODEL), "")

    @property
    def oldest_version(self) -> int | None:
        """Smallest version that sampled a token: what lag is counted from. None: nothing was sampled."""
        return min((span.version for span in self.versions), default=None)


def trajectory_id(run: str, iteration: int, prompt_index: int, sample: int) -> str:
    return f"{run}/{iteration}/{prompt_index}/{sample}"


def _problem(t: Trajectory) -> str | None:
    """The first contradiction inside one trajectory, or None."""
    n = len(t.token_ids)
    for name, values in (("loss_mask", t.loss_mask), ("logprobs", t.logprobs)):
        if len(values) != n:
            return f"{name} has {len(values)} entries for {n} token ids"
    numbers = ("iteration", "prompt_index", "group", "sample", "seed", "cached_tokens")
    for name in numbers:
        if getattr(t, name) < 0:
            return f"{name} is {getattr(t, name)}, expected 0 or more"
    expected = f"/{t.iteration}/{t.prompt_index}/{t.sample}"
    if not t.id.split("~")[0].endswith(expected) or t.id.startswith("/"):
        return f"id must be RUN{expected}"
    if not 0 < t.prompt_tokens <= n:
        return f"prompt_tokens is {t.prompt_tokens}, expected 1 to {n}"
    if not math.isfinite(t.seconds) or t.seconds < 0:
        return f"seconds is {t.seconds}"
    ids = np.asarray(t.token_ids, dtype=np.int64)
    if int(ids.min()) < 0 or int(ids.max()) >= 2**31:
        return f"token id {int(ids[(ids < 0) | (ids >= 2**31)][0])} is outside int32"
    mask = np.asarray(t.loss_mask, dtype=bool)
    logprobs = np.asarray(t.logprobs, dtype=np.float64)
    if mask[: t.prompt_tokens].any():
        return f"loss_mask trains prompt token {int(np.argmax(mask))}"
    bad = ~np.isfinite(logprobs) | (mask & (logprobs > LOGPROB_SLACK))
    if bad.any():
        at = int(np.argmax(bad))
        return f"logprobs[{at}] is {float(logprobs[at])}, no log-probability"
    return _segments_problem(t, mask) or _versions_problem(t, mask)


def _segments_problem(t: Trajectory, mask: np.ndarray[Any, np.dtype[np.bool_]]) -> str | None:
    position = t.prompt_tokens
    for i, segment in enumerate(t.segments):
        if segment.start != position or segment.end < segment.start:
            return f"segments[{i}] is [{segment.start}, {segment.end}), expected to start at {position}"
        if not math.isfinite(segment.seconds) or segment.seconds < 0:
            return f"segments[{i}].seconds is {segment.seconds}"
        if segment.kind is not SegmentKind.MODEL and mask[segment.start : segment.end].any():
            return f"segments[{i}] was written by '{segment.kind}' but loss_mask trains it"
        position = segment.end
    if position != len(mask):
        return f"segments end at token {position} of {len(mask)}"
    return None


def _versions_problem(t: Trajectory, mask: np.ndarray[Any, np.dtype[np.bool_]]) -> str | None:
    covered = np.zeros(len(mask), dtype=bool)
    position = t.prompt_tokens
    for i, span in enumerate(t.versions):
        if not position <= span.start < span.end <= len(mask):
            return f"versions[{i}] is [{span.start}, {span.end}), expected within [{position}, {len(mask)})"
        if span.version < 0:
            return f"versions[{i}].version is {span.version}"
        covered[span.start : span.end] = True
        position = span.end
    if (mask & ~covered).any():
        return f"token {int(np.argmax(mask & ~covered))} is trained but no version sampled it"
    return None


def _list_of(*fields: pa.Field) -> pa.DataType:
    return pa.list_(pa.field("item", pa.struct(fields), nullable=False))


def _required(name: str, kind: pa.DataType) -> pa.Field:
    return pa.field(name, kind, nullable=False)


SCHEMA = pa.schema(
    [
        _required("id", pa.string()),
        _required("iteration", pa.int64()),
        _required("prompt_index", pa.int64()),
        _required("group", pa.int64()),
        _required("sample", pa.int64()),
        pa.field("parent", pa.string()),
        _required("token_ids", pa.list_(_required("item", pa.int32()))),
        _required("loss_mask", pa.list_(_required("item", pa.bool_()))),
        _required("logprobs", pa.list_(_required("item", pa.float32()))),
        _required(
            "versions",
            _list_of(_required("version", pa.int64()), _required("start", pa.int32()), _required("end", pa.int32())),
        ),
        _required(
            "segments",
            _list_of(
                _required("kind", pa.string()),
                _required("start", pa.int32()),
                _required("end", pa.int32()),
                _required("seconds", pa.float64()),
                _required("text", pa.string()),
            ),
        ),
        _required("prompt_tokens", pa.int32()),
        _required("finish_reason", pa.string()),
        _required("seed", pa.int64()),
        _required("engine", pa.string()),
        _required("sampling_digest", pa.string()),
        _required("started_at", pa.string()),
        _required("seconds", pa.float64()),
        _required("cached_tokens", pa.int32()),
    ]
)


def _columns(t: Trajectory) -> dict[str, Any]:
    return tables.fields(t, SCHEMA) | {
        "versions": [asdict(v) for v in t.versions],
        "segments": [asdict(s) for s in t.segments],
    }


def to_parquet(rows: Sequence[Trajectory]) -> bytes:
    """The trajectories of one run and iteration. BadData when two share an id or come from different iterations."""
    metadata: dict[str, str] = {}
    if rows:
        metadata = {"colchis.run": rows[0].run, "colchis.iteration": str(rows[0].iteration)}
    seen: set[str] = set()
    for t in rows:
        if t.id in seen:
            raise BadData(f"trajectory '{t.id}' occurs twice in one table")
        if (t.run, t.iteration) != (rows[0].run, rows[0].iteration):
            raise BadData(f"trajectories '{rows[0].id}' and '{t.id}' are of different iterations, one table holds one")
        seen.add(t.id)
    return tables.write([_columns(t) for t in rows], SCHEMA, record=RECORD, metadata=metadata)


def from_parquet(data: bytes, *, source: str = "trajectories") -> list[Trajectory]:
    """Inverse of `to_parquet`. BadData names `source`, the column or trajectory, and the row."""
    rows, _ = tables.read(data, SCHEMA, record=RECORD, source=source)
    result = []
    for number, row in enumerate(rows):
        try:
            versions = [VersionSpan(**span) for span in row.pop("versions")]
            segments = [Segment(kind=SegmentKind(s.pop("kind")), **s) for s in row.pop("segments")]
            result.append(Trajectory(versions=versions, segments=segments, **row))
        except BadData as e:
            raise BadData(e.what, where=f"{source}, row {number}") from None
        except (TypeError, ValueError) as e:
            raise BadData(f"trajectory '{row['id']}': {e}", where=f"{source}, row {number}") from None
    if len({t.id for t in result}) != len(result):
        raise BadData("two rows have the same id", where=source)
    return result
