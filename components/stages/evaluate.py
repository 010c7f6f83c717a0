"""evaluate: greedy accuracy of one version on held-out prompts, measured on the serving engines."""

from __future__ import annotations

import asyncio
import logging
import math

import click

from colchis.components.environments import heldout, open_environment
from colchis.components.errors import BadConfig, BadData
from colchis.components.grader import grade
from colchis.components.logs import event
from colchis.components.records import trajectories as trajectory_records
from colchis.components.records import verdicts as verdict_records
from colchis.components.records.iteration import Evaluation
from colchis.components.records.trajectories import Trajectory
from colchis.components.rollout import Engines, PromptGroup, Sampling, Wanted, rollout_groups
from colchis.components.stages.admit import stopped
from colchis.components.stages.context import Progress, Stage, Stopwatch, scratch, stage_command

logger = logging.getLogger(__name__)


@stage_command("evaluate", epilog="Example: evaluate --run first --version serving")
@click.option("--version", required=True, help="A version, or 'serving' for the declared one.")
def command(stage: Stage, version: str) -> None:
    """Greedy accuracy on held-out prompts, with a 95 % interval, committed once per version."""
    serving = stage.serving()
    if serving is None:
        raise BadData(f"run '{stage.run}' serves no version yet", hint="the reload step fills the engines first")
    if version != "serving" and not version.isdigit():
        raise BadConfig(f"--version {version!r}: expected a number or 'serving'")
    number = serving.version if version == "serving" else int(version)
    if number > serving.version and stopped(stage, number):
        event(logger, "the run stopped before this version", run=stage.run, version=number)
        return
    if stage.find(number, "evaluate") is None:
        evaluate(stage, number)


def evaluate(stage: Stage, version: int) -> None:
    """One greedy completion per held-out prompt; unscored completions count as not correct, and are reported."""
    watch, config = Stopwatch(), stage.config
    stage.claim_pool()
    rows = [stage.rows[index] for index in heldout(stage.rows, config.evaluation.prompts)]
    progress = Progress(len(rows))
    done: list[Trajectory] = []

    def keep(samples: list[Trajectory]) -> None:
        done.extend(samples)
        progress.advance()

    with scratch() as folder:
        asyncio.run(
            rollout_groups(
                config,
                run=stage.run,
                iteration=version,
                wanted=Wanted.exactly(version),
                groups=[PromptGroup(group=g, row=row) for g, row in enumerate(rows)],
                engines=Engines.from_environment(),
                environment=open_environment(config.environment),
                model=stage.text_model(folder),
                on_group=keep,
                sampling=Sampling.greedy(config.rollout),
            )
        )
    done.sort(key=lambda t: t.group)
    verdicts = grade(config, done, stage.rows)
    correct = sum(v.score is not None and v.score >= 1.0 for v in verdicts)
    low, high = wilson(correct, len(verdicts))
    result = Evaluation(
        run=stage.run,
        version=version,
        prompts=len(verdicts),
        correct=correct,
        unscored=sum(v.reason is not None for v in verdicts),
        accuracy=correct / len(verdicts),
        low=low,
        high=high,
    )
    attempt = stage.attempt(version, "evaluate")
    attempt.put("trajectories.parquet", trajectory_records.to_parquet(done))
    attempt.put("verdicts.parquet", verdict_records.to_parquet(verdicts))
    attempt.commit(outputs=result.model_dump(mode="json") | {"seconds": watch.seconds})
    event(
        logger, "evaluated", version=version, accuracy=round(result.accuracy, 4), low=round(low, 4), high=round(high, 4)
    )


def wilson(successes: int, trials: int, z: float = 1.959964) -> tuple[float, float]:
    """Wilson score interval of a share (E. B. Wilson 1927), by default at 95 %."""
    if trials == 0:
        return 0.0, 1.0
    p = successes / trials
    centre = (p + z * z / (2 * trials)) / (1 + z * z / trials)
    half = z / (1 + z * z / trials) * math.sqrt(p * (1 - p) / trials + z * z / (4 * trials * trials))
    return max(0.0, centre - half), min(1.0, centre + half)
