"""A run that trains adapters, from its configuration to its export."""

from __future__ import annotations

import json
from pathlib import Path

from colchis.components.store import StageKey, Store, read_commit
from colchis.components.weights import read_manifest
from colchis.workflows.local.weed import Weed
from tests.run.conftest import Project

LORA = ("--set", "trainer.lora_rank=2", "--set", "trainer.lora_targets=[q_proj, v_proj]")


def test_adapters_are_trained_served_and_exported(project: Project, tmp_path: Path) -> None:
    """Catches an iteration that starts from the merged weights of the one before, with its adapter added twice: the
    engines would still agree with the trainer, so it is told by the numbers."""
    done = project.run(*LORA)
    assert done.returncode == 0, done.stdout + done.stderr
    summaries = project.status()["summaries"]
    assert [s["kind"] for s in summaries] == ["full", "full"]
    with Weed(project.home / "store") as weed:
        store = Store(weed.settings)
        commit, manifest = read_commit(store, StageKey("r", 1, "train")), read_manifest(store, "r", 2)
    assert {p.name for p in commit.payload if p.name.startswith("state")} == {
        *("state/state.json", "state/moments.safetensors"),
        *("state/adapter/adapter_config.json", "state/adapter/adapter_model.safetensors"),
    }
    assert manifest.adapter is not None  # for engines that serve adapters; this one got the two merged
    assert (manifest.adapter.base_version, manifest.adapter.rank) == (0, 2)
    model, adapter = tmp_path / "exported", tmp_path / "adapter"
    assert project.colchis("export", "r", "--to", str(model)).returncode == 0
    told = project.colchis("export", "r", "--to", str(adapter), "--adapter", "--json")
    assert told.returncode == 0, told.stderr
    assert json.loads(told.stdout)["version"] == 2
    assert merged_by_hand(project.folder / "model", adapter, model) < 1e-6
    refused = project.colchis("export", "r", "--to", str(tmp_path / "none"), "--adapter", "--version", "0")
    assert refused.returncode == 78
    assert "no adapter" in refused.stderr


def merged_by_hand(base: Path, adapter: Path, model: Path) -> float:
    """Largest difference between `model` and base + scale * B @ A, all from exported files."""
    import numpy as np
    from safetensors.numpy import load_file

    config = json.loads((adapter / "adapter_config.json").read_text())
    low, weights = load_file(adapter / "adapter_model.safetensors"), load_file(base / "model.safetensors")
    for key, a in low.items():
        if key.endswith(".lora_A.weight"):
            name = key.removeprefix("base_model.model.").removesuffix(".lora_A.weight") + ".weight"
            weights[name] = (
                weights[name] + config["lora_alpha"] / config["r"] * low[key.replace("lora_A", "lora_B")] @ a
            )
    made = load_file(model / "model.safetensors")
    assert made.keys() == weights.keys()
    return float(max(np.abs(made[name] - weights[name]).max() for name in made))


def test_a_layer_that_is_not_there_ends_the_run_with_its_name(project: Project) -> None:
    done = project.run("--set", "trainer.lora_rank=2", "--set", "trainer.lora_targets=[qproj]")
    assert done.returncode == 78
    assert "no linear layer 'qproj'" in done.stdout + done.stderr
