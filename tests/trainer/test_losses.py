"""Catches: a sign, a swapped clip bound, a dual clip on the wrong side, a denominator of the wrong kind."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from colchis.components.trainer.losses import aggregate, kl_to_reference, policy_loss, token_logprobs

CLIPS = {"clip_low": 0.2, "clip_high": 0.3, "dual_clip": 3.0}

TABLE = [
    # ratio, advantage, loss, clipped; by hand with bounds 0.8 and 1.3 and dual clip 3
    (1.0, 2.0, -2.0, False),
    (1.2, 2.0, -2.4, False),
    (2.0, 2.0, -2.6, True),  # -1.3 * 2
    (0.5, 2.0, -1.0, False),  # the pessimistic branch keeps the ratio
    (1.0, -2.0, 2.0, False),
    (0.5, -2.0, 1.6, True),  # 0.8 * 2
    (2.0, -2.0, 4.0, False),  # no upper clip for a negative advantage
    (5.0, -2.0, 6.0, True),  # but the dual clip, 3 * 2
    (5.0, 0.0, 0.0, False),
]


@pytest.mark.parametrize(("ratio", "advantage", "loss", "clipped"), TABLE)
def test_clipped_surrogate_against_a_table_made_by_hand(
    ratio: float, advantage: float, loss: float, clipped: bool
) -> None:
    old = torch.tensor([-2.0])
    logprobs = (old + math.log(ratio)).requires_grad_()
    terms = policy_loss(logprobs, old, torch.tensor([advantage]), **CLIPS)
    assert terms.losses.item() == pytest.approx(loss, abs=1e-6)
    assert terms.ratios.item() == pytest.approx(ratio)
    assert terms.clipped.item() is clipped
    terms.losses.sum().backward()
    gradient = 0.0 if clipped else -ratio * advantage  # d(-r A)/d log p
    assert logprobs.grad is not None
    assert logprobs.grad.item() == pytest.approx(gradient, abs=1e-5)


def test_without_a_dual_clip_negative_advantages_are_unbounded() -> None:
    terms = policy_loss(
        torch.tensor([math.log(50.0)]),
        torch.zeros(1),
        torch.tensor([-1.0]),
        clip_low=0.2,
        clip_high=0.2,
        dual_clip=None,
    )
    assert terms.losses.item() == pytest.approx(50.0)
    assert not terms.clipped.item()


def test_a_diverged_ratio_stays_finite() -> None:
    terms = policy_loss(torch.tensor([0.0]), torch.tensor([-500.0]), torch.tensor([-1.0]), **CLIPS)
    assert terms.losses.item() == pytest.approx(3.0)


@pytest.mark.parametrize(
    ("aggregation", "divisor", "expected"),
    # two sequences: losses (4) and (1, 2, 3); max_new_tokens 5
    [("token-mean", 4, 10 / 4), ("sequence-mean", 2, (4 + 2) / 2), ("constant", 2 * 5, 10 / 10)],
)
def test_aggregations_against_a_table_made_by_hand(aggregation: str, divisor: float, expected: float) -> None:
    losses, lengths = torch.tensor([4.0, 1.0, 2.0, 3.0]), torch.tensor([1.0, 3.0, 3.0, 3.0])
    assert aggregate(losses, lengths, aggregation=aggregation, divisor=divisor).item() == pytest.approx(expected)
    parts = [
        aggregate(losses[part], lengths[part], aggregation=aggregation, divisor=divisor)
        for part in (slice(0, 1), slice(1, 4))
    ]
    assert sum(p.item() for p in parts) == pytest.approx(expected)


@given(st.floats(-30, 0), st.floats(-30, 0))
@example(0.0, -5.970374202355636e-16)  # exp(d) - d - 1 rounds to -1e-16
def test_k3_follows_its_formula_and_is_never_negative(p: float, q: float) -> None:
    kl = kl_to_reference(torch.tensor([p], dtype=torch.float64), torch.tensor([q], dtype=torch.float64)).item()
    assert kl >= 0
    assert kl == pytest.approx(math.exp(min(max(q - p, -20), 20)) - min(max(q - p, -20), 20) - 1, rel=1e-12, abs=1e-9)


def test_log_probabilities_are_those_of_the_sampled_distribution() -> None:
    logits, temperature = torch.tensor([[1.0, 2.0, 4.0]]), 2.0
    scaled = [math.exp(x / temperature) for x in (1, 2, 4)]
    p = [x / sum(scaled) for x in scaled]
    logprobs, entropies = token_logprobs(logits, torch.tensor([1]), temperature)
    assert logprobs.item() == pytest.approx(math.log(p[1]))
    assert entropies.item() == pytest.approx(-sum(x * math.log(x) for x in p))


def test_a_word_that_cannot_be_sampled_leaves_the_entropy_finite() -> None:
    logits = torch.tensor([[0.0, 0.0, -math.inf]])
    logprobs, entropies = token_logprobs(logits, torch.tensor([0]), 1.0)
    assert logprobs.item() == pytest.approx(math.log(0.5))
    assert entropies.item() == pytest.approx(math.log(2))
