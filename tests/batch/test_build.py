"""Catches: not graded taken for zero, a group bound by position, a silent skip, denominators that count the dropped."""

from __future__ import annotations

import math
import random
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace

import pytest

from colchis.components.batch import build_batch
from colchis.components.errors import BadData
from colchis.components.records.batch import Batch, Denominators, TrainingSample, ordered, read_batch
from colchis.components.records.trajectories import SegmentKind, Trajectory
from colchis.components.records.verdicts import Reason, Verdict
from colchis.components.store.record import sealed
from tests.batch.cases import RUN, make_config, make_iteration, make_trajectory, make_verdict

Inputs = tuple[list[Trajectory], list[Verdict]]
SCORES = [[1, 0, 0, 1], [1, 1, 1, 1], [0, None, None, None], [0, 1, None, 1]]
"""One trained group, one without signal, one with too few verdicts, one trained with a member left out."""


def build(inputs: Inputs, iteration: int = 0, **sections) -> Batch:  # type: ignore[no-untyped-def]
    config = make_config(**sections)
    return build_batch(config, run=RUN, iteration=iteration, trajectories=inputs[0], verdicts=inputs[1])


def test_groups_without_signal_or_verdicts_leave_the_batch_and_are_counted() -> None:
    batch = build(make_iteration(SCORES))
    d = batch.denominators
    assert (batch.decision, d.outcomes) == ("trainable", {"trained": 2, "no_signal": 1, "too_few": 1, "no_tokens": 0})
    assert (d.samples, d.valid, d.trained, d.unscored) == (16, 12, 7, {"timeout": 4})
    assert {s.group for s in batch.samples} == {0, 3}
    assert d.reward_mean == pytest.approx(8 / 12)  # over all scored, dropped groups included
    assert [(g.valid, g.step, g.unscored) for g in d.groups] == [
        (4, 0, {}),
        (4, None, {}),
        (1, None, {"timeout": 3}),
        (3, 0, {"timeout": 1}),
    ]


def test_an_unscored_sample_is_no_zero() -> None:
    """The group (0, 1, -, 1) has mean 2/3 and std 1/sqrt(3); with a silent zero it would have mean 1/2."""
    batch = build(make_iteration(SCORES))
    by_sample = {s.sample: s.advantage for s in batch.samples if s.group == 3}
    third = math.sqrt(3) / 3
    assert by_sample == pytest.approx({0: -2 * third, 1: third, 3: third})


@pytest.mark.parametrize(
    ("aggregation", "divisor"),
    [("token-mean", lambda t, s: t), ("sequence-mean", lambda t, s: s), ("constant", lambda t, s: s * 8)],
)
def test_denominators_count_what_is_trained(aggregation: str, divisor: Callable[[int, int], int]) -> None:
    batch = build(make_iteration(SCORES), algorithm={"aggregation": aggregation}, trainer={"steps": 2})
    assert [d.step for d in batch.denominators.steps] == [0, 1]
    for d in batch.denominators.steps:
        mine = [s for s in batch.samples if s.step == d.step]
        tokens = sum(sum(s.loss_mask) for s in mine)
        assert (d.tokens, d.sequences, d.divisor) == (tokens, len(mine), divisor(tokens, len(mine)))
        assert [(r.tokens, r.sequences) for r in d.ranks] == [(tokens, len(mine))]
    assert batch.denominators.trained_tokens == sum(d.tokens for d in batch.denominators.steps)


def test_the_order_of_arrival_changes_no_byte() -> None:
    trajectories, verdicts = make_iteration(SCORES)
    straight = build((trajectories, verdicts), trainer={"steps": 2, "micro_batch_tokens": 24})
    draw = random.Random(1)
    draw.shuffle(trajectories)
    draw.shuffle(verdicts)
    shuffled = build((trajectories, verdicts), trainer={"steps": 2, "micro_batch_tokens": 24})
    assert shuffled.to_parquet() == straight.to_parquet()
    assert shuffled.denominators.to_bytes() == straight.denominators.to_bytes()


def test_an_empty_batch_says_why() -> None:
    batch = build(make_iteration([[1, 1, 1, 1], [None, None, None, 1]]))
    assert (batch.decision, batch.samples, batch.denominators.steps) == ("empty", (), [])
    assert batch.reason == "no group carries signal: 1 no_signal, 1 too_few; unscored: 3 timeout"
    assert read_batch(batch.denominators.to_bytes(), None) == batch
    assert batch.denominators.reward_mean == 1.0


