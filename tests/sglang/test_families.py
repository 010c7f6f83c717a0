"""Models of other families on real SGLang: what their tensors must hash to after a load is computed from the files. Where that is
wrong, every reload of such a model is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from colchis.components.weights.checksums import predict
from tests.contract.conftest import SGLANG, started
from tests.weights.models import config_of, write_model

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(900)]

FAMILIES: dict[str, dict[str, Any]] = {
    "qwen2, with a head of its own": {"family": "qwen2", "tied": False},
    "qwen3, with norms of queries and keys": {"family": "qwen3"},
    "llama": {"family": "llama", "tied": False},
    "llama, with biases of attention": {"family": "llama", "attention_bias": True},
    "a width that is no multiple of 32": {"family": "qwen2", "intermediate_size": 48},
}


@pytest.mark.parametrize("family", FAMILIES)
def test_its_tensors_hash_to_what_was_predicted(family: str, tmp_path: Path) -> None:
    """Fault: a model whose layers SGLang stacks, pads or names in another way than we think."""
    assert differences(FAMILIES[family], tmp_path) == [[], []]


def test_biases_that_it_leaves_out_are_noticed(tmp_path: Path) -> None:
    """Fault: a Llama with biases in its MLP, which SGLang loads without them and without a word."""
    for missing in differences({"family": "llama", "mlp_bias": True}, tmp_path):
        assert missing
        assert all(name.endswith("_proj.bias") and ".mlp." in name for name in missing)


def differences(model: dict[str, Any], folder: Path) -> list[list[str]]:
    """Tensors of a started server that are not as predicted: after it loaded what it was started with, and other weights."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16, "vocabulary": 50}
    first, then = (write_model(folder / str(seed), config_of(**(sizes | model)), seed) for seed in (0, 1))
    found = []
    with started(SGLANG, first, folder / "log") as engine:
        for version in (first, then):
            assert engine.update(version, weight_version="1").status_code == 200
            answer = engine.client.post("/weights_checker", json={"action": "checksum"}).json()
            prediction = predict(version)
            assert prediction is not None
            found.append(prediction.differences(answer["ranks"][0]["checksums"]))
    return found
