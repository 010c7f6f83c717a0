"""Trajectories, verdicts and configurations made by hand, for the tests of the batch and the training frame."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from colchis.components.config import RunConfig, parse
from colchis.components.records.trajectories import Segment, SegmentKind, Trajectory, VersionSpan, trajectory_id
from colchis.components.records.verdicts import Reason, Verdict

RUN = "run"


def make_config(**sections: dict[str, Any]) -> RunConfig:
    """A valid configuration; `sections` overrides fields by section."""
    document: dict[str, Any] = {
        "model": {"source": "input:" + "0" * 64},
        "environment": {"kind": "reasoning_gym", "task": "chain_sum"},
        "rollout": {"prompts": 4, "group_size": 4, "max_new_tokens": 8},
    }
    for name, fields in sections.items():
        document[name] = document.get(name, {}) | fields
    return parse(document)


def make_trajectory(
    *,
    group: int = 0,
    sample: int = 0,
    iteration: int = 0,
    run: str = RUN,
    prompt: Sequence[int] = (1, 2, 3),
    turns: Sequence[tuple[SegmentKind, Sequence[int]]] = ((SegmentKind.MODEL, (4, 5)),),
    logprob: float = -1.0,
    version: int | None = None,
) -> Trajectory:
    """One episode; every token of a model turn is trained."""
    tokens = list(prompt)
    mask = [False] * len(prompt)
    segments, versions = [], []
    for kind, said in turns:
        start = len(tokens)
        tokens += said
        mask += [kind is SegmentKind.MODEL] * len(said)
        segments.append(Segment(kind, start, len(tokens), 0.1, ""))
        if kind is SegmentKind.MODEL and said:
            versions.append(VersionSpan(iteration if version is None else version, start, len(tokens)))
    prompt_index = 100 + group
    return Trajectory(
        id=trajectory_id(run, iteration, prompt_index, sample),
        iteration=iteration,
        prompt_index=prompt_index,
        group=group,
        sample=sample,
        token_ids=tokens,
        loss_mask=mask,
        logprobs=[logprob if trained else 0.0 for trained in mask],
        versions=versions,
        segments=segments,
        prompt_tokens=len(prompt),
        finish_reason="stop",
        seed=1,
        engine="http://127.0.0.1:1",
        sampling_digest="0" * 64,
        started_at="2026-01-01T00:00:00.000+00:00",
        seconds=0.1,
        cached_tokens=0,
    )


def make_verdict(trajectory: Trajectory, score: float | None, reason: Reason | None = None) -> Verdict:
    return Verdict(
        trajectory_id=trajectory.id,
        score=score,
        reason=reason if reason or score is not None else Reason.TIMEOUT,
        grader="exact",
        grader_version="1",
        grader_digest="0" * 64,
        seconds=0.01,
    )


def make_iteration(
    scores: Sequence[Sequence[float | None]], *, iteration: int = 0, seed: int = 0, vocabulary: int = 32
) -> tuple[list[Trajectory], list[Verdict]]:
    """Ragged random tokens; `scores[group][sample]`, None for an unscored sample."""
    draw = random.Random(f"{seed}/{iteration}")
    trajectories, verdicts = [], []
    for group, row in enumerate(scores):
        prompt = [draw.randrange(vocabulary) for _ in range(draw.randint(2, 6))]
        for sample, score in enumerate(row):
            said = [draw.randrange(vocabulary) for _ in range(draw.randint(1, 8))]
            trajectory = make_trajectory(
                group=group, sample=sample, iteration=iteration, prompt=prompt, turns=((SegmentKind.MODEL, said),)
            )
            trajectories.append(trajectory)
            verdicts.append(make_verdict(trajectory, score))
    return trajectories, verdicts
