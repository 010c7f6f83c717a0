"""Adapters in an agent's buffer: what is not the adapter that the manifest speaks of never reaches an engine."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from colchis.components.agent.shelf import NAMES, Shelf
from colchis.components.agent.staging import Staging
from colchis.components.errors import BadData
from colchis.components.records.weights import Adapter, Probe, WeightsManifest
from colchis.components.store import Store, keys
from colchis.components.weights.deadline import Deadline
from colchis.components.weights.publish import read_manifest
from tests.agent.conftest import Versions
from tests.weights.models import RUN, write_weights

CONFIG: dict[str, Any] = {"peft_type": "LORA", "r": 4, "lora_alpha": 8.0, "target_modules": ["k_proj", "q_proj"]}


@pytest.fixture
def shelf(tmp_path: Path) -> Iterator[Shelf]:
    staging = Staging(tmp_path / "staging")
    yield Shelf(staging)
    staging.close()


def adapted(store: Store, folder: Path, config: bytes, weight: float = 0.5) -> tuple[WeightsManifest, Adapter]:
    """v1 with an adapter of rank 4, alpha 8, for q_proj and k_proj, and the configuration that is given."""
    (folder / NAMES[0]).write_bytes(config)
    write_weights(folder / NAMES[1], {"base_model.model.lm_head.lora_A.weight": np.full((4, 8), weight, np.float32)})
    prefix = keys.iteration_prefix(RUN, 1) + "train/attempts/x/adapter/"
    manifest = read_manifest(store, RUN, 1)
    adapter = Adapter(
        base_version=0,
        base_digest=read_manifest(store, RUN, 0).weights_digest,
        rank=4,
        alpha=8.0,
        targets=("q_proj", "k_proj"),
        files=[store.upload(prefix + name, folder / name) for name in NAMES],
        probe=Probe(token_ids=[[3, 4]], logprobs=[[-1.0]], tolerance=1e-4),
    )
    return WeightsManifest.model_validate({**manifest.model_dump(), "adapter": adapter}), adapter


def test_an_adapter_is_staged(versions: Versions, store: Store, shelf: Shelf, tmp_path: Path) -> None:
    manifest, adapter = adapted(store, tmp_path, json.dumps(CONFIG).encode())
    staged, repeated = shelf.fill(store, manifest, adapter, set(), Deadline(30))
    assert (staged.digest, staged.tensors, repeated) == (adapter.digest, 1, False)
    assert sorted(path.name for path in staged.folder.iterdir()) == [*NAMES, "manifest.json"]
    assert shelf.fill(store, manifest, adapter, set(), Deadline(30)) == (staged, True)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({**CONFIG, "r": 8}, r"says r=8, the manifest 4"),
        ({**CONFIG, "lora_alpha": 16.0}, r"says lora_alpha=16\.0, the manifest 8\.0"),
        (
            {**CONFIG, "target_modules": ["q_proj"]},
            r"says target_modules=\['q_proj'\], the manifest \['k_proj', 'q_proj'\]",
        ),
        ({**CONFIG, "target_modules": "all-linear"}, r"says target_modules="),
        ({**CONFIG, "target_modules": None}, "has no r, lora_alpha and target_modules"),
        ({"r": 4, "lora_alpha": 8.0}, r"has no r, lora_alpha and target_modules that can be read: KeyError"),
        ([], "has no r, lora_alpha and target_modules"),
        ("cut off", "has no r, lora_alpha and target_modules"),
    ],
)
def test_a_configuration_that_contradicts_the_manifest_is_refused(
    versions: Versions, store: Store, shelf: Shelf, tmp_path: Path, config: Any, message: str
) -> None:
    """Fault: another scale, or layers that are left out, in the file that engines go by: every checksum is right, and the
    policy is another one."""
    body = b'{"r": 4' if config == "cut off" else json.dumps(config).encode()
    manifest, adapter = adapted(store, tmp_path, body)
    with pytest.raises(BadData, match=message):
        shelf.fill(store, manifest, adapter, set(), Deadline(30))
    assert shelf.versions() == []
    assert list(shelf.folder.glob("*/v*")) == [], "nothing of it stays"


def test_an_adapter_with_a_number_that_is_none_is_refused(
    versions: Versions, store: Store, shelf: Shelf, tmp_path: Path
) -> None:
    manifest, adapter = adapted(store, tmp_path, json.dumps(CONFIG).encode(), weight=float("nan"))
    with pytest.raises(BadData, match=r"lm_head\.lora_A\.weight"):
        shelf.fill(store, manifest, adapter, set(), Deadline(30))
    assert shelf.versions() == []
