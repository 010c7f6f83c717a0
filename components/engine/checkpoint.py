"""Reads a checkpoint directory completely and strictly, before anything of the running engine changes.

SGLang accepts missing and NaN tensors and dies on truncated or misshapen ones (facts of 0.5.23); here each of them is a
BadData that names file and tensor.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from colchis.components.engine.architecture import Architecture, read_architecture
from colchis.components.engine.settings import type_of
from colchis.components.engine.weights import Assembly
from colchis.components.errors import BadData

FLOAT_DTYPES = {torch.float32, torch.bfloat16, torch.float16}
DERIVED = ("rotary_emb.inv_freq",)
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


@dataclass(frozen=True)
class Checkpoint:
    """A model directory in memory: tensors in the engine's dtype, none of them backed by the file."""

    folder: Path
    config: dict[str, Any]
    architecture: Architecture
    dtype: torch.dtype
    """What the engine serves it in."""
    assembly: Assembly | None
    """The weights of a static family, complete."""
    eos_token_ids: frozenset[int]


def read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise BadData(f"{path.name} is not readable JSON: {error}", where=str(path)) from error
    if not isinstance(value, dict):
        raise BadData(f"{path.name} holds {type(value).__name__}, expected an object", where=str(path))
    return value


def read_config(folder: Path, fallback: dict[str, Any] | None) -> dict[str, Any]:
    """The parsed config.json; `fallback` (of the weights now served) stands in where the directory has none."""
    if not folder.is_dir():
        raise BadData("no such model directory", where=str(folder), hint="give a path local to the engine")
    if (folder / "config.json").exists():
        return read_json(folder / "config.json")
    if fallback is None:
        raise BadData("no config.json, and no model is loaded that could lend its own", where=str(folder))
    return fallback


