"""Nodes of a running workflow in the shape of Argo's `status.nodes`, and the status file that holds them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import Any


class Phase(StrEnum):
    """What became of a node or a workflow; the words are Argo's."""

    PENDING = "Pending"
    RUNNING = "Running"
    SUCCEEDED = "Succeeded"
    FAILED = "Failed"
    ERROR = "Error"
    SKIPPED = "Skipped"
    OMITTED = "Omitted"

    @property
    def failed(self) -> bool:
        return self in (Phase.FAILED, Phase.ERROR)

    @property
    def completed(self) -> bool:
        """Ended after having run, unlike Skipped and Omitted."""
        return self in (Phase.SUCCEEDED, Phase.FAILED, Phase.ERROR)

    @property
    def fulfilled(self) -> bool:
        return self not in (Phase.PENDING, Phase.RUNNING)


class NodeType(StrEnum):
    POD = "Pod"
    CONTAINER = "Container"
    STEPS = "Steps"
    STEP_GROUP = "StepGroup"
    DAG = "DAG"
    TASK_GROUP = "TaskGroup"
    RETRY = "Retry"
    SKIPPED = "Skipped"


@dataclass
class Outputs:
    """What a template gave: `parameters` by name, `artifacts` by name (key in the repository), stdout, exit code."""

    parameters: dict[str, str] = field(default_factory=dict)
    artifacts: dict[str, str] = field(default_factory=dict)
    result: str | None = None
    exit_code: int | None = None

    def as_status(self) -> dict[str, Any]:
        status: dict[str, Any] = {}
        if self.parameters:
            status["parameters"] = [{"name": name, "value": value} for name, value in self.parameters.items()]
        if self.artifacts:
            status["artifacts"] = [{"name": name, "s3": {"key": key}} for name, key in self.artifacts.items()]
        if self.result is not None:
            status["result"] = self.result
        if self.exit_code is not None:
            status["exitCode"] = str(self.exit_code)
        return status


@dataclass
class Node:
    """One node. `attempts` are the children of a Retry node; `children` are the edges of the graph, by id."""

    id: str
    name: str
    display_name: str
    type: NodeType
    template: str
    phase: Phase
    boundary: str | None = None
    message: str = ""
    started_at: datetime = field(default_factory=lambda: datetime.now(UTC))
    finished_at: datetime | None = None
    inputs: dict[str, str] = field(default_factory=dict)
    input_artifacts: dict[str, str] = field(default_factory=dict)
    outputs: Outputs = field(default_factory=Outputs)
    children: list[str] = field(default_factory=list)
    outbound: list[str] = field(default_factory=list)
    attempts: list[Node] = field(default_factory=list)
    progress: str = ""
    flag: str | None = None

    @property
    def seconds(self) -> float:
        return ((self.finished_at or datetime.now(UTC)) - self.started_at).total_seconds()

    def as_status(self) -> dict[str, Any]:
        status: dict[str, Any] = {
            "id": self.id,
            "name": self.name,
            "displayName": self.display_name,
            "type": str(self.type),
            "templateName": self.template,
            "phase": str(self.phase),
            "startedAt": timestamp(self.started_at),
            "finishedAt": timestamp(self.finished_at) if self.finished_at else None,
        }
        inputs: dict[str, Any] = {}
        if self.inputs:
            inputs["parameters"] = [{"name": name, "value": value} for name, value in self.inputs.items()]
        if self.input_artifacts:
            inputs["artifacts"] = [{"name": name, "s3": {"key": key}} for name, key in self.input_artifacts.items()]
        optional: dict[str, Any] = {
            "boundaryID": self.boundary,
            "message": self.message,
            "inputs": inputs,
            "progress": self.progress,
            "outputs": self.outputs.as_status(),
            "children": self.children,
            "outboundNodes": self.outbound,
            "nodeFlag": {self.flag: True} if self.flag else None,
        }
        return status | {key: value for key, value in optional.items() if value}


def timestamp(moment: datetime) -> str:
    return moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def fnv32a(text: str) -> int:
    """The hash in Argo's node ids."""
    value = 0x811C9DC5
    for byte in text.encode():
        value = ((value ^ byte) * 0x01000193) & 0xFFFFFFFF
    return value


