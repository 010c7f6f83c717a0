"""Keys and tokens as people put them into files and Secrets."""

from __future__ import annotations

import pytest

from colchis.components.credentials import credential
from colchis.components.errors import BadConfig

VARIABLE = "COLCHIS_ENGINE_KEY"


@pytest.mark.parametrize("value", ["the-key", "the-key\n", "  the-key\r\n"])
def test_space_around_it_is_no_part_of_it(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    """Fault: a Secret made of a file ends in a newline, which no header can have; httpx tells it in its error, key and all."""
    monkeypatch.setenv(VARIABLE, value)
    assert credential(VARIABLE) == "the-key"


def test_none_is_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    assert credential(VARIABLE) == ""


@pytest.mark.parametrize("value", ["two words", "schlüssel", "a\nb", "a\x7fb"])
def test_what_no_header_can_have_is_refused_and_not_shown(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv(VARIABLE, value)
    with pytest.raises(BadConfig, match=f"{VARIABLE} has characters") as refused:
        credential(VARIABLE)
    assert value not in str(refused.value)
