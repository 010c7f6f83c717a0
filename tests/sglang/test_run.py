"""`colchis run --engine sglang`: the manifests that a laptop interprets, with real SGLang servers in the pool."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from colchis.components.records.boundary import Boundary
from colchis.components.report.status import find_boundaries
from colchis.components.store import StageKey, Store, keys, read_commit
from colchis.workflows.local.weed import Weed
from tests.run.conftest import make_project

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(900)]


def test_adapters_are_served_beside_the_base(model: Path, tmp_path: Path) -> None:
    """Catches rollouts of the base model, which every check of labels and checksums would let pass."""
    project = make_project(model, tmp_path)
    lora = ("--set", "trainer.lora_rank=2", "--set", "trainer.lora_targets=[q_proj, v_proj]")
    done = project.run("--engine", "sglang", "--engines", "1", *lora, "--set", "trainer.learning_rate=0.05")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "no pause, adapter r-v2-" in project.colchis("status", "r").stdout
    with Weed(project.home / "store") as weed:
        store = Store(weed.settings)
        for iteration in (0, 1):
            reload = read_commit(store, StageKey("r", iteration, "reload"))
            records = {p.name: json.loads(store.get(p.key).data)["records"] for p in reload.payload}
            (load,), (cache,) = records["load.json"], records["cache.json"]
            assert load["proof"]["adapter"].startswith(f"r-v{iteration + 1}-")
            assert load["proof"]["pause_s"] == 0
            assert cache["proof"]["max_gap"] < 1e-4
            # iteration 1 was sampled by SGLang with the adapter of v1, and computed again by the trainer
            assert json.loads(store.get(keys.summary("r", iteration)).data)["metrics"]["gap_mean"] < 1e-5


def test_two_iterations(model: Path, tmp_path: Path) -> None:
    """Catches a pool that does not start, tokens under a wrong version, and weights that are not the trainer's."""
    project = make_project(model, tmp_path)
    done = project.run("--engine", "sglang", "--engines", "1")
    assert done.returncode == 0, done.stdout + done.stderr
    summaries = project.status()["summaries"]
    assert [s["version"] for s in summaries] == [1, 2]
    with Weed(project.home / "store") as weed:
        store = Store(weed.settings)
        serving = json.loads(store.get(keys.serving("r")).data)
        assert (serving["version"], serving["engines"]) == (2, ["main-0"])
        for iteration in (0, 1):
            assert read_commit(store, StageKey("r", iteration, "batch")).outputs["decision"] == "trainable"
            reload = read_commit(store, StageKey("r", iteration, "reload"))
            records = {p.name: json.loads(store.get(p.key).data)["records"] for p in reload.payload}
            (load,), (cache,) = records["load.json"], records["cache.json"]
            assert (load["version"], load["ok"], load["proof"]["checksums_equal"]) == (iteration + 1, True, True)
            assert cache["proof"]["max_gap"] < 1e-4
            # sampled by SGLang, and computed again by the trainer
            assert json.loads(store.get(keys.summary("r", iteration)).data)["metrics"]["gap_mean"] < 1e-5


def test_versions_are_sent_to_two_servers(model: Path, tmp_path: Path) -> None:
    """Catches two servers that disturb each other, and a broadcast that only the embedded engine understands."""
    project = make_project(model, tmp_path)
    done = project.run("--engine", "sglang", "--engines", "2", "--set", "reload.transfer=gloo")
    assert done.returncode == 0, done.stdout + done.stderr
    with Weed(project.home / "store") as weed:
        store = Store(weed.settings)
        assert json.loads(store.get(keys.serving("r")).data)["engines"] == ["main-0", "main-1"]
        for version in (0, 1, 2):  # SGLang starts with a model, so it receives the first version too
            records = find_boundaries(store, "r", version)
            loads = [r for r in records if r.boundary == Boundary.LOAD]
            assert [r.engine for r in loads] == ["main-0", "main-1"]
            assert all(r.proof["direct"] and r.proof["checksums_equal"] for r in loads)
            gaps = [r.proof["max_gap"] for r in records if r.boundary == Boundary.CACHE and version]
            assert all(gap < 1e-4 for gap in gaps)
        for iteration in (0, 1):
            assert json.loads(store.get(keys.summary("r", iteration)).data)["metrics"]["gap_mean"] < 1e-5
