"""Records about a run as a whole: what it is, what it serves, and the wish to stop it."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any, Literal

from pydantic import Field

from colchis.components.config import RunConfig
from colchis.components.store import Record


def now() -> str:
    """UTC time for people to read; no decision ever compares two of these."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")


class RunRecord(Record):
    """`runs/R/run.json`, created once; later changes of fields outside the identity are `runs/R/changes/NNNN.json`."""

    format: Literal[1] = 1
    run: str
    config: RunConfig
    config_digest: str
    identity_digest: str
    template: str
    """Name of the WorkflowTemplate that began the run (or made the change)."""
    template_digest: str = ""
    """What `colchis render` wrote into it. Overlays change images and resources; the pipeline is what has this digest."""
    code_version: str
    rows: str
    """`inputs/` digest of the environment's rows."""
    model: str
    """`inputs/` digest of the base model: configuration, tokenizer, weights."""
    changed: dict[str, list[Any]] = Field(default_factory=dict)
    """For a change: dotted field -> [before, after]."""
    created_at: str = Field(default_factory=now)


class Serving(Record):
    """`runs/R/serving.json`: the declared policy version, moved by compare-and-swap when all engines agree."""

    format: Literal[1] = 1
    run: str
    version: int = Field(ge=0)
    weights_digest: str
    engines: list[str]
    updated_at: str = Field(default_factory=now)


class Outcome(Record):
    """`runs/R/outcomes/WORKFLOW.json`: how a Workflow ended."""

    format: Literal[1] = 1
    workflow: str
    status: str
    """Argo's phase: Succeeded, Failed, Error."""
    at: str = Field(default_factory=now)


class StopWish(Record):
    """`runs/R/control/stop.json`: obeyed by the first stage of each iteration."""

    format: Literal[1] = 1
    reason: str
    by: str
    wished_at: str = Field(default_factory=now)
