"""rollout: generate the trajectories of one or more shards of an iteration, and grade them when that is cheap."""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import nullcontext
from dataclasses import asdict

import click

from colchis.components.config import RunConfig
from colchis.components.environments import open_environment
from colchis.components.grader import Grader
from colchis.components.logs import event
from colchis.components.records import trajectories as trajectory_records
from colchis.components.records import verdicts as verdict_records
from colchis.components.records.iteration import Admission
from colchis.components.records.trajectories import Trajectory
from colchis.components.rollout import Engines, PromptGroup, Wanted, rollout_groups
from colchis.components.stages.admit import admit, decided
from colchis.components.stages.context import Progress, Stage, Stopwatch, scratch, stage_command
from colchis.components.store import Attempt, StageKey

logger = logging.getLogger(__name__)

PART_S = 5.0
"""Finished groups are stored in parts, one at most every so many seconds: a killed shard loses no more, and a quick one
makes few objects."""


@stage_command("rollout", epilog="Example: rollout --run first --iteration 3 --shard 0 --shards 1")
@click.option("--iteration", type=click.IntRange(0), required=True)
@click.option("--shard", type=click.IntRange(0), default=0, show_default=True, help="Which of the pods this is.")
@click.option("--shards", type=click.IntRange(1), default=1, show_default=True, help="How many pods there are.")
def command(stage: Stage, iteration: int, shard: int, shards: int) -> None:
    """Generate one shard of an iteration's trajectories with the declared policy version."""
    admission = admit(stage, iteration)
    if admission is None:
        event(logger, "no further iteration", run=stage.run, iteration=iteration)
        return
    if decided(stage, iteration):
        event(logger, "nothing to generate", run=stage.run, iteration=iteration)
        return
    for planned in range(shard, admission.shards, shards):
        if stage.find(iteration, "rollout", planned) is None:
            generate_shard(stage, admission, planned)


def generate_shard(stage: Stage, admission: Admission, shard: int) -> None:
    """Make what earlier attempts of this shard have not stored yet, and commit the whole."""
    watch, config = Stopwatch(), stage.config
    stage.claim_pool()
    attempt = stage.attempt(admission.iteration, "rollout", shard)
    wanted = admission.shard_groups(shard)
    progress = Progress(len(wanted))
    with scratch() as folder, Grader(config) if config.grader.placement == "inline" else nullcontext() as grader:
        parts = Parts(stage, config, attempt, grader)

        def store_group(samples: list[Trajectory]) -> None:
            parts.add(samples)
            progress.advance()

        done = parts.adopt_earlier(admission, {g for g, _ in wanted})
        progress.advance(len(done))
        groups = [PromptGroup(group=g, row=stage.rows[row]) for g, row in wanted if g not in done]
        model = stage.text_model(folder)
        environment = open_environment(config.environment)
        engines = Engines.from_environment()
        try:
            stats = asyncio.run(
                rollout_groups(
                    config,
                    run=stage.run,
                    iteration=admission.iteration,
                    wanted=Wanted.exactly(admission.version),
                    groups=groups,
                    engines=engines,
                    environment=environment,
                    model=model,
                    on_group=store_group,
                )
            )
        finally:
            parts.flush()
    commit = attempt.commit(
        outputs={
            "groups": len(wanted),
            "samples": parts.samples,
            "tokens": parts.tokens,
            "adopted_groups": len(done),
            "version": admission.version,
            "seconds": watch.seconds,
            "grade_seconds": round(parts.grade_seconds, 4),
            **asdict(stats),
        },
    )
    event(
        logger,
        "shard committed",
        iteration=admission.iteration,
        shard=shard,
        groups=len(wanted),
        attempt=commit.attempt,
    )


class Parts:
    """The trajectories of a shard, and their verdicts when there is a grader here, stored in parts as groups finish."""

    def __init__(self, stage: Stage, config: RunConfig, attempt: Attempt, grader: Grader | None) -> None:
        self.stage, self.config, self.attempt, self.grader = stage, config, attempt, grader
        self.samples = self.tokens = 0
        self.grade_seconds = 0.0
        self._waiting: list[list[Trajectory]] = []
        self._number = 0
        self._stored_at = time.monotonic()

    def adopt_earlier(self, admission: Admission, wanted: set[int]) -> set[int]:
        """Groups that an earlier attempt of this shard stored whole; they become part of this attempt's commit."""
        key: StageKey = self.attempt.stage
        done: set[int] = set()
        for name in self.stage.store.list(key.attempts):
            if "/trajectories-" not in name:
                continue
            data = self.stage.store.get(name).data
            samples = trajectory_records.from_parquet(data)
            groups = {t.group for t in samples}
            whole = all(sum(t.group == g for t in samples) == self.config.rollout.group_size for g in groups) and all(
                span.version == admission.version for t in samples for span in t.versions
            )
            if not whole or groups & done or not groups <= wanted:
                continue
            done |= groups
            self._store(samples)
        return done

    def add(self, samples: list[Trajectory]) -> None:
        self._waiting.append(samples)
        if time.monotonic() - self._stored_at >= PART_S:
            self.flush()

    def flush(self) -> None:
        if self._waiting:
            samples = [t for group in self._waiting for t in group]
            self._waiting = []
            self._store(samples)
        self._stored_at = time.monotonic()

    def _store(self, samples: list[Trajectory]) -> None:
        samples = sorted(samples, key=lambda t: (t.group, t.sample))
        name = f"{self._number:04d}.parquet"
        self._number += 1
        self.attempt.put(f"trajectories-{name}", trajectory_records.to_parquet(samples))
        if self.grader is not None:
            watch = Stopwatch()
            verdicts = self.grader.grade(samples, self.stage.rows)
            self.grade_seconds += watch.seconds
            self.attempt.put(f"verdicts-{name}", verdict_records.to_parquet(verdicts))
        self.samples += len(samples)
        self.tokens += sum(sum(t.loss_mask) for t in samples)
