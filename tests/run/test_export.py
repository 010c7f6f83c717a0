"""What a run was for: its model, as a folder."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from colchis.components.store import Store
from colchis.components.weights.publish import read_manifest
from tests.run.conftest import DEADLINE_S, Project


def test_a_version_becomes_a_folder_that_transformers_loads(finished: Project, tmp_path: Path) -> None:
    """Catches a run whose result cannot be had: weights of another version, or without tokenizer and configuration."""
    served, first = tmp_path / "served", tmp_path / "first"
    done = finished.colchis("export", "r", "--to", str(served), "--json")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    summaries = finished.status()["summaries"]
    assert (told["version"], told["weights_digest"]) == (2, summaries[-1]["weights_digest"])
    assert finished.colchis("export", "r", "--to", str(first), "--version", "1").returncode == 0
    assert {p.name for p in served.iterdir()} >= {"config.json", "tokenizer.json", "model.safetensors"}
    assert (served / "model.safetensors").read_bytes() != (first / "model.safetensors").read_bytes()
    script = (
        "import sys, transformers, torch\n"
        "model = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1])\n"
        "print(model(torch.tensor([[3, 4, 5]])).logits.isfinite().all().item())"
    )
    loaded = subprocess.run(
        [sys.executable, "-c", script, str(served)], capture_output=True, text=True, timeout=DEADLINE_S, check=True
    )
    assert loaded.stdout.strip() == "True"


def test_nothing_is_overwritten_and_nothing_half_done_is_left(finished: Project, tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "notes.txt").write_text("mine")
    done = finished.colchis("export", "r", "--to", str(tmp_path / "there"))
    assert done.returncode == 78
    assert "something is there already" in done.stderr
    done = finished.colchis("export", "r", "--to", str(tmp_path / "new"), "--version", "9")
    assert done.returncode == 78
    assert "no version 9" in done.stderr
    assert finished.colchis("export", "nobody").returncode == 78
    assert sorted(p.name for p in tmp_path.iterdir()) == ["there"]


@pytest.mark.usefixtures("finished")
def test_damaged_weights_are_not_exported(opened: Store, tmp_path: Path) -> None:
    """Catches a folder that looks complete and holds other numbers than the run made."""
    from colchis.components.errors import BadData
    from colchis.components.weights.export import export

    payload = read_manifest(opened, "r", 1).files[0]
    whole = opened.get(payload.key).data
    opened.put(payload.key, whole[:-1] + bytes([whole[-1] ^ 1]))
    try:
        with pytest.raises(BadData, match=r"model\.safetensors"):
            export(opened, "r", 1, tmp_path / "new")
    finally:
        opened.put(payload.key, whole)
    assert list(tmp_path.iterdir()) == []
