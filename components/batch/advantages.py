"""Advantages of one group: what a sample's score says, compared with its siblings.

Everything is float64 in two passes (mean first, then deviations), over the valid members only. One-pass variances in
fp32 turn seven equal rewards of 0.95 into a spread of 5e-4 and an advantage of -2075; here the spread is 0 and the
group is dropped. A spread is never a divisor unless it carries signal, so no epsilon is ever added to it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from colchis.components.errors import BadData, Bug

ROUNDING = 1e-9
"""Relative slack of the bound on |A|."""


@dataclass(frozen=True, slots=True)
class Baseline:
    """Mean and standard deviation (ddof 1) of the valid scores of a group; `relative` = spread / max(1, |mean|)."""

    mean: float
    spread: float
    relative: float
    deviations: NDArray[np.float64]
    """[n] score - mean, divided by `scale`."""
    scale: float
    """A power of two that keeps squares of huge scores finite; dividing by it rounds nothing."""


def baseline(scores: Sequence[float]) -> Baseline:
    """BadData for a score that is not finite; unscored members are left out before."""
    r = np.asarray(scores, dtype=np.float64)
    if not r.size or not np.isfinite(r).all():
        raise BadData(f"scores of a group must be finite numbers, found {list(scores)}")
    largest = float(np.abs(r).max())
    scale = 2.0 ** (math.frexp(largest)[1]) if 0 < largest < 2.0**1023 else 2.0**1023 if largest else 1.0
    x = r / scale
    mean = math.fsum(x) / len(x)
    deviations = x - mean
    spread = math.sqrt(math.fsum(deviations**2) / (len(x) - 1)) if len(x) > 1 else 0.0
    relative = spread / max(1.0 / scale, abs(mean))
    return Baseline(mean * scale, spread * scale, relative, deviations, scale)


def advantages(estimator: str, base: Baseline) -> NDArray[np.float64]:
    """[n] advantages of the valid members, in the order of their scores.

    `grpo`: (r - mean) / std, ddof 1 (DeepSeekMath, arXiv 2402.03300). `dr_grpo`: r - mean (arXiv 2503.20783).
    `rloo`: r - mean of the other members = n/(n-1) * (r - mean) (arXiv 2402.14740).
    The caller has dropped groups without signal. Bug when |A| exceeds (n-1)/sqrt(n), the bound of a z-score;
    BadData when a difference of scores is too large for float64.
    """
    n = len(base.deviations)
    with np.errstate(over="ignore"):  # refused below
        a = _estimate(estimator, base, n)
    if not np.isfinite(a).all():
        raise BadData(
            f"advantages overflow: scores lie {float(np.ptp(base.deviations))} x {base.scale} apart",
            hint="scale the grader's scores down",
        )
    return a


def _estimate(estimator: str, base: Baseline, n: int) -> NDArray[np.float64]:
    match estimator:
        case "grpo":
            if base.spread <= 0:
                raise Bug("advantages of a group without spread were asked for")
            a = base.deviations / (base.spread / base.scale)
            bound = (n - 1) / math.sqrt(n)
            if float(np.abs(a).max()) > bound * (1 + ROUNDING):
                raise Bug(f"advantage {float(np.abs(a).max())} exceeds (n-1)/sqrt(n) = {bound} for n = {n}")
            return a
        case "dr_grpo":
            return base.deviations * base.scale
        case "rloo":
            if n < 2:
                raise Bug("rloo needs two valid members; algorithm.min_valid must be 2 or more")
            return base.deviations * base.scale * (n / (n - 1))
    raise Bug(f"no estimator '{estimator}'")
