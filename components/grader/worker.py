"""What a grader's process runs: one face, one trajectory at a time."""

from __future__ import annotations

import fcntl
import json
import math
import multiprocessing
import numbers
import os
import select
import signal
import sys
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from colchis.components.config import RunConfig
from colchis.components.errors import ColchisError
from colchis.components.grader.faces import Face, NoScore, Score, make_face
from colchis.components.records.rows import Row, Split
from colchis.components.records.trajectories import Segment, SegmentKind, Trajectory, VersionSpan
from colchis.components.records.verdicts import Reason

DETAIL_CHARACTERS = 300


def serve(connection: Connection, config: str) -> None:
    """Answer tasks until the other end closes. `config`: RunConfig as JSON."""
    os.setpgid(0, 0)  # so that we can be killed together with whatever a grader starts
    _die_with_parent()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.dup2(2, 1)  # what a grader prints must not be taken for the stage's own output
    try:
        face = make_face(RunConfig.model_validate_json(config))
    except ColchisError as e:
        connection.send_bytes(json.dumps({"refused": str(e)}).encode())
        return
    connection.send_bytes(json.dumps({"ready": True}).encode())
    while True:
        try:
            task = json.loads(connection.recv_bytes())
        except EOFError:
            return
        reply = judge(face, _trajectory(task["trajectory"]), _row(task["row"]))
        connection.send_bytes(json.dumps(reply).encode())


def judge(face: Face, trajectory: Trajectory, row: Row) -> dict[str, Any]:
    """{"score", "detail", "cost"} or {"reason", "detail"}; whatever the face does short of hanging or crashing."""
    try:
        result = face.grade(trajectory, row)
        score = result if isinstance(result, Score) else Score(result)
        value = _number(score.value)
        cost = _number(score.cost)
        detail = _line(score.detail)
    except NoScore as e:
        return {"reason": e.reason.value, "detail": _line(e)}
    except Exception as e:  # a grader may raise anything: that is a reason, not the end of the stage
        return {"reason": Reason.GRADER_ERROR.value, "detail": f"{type(e).__name__}: {_line(e)}"}
    if value is None:
        return {"reason": Reason.NOT_A_NUMBER.value, "detail": f"the grader returned {type(score.value).__name__}"}
    if not math.isfinite(value):
        return {"reason": Reason.NOT_FINITE.value, "detail": f"the grader returned {value}"}
    return {
        "score": value,
        "detail": detail,
        "cost": cost if cost is not None and math.isfinite(cost) else 0.0,
    }


def _number(value: Any) -> float | None:
    """None for what is no number. Texts that look like numbers are none."""
    if isinstance(value, numbers.Real | np.bool_):
        try:
            return float(value)
        except OverflowError:
            return math.inf
    return None


def _line(text: object) -> str:
    """One line that Parquet can hold: no lone surrogates."""
    return " ".join(str(text).split())[:DETAIL_CHARACTERS].encode(errors="replace").decode()


def task(trajectory: Trajectory, row: Row) -> str:
    """One task as the JSON that `serve` reads."""
    fields = {name: getattr(trajectory, name) for name in Trajectory.__dataclass_fields__}
    fields["versions"] = [[v.version, v.start, v.end] for v in trajectory.versions]
    fields["segments"] = [[s.kind, s.start, s.end, s.seconds, s.text] for s in trajectory.segments]
    return json.dumps(
        {"trajectory": fields, "row": [row.index, row.prompt, row.answer, row.split, row.metadata]}, ensure_ascii=False
    )


def _trajectory(fields: dict[str, Any]) -> Trajectory:
    fields["versions"] = [VersionSpan(*v) for v in fields["versions"]]
    fields["segments"] = [Segment(SegmentKind(s[0]), *s[1:]) for s in fields["segments"]]
    return Trajectory(**fields)


def _row(fields: list[Any]) -> Row:
    index, prompt, answer, split, metadata = fields
    return Row(index, prompt, answer, Split(split), metadata)


def _die_with_parent() -> None:
    """A grader that hangs must not outlive the stage, even when the stage is killed: the kernel kills our whole process
    group as soon as the other end of the sentinel's pipe is closed (fcntl(2), F_SETSIG; Linux only). The signal for a
    parent's death does not do, as our parent is the fork server, which lives as long as we do."""
    parent = multiprocessing.parent_process()
    if sys.platform != "linux" or parent is None:
        return
    sentinel = parent.sentinel
    fcntl.fcntl(sentinel, fcntl.F_SETOWN, -os.getpgrp())
    fcntl.fcntl(sentinel, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(sentinel, fcntl.F_SETFL, fcntl.fcntl(sentinel, fcntl.F_GETFL) | os.O_ASYNC)
    if select.select([sentinel], [], [], 0)[0]:  # it ended before we listened
        os._exit(1)
