"""Whether an iteration starts, and what it consists of: decided once, so that all its pods agree."""

from __future__ import annotations

from colchis.components.config import RunConfig
from colchis.components.environments import select
from colchis.components.errors import BadData
from colchis.components.records.iteration import Admission, Cursor, Summary
from colchis.components.report import find_stop
from colchis.components.stages.context import Stage
from colchis.components.store import keys


def reason_to_stop(config: RunConfig, summary: Summary | None) -> str | None:
    """Why no further iteration should start after `summary`, or None. Facts are stored; the judgement is always fresh,
    so that a raised limit lets a run go on."""
    if summary is None:
        return None
    target = config.loop.target_reward
    if target is not None and summary.reward_mean is not None and summary.reward_mean >= target:
        return f"loop.target_reward {target} reached: mean reward {summary.reward_mean:.4f} in iteration {summary.iteration}"
    if summary.consecutive_empty >= config.loop.max_empty:
        return f"{summary.consecutive_empty} empty iterations in a row (loop.max_empty {config.loop.max_empty}): {summary.reason}"
    return None


def open_iteration_of(stage: Stage) -> int:
    """The first iteration without a summary: serving.json moves just before the summary is written."""
    serving = stage.serving()
    if serving is None or serving.version == 0:
        return 0
    return serving.version if stage.summary(serving.version - 1) is not None else serving.version - 1


def stopped(stage: Stage, iteration: int) -> bool:
    """Whether the run stops before `iteration`: by a wish, or by what the last closed iteration found.

    The last closed one need not be `iteration - 1`: a window goes on with its later iterations after a stop.
    """
    if find_stop(stage.store, stage.run) is not None:
        return True
    serving = stage.serving()
    closed = serving.version if serving else 0
    return reason_to_stop(stage.config, stage.summary(min(iteration, closed) - 1)) is not None


def decided(stage: Stage, iteration: int) -> bool:
    """Whether trajectories and verdicts can change nothing any more: the batch is committed, or the iteration skipped."""
    return any(stage.find(iteration, name) is not None for name in ("batch", "skip"))


def admit(stage: Stage, iteration: int) -> Admission | None:
    """The admission of `iteration`, made by whoever asks first; None when the run is to stop before it."""
    found = stage.admission(iteration)
    if found is not None:
        return found
    if stopped(stage, iteration):
        return None
    config = stage.config
    if iteration > 0 and stage.summary(iteration - 1) is None:
        raise BadData(
            f"iteration {iteration} cannot start: iteration {iteration - 1} is not closed",
            where=keys.summary(stage.run, iteration - 1),
        )
    cursor = Cursor()
    if iteration > 0:
        cursor = Cursor.model_validate(stage.read(iteration - 1, "train").outputs["cursor"])
    prompts, after = select(stage.rows, config.loop.seed, cursor, config.rollout.prompts)
    admission = Admission(
        run=stage.run,
        iteration=iteration,
        version=iteration,
        prompts=prompts,
        cursor=after,
        shards=config.rollout.shards,
        grade_shards=config.grader.shards if config.grader.placement == "step" else 0,
    )
    stage.store.create(keys.admission(stage.run, iteration), admission.to_bytes())
    decided = stage.admission(iteration)
    assert decided is not None
    return decided
