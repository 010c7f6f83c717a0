"""The header reader: agrees with the reference library on good files, refuses every lie about a bad one."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from colchis.components.errors import BadData
from colchis.components.weights.header import ITEM_BYTES, read_header
from tests.weights.models import serialize


def write(path: Path, entries: Any, data: bytes, *, header: bytes | None = None, length: int | None = None) -> Path:
    raw = header if header is not None else json.dumps(entries).encode()
    path.write_bytes((len(raw) if length is None else length).to_bytes(8, "little") + raw + data)
    return path


def entry(begin: int, end: int, shape: list[int], dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


shapes = st.dictionaries(
    st.from_regex(r"[a-z]{1,6}(\.[a-z]{1,6}){0,2}", fullmatch=True),
    st.tuples(st.sampled_from(["float32", "bfloat16", "int64", "uint8"]), st.lists(st.integers(0, 4), max_size=3)),
    max_size=6,
)


@given(shapes)
@settings(max_examples=60, deadline=None)
def test_agrees_with_the_reference_library(tmp_path_factory: pytest.TempPathFactory, tensors: Any) -> None:
    """Catches a wrong offset, size or order of bytes: every tensor is found where the library put it."""
    width = {"float32": 4, "bfloat16": 2, "int64": 8, "uint8": 1}
    content = {}
    for number, (name, (dtype, shape)) in enumerate(tensors.items()):
        size = width[dtype]
        for dim in shape:
            size *= dim
        content[name] = (dtype, shape, bytes((number + k) % 251 for k in range(size)))
    path = tmp_path_factory.mktemp("reference") / "x.safetensors"
    raw = serialize(content)
    path.write_bytes(raw)
    spans = read_header(path)
    assert {s.name: list(s.shape) for s in spans} == {n: c[1] for n, c in content.items()}
    for span in spans:
        assert raw[span.start : span.start + span.bytes] == content[span.name][2]


GOOD = {"a": entry(0, 8, [2]), "b": entry(8, 12, [1])}


@pytest.mark.parametrize(
    ("problem", "entries", "data_bytes"),
    [
        ("overlaps", {"a": entry(0, 8, [2]), "b": entry(4, 8, [1])}, 8),
        ("gap", {"a": entry(0, 4, [1]), "b": entry(8, 12, [1])}, 12),
        ("truncated or appended|overlaps|gap", GOOD, 11),
        ("truncated or appended|overlaps|gap", GOOD, 13),
        ("gap", {"a": entry(4, 8, [1])}, 8),
        ("needs 8 bytes", {"a": entry(0, 4, [2])}, 4),
        ("not a list of up to 8 sizes", {"a": entry(0, 4, [-1])}, 4),
        ("not two offsets", {"a": entry(-4, 0, [1])}, 0),
        ("not a list of up to 8 sizes", {"a": entry(0, 4, [True])}, 4),  # type: ignore[list-item]
        ("not a list of up to 8 sizes", {"a": entry(0, 4, [1 << 63, 0])}, 4),
        ("not one of", {"a": entry(0, 4, [1], "F33")}, 4),
        ("expected dtype, shape", {"a": {"dtype": "F32"}}, 0),
        ("not printable", {"a\nb": entry(0, 4, [1])}, 4),
        ("expected an object", [1], 0),
    ],
)
def test_a_lie_is_refused(tmp_path: Path, problem: str, entries: Any, data_bytes: int) -> None:
    """Catches a reader that trusts offsets: it would hash or serve bytes of another tensor."""
    with pytest.raises(BadData, match=problem):
        read_header(write(tmp_path / "x.safetensors", entries, bytes(data_bytes)))


@pytest.mark.parametrize(
    ("length", "header"),
    [(1 << 40, None), (10**9, None), (2, None), (None, b"{"), (None, b"\xff\xfe"), (None, b'{"a":1,"a":2}')],
)
def test_a_header_that_is_no_header_is_refused(tmp_path: Path, length: int | None, header: bytes | None) -> None:
    """Catches an allocation of what the file claims, and a second key that hides the first."""
    with pytest.raises(BadData):
        read_header(write(tmp_path / "x.safetensors", GOOD, bytes(12), header=header, length=length))


@pytest.mark.parametrize("size", [0, 7, 8])
def test_a_stub_is_refused(tmp_path: Path, size: int) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(bytes(size)[:-1] + b"\x01" if size == 8 else bytes(size))
    with pytest.raises(BadData):
        read_header(path)


@given(st.binary(max_size=200))
@settings(max_examples=100, deadline=None)
def test_noise_is_refused_and_never_crashes(tmp_path_factory: pytest.TempPathFactory, noise: bytes) -> None:
    """Catches any exception but BadData (an agent would answer 500 and be restarted)."""
    path = tmp_path_factory.mktemp("noise") / "x.safetensors"
    path.write_bytes(len(noise).to_bytes(8, "little") + noise)
    with contextlib.suppress(BadData):
        assert read_header(path) == []


def test_all_types_of_the_library_are_known() -> None:
    """Catches a type whose size is missing: its file could not be published."""
    for dtype in ("float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool", "float64"):
        raw = serialize({"a": (dtype, [0], b"")})
        assert json.loads(raw[8:])["a"]["dtype"] in ITEM_BYTES
