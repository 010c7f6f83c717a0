"""RunConfig: one validated object for a whole run, the same on a laptop, in CI and in a pod."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel, Field, ValidationError, model_validator

from colchis.components.config import sections
from colchis.components.config.sections import (
    AlgorithmConfig,
    EnvironmentConfig,
    EvaluationConfig,
    GraderConfig,
    LoopConfig,
    ModelConfig,
    ReloadConfig,
    RolloutConfig,
    Section,
    TrainerConfig,
    identity,
)
from colchis.components.errors import BadConfig


@dataclass(frozen=True)
class Rounding:
    """What two programs that are both right may differ by, in natural logarithms of probabilities."""

    gap_alert: float
    probe_tolerance: float


ROUNDING = {"float32": Rounding(1e-3, 2e-4), "bfloat16": Rounding(2e-2, 2e-2)}
"""By `model.dtype`."""


class RunConfig(Section):
    """Everything that a run may choose. Sections are the parameters of the WorkflowTemplates."""

    mode: Literal["sync", "colocated", "disaggregated"] = identity("sync")
    """How rollout and training overlap. `colocated` and `disaggregated` are not built yet."""

    model: ModelConfig
    environment: EnvironmentConfig
    rollout: RolloutConfig = Field(default_factory=RolloutConfig)
    grader: GraderConfig = Field(default_factory=GraderConfig)
    algorithm: AlgorithmConfig = Field(default_factory=AlgorithmConfig)
    trainer: TrainerConfig = Field(default_factory=TrainerConfig)
    reload: ReloadConfig = Field(default_factory=ReloadConfig)
    evaluation: EvaluationConfig = Field(default_factory=EvaluationConfig)
    loop: LoopConfig = Field(default_factory=LoopConfig)

    @model_validator(mode="after")
    def _sections_agree(self) -> RunConfig:
        problems = list(_disagreements(self))
        if problems:
            raise ValueError("\n".join(problems))
        return self

    @property
    def gap_alert(self) -> float:
        """`trainer.gap_alert`, or what the type of the weights suggests."""
        return self.trainer.gap_alert or ROUNDING[self.model.dtype].gap_alert

    @property
    def probe_tolerance(self) -> float:
        """`reload.probe_tolerance`, or what the type of the weights suggests."""
        return self.reload.probe_tolerance or ROUNDING[self.model.dtype].probe_tolerance

    def canonical(self) -> str:
        """Canonical JSON: sorted keys, no spaces, every default written out."""
        return _canonical(self.model_dump(mode="json"))

    def digest(self) -> str:
        """sha256 of the canonical JSON, in hex."""
        return hashlib.sha256(self.canonical().encode()).hexdigest()

    def identity(self) -> dict[str, Any]:
        """The fields that make a run the run that it is, by dotted name."""
        return dict(_identity_fields(self))

    def flat(self) -> dict[str, Any]:
        """Every field by dotted name, as JSON has it."""
        return dict(_flat(self.model_dump(mode="json")))

    def identity_digest(self) -> str:
        return hashlib.sha256(_canonical(self.identity()).encode()).hexdigest()


def _canonical(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def _flat(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from _flat(inner, f"{prefix}{name}.")
    else:
        yield prefix.rstrip("."), value


def _identity_fields(section: BaseModel, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, field in type(section).model_fields.items():
        value = getattr(section, name)
        extra = field.json_schema_extra
        if isinstance(value, BaseModel):
            yield from _identity_fields(value, f"{prefix}{name}.")
        elif isinstance(extra, dict) and extra.get("identity"):
            yield prefix + name, json.loads(_canonical(value))


def _disagreements(c: RunConfig) -> Iterator[str]:
    """What no single field can know. Each message names the fields and the fix."""
    if c.mode != "sync":
        yield f"mode: '{c.mode}' is not built yet; use 'sync'"
    if c.trainer.ranks > 1:
        yield f"trainer.ranks: {c.trainer.ranks} ranks are not built yet; use 1"
    if c.grader.placement == "pool":
        yield "grader.placement: 'pool' is not built yet; use 'inline' or 'step'"
    if c.reload.transfer != "store" and c.trainer.lora_rank and c.reload.adapters == "auto":
        yield (
            f"reload.transfer: '{c.reload.transfer}' sends whole versions, but with trainer.lora_rank engines get adapters, "
            "which are small; use 'store', or set reload.adapters=merged"
        )
    if c.mode == "sync" and c.loop.max_lag != 0:
        yield f"loop.max_lag: {c.loop.max_lag}, but mode 'sync' trains every token at lag 0; set it to 0"
    if c.algorithm.min_valid > c.rollout.group_size:
        yield (
            f"algorithm.min_valid: {c.algorithm.min_valid} is more than rollout.group_size ({c.rollout.group_size}), "
            "so every group would be dropped; lower it or sample larger groups"
        )
    if c.rollout.group_size == 1:
        yield "rollout.group_size: a group of 1 has no baseline; use 2 or more"
    if c.algorithm.estimator in ("grpo", "rloo") and c.algorithm.min_valid < 2:
        yield f"algorithm.min_valid: '{c.algorithm.estimator}' compares members of a group; use 2 or more"
    if c.rollout.shards > c.rollout.prompts:
        yield f"rollout.shards: {c.rollout.shards} shards for {c.rollout.prompts} prompts leave pods idle; use fewer"
    if c.trainer.steps > c.rollout.prompts:
        yield (
            f"trainer.steps: {c.trainer.steps} optimiser steps need at least as many groups, but rollout.prompts is "
            f"{c.rollout.prompts}; lower one or raise the other"
        )
    if c.rollout.max_new_tokens * c.rollout.max_turns > c.trainer.micro_batch_tokens:
        yield (
            f"trainer.micro_batch_tokens: {c.trainer.micro_batch_tokens} cannot hold one trajectory of "
            f"rollout.max_new_tokens x max_turns = {c.rollout.max_new_tokens * c.rollout.max_turns}; raise it"
        )
    if c.rollout.top_k == 0:
        yield "rollout.top_k: 0 leaves no token to sample; use -1 for all of them"
    if c.trainer.schedule != "constant" and c.trainer.schedule_iterations is None:
        yield f"trainer.schedule_iterations: schedule '{c.trainer.schedule}' needs its length; set it"
    if (
        c.trainer.schedule_iterations is not None
        and c.trainer.schedule != "constant"
        and c.trainer.schedule_iterations <= c.trainer.warmup_iterations
    ):
        yield "trainer.schedule_iterations: must be more than trainer.warmup_iterations"
    if not all(0 <= b < 1 for b in c.trainer.betas):
        yield f"trainer.betas: {list(c.trainer.betas)} must both lie in [0, 1)"
    yield from _grader_disagreements(c)
    if "{prompt}" not in getattr(c.environment, "prompt_template", "{prompt}"):
        yield "environment.prompt_template: must contain '{prompt}', else every row gives the same prompt"
    yield from _unusable_text(c.model_dump(mode="json"))


def _grader_disagreements(c: RunConfig) -> Iterator[str]:
    g = c.grader
    if g.face == "rule" and g.pattern is None and g.tolerance is None:
        yield "grader.pattern: face 'rule' needs a pattern, a tolerance or both; or use face 'exact'"
    if g.face != "rule" and (g.pattern is not None or g.tolerance is not None):
        yield f"grader.pattern and grader.tolerance belong to face 'rule', not to '{g.face}'; remove them"
    if g.face == "own" and not g.name:
        yield "grader.name: face 'own' needs the name of an entry point in the group 'colchis.graders'"
    if g.face != "own" and (g.name or g.options):
        yield f"grader.name and grader.options belong to face 'own', not to '{g.face}'; remove them"
    if g.placement == "inline" and g.shards != 1:
        yield f"grader.shards: {g.shards} has no meaning with placement 'inline'; remove it or use placement 'step'"
    patterns = (
        ("grader.pattern", g.pattern),
        ("environment.prompt_pattern", getattr(c.environment, "prompt_pattern", None)),
    )
    for name, pattern in patterns:
        if pattern is not None:
            try:
                re.compile(pattern)
            except re.error as e:
                yield f"{name}: not a regular expression ({e})"


def _unusable_text(value: Any, path: str = "") -> Iterator[str]:
    """Argo would expand '{{' inside a parameter, so no value may hold it."""
    if isinstance(value, str) and "{{" in value:
        yield f"{path}: holds '{{{{', which Argo would expand; write it differently"
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _unusable_text(str(key), f"{path}.{key}".lstrip("."))
            yield from _unusable_text(inner, f"{path}.{key}".lstrip("."))
    elif isinstance(value, list):
        for i, inner in enumerate(value):
            yield from _unusable_text(inner, f"{path}[{i}]")


def parse(document: Any, *, source: str = "configuration") -> RunConfig:
    """Validate a parsed document. Raises BadConfig with one line per problem, each naming its field."""
    if not isinstance(document, Mapping):
        raise BadConfig(f"{source}: expected a mapping of sections, found {type(document).__name__}")
    try:
        return RunConfig.model_validate(dict(document))
    except ValidationError as e:
        raise BadConfig("\n".join(f"{source}: {line}" for line in _lines(e))) from None


_UNION_TAGS = {"reasoning_gym", "dataset", "own"}


def _lines(error: ValidationError) -> Iterator[str]:
    for item in error.errors(include_url=False):
        where = ".".join(str(part) for part in item["loc"] if part not in _UNION_TAGS)
        message = item["msg"].removeprefix("Value error, ")
        match item["type"]:
            case "extra_forbidden":
                yield f"{where}: no such field; known: {', '.join(_known_fields(where))}"
            case "missing":
                yield f"{where}: is required"
            case "value_error":
                yield message if not where else f"{where}: {message}"
            case "union_tag_not_found" | "union_tag_invalid":
                found = item["input"].get("kind") if isinstance(item["input"], Mapping) else None
                kinds = f"one of {', '.join(sorted(_UNION_TAGS))}"
                yield f"{where}.kind: " + (f"expected {kinds}, found {found!r}" if found else f"is required: {kinds}")
            case sections.SWITCH:
                yield f"{where}.{item['ctx']['field']}: {message}"
            case "model_type" | "model_attributes_type" | "dict_type":
                yield f"{where}: expected a mapping of fields, found {item['input']!r}"
            case _:
                yield f"{where}: {message.replace('Input should be', 'expected', 1)}, found {item['input']!r}"


def _known_fields(where: str) -> list[str]:
    model: Any = RunConfig
    for part in where.split(".")[:-1]:
        field = model.model_fields.get(part) if isinstance(model, type) and issubclass(model, BaseModel) else None
        model = field.annotation if field is not None else None
    if isinstance(model, type) and issubclass(model, BaseModel):
        return sorted(model.model_fields)
    return ["see docs/configuration.md"]
