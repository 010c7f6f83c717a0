"""The policy: a causal language model from a Hugging Face folder, sharded by FSDP2 from the first line on."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers.initialization import no_init_weights
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from colchis.components.errors import BadConfig, BadData
from colchis.components.trainer.adapters import adapted_layers, is_adapter, merged
from colchis.components.trainer.attention import IMPLEMENTATION

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}

LAYER_TYPES = {"full_attention", "sliding_attention"}
"""Layers whose every path between tokens is the attention function, so that packed documents cannot see each other."""


def load_model(folder: Path, *, dtype: torch.dtype | None = torch.float32) -> nn.Module:
    """The model of `folder` (config.json and *.safetensors with Hugging Face names), in evaluation mode.

    `dtype` None: that of the file. Dropout stays off while training too: the ratio of new and old probabilities would
    otherwise measure the dropout. BadData names a tensor that is missing, unknown or of another shape; BadConfig a
    family that packing would be wrong for.
    """
    model = build_model(folder, dtype=dtype or file_dtype(folder))
    _fill(model, folder)
    return model


def build_model(folder: Path, *, dtype: torch.dtype) -> nn.Module:
    """The architecture of `folder`/config.json with uninitialised weights: random numbers would only be overwritten."""
    path = folder / "config.json"
    try:
        document: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        family = CONFIG_MAPPING[document["model_type"]]
        config = family.from_dict(document)
        architecture: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    except (OSError, ValueError, KeyError) as e:
        raise BadData(
            f"no causal language model can be made of config.json ({type(e).__name__}: {e})", where=str(path)
        ) from e
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    if architecture._is_stateful or not architecture._supports_attention_backend or not kinds <= LAYER_TYPES:
        raise BadConfig(
            f"model type '{document['model_type']}' (layers: {', '.join(sorted(kinds))}) has paths between tokens besides "
            "attention, so packed documents would see each other",
            hint="use a family of plain transformers, e.g. qwen2, qwen3, llama",
        )
    with no_init_weights():
        model: nn.Module = architecture._from_config(config, attn_implementation=IMPLEMENTATION, dtype=dtype)
    model.tie_weights()  # type: ignore[operator]
    return model.eval()


def stored_tensors(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) of every *.safetensors file in `folder`. BadData when a file is unreadable or none is there."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise BadData("no .safetensors file is here", where=str(folder))
    for file in files:
        yield from tensors_of(file)


def tensors_of(file: Path) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) of one safetensors file. BadData when it is missing or unreadable."""
    try:
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 (safe_open is no mapping)
                yield name, tensors.get_tensor(name)
    except (SafetensorError, OSError) as e:
        raise BadData(f"not a readable safetensors file ({e})", where=str(file)) from None


def file_dtype(folder: Path) -> torch.dtype:
    """Type of the stored weights."""
    return next(tensor.dtype for _, tensor in stored_tensors(folder) if tensor.is_floating_point())


def _fill(model: nn.Module, folder: Path) -> None:
    expected = published(model)
    tied = set(model.state_dict()) - set(expected)
    for name, tensor in stored_tensors(folder):
        if name in tied:
            continue  # a copy of its twin; some writers store both
        if name not in expected:
            raise BadData(f"tensor '{name}' is not part of this model, or occurs twice", where=str(folder))
        target = expected.pop(name)
        if target.shape != tensor.shape:
            raise BadData(
                f"tensor '{name}': expected {list(target.shape)}, found {list(tensor.shape)}", where=str(folder)
            )
        target.copy_(tensor)
    if expected:
        raise BadData(f"tensor '{min(expected)}' is missing ({len(expected)} in all)", where=str(folder))


def published(model: nn.Module) -> dict[str, Tensor]:
    """What a checkpoint holds, by Hugging Face name: parameters (a tied one once) and persistent buffers, detached."""
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    persistent = model.state_dict()
    return parameters | {name: b.detach() for name, b in model.named_buffers() if name in persistent}


def shard(model: nn.Module, *, dtype: torch.dtype) -> None:
    """fully_shard over the ranks of the process group: one unit per layer, the rest with the root.

    Masters stay fp32; forward and backward run in `dtype`, so that the trainer computes with the weights that engines
    serve. Gradients are summed, never averaged: every loss is already divided by the step's global denominator.
    (gloo needs force_sum: without it the factor 1 becomes PREMUL_SUM, which gloo lacks.)
    """
    low = dtype != torch.float32
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32) if low else MixedPrecisionPolicy()
    units = set(getattr(model, "_no_split_modules", None) or [])
    for module in list(model.modules()):
        if type(module).__name__ in units:
            fully_shard(module, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a parameter or gradient; shares its memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(part: Tensor, like: Tensor) -> Tensor:
    """The full tensor of which every rank holds a `part`, laid out as the parameter `like`. A collective."""
    if not isinstance(like, DTensor) or dist.get_world_size() == 1:
        return part
    laid_out = DTensor.from_local(
        part, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )
    return laid_out.full_tensor()


def part_of(full: Tensor, like: Tensor) -> Tensor:
    """Inverse of `whole`: the rows of `full` that this rank owns (FSDP2 cuts dimension 0 like torch.chunk)."""
    if not isinstance(like, DTensor) or dist.get_world_size() == 1:
        return full
    rows = -(-full.shape[0] // dist.get_world_size())
    return full[rows * dist.get_rank() : rows * (dist.get_rank() + 1)]


def whole_weights(model: nn.Module, *, dtype: torch.dtype) -> Mapping[str, Tensor]:
    """The weights as engines get them: full tensors in `dtype`, adapters merged. A collective."""
    adapters = dict(adapted_layers(model))
    weights: dict[str, Tensor] = {}
    for name, p in published(model).items():
        if is_adapter(name):
            continue
        full = whole(local(p), p)
        layer, _, part = name.rpartition(".")
        if part == "weight" and layer in adapters:
            a, b = (whole(local(q.detach()), q.detach()) for q in (adapters[layer].lora_A, adapters[layer].lora_B))
            full = merged(full, a, b, adapters[layer].scale)
        weights[name] = full.to(dtype if p.is_floating_point() else p.dtype)
    return weights
