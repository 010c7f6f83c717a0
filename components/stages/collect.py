"""Reading back what the shards of an iteration committed."""

from __future__ import annotations

from colchis.components.errors import BadData
from colchis.components.records import trajectories as trajectory_records
from colchis.components.records import verdicts as verdict_records
from colchis.components.records.iteration import Admission
from colchis.components.records.trajectories import Trajectory
from colchis.components.records.verdicts import Verdict
from colchis.components.stages.context import Stage
from colchis.components.store import Commit


def trajectories_of(stage: Stage, admission: Admission) -> tuple[list[Commit], list[Trajectory]]:
    """All trajectories of an iteration in (group, sample) order. BadData names a shard that is missing."""
    commits = [stage.read(admission.iteration, "rollout", shard) for shard in range(admission.shards)]
    found: list[Trajectory] = []
    for commit in commits:
        for payload in commit.payload:
            if payload.name.startswith("trajectories-"):
                found += trajectory_records.from_parquet(stage.store.read(payload))
    expected = {
        (group, sample) for group in range(len(admission.prompts)) for sample in range(stage.config.rollout.group_size)
    }
    seen = [(t.group, t.sample) for t in found]
    if len(seen) != len(expected) or set(seen) != expected:
        missing = sorted(expected - set(seen))[:3]
        twice = sorted({s for s in seen if seen.count(s) > 1})[:3] if len(seen) < 100_000 else []
        raise BadData(
            f"iteration {admission.iteration}: expected {len(expected)} trajectories, found {len(seen)}; "
            f"missing (group, sample) {missing}, doubled {twice}",
            where=commits[0].key,
        )
    return commits, sorted(found, key=lambda t: (t.group, t.sample))


def verdicts_of(stage: Stage, admission: Admission, rollouts: list[Commit]) -> tuple[list[Commit], list[Verdict]]:
    """All verdicts of an iteration, from the rollout shards (inline) or the grader shards (step)."""
    commits = (
        [stage.read(admission.iteration, "grade", shard) for shard in range(admission.grade_shards)]
        if admission.grade_shards
        else rollouts
    )
    found: list[Verdict] = []
    for commit in commits:
        for payload in commit.payload:
            if payload.name.startswith("verdicts"):
                found += verdict_records.from_parquet(stage.store.read(payload))
    return ([] if commits is rollouts else commits), found
