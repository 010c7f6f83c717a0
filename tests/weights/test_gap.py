"""What engine and trainer may differ by."""

from __future__ import annotations

import math

import pytest

from colchis.components.weights.gap import Gap


def test_mean_and_largest_are_over_all_tokens() -> None:
    gap = Gap.of([[-1.0, -2.0], [-3.0]], [[-1.1, -2.0], [-2.8]])
    assert gap.mean == pytest.approx(0.1)
    assert gap.largest == pytest.approx(0.2)


@pytest.mark.parametrize(
    ("mean", "largest", "passes"),
    [(0.02, 0.5, True), (0.021, 0.1, False), (0.01, 0.51, False), (math.nan, 0.1, False), (0.01, math.nan, False)],
)
def test_either_may_be_too_large(mean: float, largest: float, passes: bool) -> None:
    """Fault: a policy that is off on every token, by less than the rounding of one; and numbers that are none."""
    excess = Gap(mean, largest).excess(0.02)
    assert (excess is None) == passes
    if excess is not None:
        assert "tolerated are 0.02 and 0.5" in excess


def test_what_cannot_be_compared_is_refused() -> None:
    with pytest.raises(ValueError, match=r"shorter|longer"):
        Gap.of([[-1.0]], [[-1.0, -2.0]])
