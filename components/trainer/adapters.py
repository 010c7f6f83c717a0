"""Low-rank adapters (LoRA): the base weights stay, and each chosen linear layer learns B @ A beside its own.

Each version is published merged, like that of any other run, and as the adapter alone, the folder that PEFT and SGLang read;
the state keeps the latter.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from colchis.components.config import TrainerConfig
from colchis.components.errors import BadConfig, BadData

A, B = "lora_A", "lora_B"
PREFIX = "base_model.model."
"""Of every name in an adapter file."""
WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
"""Files of an adapter folder."""


class AdaptedLinear(nn.Linear):
    """y = x W^T + b + scale * (x A^T) B^T with W and b frozen; A float32 [rank, in], B float32 [out, rank]."""

    def __init__(self, linear: nn.Linear, *, rank: int, scale: float, generator: torch.Generator) -> None:
        super().__init__(linear.in_features, linear.out_features, bias=linear.bias is not None, device="meta")
        self.weight = linear.weight
        self.bias = linear.bias
        self.scale = scale
        self.enabled = True
        bound = 1 / math.sqrt(linear.in_features)
        drawn = torch.empty(rank, linear.in_features).uniform_(-bound, bound, generator=generator)
        self.lora_A = nn.Parameter(drawn)
        self.lora_B = nn.Parameter(torch.zeros(linear.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        if not self.enabled:
            return y
        low = functional.linear(functional.linear(x, self.lora_A), self.lora_B)
        return y + self.scale * low


def attach(model: nn.Module, config: TrainerConfig, *, seed: int) -> None:
    """Freeze `model` and give each linear layer whose last name is in `trainer.lora_targets` an adapter, drawn from `seed`.
    BadConfig when a target names no layer."""
    model.requires_grad_(False)
    found: set[str] = set()
    linear: set[str] = set()
    generator = torch.Generator().manual_seed(seed)
    for path, module in list(model.named_modules()):
        if not isinstance(module, nn.Linear):
            continue
        parent, _, name = path.rpartition(".")
        linear.add(name)
        if name in config.lora_targets:
            if any(other is module.weight for owner, other in model.named_parameters() if owner != f"{path}.weight"):
                raise BadConfig(
                    f"trainer.lora_targets: '{name}' shares its weights with another layer, so it cannot change alone",
                    hint="leave it out, or use a model that does not tie them",
                )
            found.add(name)
            scale = config.lora_alpha / config.lora_rank
            adapted = AdaptedLinear(module, rank=config.lora_rank, scale=scale, generator=generator)
            setattr(model.get_submodule(parent), name, adapted.train(module.training))
    if strangers := sorted(set(config.lora_targets) - found):
        raise BadConfig(
            f"trainer.lora_targets: the model has no linear layer '{strangers[0]}'",
            hint=f"its linear layers are {', '.join(sorted(linear))}",
        )


def is_adapter(name: str) -> bool:
    """Whether a parameter of a model belongs to an adapter."""
    return name.rpartition(".")[2] in (A, B)


def adapted_layers(model: nn.Module) -> Iterator[tuple[str, AdaptedLinear]]:
    """(name, layer) of each layer with an adapter. FSDP's class of it is a subclass."""
    return ((name, module) for name, module in model.named_modules() if isinstance(module, AdaptedLinear))


def merged(weight: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """W + scale * B @ A in float32; W itself, bit by bit, while B is zero."""
    return torch.addmm(weight.float(), b.float(), a.float(), alpha=scale) if bool(b.any()) else weight


@contextmanager
def without_adapters(model: nn.Module) -> Iterator[None]:
    """The base model, for as long as the block lasts: the frozen reference costs no second copy."""
    layers = [layer for _, layer in adapted_layers(model)]
    for layer in layers:
        layer.enabled = False
    try:
        yield
    finally:
        for layer in layers:
            layer.enabled = True


def stored_name(parameter: str) -> str:
    """model.layers.0.self_attn.q_proj.lora_A -> base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"""
    return f"{PREFIX}{parameter}.weight"


def write_config(folder: Path, config: TrainerConfig) -> None:
    """`adapter_config.json`, as PEFT writes it."""
    document = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": None,
        "r": config.lora_rank,
        "lora_alpha": config.lora_alpha,
        "target_modules": sorted(config.lora_targets),
        "lora_dropout": 0.0,
        "bias": "none",
        "inference_mode": True,
    }
    (folder / CONFIG).write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def parameters_of(stored: Mapping[str, Tensor], expected: Mapping[str, Tensor], *, where: str) -> dict[str, Tensor]:
    """The tensors of an adapter file by parameter. BadData names one that is missing, unknown or of another shape."""
    names = {stored_name(name): name for name in expected}
    if stored.keys() != names.keys():
        raise BadData(f"adapter tensor '{min(stored.keys() ^ names.keys())}' is missing or unknown", where=where)
    for key, tensor in stored.items():
        if tensor.shape != expected[names[key]].shape:
            raise BadData(
                f"adapter tensor '{key}': expected {list(expected[names[key]].shape)}, found {list(tensor.shape)}",
                where=where,
            )
    return {names[key]: tensor for key, tensor in stored.items()}
