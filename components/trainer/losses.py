"""The loss, as written in the papers. Shapes: T tokens of a micro-batch, N of them trained, V words.

Only trained tokens get here: micro-batches select them by index, so that a NaN or -inf at a masked place has no path
to the loss (0 * NaN would be NaN).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

LOG_RATIO_LIMIT = 20.0
"""exp(20) is far beyond every clip; the limit keeps a diverged ratio finite, as verl and OpenRLHF do."""


def token_logprobs(logits: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """logits [N, V], targets int64 [N] -> log-probabilities float32 [N], entropies float32 [N] (without gradient).

    Of the distribution that was sampled from: softmax(logits / temperature).
    """
    logprobs = (logits.float() / temperature).log_softmax(dim=-1)  # [N, V]
    with torch.no_grad():
        entropies = torch.special.entr(logprobs.exp()).sum(dim=-1)  # [N]
    return logprobs.gather(-1, targets[:, None]).squeeze(-1), entropies


@dataclass(frozen=True, slots=True)
class PolicyTerms:
    """Per trained token. `losses` carries the gradient."""

    losses: Tensor
    """float32 [N]"""
    ratios: Tensor
    """float32 [N] pi(token) / pi_old(token)"""
    clipped: Tensor
    """bool [N] the clip binds: no gradient from this token's policy term"""


def policy_loss(
    logprobs: Tensor, old: Tensor, advantages: Tensor, *, clip_low: float, clip_high: float, dual_clip: float | None
) -> PolicyTerms:
    """PPO's clipped surrogate (arXiv 1707.06347) with separate bounds (DAPO, arXiv 2503.14476) and a dual clip for
    negative advantages (arXiv 1912.09729). All arguments float32 [N].

    r = exp(logprobs - old)
    loss = max(-r A, -clip(r, 1 - clip_low, 1 + clip_high) A);  where A < 0: min(loss, -dual_clip A)
    """
    ratios = (logprobs - old).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    free = -ratios * advantages
    bounded = -ratios.clamp(1 - clip_low, 1 + clip_high) * advantages
    losses = torch.maximum(free, bounded)
    clipped = bounded > free
    if dual_clip is not None:
        ceiling = -dual_clip * advantages
        beyond = (advantages < 0) & (losses > ceiling)
        losses = torch.where(beyond, ceiling, losses)
        clipped = clipped | beyond
    return PolicyTerms(losses, ratios.detach(), clipped)


def kl_to_reference(logprobs: Tensor, reference: Tensor) -> Tensor:
    """k3 estimate of KL(policy || reference) per token, float32 [N]: exp(d) - 1 - d with d = reference - logprobs.
    Never negative, also after rounding (Schulman, "Approximating KL divergence", 2020)."""
    d = (reference - logprobs).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return torch.expm1(d) - d


def aggregate(losses: Tensor, sequence_tokens: Tensor, *, aggregation: str, divisor: float) -> Tensor:
    """losses float32 [N] -> this micro-batch's share of the step's loss, a scalar.

    `divisor` is the step's global denominator (denominators.json), so shares add up to the same loss however samples
    are spread over ranks and micro-batches. `sequence_tokens` float32 [N]: trained tokens of each token's sequence.

    token-mean     sum of losses / trained tokens                      (DAPO)
    sequence-mean  sum over sequences of their mean loss / sequences   (GRPO)
    constant       sum of losses / (sequences * max_new_tokens)        (Dr. GRPO)
    """
    if aggregation == "sequence-mean":
        losses = losses / sequence_tokens
    return losses.sum() / divisor
