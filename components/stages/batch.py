"""batch: the one place where advantages and denominators are computed."""

from __future__ import annotations

import logging

import click

from colchis.components.batch import build_batch
from colchis.components.logs import event
from colchis.components.stages.collect import trajectories_of, verdicts_of
from colchis.components.stages.context import Stage, Stopwatch, stage_command
from colchis.components.store import Commit, keys

logger = logging.getLogger(__name__)


@stage_command("batch", epilog="Example: batch --run first --iteration 3")
@click.option("--iteration", type=click.IntRange(0), required=True)
def command(stage: Stage, iteration: int) -> None:
    """Advantages, denominators and the packing plan of an iteration; or the finding that it is empty."""
    commit = stage.find(iteration, "batch")
    if commit is None and _stopped(stage, iteration):
        stage.write(decision="stop")
        return
    if commit is None:
        commit = _build(stage, iteration)
    stage.write(decision=commit.outputs["decision"])


def _stopped(stage: Stage, iteration: int) -> bool:
    """True when the run stops before this iteration, or stopped while its shards were being admitted."""
    admission = stage.admission(iteration)
    if admission is None:
        return True
    missing = [s for s in range(admission.shards) if stage.find(iteration, "rollout", s) is None]
    if missing and stage.store.find(keys.run_stop(stage.run)) is not None:
        event(logger, "stopped with shards missing; the iteration stays open", iteration=iteration, shards=missing)
        return True
    return False


def _build(stage: Stage, iteration: int) -> Commit:
    watch = Stopwatch()
    admission = stage.admitted(iteration)
    rollouts, trajectories = trajectories_of(stage, admission)
    grades, verdicts = verdicts_of(stage, admission, rollouts)
    batch = build_batch(stage.config, run=stage.run, iteration=iteration, trajectories=trajectories, verdicts=verdicts)
    attempt = stage.attempt(iteration, "batch")
    attempt.put("denominators.json", batch.denominators.to_bytes())
    if batch.decision == "trainable":
        attempt.put("batch.parquet", batch.to_parquet())
    commit = attempt.commit(
        outputs={"decision": batch.decision, "reason": batch.reason, "seconds": watch.seconds, **batch.statistics()},
        inputs={c.key: c.digest for c in (*rollouts, *grades)},
    )
    event(logger, "batch committed", iteration=iteration, decision=batch.decision, reason=batch.reason)
    return commit
