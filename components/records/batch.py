"""Batch: what one iteration trains on, and the denominators that every rank has to agree with.

`batch.parquet` holds one row per trained sample, with its advantage and its place (optimiser step, rank, micro-batch).
`denominators.json` holds what the losses are divided by, per step and per group, and what was left out and why.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Literal

import numpy as np
import pyarrow as pa
from pydantic import Field

from colchis.components.errors import BadData
from colchis.components.records import tables
from colchis.components.store import Record

RECORD = "batch/1"

Decision = Literal["trainable", "empty"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingSample:
    """One trained sequence. Lists over tokens have the length of `token_ids`. BadData when it cannot be trained."""

    id: str
    """Of the trajectory."""
    group: int
    sample: int
    score: float
    advantage: float
    """One number for all trained tokens of the sample."""
    step: int
    """Optimiser step of the iteration, from 0."""
    rank: int
    micro_batch: int
    """Within step and rank, from 0."""
    position: int
    """Order within the micro-batch, from 0."""
    token_ids: list[int]
    """Prompt and everything after it."""
    loss_mask: list[bool]
    """True: trained. The first token never is: nothing predicts it."""
    logprobs: list[float]
    """Behaviour log-probabilities; meaningless where the mask is False."""
    oldest_version: int
    """Smallest policy version that sampled one of its trained tokens."""

    def __post_init__(self) -> None:
        problem = _problem(self)
        if problem:
            raise BadData(f"training sample '{self.id}': {problem}")

    @property
    def trained_tokens(self) -> int:
        return sum(self.loss_mask)


def _problem(s: TrainingSample) -> str | None:
    n = len(s.token_ids)
    for name, values in (("loss_mask", s.loss_mask), ("logprobs", s.logprobs)):
        if len(values) != n:
            return f"{name} has {len(values)} entries for {n} token ids"
    if not any(s.loss_mask):
        return "no token of it is trained"
    if s.loss_mask[0]:
        return "loss_mask trains token 0, which nothing predicts"
    for name, number in (("advantage", s.advantage), ("score", s.score)):
        if not math.isfinite(number):
            return f"{name} is {number}"
    mask = np.asarray(s.loss_mask, dtype=bool)
    bad = mask & ~np.isfinite(np.asarray(s.logprobs, dtype=np.float64))
    if bad.any():
        at = int(np.argmax(bad))
        return f"behaviour log-probability of trained token {at} is {s.logprobs[at]}"
    return None


class GroupOutcome(StrEnum):
    """What became of a group."""

    TRAINED = "trained"
    NO_SIGNAL = "no_signal"
    """The spread of its scores is under `algorithm.min_spread`."""
    TOO_FEW = "too_few"
    """Fewer scored members than `algorithm.min_valid`."""
    NO_TOKENS = "no_tokens"
    """None of its scored members has a token to train."""


class GroupDenominator(Record):
    """The baseline of one group, over its valid (scored) members."""

    group: int
    prompt_index: int
    members: int
    valid: int
    mean: float | None
    spread: float | None
    """Standard deviation with ddof 1; None under 2 valid members."""
    outcome: GroupOutcome
    step: int | None
    """Optimiser step that trains it."""
    unscored: dict[str, int]
    """Reason -> members."""


class RankShare(Record):
    """What one rank is given for one step, and has to recount."""

    rank: int
    tokens: int
    """Trained tokens."""
    sequences: int
    """Trained sequences."""


class StepDenominator(Record):
    """What the summed loss of one optimiser step is divided by."""

    step: int
    tokens: int
    """Trained tokens over all ranks."""
    sequences: int
    """Trained sequences over all ranks."""
    divisor: float
    """`token-mean`: tokens. `sequence-mean`: sequences. `constant`: sequences times rollout.max_new_tokens."""
    micro_batches: int
    """Forward and backward passes of every rank, also of one that has less to do."""
    ranks: list[RankShare]


class Denominators(Record):
    """`denominators.json`: computed once by the batch stage, recounted by every rank before it steps."""

    format: Literal[1] = 1
    run: str
    iteration: int
    decision: Decision
    reason: str | None = None
    """Why the batch is empty."""
    estimator: str
    aggregation: str
    steps: list[StepDenominator]
    groups: list[GroupDenominator]
    outcomes: dict[str, int]
    """Group outcome -> groups; every outcome is listed."""
    unscored: dict[str, int]
    """Reason -> trajectories that no score came for."""
    samples: int
    """Trajectories of the iteration."""
    valid: int
    """Those with a score."""
    trained: int
    """Those in the batch."""
    without_tokens: int
    """Scored members of trained groups that hold no token to train: they count in the baseline only."""
    sampled_tokens: int
    """Tokens generated by the policy over all trajectories."""
    trained_tokens: int
    reward_mean: float | None
    """Over valid trajectories of all groups, dropped ones included."""
    reward_spread: float | None
    """Standard deviation with ddof 1 over the same."""
    lag_tokens: dict[str, int] = Field(default_factory=dict)
    """Version lag -> trained tokens."""


@dataclass(frozen=True, slots=True)
class Batch:
    """The trained samples, ordered by (step, rank, micro-batch, position), and their denominators."""

    denominators: Denominators
    samples: tuple[TrainingSample, ...]

    @property
    def decision(self) -> Decision:
        return self.denominators.decision

    @property
    def reason(self) -> str | None:
        return self.denominators.reason

    def statistics(self) -> dict[str, Any]:
        """The numbers for the stage's commit and the iteration's summary."""
        d = self.denominators
        return {
            "reward_mean": d.reward_mean,
            "reward_spread": d.reward_spread,
            "groups": d.outcomes,
            "unscored": d.unscored,
            "samples": d.samples,
            "valid": d.valid,
            "trained": d.trained,
            "tokens": d.sampled_tokens,
            "trained_tokens": d.trained_tokens,
            "lag": max((int(lag) for lag in d.lag_tokens), default=0),
            "steps": len(d.steps),
        }

    def to_parquet(self) -> bytes:
        labels = {"colchis.run": self.denominators.run, "colchis.iteration": str(self.denominators.iteration)}
        return tables.write([tables.fields(s, SCHEMA) for s in self.samples], SCHEMA, record=RECORD, metadata=labels)


def _required(name: str, kind: pa.DataType) -> pa.Field:
    return pa.field(name, kind, nullable=False)


SCHEMA = pa.schema(
    [
        _required("id", pa.string()),
        _required("group", pa.int64()),
        _required("sample", pa.int64()),
        _required("score", pa.float64()),
        _required("advantage", pa.float64()),
        _required("step", pa.int32()),
        _required("rank", pa.int32()),
        _required("micro_batch", pa.int32()),
        _required("position", pa.int32()),
        _required("token_ids", pa.list_(_required("item", pa.int32()))),
        _required("loss_mask", pa.list_(_required("item", pa.bool_()))),
        _required("logprobs", pa.list_(_required("item", pa.float32()))),
        _required("oldest_version", pa.int64()),
    ]
)


def read_batch(denominators: bytes, parquet: bytes | None, *, source: str = "batch") -> Batch:
    """Inverse of `Denominators.to_bytes` and `Batch.to_parquet`; `parquet` is None for an empty batch.
    BadData names the sample, and refuses the two files of different iterations."""
    d = Denominators.from_bytes(denominators, f"{source}: denominators.json")
    if parquet is None:
        if d.decision == "trainable":
            raise BadData("the batch is trainable but batch.parquet was not given", where=source)
        return Batch(d, ())
    rows, labels = tables.read(parquet, SCHEMA, record=RECORD, source=f"{source}: batch.parquet")
    found = labels.get("colchis.run"), labels.get("colchis.iteration")
    if found != (d.run, str(d.iteration)):
        raise BadData(
            f"batch.parquet is of run and iteration {found}, denominators.json of {(d.run, str(d.iteration))}",
            where=source,
        )
    return Batch(d, ordered([TrainingSample(**row) for row in rows], source=source))


def ordered(samples: Sequence[TrainingSample], *, source: str = "batch") -> tuple[TrainingSample, ...]:
    """Sorted by place. BadData when two samples have one id or one place."""
    placed = sorted(samples, key=lambda s: (s.step, s.rank, s.micro_batch, s.position))
    places: set[tuple[int, ...]] = set()
    ids: set[str] = set()
    for s in placed:
        place = (s.step, s.rank, s.micro_batch, s.position)
        if s.id in ids or place in places:
            raise BadData(f"training sample '{s.id}' or its place {place} occurs twice", where=source)
        ids.add(s.id)
        places.add(place)
    return tuple(placed)
