"""How far an engine's log-probabilities are from the trainer's, and how far they may be."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

LARGEST = 25.0
"""A single token's gap may be so many times as large as the average: rounding meets unlikely tokens hardest."""


@dataclass(frozen=True)
class Gap:
    """Over all tokens that were compared, in natural logarithms."""

    mean: float
    largest: float

    @classmethod
    def of(cls, found: Sequence[Sequence[float]], expected: Sequence[Sequence[float]]) -> Gap:
        """Two lists of sequences of equal lengths, with at least one token."""
        gaps = [
            abs(a - b) for ours, theirs in zip(found, expected, strict=True) for a, b in zip(ours, theirs, strict=True)
        ]
        return cls(sum(gaps) / len(gaps), max(gaps))

    def excess(self, tolerance: float) -> str | None:
        """What is wrong with it, where `tolerance` is what it may be on average; None when nothing is."""
        if self.mean <= tolerance and self.largest <= LARGEST * tolerance:
            return None
        return (
            f"differ by {self.mean:.2g} on average and by up to {self.largest:.2g}, "
            f"tolerated are {tolerance:g} and {LARGEST * tolerance:g}"
        )