def test_nothing_scored_has_no_mean_reward() -> None:
    batch = build(make_iteration([[None, None]]))
    assert (batch.decision, batch.denominators.reward_mean) == ("empty", None)


def test_rewards_equal_up_to_rounding_are_dropped_and_not_divided_by() -> None:
    batch = build(make_iteration([[0.95, 0.95 + 1e-7, 0.95, 0.95 - 1e-7], [0, 1, 0, 0]]))
    assert batch.denominators.outcomes["no_signal"] == 1
    assert max(abs(s.advantage) for s in batch.samples) <= 1.5


def test_two_turns_train_what_the_model_said() -> None:
    turns = ((SegmentKind.MODEL, (4, 5)), (SegmentKind.TOOL, (6, 7, 8)), (SegmentKind.MODEL, (9,)))
    members = [make_trajectory(sample=k, turns=turns) for k in range(2)]
    batch = build((members, [make_verdict(t, float(k)) for k, t in enumerate(members)]))
    assert batch.denominators.steps[0].tokens == 6
    assert [[t for t, m in zip(s.token_ids, s.loss_mask, strict=True) if m] for s in batch.samples] == [[4, 5, 9]] * 2


def test_a_member_without_model_tokens_counts_in_the_baseline_only() -> None:
    silent = make_trajectory(sample=2, turns=((SegmentKind.ENVIRONMENT, (7,)),))
    members = [make_trajectory(sample=0), make_trajectory(sample=1), silent]
    batch = build((members, [make_verdict(t, score) for t, score in zip(members, (1, 0, 0), strict=True)]))
    assert (batch.denominators.trained, batch.denominators.without_tokens) == (2, 1)
    assert batch.denominators.groups[0].mean == pytest.approx(1 / 3)


def test_a_group_without_model_tokens_is_dropped() -> None:
    members = [make_trajectory(sample=k, turns=((SegmentKind.ENVIRONMENT, (7,)),)) for k in range(2)]
    batch = build((members, [make_verdict(t, float(k)) for k, t in enumerate(members)]))
    assert (batch.decision, batch.denominators.outcomes["no_tokens"]) == ("empty", 1)


def _without_verdict(i: Inputs) -> Inputs:
    return i[0], i[1][1:]


def _doubled(i: Inputs) -> Inputs:
    return [*i[0], i[0][0]], i[1]


def _stranger(i: Inputs) -> Inputs:
    return i[0], [*i[1], make_verdict(make_trajectory(group=77), 1.0)]


def _two_verdicts(i: Inputs) -> Inputs:
    return i[0], [*i[1], make_verdict(i[0][0], 1.0)]


def _other_run(i: Inputs) -> Inputs:
    stranger = make_trajectory(run="other")
    return [*i[0], stranger], [*i[1], make_verdict(stranger, 1.0)]


def _other_prompt(i: Inputs) -> Inputs:
    moved = replace(make_trajectory(group=1, sample=9), group=0)
    return [*i[0], moved], [*i[1], make_verdict(moved, 1.0)]


@pytest.mark.parametrize(
    ("break_inputs", "message"),
    [
        (_without_verdict, "'run/0/100/0' has no verdict: not graded is not zero"),
        (_doubled, "'run/0/100/0' occurs twice"),
        (_stranger, "'run/0/177/0', which this iteration does not have"),
        (_two_verdicts, "'run/0/100/0' has two verdicts"),
        (_other_run, "'other/0/100/0' was given to iteration 0 of run 'run'"),
        (_other_prompt, "'run/0/101/9' answers prompt 101, its group 0 prompt 100"),
    ],
)
def test_inputs_that_do_not_match_are_refused_by_name(break_inputs: Callable[[Inputs], Inputs], message: str) -> None:
    with pytest.raises(BadData, match=message):
        build(break_inputs(make_iteration(SCORES)))


