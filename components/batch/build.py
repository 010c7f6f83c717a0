"""From trajectories and verdicts to a batch: validity, advantages, plan, denominators."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from colchis.components.batch.advantages import advantages, baseline
from colchis.components.batch.plan import StepPlan, plan_step, steps_of_groups
from colchis.components.config import RunConfig
from colchis.components.errors import BadData
from colchis.components.records.batch import (
    Batch,
    Denominators,
    GroupDenominator,
    GroupOutcome,
    RankShare,
    StepDenominator,
    TrainingSample,
    ordered,
)
from colchis.components.records.trajectories import Trajectory
from colchis.components.records.verdicts import Verdict


@dataclass(frozen=True, slots=True)
class Scored:
    """A valid member of a trained group."""

    trajectory: Trajectory
    score: float
    advantage: float


@dataclass(frozen=True, slots=True)
class Judged:
    """One group after its baseline. `members` is empty unless it is trained."""

    group: int
    prompt_index: int
    outcome: GroupOutcome
    mean: float | None
    spread: float | None
    size: int
    valid: int
    unscored: Counter[str]
    members: tuple[Scored, ...]


def build_batch(
    config: RunConfig,
    *,
    run: str,
    iteration: int,
    trajectories: Sequence[Trajectory],
    verdicts: Sequence[Verdict],
) -> Batch:
    """The batch of one iteration. The order of both inputs has no influence: ids bind, never positions.

    BadData names the trajectory that has no verdict, two verdicts or twice the same id, that belongs to another run or
    iteration, or whose trained tokens are older than `loop.max_lag` or newer than the policy; and the verdict without
    a trajectory.
    """
    by_id = _bind(run, iteration, trajectories, verdicts)
    lags = _lags(config, iteration, trajectories)
    groups: dict[int, list[Trajectory]] = defaultdict(list)
    for t in sorted(trajectories, key=lambda t: t.id):
        groups[t.group].append(t)
    judged = [_judge(config, group, groups[group], by_id) for group in sorted(groups)]
    steps = steps_of_groups([g.group for g in judged if g.members], config.trainer.steps)
    samples, step_denominators = _assign(config, judged, steps)

    scores = [v.score for v in verdicts if v.score is not None]
    rewards = baseline(scores) if scores else None
    outcomes = Counter(g.outcome for g in judged)
    unscored = sum((g.unscored for g in judged), Counter[str]())
    trained_tokens = sum(s.tokens for s in step_denominators)
    denominators = Denominators(
        run=run,
        iteration=iteration,
        decision="trainable" if samples else "empty",
        reason=None if samples else _reason(outcomes, unscored),
        estimator=config.algorithm.estimator,
        aggregation=config.algorithm.aggregation,
        steps=step_denominators,
        groups=[
            GroupDenominator(
                group=g.group,
                prompt_index=g.prompt_index,
                members=g.size,
                valid=g.valid,
                mean=g.mean,
                spread=g.spread,
                outcome=g.outcome,
                step=steps.get(g.group),
                unscored=dict(sorted(g.unscored.items())),
            )
            for g in judged
        ],
        outcomes={outcome.value: outcomes[outcome] for outcome in GroupOutcome},
        unscored=dict(sorted(unscored.items())),
        samples=len(trajectories),
        valid=len(scores),
        trained=len(samples),
        without_tokens=sum(len(g.members) for g in judged) - len(samples),
        sampled_tokens=sum(span.end - span.start for t in trajectories for span in t.versions),
        trained_tokens=trained_tokens,
        reward_mean=rewards.mean if rewards else None,
        reward_spread=rewards.spread if rewards and len(scores) > 1 else None,
        lag_tokens=_lag_histogram(samples, lags),
    )
    return Batch(denominators, ordered(samples))


def _bind(
    run: str, iteration: int, trajectories: Sequence[Trajectory], verdicts: Sequence[Verdict]
) -> dict[str, Verdict]:
    """Verdicts by trajectory id, after the check that the two match one to one."""
    ids: set[str] = set()
    prompts: dict[int, int] = {}
    for t in trajectories:
        if t.id in ids:
            raise BadData(f"trajectory '{t.id}' occurs twice")
        ids.add(t.id)
        if (t.run, t.iteration) != (run, iteration):
            raise BadData(f"trajectory '{t.id}' was given to iteration {iteration} of run '{run}'")
        prompt = prompts.setdefault(t.group, t.prompt_index)
        if prompt != t.prompt_index:
            raise BadData(f"trajectory '{t.id}' answers prompt {t.prompt_index}, its group {t.group} prompt {prompt}")
    by_id: dict[str, Verdict] = {}
    for v in verdicts:
        if v.trajectory_id not in ids:
            raise BadData(f"a verdict names trajectory '{v.trajectory_id}', which this iteration does not have")
        if v.trajectory_id in by_id:
            raise BadData(f"trajectory '{v.trajectory_id}' has two verdicts")
        by_id[v.trajectory_id] = v
    for t in trajectories:
        if t.id not in by_id:
            raise BadData(
                f"trajectory '{t.id}' has no verdict: not graded is not zero",
                hint="a grader that cannot score must answer with a reason",
            )
    return by_id


def _lags(config: RunConfig, iteration: int, trajectories: Sequence[Trajectory]) -> dict[str, Counter[int]]:
    """Per trajectory: version lag -> trained tokens, after the check against `loop.max_lag`."""
    lags: dict[str, Counter[int]] = {}
    for t in trajectories:
        counts: Counter[int] = Counter()
        for span in t.versions:
            tokens = sum(t.loss_mask[span.start : span.end])
            lag = iteration - span.version
            if tokens and not 0 <= lag <= config.loop.max_lag:
                raise BadData(
                    f"trajectory '{t.id}': {tokens} trained tokens of v{span.version} in iteration {iteration}, which "
                    f"trains v{iteration}; expected a lag of 0 to {config.loop.max_lag} (loop.max_lag), found {lag}",
                    hint="an engine served another version than it was declared to serve",
                )
            if tokens:
                counts[lag] += tokens
        lags[t.id] = counts
    return lags


def _judge(config: RunConfig, group: int, members: Sequence[Trajectory], verdicts: Mapping[str, Verdict]) -> Judged:
    """Baseline and advantages of one group over its valid members; `members` come sorted by id."""
    valid = [(t, score) for t in members if (score := verdicts[t.id].score) is not None]
    unscored = Counter(str(v.reason) for t in members if (v := verdicts[t.id]).score is None)
    base = baseline([score for _, score in valid]) if valid else None
    scored: tuple[Scored, ...] = ()
    if base is None or len(valid) < config.algorithm.min_valid:
        outcome = GroupOutcome.TOO_FEW
    elif base.spread <= 0 or base.relative < config.algorithm.min_spread:
        outcome = GroupOutcome.NO_SIGNAL
    elif not any(any(t.loss_mask) for t, _ in valid):
        outcome = GroupOutcome.NO_TOKENS
    else:
        outcome = GroupOutcome.TRAINED
        values = advantages(config.algorithm.estimator, base)
        scored = tuple(Scored(t, score, float(a)) for (t, score), a in zip(valid, values, strict=True))
    return Judged(
        group=group,
        prompt_index=members[0].prompt_index,
        outcome=outcome,
        mean=base.mean if base else None,
        spread=base.spread if base and len(valid) > 1 else None,
        size=len(members),
        valid=len(valid),
        unscored=unscored,
        members=scored,
    )


def _assign(
    config: RunConfig, judged: Sequence[Judged], steps: Mapping[int, int]
) -> tuple[list[TrainingSample], list[StepDenominator]]:
    """Samples with their places, and what each step's loss is divided by."""
    samples: list[TrainingSample] = []
    denominators: list[StepDenominator] = []
    for step in sorted(set(steps.values())):
        members = [m for g in judged if steps.get(g.group) == step for m in g.members if any(m.trajectory.loss_mask)]
        lengths = {m.trajectory.id: len(m.trajectory.token_ids) for m in members}
        plan = plan_step(lengths, budget_tokens=config.trainer.micro_batch_tokens, ranks=config.trainer.ranks)
        placed = [_sample(m, step, plan) for m in members]
        samples += placed
        denominators.append(_denominator(config, step, plan, placed))
    return samples, denominators


