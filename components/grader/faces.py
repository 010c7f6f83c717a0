"""The faces: what looks at a trajectory and gives it a score.

A face of your own is a class with `grade(trajectory, row)`, named by an entry point in the group `colchis.graders` and
constructed as `YourGrader(**options)` in a process of its own. It returns a number (or a `Score` with a remark), or
raises `NoScore`. An exception, a time-out, NaN or something that is no number becomes a reason: such a sample leaves its
group, it is never scored 0.
"""

from __future__ import annotations

import decimal
import re
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from importlib import metadata
from typing import Any, Protocol

from colchis import __version__
from colchis.components.config import GraderConfig, ReasoningGymConfig, RunConfig
from colchis.components.environments import Environment, ModelTurn, open_environment
from colchis.components.environments.reasoning_gym import library
from colchis.components.errors import BadConfig, ColchisError
from colchis.components.records.rows import Row
from colchis.components.records.trajectories import SegmentKind, Trajectory
from colchis.components.records.verdicts import Reason

ENTRY_POINTS = "colchis.graders"


@dataclass(frozen=True, slots=True)
class Score:
    """A score with what a person or a bill may want to know about it."""

    value: float
    detail: str = ""
    cost: float = 0.0


class NoScore(Exception):
    """Raised by a face that knows why it cannot score this trajectory."""

    def __init__(self, reason: Reason, detail: str = "") -> None:
        super().__init__(detail or reason.value)
        self.reason = reason


class Face(Protocol):
    """Anything that grades one trajectory. The return value is checked by the caller, whatever it is."""

    def grade(self, trajectory: Trajectory, row: Row) -> Any:
        """Score of `trajectory`, which answers `row`."""


class Exact:
    """1 when the last model turn equals the answer after stripping white space from both, else 0."""

    def grade(self, trajectory: Trajectory, row: Row) -> float:
        return float(trajectory.completion.strip() == _expected(row))


class Rule:
    """1 when what `pattern` finds in the last model turn is the answer, as text or as a number within `tolerance`.

    No match is 0: the policy did not answer in the form that was asked for.
    """

    def __init__(self, config: GraderConfig) -> None:
        self.pattern = re.compile(config.pattern) if config.pattern is not None else None
        self.tolerance = None if config.tolerance is None else Decimal(repr(config.tolerance))

    def grade(self, trajectory: Trajectory, row: Row) -> Score:
        expected = _expected(row)
        found: str | None = trajectory.completion
        if self.pattern is not None:
            match = self.pattern.search(trajectory.completion)
            found = None if match is None else match.group(1 if self.pattern.groups else 0)
        if found is None:
            return Score(0.0, "the pattern matches nothing")
        if self.tolerance is None:
            return Score(float(found.strip() == expected))
        number = _number(expected)
        if number is None:
            raise NoScore(Reason.MALFORMED, f"the expected answer {expected[:40]!r} is no number")
        answer = _number(found.strip())
        if answer is None:
            return Score(0.0, f"{found.strip()[:40]!r} is no number")
        try:
            return Score(float(abs(answer - number) <= self.tolerance))
        except decimal.DecimalException:
            return Score(0.0, f"{found.strip()[:40]!r} is out of range")


_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d{1,9})?", re.ASCII)


def _number(text: str) -> Decimal | None:
    """A decimal number, exactly; `float` would take 'nan', 'inf' and '1_0', and round beyond 2^53."""
    return Decimal(text) if _NUMBER.fullmatch(text) else None


def _expected(row: Row) -> str:
    if not row.answer.strip():
        raise NoScore(Reason.MALFORMED, f"row {row.index} has no expected answer")
    return row.answer.strip()


class OwnVerdict:
    """The environment's own: the recorded model turns are played to a fresh episode, which is asked for its score."""

    def __init__(self, environment: Environment) -> None:
        self.environment = environment

    def grade(self, trajectory: Trajectory, row: Row) -> Any:
        episode = self.environment.start(row, trajectory.seed)
        episode.prompt()
        segments = trajectory.segments
        for i, segment in enumerate(segments):
            if segment.kind is not SegmentKind.MODEL:
                continue
            recorded = segments[i + 1] if i + 1 < len(segments) else None
            ids = tuple(trajectory.token_ids[segment.start : segment.end])
            # every turn but the last was followed by a reply, so only the last turn's own finish reason is lost to
            # the reasons for which an episode is cut off
            reply = episode.reply(ModelTurn(segment.text, ids, _finish_reason(trajectory, recorded is None)))
            if recorded is not None and (reply is None or (reply.text, reply.kind) != (recorded.text, recorded.kind)):
                raise NoScore(
                    Reason.SANDBOX_ERROR,
                    f"replayed, the environment answered {reply.text[:40] if reply else 'nothing'!r}, "
                    f"recorded was {recorded.text[:40]!r}: it depends on more than row, seed and turns",
                )
        score = episode.score()
        if score is None:
            reason = Reason.NOT_A_NUMBER if trajectory.finish_reason == "stop" else Reason.TRUNCATED
            raise NoScore(reason, f"the episode gave no score (finish reason '{trajectory.finish_reason}')")
        return score


def _finish_reason(trajectory: Trajectory, last: bool) -> str:
    return trajectory.finish_reason if last and trajectory.finish_reason in ("stop", "length") else "stop"


def make_face(config: RunConfig) -> Face:
    """BadConfig when the face cannot be made. For `own` and `environment` this runs the user's code."""
    match config.grader.face:
        case "exact":
            return Exact()
        case "rule":
            return Rule(config.grader)
        case "environment":
            environment = open_environment(config.environment)
            if isinstance(config.environment, ReasoningGymConfig):
                library()  # imported now: its seconds are not the first verdict's
            return OwnVerdict(environment)
        case "own":
            return _own(config.grader)


def _own(config: GraderConfig) -> Face:
    point = _entry_point(config)
    try:
        face: Face = point.load()(**config.options)
    except ColchisError:
        raise
    except Exception as e:  # the user's code may raise anything
        raise BadConfig(
            f"grader '{config.name}' cannot be constructed ({type(e).__name__}: {e})", where=point.value
        ) from e
    if not isinstance(getattr(face, "grade", None), Callable):  # type: ignore[arg-type]
        raise BadConfig(f"grader '{config.name}' has no method grade(trajectory, row)", where=point.value)
    return face


def _entry_point(config: GraderConfig) -> metadata.EntryPoint:
    found = metadata.entry_points(group=ENTRY_POINTS)
    point = next((p for p in found if p.name == config.name), None)
    if point is None:
        raise BadConfig(
            f"grader.name: no entry point '{config.name}' in the group '{ENTRY_POINTS}', "
            f"installed: {', '.join(sorted(p.name for p in found)) or 'none'}",
            hint="install your package in the image (or environment) of the stages",
        )
    return point


def name_and_version(config: RunConfig) -> tuple[str, str]:
    """What verdicts carry: (`exact`, Colchis' version), (`own:NAME`, its package and version), ..."""
    match config.grader.face:
        case "own":
            dist = _entry_point(config.grader).dist
            return f"own:{config.grader.name}", f"{dist.name} {dist.version}" if dist is not None else "unknown"
        case "environment":
            return "environment", open_environment(config.environment).version
        case face:
            return face, __version__
