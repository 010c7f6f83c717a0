"""The checksums that an engine must report if its tensors are the commit's: boundary 4 compares the two.

On a CPU, SGLang's `/weights_checker` reports for each of its own tensors the first eight bytes of sha256 over the raw
bytes, as hexadecimal. At tensor parallelism 1 those tensors are the checkpoint's, except that q, k, v and gate, up are
stacked (so the bytes follow each other). On a GPU the hash is another one and nothing is predicted: there replicas are
compared with each other and with the version before.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from colchis.components.errors import BadData
from colchis.components.records.weights import TensorEntry
from colchis.components.weights.architecture import EMBEDDING, FAMILIES, GATE_UP, HEAD, fused, is_tied
from colchis.components.weights.header import ITEM_BYTES, TensorSpan, read_header
from colchis.components.weights.scan import chunks, in_parallel

ENGINE_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
VOCABULARY_MULTIPLE = 64
"""SGLang pads the rows of embedding and head to a multiple of this, with zeros."""
INNER_MULTIPLE = 32
"""On a CPU SGLang pads the inner width of the MLP to a multiple of this: rows of gate and up, columns of down."""

DIGITS = 16
"""Of sha256, in hexadecimal, that an engine reports."""

Checksums = dict[str, str]


@dataclass(frozen=True)
class Prediction:
    """What the engine's tensors must hash to."""

    dtype: str
    """The engine must run in this type (`float32`, ...); in another it holds other bytes."""
    checksums: Checksums
    """Engine's tensor name -> 16 hexadecimal digits, without any padding."""
    padded: Checksums
    """The same for the tensors that an engine may pad: their hash with the padding."""

    def differences(self, found: Mapping[str, str]) -> list[str]:
        """Names of tensors that the engine lacks or that hash to something else, sorted. Further ones are its own."""
        return sorted(
            name
            for name, expected in self.checksums.items()
            if found.get(name) not in (expected, self.padded.get(name, expected))
        )

    def contradicts(self, tensor: TensorEntry) -> bool:
        """Whether this was computed from another tensor of that name. One that is stacked cannot be told."""
        expected = self.checksums.get(tensor.name)
        return expected is not None and expected != tensor.sha256[:DIGITS]


def engine_tensors(names: Sequence[str], config: Mapping[str, Any]) -> frozenset[str]:
    """What an engine calls the tensors of a checkpoint: stacked ones share a name, a tied head has none."""
    return frozenset(fused([name for name in names if name != HEAD or not is_tied(config)]))


def predict(folder: Path, verified: Mapping[str, str] | None = None) -> Prediction | None:
    """The checksums that an engine at tensor parallelism 1 on a CPU reports after it has loaded `folder`.

    `verified`: sha256 by tensor, by a manifest that these files agree with; what is not stacked is not read again.
    None when they cannot be predicted: a family that is not known, or floating types that are mixed (the engine casts
    them). BadData when the folder is not readable or a stacked tensor is incomplete.
    """
    try:
        config: dict[str, Any] = json.loads((folder / "config.json").read_bytes())
    except (OSError, ValueError) as e:
        raise BadData(f"config.json cannot be read: {e}", where=str(folder)) from e
    files = sorted(folder.glob("*.safetensors"))
    spans = {span.name: (path, span) for path in files for span in read_header(path)}
    dtypes = {span.dtype for _, span in spans.values()}
    if config.get("model_type") not in FAMILIES or len(dtypes) != 1 or not dtypes <= ENGINE_DTYPES.keys():
        return None
    if is_tied(config):
        spans.pop(HEAD, None)  # the engine has one tensor for both

    groups = fused(list(spans))
    if missing := sorted({part for parts in groups.values() for part in parts} - spans.keys()):
        raise BadData(f"tensor '{missing[0]}' is missing beside those that it is stacked with", where=str(folder))
    names = list(groups)
    pieces = {name: [_Piece(*spans[part], *_padding(part, spans[part][1])) for part in groups[name]] for name in names}
    padded = [name for name in names if any(piece.is_padded for piece in pieces[name])]
    known = verified or {}

    def plain_hash(name: str) -> str:
        parts = groups[name]
        if len(parts) == 1 and parts[0] in known:
            return known[parts[0]][:DIGITS]
        return _hash([piece.plain() for piece in pieces[name]])

    plain_hashes = in_parallel(plain_hash, names)
    return Prediction(
        dtype=ENGINE_DTYPES[dtypes.pop()],
        checksums=dict(zip(names, plain_hashes, strict=True)),
        padded=dict(zip(padded, in_parallel(lambda name: _hash(pieces[name]), padded), strict=True)),
    )


@dataclass(frozen=True)
class _Piece:
    """A tensor of the checkpoint as a part of a tensor of the engine."""

    path: Path
    span: TensorSpan
    rows: int = 0
    """Rows of zeros behind it."""
    columns: int = 0
    """Zeros behind each of its rows."""

    @property
    def is_padded(self) -> bool:
        return bool(self.rows or self.columns)

    def plain(self) -> _Piece:
        return _Piece(self.path, self.span)


def _padding(name: str, span: TensorSpan) -> tuple[int, int]:
    """(rows, columns) of zeros that SGLang adds to a tensor."""
    if not span.bytes:
        return 0, 0
    if name in (EMBEDDING, HEAD):
        return -span.shape[0] % VOCABULARY_MULTIPLE, 0
    if any(f".mlp.{member}." in name for member in GATE_UP):
        return -span.shape[0] % INNER_MULTIPLE, 0
    if name.endswith(".mlp.down_proj.weight"):
        return 0, -span.shape[1] % INNER_MULTIPLE
    return 0, 0


def _hash(pieces: list[_Piece]) -> str:
    """Of the bytes of all pieces, one behind the other: 16 hexadecimal digits."""
    digest = hashlib.sha256()
    for piece in pieces:
        span = piece.span
        row_bytes = span.bytes // span.shape[0] if span.bytes else 0
        if piece.columns:
            zeros = bytes(piece.columns * ITEM_BYTES[span.dtype])
            for row in range(span.shape[0]):
                for part in chunks(piece.path, span.start + row * row_bytes, row_bytes):
                    digest.update(part)
                digest.update(zeros)
        else:
            for part in chunks(piece.path, span.start, span.bytes):
                digest.update(part)
        digest.update(bytes(piece.rows * row_bytes))
    return digest.hexdigest()[:DIGITS]
