"""Bad input is answered 400 with the reason, and the engine goes on serving the weights that it had."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.processes import EngineProcess

Tensors = dict[str, torch.Tensor]
NORM, EMBED = "model.norm.weight", "model.embed_tokens.weight"


def missing(tensors: Tensors) -> None:
    del tensors["model.layers.1.mlp.up_proj.weight"]


def extra(tensors: Tensors) -> None:
    tensors["model.layers.2.mlp.up_proj.weight"] = torch.zeros(160, 64)


def wrong_shape(tensors: Tensors) -> None:
    tensors[NORM] = torch.ones(65)


def transposed(tensors: Tensors) -> None:
    tensors["model.layers.0.mlp.up_proj.weight"] = torch.zeros(64, 160)


def nan(tensors: Tensors) -> None:
    tensors[EMBED][3, 4] = float("nan")


def infinite(tensors: Tensors) -> None:
    tensors[NORM][0] = float("-inf")


def integers(tensors: Tensors) -> None:
    tensors[NORM] = torch.ones(64, dtype=torch.int32)


def untied_head(tensors: Tensors) -> None:
    tensors["lm_head.weight"] = tensors[EMBED] + 1


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (missing, "model.layers.1.mlp.up_proj.weight"),
        (extra, "does not belong"),
        (wrong_shape, "shape 65, expected 64"),
        (transposed, "shape 64x160, expected 160x64"),
        (nan, "NaN or Inf"),
        (infinite, "NaN or Inf"),
        (integers, "dtype"),
        (untied_head, "ties the head"),
    ],
)
def test_a_checkpoint_with_bad_tensors_is_refused_and_the_old_weights_serve(
    engine: EngineProcess, broken: Callable[..., Path], change: Callable[[Tensors], None], reason: str
) -> None:
    """Catches silent mixes of old and new weights, and every load that SGLang dies of."""
    expect_refusal(engine, broken(change), reason)


def expect_refusal(engine: EngineProcess, folder: Path, reason: str, **body: Any) -> None:
    checksum, answer = engine.checksum(), engine.sample([3, 2, 1])
    reply = engine.update(folder, weight_version="9", **body)
    assert reply.status_code == 400, reply.text
    assert reply.json()["success"] is False
    assert reason in reply.json()["message"]
    assert engine.checksum() == checksum
    assert engine.info("weight_version") == "0"
    after = engine.sample([3, 2, 1])
    assert after["output_ids"] == answer["output_ids"]
    assert after["meta_info"]["output_token_logprobs"] == answer["meta_info"]["output_token_logprobs"]


def test_truncated_files_are_refused_at_every_length(engine: EngineProcess, broken: Callable[..., Path]) -> None:
    """Catches a half-written file that loads: cut in the header, in the data, and to nothing."""
    folder = broken()
    whole = (folder / "model.safetensors").read_bytes()
    for length in (0, 7, 500, len(whole) // 2, len(whole) - 1):
        (folder / "model.safetensors").write_bytes(whole[:length])
        expect_refusal(engine, folder, "model.safetensors")


def test_directories_that_are_no_model_are_refused(
    engine: EngineProcess, models: dict[str, Path], broken: Callable[..., Path], tmp_path: Path
) -> None:
    """Catches wrong paths, empty directories, other architectures, unreadable configs and unknown formats."""
    expect_refusal(engine, tmp_path / "nowhere", "no such model directory")
    (tmp_path / "empty").mkdir()
    expect_refusal(engine, tmp_path / "empty", "no *.safetensors")
    expect_refusal(engine, models["llama"], "another architecture")
    expect_refusal(engine, models["gpt2"], "another architecture")
    expect_refusal(engine, models["qwen2_b"], "load_format", load_format="remote")
    folder = broken()
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 3}))
    expect_refusal(engine, folder, "layers 3 (served: 2)")
    (folder / "config.json").write_text('{"model_type": "qwen2"}')
    expect_refusal(engine, folder, "vocab_size")
    (folder / "config.json").write_text("{")
    expect_refusal(engine, folder, "not readable JSON")
    (folder / "config.json").write_text(json.dumps(config))
    index = {"weight_map": {NORM: "model.safetensors", EMBED: "model-2.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    expect_refusal(engine, folder, "model-2.safetensors, which is not there")


def test_a_checkpoint_without_config_takes_the_served_one(engine: EngineProcess, broken: Callable[..., Path]) -> None:
    """Catches a refusal of bare weights, which SGLang accepts."""
    folder = broken()
    (folder / "config.json").unlink()
    assert engine.update(folder, weight_version="3").status_code == 200


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ({"input_ids": [2, 100]}, "100 is outside the vocabulary"),
        ({"input_ids": [-1]}, "-1 is outside the vocabulary"),
        ({"input_ids": []}, "empty"),
        ({"input_ids": [[1], []]}, "empty"),
        ({}, "exactly one of"),
        ({"input_ids": [1], "text": "x"}, "exactly one of"),
        ({"input_ids": [1], "sampling_params": {"temprature": 1}}, "temprature"),
        ({"input_ids": [1], "sampling_params": {"temperature": -1}}, "temperature"),
        ({"input_ids": [1], "sampling_params": {"top_p": 0}}, "top_p"),
        ({"input_ids": [1], "sampling_params": {"frequency_penalty": 0.5}}, "frequency_penalty"),
        ({"input_ids": [1], "sampling_params": {"regex": "a+"}}, "regex"),
        ({"input_ids": [1], "sampling_params": {"n": 2, "sampling_seed": [1]}}, "sampling_seed"),
        ({"input_ids": [[1], [2]], "sampling_params": [{}, {}, {}]}, "sampling_params has 3 entries"),
        ({"input_ids": [1] * 1000, "sampling_params": {"max_new_tokens": 100}}, "the context of 1024"),
        ({"input_ids": [1] * 2000, "sampling_params": {"max_new_tokens": 1}}, "the context of 1024"),
        ({"input_ids": [1], "lora_path": "x"}, "lora_path"),
        ({"input_ids": ["a"]}, "input_ids"),
    ],
)
def test_bad_requests_are_refused_by_field(engine: EngineProcess, body: dict[str, Any], reason: str) -> None:
    """Catches an out-of-vocabulary id that ends the process, and misspelled fields that are silently ignored."""
    reply = engine.client.post("/generate", json=body)
    assert reply.status_code == 400, reply.text
    assert reason in reply.json()["error"]["message"]
    engine.sample([1])


def test_control_routes_refuse_unknown_fields_and_modes(engine: EngineProcess, models: dict[str, Path]) -> None:
    """Catches a misspelled field of an update that would be taken for its default."""
    assert engine.update(models["qwen2_b"], wieght_version="1").status_code == 400
    assert engine.client.post("/pause_generation", json={"mode": "nap"}).status_code == 400
    assert engine.client.post("/update_weights_from_disk", json={}).status_code == 400
    assert engine.client.post("/abort_request", json={}).status_code == 400
    assert engine.client.post("/generate", content=b"{").status_code == 400
    assert engine.info("weight_version") == "0"
