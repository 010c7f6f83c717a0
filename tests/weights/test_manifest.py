"""Describing, publishing and checking a version: nothing that an engine must not serve gets a manifest or passes one."""

from __future__ import annotations

import hashlib
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from colchis.components.errors import BadConfig, BadData
from colchis.components.records.weights import TensorEntry, WeightsManifest, weights_digest
from colchis.components.store import Payload, Store, keys, upload_input
from colchis.components.store.record import sealed
from colchis.components.weights.architecture import EMBEDDING, HEAD
from colchis.components.weights.manifest import build, check, describe
from colchis.components.weights.publish import base_manifest, publish, read_manifest
from colchis.components.weights.scan import CHUNK_BYTES, scan
from tests.weights.models import RUN, arrays_of, bytes_of, config_of, serialize, write_model, write_weights

MODEL = "0" * 64


def manifest_of(path: Path, **changes: Any) -> WeightsManifest:
    fields: dict[str, Any] = {"run": RUN, "version": 0, "base_version": None, "kind": "full", "model": MODEL, "step": 0}
    payload = Payload.of("weights/x", "runs/x/weights/x", path.read_bytes())
    return build(files=[(payload, path)], **{**fields, **changes})


def changed(manifest: WeightsManifest, **fields: Any) -> WeightsManifest:
    """Other content, consistent again: what a wrong trainer could publish."""
    document = {**manifest.model_dump(), **fields}
    document["weights_digest"] = weights_digest(TensorEntry.model_validate(t) for t in document["tensors"])
    return WeightsManifest.model_validate(document)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "model.safetensors"
    write_weights(path, arrays_of(config_of(), 1))
    return path


def test_digest_is_the_documented_one(path: Path) -> None:
    """Catches a digest that depends on files, order or header: two trainers would disagree about equal weights."""
    arrays = arrays_of(config_of(), 1)
    lines = [
        f"{name}\tF32\t{','.join(map(str, a.shape))}\t{hashlib.sha256(bytes_of(a, 'F32')).hexdigest()}\n"
        for name, a in sorted(arrays.items())
    ]
    assert manifest_of(path).weights_digest == hashlib.sha256("".join(lines).encode()).hexdigest()


def test_digest_ignores_the_split_into_files(tmp_path: Path, path: Path) -> None:
    arrays = arrays_of(config_of(), 1)
    names = sorted(arrays)
    halves = [tmp_path / "model-1.safetensors", tmp_path / "model-2.safetensors"]
    write_weights(halves[0], {n: arrays[n] for n in names[::2]})
    write_weights(halves[1], {n: arrays[n] for n in names[1::2]})
    assert weights_digest(describe(halves)) == manifest_of(path).weights_digest


