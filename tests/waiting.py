"""Waiting for what happens in another process and is seen only by asking: there is no event to wait for."""

from __future__ import annotations

import time
from collections.abc import Callable


def eventually(condition: Callable[[], bool], what: str, *, deadline_s: float = 60.0, every_s: float = 0.02) -> None:
    """Asks until the condition holds. `what` says what was expected, for the failure."""
    end = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < end, f"{what}: not within {deadline_s:.0f} s"
        time.sleep(every_s)
