"""A whole run whose versions are broadcast into the engines: the same weights at the end, with the same proofs."""

from __future__ import annotations

import json
from itertools import groupby

import pytest

from colchis.components.records.boundary import Boundary, BoundaryRecord
from colchis.components.report.status import find_boundaries
from colchis.components.store import Store
from colchis.workflows.local.weed import Weed
from tests.faults import Fault
from tests.run.conftest import Project
from tests.run.kept import Account, Guest, ended
from tests.run.test_boundaries import strikes

pytestmark = pytest.mark.timeout(600)

Records = dict[Boundary, list[BoundaryRecord]]


def boundaries(project: Project, version: int) -> Records:
    with Weed(project.home / "store") as weed:
        found = find_boundaries(Store(weed.settings), "r", version)
    return {boundary: list(group) for boundary, group in groupby(found, key=lambda r: r.boundary)}


def test_versions_are_sent_to_two_engines(project: Project) -> None:
    """Catches a fast path that skips a proof, and one that moves other weights than the slow one."""
    done = project.run("--engines", "2", "--set", "reload.transfer=gloo")
    assert done.returncode == 0, done.stdout + done.stderr
    digests = project.digests()
    shown = project.colchis("status", "r").stdout
    assert "received" in shown

    first, second = boundaries(project, 0), boundaries(project, 2)
    assert [r.proof["direct"] for r in first[Boundary.LOAD]] == [
        False,
        False,
    ]  # an empty engine needs the model's folder
    sender, *engines = second[Boundary.TRANSFER]
    assert (sender.at, sender.proof["weights_digest"]) == ("sender", digests[1])
    assert sender.proof["bytes"] > 0
    assert [(r.at, r.proof["bytes"], r.proof["receivers"]) for r in engines] == [("main-0", 0, 1), ("main-1", 0, 1)]
    assert [r.at for r in second[Boundary.BUFFER]] == ["sender", "main-0", "main-1"]
    for record in second[Boundary.LOAD]:
        assert (record.proof["direct"], record.proof["checksums_equal"], record.proof["changed"]) == (True, True, True)
        assert record.proof["cached_tokens_after"] == 0
    assert all(r.proof["max_gap"] < 1e-4 for r in second[Boundary.CACHE])

    again = project.run("--run", "s", "--engines", "2")
    assert again.returncode == 0, again.stdout + again.stderr
    fetched = json.loads(project.colchis("status", "s", "--json").stdout)["summaries"]
    assert [s["weights_digest"] for s in fetched] == digests


def test_nccl_without_a_gpu_is_refused_before_anything_pauses(project: Project) -> None:
    """Fault: engines that wait, paused, for a sender that cannot send."""
    project.environment["CUDA_VISIBLE_DEVICES"] = ""
    done = project.run("--engines", "1", "--set", "reload.transfer=nccl")
    assert done.returncode == 78, done.stdout + done.stderr
    assert "the reload has no GPU to send from" in done.stdout + done.stderr
    assert Boundary.LOAD not in boundaries(project, 1)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_reload_is_killed_while_it_sends(guest: Guest, calm: Account) -> None:
    """Fault: engines that wait for a sender that is dead, or serve what came before it died, and a pod whose next try cannot
    send."""
    runner = guest.start("--set", "reload.transfer=gloo")
    killed: list[int] = []
    proxies = [machine.engine_proxy for machine in guest.services.machines]
    path = "/update_weights_from_distributed"
    for proxy in proxies:
        proxy.add(Fault("POST", path, "delay", seconds=0.5, before=strikes(guest, runner, killed)))
    code, said = ended(runner)
    assert killed, said
    assert code == 0, said
    assert "d-load: Error (exit code 137)" in said
    assert Account.of(guest.services.store, guest.run) == calm
    assert [m.label() for m in guest.services.machines] == ["2", "2"]
