"""The example learns on real SGLang."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.run.conftest import Project

EXAMPLE = Path(__file__).parents[2] / "examples/arithmetic"
ITERATIONS = 40
DEADLINE_S = 1500.0


@pytest.mark.sglang
@pytest.mark.timeout(1700)
def test_the_example_learns(tmp_path: Path) -> None:
    """Fault: rollouts, rewards or weights that pass every check of a step, and a policy that is none the better for all that."""
    project = Project(EXAMPLE, tmp_path)
    settings = [f"loop.iterations={ITERATIONS}", f"evaluation.every={ITERATIONS}"]
    words = [word for setting in settings for word in ("--set", setting)]
    running = project.start("--engine", "sglang", "--engines", "1", *words)
    try:
        said = running.communicate(timeout=DEADLINE_S)[0]
    finally:
        running.terminate()  # what has ended takes no notice
        running.wait(60)
    assert running.returncode == 0, said
    status = project.status()
    before, after = (status["evaluations"][n] for n in (0, -1))
    assert after["low"] > before["high"], "95 % intervals of the greedy accuracy"
    assert len(status["summaries"]) == ITERATIONS
    assert max(s["metrics"]["gap_mean"] for s in status["summaries"]) < 1e-5
