"""What is passed around when templates are invoked: settings, events, calls, and what is visible inside a template."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

from colchis.workflows.local.launcher import Launcher
from colchis.workflows.local.nodes import Node, NodeType, Phase

Template = Mapping[str, Any]


class TemplateError(Exception):
    """A template could not be run at all (bad tags, missing inputs): its node is Error, and so is what called it."""


class EventKind(StrEnum):
    WORKFLOW_STARTED = "workflow started"
    WORKFLOW_FINISHED = "workflow finished"
    NODE_STARTED = "node started"
    NODE_FINISHED = "node finished"
    PROGRESS = "progress"
    IGNORED = "ignored"


@dataclass(frozen=True)
class Event:
    """Something a person who watches the run may want to see. `node` is Argo's name of it (`run[0].train(0)`)."""

    kind: EventKind
    workflow: str
    node: str = ""
    type: NodeType | None = None
    phase: Phase | None = None
    message: str = ""


@dataclass(frozen=True)
class Settings:
    """What is the same for every workflow of an interpreter."""

    work_dir: Path
    environment: Mapping[str, str]
    base_environment: Mapping[str, str]
    secrets: Mapping[str, Mapping[str, str]]
    launcher: Launcher
    on_event: Callable[[Event], None]
    grace_s: float


@dataclass(frozen=True)
class Ended:
    """How a process ended: its exit code, the node's message if it was stopped, the reason if it could not start."""

    code: int
    stopped: str | None = None
    why: str = ""

    @property
    def message(self) -> str:
        """What follows the container's name in a controller's message; empty after a success."""
        return f"Error (exit code {self.code}){self.why and f': {self.why}'}" if self.code else ""


@dataclass(frozen=True)
class Arguments:
    """Resolved arguments of a call: parameter values, artifact keys (None: an optional one that isn't there)."""

    parameters: Mapping[str, str] = field(default_factory=dict)
    artifacts: Mapping[str, str | None] = field(default_factory=dict)


@dataclass(frozen=True)
class Frame:
    """What is visible inside a template: values by tag, artifact keys by tag, and how it was called."""

    scope: Mapping[str, str]
    artifacts: Mapping[str, str]
    depth: int
    on_exit: bool = False
    capture_result: bool = False

    def with_values(self, values: Mapping[str, str], artifacts: Mapping[str, str] | None = None) -> Frame:
        return replace(self, scope={**self.scope, **values}, artifacts={**self.artifacts, **(artifacts or {})})


@dataclass(frozen=True)
class Call:
    """One invocation of a template: the node's name, the nodes it hangs on, and the template that it is part of."""

    name: str
    template: str
    arguments: Arguments
    parents: tuple[Node, ...]
    boundary: Node | None
    depth: int
    on_exit: bool = False
    capture_result: bool = False
    values: Mapping[str, str] = field(default_factory=dict)
    display_name: str | None = None
    flag: str | None = None


def node_values(prefix: str, node: Node) -> dict[str, str]:
    """What a later step or task sees of a node: `PREFIX.status`, `PREFIX.outputs.parameters.X`, ..."""
    node = last_attempt(node)
    shown = node.as_status()
    values = {f"{prefix}.id": node.id, f"{prefix}.status": str(node.phase), f"{prefix}.startedAt": shown["startedAt"]}
    if node.finished_at:
        values[f"{prefix}.finishedAt"] = shown["finishedAt"]
    values |= {f"{prefix}.outputs.parameters.{name}": value for name, value in node.outputs.parameters.items()}
    if node.outputs.result is not None:
        values[f"{prefix}.outputs.result"] = node.outputs.result
    if node.outputs.exit_code is not None:
        values[f"{prefix}.exitCode"] = str(node.outputs.exit_code)
    return values


def node_artifacts(prefix: str, node: Node) -> dict[str, str]:
    """Keys of the artifacts that a node gave, by the tag that names them."""
    return {f"{prefix}.outputs.artifacts.{name}": key for name, key in last_attempt(node).outputs.artifacts.items()}


def last_attempt(node: Node) -> Node:
    return node.attempts[-1] if node.attempts else node
