"""Native code that holds the interpreter's lock: no timeout in Python can end it."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import asyncio, ctypes, sys, time
from colchis.components.rollout.standstill import bounded

def environment_reply():
    ctypes.PyDLL(None).sleep(600)  # PyDLL keeps the lock

async def main():
    async with bounded(1.0):
        if sys.argv[1] == "hold":
            await asyncio.to_thread(environment_reply)
        await asyncio.sleep(2.5)
    time.sleep(1.5)  # not watched any more

asyncio.run(main())
"""


def run(act: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", SCRIPT, act], capture_output=True, text=True, timeout=60, check=False)


def test_a_process_that_stands_still_is_ended_and_says_where() -> None:
    ended = run("hold")
    assert ended.returncode == 1
    assert "environment_reply" in ended.stderr


def test_a_process_that_waits_is_left_alone() -> None:
    assert run("wait").returncode == 0
