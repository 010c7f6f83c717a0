"""Trajectories in, verdicts out, whatever the face and wherever it runs."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Any

from colchis.components.config import RunConfig
from colchis.components.errors import BadData
from colchis.components.grader import pool, worker
from colchis.components.grader.faces import Exact, name_and_version
from colchis.components.records.rows import Row, Rows
from colchis.components.records.trajectories import SegmentKind, Trajectory
from colchis.components.records.verdicts import Reason, Verdict

CUT_OFF = {
    "environment_error": "the environment failed in the episode",
    "environment_timeout": "the environment did not answer in time",
}
"""Finish reasons that are no fault of the policy, so no score may follow from them."""


class Grader:
    """Grades as many lots of trajectories as you like with the same processes. A context manager."""

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        self.name, self.version = name_and_version(config)
        self.digest = grader_digest(config)
        self._pool: pool.Pool | None = None
        if config.grader.face != "exact":  # comparing two texts neither hangs nor crashes
            self._pool = pool.Pool(
                worker.serve,
                config.model_dump_json(),
                size=config.grader.workers,
                timeout_s=config.grader.timeout_s,
                preload=pool.PRELOAD,
            )

    def __enter__(self) -> Grader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._pool is not None:
            self._pool.__exit__(kind, error, trace)

    def grade(self, trajectories: Sequence[Trajectory], rows: Rows) -> list[Verdict]:
        """One verdict per trajectory, in order. BadData when a trajectory names a row that is not there, BadConfig when
        the face cannot be made."""
        verdicts: dict[int, Verdict] = {}
        open_: list[tuple[int, Trajectory, Row]] = []
        for i, trajectory in enumerate(trajectories):
            if trajectory.prompt_index >= len(rows):
                raise BadData(f"trajectory '{trajectory.id}' names row {trajectory.prompt_index} of {len(rows)}")
            if trajectory.finish_reason in CUT_OFF:
                detail = CUT_OFF[trajectory.finish_reason]
                verdicts[i] = self._reason(trajectory, Reason.SANDBOX_ERROR, detail, 0.0)
            elif not any(s.kind is SegmentKind.MODEL for s in trajectory.segments):
                verdicts[i] = self._reason(trajectory, Reason.MODEL_ERROR, "the policy never spoke", 0.0)
            else:
                open_.append((i, trajectory, rows[trajectory.prompt_index]))
        graded = self._in_process(open_) if self._pool is None else self._in_pool(self._pool, open_)
        verdicts.update(graded)
        return [verdicts[i] for i in range(len(trajectories))]

    def _in_process(self, open_: Sequence[tuple[int, Trajectory, Row]]) -> dict[int, Verdict]:
        face = Exact()
        verdicts = {}
        for i, trajectory, row in open_:
            began = time.monotonic()
            reply = worker.judge(face, trajectory, row)
            verdicts[i] = self._verdict(trajectory, reply, time.monotonic() - began)
        return verdicts

    def _in_pool(self, pool_: pool.Pool, open_: Sequence[tuple[int, Trajectory, Row]]) -> dict[int, Verdict]:
        outcomes = pool_.run([worker.task(trajectory, row) for _, trajectory, row in open_])
        verdicts = {}
        for (i, trajectory, _), outcome in zip(open_, outcomes, strict=True):
            if outcome.reply is not None:
                verdicts[i] = self._verdict(trajectory, outcome.reply, outcome.seconds)
            else:
                reason = Reason.TIMEOUT if outcome.timed_out else Reason.GRADER_ERROR
                verdicts[i] = self._reason(trajectory, reason, outcome.detail, outcome.seconds)
        return verdicts

    def _verdict(self, trajectory: Trajectory, reply: dict[str, Any], seconds: float) -> Verdict:
        if "reason" in reply:
            return self._reason(trajectory, Reason(reply["reason"]), reply["detail"], seconds)
        return Verdict(
            trajectory_id=trajectory.id,
            score=reply["score"],
            detail=reply["detail"],
            grader=self.name,
            grader_version=self.version,
            grader_digest=self.digest,
            seconds=seconds,
            cost=reply["cost"],
        )

    def _reason(self, trajectory: Trajectory, reason: Reason, detail: str, seconds: float) -> Verdict:
        return Verdict(
            trajectory_id=trajectory.id,
            reason=reason,
            detail=detail,
            grader=self.name,
            grader_version=self.version,
            grader_digest=self.digest,
            seconds=seconds,
        )


def grade(config: RunConfig, trajectories: Sequence[Trajectory], rows: Rows) -> list[Verdict]:
    """Grade one lot. With several lots, keep one `Grader` open instead: it keeps its processes."""
    with Grader(config) as grader:
        return grader.grade(trajectories, rows)


def grader_digest(config: RunConfig) -> str:
    """sha256 over what a score depends on: the grader's identity, and the environment's where that gives the verdict.
    Placement, shards and workers change no score."""
    wanted = ("grader.", "environment.") if config.grader.face == "environment" else ("grader.",)
    fields = {k: v for k, v in config.identity().items() if k.startswith(wanted)}
    return hashlib.sha256(json.dumps(fields, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
