"""batch: the one place where advantages and denominators are computed."""

from __future__ import annotations

import logging

import click

from colchis.components.batch import build_batch
from colchis.components.logs import event
from colchis.components.records.batch import Batch
from colchis.components.report import find_stop
from colchis.components.stages.collect import trajectories_of, verdicts_of
from colchis.components.stages.context import Stage, Stopwatch, stage_command
from colchis.components.store import Commit

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
    if stage.find(iteration, "skip") is not None:
        return False
    missing = [s for s in range(admission.shards) if stage.find(iteration, "rollout", s) is None]
    if missing and find_stop(stage.store, stage.run) is not None:
        event(logger, "stopped with shards missing; the iteration stays open", iteration=iteration, shards=missing)
        return True
    return False


def empty_batch(stage: Stage, iteration: int) -> Batch:
    """What a skipped iteration trains on."""
    return build_batch(stage.config, run=stage.run, iteration=iteration, trajectories=[], verdicts=[])


def _build(stage: Stage, iteration: int) -> Commit:
    watch = Stopwatch()
    admission, skip = stage.admitted(iteration), stage.find(iteration, "skip")
    if skip is not None:
        batch, consumed = empty_batch(stage, iteration), [skip]
    else:
        rollouts, trajectories = trajectories_of(stage, admission)
        grades, verdicts = verdicts_of(stage, admission, rollouts)
        consumed = [*rollouts, *grades]
        batch = build_batch(
            stage.config, run=stage.run, iteration=iteration, trajectories=trajectories, verdicts=verdicts
        )
    attempt = stage.attempt(iteration, "batch")
    attempt.put("denominators.json", batch.denominators.to_bytes())
    if batch.decision == "trainable":
        attempt.put("batch.parquet", batch.to_parquet())
    commit = attempt.commit(
        outputs={"decision": batch.decision, "reason": batch.reason, "seconds": watch.seconds, **batch.statistics()},
        inputs={c.key: c.digest for c in consumed},
    )
    event(logger, "batch committed", iteration=iteration, decision=batch.decision, reason=batch.reason)
    return commit