class Nodes:
    """The nodes of one workflow by id, mirrored to `status.json` (atomically, at most every `interval_s`)."""

    def __init__(self, workflow: str, path: Path, *, interval_s: float = 0.2) -> None:
        self.workflow, self.path, self.interval_s = workflow, path, interval_s
        self.started_at = datetime.now(UTC)
        self.phase, self.message = Phase.RUNNING, ""
        self.finished_at: datetime | None = None
        self._nodes: dict[str, Node] = {}
        self._write: asyncio.TimerHandle | None = None

    def __iter__(self) -> Iterator[Node]:
        return iter(list(self._nodes.values()))

    def __getitem__(self, node_id: str) -> Node:
        return self._nodes[node_id]

    def id_of(self, name: str) -> str:
        return name if name == self.workflow else f"{self.workflow}-{fnv32a(name)}"

    def find(self, name: str) -> Node | None:
        return self._nodes.get(self.id_of(name))

    def add(
        self,
        name: str,
        kind: NodeType,
        template: str,
        *,
        boundary: Node | None = None,
        phase: Phase = Phase.RUNNING,
        message: str = "",
        display_name: str | None = None,
        flag: str | None = None,
    ) -> Node:
        """A new node; it starts now, and has ended if its phase says so."""
        if display_name is None:
            display_name = name
            if boundary is not None and name.startswith(boundary.name):
                display_name = name.removeprefix(boundary.name)
                if display_name.startswith("[") and "]." in display_name:
                    display_name = display_name.split("].", 1)[1]
                display_name = display_name.removeprefix(".")
        node = Node(self.id_of(name), name, display_name, kind, template, phase, flag=flag)
        node.boundary = boundary.id if boundary is not None else None
        node.message = message
        if phase.fulfilled:
            node.finished_at = node.started_at
        self._nodes[node.id] = node
        self.changed()
        return node

    def mark(self, node: Node, phase: Phase, message: str | None = None) -> Node:
        node.phase = phase
        if message is not None:
            node.message = message
        if phase.fulfilled and node.finished_at is None:
            node.finished_at = datetime.now(UTC)
        self.changed()
        return node

    def connect(self, parent: Node, child: Node) -> None:
        if child.id not in parent.children:
            parent.children.append(child.id)
            self.changed()

    def outbound(self, node: Node) -> list[Node]:
        """The nodes that what follows `node` hangs on, by Argo's rules per type."""
        if node.type is NodeType.RETRY:
            return [node.attempts[-1]] if node.attempts else []
        if node.type in (NodeType.STEPS, NodeType.DAG):
            return [leaf for child in node.outbound for leaf in self.outbound(self[child])]
        if node.type in (NodeType.TASK_GROUP, NodeType.CONTAINER, NodeType.POD):
            inner = [self[child] for child in node.children]
            if node.type is not NodeType.TASK_GROUP:
                inner = [child for child in inner if child.type is NodeType.CONTAINER]
            return [leaf for child in inner for leaf in self.outbound(child)] if inner else [node]
        return [node]

    def finish(self, phase: Phase, message: str) -> None:
        self.phase, self.message, self.finished_at = phase, message, datetime.now(UTC)
        self.write()

    def changed(self) -> None:
        if self._write is None and self.finished_at is None:
            self._write = asyncio.get_running_loop().call_later(self.interval_s, self._mirror)

    def _mirror(self) -> None:
        with contextlib.suppress(OSError):  # a full disk: nobody waits for this one, and the last write says it
            self.write()

    def write(self) -> None:
        if self._write is not None:
            self._write.cancel()
            self._write = None
        temporary = self.path.with_name(f".{self.path.name}.tmp")
        temporary.write_text(json.dumps(self.as_status(), separators=(",", ":")))
        os.replace(temporary, self.path)

    def as_status(self) -> dict[str, Any]:
        """`metadata.name` and `status` of the Workflow, as `kubectl get workflow -o json` shows them."""
        return {
            "metadata": {"name": self.workflow},
            "status": {
                "phase": str(self.phase),
                "message": self.message,
                "startedAt": timestamp(self.started_at),
                "finishedAt": timestamp(self.finished_at) if self.finished_at else None,
                "nodes": {node.id: node.as_status() for node in self._nodes.values()},
            },
        }
