"""Who drives a run, whatever the clocks say."""

from __future__ import annotations

import json
import os
from datetime import datetime
from pathlib import Path

import pytest

from colchis.components.store import StageKey, Store
from colchis.workflows.local.weed import Weed
from tests.faults import Fault
from tests.run.conftest import Project, make_project
from tests.run.kept import Account, Guest, ended
from tests.run.test_kills import has_commit, wait_until
from tests.run.test_peers import wait_for

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

HOUR_S = 3600


def off_by(seconds: float, file: Path) -> dict[str, str]:
    """Environment in which all wall clocks are off by what `file` says."""
    file.write_text(str(seconds))
    path = os.pathsep.join(filter(None, (str(Path(__file__).parent / "clock"), os.environ.get("PYTHONPATH"))))
    return {"PYTHONPATH": path, "CLOCK_JUMP": str(file)}


def test_one_runner_wins_and_the_other_says_who_holds_the_run(
    guest: Guest, calm: Account, model: Path, tmp_path: Path
) -> None:
    """Fault: two runners at one run on a store that they share, one because its clock says that the lease is old."""
    (tmp_path / "second").mkdir()
    second = Guest(guest.services, make_project(model, tmp_path / "second"), guest.run)
    second.announce()
    second.changed = off_by(HOUR_S, tmp_path / "jump")
    first = guest.start("--set", "loop.iterations=200")
    wait_for(guest.services.store_proxy.add(Fault("PUT", "000000/admission.json", "delay")), first)
    code, said = second.finish("--set", "loop.iterations=200")
    assert code == 78, said
    assert f"process {first.pid}" in said
    assert f"runs/{guest.run}/control/lease.json" in said
    stop = guest.project.colchis("stop", guest.run)
    assert stop.returncode == 0, stop.stderr
    code, said = ended(first)
    assert code == 0, said
    account = Account.of(guest.services.store, guest.run)
    assert account.digests[:2] == calm.digests


def test_nothing_expires_when_the_clock_jumps(project: Project, calm: Account, tmp_path: Path) -> None:
    """Fault: a lease, a deadline or a cache that goes by the wall clock: it jumps an hour ahead, then two back."""
    jump = tmp_path / "jump"
    environment = off_by(0, jump)
    runner = project.start(environment=environment)
    wait_until(has_commit(project, StageKey("r", 0, "rollout", 0)), runner)
    jump.write_text(str(HOUR_S))
    wait_until(has_commit(project, StageKey("r", 0, "train")), runner)
    jump.write_text(str(-HOUR_S))
    code, said = ended(runner)
    assert code == 0, said
    with Weed(project.home / "store") as weed:
        store = Store(weed.settings)
        assert Account.of(store, "r") == calm
        times = [
            datetime.fromisoformat(json.loads(store.get(stage.commit).data)["created_at"])
            for stage in (StageKey("r", 0, "rollout", 0), StageKey("r", 0, "train"), StageKey("r", 1, "train"))
        ]
    assert (times[1] - times[0]).total_seconds() > HOUR_S / 2, "the clock did not jump"
    assert (times[2] - times[1]).total_seconds() < -HOUR_S / 2, "the clock did not jump back"
