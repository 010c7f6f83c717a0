"""Tiny models as folders of files, written without torch, so that their bytes are known."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
from tokenizers import Tokenizer, models

from colchis.components.records.weights import Delta, WeightsManifest, weights_digest
from colchis.components.store import Store, keys
from colchis.components.weights.architecture import expected_shapes
from colchis.components.weights.delta import encode
from colchis.components.weights.manifest import build, describe
from colchis.components.weights.publish import publish

Arrays = dict[str, np.ndarray[Any, Any]]
SAFETENSORS = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
RUN = "run-a"


def config_of(family: str = "qwen2", *, vocabulary: int = 50, tied: bool = True, **changes: Any) -> dict[str, Any]:
    """A complete config.json: 2 layers of width 32, 4 heads, 2 of them for keys."""
    return {
        "architectures": [{"qwen2": "Qwen2", "qwen3": "Qwen3", "llama": "Llama"}[family] + "ForCausalLM"],
        "model_type": family,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "vocab_size": vocabulary,
        "max_position_embeddings": 512,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": tied,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "rope_theta": 10000.0,
        "torch_dtype": "float32",
        "eos_token_id": 1,
        "bos_token_id": None,
        "initializer_range": 0.02,
        "attention_dropout": 0.0,
        "use_cache": True,
        **changes,
    }


def arrays_of(config: Mapping[str, Any], seed: int) -> Arrays:
    """Every tensor of the model, float32, drawn from the seed."""
    shapes = expected_shapes(config)
    assert shapes is not None
    rng = np.random.default_rng(seed)
    return {
        name: (1 + 0.1 * rng.standard_normal(shape) if "norm" in name else 0.2 * rng.standard_normal(shape)).astype(
            np.float32
        )
        for name, shape in shapes.items()
    }


def bytes_of(array: np.ndarray[Any, Any], dtype: str) -> bytes:
    """Row-major bytes in a type of safetensors; bfloat16 by cutting float32 off."""
    if dtype == "BF16":
        return (array.astype("<f4").view("<u4") >> 16).astype("<u2").tobytes()
    return array.astype({"F32": "<f4", "F16": "<f2"}[dtype]).tobytes()


def serialize(tensors: Mapping[str, tuple[str, list[int], bytes]]) -> bytes:
    """A safetensors file of (numpy-like type, shape, raw bytes), by the reference library."""
    buffers = {
        name: np.frombuffer(data, np.uint8) if data else np.zeros(1, np.uint8) for name, (_, _, data) in tensors.items()
    }
    specs = {
        name: safetensors.TensorSpec(dtype=dtype, shape=shape, data_ptr=buffers[name].ctypes.data, data_len=len(data))
        for name, (dtype, shape, data) in tensors.items()
    }
    return bytes(safetensors.serialize(specs, {"format": "pt"}))


def write_weights(path: Path, arrays: Arrays, dtype: str = "F32") -> None:
    """A safetensors file, by the reference library."""
    content = {name: (SAFETENSORS[dtype], list(array.shape), bytes_of(array, dtype)) for name, array in arrays.items()}
    path.write_bytes(serialize(content))


def write_model(folder: Path, config: Mapping[str, Any], seed: int, dtype: str = "F32") -> Path:
    """A Hugging Face folder: configuration, tokenizer, weights."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    words = {f"<{i}>" if i < 2 else f"t{i}": i for i in range(config["vocab_size"])}
    Tokenizer(models.BPE(words, [], unk_token="<0>")).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "<0>", "eos_token": "<1>"})
    )
    write_weights(folder / "model.safetensors", arrays_of(config, seed), dtype)
    return folder


def publish_version(
    store: Store,
    folder: Path,
    *,
    model: str,
    version: int,
    kind: str = "full",
    run: str = RUN,
    name: str = "model.safetensors",
    base: Path | None = None,
) -> WeightsManifest:
    """Upload a weights file as an attempt would, and publish it; with the difference from the folder `base`, if given."""
    path = folder / name
    prefix = keys.iteration_prefix(run, version) + "train/attempts/x/weights/"
    payload = store.upload(prefix + name, path)
    manifest = build(
        run=run,
        version=version,
        base_version=version - 1 if version else None,
        kind="same" if kind == "same" else "full",
        files=[(payload, path)],
        model=model,
        step=version,
    )
    if base is not None:
        manifest = with_delta(store, manifest, base / name, path, prefix + "delta")
    return publish(store, manifest)


def with_delta(store: Store, manifest: WeightsManifest, old: Path, new: Path, key: str) -> WeightsManifest:
    """The manifest with the difference from the version before, uploaded."""
    base_digest, file = weights_digest(describe([old])), new.with_name("delta")
    versions = {"base_version": manifest.version - 1, "version": manifest.version}
    assert encode([old], [new], file, base_digest=base_digest, digest=manifest.weights_digest, **versions) is not None
    delta = Delta(base_version=manifest.version - 1, base_digest=base_digest, payload=store.upload(key, file))
    file.unlink()
    return WeightsManifest.model_validate({**manifest.model_dump(), "delta": delta})
