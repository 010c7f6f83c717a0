"""A point in time by which something must have happened, on this process's own clock."""

from __future__ import annotations

import time

from colchis.components.errors import PeerUnavailable


class Deadline:
    """Starts when it is made. Hand it down: what is called gets what is left."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._end = time.monotonic() + seconds

    def left_s(self) -> float:
        """Seconds until the deadline; 0 once it has passed."""
        return max(0.0, self._end - time.monotonic())

    def check(self, what: str, *, where: str | None = None) -> None:
        """PeerUnavailable once the deadline has passed."""
        if not self.left_s():
            raise PeerUnavailable(f"{what}: not done within {self.seconds:g} s", where=where, hint="raise the deadline")