def _sample(member: Scored, step: int, plan: StepPlan) -> TrainingSample:
    t, place = member.trajectory, plan.places[member.trajectory.id]
    trained = [span.version for span in t.versions if any(t.loss_mask[span.start : span.end])]
    return TrainingSample(
        id=t.id,
        group=t.group,
        sample=t.sample,
        score=member.score,
        advantage=member.advantage,
        step=step,
        rank=place.rank,
        micro_batch=place.micro_batch,
        position=place.position,
        token_ids=t.token_ids,
        loss_mask=t.loss_mask,
        logprobs=t.logprobs,
        oldest_version=min(trained),
    )


def _denominator(config: RunConfig, step: int, plan: StepPlan, samples: Sequence[TrainingSample]) -> StepDenominator:
    shares = []
    for rank in range(config.trainer.ranks):
        mine = [s for s in samples if s.rank == rank]
        shares.append(RankShare(rank=rank, tokens=sum(s.trained_tokens for s in mine), sequences=len(mine)))
    tokens, sequences = sum(s.tokens for s in shares), sum(s.sequences for s in shares)
    divisor = {
        "token-mean": tokens,
        "sequence-mean": sequences,
        "constant": sequences * config.rollout.max_new_tokens,
    }[config.algorithm.aggregation]
    if not (divisor > 0 and math.isfinite(divisor)):
        raise BadData(f"optimiser step {step}: the loss would be divided by {divisor}")
    return StepDenominator(
        step=step,
        tokens=tokens,
        sequences=sequences,
        divisor=float(divisor),
        micro_batches=plan.micro_batches,
        ranks=shares,
    )


def _lag_histogram(samples: Sequence[TrainingSample], lags: Mapping[str, Counter[int]]) -> dict[str, int]:
    total = sum((lags[s.id] for s in samples), Counter[int]())
    return {str(lag): total[lag] for lag in sorted(total)}


def _reason(outcomes: Mapping[GroupOutcome, int], unscored: Mapping[str, int]) -> str:
    """One line for people: why nothing can be trained."""
    parts = [f"{outcomes[o]} {o.value}" for o in GroupOutcome if o is not GroupOutcome.TRAINED and outcomes[o]]
    text = "no group carries signal: " + (", ".join(parts) or "no trajectories")
    if unscored:
        text += "; unscored: " + ", ".join(f"{n} {reason}" for reason, n in sorted(unscored.items()))
    return text
