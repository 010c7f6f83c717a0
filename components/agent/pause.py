"""The lease on a pause: whatever happens to the agent, the engine continues.

Three lines of defence. The activation itself continues the engine on every path. The watchdog, a process of its own,
does it when the agent dies or the lease passes. A file in the staging folder makes the next agent do it, should both
have died together (a container that is killed).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

from colchis.components.agent.engine import Engine
from colchis.components.errors import BadData, PeerUnavailable
from colchis.components.weights.deadline import Deadline

WATCHDOG = Path(__file__).with_name("watchdog.py")
KEYS = ("COLCHIS_ENGINE_KEY", "COLCHIS_ENGINE_ADMIN_KEY")
RETRY_S = 0.2
LONGEST_TRY_S = 5.0


class PauseLease:
    """At most one pause of one engine at a time. Thread-safe."""

    def __init__(self, engine: Engine, folder: Path) -> None:
        self.engine = engine
        self._file = folder / "pause.json"
        self._lock = threading.Lock()
        self._ends: float | None = None
        self._watchdog: subprocess.Popen[bytes] | None = None

    def left_s(self) -> float | None:
        """Seconds until the watchdog ends the pause; None when there is none."""
        ends = self._ends
        return None if ends is None else max(0.0, ends - time.monotonic())

    def take(self, lease_s: float) -> None:
        """Before the engine is paused."""
        with self._lock:
            self._ends = time.monotonic() + lease_s
            self._file.write_text(json.dumps({"url": self.engine.url}))
            self._tell({"url": self.engine.url, "lease_s": lease_s})

    def end(self, deadline: Deadline) -> None:
        """Continue the engine and give the lease back.

        PeerUnavailable when the engine did not take it before the deadline; the lease stays open then, and the watchdog
        goes on trying.
        """
        while True:
            try:
                self.engine.resume(min(LONGEST_TRY_S, max(0.5, deadline.left_s())))
                break
            except (PeerUnavailable, BadData):
                if not deadline.left_s():
                    raise
                time.sleep(RETRY_S)  # the engine offers no event that says when it can be reached again
        with self._lock:
            self._ends = None
            self._file.unlink(missing_ok=True)
            self._tell({})

    def is_open(self) -> bool:
        """Whether the engine may be paused: by this agent, or by one before it that died."""
        return self._ends is not None or self._file.exists()

    def close(self) -> None:
        """End the watchdog; it undoes a pause that is still open."""
        with self._lock:
            if self._watchdog is not None and self._watchdog.stdin is not None:
                self._watchdog.stdin.close()

    def start_watchdog(self) -> None:
        """So that the first pause doesn't wait for it."""
        with self._lock:
            self._running_watchdog()

    def _running_watchdog(self) -> subprocess.Popen[bytes]:
        if self._watchdog is None or self._watchdog.poll() is not None:
            self._watchdog = subprocess.Popen(
                [sys.executable, "-I", "-S", str(WATCHDOG)],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                env={name: os.environ[name] for name in KEYS if name in os.environ},
                start_new_session=True,  # a signal to the agent's group must not take its watchdog along
            )
        return self._watchdog

    def _tell(self, order: dict[str, object]) -> None:
        line = json.dumps(order).encode() + b"\n"
        for last_try in (False, True):
            stdin = self._running_watchdog().stdin
            assert stdin is not None
            try:
                stdin.write(line)
                stdin.flush()
                return
            except BrokenPipeError:
                self._watchdog = None
                if last_try:
                    raise
