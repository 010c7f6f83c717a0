"""A trainer with a bug: it commits, under right checksums, what no engine may serve."""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
import xxhash

from colchis.components.records.weights import TensorEntry, WeightsManifest, weights_digest
from colchis.components.stages.train import MANIFEST
from colchis.components.store import Attempt, StageKey, Store, keys, read_commit
from colchis.components.weights import read_manifest
from tests.faults import Fault
from tests.run.kept import Account, Guest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

NORM, KEYS = "model.norm.weight", "model.layers.0.self_attn.k_proj.weight"


@dataclass
class Tensor:
    """One tensor of a safetensors file."""

    dtype: str
    shape: list[int]
    data: bytes


Tensors = dict[str, Tensor]


def parse(body: bytes) -> Tensors:
    """Tensors of a safetensors file: 8 bytes of length, a JSON header, the data."""
    length = struct.unpack("<Q", body[:8])[0]
    header = json.loads(body[8 : 8 + length])
    data = body[8 + length :]
    return {
        name: Tensor(entry["dtype"], entry["shape"], data[slice(*entry["data_offsets"])])
        for name, entry in header.items()
        if name != "__metadata__"
    }


def join(tensors: Tensors) -> bytes:
    """The file that holds them."""
    header, start = {}, 0
    for name, tensor in tensors.items():
        end = start + len(tensor.data)
        header[name] = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": [start, end]}
        start = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + b"".join(t.data for t in tensors.values())


def entries_of(tensors: Tensors, file: str = "model.safetensors") -> list[TensorEntry]:
    """What a manifest says of them."""
    return [
        TensorEntry(
            name=name,
            dtype=t.dtype,
            shape=tuple(t.shape),
            bytes=len(t.data),
            file=file,
            sha256=hashlib.sha256(t.data).hexdigest(),
            xxh3_128=xxhash.xxh3_128_hexdigest(t.data),
        )
        for name, t in sorted(tensors.items())
    ]


def without_a_tensor(tensors: Tensors) -> None:
    del tensors[NORM]


def not_a_number(tensors: Tensors) -> None:
    numbers = np.frombuffer(tensors[NORM].data, "<f4").copy()
    numbers[3] = np.nan
    tensors[NORM].data = numbers.tobytes()


def another_shape(tensors: Tensors) -> None:
    tensors[KEYS].shape = tensors[KEYS].shape[::-1]


def commit_wrongly(store: Store, run: str, change: Callable[[Tensors], None]) -> str:
    """Commit v2 as a trainer would that lost track of its tensors; returns the key of the weights."""
    before, base = read_commit(store, StageKey(run, 0, "train")), read_manifest(store, run, 1)
    tensors = parse(store.read(base.files[0]))
    change(tensors)
    attempt = Attempt(store, StageKey(run, 1, "train"))
    weights = attempt.put("weights/model.safetensors", join(tensors))
    entries = entries_of(tensors)
    manifest = WeightsManifest(
        run=run,
        version=2,
        base_version=1,
        kind="full",
        files=[weights.model_copy(update={"name": "model.safetensors"})],
        tensors=entries,
        weights_digest=weights_digest(entries),
        model=base.model,
        step=base.step + 1,
    )
    attempt.put(MANIFEST, manifest.to_bytes())
    batch = read_commit(store, StageKey(run, 1, "batch"))
    attempt.commit(
        outputs={**before.outputs, "version": 2, "weights_digest": manifest.weights_digest},
        inputs={c.key: c.digest for c in (batch, before)},
    )
    return weights.key


def test_wrong_weights_are_refused_and_the_old_ones_served(guest: Guest, calm: Account) -> None:
    """Fault: a version that an engine loads without complaint and samples nonsense from: a missing tensor stays what it
    was, NaN spreads, and a transposed matrix has as many bytes as the right one."""
    services, store = guest.services, guest.services.store
    services.store_proxy.add(Fault("PUT", "000001/train/commit.json", "status", status=403, code="AccessDenied"))
    code, said = guest.finish()
    assert code == 78, said
    assert "000001/train/commit.json" in said
    for change, tensor in ((without_a_tensor, NORM), (not_a_number, NORM), (another_shape, KEYS)):
        commit_wrongly(store, guest.run, change)
        code, said = guest.finish()
        assert code == 65, f"{change.__name__}: {said}"
        assert "boundary 3" in said
        assert "weights v2" in said
        assert tensor in said
        for machine in services.machines:
            assert machine.agent_proxy.url in said
            status = machine.status()
            assert (status["version"], status["state"], status["ready"]) == (1, "serving", True)
            assert machine.label() == "1"
        store.delete(StageKey(guest.run, 1, "train").commit)
        store.delete(keys.weights_manifest(guest.run, 2))
    code, said = guest.finish()
    assert code == 0, said
    assert Account.of(store, guest.run) == calm
