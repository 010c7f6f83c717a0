"""The plan of an iteration: which optimiser step, rank and micro-batch trains each sample.

It depends on ids and lengths only, never on the order in which samples arrived, so a repeated batch stage makes the
same plan, and the trainer only follows it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from colchis.components.errors import BadData


@dataclass(frozen=True, slots=True)
class Place:
    """Where a sample is trained within its optimiser step; `position` is its order in the micro-batch."""

    rank: int
    micro_batch: int
    position: int


@dataclass(frozen=True, slots=True)
class StepPlan:
    """Places by id. Every rank runs `micro_batches` passes, also one that was given fewer."""

    places: Mapping[str, Place]
    micro_batches: int


def steps_of_groups(groups: Sequence[int], steps: int) -> dict[int, int]:
    """group -> optimiser step: contiguous parts in ascending order of groups, sizes differ by at most one.
    Fewer groups than steps make fewer steps; no step is ever empty."""
    parts = min(steps, len(groups))
    return {group: i * parts // len(groups) for i, group in enumerate(sorted(groups))}


def plan_step(lengths: Mapping[str, int], *, budget_tokens: int, ranks: int) -> StepPlan:
    """First-fit decreasing: `lengths` (id -> tokens, prompt included) into micro-batches of at most `budget_tokens`.

    Samples of equal length stand next to each other, which the trainer's attention turns into one call. The number of
    micro-batches is a multiple of `ranks` where splitting allows it; otherwise some rank has less to do.
    BadData names a sample that is longer than the budget.
    """
    order = sorted(lengths, key=lambda name: (-lengths[name], name))
    if order and lengths[order[0]] > budget_tokens:
        raise BadData(
            f"trajectory '{order[0]}' has {lengths[order[0]]} tokens, more than a micro-batch may hold "
            f"(trainer.micro_batch_tokens: {budget_tokens})",
            hint="raise trainer.micro_batch_tokens or lower rollout.max_new_tokens",
        )
    packs: list[list[str]] = []
    free: list[int] = []
    for name in order:
        fits = next((i for i, room in enumerate(free) if room >= lengths[name]), None)
        if fits is None:
            packs.append([])
            free.append(budget_tokens)
            fits = len(packs) - 1
        packs[fits].append(name)
        free[fits] -= lengths[name]
    _split_until_even(packs, lengths, ranks)
    places = {
        name: Place(rank=pack % ranks, micro_batch=pack // ranks, position=position)
        for pack, names in enumerate(packs)
        for position, name in enumerate(names)
    }
    return StepPlan(places, micro_batches=-(-len(packs) // ranks))


def _split_until_even(packs: list[list[str]], lengths: Mapping[str, int], ranks: int) -> None:
    """Split the fullest packs until every rank gets equally many, or until nothing is left to split."""
    while len(packs) % ranks:
        fullest = max(
            (i for i, names in enumerate(packs) if len(names) > 1),
            key=lambda i: (sum(lengths[name] for name in packs[i]), -i),
            default=None,
        )
        if fullest is None:
            return
        names = packs[fullest]
        packs[fullest] = names[::2]
        packs.append(names[1::2])
