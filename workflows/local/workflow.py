"""One running workflow: how a template is invoked, retried and stopped. Steps and DAGs are in steps.py and dag.py."""

from __future__ import annotations

import asyncio
import json
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

from colchis.components.errors import BadConfig, BadData
from colchis.workflows.local import dag, steps
from colchis.workflows.local.accepted import PARAMETER_LIMIT_BYTES
from colchis.workflows.local.durations import seconds
from colchis.workflows.local.expressions import ExpressionError, evaluate
from colchis.workflows.local.launcher import CannotStart, Command, Launcher
from colchis.workflows.local.nodes import Node, Nodes, NodeType, Outputs, Phase, fnv32a
from colchis.workflows.local.pods import OutputError, Pod
from colchis.workflows.local.substitution import TAG, SubstitutionError, substitute

MAX_DEPTH = 100  # maxAllowedStackDepth of the controller
STEP_DEADLINE = "Step exceeded its deadline"


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

    def with_values(self, values: Mapping[str, str]) -> Frame:
        return replace(self, scope={**self.scope, **values})


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


class TemplateError(Exception):
    """A template could not be run at all (bad tags, missing inputs): its node is Error, and so is what called it."""


class WorkflowRun:
    """Executes one Workflow. `spec` is complete: what a workflowTemplateRef named is merged into it."""

    def __init__(
        self,
        name: str,
        spec: Mapping[str, Any],
        values: Mapping[str, str],
        settings: Settings,
        create_successor: Callable[[str, str, str], str | None],
    ) -> None:
        self.name, self.spec, self.settings = name, spec, settings
        self.namespace = values["workflow.namespace"]
        self.create_successor = create_successor
        self.templates = {template["name"]: template for template in spec["templates"]}
        self.directory = settings.work_dir / name
        self.directory.mkdir(parents=True, exist_ok=True)
        self.nodes = Nodes(name, self.directory / "status.json")
        self.values = dict(values)
        self.stop_reason: str | None = None
        self._stopped = asyncio.Event()
        self._started = time.monotonic()
        deadline = spec.get("activeDeadlineSeconds")
        self._deadline_s = None if deadline is None else float(substitute(str(deadline), values))
        parallelism = spec.get("parallelism")
        self._slots = asyncio.Semaphore(int(parallelism)) if parallelism else None

    # Control

    def stop(self, strategy: str) -> None:
        """`Stop` or `Terminate`: running pods get SIGTERM, nothing new starts."""
        if self.stop_reason is None or strategy == "Terminate":
            self.stop_reason = strategy
        self._stopped.set()

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._started

    def remaining_s(self, frame: Frame) -> float | None:
        """Until the workflow's deadline, which an exit handler doesn't have."""
        return None if self._deadline_s is None or frame.on_exit else max(0.0, self._deadline_s - self.elapsed_s)

    async def pause(self, duration_s: float) -> None:
        """Sleeps, or less when the workflow is stopped or at its deadline."""
        if self._deadline_s is not None:
            duration_s = min(duration_s, max(0.0, self._deadline_s - self.elapsed_s))
        try:
            async with asyncio.timeout(duration_s):
                await self._stopped.wait()
        except TimeoutError:
            pass

    def refusal_to_start(self, on_exit: bool) -> str | None:
        """Why no new pod may start now."""
        if on_exit:
            return None
        if self.stop_reason is not None:
            return f"workflow shutdown with strategy: {self.stop_reason}"
        if self._deadline_s is not None and self.elapsed_s >= self._deadline_s:
            return STEP_DEADLINE
        return None

    async def supervise(self, command: Command, deadline_s: float | None, *, stoppable: bool) -> tuple[int, str | None]:
        """Runs a process to its end: (exit code, why it was stopped). Stopping is SIGTERM, the grace, SIGKILL."""
        try:
            process = await self.settings.launcher.start(command)
        except CannotStart as error:
            command.stderr.write_text(f"{error}\n")
            return 64, None
        ended = asyncio.create_task(process.wait())
        stop = asyncio.create_task(self._stopped.wait())
        reason: str | None = None
        try:
            waiting = {ended, stop} if stoppable else {ended}
            await asyncio.wait(waiting, timeout=deadline_s, return_when=asyncio.FIRST_COMPLETED)
            if not ended.done():
                stopped = stoppable and stop.done()
                reason = f"workflow shutdown with strategy: {self.stop_reason}" if stopped else "deadline"
        finally:
            stop.cancel()
            if not ended.done():
                process.signal(signal.SIGTERM)
                await asyncio.wait({ended}, timeout=self.settings.grace_s)
            if not ended.done():
                process.signal(signal.SIGKILL)
        return await ended, reason

    # Events

    def emit(self, kind: EventKind, node: Node) -> None:
        self.settings.on_event(Event(kind, self.name, node.name, node.type, node.phase, node.message))

    def report_progress(self, node: Node) -> None:
        self.nodes.changed()
        self.settings.on_event(Event(EventKind.PROGRESS, self.name, node.name, node.type, node.phase, node.progress))

    # Templates

    def add_node(
        self, call: Call, kind: NodeType, phase: Phase = Phase.RUNNING, message: str = "", flag: str | None = None
    ) -> Node:
        node = self.nodes.add(
            call.name,
            kind,
            call.template,
            boundary=call.boundary,
            phase=phase,
            message=message,
            display_name=call.display_name,
            flag=flag or call.flag,
        )
        for parent in call.parents:
            self.nodes.connect(parent, node)
        return node

    async def execute(self, call: Call) -> Node:
        """Invokes a template and returns its ended node. Raises TemplateError when it could not be run."""
        if call.depth >= MAX_DEPTH:
            return self.add_node(call, NodeType.SKIPPED, Phase.ERROR, "Maximum recursion depth exceeded")
        try:
            template = self._template(call.template)
            frame = self._frame(template, call)
        except (SubstitutionError, ExpressionError, BadConfig) as error:
            self.add_node(call, NodeType.SKIPPED, Phase.ERROR, str(error))
            raise TemplateError(str(error)) from error
        inputs = {p["name"]: frame.scope[f"inputs.parameters.{p['name']}"] for p in _inputs(template, "parameters")}
        if "retryStrategy" not in template:
            return await self._attempt(call, template, frame, inputs)
        return await self._retry(call, template, frame, inputs)

    async def _attempt(
        self, call: Call, template: Mapping[str, Any], frame: Frame, inputs: dict[str, str], flag: str | None = None
    ) -> Node:
        kind = NodeType.STEPS if "steps" in template else NodeType.DAG if "dag" in template else NodeType.POD
        if kind is NodeType.POD and self._slots is not None:
            async with self._slots:
                return await self._run_template(call, template, frame, inputs, kind, flag)
        return await self._run_template(call, template, frame, inputs, kind, flag)

    async def _run_template(
        self,
        call: Call,
        template: Mapping[str, Any],
        frame: Frame,
        inputs: dict[str, str],
        kind: NodeType,
        flag: str | None,
    ) -> Node:
        refusal = self.refusal_to_start(frame.on_exit) if kind is NodeType.POD else None
        if refusal is not None:
            return self.add_node(call, kind, Phase.FAILED, refusal, flag)
        node = self.add_node(call, kind, flag=flag)
        node.inputs = inputs
        node.input_artifacts = {
            name.removeprefix("inputs.artifacts."): key
            for name, key in frame.artifacts.items()
            if name.startswith("inputs.artifacts.")
        }
        self.emit(EventKind.NODE_STARTED, node)
        frame = frame.with_values({"node.name": call.name})
        try:
            if kind is NodeType.STEPS:
                await steps.run(self, node, template, frame)
            elif kind is NodeType.DAG:
                await dag.run(self, node, template, frame)
            else:
                await Pod(self, node, template, frame).execute()
        except (SubstitutionError, ExpressionError, OutputError, BadConfig, BadData, ValueError) as error:
            self.nodes.mark(node, Phase.ERROR, str(error))
            if not isinstance(error, OutputError):
                raise TemplateError(str(error)) from error
        finally:
            self.emit(EventKind.NODE_FINISHED, node)
        return node

    async def _retry(self, call: Call, template: Mapping[str, Any], frame: Frame, inputs: dict[str, str]) -> Node:
        parent = self.add_node(call, NodeType.RETRY)
        parent.inputs = inputs
        last: Node | None = None
        while True:
            number = len(parent.attempts)
            frame = frame.with_values(
                {
                    "retries": str(number),
                    "lastRetry.exitCode": "0" if last is None else _code(last, "0"),
                    "lastRetry.status": "" if last is None else str(last.phase),
                    "lastRetry.duration": "0" if last is None else f"{last.seconds:g}",
                    "lastRetry.message": "" if last is None else last.message,
                }
            )
            name = f"{call.name}({number})"
            display_name = f"{parent.display_name}({number})"
            attempt = replace(call, name=name, parents=(parent,), display_name=display_name)
            try:
                last = await self._attempt(attempt, template, frame, inputs, "retried")
            except TemplateError as error:
                found = self.nodes.find(name)
                self.nodes.mark(parent, Phase.ERROR, str(error))
                if found is None:
                    raise
                last = found
                raise
            parent.attempts.append(last)
            verdict = await self._after_attempt(parent, template, frame, last)
            if verdict is not None:
                parent.outputs = last.outputs
                return self.nodes.mark(parent, *verdict)

    async def _after_attempt(
        self, parent: Node, template: Mapping[str, Any], frame: Frame, last: Node
    ) -> tuple[Phase, str] | None:
        """How a Retry node ends; None for another attempt, after the backoff."""
        if not last.phase.failed:
            return Phase.SUCCEEDED, ""
        if self.stop_reason is not None and not frame.on_exit:
            return last.phase, f"Stopped with strategy '{self.stop_reason}'"
        if self.refusal_to_start(frame.on_exit) is not None:
            return last.phase, "retry exceeded workflow deadline"
        strategy = {key: value for key, value in template["retryStrategy"].items() if key != "expression"}
        strategy = substitute(strategy, frame.scope)
        wait_s = 0.0
        if "backoff" in strategy:
            wait_s, refusal = _backoff(strategy["backoff"], parent)
            if refusal is not None:
                return last.phase, refusal
        expression = template["retryStrategy"].get("expression", "")
        policy = strategy.get("retryPolicy") or ("Always" if expression else "OnFailure")
        retried = {"Always": (Phase.FAILED, Phase.ERROR), "OnFailure": (Phase.FAILED,), "OnError": (Phase.ERROR,)}
        if last.phase not in retried[policy]:
            return last.phase, last.message
        if "limit" in strategy and len(parent.attempts) > int(strategy["limit"]):
            return last.phase, "No more retries left"
        if expression:
            variables = {
                "retries": str(len(parent.attempts) - 1),
                "lastRetry.exitCode": _code(last, "-1"),
                "lastRetry.status": str(last.phase),
                "lastRetry.duration": f"{last.seconds:g}",
                "lastRetry.message": last.message,
            }
            text = TAG.sub(lambda tag: substitute(tag.group(), frame.scope), expression)
            if evaluate(text, variables) is not True:
                return last.phase, "retryStrategy.expression evaluated to false"
        await self.pause(wait_s)
        if self.refusal_to_start(frame.on_exit) is not None:
            return last.phase, last.message
        return None

    def _template(self, name: str) -> Mapping[str, Any]:
        if name not in self.templates:
            raise BadConfig(f"template {name} undefined")
        return self.templates[name]

    def _frame(self, template: Mapping[str, Any], call: Call) -> Frame:
        """The scope of a template: the workflow's values, its inputs by argument or default, its artifacts."""
        scope = {**self.values, **call.values, "workflow.duration": f"{self.elapsed_s:f}"}
        values: dict[str, str] = {}
        for parameter in _inputs(template, "parameters"):
            name = parameter["name"]
            if name in call.arguments.parameters:
                value = call.arguments.parameters[name]
            elif "value" in parameter or "default" in parameter:
                value = substitute(parameter.get("value", parameter.get("default")), scope)
            else:
                raise SubstitutionError(f"inputs.parameters.{name} had no value")
            if len(value.encode()) > PARAMETER_LIMIT_BYTES:
                raise SubstitutionError(f"inputs.parameters.{name} is longer than {PARAMETER_LIMIT_BYTES} bytes")
            values[name] = value
        scope |= {f"inputs.parameters.{name}": value for name, value in values.items()}
        listed = [{"name": name, "value": value} for name, value in values.items()]
        scope["inputs.parameters"] = json.dumps(listed, separators=(",", ":"))
        artifacts: dict[str, str] = {}
        for artifact in _inputs(template, "artifacts"):
            name = artifact["name"]
            key = call.arguments.artifacts.get(name)
            if key is None and "s3" in artifact:
                key = substitute(artifact["s3"]["key"], scope)
            if key is not None:
                artifacts[f"inputs.artifacts.{name}"] = key
            elif not artifact.get("optional"):
                raise SubstitutionError(f"inputs.artifacts.{name} was not supplied")
        return Frame(scope, artifacts, call.depth, call.on_exit, call.capture_result)

    # The whole

    async def execute_all(self) -> None:
        """Runs the entrypoint and the exit handler; the phase and message are in `nodes` afterwards."""
        phase, message = await self._entry()
        if self.spec.get("onExit") and self.stop_reason != "Terminate":
            self.values["workflow.status"] = str(phase)
            self.values["workflow.failures"] = json.dumps(json.dumps(self._failures(), separators=(",", ":")))
            name = f"{self.name}.onExit"
            call = Call(name, self.spec["onExit"], Arguments(), (), None, 1, on_exit=True, flag="hooked")
            try:
                node = await self.execute(call)
            except TemplateError as error:
                phase, message = Phase.ERROR, f"error in exit template execution : {error}"
            else:
                if phase is Phase.SUCCEEDED and node.phase.failed:
                    phase, message = node.phase, node.message
        self.nodes.finish(phase, message)

    async def _entry(self) -> tuple[Phase, str]:
        parameters = {
            name.removeprefix("workflow.parameters."): value
            for name, value in self.values.items()
            if name.startswith("workflow.parameters.")
        }
        entry = Call(self.name, self.spec["entrypoint"], Arguments(parameters), (), None, 1)
        try:
            node = await self.execute(entry)
        except TemplateError as error:
            return Phase.ERROR, f"error in entry template execution: {error}"
        if node.phase is Phase.ERROR and node.message.startswith("Maximum recursion"):
            return Phase.ERROR, f"error in entry template execution: {node.message}"
        if not node.phase.failed:
            return Phase.SUCCEEDED, node.message if node.phase is Phase.SUCCEEDED else ""
        message = f"Stopped with strategy '{self.stop_reason}'" if self.stop_reason else node.message
        return node.phase, message

    def _failures(self) -> list[dict[str, Any]]:
        return [
            {
                "displayName": node.display_name,
                "message": node.message,
                "templateName": node.template,
                "phase": str(node.phase),
                "podName": f"{self.name}-{node.template}-{fnv32a(node.name)}",
                "finishedAt": node.as_status()["finishedAt"],
            }
            for node in self.nodes
            if node.phase.failed
        ]


