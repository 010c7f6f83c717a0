"""One configuration that each validator must refuse: exit 78 and a line that names the field."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from colchis.workflows.cli import main

VALID = """
model: {source: "file:model"}
environment: {kind: dataset, source: "file:rows.jsonl"}
"""

MALFORMED = {
    "mode.colocated": ("mode=colocated", "mode: 'colocated' is not built yet"),
    "mode.unknown": ("mode=fast", "mode: "),
    "model.source": ("model.source=base", "model.source: "),
    "environment.kind": ("environment.kind=other", "environment.kind: "),
    "environment.source": ("environment.source=rows.jsonl", "environment.source: "),
    "environment.prompt_template": ("environment.prompt_template=x", "environment.prompt_template: must contain"),
    "rollout.prompts": ("rollout.prompts=0", "rollout.prompts: "),
    "rollout.group_size": ("rollout.group_size=1", "rollout.group_size: a group of 1 has no baseline"),
    "rollout.shards": ("rollout.shards=33", "rollout.shards: 33 shards for 32 prompts"),
    "rollout.temperature": ("rollout.temperature=.nan", "rollout.temperature: "),
    "rollout.top_p": ("rollout.top_p=1.5", "rollout.top_p: "),
    "rollout.stop": ("rollout.stop=['{{x}}']", "rollout.stop[0]: holds '{{'"),
    "rollout.unknown": ("rollout.promts=3", "rollout.promts: no such field; known: "),
    "grader.face": ("grader.face=rule", "grader.pattern: face 'rule' needs a pattern"),
    "grader.pattern.face": ("grader.pattern=x", "grader.pattern and grader.tolerance belong to face 'rule'"),
    "grader.pattern": ("grader={face: rule, pattern: '('}", "grader.pattern: not a regular expression"),
    "grader.own": ("grader.face=own", "grader.name: face 'own' needs the name"),
    "grader.name": ("grader.name=x", "grader.name and grader.options belong to face 'own'"),
    "grader.placement": ("grader.placement=pool", "grader.placement: 'pool' is not built yet"),
    "grader.shards": ("grader.shards=2", "grader.shards: 2 has no meaning with placement 'inline'"),
    "algorithm.min_valid.high": ("algorithm.min_valid=9", "algorithm.min_valid: 9 is more than rollout.group_size (8)"),
    "algorithm.min_valid.low": ("algorithm.min_valid=1", "algorithm.min_valid: 'grpo' compares members"),
    "algorithm.clip_low": ("algorithm.clip_low=1", "algorithm.clip_low: "),
    "trainer.ranks": ("trainer.ranks=2", "trainer.ranks: 2 ranks are not built yet"),
    "trainer.steps": ("trainer.steps=33", "trainer.steps: 33 optimiser steps need at least as many groups"),
    "trainer.micro_batch_tokens": ("trainer.micro_batch_tokens=16", "trainer.micro_batch_tokens: 16 cannot hold"),
    "trainer.schedule": ("trainer.schedule=cosine", "trainer.schedule_iterations: schedule 'cosine' needs its length"),
    "trainer.warmup": (
        "trainer={schedule: linear, schedule_iterations: 2, warmup_iterations: 2}",
        "trainer.schedule_iterations: must be more than trainer.warmup_iterations",
    ),
    "trainer.betas": ("trainer.betas=[0.9, 1.0]", "trainer.betas: [0.9, 1.0] must both lie in [0, 1)"),
    "reload.pause": ("reload.pause=hope", "reload.pause: "),
    "evaluation.every": ("evaluation.every=-1", "evaluation.every: "),
    "loop.max_lag": ("loop.max_lag=1", "loop.max_lag: 1, but mode 'sync'"),
    "loop.window": ("loop.window=101", "loop.window: "),
}
MORE = {
    "rollout.group_size": ["algorithm={estimator: dr_grpo, min_valid: 1}"],
    "trainer.micro_batch_tokens": ["rollout.max_new_tokens=17"],
}
"""What else must be set so that this validator, and no other, has something to refuse."""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(VALID)
    return path


def validate(config: Path, *assignments: str) -> Result:
    arguments = [part for assignment in assignments for part in ("--set", assignment)]
    return CliRunner().invoke(main, ["validate", str(config), "--json", *arguments])


@pytest.mark.parametrize(("assignment", "words"), MALFORMED.values(), ids=MALFORMED.keys())
def test_malformed_configuration_is_one_line_that_names_the_field(
    config: Path, request: pytest.FixtureRequest, assignment: str, words: str
) -> None:
    """Fault: a validator that nobody calls, or a message from which the field cannot be found."""
    more = MORE.get(request.node.callspec.id, [])
    done = validate(config, assignment, *more)
    assert done.exit_code == 78, done.output
    lines = done.stderr.strip().splitlines()
    assert len(lines) == 1, done.stderr
    assert words in lines[0]
    assert done.stdout == ""


def test_valid_configuration_is_printed_whole(config: Path) -> None:
    """Fault: `validate --json` that a script cannot read, or that leaves defaults out."""
    done = validate(config, "loop.seed=7")
    assert done.exit_code == 0, done.output
    document: dict[str, Any] = json.loads(done.stdout)
    assert document["config"]["loop"]["seed"] == 7
    assert document["config"]["rollout"]["prompts"] == 32
    assert len(document["digest"]) == len(document["identity"]) == 64
