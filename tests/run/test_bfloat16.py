"""Whole runs in bfloat16, the type that most models are trained in: on either engine, of whole models and of adapters."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from colchis.components.records.boundary import Boundary
from colchis.components.report.status import find_boundaries
from colchis.components.store import Store, keys
from colchis.components.weights import read_manifest
from colchis.workflows.local.weed import Weed
from tests.run.conftest import make_project
from tests.run.kept import DEADLINE_S

LORA = ("--set", "trainer.lora_rank=2", "--set", "trainer.lora_targets=[q_proj, v_proj]")
ENGINES = ["embedded", pytest.param("sglang", marks=[pytest.mark.sglang, pytest.mark.timeout(900)])]


@pytest.fixture(scope="module")
def rounded(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model of the runs in bfloat16."""
    folder = tmp_path_factory.mktemp("rounded") / "model"
    script = f"""
import shutil, torch
from transformers import AutoModelForCausalLM
AutoModelForCausalLM.from_pretrained({str(model)!r}, dtype=torch.bfloat16).save_pretrained({str(folder)!r})
shutil.copy({str(model / "tokenizer.json")!r}, {str(folder)!r})
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=DEADLINE_S, capture_output=True)
    return folder


@pytest.mark.parametrize("trained", ["whole", "adapters"])
@pytest.mark.parametrize("engine", ENGINES)
def test_versions_are_proven_and_within_rounding(rounded: Path, tmp_path: Path, engine: str, trained: str) -> None:
    """Catches engines that serve another type than the trainer writes, whose checksums nobody can predict, and limits made
    for float32 that end every run in bfloat16 at its first version."""
    project = make_project(rounded, tmp_path)
    more = LORA if trained == "adapters" else ()
    done = project.run("--engine", engine, "--engines", "1", "--set", "model.dtype=bfloat16", *more)
    assert done.returncode == 0, done.stdout + done.stderr
    beside = engine == "sglang" and trained == "adapters"
    with Weed(project.home / "store") as weed:
        store = Store(weed.settings)
        for version in (1, 2):
            assert {t.dtype for t in read_manifest(store, "r", version).tensors} == {"BF16"}
            proofs = {r.boundary: r.proof for r in find_boundaries(store, "r", version)}
            load, cache = proofs[Boundary.LOAD], proofs[Boundary.CACHE]
            assert (load["predicted"], load["checksums_equal"]) == (True, True)
            assert (load["adapter"] is not None) == beside
            assert (cache["tolerance"], 0 < cache["mean_gap"] < 0.01) == (0.02, True)
            summary = json.loads(store.get(keys.summary("r", version - 1)).data)
            assert 1e-5 < summary["metrics"]["gap_mean"] < 0.02
            assert summary["alerts"] == []