def node_values(prefix: str, node: Node) -> dict[str, str]:
    """What a later step or task sees of a node: `PREFIX.status`, `PREFIX.outputs.parameters.X`, ..."""
    if node.type is NodeType.RETRY and node.attempts:
        node = node.attempts[-1]
    shown = node.as_status()
    values = {f"{prefix}.id": node.id, f"{prefix}.status": str(node.phase), f"{prefix}.startedAt": shown["startedAt"]}
    if node.finished_at:
        values[f"{prefix}.finishedAt"] = shown["finishedAt"]
    return values | output_values(prefix, node.outputs)


def output_values(prefix: str, outputs: Outputs) -> dict[str, str]:
    values = {f"{prefix}.outputs.parameters.{name}": value for name, value in outputs.parameters.items()}
    if outputs.result is not None:
        values[f"{prefix}.outputs.result"] = outputs.result
    if outputs.exit_code is not None:
        values[f"{prefix}.exitCode"] = str(outputs.exit_code)
    return values


def _inputs(template: Mapping[str, Any], kind: str) -> list[Mapping[str, Any]]:
    found: list[Mapping[str, Any]] = template.get("inputs", {}).get(kind, [])
    return found


def _code(node: Node, absent: str) -> str:
    return absent if node.outputs.exit_code is None else str(node.outputs.exit_code)


def _backoff(backoff: Mapping[str, Any], parent: Node) -> tuple[float, str | None]:
    """Seconds until the next attempt, or why there is none: duration * factor^(attempts - 1), at most `cap`."""
    if not backoff.get("duration"):
        raise ValueError("no base duration specified for retryStrategy")
    last = parent.attempts[-1]
    wait_s = seconds(backoff["duration"])
    factor = int(backoff.get("factor") or 0)
    if factor > 0:
        wait_s *= factor ** (len(parent.attempts) - 1)
    if backoff.get("cap"):
        wait_s = min(wait_s, seconds(backoff["cap"]))
    if backoff.get("maxDuration") and last.finished_at is not None:
        elapsed_s = (last.finished_at - parent.attempts[0].started_at).total_seconds()
        if elapsed_s > seconds(backoff["maxDuration"]):
            return 0.0, "Max duration limit exceeded"
        if elapsed_s + wait_s > seconds(backoff["maxDuration"]):
            return 0.0, "Backoff would exceed max duration limit"
    return wait_s, None