@given(st.data())
@settings(max_examples=40, deadline=None)
def test_any_flipped_bit_changes_the_digest(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """Catches a hash that skips bytes (a chunk border, the last byte)."""
    folder = tmp_path_factory.mktemp("bits")
    write_weights(folder / "a.safetensors", {"x": np.ones(3, np.float32), "y": np.zeros((2, 2), np.float32)})
    raw = bytearray((folder / "a.safetensors").read_bytes())
    position = data.draw(st.integers(len(raw) - 28, len(raw) - 1))
    raw[position] ^= 1
    (folder / "b.safetensors").write_bytes(raw)
    assert weights_digest(describe([folder / "a.safetensors"])) != weights_digest(describe([folder / "b.safetensors"]))


@pytest.mark.parametrize(
    ("dtype", "bits", "finite"),
    [
        ("F32", struct.pack("<f", float("nan")), False),
        ("F32", struct.pack("<f", float("-inf")), False),
        ("F32", struct.pack("<f", 3.4e38), True),
        ("F32", struct.pack("<I", 0x7F7FFFFF), True),
        ("BF16", struct.pack("<H", 0x7FC0), False),
        ("BF16", struct.pack("<H", 0xFF80), False),
        ("BF16", struct.pack("<H", 0x7F7F), True),
        ("F16", struct.pack("<H", 0x7C00), False),
        ("F16", struct.pack("<H", 0x7BFF), True),
    ],
)
def test_a_number_that_is_not_finite_is_refused(tmp_path: Path, dtype: str, bits: bytes, finite: bool) -> None:
    """Catches NaN in any type: SGLang loads it without complaint and answers token 0 for ever."""
    path = tmp_path / "x.safetensors"
    write_weights(path, {"a.weight": np.ones(7, np.float32)}, dtype)
    raw = bytearray(path.read_bytes())
    raw[len(raw) - len(bits) :] = bits
    path.write_bytes(raw)
    if finite:
        assert describe([path])[0].dtype == dtype
    else:
        with pytest.raises(BadData, match=r"'a\.weight' has 1 infinite or NaN"):
            describe([path])


def test_nan_behind_the_first_chunk_is_found(tmp_path: Path) -> None:
    """Catches a scan that looks at one chunk only, and one that cuts a number in two at a border."""
    array = np.ones(CHUNK_BYTES // 4 * 2 + 3, np.float32)
    array[-1] = np.nan
    path = tmp_path / "x.safetensors"
    write_weights(path, {"a": array})
    with pytest.raises(BadData, match="1 infinite or NaN"):
        describe([path])
    array[-1] = 1.0
    write_weights(path, {"a": array})
    assert describe([path])[0].sha256 == hashlib.sha256(array.tobytes()).hexdigest()


def test_integers_have_no_nan(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(serialize({"a": ("int32", [2], b"\xff" * 8)}))
    assert describe([path])[0].dtype == "I32"


def test_scan_counts_like_numpy(tmp_path: Path) -> None:
    """The exponent test against numpy's own isfinite."""
    rng = np.random.default_rng(0)
    array = rng.integers(0, 1 << 32, 100_000, dtype=np.uint32).view(np.float32)
    path = tmp_path / "x.safetensors"
    write_weights(path, {"a": array})
    from colchis.components.weights.header import read_header

    assert scan(path, read_header(path)[0]).not_finite == int(np.count_nonzero(~np.isfinite(array))) > 0


def test_manifest_that_contradicts_itself_is_refused(path: Path) -> None:
    """Catches a manifest edited by hand: its digest is recomputed from what it lists."""
    document = manifest_of(path).model_dump(mode="json")
    document["tensors"][0]["sha256"] = "0" * 64
    with pytest.raises(ValidationError, match="weights_digest"):
        WeightsManifest.model_validate(document)
    with pytest.raises(BadData, match="cannot be read: run"):
        WeightsManifest.from_bytes(sealed({}), "here")


WHERE = "somewhere"


@pytest.mark.parametrize("name", ["../x.safetensors", "/etc/x.safetensors", "a/b.safetensors", "x.bin", ".safetensors"])
def test_file_name_that_leaves_the_folder_is_refused(path: Path, name: str) -> None:
    """Catches path traversal: a manifest from the store must not choose where the agent writes."""
    good = manifest_of(path)
    files = [good.files[0].model_copy(update={"name": name}).model_dump()]
    tensors = [t.model_copy(update={"file": name}).model_dump() for t in good.tensors]
    with pytest.raises(BadData, match="plain NAME"):
        check(changed(good, files=files, tensors=tensors), where=WHERE, config=config_of(), base=None)


def test_oversize_and_undersize_files_are_refused(path: Path) -> None:
    """Catches an object that would fill the engine's disk, before it is fetched."""
    good = manifest_of(path)
    for size in (good.tensor_bytes() - 1, good.tensor_bytes() + (1 << 30)):
        files = [good.files[0].model_copy(update={"bytes": size}).model_dump()]
        with pytest.raises(BadData, match="bytes, but its tensors have"):
            check(changed(good, files=files), where=WHERE, config=config_of(), base=None)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("tied", [True, False])
def test_complete_models_pass(tmp_path: Path, family: str, tied: bool) -> None:
    """Catches an architecture table that refuses good models (the shapes are compared with transformers' own below)."""
    config = config_of(family, tied=tied)
    write_weights(tmp_path / "m.safetensors", arrays_of(config, 0))
    check(manifest_of(tmp_path / "m.safetensors"), where=WHERE, config=config, base=None)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("bias", [True, False])
def test_shapes_are_those_of_transformers(family: str, bias: bool) -> None:
    """The table against the models themselves, on the meta device."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    from colchis.components.weights.architecture import expected_shapes

    config = config_of(family, tied=False)
    if family != "qwen2":
        config["attention_bias"] = bias
    if family == "llama":
        config["mlp_bias"] = bias
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**config))
    assert expected_shapes(config) == {name: tuple(p.shape) for name, p in model.state_dict().items()}


def test_missing_extra_and_misshapen_tensors_are_refused(path: Path) -> None:
    """Catches what SGLang does not: it accepts missing tensors and dies of wrong shapes."""
    good = manifest_of(path)
    tensors = [t.model_dump() for t in good.tensors]
    name = "model.layers.1.mlp.up_proj.weight"
    with pytest.raises(BadData, match=f"1 tensors are missing, first '{name}'"):
        check(_as(good, [t for t in tensors if t["name"] != name]), where=WHERE, config=config_of(), base=None)
    extra = {**tensors[0], "name": "model.layers.2.mlp.up_proj.weight"}
    with pytest.raises(BadData, match="do not belong"):
        check(_as(good, [*tensors, extra]), where=WHERE, config=config_of(), base=None)
    turned = [{**t, "shape": t["shape"][::-1]} if t["name"] == name else t for t in tensors]
    with pytest.raises(BadData, match=f"'{name}' has shape"):
        check(_as(good, turned), where=WHERE, config=config_of(), base=None)


def _as(manifest: WeightsManifest, tensors: list[dict[str, Any]]) -> WeightsManifest:
    size = sum(t["bytes"] for t in tensors)
    files = [manifest.files[0].model_copy(update={"bytes": size + 1000}).model_dump()]
    return changed(manifest, tensors=tensors, files=files)


def test_a_head_that_is_tied_but_differs_is_refused(tmp_path: Path) -> None:
    """Catches a head that was trained apart: the engine would use the embedding instead."""
    arrays = arrays_of(config_of(), 0)
    path = tmp_path / "m.safetensors"
    write_weights(path, {**arrays, HEAD: arrays[EMBEDDING]})
    check(manifest_of(path), where=WHERE, config=config_of(), base=None)
    write_weights(path, {**arrays, HEAD: arrays[EMBEDDING] + 1})
    with pytest.raises(BadData, match="ties the head"):
        check(manifest_of(path), where=WHERE, config=config_of(), base=None)


def test_v0_is_the_reference_of_unknown_families_and_of_types(tmp_path: Path, path: Path) -> None:
    """Catches a type that changed between versions, and a change of shape in a family that we have no table for."""
    base = manifest_of(path)
    other = tmp_path / "other.safetensors"
    write_weights(other, arrays_of(config_of(), 2), "BF16")
    with pytest.raises(BadData, match="is BF16, in v0 it is F32"):
        check(manifest_of(other, version=1, base_version=0), where=WHERE, config=config_of(), base=base)
    write_weights(other, arrays_of(config_of(vocabulary=51), 2))
    unknown = {**config_of(), "model_type": "mystery"}
    with pytest.raises(BadData, match="has shape"):
        check(manifest_of(other, version=1, base_version=0), where=WHERE, config=unknown, base=base)


def test_publish_is_create_once(store: Store, tmp_path: Path) -> None:
    """Catches two histories of one run: the second content of a version is refused, the first repeated freely."""
    model = write_model(tmp_path / "m", config_of(), 0)
    first = manifest_of(model / "model.safetensors")
    publish(store, first)
    assert publish(store, first) == first
    write_weights(model / "model.safetensors", arrays_of(config_of(), 1))
    with pytest.raises(BadData, match="published with other content"):
        publish(store, manifest_of(model / "model.safetensors"))
    assert read_manifest(store, RUN, 0) == first
    store.delete(keys.weights_manifest(RUN, 0))
    publish(store, first)
    assert read_manifest(store, RUN, 0) == first
    with pytest.raises(BadData, match="no such object"):
        read_manifest(store, RUN, 1)
    store.put(keys.weights_manifest(RUN, 2), first.to_bytes())
    with pytest.raises(BadData, match="this manifest is v0"):
        read_manifest(store, RUN, 2)


def test_v0_is_the_input_itself(store: Store, tmp_path: Path) -> None:
    """Catches a copy of the base model (bytes for nothing), and a type that the configuration does not say."""
    folder = write_model(tmp_path / "m", config_of(), 0, "BF16")
    digest = upload_input(store, folder)
    (tmp_path / "scratch").mkdir()
    with pytest.raises(BadConfig, match="tensors are BF16, the configuration says float32"):
        base_manifest(store, run=RUN, model=digest, dtype="float32", scratch=tmp_path / "scratch")
    manifest = base_manifest(store, run=RUN, model=digest, dtype="bfloat16", scratch=tmp_path / "scratch")
    assert manifest.files[0].key == keys.input_file(digest, "model.safetensors")
    assert manifest.weights_digest == weights_digest(describe([folder / "model.safetensors"]))
