"""The JSON documents of the store: immutable, canonical, and able to tell that they were changed.

Payload is covered by the checksums in a commit; a commit, a summary or a run's record has nothing above it that would
notice a flipped bit or an edit by hand. So every document carries the sha256 of itself.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, ValidationError

from colchis.components.errors import BadData

SEAL = "sha256"
"""The field that holds it: over the canonical bytes of the document without this field."""


class Record(BaseModel):
    """Base of all of them: unknown fields and numbers that are not finite are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    def to_bytes(self) -> bytes:
        """Canonical JSON (sorted keys, UTF-8) with the seal. ValueError for a number that JSON does not have."""
        return sealed(self.model_dump(mode="json"))

    @classmethod
    def from_bytes(cls, data: bytes, where: str) -> Self:
        """Inverse of `to_bytes`. BadData names `where` (a key or a file) and what is wrong with it."""
        try:
            document = json.loads(data, parse_constant=_no_number)
        except ValueError as error:
            raise _unreadable(where, f"not JSON: {error}") from None
        if not isinstance(document, dict):
            raise _unreadable(where, f"a JSON object expected, found {type(document).__name__}")
        stored = document.pop(SEAL, None)
        if stored != (found := _seal(document)):
            raise BadData(
                f"the content has sha256 {found[:12]}, the document says {str(stored)[:12]}",
                where=where,
                hint="it was damaged, or changed by hand; put the original back",
            )
        try:
            return cls.model_validate_json(_canonical(document))
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            field = ".".join(str(part) for part in first["loc"]) or "document"
            raise _unreadable(where, f"{field}: {first['msg']}") from None


def sealed(document: dict[str, Any]) -> bytes:
    """A JSON object as it is stored."""
    return _canonical(document | {SEAL: _seal(document)})


def _canonical(document: dict[str, Any]) -> bytes:
    return (json.dumps(document, sort_keys=True, ensure_ascii=False, allow_nan=False, indent=1) + "\n").encode()


def _seal(document: dict[str, Any]) -> str:
    return hashlib.sha256(_canonical(document)).hexdigest()


def _no_number(name: str) -> float:
    raise ValueError(f"{name} is not a JSON number")


def _unreadable(where: str, what: str) -> BadData:
    return BadData(
        f"cannot be read: {what}", where=where, hint="it was written by another version of Colchis, or changed by hand"
    )
