"""What can go wrong on a cluster, done from outside: parts of the control plane killed and started again."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import pytest

RUN = Path("/run/colchis")
"""The harness's folder inside the cluster (harness/inner.sh): pids of its parts, and marks that hold them back."""

Part = Literal["apiserver", "argo", "kubelet", "store"]


@contextmanager
def killed(part: Part) -> Iterator[None]:
    """SIGKILL to one part of the cluster, which starts again when the block ends."""
    if os.environ.get("COLCHIS_TEST_CLUSTER") != "harness":
        pytest.skip("takes a part of the cluster away, which only the harness can give back")
    mark = RUN / "held" / part
    mark.touch()
    os.kill(int((RUN / "pids" / part).read_text()), signal.SIGKILL)
    try:
        yield
    finally:
        mark.unlink()
