"""What a train commit holds: the weights for the engines, and all that the next iteration needs to go on bitwise.

weights/model*.safetensors  Hugging Face names, `model.dtype`
state/state.json            version, optimiser steps, random state, fingerprint of the weights
state/moments.safetensors   AdamW's exp_avg and exp_avg_sq, fp32
state/masters.safetensors   fp32 weights, only when the published ones are rounded to bfloat16
state/adapter/*             with adapters instead of masters: fp32, a folder that PEFT and SGLang read
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist
import xxhash
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn

from colchis.components.errors import BadConfig, BadData, Bug
from colchis.components.store import Record
from colchis.components.trainer.adapters import WEIGHTS, is_adapter, parameters_of, stored_name
from colchis.components.trainer.model import local, part_of, published, tensors_of, whole, whole_weights
from colchis.components.trainer.optimiser import Optimiser

FILE_BYTES = 4 << 30
"""Most bytes of one file of weights: objects that are fetched side by side, and again when one breaks off."""


class TrainerState(Record):
    """`state/state.json`."""

    format: Literal[1] = 1
    version: int
    """Of the weights it belongs to."""
    weights: str
    """Their fingerprint."""
    optimiser_steps: int
    """Made since the run began."""
    rng: str
    """torch's random state, base64."""


class Extraction(Record):
    """Fingerprints of the parameters before and after they were written: equal, or the buffer was not locked."""

    before: str
    after: str


def fingerprint(tensors: Mapping[str, Tensor]) -> str:
    """xxh3-128 over name, type, shape and bytes of all tensors, in order of names."""
    digest = xxhash.xxh3_128()
    for name in sorted(tensors):
        t = tensors[name].contiguous()
        digest.update(f"{name} {t.dtype} {list(t.shape)}\n".encode())
        digest.update(_bytes(t))
    return digest.hexdigest()


def _bytes(tensor: Tensor) -> memoryview:
    """The raw bytes of a contiguous tensor, without a copy. One of a single element is contiguous whatever its strides are."""
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8).numpy().data


def write_weights(model: nn.Module, folder: Path, *, dtype: torch.dtype, file_bytes: int = FILE_BYTES) -> Extraction:
    """`folder`/model.safetensors, or model-00001-of-0000N.safetensors and so on when that would be more than `file_bytes`
    (a tensor is never cut). By rank 0. A collective.
    BadData names a tensor that is not finite; Bug when a parameter changed while it was written."""
    weights = whole_weights(model, dtype=dtype)
    for name, tensor in weights.items():
        if not bool(torch.isfinite(tensor).all()):
            raise BadData(f"weight '{name}' is not finite after the step; nothing was published")
    before = fingerprint(weights)
    files = _files(weights, file_bytes)
    for number, names in enumerate(files, 1):
        name = "model" if len(files) == 1 else f"model-{number:05d}-of-{len(files):05d}"
        _save({n: weights[n] for n in names}, folder / f"{name}.safetensors")
    after = fingerprint(whole_weights(model, dtype=dtype))
    if before != after:
        raise Bug("the parameters changed while they were written: a step ran during the extraction")
    return Extraction(before=before, after=after)


def _files(weights: Mapping[str, Tensor], file_bytes: int) -> list[list[str]]:
    """Names of tensors by file, in their order."""
    files: list[list[str]] = [[]]
    room = file_bytes
    for name, tensor in weights.items():
        if tensor.nbytes > room and files[-1]:
            files.append([])
            room = file_bytes
        files[-1].append(name)
        room -= tensor.nbytes
    return files


def write_state(
    model: nn.Module, optimiser: Optimiser, folder: Path, *, version: int, weights: str, dtype: torch.dtype
) -> None:
    """The files of `state/`, by rank 0. `weights` is the fingerprint of the published ones. A collective."""
    if adapter := _adapter(model):
        _save({stored_name(name): whole(local(p), p) for name, p in adapter.items()}, folder / "adapter" / WEIGHTS)
    elif dtype != torch.float32:
        _save(whole_weights(model, dtype=torch.float32), folder / "masters.safetensors")
    _save(optimiser.moments(), folder / "moments.safetensors")
    rng = base64.b64encode(_bytes(torch.get_rng_state()).tobytes()).decode()
    state = TrainerState(version=version, weights=weights, optimiser_steps=optimiser.steps, rng=rng)
    if dist.get_rank() == 0:
        (folder / "state.json").write_bytes(state.to_bytes())


def _adapter(model: nn.Module) -> dict[str, Tensor]:
    """The parameters of the adapters by name, detached; none when the whole model is trained."""
    return {name: p.detach() for name, p in model.named_parameters() if is_adapter(name)}


def _save(tensors: Mapping[str, Tensor], path: Path) -> None:
    if dist.get_rank() == 0:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            save_file({name: t.contiguous() for name, t in tensors.items()}, path, metadata={"format": "pt"})
        except SafetensorError as error:
            raise BadConfig(
                f"cannot write {path.name}: {error}", where=str(path.parent), hint="give the folder more room"
            ) from error


def read_state(
    model: nn.Module, optimiser: Optimiser, folder: Path, *, version: int, weights: str, dtype: torch.dtype
) -> None:
    """Put masters, moments and random state back. BadData when the state is of another version, or of other weights
    than those that were loaded (`weights` is their fingerprint)."""
    path = folder / "state.json"
    try:
        state = TrainerState.from_bytes(path.read_bytes(), str(path))
    except OSError as e:
        raise BadData(f"no readable trainer state ({e.strerror})", where=str(path)) from None
    if state.version != version:
        raise BadData(f"the state is of v{state.version}, expected v{version}", where=str(path))
    if state.weights != weights:
        raise BadData(
            f"the state belongs to weights {state.weights[:12]}, those of v{version} are {weights[:12]}",
            where=str(path),
            hint="weights and state must come from one train commit",
        )
    if adapter := _adapter(model):
        file = folder / "adapter" / WEIGHTS
        stored = parameters_of(dict(tensors_of(file)), adapter, where=str(file))
        for name, target in adapter.items():
            local(target).copy_(part_of(stored[name], target))
    elif dtype != torch.float32:
        _read_masters(model, folder / "masters.safetensors")
    moments = dict(tensors_of(folder / "moments.safetensors"))
    optimiser.restore(moments, steps=state.optimiser_steps)
    torch.set_rng_state(torch.frombuffer(bytearray(base64.b64decode(state.rng)), dtype=torch.uint8))


def _read_masters(model: nn.Module, path: Path) -> None:
    expected = published(model)
    stored = dict(tensors_of(path))
    if stored.keys() != expected.keys():
        raise BadData(f"master weight '{min(stored.keys() ^ expected.keys())}' is missing or unknown", where=str(path))
    for name, target in expected.items():
        local(target).copy_(part_of(stored[name], target))
