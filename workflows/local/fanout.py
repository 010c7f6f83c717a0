"""What steps and tasks share: `when`, loops, arguments, the limit on children that run at once, and outputs."""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from colchis.workflows.local.calls import Arguments, Call, Frame, TemplateError, last_attempt
from colchis.workflows.local.conditions import ConditionError, holds
from colchis.workflows.local.expression_tree import ExpressionError
from colchis.workflows.local.expressions import evaluate
from colchis.workflows.local.gotext import go_json, go_string
from colchis.workflows.local.nodes import Node, Phase
from colchis.workflows.local.substitution import SubstitutionError, substitute

if TYPE_CHECKING:
    from colchis.workflows.local.workflow import WorkflowRun

Step = Mapping[str, Any]


class LoopError(SubstitutionError):
    """The items of a loop cannot be made of what its tags gave."""


@dataclass(frozen=True)
class Item:
    """One iteration of a step: its own name, such as `rollout(2:5)`, and the values of its tags."""

    name: str
    values: Mapping[str, str]


def is_loop(step: Step) -> bool:
    """As on the controller, an empty withItems is no loop."""
    return bool(step.get("withItems") or step.get("withParam") or step.get("withSequence"))


def expand(step: Step, scope: Mapping[str, str]) -> list[Item]:
    """The iterations of a step; one without values when it has no loop. Raises SubstitutionError."""
    if not is_loop(step):
        return [Item(step["name"], {})]
    if step.get("withItems"):
        items = substitute(step["withItems"], scope)
    elif step.get("withParam"):
        text = substitute(step["withParam"], scope)
        try:
            items = json.loads(text)
        except ValueError as error:
            raise LoopError(f"withParam value could not be parsed as a JSON list: {text}: {error}") from error
        if not isinstance(items, list):
            raise LoopError(f"withParam value could not be parsed as a JSON list: {text}")
    else:
        items = _sequence(substitute(step["withSequence"], scope))
    return [_item(step["name"], index, item) for index, item in enumerate(items)]


def _sequence(sequence: Mapping[str, Any]) -> list[str]:
    try:
        start = int(str(sequence.get("start", 0)))
        if "end" in sequence:
            end = int(str(sequence["end"]))
        else:
            count = int(str(sequence["count"]))
            if count == 0:
                return []
            end = start + count - 1
    except (KeyError, ValueError) as error:
        raise LoopError(f"withSequence needs integers (count or end, start): {error}") from error
    return [str(number) for number in (range(start, end + 1) if start <= end else range(start, end - 1, -1))]


def _item(name: str, index: int, item: Any) -> Item:
    if isinstance(item, Mapping):
        shown = {key: value if isinstance(value, str) else go_string(value) for key, value in item.items()}
        label = ",".join(sorted(f"{key}:{value}" for key, value in shown.items()))
        values = {"item": go_json(item), **{f"item.{key}": value for key, value in shown.items()}}
    elif isinstance(item, list):
        label, values = go_string(item), {"item": go_json(item)}
    elif isinstance(item, str | int | float):
        label = item if isinstance(item, str) else go_string(item)
        values = {"item": label}
    else:
        raise LoopError(f"withItems[{index}] expected string, number, list, or map. received: {item}")
    label = label.replace("(", "").replace(")", "")
    return Item(f"{name}({index}:{label})", values)


def arguments_of(step: Step, frame: Frame) -> Arguments:
    """The arguments of a step with every tag resolved. Raises SubstitutionError."""
    given = step.get("arguments", {})
    parameters = {p["name"]: substitute(p["value"], frame.scope) for p in given.get("parameters", []) if "value" in p}
    artifacts: dict[str, str | None] = {}
    for artifact in given.get("artifacts", []):
        if "s3" in artifact:
            artifacts[artifact["name"]] = substitute(artifact["s3"]["key"], frame.scope)
            continue
        source = artifact.get("from", "").strip().removeprefix("{{").removesuffix("}}").strip()
        if source not in frame.artifacts and not artifact.get("optional"):
            raise SubstitutionError(f"unable to resolve references: Unable to resolve: {{{{{source}}}}}")
        artifacts[artifact["name"]] = frame.artifacts.get(source)
    return Arguments(parameters, artifacts)


def should_run(step: Step, scope: Mapping[str, str]) -> str | None:
    """None when the step runs, else the message of its Skipped node. Raises ConditionError, SubstitutionError."""
    when = substitute(step.get("when", ""), scope)
    return None if holds(when) else f"when '{when}' evaluated false"


