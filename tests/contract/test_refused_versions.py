"""Versions that may not be served, on either engine: each is refused by name, and the old one is served on."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from colchis.components.errors import BadConfig, BadData, ColchisError
from colchis.components.store import keys, read_input
from colchis.components.store.inputs import InputManifest
from colchis.components.weights import read_manifest
from tests.contract.replica import Replica, Versions, another_agent, tensors_of
from tests.run.test_wrong_weights import Tensors, another_shape, join, not_a_number, without_a_tensor


def changed(change: Callable[[Tensors], None]) -> Callable[[Replica, dict[str, Path]], None]:
    """v2 as v1, but for a mistake in its tensors."""

    def commit(replica: Replica, models: dict[str, Path]) -> None:
        tensors = tensors_of(models["qwen2_b"])
        change(tensors)
        replica.versions.publish_unchecked(2, tensors)

    return commit


def another_model(name: str) -> Callable[[Replica, dict[str, Path]], None]:
    def commit(replica: Replica, models: dict[str, Path]) -> None:
        replica.versions.publish_unchecked(2, tensors_of(models[name]))

    return commit


def named(name: str) -> Callable[[Replica, dict[str, Path]], None]:
    def commit(replica: Replica, models: dict[str, Path]) -> None:
        replica.versions.publish_unchecked(2, tensors_of(models["qwen2_b"]), name=name)

    return commit


def cut(replica: Replica, models: dict[str, Path]) -> None:
    """A file that was cut before it was committed: its checksums are right."""
    tensors = tensors_of(models["qwen2_b"])
    header_bytes = 2000
    largest = max(len(t.data) for t in tensors.values())
    body = join(tensors)[: -largest // 2]
    assert len(body) > header_bytes
    replica.versions.publish_unchecked(2, tensors, body=body)


def stored(change: Callable[[bytes], bytes]) -> Callable[[Replica, dict[str, Path]], None]:
    """A good v2 whose object was changed in the store after its commit."""

    def commit(replica: Replica, models: dict[str, Path]) -> None:
        manifest = replica.versions.publish_unchecked(2, tensors_of(models["qwen2_b"]))
        key = manifest.files[0].key
        replica.store.put(key, change(replica.store.get(key).data))

    return commit


def one_more(tensors: Tensors) -> None:
    tensors["model.layers.9.mlp.up_proj.weight"] = tensors["model.layers.0.mlp.up_proj.weight"]


def nothing(replica: Replica, models: dict[str, Path]) -> None:
    """Nobody published v2."""


ESCAPE = "colchis-escaped.safetensors"
BAD = {
    "truncated file": (cut, "but its tensors have"),
    "truncated object": (stored(lambda data: data[:-8]), "is not what was committed"),
    "grown object": (stored(lambda data: data + bytes(8 << 20)), "is not what was committed"),
    "flipped bit": (stored(lambda data: data[:-1] + bytes([data[-1] ^ 1])), "is not what was committed"),
    "wrong shape": (changed(another_shape), "has shape"),
    "missing tensor": (changed(without_a_tensor), r"1 tensors are missing, first 'model\.norm\.weight'"),
    "surplus tensor": (changed(one_more), "do not belong to the model"),
    "NaN": (changed(not_a_number), r"'model\.norm\.weight' has 1 infinite or NaN"),
    "other architecture": (another_model("llama"), "do not belong to the model|ties the head"),
    "other names": (another_model("gpt2"), "tensors are missing"),
    "path traversal": (named(f"../../../../{ESCAPE}"), "is not a plain NAME"),
    "absolute path": (named(f"/tmp/{ESCAPE}"), "is not a plain NAME"),
    "no manifest": (nothing, "no such object"),
}


@pytest.mark.parametrize(("commit", "match"), BAD.values(), ids=BAD.keys())
def test_what_may_not_be_served_never_reaches_the_engine(
    replica: Replica, models: dict[str, Path], commit: Callable[[Replica, dict[str, Path]], None], match: str
) -> None:
    """Fault: weights that end the engine (a cut file, a wrong shape), that it takes without a word (a missing tensor, NaN,
    another model's names), or a manifest that chooses where the agent writes."""
    commit(replica, models)
    with pytest.raises(BadData, match=match):
        replica.agent.prepare(2)
    with pytest.raises(BadData, match="not prepared here"):
        replica.agent.activate(2)
    assert replica.agent.status().prepared[replica.versions.run] == [0]
    assert not list((replica.agent.staging / "versions" / replica.versions.run).glob("v00000002*"))
    assert not [p for p in (*replica.agent.folder.parents, Path("/tmp")) if (p / ESCAPE).exists()]
    replica.serves(0)


@pytest.mark.parametrize("name", ["..", "to\\kenizer.json", "nul\0byte"])
def test_a_model_folder_that_leads_elsewhere_is_refused(replica: Replica, name: str) -> None:
    """Fault: configuration and tokenizer come by a manifest as well, whose names are believed."""
    good = read_input(replica.store, replica.versions.model)
    lie = InputManifest(files=[*good.files, good.files[0].model_copy(update={"name": name})])
    replica.store.put(keys.input_manifest(lie.digest), lie.to_bytes())
    replica.versions.model = lie.digest
    replica.versions.publish_unchecked(2, tensors_of(replica.versions.folders[1]))
    with pytest.raises(ColchisError, match="expected a relative path of plain names"):
        replica.agent.prepare(2)
    replica.serves(0)


def test_a_version_larger_than_the_room_is_refused(replica: Replica, tmp_path: Path) -> None:
    """Fault: a disk that is filled until the engine beside it cannot write, or a load of half a file."""
    file_bytes = read_manifest(replica.store, replica.versions.run, 1).file_bytes()
    with another_agent(replica, tmp_path / "small", more=["--budget-bytes", str(file_bytes * 3 // 2)]) as small:
        small.bring(0)
        with pytest.raises(BadConfig, match=rf"v1 need {file_bytes} bytes, \d+ are free for staging.*three versions"):
            small.prepare(1)
        assert not list(small.staging.rglob("*.filling"))
        assert (small.status().version, small.ready().status_code, replica.label) == (0, 200, "0")


def test_what_is_in_the_way_of_the_buffer_is_named(replica: Replica) -> None:
    """Fault: an agent whose disk refuses, and a stage that says only that the agent answered something strange."""
    folder = replica.agent.staging / "versions" / replica.versions.run
    aside = folder.with_name("aside")
    folder.rename(aside)
    folder.write_bytes(b"a file where a folder should be")
    try:
        with pytest.raises(BadConfig, match=f"cannot use it: .*{folder}"):
            replica.agent.prepare(1)
    finally:
        folder.unlink()
        aside.rename(folder)
    assert replica.agent.bring(1).checksums_equal


def test_links_in_the_buffer_are_not_followed(replica: Replica, tmp_path: Path) -> None:
    """Fault: a link in the buffer through which the agent writes, empties or believes what is somebody else's."""
    outside = tmp_path / "outside"
    shutil.copytree(replica.versions.folders[1], outside)
    good = (outside / "model.safetensors").read_bytes()
    before = sorted(p.name for p in outside.iterdir())
    for version in (2, 3):
        replica.versions.publish(version, replica.versions.folders[1])
    half = [replica.agent.staged(version).with_suffix(".filling") for version in (1, 2)]
    half[0].mkdir()
    (half[0] / "model.safetensors").symlink_to(outside / "model.safetensors")
    (half[0] / "folder").mkdir()
    half[1].symlink_to(outside)
    replica.agent.staged(3).symlink_to(outside)
    for version in (1, 2, 3):
        replica.agent.prepare(version)
        staged = replica.agent.staged(version)
        assert not [p for p in (staged, *staged.iterdir()) if p.is_symlink()]
        assert (staged / "model.safetensors").read_bytes() == good
    assert sorted(p.name for p in outside.iterdir()) == before
    assert (outside / "model.safetensors").read_bytes() == good

    file = replica.agent.staged(3) / "model.safetensors"
    file.unlink()
    file.symlink_to(replica.versions.folders[0] / "model.safetensors")
    with pytest.raises(BadData, match="other bytes than the manifest says"):
        replica.agent.activate(3)
    replica.serves(0)


def test_a_damaged_copy_is_fetched_again(replica: Replica) -> None:
    """Fault: a disk that lost a block, after which the version can never be prepared: every try finds the damage."""
    replica.agent.prepare(1)
    file = replica.agent.staged(1) / "model.safetensors"
    raw = bytearray(file.read_bytes())
    raw[-1] ^= 1
    file.write_bytes(raw)
    again = replica.agent.prepare(1)
    assert (again.repeated, again.bytes) == (False, len(raw))
    assert replica.agent.activate(1).checksums_equal
    replica.serves(1)


def test_an_engine_of_another_type_is_refused(replica: Replica, broken: Callable[..., Path]) -> None:
    """Fault: an engine that rounds what the trainer wrote, or is more exact than it, and samples from another policy under
    the version's name. The engine's own answer to such a load is a 200."""
    folder = broken(lambda tensors: tensors.update({name: t.bfloat16() for name, t in tensors.items()}))
    rounded = Versions(replica.store, {"qwen2_a": folder, "qwen2_b": folder})
    replica.agent.run = rounded.run
    replica.agent.prepare(0)
    with pytest.raises(
        BadConfig, match=r"the engine runs with dtype float32, weights v0 are bfloat16.*--dtype bfloat16"
    ):
        replica.agent.activate(0)
    replica.agent.run = replica.versions.run
    replica.serves(0)
