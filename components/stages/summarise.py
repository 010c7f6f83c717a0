"""The summary that closes an iteration: numbers copied from its commits, nothing computed anew."""

from __future__ import annotations

from typing import Any

from colchis.components.records.iteration import Summary
from colchis.components.stages.context import Stage, outputs_of


def summarise(stage: Stage, iteration: int) -> Summary:
    """Collect rollout, grade, batch, train and reload of one iteration."""
    admission = stage.admitted(iteration)
    batch_commit, train_commit, reload_commit = (stage.read(iteration, name) for name in ("batch", "train", "reload"))
    rollouts = [c for s in range(admission.shards) if (c := stage.find(iteration, "rollout", s)) is not None]
    grades = [c for s in range(admission.grade_shards) if (c := stage.find(iteration, "grade", s)) is not None]
    batch, train, reload = outputs_of(batch_commit), outputs_of(train_commit), outputs_of(reload_commit)
    rolled, graded = [outputs_of(c) for c in rollouts], [outputs_of(c) for c in grades]
    previous = stage.summary(iteration - 1) if iteration > 0 else None
    skip = stage.find(iteration, "skip")
    if skip is not None and skip.key in train_commit.inputs:
        batch |= {"decision": "skipped", "reason": outputs_of(skip)["reason"]}
    empty = batch["decision"] == "empty"
    return Summary(
        run=stage.run,
        iteration=iteration,
        version=train["version"],
        kind=train["kind"],
        weights_digest=train["weights_digest"],
        decision=batch["decision"],
        reason=batch.get("reason"),
        consecutive_empty=(previous.consecutive_empty if previous else 0) + 1 if empty else 0,
        reward_mean=batch.get("reward_mean"),
        groups=batch.get("groups", {}),
        unscored=batch.get("unscored", {}),
        samples=sum(r["samples"] for r in rolled),
        tokens=sum(r["tokens"] for r in rolled),
        lag=batch.get("lag", 0),
        metrics=train["metrics"],
        seconds={
            "rollout": max((r["seconds"] for r in rolled), default=0.0),
            "grade": max(
                (g["seconds"] for g in (*graded, *({"seconds": r["grade_seconds"]} for r in rolled))), default=0.0
            ),
            "batch": batch["seconds"],
            "train": train["seconds"],
            "reload": reload["seconds"],
            "pause": reload["pause_s"],
        },
        alerts=alerts(stage, train["metrics"]),
        commits={c.key: c.digest for c in (*rollouts, *grades, batch_commit, train_commit, reload_commit)},
    )


def alerts(stage: Stage, metrics: dict[str, Any]) -> list[str]:
    """Findings that do not stop a run but that somebody should look at."""
    gap, limit = metrics.get("gap_mean"), stage.config.gap_alert
    if gap is None or gap <= limit:
        return []
    return [
        f"sampling and training log-probabilities differ by {gap:.2e} on average (trainer.gap_alert {limit:g}): "
        "are engine and trainer on the same weights?"
    ]
