"""One running workflow: how a template is invoked, retried and stopped. Steps and DAGs are in steps.py and dag.py."""

from __future__ import annotations

import asyncio
import json
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from colchis.components.errors import BadConfig, BadData
from colchis.workflows.local import dag, steps
from colchis.workflows.local.accepted import PARAMETER_LIMIT_BYTES
from colchis.workflows.local.calls import (
    Arguments,
    Call,
    Ended,
    Event,
    EventKind,
    Frame,
    Settings,
    Template,
    TemplateError,
)
from colchis.workflows.local.durations import humanize
from colchis.workflows.local.expression_tree import ExpressionError
from colchis.workflows.local.launcher import CannotStart, Command
from colchis.workflows.local.nodes import Node, Nodes, NodeType, Phase, fnv32a
from colchis.workflows.local.pods import POD_DEADLINE, STEP_DEADLINE, OutputError, Pod
from colchis.workflows.local.retries import attempt_values, next_attempt
from colchis.workflows.local.substitution import SubstitutionError, substitute

MAX_DEPTH = 100  # maxAllowedStackDepth of the controller
TOO_DEEP = "Maximum recursion depth exceeded"
CANNOT_RUN = 64  # what Argo's executor exits with when it cannot start the program


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
        self.templates: dict[str, Template] = {template["name"]: template for template in spec["templates"]}
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

    def remaining_s(self, on_exit: bool) -> float | None:
        """Until the workflow's deadline, which an exit handler doesn't have."""
        return None if self._deadline_s is None or on_exit else max(0.0, self._deadline_s - self.elapsed_s)

    async def pause(self, duration_s: float, on_exit: bool) -> None:
        """Sleeps, or less when the workflow is stopped or at its deadline."""
        remaining_s = self.remaining_s(on_exit)
        if on_exit:
            await asyncio.sleep(duration_s)
            return
        try:
            async with asyncio.timeout(duration_s if remaining_s is None else min(duration_s, remaining_s)):
                await self._stopped.wait()
        except TimeoutError:
            return

    def refusal_to_start(self, on_exit: bool) -> str | None:
        """Why no new pod may start now."""
        if self.stop_reason is not None and not on_exit:
            return f"workflow shutdown with strategy: {self.stop_reason}"
        if self.remaining_s(on_exit) == 0.0:
            return STEP_DEADLINE
        return None

    async def supervise(
        self, command: Command, deadline_s: float | None, on_exit: bool, *, abandoned: asyncio.Event | None = None
    ) -> Ended:
        """Runs a process to its end. At its deadline (or the workflow's), when the workflow is stopped, or when it is
        `abandoned`, it is ended: SIGTERM, the grace, SIGKILL. An exit handler isn't stopped.
        """
        remaining_s = self.remaining_s(on_exit)
        message = POD_DEADLINE
        if remaining_s is not None and (deadline_s is None or remaining_s < deadline_s):
            deadline_s, message = remaining_s, STEP_DEADLINE
        try:
            process = await self.settings.launcher.start(command)
        except CannotStart as error:
            return Ended(CANNOT_RUN, why=str(error))
        ended = asyncio.create_task(process.wait())
        stop = asyncio.create_task(self._stopped.wait())
        abandon = asyncio.create_task((abandoned or asyncio.Event()).wait())
        stopped: str | None = None
        try:
            waiting: set[asyncio.Task[Any]] = {ended, abandon} if on_exit else {ended, abandon, stop}
            await asyncio.wait(waiting, timeout=deadline_s, return_when=asyncio.FIRST_COMPLETED)
            if not ended.done() and not abandon.done():
                stopped = self.refusal_to_start(on_exit) if stop.done() else message
        finally:
            stop.cancel()
            abandon.cancel()
            if not ended.done():
                process.signal(signal.SIGTERM)
                await asyncio.wait({ended}, timeout=self.settings.grace_s)
            if not ended.done():
                process.signal(signal.SIGKILL)
                await ended
        return Ended(ended.result(), stopped)

    # Events

    def emit(self, kind: EventKind, node: Node, message: str | None = None) -> None:
        shown = node.message if message is None else message
        self.settings.on_event(Event(kind, self.name, node.name, node.type, node.phase, shown))

    def report_progress(self, node: Node) -> None:
        self.nodes.changed()
        self.emit(EventKind.PROGRESS, node, node.progress)

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
            return self.add_node(call, NodeType.SKIPPED, Phase.ERROR, TOO_DEEP)
        try:
            if call.template not in self.templates:
                raise SubstitutionError(f"template {call.template} undefined")
            template = self.templates[call.template]
            frame = self._frame(template, call)
        except SubstitutionError as error:
            self.add_node(call, NodeType.SKIPPED, Phase.ERROR, str(error))
            raise TemplateError(str(error)) from error
        if "retryStrategy" in template:
            return await self._retry(call, template, frame)
        return await self._attempt(call, template, frame)

    async def _attempt(self, call: Call, template: Template, frame: Frame, flag: str | None = None) -> Node:
        kind = NodeType.STEPS if "steps" in template else NodeType.DAG if "dag" in template else NodeType.POD
        if kind is not NodeType.POD:
            return await self._run_template(call, template, frame, kind, flag)
        if self._slots is not None:
            async with self._slots:
                return await self._run_template(call, template, frame, kind, flag)
        return await self._run_template(call, template, frame, kind, flag)

    async def _run_template(
        self, call: Call, template: Template, frame: Frame, kind: NodeType, flag: str | None
    ) -> Node:
        refusal = self.refusal_to_start(frame.on_exit) if kind is NodeType.POD else None
        if refusal is not None:
            return self.add_node(call, kind, Phase.FAILED, refusal, flag)
        node = self.add_node(call, kind, flag=flag)
        self._show_inputs(node, template, frame)
        self.emit(EventKind.NODE_STARTED, node)
        frame = frame.with_values({"node.name": call.name})
        try:
            if kind is NodeType.STEPS:
                await steps.run(self, node, template, frame)
            elif kind is NodeType.DAG:
                await dag.run(self, node, template, frame)
            else:
                await Pod(self, node, template, frame).execute()
        except OutputError as error:
            self.nodes.mark(node, Phase.ERROR, str(error))
        except (SubstitutionError, ExpressionError, BadConfig, BadData, ValueError) as error:
            self.nodes.mark(node, Phase.ERROR, str(error))
            raise TemplateError(str(error)) from error
        finally:
            self.emit(EventKind.NODE_FINISHED, node)
        return node

    def _show_inputs(self, node: Node, template: Template, frame: Frame) -> None:
        names = [parameter["name"] for parameter in _inputs(template, "parameters")]
        node.inputs = {name: frame.scope[f"inputs.parameters.{name}"] for name in names}
        prefix = "inputs.artifacts."
        keys = {tag: key for tag, key in frame.artifacts.items() if tag.startswith(prefix)}
        node.input_artifacts = {tag.removeprefix(prefix): key for tag, key in keys.items()}

    async def _retry(self, call: Call, template: Template, frame: Frame) -> Node:
        parent = self.add_node(call, NodeType.RETRY)
        self._show_inputs(parent, template, frame)
        while True:
            number = len(parent.attempts)
            attempt = replace(
                call,
                name=f"{call.name}({number})",
                parents=(parent,),
                display_name=f"{parent.display_name}({number})",
            )
            frame = frame.with_values(attempt_values(parent))
            try:
                last = await self._attempt(attempt, template, frame, "retried")
            except TemplateError:
                last = self.nodes[self.nodes.id_of(attempt.name)]
            parent.attempts.append(last)
            phase, message = await self._after_attempt(parent, template, frame)
            if phase.fulfilled:
                parent.outputs = last.outputs
                return self.nodes.mark(parent, phase, message)
            self.nodes.mark(parent, phase, message)

    async def _after_attempt(self, parent: Node, template: Template, frame: Frame) -> tuple[Phase, str]:
        """How a Retry node goes on: Running (for another attempt, the backoff has passed) or its end."""
        last = parent.attempts[-1]
        if not last.phase.failed:
            return Phase.SUCCEEDED, ""
        if self.stop_reason is not None and not frame.on_exit:
            return last.phase, f"Stopped with strategy '{self.stop_reason}'"
        if self.refusal_to_start(frame.on_exit) is not None:
            return last.phase, "retry exceeded workflow deadline"
        try:
            decision = next_attempt(parent, template, frame)
        except (SubstitutionError, ExpressionError, ValueError) as error:
            return Phase.ERROR, str(error)
        if isinstance(decision, str):
            return last.phase, decision
        if decision > 0:
            self.nodes.mark(parent, Phase.RUNNING, f"Backoff for {humanize(decision)}")
            await self.pause(decision, frame.on_exit)
        if self.refusal_to_start(frame.on_exit) is not None:
            return last.phase, last.message
        return Phase.RUNNING, ""

    def _frame(self, template: Template, call: Call) -> Frame:
        """The scope of a template: the workflow's values, its inputs by argument or default, its artifacts."""
        scope = {**self.values, **call.values, "workflow.duration": f"{self.elapsed_s:f}"}
        values: dict[str, str] = {}
        for parameter in _inputs(template, "parameters"):
            name = parameter["name"]
            value = call.arguments.parameters.get(name, parameter.get("value", parameter.get("default")))
            if value is None:
                raise SubstitutionError(f"inputs.parameters.{name} had no value")
            if name not in call.arguments.parameters:
                value = substitute(value, scope)
            if len(value.encode()) > PARAMETER_LIMIT_BYTES:
                raise SubstitutionError(f"inputs.parameters.{name} is longer than {PARAMETER_LIMIT_BYTES} bytes")
            values[name] = value
        listed = [{"name": name, "value": value} for name, value in values.items()]
        scope |= {f"inputs.parameters.{name}": value for name, value in values.items()}
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
            # Quoted twice, as the controller does: in a command the tag is a string literal with JSON in it.
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
        prefix = "workflow.parameters."
        given = {tag: value for tag, value in self.values.items() if tag.startswith(prefix)}
        parameters = {tag.removeprefix(prefix): value for tag, value in given.items()}
        entry = Call(self.name, self.spec["entrypoint"], Arguments(parameters), (), None, 1)
        try:
            node = await self.execute(entry)
        except TemplateError as error:
            return Phase.ERROR, f"error in entry template execution: {error}"
        if not node.phase.failed:
            return Phase.SUCCEEDED, node.message
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


def _inputs(template: Template, kind: str) -> list[Mapping[str, Any]]:
    found: list[Mapping[str, Any]] = template.get("inputs", {}).get(kind, [])
    return found
