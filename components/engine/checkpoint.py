"""Reads a checkpoint directory completely and strictly, before anything of the running engine changes.

SGLang accepts missing and NaN tensors and dies on truncated or misshapen ones (facts of 0.5.23); here each of them is a
BadData that names file and tensor.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from colchis.components.engine.architecture import Architecture, read_architecture
from colchis.components.engine.weights import Assembly
from colchis.components.errors import BadData

FLOAT_DTYPES = {torch.float32, torch.bfloat16, torch.float16}
DERIVED = ("rotary_emb.inv_freq",)


@dataclass(frozen=True)
class Checkpoint:
    """A model directory in memory: tensors in the engine's dtype, none of them backed by the file."""

    folder: Path
    config: dict[str, Any]
    architecture: Architecture
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


def _read_file(
    path: Path,
    shapes: dict[str, tuple[int, ...]],
    dtype: torch.dtype,
    found: dict[str, torch.Tensor],
    tied: bool,
    assembly: Assembly | None,
) -> None:
    """Adds the tensors of one file to `found`, checking name, shape, dtype and that every value is finite."""
    try:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 (safe_open is no mapping)
                if name.endswith(DERIVED):
                    continue
                if name in found:
                    raise BadData(f"tensor {name} is in two files", where=str(path))
                expected = shapes.get(name)
                if expected is None and not (tied and name == "lm_head.weight"):
                    raise BadData(
                        f"tensor {name} does not belong to this architecture", where=str(path), hint="check config.json"
                    )
                tensor = file.get_tensor(name)
                if expected is not None and tuple(tensor.shape) != expected:
                    raise BadData(
                        f"tensor {name} has shape {_shape(tuple(tensor.shape))}, expected {_shape(expected)}",
                        where=str(path),
                    )
                if tensor.dtype not in FLOAT_DTYPES:
                    raise BadData(f"tensor {name} has dtype {tensor.dtype}, expected a float", where=str(path))
                # A copy: the engine must outlive the file, which the next update replaces.
                place = assembly.place(name) if assembly else None
                found[name] = tensor.to(dtype, copy=True) if place is None else place.copy_(tensor)
                # The sum is finite unless an element is not, or the sum itself overflows: then look closely.
                if not torch.isfinite(found[name].sum()) and not bool(torch.isfinite(found[name]).all()):
                    raise BadData(
                        f"tensor {name} holds NaN or Inf (read as {tensor.dtype}, served as {dtype})", where=str(path)
                    )
                if assembly is not None and place is not None:
                    assembly.filled(name)
    except (SafetensorError, OSError) as error:
        raise BadData(
            f"{path.name} is truncated or is no safetensors file: {error}", where=str(path), hint="fetch it again"
        ) from error


def read_tensors(
    folder: Path,
    shapes: dict[str, tuple[int, ...]],
    dtype: torch.dtype,
    *,
    tied: bool,
    assembly: Assembly | None = None,
) -> dict[str, torch.Tensor]:
    """All tensors of the checkpoint, in fresh memory or in their places of `assembly`. `shapes` is the complete list of
    what must be there.

    A tied checkpoint may carry `lm_head.weight` when it equals the embedding.
    """
    found: dict[str, torch.Tensor] = {}
    for path in weight_files(folder):
        _read_file(path, shapes, dtype, found, tied, assembly)
    missing = sorted(shapes.keys() - found.keys())
    if missing:
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise BadData(f"{len(missing)} tensors are missing: {', '.join(missing[:3])}{more}", where=str(folder))
    if tied and "lm_head.weight" in found:
        head = found.pop("lm_head.weight")
        if not torch.equal(head, found["model.embed_tokens.weight"]):
            raise BadData("config.json ties the head to the embedding, but lm_head.weight differs", where=str(folder))
    return found


def read_checkpoint(
    folder: Path, dtype: torch.dtype, current: Architecture | None, current_config: dict[str, Any] | None
) -> Checkpoint:
    """Reads a directory of a static family. `current` is what the engine serves: another architecture is refused."""
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
    if architecture.static:
        assembly = Assembly(architecture, dtype)
        read_tensors(folder, architecture.tensors(), dtype, tied=architecture.tied, assembly=assembly)
    return Checkpoint(folder, config, architecture, assembly, eos_token_ids(folder, config))
