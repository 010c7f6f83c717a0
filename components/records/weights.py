"""The record of one policy version: which tensors it has, where their bytes are, and what they hash to."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Literal

from pydantic import Field, model_validator

from colchis.components.store import Record
from colchis.components.store.payload import Payload


class TensorEntry(Record):
    """One tensor as it lies in a safetensors file: row-major, little-endian."""

    name: str = Field(min_length=1)
    dtype: str
    """As safetensors names it: F32, BF16, F16, ..."""
    shape: tuple[int, ...]
    bytes: int = Field(ge=0)
    file: str
    """Name of the file in `WeightsManifest.files`."""
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    """Of the raw bytes, without any header."""
    xxh3_128: str = Field(pattern=r"^[0-9a-f]{32}$")
    """Of the same bytes."""


class Delta(Record):
    """The version once more, as the bits that differ from those of the version before (`components/weights/delta.py`)."""

    base_version: int = Field(ge=0)
    base_digest: str = Field(pattern=r"^[0-9a-f]{64}$")
    """`weights_digest` of the version that it applies to."""
    payload: Payload


class Probe(Record):
    """What the trainer says of some tokens: the proof of an adapter, which an engine's checksums do not cover."""

    token_ids: list[list[int]] = Field(min_length=1)
    logprobs: list[list[float]]
    """Of all tokens but each sequence's first, natural logarithm at temperature 1."""
    tolerance: float = Field(gt=0)
    """Mean gap at which an engine still has the same weights (components/weights/gap.py)."""


class Adapter(Record):
    """The version once more, as a low-rank adapter beside the base that it was trained on."""

    base_version: int = Field(ge=0)
    base_digest: str = Field(pattern=r"^[0-9a-f]{64}$")
    """`weights_digest` of the version that it belongs on."""
    rank: int = Field(ge=1)
    alpha: float = Field(gt=0)
    """It is scaled by `alpha / rank`."""
    targets: tuple[str, ...] = Field(min_length=1)
    """Last names of the linear layers that it changes."""
    files: list[Payload] = Field(min_length=1)
    """As PEFT names them."""
    probe: Probe

    @property
    def digest(self) -> str:
        """sha256 over name and checksums of each file, sorted by name."""
        lines = sorted(f"{f.name}\t{f.sha256}\t{f.xxh3_128}\n" for f in self.files)
        return hashlib.sha256("".join(lines).encode()).hexdigest()

    @property
    def base_label(self) -> str:
        """What an engine calls itself that holds the base and serves adapters on it; requests say which one."""
        return f"base-{self.base_digest[:12]}"

    def name(self, run: str, version: int) -> str:
        """The name under which engines serve it: run, version and content, so that none is ever used for two."""
        return f"{run}-v{version}-{self.digest[:12]}"


class WeightsManifest(Record):
    """`runs/R/weights/vNNNNNNNN/manifest.json`: a copy of what the train commit decided, so without a clock in it."""

    format: Literal[1] = 1
    run: str
    version: int = Field(ge=0)
    base_version: int | None = None
    """The version that this one was trained from; None for v0."""
    kind: Literal["full", "same"]
    """`same`: no step was made, the tensors are those of `base_version`."""
    files: list[Payload]
    """Named as they are called in an engine's directory, e.g. `model.safetensors`."""
    tensors: list[TensorEntry]
    weights_digest: str = Field(pattern=r"^[0-9a-f]{64}$")
    model: str = Field(pattern=r"^[0-9a-f]{64}$")
    """`inputs/` digest of the folder with configuration and tokenizer."""
    step: int = Field(ge=0)
    """Optimiser steps made since v0."""
    delta: Delta | None = None
    """A shorter way for who has the base; `files` are always there whole."""
    adapter: Adapter | None = None
    """For engines that serve adapters beside the base; `files` are the two merged."""

    @model_validator(mode="after")
    def _consistent(self) -> WeightsManifest:
        if len({t.name for t in self.tensors}) != len(self.tensors):
            raise ValueError("a tensor is listed twice")
        if len({f.name for f in self.files}) != len(self.files):
            raise ValueError("a file is listed twice")
        if strangers := {t.file for t in self.tensors} - {f.name for f in self.files}:
            raise ValueError(f"tensors in files that are not listed: {sorted(strangers)}")
        if self.weights_digest != (found := weights_digest(self.tensors)):
            raise ValueError(f"weights_digest is {self.weights_digest}, but the tensors listed give {found}")
        if self.base_version is not None and self.base_version >= self.version:
            raise ValueError(f"base_version {self.base_version} is not before version {self.version}")
        if self.delta is not None and self.delta.base_version != self.base_version:
            raise ValueError(
                f"the delta is of v{self.delta.base_version}, the version was made from v{self.base_version}"
            )
        if self.adapter is not None and self.adapter.base_version >= self.version:
            raise ValueError(f"the adapter is of v{self.adapter.base_version}, which is not before v{self.version}")
        if self.kind == "same" and self.base_version is None:
            raise ValueError("kind 'same' needs a base_version to be the same as")
        return self

    def tensor_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(t.bytes for t in self.tensors)

    @property
    def adapter_name(self) -> str | None:
        """Name of its adapter in an engine; None: it has none."""
        return self.adapter.name(self.run, self.version) if self.adapter else None

    def file_bytes(self) -> int:
        """Bytes of all files: what a transfer moves."""
        return sum(f.bytes for f in self.files)


def weights_digest(tensors: Iterable[TensorEntry]) -> str:
    """sha256 over one line per tensor, sorted by name: name, dtype, dimensions joined by commas, sha256 of the raw
    bytes; separated by tabs.

    It depends on names, types, shapes and bytes only: not on files, their headers, or the order in them. A name cannot
    hold a tab or a newline (the header reader refuses them), so no two sets of tensors share a text.
    """
    digest = hashlib.sha256()
    for t in sorted(tensors, key=lambda t: t.name):
        digest.update(f"{t.name}\t{t.dtype}\t{','.join(map(str, t.shape))}\t{t.sha256}\n".encode())
    return digest.hexdigest()
