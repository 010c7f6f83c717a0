"""The header of a safetensors file, read without torch and without trust.

Format (https://github.com/huggingface/safetensors): eight bytes with the length N of a JSON object (little-endian), the
object, then the tensors' bytes. The object maps names to {dtype, shape, data_offsets: [begin, end]}, and `__metadata__`
to strings. A file from elsewhere may lie about all of it, so everything is checked against the size of the file.
"""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from colchis.components.errors import BadData

ITEM_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1,
    "U16": 2, "I16": 2, "F16": 2, "BF16": 2,
    "U32": 4, "I32": 4, "F32": 4,
    "U64": 8, "I64": 8, "F64": 8,
}  # fmt: skip
"""Bytes per element of the types that a checkpoint may have."""

LARGEST_HEADER_BYTES = 100 << 20
"""The limit of the reference implementation."""


@dataclass(frozen=True)
class TensorSpan:
    """Where one tensor lies in its file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    """Offset of the first byte from the beginning of the file."""
    bytes: int


def read_header(path: Path) -> list[TensorSpan]:
    """The tensors of a safetensors file in the order of their bytes.

    BadData when the file is truncated or too long, when tensors overlap or leave gaps, when a name, type, shape or
    offset is not what the format allows.
    """

    def bad(what: str, hint: str = "the file is damaged or was not written by a safetensors library") -> BadData:
        return BadData(f"{path.name}: {what}", where=str(path), hint=hint)

    try:
        with path.open("rb") as file:
            size_bytes = os.fstat(file.fileno()).st_size
            if size_bytes < 8:
                raise bad(f"{size_bytes} bytes are too few for a safetensors file")
            header_bytes = int.from_bytes(file.read(8), "little")
            if header_bytes > min(LARGEST_HEADER_BYTES, size_bytes - 8):
                raise bad(f"its header claims {header_bytes} bytes, but the file has {size_bytes}")
            raw = file.read(header_bytes)
    except OSError as e:
        raise bad(f"cannot be read ({e.strerror})", hint="fetch it again") from e
    try:
        entries = json.loads(raw.decode("utf-8"), object_pairs_hook=_unique)
    except (UnicodeDecodeError, ValueError, RecursionError) as e:
        raise bad(f"its header is not JSON: {e}") from e
    if not isinstance(entries, dict):
        raise bad(f"its header is a {type(entries).__name__}, expected an object")
    entries.pop("__metadata__", None)

    spans = sorted((_span(name, entry, bad, 8 + header_bytes) for name, entry in entries.items()), key=_place)
    position = 8 + header_bytes
    for span in spans:
        if span.start != position:
            problem = "overlaps the tensor before it" if span.start < position else "leaves a gap before it"
            raise bad(f"tensor '{span.name}' at byte {span.start} {problem} (expected byte {position})")
        position += span.bytes
    if position != size_bytes:
        raise bad(f"its tensors end at byte {position}, but the file has {size_bytes} bytes: truncated or appended to")
    return spans


def _place(span: TensorSpan) -> tuple[int, int]:
    return span.start, span.bytes


def _span(name: str, entry: Any, bad: Any, data_start: int) -> TensorSpan:
    if not name or not name.isprintable() or len(name) > 512:
        raise bad(f"tensor name {name[:64]!r} is empty, too long or not printable")
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise bad(f"tensor '{name}': expected dtype, shape and data_offsets, found {str(entry)[:120]}")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if dtype not in ITEM_BYTES:
        raise bad(f"tensor '{name}': type {dtype!r} is not one of {', '.join(ITEM_BYTES)}")
    if not isinstance(shape, list) or len(shape) > 8 or not all(_is_count(dim) for dim in shape):
        raise bad(f"tensor '{name}': shape {str(shape)[:120]} is not a list of up to 8 sizes")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(_is_count(offset) for offset in offsets):
        raise bad(f"tensor '{name}': data_offsets {str(offsets)[:120]} are not two offsets")
    begin, end = offsets
    if end - begin != (needed := math.prod(shape) * ITEM_BYTES[dtype]):
        raise bad(f"tensor '{name}': {dtype} {shape} needs {needed} bytes, data_offsets give {end - begin}")
    return TensorSpan(name, dtype, tuple(shape), data_start + begin, end - begin)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 62


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a key occurs twice")
    return result
