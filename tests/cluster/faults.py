"""What can go wrong on a cluster, done from outside: parts of the control plane killed and started again."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import pytest

from tests.waiting import eventually

RUN = Path("/run/colchis")
"""The harness's folder inside the cluster (harness/inner.sh): pids of its parts, and marks that hold them back."""

Part = Literal["apiserver", "argo", "kubelet", "store"]


@contextmanager
def killed(part: Part) -> Iterator[None]:
    """SIGKILL to one part of the cluster, which starts again when the block ends."""
    if os.environ.get("COLCHIS_TEST_CLUSTER") != "harness":
        pytest.skip("takes a part of the cluster away, which only the harness can give back")
    mark = RUN / "held" / part
    pid = RUN / "pids" / part
    mark.touch()
    os.kill(int(pid.read_text()), signal.SIGKILL)
    try:
        eventually(lambda: not pid.read_text().strip(), f"the end of {part} is seen", deadline_s=30)
        yield
    finally:
        mark.unlink()
        eventually(lambda: bool(pid.read_text().strip()), f"{part} is started again", deadline_s=30)
        if part == "apiserver":
            _wait_for_api()


def _wait_for_api(deadline_s: float = 120.0) -> None:
    until = time.monotonic() + deadline_s
    while subprocess.run(["kubectl", "get", "--raw", "/readyz"], capture_output=True, check=False).returncode != 0:
        assert time.monotonic() < until, f"the API server is not back after {deadline_s:.0f} s"
        time.sleep(0.5)
