"""A version that reaches an agent as the bits that differ from the one it has: same bytes, same proofs, fewer on the way."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from colchis.components.records.weights import WeightsManifest
from colchis.components.store import Store, upload_input
from colchis.components.weights import verify_published
from tests.agent.conftest import AgentProcess, EngineProcess
from tests.weights.models import RUN, arrays_of, config_of, publish_version, write_model, write_weights


@dataclass(frozen=True)
class Near:
    """Versions 0 and 1 of a run, which differ in few elements of each tensor."""

    folders: list[Path]
    manifest: WeightsManifest
    """Of version 1."""

    @property
    def delta(self) -> str:
        assert self.manifest.delta is not None
        return self.manifest.delta.payload.key


@pytest.fixture
def near(store: Store, tmp_path: Path) -> Near:
    config = config_of()
    folders = [write_model(tmp_path / f"v{n}", config, seed=0) for n in range(2)]
    arrays = arrays_of(config, 0)
    for array in arrays.values():
        array.reshape(-1)[:: max(1, array.size // 20)] += np.float32(0.25)
    write_weights(folders[1] / "model.safetensors", arrays)
    model = upload_input(store, folders[0])
    publish_version(store, folders[0], model=model, version=0)
    return Near(folders, publish_version(store, folders[1], model=model, version=1, base=folders[0]))


def test_an_agent_that_has_the_base_fetches_the_difference(
    near: Near, agent: AgentProcess, engine: EngineProcess
) -> None:
    agent.bring(0)
    prepared = agent.prepare(1)
    assert [o.key for o in prepared.objects] == [near.delta]
    assert prepared.bytes < 0.3 * near.manifest.file_bytes()
    assert prepared.weights_digest == near.manifest.weights_digest
    staged = agent.staged(1)
    assert (staged / "model.safetensors").read_bytes() == (near.folders[1] / "model.safetensors").read_bytes()
    assert not (staged / "delta").exists()
    proof = agent.activate(1)
    assert (proof.checksums_equal, proof.changed, engine.label()) == (True, True, "1")


def test_an_agent_without_the_base_fetches_whole_files(near: Near, agent: AgentProcess) -> None:
    """A late joiner, or one whose base is another: it needs no chain of deltas."""
    prepared = agent.prepare(1)
    assert [o.key for o in prepared.objects] == [f.key for f in near.manifest.files]


@pytest.mark.parametrize("damage", ["flipped", "gone", "of another base"])
def test_a_delta_that_does_not_fit_is_the_longer_way(
    near: Near, agent: AgentProcess, store: Store, damage: str
) -> None:
    """Fault: a run that stands still for an object which only saves time, or that loads what came of it."""
    agent.bring(0)
    body = bytearray(store.get(near.delta).data)
    if damage == "gone":
        store.delete(near.delta)
    elif damage == "flipped":
        body[len(body) // 3] ^= 1
        store.put(near.delta, bytes(body))
    else:
        base = agent.staged(0) / "model.safetensors"
        data = bytearray(base.read_bytes())
        data[-1] ^= 1
        base.write_bytes(data)
    if damage != "of another base":
        assert verify_published(store, RUN, 1).proof["delta_is_right"] is False
    prepared = agent.prepare(1)
    assert near.manifest.files[0].key in [o.key for o in prepared.objects]
    assert prepared.weights_digest == near.manifest.weights_digest
    assert "are fetched whole" in (agent.folder / "agent.log").read_text()
    assert agent.activate(1).checksums_equal is True
