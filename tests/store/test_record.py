"""JSON documents that notice that they were changed."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import Field, JsonValue

from colchis.components.errors import BadData
from colchis.components.store.record import Record, sealed


class Note(Record):
    format: int = 1
    text: str = ""
    values: dict[str, JsonValue] = Field(default_factory=dict)


json_values: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(st.builds(Note, text=st.text(), values=st.dictionaries(st.text(), json_values, max_size=4)))
def test_a_record_reads_back_as_it_was(note: Note) -> None:
    """Fault: a seal that depends on how a number or a character is written, so that sound documents are refused."""
    assert Note.from_bytes(note.to_bytes(), "k") == note


@given(st.integers(0), st.integers(0, 7))
def test_no_flipped_bit_goes_unnoticed(place: int, bit: int) -> None:
    """Fault: a damaged commit that decides. A flip in white space changes nothing and is allowed."""
    note = Note(text="version 12", values={"version": 12, "digest": "ab"})
    body = bytearray(note.to_bytes())
    body[place % len(body)] ^= 1 << bit
    with contextlib.suppress(BadData):
        assert Note.from_bytes(bytes(body), "k") == note


def test_an_edit_by_hand_is_named() -> None:
    """Fault: an edited number that the next stage believes."""
    document = json.loads(Note(values={"version": 12}).to_bytes())
    document["values"]["version"] = 13
    with pytest.raises(BadData, match=r"the content has sha256 .*, the document says .*\[k\].*changed by hand"):
        Note.from_bytes(json.dumps(document).encode(), "k")
    with pytest.raises(BadData, match="the document says None"):
        Note.from_bytes(b'{"format": 1}', "k")


def test_a_sound_document_of_another_kind_names_the_field() -> None:
    """Fault: a document of a later release, read as if it were ours."""
    with pytest.raises(BadData, match=r"cannot be read: surprise: .*\[k\]; it was written by another version"):
        Note.from_bytes(sealed({"surprise": 1}), "k")
