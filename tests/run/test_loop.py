"""A whole run on this machine: what it leaves behind, how it continues, and what it refuses."""

from __future__ import annotations

import io
import json

import pyarrow.parquet as pq
import pytest

from colchis.components.store import StageKey, Store, keys, read_commit
from tests.run.conftest import Project


def test_two_iterations_leave_every_record(finished: Project, opened: Store) -> None:
    """Fault: a stage whose work cannot be proven afterwards."""
    serving = json.loads(opened.get(keys.serving("r")).data)
    assert serving["version"] == 2
    assert serving["engines"] == ["main-0", "main-1"]
    for iteration in (0, 1):
        rollout = read_commit(opened, StageKey("r", iteration, "rollout", 0))
        tables = [
            pq.read_table(io.BytesIO(opened.read(p))) for p in rollout.payload if p.name.startswith("trajectories")
        ]
        assert sum(t.num_rows for t in tables) == 16
        versions = {span["version"] for t in tables for spans in t["versions"].to_pylist() for span in spans}
        assert versions == {iteration}
        assert read_commit(opened, StageKey("r", iteration, "batch")).outputs["decision"] == "trainable"
        train = read_commit(opened, StageKey("r", iteration, "train"))
        assert train.outputs["version"] == iteration + 1
        reload = read_commit(opened, StageKey("r", iteration, "reload"))
        records = {p.name: json.loads(opened.get(p.key).data)["records"] for p in reload.payload}
        assert records.keys() == {"store.json", "transfer.json", "buffer.json", "load.json", "cache.json"}
        assert len(records["store.json"]) == 1
        for name in ("transfer.json", "buffer.json", "load.json", "cache.json"):
            assert [(r["engine"], r["version"], r["ok"]) for r in records[name]] == [
                ("main-0", iteration + 1, True),
                ("main-1", iteration + 1, True),
            ]
        summary = json.loads(opened.get(keys.summary("r", iteration)).data)
        assert summary["weights_digest"] == train.outputs["weights_digest"]
        assert summary["lag"] == 0
        assert summary["metrics"]["gap_mean"] < 1e-5
    assert (finished.home / "runs" / "r" / "report.html").read_text().startswith("<!doctype html>")


def test_status_shows_the_five_boundaries_of_the_last_reload(finished: Project) -> None:
    """Fault: a reload that can be looked at only in the store."""
    found = finished.status()["boundaries"]
    assert [b["name"] for b in found] == [
        "store",
        *(n for n in ("transfer", "buffer", "load", "cache") for _ in range(2)),
    ]
    assert {b["version"] for b in found} == {2}
    shown = finished.colchis("status", "r").stdout.splitlines()
    start = next(i for i, line in enumerate(shown) if line.startswith("reload of v2"))
    assert [line.split()[:2] for line in shown[start + 1 : start + 6]] == [
        ["1", "store"],
        ["3", "transfer"],
        ["2", "buffer"],
        ["4", "load"],
        ["5", "cache"],
    ]


def test_running_again_does_nothing_and_a_longer_run_continues(finished: Project) -> None:
    """Fault: an iteration trained twice, or a run that cannot be extended."""
    before = finished.digests()
    again = finished.run()
    assert again.returncode == 0, again.stdout
    assert finished.digests() == before
    longer = finished.run("--set", "loop.iterations=3")
    assert longer.returncode == 0, longer.stdout
    assert finished.digests()[:2] == before
    assert len(finished.digests()) == 3


def test_another_identity_is_refused_with_the_difference(finished: Project) -> None:
    """Fault: two different trainings under one name."""
    done = finished.run("--set", "loop.seed=4")
    assert done.returncode == 78
    assert "loop.seed: 3 -> 4" in done.stdout


@pytest.mark.parametrize(
    "settings",
    [
        ("--set", "rollout.shards=2", "--set", "grader.placement=step", "--set", "grader.shards=2"),
        ("--exec", "--engines", "1", "--set", "loop.window=1"),
    ],
    ids=["two shards, graders in pods of their own", "plain processes, one engine, a successor per iteration"],
)
def test_layout_does_not_change_the_weights(finished: Project, project: Project, settings: tuple[str, ...]) -> None:
    """Fault: a result that depends on shards, placement, engines, windows or on how processes are started."""
    done = project.run(*settings)
    assert done.returncode == 0, done.stdout
    assert project.digests() == finished.digests()[:2]