@pytest.mark.parametrize(("version", "lag"), [(2, 1), (4, -1)])
def test_tokens_of_another_version_are_refused_by_name(version: int, lag: int) -> None:
    """Older than max_lag, and newer than the policy: an engine served what it was not declared to serve."""
    stale = make_trajectory(iteration=3, version=version)
    with pytest.raises(BadData, match=rf"'run/3/100/0': 2 trained tokens of v{version}.*found {lag}"):
        build(([stale], [make_verdict(stale, 1.0)]), iteration=3)


def test_lag_is_counted_in_tokens_when_it_is_allowed() -> None:
    config = make_config()
    config = config.model_copy(update={"loop": config.loop.model_copy(update={"max_lag": 2})})
    members = [make_trajectory(iteration=3, sample=k, version=3 - k) for k in range(3)]
    verdicts = [make_verdict(t, float(k)) for k, t in enumerate(members)]
    batch = build_batch(config, run=RUN, iteration=3, trajectories=members, verdicts=verdicts)
    assert batch.denominators.lag_tokens == {"0": 2, "1": 2, "2": 2}
    assert batch.statistics()["lag"] == 2


def test_a_batch_survives_its_files() -> None:
    batch = build(make_iteration(SCORES), trainer={"steps": 2, "micro_batch_tokens": 24})
    again = read_batch(batch.denominators.to_bytes(), batch.to_parquet())
    assert again.denominators == batch.denominators
    assert [s.id for s in again.samples] == [s.id for s in batch.samples]
    assert [s.advantage for s in again.samples] == [s.advantage for s in batch.samples]  # float64, bitwise
    assert [s.token_ids for s in again.samples] == [s.token_ids for s in batch.samples]


def test_files_of_two_iterations_are_refused() -> None:
    one, two = build(make_iteration(SCORES)), build(make_iteration(SCORES, iteration=1), iteration=1)
    with pytest.raises(BadData, match=r"denominators\.json of"):
        read_batch(one.denominators.to_bytes(), two.to_parquet())
    with pytest.raises(BadData, match=r"batch\.parquet was not given"):
        read_batch(one.denominators.to_bytes(), None)
    with pytest.raises(BadData, match="iteration"):
        Denominators.from_bytes(sealed({"format": 1, "run": "r"}), "denominators.json")


def test_a_doubled_place_is_refused() -> None:
    first, second = build(make_iteration(SCORES)).samples[:2]
    with pytest.raises(BadData, match=rf"'{second.id}' or its place"):
        ordered([first, replace(second, position=first.position)])


@pytest.mark.parametrize("value", [math.nan, -math.inf])
def test_a_log_probability_that_is_no_number_matters_only_where_it_is_trained(value: float) -> None:
    sample = build(make_iteration(SCORES)).samples[0]
    first = sample.loss_mask.index(True)
    masked = [value] * first + sample.logprobs[first:]
    assert replace(sample, logprobs=masked).trained_tokens == sample.trained_tokens
    trained = [*sample.logprobs[:first], value, *sample.logprobs[first + 1 :]]
    with pytest.raises(BadData, match=f"'{sample.id}': behaviour log-probability of trained token {first}"):
        replace(sample, logprobs=trained)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"advantage": math.nan}, "advantage is nan"),
        ({"loss_mask": [False] * 5}, "no token of it is trained"),
        ({"loss_mask": [True] * 5}, "token 0, which nothing predicts"),
        ({"logprobs": [0.0]}, "logprobs has 1 entries for 5"),
    ],
)
def test_a_sample_that_cannot_be_trained_is_refused(change: dict[str, object], message: str) -> None:
    members = [make_trajectory(sample=k) for k in range(2)]
    sample: TrainingSample = build((members, [make_verdict(t, float(k)) for k, t in enumerate(members)])).samples[0]
    with pytest.raises(BadData, match=f"training sample '{sample.id}': .*{message}"):
        replace(sample, **change)  # type: ignore[arg-type]


def test_reasons_are_counted_by_name() -> None:
    members = [make_trajectory(sample=k) for k in range(4)]
    given = [(1.0, None), (0.0, None), (None, Reason.NOT_FINITE), (None, Reason.SANDBOX_ERROR)]
    batch = build((members, [make_verdict(t, *v) for t, v in zip(members, given, strict=True)]))
    assert batch.denominators.unscored == {"not_finite": 1, "sandbox_error": 1}


def test_the_batch_stage_needs_no_torch() -> None:
    code = "import sys, colchis.components.batch, colchis.components.records.batch; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=120).returncode == 0
