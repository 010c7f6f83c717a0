"""What starts a step's process. Two implementations in parents.py; the interpreter knows only this protocol."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol


@dataclass(frozen=True)
class Command:
    """A process to start: its own session, `environment` is all of its environment, output goes to two files."""

    argv: tuple[str, ...]
    environment: Mapping[str, str]
    directory: Path
    stdout: Path
    stderr: Path


class Process(Protocol):
    """A started process. Its exit code is that of Kubernetes: 128 + n after signal n."""

    pid: int

    async def wait(self) -> int: ...

    def signal(self, number: signal.Signals) -> None:
        """Sends a signal to the process and its group; nothing happens when it has ended."""


class Launcher(Protocol):
    """Starts commands. Whatever a launcher started dies with it, and with the interpreter, however that ends."""

    async def start(self, command: Command) -> Process:
        """Raises CannotStart when the program does not exist or cannot be executed."""

    async def close(self) -> None: ...


class CannotStart(Exception):
    """The program of a command cannot be executed: a pod would end with exit code 64 or not start at all."""
