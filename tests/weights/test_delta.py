"""Deltas: bit for bit the full version, small when little changed, and never believed."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from colchis.components.errors import BadData
from colchis.components.weights import delta
from colchis.components.weights.delta import Encoding, apply, encode, read_index
from colchis.components.weights.header import ITEM_BYTES

BASE, RESULT = "a" * 64, "b" * 64
VERSIONS = {"base_version": 3, "version": 4, "base_digest": BASE, "digest": RESULT}

Tensors = dict[str, tuple[str, tuple[int, ...], bytes]]
"""Name -> (type, shape, bytes)."""


def serialize(tensors: Tensors) -> bytes:
    """A safetensors file with the tensors in just this order, which need not be the library's."""
    header, position = {}, 0
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [position, position + len(data)]}
        position += len(data)
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + b"".join(data for _, _, data in tensors.values())


def write(folder: Path, files: dict[str, Tensors]) -> list[Path]:
    folder.mkdir(parents=True, exist_ok=True)
    for name, tensors in files.items():
        (folder / name).write_bytes(serialize(tensors))
    return [folder / name for name in files]


@dataclass
class Change:
    """Two versions on the disk and the delta between them."""

    base: list[Path]
    new: list[Path]
    delta: Path
    encoded: Any

    def applied(self, folder: Path) -> list[bytes]:
        folder.mkdir(exist_ok=True)
        return [path.read_bytes() for path in apply(self.delta, self.base, folder, base_digest=BASE)]


def change(folder: Path, before: dict[str, Tensors], after: dict[str, Tensors]) -> Change:
    base, new = write(folder / "base", before), write(folder / "new", after)
    return Change(base, new, folder / "delta", encode(base, new, folder / "delta", **VERSIONS))


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several blocks even in a small tensor, whose index alone is larger than it is."""
    monkeypatch.setattr(delta, "BLOCK_BYTES", 256)
    monkeypatch.setattr(delta, "LARGEST_SHARE", 1e9)


@st.composite
def updates(draw: st.DrawFn) -> tuple[dict[str, Tensors], dict[str, Tensors]]:
    """Files of tensors of any bits, and the same with some elements changed."""
    seed = draw(st.integers(0, 2**32 - 1))
    noise = np.random.default_rng(seed)
    before: dict[str, Tensors] = {}
    after: dict[str, Tensors] = {}
    for f in range(draw(st.integers(1, 2))):
        olds: Tensors = {}
        news: Tensors = {}
        for t in range(draw(st.integers(1, 3))):
            dtype = draw(st.sampled_from(["BF16", "F16", "F32", "F64", "U8"]))
            shape = draw(st.sampled_from([(), (0,), (1,), (7,), (3, 5), (33, 17), (2, 0, 3)]))
            size = int(np.prod(shape, dtype=int))
            old = noise.integers(0, 256, size * ITEM_BYTES[dtype], "u1")
            new = old.copy()
            share = draw(st.sampled_from([0.0, 0.001, 0.05, 0.5, 1.0]))
            touched = noise.random(size) < share
            new.reshape(size, ITEM_BYTES[dtype])[touched] = noise.integers(
                0, 256, (int(touched.sum()), ITEM_BYTES[dtype]), "u1"
            )
            olds[f"t{t}"], news[f"t{t}"] = (dtype, shape, old.tobytes()), (dtype, shape, new.tobytes())
        before[f"model-{f}.safetensors"], after[f"model-{f}.safetensors"] = olds, news
    return before, after


@settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(update=updates())
def test_a_delta_makes_the_full_version_byte_for_byte(
    update: Any, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches numbers that are compared as numbers (NaN, -0.0), lost blocks, odd sizes, files that are mixed up."""
    monkeypatch.setattr(delta, "BLOCK_BYTES", 256)
    monkeypatch.setattr(delta, "LARGEST_SHARE", 1e9)  # also where the full files would be taken
    folder = tmp_path_factory.mktemp("delta")
    made = change(folder, *update)
    assert made.applied(folder / "out") == [path.read_bytes() for path in made.new]
    assert made.encoded.bytes == made.delta.stat().st_size


