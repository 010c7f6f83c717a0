"""DAG templates: each task starts when its `depends` is decided."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from colchis.workflows.local.calls import Call, Frame, Template, TemplateError, node_artifacts, node_values
from colchis.workflows.local.conditions import ConditionError
from colchis.workflows.local.expression_tree import ExpressionError
from colchis.workflows.local.expressions import evaluate
from colchis.workflows.local.fanout import (
    Children,
    arguments_of,
    collect_outputs,
    expand,
    is_loop,
    loop_reason,
    loop_values,
    should_run,
)
from colchis.workflows.local.nodes import Node, NodeType, Phase
from colchis.workflows.local.steps import FAIL_FAST
from colchis.workflows.local.substitution import SubstitutionError

if TYPE_CHECKING:
    from colchis.workflows.local.workflow import WorkflowRun

Task = Mapping[str, Any]
_RESULTS = ("Succeeded", "Failed", "Errored", "Skipped", "Omitted", "Daemoned", "AnySucceeded", "AllFailed")
_TASK = re.compile(r"([a-zA-Z0-9][-a-zA-Z0-9]*?)\.([A-Z][a-zA-Z]+)|([a-zA-Z0-9][-a-zA-Z0-9]*)")


async def run(run: WorkflowRun, node: Node, template: Template, frame: Frame) -> None:
    """Runs the tasks and marks `node`."""
    await _Dag(run, node, template, frame).run()


class _Dag:
    """One running DAG. `nodes` has the node of each task that is decided, `items` the nodes of a loop's items."""

    def __init__(self, run: WorkflowRun, node: Node, template: Template, frame: Frame) -> None:
        self.workflow, self.node, self.template, self.frame = run, node, template, frame
        self.tasks: dict[str, Task] = {task["name"]: task for task in template["dag"]["tasks"]}
        self.logic = {name: depends_logic(task) for name, task in self.tasks.items()}
        self.needs = {name: dependencies(task) for name, task in self.tasks.items()}
        self.nodes: dict[str, Node] = {}
        self.items: dict[str, list[Node]] = {}
        self.children = Children(run, template)
        self.text = json.dumps(template)
        self.waiting = list(self.tasks)

    async def run(self) -> None:
        nodes = self.workflow.nodes
        self._advance()
        await self.children.wait()
        targets = sorted(set(self.tasks) - set().union(*self.needs.values()))
        leaves = [leaf for target in targets if target in self.nodes for leaf in nodes.outbound(self.nodes[target])]
        if self.children.blocked:
            nodes.mark(self.node, Phase.FAILED, FAIL_FAST)
            return
        self.node.outbound = [leaf.id for leaf in leaves]
        if self.waiting:
            raise SubstitutionError(f"tasks that can never start: {', '.join(self.waiting)} (a cycle, or no such task)")
        phase = Phase.SUCCEEDED
        for target in targets:
            branch = self._branch_phase(target)
            if branch.failed:
                phase = branch
                if self.template["dag"].get("failFast", True):
                    break
        if phase is Phase.SUCCEEDED:
            collect_outputs(self.node, self.template, self._scope(set(self.tasks)))
        nodes.mark(self.node, phase)

    def _branch_phase(self, name: str) -> Phase:
        """The phase of a task, or if it didn't run that of its dependencies, where a failure wins."""
        node = self.nodes[name]
        if node.phase.completed:
            return node.phase
        above = [self._branch_phase(need) for need in sorted(self.needs[name])]
        return next((phase for phase in above if phase.failed), Phase.SUCCEEDED)

    def _advance(self) -> None:
        """Starts, skips or omits every task whose dependencies are all decided; repeats while that decides more."""
        progress = True
        while progress and not self.children.blocked:
            progress = False
            for name in list(self.waiting):
                if all(need in self.nodes and self.nodes[need].phase.fulfilled for need in self.needs[name]):
                    self.waiting.remove(name)
                    self._decide(name, self.tasks[name])
                    progress = True

    def _decide(self, name: str, task: Task) -> None:
        try:
            if self.logic[name] and not self._depends_hold(name):
                self._exclude(name, task, Phase.OMITTED, "omitted: depends condition not met")
                return
            frame = self._scope(self._ancestors(name))
            if is_loop(task):
                self._start_loop(name, task, frame)
                return
            reason = should_run(task, frame.scope)
            if reason is not None:
                self._exclude(name, task, Phase.SKIPPED, reason)
                return
            call = self._call(name, name, task, frame, self._parents(name))
        except (SubstitutionError, ConditionError, ExpressionError) as error:
            self._exclude(name, task, Phase.ERROR, str(error))
            return
        self.children.submit(call, partial(self._ended, name, call))

    def _start_loop(self, name: str, task: Task, frame: Frame) -> None:
        reason = loop_reason(task, frame.scope)
        try:
            items = expand(task, frame.scope)
        except SubstitutionError:
            if reason is None:
                raise
            items = []
        if not items:
            self._exclude(name, task, Phase.SKIPPED, "Skipped, empty params")
            return
        calls: list[Call] = []
        skipped: list[tuple[str, Phase, str]] = []
        for item in items:
            scoped = frame.with_values(item.values)
            try:
                why = should_run(task, scoped.scope)
            except ConditionError as error:
                skipped.append((item.name, Phase.ERROR, str(error)))
                continue
            if why is not None:
                skipped.append((item.name, Phase.SKIPPED, why))
            else:
                calls.append(self._call(name, item.name, task, scoped, ()))
        group = self.workflow.nodes.add(self._name(name), NodeType.TASK_GROUP, task["template"], boundary=self.node)
        for parent in self._parents(name):
            self.workflow.nodes.connect(parent, group)
        self.nodes[name] = group
        self.items[name] = [self._add(item, task, phase, message, (group,)) for item, phase, message in skipped]
        order = [self._name(item.name) for item in items]
        for call in calls:
            call = replace(call, parents=(group,))
            self.children.submit(call, partial(self._item_ended, name, call, order))
        self._close_group(name, order)

    def _call(self, task_name: str, name: str, task: Task, frame: Frame, parents: tuple[Node, ...]) -> Call:
        return Call(
            self._name(name),
            task["template"],
            arguments_of(task, frame),
            parents,
            self.node,
            self.frame.depth + 1,
            self.frame.on_exit,
            capture_result=f"tasks.{task_name}.outputs.result" in self.text,
            values={"tasks.name": name},
        )

    def _ended(self, name: str, call: Call, result: Node | TemplateError) -> None:
        self.nodes[name] = self._errored(call, result) if isinstance(result, TemplateError) else result
        self._advance()

    def _item_ended(self, name: str, call: Call, order: list[str], result: Node | TemplateError) -> None:
        self.items[name].append(self._errored(call, result) if isinstance(result, TemplateError) else result)
        self._close_group(name, order)
        self._advance()

    def _errored(self, call: Call, error: TemplateError) -> Node:
        nodes = self.workflow.nodes
        return nodes.mark(nodes[nodes.id_of(call.name)], Phase.ERROR, f"task '{call.name}' errored: {error}")

    def _close_group(self, name: str, order: list[str]) -> None:
        """Marks a TaskGroup when all of its items have ended."""
        items = self.items[name]
        if len(items) == len(order):
            items.sort(key=lambda node: order.index(node.name))
            failed = [node.phase for node in items if node.phase.failed]
            self.workflow.nodes.mark(self.nodes[name], failed[-1] if failed else Phase.SUCCEEDED)

    def _name(self, task: str) -> str:
        return f"{self.node.name}.{task}"

    def _parents(self, name: str) -> tuple[Node, ...]:
        if not self.needs[name]:
            return (self.node,)
        return tuple(
            leaf for need in sorted(self.needs[name]) for leaf in self.workflow.nodes.outbound(self.nodes[need])
        )

    def _add(self, name: str, task: Task, phase: Phase, message: str, parents: tuple[Node, ...]) -> Node:
        nodes, template = self.workflow.nodes, task["template"]
        kind = NodeType.SKIPPED
        added = nodes.add(self._name(name), kind, template, boundary=self.node, phase=phase, message=message)
        for parent in parents:
            nodes.connect(parent, added)
        return added

    def _exclude(self, name: str, task: Task, phase: Phase, message: str) -> None:
        self.nodes[name] = self._add(name, task, phase, message, self._parents(name))
        self.items[name] = []

    def _ancestors(self, name: str) -> set[str]:
        found: set[str] = set()
        queue = list(self.needs[name])
        while queue:
            need = queue.pop()
            if need not in found:
                found.add(need)
                queue += self.needs[need]
        return found

    def _scope(self, tasks: set[str]) -> Frame:
        """The frame with the outputs of `tasks` in it, as far as they are decided."""
        values: dict[str, str] = {}
        artifacts: dict[str, str] = {}
        for name in tasks & set(self.nodes):
            prefix, node = f"tasks.{name}", self.nodes[name]
            values |= node_values(prefix, node)
            artifacts |= node_artifacts(prefix, node)
            if is_loop(self.tasks[name]):
                values |= loop_values(prefix, self.items[name])
        return self.frame.with_values(values, artifacts)

    def _depends_hold(self, name: str) -> bool:
        variables: dict[str, bool] = {}
        for need in self.needs[name]:
            node, items = self.nodes[need], self.items[need] if is_loop(self.tasks[need]) else []
            phases = [item.phase for item in items]
            results = {
                "Succeeded": node.phase is Phase.SUCCEEDED,
                "Failed": node.phase is Phase.FAILED,
                "Errored": node.phase is Phase.ERROR,
                "Skipped": node.phase is Phase.SKIPPED,
                "Omitted": node.phase is Phase.OMITTED,
                "Daemoned": False,
                "AnySucceeded": Phase.SUCCEEDED in phases,
                "AllFailed": bool(phases) and set(phases) == {Phase.FAILED},
            }
            key = _identifier(need)
            variables |= {f"{key}.{result}": value for result, value in results.items()}
        return evaluate(self.logic[name], variables) is True


def _identifier(task: str) -> str:
    """Task names as expression names: dashes, and leading digits, are none there."""
    return "task_" + task.replace("-", "_")


def depends_logic(task: Task) -> str:
    """`depends` as an expression: a bare task means that it succeeded or was skipped."""
    logic = task.get("depends") or " && ".join(task.get("dependencies", []))

    def replace_task(match: re.Match[str]) -> str:
        named, result, bare = match.groups()
        if bare is not None:
            name = _identifier(bare)
            return f"({name}.Succeeded || {name}.Skipped || {name}.Daemoned)"
        if result not in _RESULTS:
            raise SubstitutionError(f"task result '{result}' for task '{named}' is invalid")
        return f"{_identifier(named)}.{result}"

    return _TASK.sub(replace_task, logic)


def dependencies(task: Task) -> set[str]:
    """The tasks that a task waits for."""
    logic = task.get("depends") or " && ".join(task.get("dependencies", []))
    return {match.group(1) or match.group(3) for match in _TASK.finditer(logic)}
