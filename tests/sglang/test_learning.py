"""The example learns on real SGLang as it does on the embedded engine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
ITERATIONS = 40
SHORTENED = [f"loop.iterations={ITERATIONS}", f"evaluation.every={ITERATIONS}"]


@pytest.mark.sglang
@pytest.mark.timeout(1800)
def test_the_example_learns(tmp_path: Path) -> None:
    """Fault: rollouts, rewards or weights that pass every check of a step, and a policy that is none the better for all that."""
    environment = {**os.environ, "COLCHIS_HOME": str(tmp_path), "OMP_NUM_THREADS": "1"}

    def colchis(*words: str) -> str:
        command = [sys.executable, "-m", "colchis.workflows.cli", *words]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1700)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    settings = [word for setting in SHORTENED for word in ("--set", setting)]
    example = str(REPOSITORY / "examples/arithmetic/run.yaml")
    colchis("run", example, "--run", "r", "--engine", "sglang", "--engines", "1", *settings)
    status = json.loads(colchis("status", "r", "--json"))
    before, after = (status["evaluations"][n] for n in (0, -1))
    assert after["low"] > before["high"]
    assert len(status["summaries"]) == ITERATIONS
    assert max(s["metrics"]["gap_mean"] for s in status["summaries"]) < 1e-5