def model(
    elements: int, share: float, seed: int = 0, kind: str = "BF16"
) -> tuple[dict[str, Tensors], dict[str, Tensors]]:
    """One tensor as training leaves it: a share of its elements moved by one unit in the last place."""
    noise = np.random.default_rng(seed)
    item = f"<u{ITEM_BYTES[kind]}"
    old = (noise.standard_normal(elements).astype("<f4").view("<u4") >> (32 - 8 * ITEM_BYTES[kind])).astype(item)
    new = old + (noise.random(elements) < share).astype(item)
    shape = (elements,)
    return (
        {"model.safetensors": {"w": (kind, shape, old.tobytes())}},
        {"model.safetensors": {"w": (kind, shape, new.tobytes())}},
    )


@pytest.mark.parametrize(
    ("share", "encoding", "largest"),
    [
        (0.0, Encoding.SAME, 0.001),
        (0.01, Encoding.SPARSE, 0.03),
        (0.1, Encoding.SPARSE, 0.15),
        (0.9, Encoding.DENSE, 0.3),
    ],
)
def test_the_smallest_form_is_taken(tmp_path: Path, share: float, encoding: Encoding, largest: float) -> None:
    made = change(tmp_path, *model(1_000_000, share))
    assert made.encoded.bytes < largest * made.encoded.full_bytes
    assert made.encoded.changed == pytest.approx(share * 1_000_000, abs=3000)
    (file,) = read_index(made.delta).files
    assert {block.encoding for tensor in file.tensors for block in tensor.blocks} == {encoding}


def test_a_chain_of_deltas_is_the_last_version(tmp_path: Path) -> None:
    """Catches what adds up: each result is the base of the next."""
    current = write(tmp_path / "v0", model(5000, 0)[0])
    for version in range(1, 6):
        tensors = model(5000, 0.02, seed=version)[0]
        dtype, shape, old = "BF16", (5000,), current[0].read_bytes()[-10_000:]
        noise = tensors["model.safetensors"]["w"][2]
        new = bytes(b ^ (n & 1 if i % 97 == version else 0) for i, (b, n) in enumerate(zip(old, noise, strict=True)))
        full = write(tmp_path / f"full{version}", {"model.safetensors": {"w": (dtype, shape, new)}})
        path = tmp_path / f"delta{version}"
        assert encode(current, full, path, **VERSIONS) is not None
        (tmp_path / f"v{version}").mkdir()
        current = apply(path, current, tmp_path / f"v{version}", base_digest=BASE)
        assert current[0].read_bytes() == full[0].read_bytes()


def test_full_files_serve_better(tmp_path: Path) -> None:
    """Another layout, or a version of which nothing is left."""
    before, after = model(100_000, 0.01)
    noise = {"model.safetensors": {"w": ("BF16", (100_000,), random.Random(0).randbytes(200_000))}}
    renamed = {"model.safetensors": {"v": after["model.safetensors"]["w"]}}
    reshaped = {"model.safetensors": {"w": ("BF16", (1000, 100), after["model.safetensors"]["w"][2])}}
    split = {"model-1.safetensors": after["model.safetensors"]}
    for number, other in enumerate((noise, renamed, reshaped, split)):
        made = change(tmp_path / str(number), before, other)
        assert made.encoded is None
        assert not made.delta.exists()


@pytest.fixture
def made(tmp_path: Path, small_blocks: None) -> Change:
    before, after = model(700, 0.05)
    return change(tmp_path, before, after)


