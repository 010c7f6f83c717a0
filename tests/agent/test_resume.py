"""A fetch that broke off goes on from the files that had arrived, and believes none of them unread."""

from __future__ import annotations

from pathlib import Path

import pytest

from colchis.components.agent.staging import Staging
from colchis.components.errors import BadData, PeerUnavailable
from colchis.components.records.weights import WeightsManifest
from colchis.components.store import Store, keys
from colchis.components.weights import build, publish
from colchis.components.weights.deadline import Deadline
from tests.agent.conftest import Versions
from tests.faults import Fault, FaultProxy
from tests.weights.models import RUN, arrays_of, write_weights

VERSION = 3


@pytest.fixture
def manifest(store: Store, versions: Versions, tmp_path: Path) -> WeightsManifest:
    """A version of three files."""
    arrays = arrays_of(versions.config, 7)
    names, files = sorted(arrays), []
    for number in range(3):
        path = tmp_path / f"model-{number + 1:05d}-of-00003.safetensors"
        write_weights(path, {name: arrays[name] for name in names[number::3]})
        files.append((store.upload(f"{keys.iteration_prefix(RUN, VERSION)}x/{path.name}", path), path))
    return publish(
        store,
        build(run=RUN, version=VERSION, base_version=2, kind="full", files=files, model=versions.model, step=VERSION),
    )


def fill(folder: Path, store: Store, deadline_s: float = 30) -> list[bool]:
    """Fetch the version as an agent does that has just started; which of its files were there already."""
    staging = Staging(folder)
    try:
        staged, _ = staging.fill(store, RUN, VERSION, set(), Deadline(deadline_s))
        return [transfer.reused for transfer in staged.transfers]
    finally:
        staging.close()


def break_off(manifest: WeightsManifest, through: Store, proxy: FaultProxy, folder: Path) -> None:
    """A fetch whose last file does not come."""
    proxy.add(Fault("GET", manifest.files[2].key, "status", times=10_000))
    with pytest.raises(PeerUnavailable):
        fill(folder, Store(through.settings, deadline_s=2.0))
    proxy.clear()


def test_only_what_is_missing_is_fetched_again(
    manifest: WeightsManifest, through: Store, proxy: FaultProxy, tmp_path: Path
) -> None:
    """Catches hundreds of gigabytes that start from the first byte because the last object was late."""
    break_off(manifest, through, proxy, tmp_path / "staging")
    filling = tmp_path / "staging" / "versions" / RUN / f"v{VERSION:08d}.filling"
    assert sorted(p.name for p in filling.iterdir()) == [f.name for f in manifest.files[:2]]
    (filling / "half").write_bytes(b"of an agent that was killed")
    before = [proxy.count("GET", file.key) for file in manifest.files]
    assert fill(tmp_path / "staging", through) == [True, True, False]
    after = [proxy.count("GET", file.key) for file in manifest.files]
    assert after[:2] == before[:2]
    assert not filling.exists()
    assert not (filling.with_name(f"v{VERSION:08d}") / "half").exists()


def test_a_file_that_arrived_is_read_before_it_is_believed(
    manifest: WeightsManifest, through: Store, proxy: FaultProxy, tmp_path: Path
) -> None:
    """Catches a disk that lost a block between two tries."""
    break_off(manifest, through, proxy, tmp_path / "staging")
    first = tmp_path / "staging" / "versions" / RUN / f"v{VERSION:08d}.filling" / manifest.files[0].name
    raw = bytearray(first.read_bytes())
    raw[-1] ^= 1
    first.write_bytes(raw)
    assert fill(tmp_path / "staging", through) == [False, True, False]


def test_what_is_refused_leaves_nothing(manifest: WeightsManifest, store: Store, tmp_path: Path) -> None:
    """Catches a damaged version whose other files are kept for a next try that must fail alike."""
    key = manifest.files[1].key
    whole = store.get(key).data
    store.put(key, whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(BadData):
        fill(tmp_path / "staging", store)
    assert list((tmp_path / "staging" / "versions").rglob("*.safetensors")) == []
    store.put(key, whole)
    assert fill(tmp_path / "staging", store) == [False, False, False]


def test_files_of_a_version_that_nobody_wants_any_more_go(
    manifest: WeightsManifest, through: Store, proxy: FaultProxy, tmp_path: Path
) -> None:
    """Catches a disk that fills with fetches which were given up."""
    break_off(manifest, through, proxy, tmp_path / "staging")
    staging = Staging(tmp_path / "staging")
    try:
        assert staging.crashed == [f"{RUN}/v{VERSION:08d}"]
        assert staging.collect({(RUN, VERSION + 1)}) == [(RUN, VERSION)]
        assert list((tmp_path / "staging" / "versions").rglob("*.safetensors")) == []
    finally:
        staging.close()
