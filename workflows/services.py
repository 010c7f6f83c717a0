"""`colchis up` and `colchis down`: services that outlive one run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from colchis.components.errors import BadConfig, PeerUnavailable
from colchis.workflows.home import Home
from colchis.workflows.runs import services

END_S = 60.0
"""Longest wait for services to end."""


def keep_services(
    home: Home, pool: str, engines: int, kind: str, *, model: Path | None, on_ready: Callable[[], None]
) -> None:
    """Run store and pool until SIGINT or SIGTERM."""
    ended = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):  # not blocked: that the services would inherit, and never hear of it
        signal.signal(number, lambda *_: ended.set())
    with services(home, "colchis up", pool, engines, kind, model=model, keep=True):
        on_ready()
        ended.wait()


def detach_services(home: Home, arguments: Sequence[str]) -> Path:
    """The same command without `--detach`, in the background; returns its log once the services answer."""
    if home.state() is not None:
        raise BadConfig(f"the services of {home.folder} are up already", hint="`colchis down` ends them")
    home.make()
    log = home.folder / "up.log"
    argv = [sys.executable, "-m", "colchis.workflows.cli", *(a for a in arguments if a != "--detach")]
    with log.open("ab") as out:
        process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True)
    while home.kept() is None:
        if process.poll() is not None:
            last = log.read_text(errors="replace").strip().splitlines()[-1:]
            raise PeerUnavailable(f"the services ended with {process.returncode}: {''.join(last)}", where=str(log))
        time.sleep(0.1)
    return log


def end_services(home: Home) -> bool:
    """End what `colchis up` keeps; False when nothing was up. PeerUnavailable when it does not end."""
    state = home.state()
    if state is None:
        return False
    if not state["kept"]:
        raise BadConfig(f"process {state['pid']} runs the services for a run of its own", hint="Ctrl-C ends it there")
    os.kill(state["pid"], signal.SIGTERM)
    end = time.monotonic() + END_S
    while home.state() is not None or home.is_locked():
        if time.monotonic() > end:
            raise PeerUnavailable(f"process {state['pid']} did not end within {END_S:g} s", where=str(home.folder))
        time.sleep(0.1)
    return True