def test_a_wrong_base_is_refused_before_anything_is_written(made: Change, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    with pytest.raises(BadData, match=rf"the delta is of v3 with digest {BASE[:12]}, here is cccc"):
        apply(made.delta, made.base, out, base_digest="c" * 64)
    data = bytearray(made.base[0].read_bytes())
    data[-300] ^= 1
    made.base[0].write_bytes(data)
    with pytest.raises(BadData, match=r"tensor 'w': checksum of the base is .*fetch the full version"):
        made.applied(out)
    assert list(out.iterdir()) == []


def test_no_damage_passes(made: Change, tmp_path: Path) -> None:
    """A damaged byte is refused, and nothing of the result stays; or it is one of the few that mean nothing in zstd (which
    the checksum of the whole file, in its payload, still tells), and the result is right."""
    out, right = tmp_path / "out", [path.read_bytes() for path in made.new]
    good, passed = made.delta.read_bytes(), 0
    for position in range(0, len(good), 3):
        made.delta.write_bytes(good[:position] + bytes([good[position] ^ 0x10]) + good[position + 1 :])
        try:
            assert made.applied(out) == right
        except BadData:
            assert list(out.iterdir()) == []
        else:
            passed += 1
            out.joinpath("model.safetensors").unlink()
    assert passed <= 4
    for wrong in (b"x" + good, *(good[:cut] for cut in (0, 7, 8, len(good) // 2, len(good) - 1))):
        made.delta.write_bytes(wrong)
        with pytest.raises(BadData):
            made.applied(out)


def lie(made: Change, **block: Any) -> None:
    """Another index over the same blocks: what a hostile publisher could write, seal and all."""
    index = read_index(made.delta)
    tensor = index.files[0].tensors[0]
    number = next(i for i, b in enumerate(tensor.blocks) if b.encoding is Encoding.SPARSE)
    blocks = [b.model_copy(update=block) if i == number else b for i, b in enumerate(tensor.blocks)]
    tensors = (tensor.model_copy(update={"blocks": tuple(blocks)}),)
    wrong = index.model_copy(update={"files": (index.files[0].model_copy(update={"tensors": tensors}),)}).to_bytes()
    data = made.delta.read_bytes()
    end = len(data) - 8 - int.from_bytes(data[-8:], "little")
    made.delta.write_bytes(data[:end] + wrong + len(wrong).to_bytes(8, "little"))


@pytest.mark.parametrize(
    "block",
    [
        {"changed": 1 << 60},
        {"changed": 127},
        {"gap_bytes": 0},
        {"gap_bytes": 4},
        {"changed": 0},
        {"bytes": 1 << 60},
        {"bytes": 0},
        {"encoding": Encoding.DENSE},
        {"encoding": Encoding.RAW},
        {"encoding": Encoding.SAME},
    ],
)
def test_a_lying_index_is_refused_by_tensor(made: Change, tmp_path: Path, block: dict[str, Any]) -> None:
    """Fault: sizes that are believed and allocated, places outside of the tensor."""
    lie(made, **block)
    with pytest.raises(BadData, match=r"tensor .w.|belong to no tensor"):
        made.applied(tmp_path / "out")
    assert list((tmp_path / "out").iterdir()) == []


def test_memory_is_a_few_blocks(tmp_path: Path) -> None:
    """Two versions of a tensor of 256 MiB, in a process that needs less than half of one more than its imports."""
    script = f"""
import resource
from pathlib import Path
import numpy as np
from colchis.components.weights import delta
delta.BLOCK_BYTES = 4 << 20
folder = Path({str(tmp_path)!r})
text = b'{{"w":{{"dtype":"BF16","shape":[134217728],"data_offsets":[0,268435456]}}}}'
for name, step in (("base", 0), ("new", 1)):
    (folder / name).mkdir()
    with (folder / name / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for part in range(64):
            block = np.full(1 << 21, part, "<u2")
            block[:: 100] += step
            file.write(block.tobytes())
(folder / "out").mkdir()
def peak_mib():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
before = peak_mib()
base, new = ([folder / name / "model.safetensors"] for name in ("base", "new"))
words = dict(base_version=0, version=1, base_digest="a" * 64, digest="b" * 64)
made = delta.encode(base, new, folder / "delta", **words)
assert made is not None and made.changed > 1_000_000, made
delta.apply(folder / "delta", base, folder / "out", base_digest="a" * 64)
assert peak_mib() - before < 120, (before, peak_mib())
"""
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
