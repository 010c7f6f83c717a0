"""What the tests of the interpreter share: a Workflow of one command, an interpreter over it, processes by pid."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any

from colchis.workflows.local.calls import Event
from colchis.workflows.local.interpreter import Interpreter
from colchis.workflows.local.launcher import Launcher
from colchis.workflows.local.parents import ExecLauncher, Warm, WarmLauncher

TOYS = Path(__file__).parent / "toys"
DEADLINE_S = 30.0


def toy_launcher() -> WarmLauncher:
    """A warm launcher of the toy module; stages called `modules-other` have a parent that imports more."""
    warm = Warm("toys", ("toystage.__main__",))
    other = Warm("other", ("toystage.__main__", "fractions"))
    return WarmLauncher(default=warm, stages={"modules-other": other}, module="toystage", roots=[TOYS])


LAUNCHERS: dict[str, Callable[[], Launcher]] = {"exec": ExecLauncher, "warm": toy_launcher}


def toy(*argv: str) -> list[str]:
    return ["python", "-m", "toystage", *argv]


def container(command: list[str], **fields: Any) -> dict[str, Any]:
    """A template `main` of one container."""
    return {"name": "main", "container": {"image": "none", "command": command}, **fields}


def workflow(*templates: Mapping[str, Any], name: str = "w", **spec: Any) -> dict[str, Any]:
    return {
        "apiVersion": "argoproj.io/v1alpha1",
        "kind": "Workflow",
        "metadata": {"name": name},
        "spec": {"entrypoint": "main", "templates": [dict(template) for template in templates], **spec},
    }


@contextlib.asynccontextmanager
async def machine(
    work_dir: Path, launcher: Launcher | None = None, *, templates: Mapping[str, Any] | None = None, **settings: Any
) -> AsyncIterator[tuple[Interpreter, list[Event]]]:
    """An interpreter and its events; its launcher is closed at the end."""
    launcher = launcher or ExecLauncher()
    events: list[Event] = []
    given = {"environment": {"PYTHONPATH": str(TOYS)}, "secrets": {}, "grace_s": 2.0, **settings}
    try:
        yield (
            Interpreter(templates or {}, work_dir=work_dir, launcher=launcher, on_event=events.append, **given),
            events,
        )
    finally:
        await launcher.close()


async def until(condition: Callable[[], bool]) -> None:
    """Waits for something that happens in another process."""
    async with asyncio.timeout(DEADLINE_S):
        while not condition():
            await asyncio.sleep(0.02)


def alive(pid: int) -> bool:
    """Whether a process runs (a zombie doesn't)."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"


def processes_with(mark: str) -> list[int]:
    """Pids of the processes whose environment or command line holds `mark`."""
    found = []
    for name in os.listdir("/proc"):
        if not name.isdigit() or int(name) == os.getpid():
            continue
        with contextlib.suppress(OSError):
            content = Path(f"/proc/{name}/environ").read_bytes() + Path(f"/proc/{name}/cmdline").read_bytes()
            if mark.encode() in content and alive(int(name)):
                found.append(int(name))
    return found
