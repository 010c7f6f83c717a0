"""On PYTHONPATH of a process and its children: their wall clock is off by the seconds that the file $CLOCK_JUMP holds.

The file may change while they run: the clock jumps. Clocks that cannot jump (monotonic) are left alone, and so is the
one that signs requests: the store is another machine here, whose clock would have to jump along.
"""

from __future__ import annotations

import datetime
import os
import sys
import time
from pathlib import Path

_file = Path(os.environ["CLOCK_JUMP"])
_time, _time_ns, _datetime = time.time, time.time_ns, datetime.datetime


def _jump_s() -> float:
    try:
        return float(_file.read_text() or 0)
    except FileNotFoundError:
        return 0.0


class _Kind(type(datetime.datetime)):  # type: ignore[misc]
    def __instancecheck__(cls, value: object) -> bool:
        return isinstance(value, _datetime)


class _Jumping(datetime.datetime, metaclass=_Kind):
    @classmethod
    def now(cls, tz: datetime.tzinfo | None = None) -> datetime.datetime:
        signing = sys._getframe(1).f_globals.get("__name__", "").startswith("botocore")
        return _datetime.now(tz) + datetime.timedelta(seconds=0 if signing else _jump_s())


time.time = lambda: _time() + _jump_s()
time.time_ns = lambda: _time_ns() + int(1e9 * _jump_s())
datetime.datetime = _Jumping  # type: ignore[misc]
