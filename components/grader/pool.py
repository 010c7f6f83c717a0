"""Processes for graders that may hang or crash. One task at a time each; past its time a process is killed with all
that it started, also when native code never returns to Python, and the pool goes on with a new one.

Processes fork from a server that has imported what they need, so a new one is there in hundredths of a second. Messages
are JSON: the parent never unpickles what came from a process that runs somebody else's code.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import signal
import tempfile
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from typing import Any

from colchis.components.errors import BadConfig, PeerUnavailable

START_TIMEOUT_S = 120.0
"""Longest time for a process to import and construct its face; not counted as grading."""
LONGEST_FOLDER_BYTES = 60
"""Leaves room for the names of multiprocessing's folder and socket in the 108 bytes of a socket's address."""
PRELOAD = ["__main__", "colchis.components.grader.worker"]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one task: the process's reply, or None with how it failed."""

    reply: dict[str, Any] | None
    timed_out: bool
    detail: str
    seconds: float


@dataclass(slots=True)
class _Worker:
    process: Any
    """A `multiprocessing.Process` of the fork server's context."""
    connection: Connection
    ready: bool = False
    task: int | None = None
    since: float = field(default_factory=time.monotonic)


class Pool:
    """`size` processes running `target(connection, argument)`, which first sends {"ready": true} or {"refused": text},
    then answers each task with one message. A context manager."""

    def __init__(
        self,
        target: Callable[[Connection, str], None],
        argument: str,
        *,
        size: int,
        timeout_s: float,
        preload: Sequence[str],
    ) -> None:
        self.target, self.argument, self.size, self.timeout_s = target, argument, size, timeout_s
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(list(preload))
        _start_fork_server()
        self._workers: list[_Worker] = []
        self._died_idle = 0

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *exc: object) -> None:
        for worker in list(self._workers):
            self._end(worker)

    def run(self, tasks: Sequence[str]) -> list[Outcome]:
        """One outcome per task, in order. BadConfig when a process cannot be made ready."""
        waiting = deque(range(len(tasks)))
        outcomes: dict[int, Outcome] = {}
        while len(outcomes) < len(tasks):
            while len(self._workers) < min(self.size, len(tasks) - len(outcomes)):
                self._start()
            for worker in list(self._workers):
                if worker.ready and worker.task is None and waiting:
                    self._give(worker, waiting, tasks)
            # a process that died may have left its end of the connection to a child, so its own end is watched too
            events = [e for w in self._workers for e in (w.connection, w.process.sentinel)]
            wait(events, timeout=max(0.0, self._next_deadline() - time.monotonic()))
            for worker in list(self._workers):
                outcome = self._look_at(worker)
                if outcome is not None and worker.task is not None:
                    outcomes[worker.task] = outcome
                    worker.task = None
        return [outcomes[i] for i in range(len(tasks))]

    def _start(self) -> None:
        ours, theirs = self._context.Pipe()
        process = self._context.Process(target=self.target, args=(theirs, self.argument), daemon=True)
        process.start()
        theirs.close()
        self._workers.append(_Worker(process, ours))

    def _give(self, worker: _Worker, waiting: deque[int], tasks: Sequence[str]) -> None:
        number = waiting.popleft()
        try:
            worker.connection.send_bytes(tasks[number].encode())
        except OSError:  # died between two tasks: not this task's fault
            waiting.appendleft(number)
            self._end(worker)
            self._count_death(worker)
            return
        worker.task, worker.since = number, time.monotonic()

    def _deadline(self, worker: _Worker) -> float:
        if not worker.ready:
            return worker.since + START_TIMEOUT_S
        return worker.since + self.timeout_s if worker.task is not None else float("inf")

    def _next_deadline(self) -> float:
        return min((self._deadline(w) for w in self._workers), default=time.monotonic())

    def _look_at(self, worker: _Worker) -> Outcome | None:
        """Read what a worker sent; end it when it died or is past its time."""
        seconds = time.monotonic() - worker.since
        try:
            message = None
            if worker.connection.poll():
                message = json.loads(worker.connection.recv_bytes())
            elif not worker.process.is_alive() and not worker.connection.poll():
                raise EOFError
        except (EOFError, OSError, ValueError):
            self._end(worker)
            if worker.task is None:
                self._count_death(worker)
            return Outcome(None, False, f"the grader's process died ({_status(worker.process.exitcode)})", seconds)
        if message is not None:
            if worker.ready:
                self._died_idle = 0
                return Outcome(message, False, "", seconds)
            if "refused" in message:
                raise BadConfig(str(message["refused"]))
            worker.ready = True
        elif time.monotonic() >= self._deadline(worker):
            self._end(worker)
            if not worker.ready:
                raise PeerUnavailable(f"the grader was not ready within {START_TIMEOUT_S:g} s")
            return Outcome(None, True, f"no verdict within {self.timeout_s:g} s", seconds)
        return None

    def _count_death(self, worker: _Worker) -> None:
        """A death that no task explains: three in a row, and there is no use in going on."""
        self._died_idle += 1
        if self._died_idle >= 3:
            raise BadConfig(
                f"the grader's process dies before it has a task ({_status(worker.process.exitcode)})",
                hint="import its package in the stages' environment and look at what happens",
            )

    def _end(self, worker: _Worker) -> None:
        self._workers.remove(worker)
        worker.connection.close()
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(worker.process.pid, signal.SIGKILL)  # the worker leads a group of its own
        worker.process.kill()
        worker.process.join(5.0)


def _start_fork_server() -> None:
    """Start the process's fork server, whose socket lies in the temporary folder: a socket's path is bounded to about
    100 bytes, so a long TMPDIR is passed over. BadConfig when no short folder can be written to."""
    if len(os.fsencode(tempfile.gettempdir())) <= LONGEST_FOLDER_BYTES:
        forkserver.ensure_running()
        return
    short = next((f for f in ("/tmp", "/var/tmp", "/dev/shm") if os.access(f, os.W_OK | os.X_OK)), None)
    if short is None:
        raise BadConfig(
            f"the temporary folder's name is too long for a socket ({tempfile.gettempdir()})",
            hint=f"set TMPDIR to a folder of at most {LONGEST_FOLDER_BYTES} bytes",
        )
    before, tempfile.tempdir = tempfile.tempdir, short
    try:
        forkserver.ensure_running()
    finally:
        tempfile.tempdir = before


def _status(exitcode: int | None) -> str:
    if exitcode is None:
        return "no exit status"
    return f"signal {-exitcode}" if exitcode < 0 else f"exit status {exitcode}"
