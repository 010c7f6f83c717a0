"""The predicted checksums against the bytes that the engine is known to hold, padding included."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from colchis.components.errors import BadData
from colchis.components.weights.architecture import EMBEDDING, HEAD
from colchis.components.weights.checksums import predict
from colchis.components.weights.manifest import describe
from tests.weights.models import Arrays, arrays_of, bytes_of, config_of, write_model, write_weights

LAYER = "model.layers.0."


def digest(*arrays: np.ndarray[Any, Any], dtype: str = "F32") -> str:
    return hashlib.sha256(b"".join(bytes_of(a, dtype) for a in arrays)).hexdigest()[:16]


def engine_tensors(arrays: Arrays, *, padded: bool, dtype: str = "F32") -> dict[str, str]:
    """What SGLang on a CPU makes of a checkpoint (seen on 0.5.23): stacked, and padded or not."""

    def rows(array: np.ndarray[Any, Any], multiple: int) -> np.ndarray[Any, Any]:
        missing = -array.shape[0] % multiple if padded else 0
        return np.concatenate([array, np.zeros((missing, *array.shape[1:]), np.float32)])

    found: dict[str, str] = {}
    for name, array in arrays.items():
        if ".q_proj." in name:
            parts = [arrays[name.replace("q_proj", p)] for p in ("q_proj", "k_proj", "v_proj")]
            found[name.replace("q_proj", "qkv_proj")] = digest(*parts, dtype=dtype)
        elif ".gate_proj." in name:
            parts = [rows(arrays[name.replace("gate_proj", p)], 32) for p in ("gate_proj", "up_proj")]
            found[name.replace("gate_proj", "gate_up_proj")] = digest(*parts, dtype=dtype)
        elif name.endswith("down_proj.weight"):
            found[name] = digest(np.ascontiguousarray(rows(array.T, 32).T), dtype=dtype)
        elif name in (EMBEDDING, HEAD):
            found[name] = digest(rows(array, 64), dtype=dtype)
        elif not any(p in name for p in ("k_proj", "v_proj", "up_proj")):
            found[name] = digest(array, dtype=dtype)
    return found


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("dtype", ["F32", "BF16"])
@pytest.mark.parametrize("padded", [True, False])
def test_stacked_and_padded_tensors(tmp_path: Path, family: str, tied: bool, dtype: str, padded: bool) -> None:
    """Catches a wrong order of stacking, and a good load that is refused because the engine pads its tensors."""
    config = config_of(family, tied=tied, **({"attention_bias": True, "mlp_bias": True} if family == "llama" else {}))
    folder = write_model(tmp_path, config, 0, dtype)
    prediction = predict(folder)
    assert prediction is not None
    assert predict(folder, {t.name: t.sha256 for t in describe([folder / "model.safetensors"])}) == prediction
    found = engine_tensors(arrays_of(config, 0), padded=padded, dtype=dtype)
    assert prediction.differences(found) == []
    assert prediction.checksums.keys() == found.keys()
    other = engine_tensors(arrays_of(config, 1), padded=padded, dtype=dtype)
    assert len(prediction.differences(other)) == len(found)


def test_nothing_is_padded_where_sizes_fit(tmp_path: Path) -> None:
    config = config_of(vocabulary=64, intermediate_size=64)
    prediction = predict(write_model(tmp_path, config, 0))
    assert prediction is not None
    assert prediction.padded == {}


def test_what_cannot_be_predicted(tmp_path: Path) -> None:
    """None, never a guess: another family, or types that the engine casts."""
    unknown = write_model(tmp_path / "a", config_of(), 0)
    (unknown / "config.json").write_text(json.dumps({**config_of(), "model_type": "mystery"}))
    assert predict(unknown) is None
    mixed = write_model(tmp_path / "b", config_of(), 0)
    write_weights(mixed / "more.safetensors", {"x": np.ones(2, np.float32)}, "BF16")
    assert predict(mixed) is None
    incomplete = write_model(tmp_path / "c", config_of(), 0)
    arrays = arrays_of(config_of(), 0)
    del arrays[LAYER + "mlp.up_proj.weight"]
    write_weights(incomplete / "model.safetensors", arrays)
    with pytest.raises(BadData, match=r"up_proj\.weight' is missing"):
        predict(incomplete)
