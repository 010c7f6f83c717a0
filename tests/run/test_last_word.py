"""Why a stage failed, where Kubernetes and Argo look for it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

PROGRAM = """\
import sys
from pathlib import Path
from colchis.components import __main__ as stages
stages.LAST_WORD = Path(sys.argv[1])
sys.exit(stages.main(["begin", "--run", "Not A Name"]))
"""


def run(path: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", PROGRAM, str(path)], capture_output=True, text=True, timeout=60, check=False
    )


def test_a_refusal_is_left_where_argo_reads_it(tmp_path: Path) -> None:
    """Fault: a failed node whose message is a number, while its log is gone with its pod."""
    path = tmp_path / "termination-log"
    path.touch()
    assert run(path).returncode == 78
    assert path.read_text().startswith("BadConfig: --run 'Not A Name': use small letters")


def test_outside_a_pod_nothing_is_left(tmp_path: Path) -> None:
    """Fault: a run on a laptop that writes into /dev."""
    done = run(tmp_path / "termination-log")
    assert done.returncode == 78
    assert "BadConfig" in done.stderr
    assert list(tmp_path.iterdir()) == []
