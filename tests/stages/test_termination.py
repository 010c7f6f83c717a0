"""A pod that is taken away says so, wherever it is hit."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from colchis.workflows.local.ports import free_port

LONGEST_S = 1.6
"""A stage has done its imports by then, and waits for a store that is not there."""


def end_after(seconds: float) -> int:
    """The exit code of a stage that gets SIGTERM that long after its start; minus the signal before it can handle one."""
    store = {
        "COLCHIS_S3_ENDPOINT": f"http://127.0.0.1:{free_port()}",
        "COLCHIS_S3_BUCKET": "none",
        "AWS_ACCESS_KEY_ID": "a",
        "AWS_SECRET_ACCESS_KEY": "b",
        "COLCHIS_ENGINES": "http://127.0.0.1:1",
        "COLCHIS_AGENT_TOKEN": "t",
    }
    stage = subprocess.Popen(
        [sys.executable, "-m", "colchis.components", "evaluate", "--run", "r", "--version", "0", "--pool", "main"],
        env={**os.environ, **store},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    time.sleep(seconds)
    stage.send_signal(signal.SIGTERM)
    return stage.wait(60)


def test_sigterm_at_any_moment_is_no_other_error() -> None:
    """Catches an exit code that is not tried again, from the first import to the wait for a store."""
    moments = [LONGEST_S * n / 16 for n in range(1, 17)]
    with ThreadPoolExecutor(4) as pool:
        codes = dict(zip(moments, pool.map(end_after, moments), strict=True))
    assert set(codes.values()) == {-signal.SIGTERM, 128 + signal.SIGTERM}, codes


WRAPPING = """
import os, signal, sys, types
import click
from colchis.components.__main__ import main
from colchis.components.errors import BadData

@click.command()
def command():
    try:
        os.kill(os.getpid(), signal.SIGTERM)
        signal.pause()
    except BaseException as error:
        raise {error} from error

sys.modules["colchis.components.stages.begin"] = types.SimpleNamespace(command=command)
sys.exit(main(["begin"]))
"""


@pytest.mark.parametrize("error", ["ValueError('building a validator')", "BadData('no such object')"])
def test_sigterm_inside_code_that_makes_an_error_of_it(error: str) -> None:
    """Catches exit code 70, by which a run ends, when the signal lands in an import that wraps what is raised in it
    (pydantic's builder of schemas does)."""
    done = subprocess.run([sys.executable, "-c", WRAPPING.format(error=error)], capture_output=True, timeout=60)
    assert done.returncode == 128 + signal.SIGTERM, done.stderr
