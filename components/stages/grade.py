"""grade: score trajectories in pods of their own (grader.placement 'step')."""

from __future__ import annotations

import logging

import click

from colchis.components.grader import grade
from colchis.components.logs import event
from colchis.components.records import verdicts as verdict_records
from colchis.components.records.iteration import Admission
from colchis.components.stages.admit import decided
from colchis.components.stages.collect import trajectories_of
from colchis.components.stages.context import Progress, Stage, Stopwatch, stage_command

logger = logging.getLogger(__name__)


@stage_command("grade", epilog="Example: grade --run first --iteration 3 --shard 0 --shards 2")
@click.option("--iteration", type=click.IntRange(0), required=True)
@click.option("--shard", type=click.IntRange(0), default=0, show_default=True, help="Which of the pods this is.")
@click.option("--shards", type=click.IntRange(1), default=1, show_default=True, help="How many pods there are.")
def command(stage: Stage, iteration: int, shard: int, shards: int) -> None:
    """Score the trajectories of an iteration: verdicts or reasons, never a silent zero."""
    admission = stage.admission(iteration)
    if admission is None or decided(stage, iteration):
        event(logger, "nothing to score", run=stage.run, iteration=iteration)
        return
    for planned in range(shard, admission.grade_shards, shards):
        if stage.find(iteration, "grade", planned) is None:
            grade_shard(stage, admission, planned)


def grade_shard(stage: Stage, admission: Admission, shard: int) -> None:
    """Grade every group with group % grade_shards == shard, and commit the verdicts."""
    watch = Stopwatch()
    rollouts, everything = trajectories_of(stage, admission)
    mine = [t for t in everything if t.group % admission.grade_shards == shard]
    progress = Progress(len(mine))
    verdicts = grade(stage.config, mine, stage.rows)
    progress.advance(len(mine))
    attempt = stage.attempt(admission.iteration, "grade", shard)
    attempt.put("verdicts.parquet", verdict_records.to_parquet(verdicts))
    reasons = sum(v.reason is not None for v in verdicts)
    attempt.commit(
        outputs={"samples": len(mine), "unscored": reasons, "seconds": watch.seconds},
        inputs={c.key: c.digest for c in rollouts},
    )
    event(logger, "verdicts committed", iteration=admission.iteration, shard=shard, samples=len(mine), unscored=reasons)
