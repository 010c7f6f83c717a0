"""What a person does to a run: starts it twice, stops it, skips an iteration that cannot be saved."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from colchis.components.config import load, to_parameters
from colchis.components.report import known_run
from colchis.components.store import StageKey, Store, read_commit
from colchis.workflows.local.weed import Weed
from colchis.workflows.request import pin_files
from colchis.workflows.runs import stop
from tests.run.conftest import DEADLINE_S, Project
from tests.run.test_kills import has_commit, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

ROLLOUT, BATCH, TRAIN = StageKey("r", 1, "rollout", 0), StageKey("r", 1, "batch"), StageKey("r", 1, "train")


def test_second_runner_is_refused_and_a_wish_to_stop_is_obeyed(finished: Project, project: Project) -> None:
    """Fault: two runners at one run; a stop that cuts an iteration short, or that no continuation can undo."""
    runner = project.start("--set", "loop.iterations=100")
    wait_until(has_commit(project, StageKey("r", 0, "rollout", 0)), runner)
    second = project.run()
    assert second.returncode == 78, second.stdout + second.stderr
    assert f"process {runner.pid} (colchis run r)" in second.stderr
    stop = project.colchis("stop", "r", "--reason", "enough")
    assert stop.returncode == 0, stop.stderr
    out = runner.communicate(timeout=DEADLINE_S)[0]
    assert runner.returncode == 0, out
    status = project.status()
    closed = len(status["summaries"])
    assert 1 <= closed < 100
    assert status["serving"]["version"] == closed
    again = project.run("--set", f"loop.iterations={max(closed + 1, 2)}")
    assert again.returncode == 0, again.stdout
    assert len(project.digests()) == max(closed + 1, 2)
    assert project.digests()[:2] == finished.digests()[:2]


@pytest.mark.parametrize(
    ("after", "before", "payload"), [(ROLLOUT, BATCH, "trajectories-"), (BATCH, TRAIN, "batch.parq")]
)
def test_refused_iteration_can_be_skipped(project: Project, after: StageKey, before: StageKey, payload: str) -> None:
    """Fault: one lost object that ends a run for ever (found by batch, or by train), or a skip that leaves no record."""
    graded = ("--set", "grader.placement=step")
    runner = project.start(*graded)
    wait_until(has_commit(project, after), runner)
    os.kill(runner.pid, signal.SIGKILL)
    runner.communicate(timeout=30)
    with Weed(project.home / "store") as weed:
        store = Store(weed.settings)
        assert store.find(before.commit) is None, "killed too late to make the case"
        lost = next(p.key for p in read_commit(store, after).payload if p.name.startswith(payload))
        store.delete(lost)
    refused = project.run(*graded)
    assert refused.returncode == 65, refused.stdout
    assert lost in refused.stdout
    skip = project.colchis("skip", "r", "--iteration", "1", "--reason", "an object is lost")
    assert skip.returncode == 0, skip.stderr
    again = project.run(*graded)
    assert again.returncode == 0, again.stdout
    first, second = project.status()["summaries"]
    assert second["weights_digest"] == first["weights_digest"]
    assert (second["kind"], second["decision"], second["reason"]) == ("same", "skipped", "an object is lost")


def test_reached_target_ends_the_window_early(finished: Project, project: Project) -> None:
    """Fault: the rest of the window, evaluations included, that fails because its iterations never started."""
    target = ("--set", "loop.iterations=4", "--set", "evaluation.every=1")
    done = project.run(*target, "--set", "loop.target_reward=0")
    assert done.returncode == 0, done.stdout
    assert len(project.digests()) == 1
    watched = project.colchis("status", "r", "--watch")  # the rest of the iterations never comes
    assert watched.returncode == 0, watched.stderr
    assert "r-1 ended as Succeeded" in watched.stdout
    again = project.run("--set", "loop.iterations=2")
    assert again.returncode == 0, again.stdout
    assert project.digests() == finished.digests()[:2]


def test_a_workflow_made_again_does_not_undo_a_stop(finished: Project, opened: Store, tmp_path: Path) -> None:
    """Fault: GitOps that makes a garbage-collected Workflow anew, and so starts a run again that somebody stopped, or
    puts settings back that somebody changed."""

    def begin(workflow: str) -> str:
        config = pin_files(
            load(finished.folder / "run.yaml", ["loop.iterations=3"]), finished.folder / "run.yaml", opened
        )
        sections = [part for name, text in to_parameters(config).items() for part in ("--section", f"{name}={text}")]
        done = subprocess.run(
            [
                *(sys.executable, "-m", "colchis.components", "begin", "--run", "r", "--workflow", workflow),
                *(*sections, "--out", f"count={tmp_path / 'count'}"),
            ],
            env={**os.environ, **opened.settings.to_environment()},
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
        )
        assert done.returncode == 0, done.stderr
        return (tmp_path / "count").read_text()

    stop(opened, "r", "enough")
    assert begin("r-1") == "0"
    assert known_run(opened, "r").config.loop.iterations == 2
    assert begin("another") == "1"
