"""Verdicts: one row per trajectory and grading. A score, or the reason why there is none; never a silent zero."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import pyarrow as pa

from colchis.components.errors import BadData
from colchis.components.records import tables

RECORD = "verdicts/1"


class Reason(StrEnum):
    """Why a trajectory has no score. Such a sample leaves its group; it is not a zero."""

    TIMEOUT = "timeout"
    """The grader did not answer in time (an agent's own time-out is scored like any other answer)."""
    GRADER_ERROR = "grader_error"
    """The grader raised or its process died."""
    SANDBOX_ERROR = "sandbox_error"
    """The place where untrusted code runs failed, not the code."""
    MODEL_ERROR = "model_error"
    """No usable answer came from the engine."""
    RATE_LIMITED = "rate_limited"
    """A judge refused for its load."""
    MALFORMED = "malformed"
    """The expected answer or the trajectory cannot be graded by this grader."""
    NOT_FINITE = "not_finite"
    """The grader's score was NaN or infinite."""
    NOT_A_NUMBER = "not_a_number"
    """The grader returned something that is no number."""
    TRUNCATED = "truncated"
    """The episode was cut off before it could be judged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """`score` or `reason`, exactly one of them. BadData otherwise, and for a score that is not finite."""

    trajectory_id: str
    score: float | None = None
    reason: Reason | None = None
    detail: str = ""
    """One line for people: what the grader said or how it failed."""
    grader: str
    grader_version: str
    grader_digest: str
    """sha256 of the grader's canonical configuration."""
    seconds: float
    cost: float = 0.0
    """In the unit of the grader (a judge's money or tokens); 0 for local graders."""

    def __post_init__(self) -> None:
        if (self.score is None) == (self.reason is None):
            raise BadData(
                f"verdict of '{self.trajectory_id}': needs a score or a reason, found {self.score}, {self.reason}"
            )
        for name in ("score", "seconds", "cost"):
            value = getattr(self, name)
            if value is not None and not math.isfinite(value):
                raise BadData(f"verdict of '{self.trajectory_id}': {name} is {value}, expected a finite number")


SCHEMA = pa.schema(
    [
        pa.field("trajectory_id", pa.string(), nullable=False),
        pa.field("score", pa.float64()),
        pa.field("reason", pa.string()),
        pa.field("detail", pa.string(), nullable=False),
        pa.field("grader", pa.string(), nullable=False),
        pa.field("grader_version", pa.string(), nullable=False),
        pa.field("grader_digest", pa.string(), nullable=False),
        pa.field("seconds", pa.float64(), nullable=False),
        pa.field("cost", pa.float64(), nullable=False),
    ]
)


def to_parquet(rows: Sequence[Verdict]) -> bytes:
    """BadData when a trajectory has two verdicts."""
    seen: set[str] = set()
    for verdict in rows:
        if verdict.trajectory_id in seen:
            raise BadData(f"trajectory '{verdict.trajectory_id}' has two verdicts in one table")
        seen.add(verdict.trajectory_id)
    return tables.write([tables.fields(v, SCHEMA) for v in rows], SCHEMA, record=RECORD)


def from_parquet(data: bytes, *, source: str = "verdicts") -> list[Verdict]:
    """Inverse of `to_parquet`. BadData names `source`, the trajectory and the row."""
    rows, _ = tables.read(data, SCHEMA, record=RECORD, source=source)
    result: dict[str, Verdict] = {}
    for number, row in enumerate(rows):
        where = f"{source}, row {number}"
        try:
            row["reason"] = None if row["reason"] is None else Reason(row["reason"])
            verdict = Verdict(**row)
        except BadData as e:
            raise BadData(e.what, where=where) from None
        except ValueError as e:
            raise BadData(f"verdict of '{row['trajectory_id']}': {e}", where=where) from None
        if verdict.trajectory_id in result:
            raise BadData(f"trajectory '{verdict.trajectory_id}' has two verdicts", where=where)
        result[verdict.trajectory_id] = verdict
    return list(result.values())
