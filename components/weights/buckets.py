"""How a version is cut for a direct transfer: sender and receiver cut the same manifest alike, and so never disagree."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from colchis.components.records.weights import TensorEntry
from colchis.components.weights.header import ITEM_BYTES

TORCH_NAMES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
"""Type in a safetensors file -> its name in torch, for those that cross."""


@dataclass(frozen=True)
class Bucket:
    """Tensors that cross in one broadcast, their bytes one behind the other."""

    tensors: tuple[TensorEntry, ...]

    @property
    def bytes(self) -> int:
        return sum(t.bytes for t in self.tensors)


def can_cross(tensors: Sequence[TensorEntry]) -> bool:
    """Whether engines can be told the types of all of them."""
    return all(t.dtype in TORCH_NAMES for t in tensors)


def cut(tensors: Sequence[TensorEntry], largest_bytes: int) -> list[Bucket]:
    """Buckets of at most `largest_bytes`, but for a tensor that is larger by itself. Wider types come first, so that every
    tensor begins at a multiple of its own item."""
    buckets: list[Bucket] = []
    held: list[TensorEntry] = []
    for tensor in sorted(tensors, key=lambda t: (-ITEM_BYTES[t.dtype], t.file, t.name)):
        if held and sum(t.bytes for t in held) + tensor.bytes > largest_bytes:
            buckets.append(Bucket(tuple(held)))
            held = []
        held.append(tensor)
    return [*buckets, Bucket(tuple(held))] if held else buckets