def eos_token_ids(folder: Path, config: dict[str, Any]) -> frozenset[int]:
    """Ids that end a sequence: union of config.json and generation_config.json."""
    ids: set[int] = set()
    sources = [config]
    if (folder / "generation_config.json").exists():
        sources.append(read_json(folder / "generation_config.json"))
    for source in sources:
        value = source.get("eos_token_id")
        ids.update(value if isinstance(value, list) else [] if value is None else [value])
    return frozenset(ids)


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files that make up the checkpoint: those of the index where there is one."""
    index = folder / "model.safetensors.index.json"
    if index.exists():
        names = sorted(set(read_json(index).get("weight_map", {}).values()))
        missing = [name for name in names if not (folder / name).is_file()]
        if missing:
            raise BadData(f"the index names {', '.join(missing)}, which is not there", where=str(folder))
        files = [folder / name for name in names]
    else:
        files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise BadData("no *.safetensors file", where=str(folder), hint="only the safetensors format is read")
    return files


def _shape(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape)) or "scalar"


class Intake:
    """Takes the tensors of one version, in any order, and refuses what the model cannot have. `shapes` is the complete list of
    what must come; each tensor is copied to its place of `assembly`, or to fresh memory.

    A tied checkpoint may carry `lm_head.weight` when it equals the embedding.
    """

    def __init__(
        self, shapes: dict[str, tuple[int, ...]], dtype: torch.dtype, *, tied: bool, assembly: Assembly | None = None
    ) -> None:
        self.shapes, self.dtype, self.tied, self.assembly = shapes, dtype, tied, assembly
        self.found: dict[str, torch.Tensor] = {}

    def add(self, name: str, tensor: torch.Tensor, where: str) -> None:
        """One more. BadData when its name, shape or type is wrong, it is not finite, or came before."""
        if name.endswith(DERIVED):
            return
        if name in self.found:
            raise BadData(f"tensor {name} comes twice", where=where)
        expected = self.shapes.get(name)
        if expected is None and not (self.tied and name == HEAD):
            raise BadData(f"tensor {name} does not belong to this architecture", where=where, hint="check config.json")
        if expected is not None and tuple(tensor.shape) != expected:
            raise BadData(
                f"tensor {name} has shape {_shape(tuple(tensor.shape))}, expected {_shape(expected)}", where=where
            )
        if tensor.dtype not in FLOAT_DTYPES:
            raise BadData(f"tensor {name} has dtype {tensor.dtype}, expected a float", where=where)
        # A copy: the engine must outlive the source, which the next update replaces.
        place = self.assembly.place(name) if self.assembly else None
        copied = tensor.to(self.dtype, copy=True) if place is None else place.copy_(tensor)
        # The sum is finite unless an element is not, or the sum itself overflows: then look closely.
        if not torch.isfinite(copied.sum()) and not bool(torch.isfinite(copied).all()):
            raise BadData(
                f"tensor {name} holds NaN or Inf (read as {tensor.dtype}, served as {self.dtype})", where=where
            )
        self.found[name] = copied
        if self.assembly is not None and place is not None:
            self.assembly.filled(name)

    def finish(self, where: str) -> dict[str, torch.Tensor]:
        """All of them. BadData when one did not come."""
        missing = sorted(self.shapes.keys() - self.found.keys())
        if missing:
            more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
            raise BadData(f"{len(missing)} tensors are missing: {', '.join(missing[:3])}{more}", where=where)
        if self.tied and HEAD in self.found:
            head = self.found.pop(HEAD)
            if not torch.equal(head, self.found[EMBEDDING]):
                raise BadData("config.json ties the head to the embedding, but lm_head.weight differs", where=where)
        return self.found


def read_tensors(
    folder: Path,
    shapes: dict[str, tuple[int, ...]],
    dtype: torch.dtype,
    *,
    tied: bool,
    assembly: Assembly | None = None,
) -> dict[str, torch.Tensor]:
    """All tensors of the checkpoint, in fresh memory or in their places of `assembly`. Raises as `Intake`."""
    intake = Intake(shapes, dtype, tied=tied, assembly=assembly)
    for path in weight_files(folder):
        with _opened(path) as file:
            for name in file.keys():  # noqa: SIM118 (safe_open is no mapping)
                intake.add(name, file.get_tensor(name), str(path))
    return intake.finish(str(folder))


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """A safetensors file; BadData when it is none, also while it is read."""
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except (SafetensorError, OSError) as error:
        raise BadData(
            f"{path.name} is truncated or is no safetensors file: {error}", where=str(path), hint="fetch it again"
        ) from error


def own_dtype(folder: Path) -> torch.dtype:
    """By `type_of`."""
    dtypes: set[str] = set()
    for path in weight_files(folder):
        with _opened(path) as file:
            dtypes |= {file.get_slice(name).get_dtype() for name in file.keys()}  # noqa: SIM118
    dtype: torch.dtype = getattr(torch, type_of(dtypes))
    return dtype


def read_checkpoint(
    folder: Path,
    dtype: torch.dtype | None,
    current: Architecture | None,
    current_config: dict[str, Any] | None,
) -> Checkpoint:
    """Reads a directory of a static family, in its own type if `dtype` is None. `current` is what the engine serves: another
    architecture is refused."""
    config = read_config(folder, current_config)
    architecture = read_architecture(config, str(folder / "config.json"))
    if current is not None and architecture != current:
        differing = [
            f"{field} {getattr(architecture, field)} (served: {getattr(current, field)})"
            for field in architecture.__dataclass_fields__
            if getattr(architecture, field) != getattr(current, field)
        ]
        raise BadData(
            f"another architecture than the one served: {', '.join(differing)}",
            where=str(folder / "config.json"),
            hint="start a new engine for another model",
        )
    assembly = None
    dtype = dtype or own_dtype(folder)
    if architecture.static:
        assembly = Assembly(architecture, dtype)
        read_tensors(folder, architecture.tensors(), dtype, tied=architecture.tied, assembly=assembly)
    return Checkpoint(folder, config, architecture, dtype, assembly, eos_token_ids(folder, config))
