"""Killed at the worst moment: running again ends with the very weights of an undisturbed run."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable

import pytest

from colchis.components.errors import ColchisError
from colchis.components.store import StageKey, Store, find_commit
from tests.run.conftest import DEADLINE_S, Project, descendants, kill, settings_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

ENGINE, WEED = "colchis.components.engine", "weed mini"


def wait_until(condition: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    """Until the condition holds; fails when the runner ends first or nothing comes of it."""
    end = time.monotonic() + DEADLINE_S
    while not condition():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < end
        time.sleep(0.02)


def has_commit(project: Project, stage: StageKey) -> Callable[[], bool]:
    """Whether a stage of the running run is committed."""
    stores: list[Store] = []

    def check() -> bool:
        if not (project.home / "services.json").exists():
            return False
        try:
            if not stores:
                stores.append(Store(settings_of(project), deadline_s=5))
            return find_commit(stores[0], stage) is not None
        except ColchisError:
            return False

    return check


def stage_pids(project: Project, runner: int, stage: str) -> list[int]:
    """Processes of a stage: children of a warmed parent keep its command line, but work in the stage's folder."""
    found = []
    for pid in descendants(runner):
        try:
            folder = os.readlink(f"/proc/{pid}/cwd")
        except OSError:
            continue
        if f"/{stage}-" in folder and str(project.home) in folder:
            found.append(pid)
    return found


def test_killed_stages_are_run_again(finished: Project, project: Project) -> None:
    """Fault: work lost or done twice when a pod is killed while it runs: each of rollout, batch and train once."""
    runner = project.start()
    killed: list[str] = []
    for stage in ("rollout", "batch", "train"):

        def strike(stage: str = stage) -> bool:
            pids = stage_pids(project, runner.pid, stage)
            for pid in pids:
                kill(pid)
            return bool(pids)

        wait_until(strike, runner)
        killed.append(stage)
    out = runner.communicate(timeout=DEADLINE_S)[0]
    assert runner.returncode == 0, out
    assert killed == ["rollout", "batch", "train"]
    assert "exit code 137" in out
    assert project.digests() == finished.digests()[:2]


@pytest.mark.parametrize("stage", ["rollout", "train", "reload"])
def test_killed_runner_leaves_nothing_and_continues(finished: Project, project: Project, stage: str) -> None:
    """Fault: orphans after `kill -9` of the runner, right after a commit; or a run that cannot go on."""
    runner = project.start()
    wait_until(has_commit(project, StageKey("r", 0, stage, 0 if stage == "rollout" else None)), runner)
    children = descendants(runner.pid)
    assert any(ENGINE in command for command in children.values())
    kill(runner.pid)
    runner.communicate(timeout=30)
    end = time.monotonic() + 30
    while alive := [pid for pid in children if os.path.exists(f"/proc/{pid}") and not is_zombie(pid)]:
        assert time.monotonic() < end, [children[pid] for pid in alive]
        time.sleep(0.1)
    again = project.run()
    assert again.returncode == 0, again.stdout
    assert project.digests() == finished.digests()[:2]


def is_zombie(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


@pytest.mark.parametrize("service", [ENGINE, WEED])
def test_killed_service_ends_the_run_clearly_and_it_continues(
    finished: Project, project: Project, service: str
) -> None:
    """Fault: a run that hangs without its engine or its store, or that hides which of them is gone."""
    short = (
        "--set",
        "rollout.deadline_s=20",
        "--set",
        "reload.prepare_deadline_s=20",
        "--set",
        "reload.activate_deadline_s=20",
    )
    runner = project.start(*short)
    wait_until(has_commit(project, StageKey("r", 0, "batch")), runner)
    for pid in [pid for pid, command in descendants(runner.pid).items() if service in command]:
        kill(pid)
    out = runner.communicate(timeout=DEADLINE_S)[0]
    assert runner.returncode in (69, 75), out
    again = project.run(*short)
    assert again.returncode == 0, again.stdout
    assert project.digests() == finished.digests()[:2]


def test_a_second_interrupt_waits_for_nothing(finished: Project, project: Project) -> None:
    """Fault: a user who has to find and kill what a stage's end is waited for, and engines that stay."""
    runner = project.start()
    wait_until(has_commit(project, StageKey("r", 0, "rollout", 0)), runner)
    children = descendants(runner.pid)
    os.kill(runner.pid, signal.SIGINT)
    time.sleep(0.3)  # as a hand on the keyboard: two signals at once are one
    os.kill(runner.pid, signal.SIGINT)
    out = runner.communicate(timeout=DEADLINE_S)[0]
    assert runner.returncode == 130, out
    assert "Traceback" not in out
    assert not [pid for pid in children if os.path.exists(f"/proc/{pid}") and not is_zombie(pid)]
    assert project.run().returncode == 0
    assert project.digests() == finished.digests()[:2]


def test_interrupt_stops_everything_and_continues(finished: Project, project: Project) -> None:
    """Fault: Ctrl-C that leaves engines behind, or that costs the run more than the iteration under way."""
    runner = project.start()
    wait_until(has_commit(project, StageKey("r", 0, "batch")), runner)
    children = descendants(runner.pid)
    os.kill(runner.pid, signal.SIGINT)
    out = runner.communicate(timeout=DEADLINE_S)[0]
    assert runner.returncode != 0, out
    assert not [pid for pid in children if os.path.exists(f"/proc/{pid}") and not is_zombie(pid)]
    again = project.run()
    assert again.returncode == 0, again.stdout
    assert project.digests() == finished.digests()[:2]
