"""The checksums that an engine must report if its tensors are the commit's: boundary 4 compares the two.

On a CPU, SGLang's `/weights_checker` reports for each of its own tensors the first eight bytes of sha256 over the raw
bytes, as hexadecimal. At tensor parallelism 1 those tensors are the checkpoint's, except that q, k, v and gate, up are
stacked (so the bytes follow each other). On a GPU the hash is another one and nothing is predicted: there replicas are
compared with each other and with the version before.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from colchis.components.errors import BadData
from colchis.components.weights.architecture import EMBEDDING, FAMILIES, HEAD, fused, is_tied
from colchis.components.weights.header import TensorSpan, read_header
from colchis.components.weights.scan import chunks, in_parallel

ENGINE_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
VOCABULARY_MULTIPLE = 64
"""SGLang pads the rows of embedding and head to a multiple of this, with zeros."""

Checksums = dict[str, str]


@dataclass(frozen=True)
class Prediction:
    """What the engine's tensors must hash to."""

    dtype: str
    """The engine must run in this type (`float32`, ...); in another it holds other bytes."""
    checksums: Checksums
    """Engine's tensor name -> 16 hexadecimal digits, with embedding and head as they are in the files."""
    padded: Checksums
    """The same for the tensors whose rows an engine may pad: their hash with the padding."""

    def differences(self, found: Mapping[str, str]) -> list[str]:
        """Names of tensors that the engine lacks or that hash to something else, sorted. Further ones are its own."""
        return sorted(
            name
            for name, expected in self.checksums.items()
            if found.get(name) not in (expected, self.padded.get(name, expected))
        )


def predict(folder: Path) -> Prediction | None:
    """The checksums that an engine at tensor parallelism 1 on a CPU reports after it has loaded `folder`.

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
    hashes = in_parallel(lambda name: _hash([spans[part] for part in groups[name]], _padding(name, spans)), names)
    return Prediction(
        dtype=ENGINE_DTYPES[dtypes.pop()],
        checksums={name: plain for name, (plain, _) in zip(names, hashes, strict=True)},
        padded={name: padded for name, (plain, padded) in zip(names, hashes, strict=True) if padded != plain},
    )


def _padding(name: str, spans: Mapping[str, tuple[Path, TensorSpan]]) -> int:
    """Bytes of zeros that bring a vocabulary's rows to the next multiple of 64."""
    if name not in (EMBEDDING, HEAD):
        return 0
    span = spans[name][1]
    rows = span.shape[0]
    return -rows % VOCABULARY_MULTIPLE * (span.bytes // rows) if rows else 0


def _hash(parts: list[tuple[Path, TensorSpan]], padding_bytes: int) -> tuple[str, str]:
    """(hash of the bytes of all parts, the same with zeros behind), 16 hexadecimal digits each."""
    digest = hashlib.sha256()
    for path, span in parts:
        for piece in chunks(path, span.start, span.bytes):
            digest.update(piece)
    plain = digest.hexdigest()[:16]
    digest.update(bytes(padding_bytes))
    return plain, digest.hexdigest()[:16]
