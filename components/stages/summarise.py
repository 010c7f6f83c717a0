"""The summary that closes an iteration: numbers copied from its commits, nothing computed anew."""

from __future__ import annotations

from colchis.components.records.iteration import Summary
from colchis.components.stages.context import Stage


def summarise(stage: Stage, iteration: int) -> Summary:
    """Collect rollout, grade, batch, train and reload of one iteration."""
    admission = stage.admitted(iteration)
    batch, train, reload = (stage.read(iteration, name) for name in ("batch", "train", "reload"))
    skipped = batch.outputs["decision"] == "skipped"
    rollouts = [c for s in range(admission.shards) if (c := stage.find(iteration, "rollout", s)) is not None]
    grades = [c for s in range(admission.grade_shards) if (c := stage.find(iteration, "grade", s)) is not None]
    previous = stage.summary(iteration - 1) if iteration > 0 else None
    stepped = train.outputs["kind"] == "full"
    metrics = train.outputs["metrics"]
    alerts = []
    if (gap := metrics.get("gap_mean")) is not None and gap > stage.config.trainer.gap_alert:
        alerts.append(
            f"sampling and training log-probabilities differ by {gap:.2e} on average "
            f"(trainer.gap_alert {stage.config.trainer.gap_alert:g}): are engine and trainer on the same weights?"
        )
    commits = [*rollouts, *grades, batch, train, reload]
    return Summary(
        run=stage.run,
        iteration=iteration,
        version=train.outputs["version"],
        kind=train.outputs["kind"],
        weights_digest=train.outputs["weights_digest"],
        decision=batch.outputs["decision"],
        reason=batch.outputs.get("reason"),
        consecutive_empty=0 if stepped else (previous.consecutive_empty if previous else 0) + (not skipped),
        reward_mean=batch.outputs.get("reward_mean"),
        groups=batch.outputs.get("groups", {}),
        samples=sum(c.outputs["samples"] for c in rollouts),
        tokens=sum(c.outputs["tokens"] for c in rollouts),
        lag=batch.outputs.get("lag", 0),
        metrics=metrics,
        seconds={
            "rollout": max((c.outputs["seconds"] for c in rollouts), default=0.0),
            "grade": max((c.outputs["seconds"] for c in grades), default=0.0)
            or max((c.outputs.get("grade_seconds", 0.0) for c in rollouts), default=0.0),
            "batch": batch.outputs.get("seconds", 0.0),
            "train": train.outputs["seconds"],
            "reload": reload.outputs["seconds"],
            "pause": reload.outputs["pause_s"],
        },
        alerts=alerts,
        commits={c.key: c.digest for c in commits},
    )
