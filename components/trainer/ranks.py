"""Ranks: the process group of the training processes, and what they have to agree on before a step."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from colchis.components.errors import BadData
from colchis.components.records.batch import StepDenominator
from colchis.components.store import Record
from colchis.components.trainer.micro_batches import MicroBatch

DEADLINE_S = 600.0
"""Longest wait for another rank."""


@contextmanager
def process_group() -> Iterator[None]:
    """The process group that the launcher made, or a gloo group of this process alone.

    One rank goes through the same collectives as many: there is no second code path, and it costs milliseconds.
    """
    if dist.is_initialized():
        yield
        return
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1, timeout=timedelta(seconds=DEADLINE_S))
    try:
        yield
    finally:
        dist.destroy_process_group()


class Vote(Record):
    """What one rank counted in what it was given, beside what denominators.json says about it."""

    step: int
    rank: int
    tokens: int
    sequences: int
    expected_tokens: int
    expected_sequences: int


def count_votes(
    denominator: StepDenominator, micro_batches: Sequence[MicroBatch], *, aggregation: str, max_new_tokens: int
) -> list[Vote]:
    """Recount this rank's micro-batches, exchange the counts, compare all with the commit. A collective.

    Before any gradient exists. BadData names the rank that did not vote or that counts differently, and refuses a zero
    or a divisor that does not follow from the counts. Every rank sees all votes, so all refuse together.
    """
    step, world = denominator.step, dist.get_world_size()
    shares = {share.rank: share for share in denominator.ranks}
    absent = sorted(shares.keys() ^ set(range(world)))
    if absent:
        raise BadData(
            f"step {step}: rank {absent[0]} did not vote: the batch was planned for ranks {sorted(shares)}, "
            f"{world} are training"
        )
    _wait_for_all(step)
    mine = torch.tensor([sum(mb.tokens for mb in micro_batches), sum(mb.sequences for mb in micro_batches)])
    counted = [torch.zeros_like(mine) for _ in range(world)]
    dist.all_gather(counted, mine)
    total = mine.clone()
    dist.all_reduce(total)
    votes = [
        Vote(
            step=step,
            rank=rank,
            tokens=int(tokens),
            sequences=int(sequences),
            expected_tokens=shares[rank].tokens,
            expected_sequences=shares[rank].sequences,
        )
        for rank, (tokens, sequences) in enumerate(c.tolist() for c in counted)
    ]
    for v in votes:
        if (v.tokens, v.sequences) != (v.expected_tokens, v.expected_sequences):
            raise BadData(
                f"step {step}: rank {v.rank} counts {v.tokens} trained tokens in {v.sequences} sequences, "
                f"denominators.json says {v.expected_tokens} in {v.expected_sequences}",
                hint="the batch and its denominators do not belong together; no step was made",
            )
    tokens, sequences = (int(n) for n in total.tolist())
    if (tokens, sequences) != (denominator.tokens, denominator.sequences):
        raise BadData(
            f"step {step}: all ranks together count {tokens} trained tokens in {sequences} sequences, "
            f"denominators.json says {denominator.tokens} in {denominator.sequences}"
        )
    if tokens == 0 or sequences == 0:
        raise BadData(f"step {step}: nothing to train: {tokens} tokens in {sequences} sequences")
    divisor = {"token-mean": tokens, "sequence-mean": sequences, "constant": sequences * max_new_tokens}[aggregation]
    if denominator.divisor != divisor or not math.isfinite(denominator.divisor):
        raise BadData(
            f"step {step}: denominators.json divides by {denominator.divisor}, the counts of all ranks give {divisor} "
            f"for aggregation '{aggregation}'"
        )
    return votes


def refuse_together(step: int, problem: str | None) -> None:
    """BadData on all ranks when any has a `problem`, before the optimiser runs. A collective."""
    flag = torch.tensor([0 if problem is None else 1])
    flags = [torch.zeros_like(flag) for _ in range(dist.get_world_size())]
    dist.all_gather(flags, flag)
    bad = [rank for rank, f in enumerate(flags) if int(f)]
    if problem is not None:
        raise BadData(f"step {step}, rank {dist.get_rank()}: {problem}", hint="no step was made")
    if bad:
        raise BadData(f"step {step}: rank {bad[0]} refuses; its log names the cause", hint="no step was made")


def _wait_for_all(step: int) -> None:
    """A rank that never comes is named, instead of a collective that hangs."""
    if dist.get_world_size() == 1:
        return
    try:
        dist.monitored_barrier(timeout=timedelta(seconds=DEADLINE_S), wait_all_ranks=True)
    except RuntimeError as e:
        raise BadData(f"step {step}: a rank did not vote within {DEADLINE_S:g} s ({e})") from None
