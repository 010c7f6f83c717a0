"""Which policy versions may draw the tokens of an answer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from colchis.components.weights import labels


@dataclass(frozen=True, slots=True)
class Wanted:
    """The versions that a request accepts: one, or one and everything newer.

    An engine doesn't know of it (SGLang ignores fields that it does not know), so every answer is held against it.
    """

    oldest: int
    newest: int | None

    @classmethod
    def exactly(cls, version: int) -> Self:
        return cls(version, version)

    @classmethod
    def at_least(cls, version: int) -> Self:
        return cls(version, None)

    def accepts(self, version: int | None) -> bool:
        """None, an engine without a version of ours, is never accepted."""
        return version is not None and version >= self.oldest and (self.newest is None or version <= self.newest)

    def read(self, label: str) -> int | None:
        """The version that an engine's label names, if it is accepted."""
        version = labels.proven_version(label)
        return version if self.accepts(version) else None

    def __str__(self) -> str:
        return f"version {self.oldest}" + ("" if self.newest == self.oldest else " or newer")
