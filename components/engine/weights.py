"""The fused tensors that the static decode loop multiplies by, and their checksums."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
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


class Assembly:
    """The fused tensors of a model that is being read: each of the checkpoint's tensors is copied to its place once.

    A fused tensor is hashed as soon as it is whole, in other threads, while the rest is still being read: of a large
    model the hashes take as long as the reading, and an engine is paused for both.
    """

    def __init__(self, architecture: Architecture, dtype: torch.dtype) -> None:
        self.architecture = architecture
        self.checksums: dict[str, Future[str]] = {}
        """By fused name; complete when every tensor is filled."""
        self._tensors: dict[str, torch.Tensor] = {}
        self._places: dict[str, torch.Tensor] = {}
        self._owners: dict[str, str] = {}
        self._open: dict[str, int] = {}
        shapes = architecture.tensors()
        parts: dict[str, list[str]] = {}
        for name in shapes:
            parts.setdefault(_fused_name(name), []).append(name)
        for owner, names in parts.items():
            ordered = sorted(names, key=_place_in_stack)
            rows = [shapes[name][0] for name in ordered]
            whole = torch.empty(sum(rows), *shapes[ordered[0]][1:], dtype=dtype)
            self._tensors[owner], self._open[owner] = whole, len(names)
            for name, place in zip(ordered, torch.split(whole, rows), strict=True):
                self._places[name], self._owners[name] = place, owner

    def place(self, name: str) -> torch.Tensor | None:
        """Where a tensor of the checkpoint goes; None for one that the model does not hold (a tied head)."""
        return self._places.get(name)

    def filled(self, name: str) -> None:
        """The tensor is in its place."""
        owner = self._owners[name]
        self._open[owner] -= 1
        if not self._open[owner]:
            self.checksums[owner] = _HASHERS.submit(tensor_checksum, self._tensors[owner])

    def weights(self) -> StaticWeights:
        """Call it when every tensor is filled."""
        tensors = self._tensors

        def linear(name: str) -> Linear:
            return Linear(tensors[f"{name}.weight"], tensors.get(f"{name}.bias"))

        layers = []
        for index in range(self.architecture.layers):
            prefix = f"model.layers.{index}."
            layers.append(
                Layer(
                    input_norm=tensors[f"{prefix}input_layernorm.weight"],
                    qkv=linear(f"{prefix}self_attn.qkv_proj"),
                    q_norm=tensors.get(f"{prefix}self_attn.q_norm.weight"),
                    k_norm=tensors.get(f"{prefix}self_attn.k_norm.weight"),
                    o=linear(f"{prefix}self_attn.o_proj"),
                    post_norm=tensors[f"{prefix}post_attention_layernorm.weight"],
                    gate_up=linear(f"{prefix}mlp.gate_up_proj"),
                    down=linear(f"{prefix}mlp.down_proj"),
                )
            )
        embed = tensors["model.embed_tokens.weight"]
        return StaticWeights(
            architecture=self.architecture,
            embed=embed,
            layers=tuple(layers),
            norm=tensors["model.norm.weight"],
            head=embed if self.architecture.tied else tensors["lm_head.weight"],
        )


STACKED = {"q_proj": "qkv_proj", "k_proj": "qkv_proj", "v_proj": "qkv_proj"} | dict.fromkeys(
    ("gate_proj", "up_proj"), "gate_up_proj"
)
"""Projection -> the fused one, in the order of its rows."""


def _fused_name(name: str) -> str:
    """`model.layers.0.self_attn.q_proj.weight` -> `model.layers.0.self_attn.qkv_proj.weight`; most names are their own."""
    *module, projection, kind = name.split(".")
    return ".".join([*module, STACKED.get(projection, projection), kind])


def _place_in_stack(name: str) -> int:
    projection = name.split(".")[-2]
    return list(STACKED).index(projection) if projection in STACKED else 0


def tensor_checksum(tensor: torch.Tensor) -> str:
    """First 8 bytes, in hex, of sha256 over the tensor's raw bytes: what SGLang 0.5.23 answers on a CPU."""
    raw = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data
    return hashlib.sha256(raw).hexdigest()[:16]


_HASHERS = ThreadPoolExecutor(os.cpu_count() or 1, thread_name_prefix="checksum")


def checksums(tensors: Sequence[tuple[str, torch.Tensor]]) -> dict[str, str]:
    """Checksums by name, hashed side by side."""
    return dict(zip([name for name, _ in tensors], _HASHERS.map(tensor_checksum, [t for _, t in tensors]), strict=True))
