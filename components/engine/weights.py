"""The fused tensors that the static decode loop multiplies by, and their checksums."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from colchis.components.engine.architecture import Architecture


@dataclass(frozen=True)
class Linear:
    """A projection; `weight` is [out, in]."""

    weight: torch.Tensor
    bias: torch.Tensor | None


@dataclass(frozen=True)
class Layer:
    """One decoder layer. `qkv` stacks query, key and value rows; `gate_up` stacks gate and up rows, as SGLang does."""

    input_norm: torch.Tensor
    qkv: Linear
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    o: Linear
    post_norm: torch.Tensor
    gate_up: Linear
    down: Linear


@dataclass(frozen=True)
class StaticWeights:
    """All weights of a static family. `head` is the embedding itself when the model ties them."""

    architecture: Architecture
    embed: torch.Tensor
    layers: tuple[Layer, ...]
    norm: torch.Tensor
    head: torch.Tensor

    def named_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The tensors under the names that SGLang's fused parameters have; a tied head appears once."""
        yield "model.embed_tokens.weight", self.embed
        for index, layer in enumerate(self.layers):
            prefix = f"model.layers.{index}."
            linears = (
                ("self_attn.qkv_proj", layer.qkv),
                ("self_attn.o_proj", layer.o),
                ("mlp.gate_up_proj", layer.gate_up),
                ("mlp.down_proj", layer.down),
            )
            for name, linear in linears:
                yield f"{prefix}{name}.weight", linear.weight
                if linear.bias is not None:
                    yield f"{prefix}{name}.bias", linear.bias
            if layer.q_norm is not None and layer.k_norm is not None:
                yield f"{prefix}self_attn.q_norm.weight", layer.q_norm
                yield f"{prefix}self_attn.k_norm.weight", layer.k_norm
            yield f"{prefix}input_layernorm.weight", layer.input_norm
            yield f"{prefix}post_attention_layernorm.weight", layer.post_norm
        yield "model.norm.weight", self.norm
        if self.head is not self.embed:
            yield "lm_head.weight", self.head


def fuse(architecture: Architecture, tensors: Mapping[str, torch.Tensor]) -> StaticWeights:
    """Builds the fused tensors from a checkpoint's (names as in `Architecture.tensors`)."""

    def linear(prefix: str, *names: str) -> Linear:
        weights = [tensors[f"{prefix}{name}.weight"] for name in names]
        biases = [tensors[f"{prefix}{name}.bias"] for name in names if f"{prefix}{name}.bias" in tensors]
        return Linear(torch.cat(weights).contiguous(), torch.cat(biases) if biases else None)

    layers = []
    for index in range(architecture.layers):
        prefix = f"model.layers.{index}."
        attention = f"{prefix}self_attn."
        layers.append(
            Layer(
                input_norm=tensors[f"{prefix}input_layernorm.weight"],
                qkv=linear(attention, "q_proj", "k_proj", "v_proj"),
                q_norm=tensors.get(f"{attention}q_norm.weight"),
                k_norm=tensors.get(f"{attention}k_norm.weight"),
                o=linear(attention, "o_proj"),
                post_norm=tensors[f"{prefix}post_attention_layernorm.weight"],
                gate_up=linear(f"{prefix}mlp.", "gate_proj", "up_proj"),
                down=linear(f"{prefix}mlp.", "down_proj"),
            )
        )
    embed = tensors["model.embed_tokens.weight"]
    return StaticWeights(
        architecture=architecture,
        embed=embed,
        layers=tuple(layers),
        norm=tensors["model.norm.weight"],
        head=embed if architecture.tied else tensors["lm_head.weight"],
    )


def tensor_checksum(tensor: torch.Tensor) -> str:
    """First 8 bytes, in hex, of sha256 over the tensor's raw bytes: what SGLang 0.5.23 answers on a CPU."""
    raw = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data
    return hashlib.sha256(raw).hexdigest()[:16]
