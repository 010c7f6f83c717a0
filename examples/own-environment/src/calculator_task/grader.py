"""A grader of one's own: the nearer the answer, the more it is worth."""

from __future__ import annotations

from colchis.components.grader import NoScore, Score
from colchis.components.records.rows import Row
from colchis.components.records.trajectories import Trajectory
from colchis.components.records.verdicts import Reason


class Closeness:
    """Constructed as `Closeness(**grader.options)`, in a process of its own that is killed past `grader.timeout_s`."""

    def __init__(self, *, scale: float = 10.0) -> None:
        self.scale = scale

    def grade(self, trajectory: Trajectory, row: Row) -> Score:
        """1 for the answer, less with the distance, 0 for what is no number."""
        if not row.answer.lstrip("-").isdecimal():
            raise NoScore(Reason.MALFORMED, f"row {row.index} has no number for an answer")
        text = trajectory.completion.strip()
        if not (text.isascii() and text.lstrip("-").isdecimal()):
            return Score(0.0, f"{text[:20]!r} is no number")
        off = abs(int(text) - int(row.answer))
        return Score(1 / (1 + off / self.scale), f"off by {off}")
