"""One optimiser step: vote, forward and backward over the micro-batches, check, step."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from colchis.components.config import RunConfig
from colchis.components.records.batch import StepDenominator
from colchis.components.store import Record
from colchis.components.trainer.losses import PolicyTerms, aggregate, kl_to_reference, policy_loss
from colchis.components.trainer.micro_batches import MicroBatch, forward
from colchis.components.trainer.model import local
from colchis.components.trainer.optimiser import Optimiser, global_norm
from colchis.components.trainer.ranks import Vote, count_votes, refuse_together


class StepMetrics(Record):
    """Means are over the trained tokens of the step, over all ranks."""

    step: int
    learning_rate: float
    loss: float
    grad_norm: float
    """Before clipping."""
    tokens: int
    sequences: int
    ratio_mean: float
    ratio_max: float
    clip_fraction: float
    """Share of tokens whose policy term was cut off by the clip."""
    entropy: float
    """In nats, of the distribution that was sampled from."""
    gap_mean: float
    """|trainer's - engine's log-probability| under the version that sampled."""
    gap_max: float
    kl: float | None
    """k3 estimate against the reference; None without one."""


def optimiser_step(
    model: nn.Module,
    optimiser: Optimiser,
    micro_batches: Sequence[MicroBatch],
    denominator: StepDenominator,
    config: RunConfig,
    *,
    rate: float,
) -> tuple[StepMetrics, list[Vote]]:
    """Make one step, or none: BadData names what was not finite or which rank counted differently.

    The ratio's denominator is the trainer's own log-probability before the iteration's first step (`old`), never the
    engine's: a gap between the two programs is measured and reported, not trained on. With one step per iteration
    `old` is the present log-probability, and no second forward pass is needed.
    """
    assert isinstance(model, FSDPModule)
    algorithm = config.algorithm
    votes = count_votes(
        denominator,
        micro_batches,
        aggregation=algorithm.aggregation,
        max_new_tokens=config.rollout.max_new_tokens,
    )
    tally, problem = Tally(), None
    for number, mb in enumerate(micro_batches):
        model.set_requires_gradient_sync(number == len(micro_batches) - 1)  # reduce once per step
        logprobs, entropies = forward(model, mb, temperature=config.rollout.temperature)  # float32 [N], [N]
        old = logprobs.detach() if mb.old is None else mb.old
        terms = policy_loss(
            logprobs,
            old,
            mb.advantages,
            clip_low=algorithm.clip_low,
            clip_high=algorithm.clip_high,
            dual_clip=algorithm.dual_clip,
        )
        losses, kl = terms.losses, None
        if mb.reference is not None:
            kl = kl_to_reference(logprobs, mb.reference)
            losses = losses + algorithm.kl_coefficient * kl
        share = aggregate(losses, mb.sequence_tokens, aggregation=algorithm.aggregation, divisor=denominator.divisor)
        problem = problem or _not_finite(model, mb, logprobs, old, terms, kl, share)
        torch.autograd.backward(
            share
        )  # also after a problem, so that the ranks' collectives still match; then all refuse
        tally.add(share, old - mb.behaviour, entropies, terms, kl)
    gradients = optimiser.gradients()
    norm = global_norm(gradients)
    if problem is None and not math.isfinite(norm):
        problem = _not_finite_gradient(gradients, norm)
    refuse_together(denominator.step, problem)
    optimiser.step(gradients, norm=norm, rate=rate)
    return tally.metrics(denominator, grad_norm=norm, rate=rate), votes


def _not_finite(
    model: nn.Module,
    mb: MicroBatch,
    logprobs: Tensor,
    old: Tensor,
    terms: PolicyTerms,
    kl: Tensor | None,
    share: Tensor,
) -> str | None:
    """The first term, in the order in which the loss is computed, that is not finite, and the token it belongs to."""
    named: list[tuple[str, Tensor | None]] = [
        ("log-probability under the policy", logprobs),
        ("log-probability before the first step", old),
        ("log-probability under the reference", mb.reference),
        ("behaviour log-probability", mb.behaviour),
        ("advantage", mb.advantages),
        ("importance ratio", terms.ratios),
        ("policy loss", terms.losses),
        ("KL to the reference", kl),
    ]
    for name, values in named:
        if values is not None and not bool(torch.isfinite(values).all()):
            index = int((~torch.isfinite(values)).nonzero()[0])
            return f"{name} is {values[index].item()} at {mb.place_of(index)}{_broken_weight(model)}"
    if not bool(torch.isfinite(share)):
        return f"the loss of a micro-batch is {share.item()}: its sum over {mb.tokens} tokens overflows"
    return None


def _broken_weight(model: nn.Module) -> str:
    for name, p in model.named_parameters():
        if not bool(torch.isfinite(local(p)).all()):
            return f"; weight '{name}' is not finite"
    return ""


def _not_finite_gradient(gradients: Mapping[str, Tensor], norm: float) -> str:
    names = [name for name, g in gradients.items() if not bool(torch.isfinite(g).all())]
    if not names:
        return f"the gradient norm is {norm}: finite gradients on this rank, another rank's or their squares overflow"
    return f"the gradient of '{names[0]}' is not finite ({len(names)} of {len(gradients)} tensors); the loss is finite"


@dataclass
class Tally:
    """Sums and maxima over the trained tokens of a step."""

    sums: Tensor = field(default_factory=lambda: torch.zeros(7, dtype=torch.float64))
    """loss, tokens, ratios, clipped, entropies, gaps, kl"""
    maxima: Tensor = field(default_factory=lambda: torch.zeros(2, dtype=torch.float64))
    """ratio, gap"""
    has_reference: bool = False

    def add(self, share: Tensor, difference: Tensor, entropies: Tensor, terms: PolicyTerms, kl: Tensor | None) -> None:
        gaps, ratios = difference.abs(), terms.ratios
        self.has_reference = self.has_reference or kl is not None
        kl_sum = kl.detach().sum() if kl is not None else torch.zeros(())
        parts = (share.detach(), torch.tensor(ratios.numel()), ratios.sum(), terms.clipped.sum(), entropies.sum())
        self.sums += torch.stack([p.double() for p in (*parts, gaps.sum(), kl_sum)])
        if ratios.numel():
            self.maxima = torch.maximum(self.maxima, torch.stack([ratios.max(), gaps.max()]).double())

    def metrics(self, denominator: StepDenominator, *, grad_norm: float, rate: float) -> StepMetrics:
        """A collective: sums and maxima over all ranks."""
        dist.all_reduce(self.sums)
        dist.all_reduce(self.maxima, op=dist.ReduceOp.MAX)
        loss, tokens, ratios, clipped, entropies, gaps, kl = self.sums.tolist()
        ratio_max, gap_max = self.maxima.tolist()
        return StepMetrics(
            step=denominator.step,
            learning_rate=rate,
            loss=loss,
            grad_norm=grad_norm,
            tokens=int(tokens),
            sequences=denominator.sequences,
            ratio_mean=ratios / tokens,
            ratio_max=ratio_max,
            clip_fraction=clipped / tokens,
            entropy=entropies / tokens,
            gap_mean=gaps / tokens,
            gap_max=gap_max,
            kl=kl / tokens if self.has_reference else None,
        )
