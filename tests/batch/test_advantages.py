"""Catches: another ddof, an epsilon in a divisor, one-pass variance, positions instead of members, lost huge rewards."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from colchis.components.batch.advantages import advantages, baseline
from colchis.components.errors import BadData, Bug

TABLE = [
    # estimator, scores, advantages, computed by hand
    ("grpo", [1, 0, 0, 0], [1.5, -0.5, -0.5, -0.5]),  # mean 1/4, std sqrt((9+1+1+1)/16/3) = 1/2
    ("dr_grpo", [1, 0, 0, 0], [0.75, -0.25, -0.25, -0.25]),
    ("rloo", [1, 0, 0, 0], [1.0, -1 / 3, -1 / 3, -1 / 3]),  # 1 - 0; 0 - 1/3
    ("grpo", [0, 1], [-math.sqrt(0.5), math.sqrt(0.5)]),
    ("dr_grpo", [0, 1], [-0.5, 0.5]),
    ("rloo", [0, 1], [-1.0, 1.0]),
    ("grpo", [1, 2, 6], [-2 / math.sqrt(7), -1 / math.sqrt(7), 3 / math.sqrt(7)]),  # mean 3, var (4+1+9)/2
    ("dr_grpo", [1, 2, 6], [-2.0, -1.0, 3.0]),
    ("rloo", [1, 2, 6], [1 - 4, 2 - 3.5, 6 - 1.5]),
    ("grpo", [0.0] + [0.95] * 7, [-7 / math.sqrt(8)] + [1 / math.sqrt(8)] * 7),  # -2075 by a one-pass fp32 variance
    ("grpo", [1e300, -1e300, 0], [1.0, -1.0, 0.0]),  # squares overflow
    ("dr_grpo", [1e300, -1e300, 0], [1e300, -1e300, 0.0]),
    ("grpo", [1e-300, 0], [math.sqrt(0.5), -math.sqrt(0.5)]),  # squares underflow
]


@pytest.mark.parametrize(("estimator", "scores", "expected"), TABLE)
def test_estimators_against_a_table_made_by_hand(estimator: str, scores: list[float], expected: list[float]) -> None:
    np.testing.assert_allclose(advantages(estimator, baseline(scores)), expected, rtol=1e-12)


def test_mean_and_spread_of_a_group() -> None:
    base = baseline([1, 2, 6])
    assert (base.mean, base.spread, base.relative) == pytest.approx((3.0, math.sqrt(7), math.sqrt(7) / 3))


@pytest.mark.parametrize(
    "scores", [[0.95] * 7, [0.1] * 1000, [1.0, 1.0 + 1e-7, 1.0], [1e16, 1e16 + 2], [-5e9, -5e9 + 1], [0.0, 0.0], [3.0]]
)
def test_spread_of_equal_scores_carries_no_signal(scores: list[float]) -> None:
    """Relative to max(1, |mean|): rounding of equal rewards, and small differences of huge ones."""
    assert baseline(scores).relative < 1e-6


def test_group_of_one_has_no_spread_and_never_a_nan() -> None:
    base = baseline([0.7])
    assert (base.mean, base.spread) == (0.7, 0.0)
    with pytest.raises(Bug, match="without spread"):
        advantages("grpo", base)
    with pytest.raises(Bug, match="two valid members"):
        advantages("rloo", base)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_score_that_is_no_number_is_refused(bad: float) -> None:
    with pytest.raises(BadData, match="finite"):
        baseline([1.0, bad])


def test_overflowing_advantages_are_refused() -> None:
    with pytest.raises(BadData, match="overflow"):
        advantages("rloo", baseline([1.7e308, -1.7e308]))


scores = st.lists(st.floats(-1e6, 1e6), min_size=2, max_size=20).filter(lambda r: baseline(r).relative > 1e-3)


@given(scores)
def test_z_scores_are_bounded_centred_and_of_unit_variance(r: list[float]) -> None:
    a = advantages("grpo", baseline(r))
    n = len(r)
    assert np.abs(a).max() <= (n - 1) / math.sqrt(n) * (1 + 1e-9)
    assert abs(a.sum()) < 1e-9
    assert a.var(ddof=1) == pytest.approx(1.0)


@given(scores, st.randoms(use_true_random=False))
def test_members_keep_their_advantage_in_any_order(r: list[float], shuffle) -> None:  # type: ignore[no-untyped-def]
    order = list(range(len(r)))
    shuffle.shuffle(order)
    for estimator in ("grpo", "dr_grpo", "rloo"):
        straight = advantages(estimator, baseline(r))
        shuffled = advantages(estimator, baseline([r[i] for i in order]))
        np.testing.assert_allclose(shuffled, straight[order], rtol=1e-9, atol=1e-9)


@given(scores)
def test_rloo_compares_with_the_mean_of_the_others(r: list[float]) -> None:
    expected = [x - (sum(r) - x) / (len(r) - 1) for x in r]
    np.testing.assert_allclose(advantages("rloo", baseline(r)), expected, rtol=1e-6, atol=1e-6)
