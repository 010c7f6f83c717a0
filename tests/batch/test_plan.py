"""Catches: a sample lost or trained twice, a full micro-batch overfilled, ranks with unequal passes, order dependence."""

from __future__ import annotations

import random
from collections import defaultdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from colchis.components.batch.plan import plan_step, steps_of_groups
from colchis.components.errors import BadData

lengths = st.dictionaries(st.text("abc/0123", min_size=1, max_size=6), st.integers(1, 50), min_size=1, max_size=60)


@given(lengths, st.integers(50, 200), st.integers(1, 4))
def test_every_sample_has_one_place_within_the_budget(lengths: dict[str, int], budget: int, ranks: int) -> None:
    plan = plan_step(lengths, budget_tokens=budget, ranks=ranks)
    assert plan.places.keys() == lengths.keys()
    packs: dict[tuple[int, int], list[str]] = defaultdict(list)
    for name, place in plan.places.items():
        packs[place.rank, place.micro_batch].append(name)
    for names in packs.values():
        assert sum(lengths[name] for name in names) <= budget
        assert sorted(plan.places[name].position for name in names) == list(range(len(names)))
    per_rank = [sum(rank == r for r, _ in packs) for rank in range(ranks)]
    assert max(per_rank) == plan.micro_batches
    if any(len(names) > 1 for names in packs.values()):
        assert min(per_rank) == plan.micro_batches  # only packs of one sample cannot be split to even ranks out


@given(lengths, st.integers(0, 1000))
def test_the_plan_depends_on_ids_and_not_on_arrival(lengths: dict[str, int], seed: int) -> None:
    shuffled = list(lengths.items())
    random.Random(seed).shuffle(shuffled)
    assert plan_step(dict(shuffled), budget_tokens=64, ranks=2) == plan_step(lengths, budget_tokens=64, ranks=2)


def test_packing_fills_gaps() -> None:
    plan = plan_step({"a": 6, "b": 5, "c": 4, "d": 5}, budget_tokens=10, ranks=1)
    assert plan.micro_batches == 2


def test_a_sample_over_the_budget_is_named_with_the_field() -> None:
    with pytest.raises(BadData, match=r"'run/0/7/1' has 65 tokens.*trainer\.micro_batch_tokens: 64"):
        plan_step({"run/0/7/1": 65, "run/0/7/0": 3}, budget_tokens=64, ranks=1)


@given(st.sets(st.integers(0, 1000), min_size=1, max_size=50), st.integers(1, 64))
def test_groups_are_spread_evenly_over_steps(groups: set[int], steps: int) -> None:
    assigned = steps_of_groups(list(groups), steps)
    sizes = [sum(s == step for s in assigned.values()) for step in set(assigned.values())]
    assert assigned.keys() == groups
    assert sorted(set(assigned.values())) == list(range(min(steps, len(groups))))
    assert max(sizes) - min(sizes) <= 1