def loop_reason(step: Step, scope: Mapping[str, str]) -> str | None:
    """Of a loop, before its items are known: why it is skipped, None if it isn't or if `when` needs the item."""
    try:
        return should_run(step, scope)
    except (SubstitutionError, ConditionError):
        return None


OnEnd = Callable[["Node | TemplateError"], None]


class Children:
    """The children of one Steps or DAG template: at most `parallelism` run, none starts after a failure if failFast."""

    def __init__(self, run: WorkflowRun, template: Step) -> None:
        self.run = run
        self.limit = int(template["parallelism"]) if template.get("parallelism") else None
        self.fail_fast = bool(template.get("failFast"))
        self.failed = False
        self._queue: deque[tuple[Call, OnEnd]] = deque()
        self._active: dict[asyncio.Task[Node], OnEnd] = {}

    @property
    def blocked(self) -> bool:
        return self.fail_fast and self.failed

    def submit(self, call: Call, ended: OnEnd) -> None:
        """Queues a call; `ended` gets its node or its error, during `wait`, and may submit more."""
        self._queue.append((call, ended))

    async def wait(self) -> None:
        """Runs what is queued, in order, until nothing runs and nothing more may start."""
        try:
            while True:
                self._start()
                if not self._active:
                    return
                done, _ = await asyncio.wait(self._active, return_when=asyncio.FIRST_COMPLETED)
                for task in sorted(done, key=list(self._active).index):
                    self._finish(task)
        finally:  # only when interrupted, or by an error that isn't the workflow's, is something left
            for task in self._active:
                task.cancel()
            await asyncio.gather(*self._active, return_exceptions=True)

    def _start(self) -> None:
        while self._queue and not self.blocked and (self.limit is None or len(self._active) < self.limit):
            call, ended = self._queue.popleft()
            self._active[asyncio.create_task(self.run.execute(call))] = ended

    def _finish(self, task: asyncio.Task[Node]) -> None:
        ended = self._active.pop(task)
        try:
            node = task.result()
        except TemplateError as error:
            self.failed = True
            ended(error)
        else:
            self.failed |= node.phase.failed
            ended(node)


def loop_values(prefix: str, nodes: Sequence[Node]) -> dict[str, str]:
    """What a later step sees of a fan-out: the outputs of those that succeeded as JSON lists, in order of the items."""
    done = [last_attempt(node) for node in nodes if node.phase is Phase.SUCCEEDED]
    lists: dict[str, list[str]] = {}
    for node in done:
        for name, value in node.outputs.parameters.items():
            lists.setdefault(name, []).append(value)
    results = [_json_or_text(node.outputs.result) for node in done if node.outputs.result is not None]
    with_parameters = [node.outputs.parameters for node in done if node.outputs.parameters]
    values = {f"{prefix}.outputs.result": go_json(results), f"{prefix}.outputs.parameters": go_json(with_parameters)}
    return values | {f"{prefix}.outputs.parameters.{name}": _aggregate(items) for name, items in lists.items()}


def _json_or_text(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _aggregate(values: list[str]) -> str:
    """Lists and maps in JSON are kept as such when all are; else the values are strings."""
    parsed = [_json_or_text(value) for value in values]
    return go_json(parsed if all(isinstance(value, list | dict) for value in parsed) else values)


def collect_outputs(node: Node, template: Step, frame: Frame) -> None:
    """The outputs of a Steps or DAG template from those of its children. Raises SubstitutionError."""
    outputs = template.get("outputs", {})
    for parameter in outputs.get("parameters", []):
        node.outputs.parameters[parameter["name"]] = _output(parameter, frame)
    for artifact in outputs.get("artifacts", []):
        source = artifact.get("from", "").strip().removeprefix("{{").removesuffix("}}").strip()
        if source in frame.artifacts:
            node.outputs.artifacts[artifact["name"]] = frame.artifacts[source]
        elif not artifact.get("optional"):
            raise SubstitutionError(f"unable to resolve outputs from scope: Unable to resolve: {{{{{source}}}}}")


def _output(parameter: Step, frame: Frame) -> str:
    source = parameter["valueFrom"]
    try:
        if "expression" in source:
            value = evaluate(source["expression"], frame.scope)
            if value is None:
                raise SubstitutionError(f"{source['expression']} has no value")
            return go_string(value)
        name = source.get("parameter", "").strip().removeprefix("{{").removesuffix("}}").strip()
        if name in frame.scope:
            return frame.scope[name]
        raise SubstitutionError(f"Unable to resolve: {{{{{name}}}}}")
    except (ExpressionError, SubstitutionError) as error:
        if "default" in source:
            return str(substitute(source["default"], frame.scope))
        raise SubstitutionError(str(error)) from error
