"""What steps and tasks share: `when`, loops, arguments, the limit on children that run at once, and outputs."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from colchis.workflows.local.conditions import ConditionError, holds
from colchis.workflows.local.expressions import ExpressionError, evaluate
from colchis.workflows.local.gotext import go_json, go_string
from colchis.workflows.local.nodes import Node, NodeType, Phase
from colchis.workflows.local.substitution import SubstitutionError, substitute

if TYPE_CHECKING:
    from colchis.workflows.local.workflow import Arguments, Call, Frame, WorkflowRun

Step = Mapping[str, Any]


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
            raise SubstitutionError(f"withParam value could not be parsed as a JSON list: {text}: {error}") from error
        if not isinstance(items, list):
            raise SubstitutionError(f"withParam value could not be parsed as a JSON list: {text}")
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
        raise SubstitutionError(f"withSequence needs integers (count or end, start): {error}") from error
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
        raise SubstitutionError(f"withItems[{index}] expected string, number, list, or map. received: {item}")
    label = label.replace("(", "").replace(")", "")
    return Item(f"{name}({index}:{label})", values)


def arguments_of(step: Step, frame: Frame) -> Arguments:
    """The arguments of a step with every tag resolved. Raises SubstitutionError."""
    from colchis.workflows.local.workflow import Arguments

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


class Children:
    """The children of one Steps or DAG template: at most `parallelism` run, none starts after a failure if failFast."""

    def __init__(self, run: WorkflowRun, template: Step) -> None:
        self.run = run
        self.limit = int(template["parallelism"]) if template.get("parallelism") else None
        self.fail_fast = bool(template.get("failFast"))
        self.active: set[asyncio.Task[Node]] = set()
        self.failed = False
        self._queue: list[tuple[Call, Callable[[Node | Exception], None]]] = []

    @property
    def blocked(self) -> bool:
        return self.fail_fast and self.failed

    def submit(self, call: Call, ended: Callable[[Node | Exception], None]) -> None:
        """Starts a call, in order of submission, as soon as the limit allows; `ended` gets its node or its error."""
        self._queue.append((call, ended))
        self._start()

    def _start(self) -> None:
        while self._queue and not self.blocked and (self.limit is None or len(self.active) < self.limit):
            call, ended = self._queue.pop(0)
            task = asyncio.create_task(self.run.execute(call))
            task.add_done_callback(lambda task, ended=ended: self._ended(task, ended))  # type: ignore[misc]
            self.active.add(task)

    def _ended(self, task: asyncio.Task[Node], ended: Callable[[Node | Exception], None]) -> None:
        self.active.discard(task)
        if task.cancelled():
            return
        error = task.exception()
        if isinstance(error, Exception):
            self.failed = True
            ended(error)
        elif error is None:
            node = task.result()
            self.failed |= node.phase.failed
            ended(node)
        self._start()

    async def wait(self) -> None:
        """Until nothing runs and nothing more will start; ends the children when cancelled."""
        try:
            while self.active:
                await asyncio.wait(self.active, return_when=asyncio.FIRST_COMPLETED)
                await asyncio.sleep(0)  # the callbacks of those that ended may start more
        finally:
            for task in self.active:
                task.cancel()
            if self.active:
                await asyncio.gather(*self.active, return_exceptions=True)


def loop_values(prefix: str, nodes: Sequence[Node]) -> dict[str, str]:
    """What a later step sees of a fan-out: the outputs of those that succeeded as JSON lists, in order of the items."""
    done = [node.attempts[-1] if node.type is NodeType.RETRY and node.attempts else node for node in nodes]
    done = [node for node in done if node.phase is Phase.SUCCEEDED]
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
            return go_string(evaluate(source["expression"], frame.scope))
        name = source.get("parameter", "").strip().removeprefix("{{").removesuffix("}}").strip()
        if name in frame.scope:
            return frame.scope[name]
        raise SubstitutionError(f"Unable to resolve: {{{{{name}}}}}")
    except (ExpressionError, SubstitutionError) as error:
        if "default" in source:
            return substitute(source["default"], frame.scope)
        raise SubstitutionError(str(error)) from error


__all__ = [
    "Children",
    "ConditionError",
    "Item",
    "arguments_of",
    "collect_outputs",
    "expand",
    "loop_values",
    "should_run",
]
