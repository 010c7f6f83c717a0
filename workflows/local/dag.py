"""DAG templates: each task starts when its `depends` is decided."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from colchis.workflows.local.conditions import ConditionError
from colchis.workflows.local.expressions import ExpressionError, evaluate
from colchis.workflows.local.fanout import (
    Children,
    arguments_of,
    collect_outputs,
    expand,
    is_loop,
    loop_values,
    should_run,
)
from colchis.workflows.local.nodes import Node, NodeType, Phase
from colchis.workflows.local.steps import FAIL_FAST
from colchis.workflows.local.substitution import SubstitutionError

if TYPE_CHECKING:
    from colchis.workflows.local.workflow import Frame, WorkflowRun

Task = Mapping[str, Any]
_RESULTS = ("Succeeded", "Failed", "Errored", "Skipped", "Omitted", "Daemoned", "AnySucceeded", "AllFailed")
_TASK = re.compile(r"([a-zA-Z0-9][-a-zA-Z0-9]*?)\.([A-Z][a-zA-Z]+)|([a-zA-Z0-9][-a-zA-Z0-9]*)")


async def run(run: WorkflowRun, node: Node, template: Mapping[str, Any], frame: Frame) -> None:
    """Runs the tasks and marks `node`."""
    await _Dag(run, node, template, frame).run()


class _Dag:
    def __init__(self, run: WorkflowRun, node: Node, template: Mapping[str, Any], frame: Frame) -> None:
        self.run_, self.node, self.template, self.frame = run, node, template, frame
        self.tasks: dict[str, Task] = {task["name"]: task for task in template["dag"]["tasks"]}
        self.logic = {name: depends_logic(task) for name, task in self.tasks.items()}
        self.needs = {name: dependencies(task) for name, task in self.tasks.items()}
        for name, needs in self.needs.items():
            unknown = needs - set(self.tasks)
            if unknown:
                raise SubstitutionError(f"task {name} depends on {', '.join(sorted(unknown))}, which is no task")
        self.nodes: dict[str, Node] = {}
        self.items: dict[str, list[Node]] = {}
        self.children = Children(run, template)
        self.text = json.dumps(template)
        self.waiting = list(self.tasks)

    async def run(self) -> None:
        run, node = self.run_, self.node
        self._advance()
        await self.children.wait()
        while self.children.active:  # an ended task may have started others after the wait looked
            await self.children.wait()
        if self.waiting and not self.children.blocked:
            raise SubstitutionError(f"tasks that can never start (a cycle?): {', '.join(self.waiting)}")
        targets = sorted(set(self.tasks) - set().union(*self.needs.values()))
        node.outbound = [leaf.id for t in targets if t in self.nodes for leaf in run.nodes.outbound(self.nodes[t])]
        if self.children.blocked:
            run.nodes.mark(node, Phase.FAILED, FAIL_FAST)
            return
        fail_fast = self.template["dag"].get("failFast", True)
        phase = Phase.SUCCEEDED
        for target in targets:
            branch = self._branch_phase(target)
            if branch.failed:
                phase = branch
                if fail_fast:
                    break
        if phase is Phase.SUCCEEDED:
            collect_outputs(node, self.template, self._scope(set(self.tasks)))
        run.nodes.mark(node, phase)

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
                self._excluded(name, task, Phase.OMITTED, "omitted: depends condition not met")
                return
            frame = self._scope(self._ancestors(name))
            reason = None
            if "{{item" not in task.get("when", ""):
                reason = should_run(task, frame.scope)
            if reason is not None and not is_loop(task):
                self._excluded(name, task, Phase.SKIPPED, reason)
                return
            self._start(name, task, frame, reason)
        except (SubstitutionError, ConditionError, ExpressionError) as error:
            self._excluded(name, task, Phase.ERROR, str(error))

    def _start(self, name: str, task: Task, frame: Frame, reason: str | None) -> None:
        from colchis.workflows.local.workflow import Call

        run = self.run_
        try:
            items = expand(task, frame.scope)
        except SubstitutionError:
            if reason is None:
                raise
            items = []
        if not items:
            self._excluded(name, task, Phase.SKIPPED, "Skipped, empty params")
            return
        parents = self._parents(name)
        group: Node | None = None
        calls: list[Call] = []
        own: list[Node] = []
        prepared = [(item, frame.with_values(item.values)) for item in items]
        arguments = [arguments_of(task, scoped) if reason is None else None for _, scoped in prepared]
        if is_loop(task):
            group = run.nodes.add(self._name(name), NodeType.TASK_GROUP, task["template"], boundary=self.node)
            for parent in parents:
                run.nodes.connect(parent, group)
            parents = (group,)
            self.nodes[name] = group
        for (item, scoped), given in zip(prepared, arguments, strict=True):
            try:
                why, phase = reason or should_run(task, scoped.scope), Phase.SKIPPED
            except ConditionError as error:
                why, phase = str(error), Phase.ERROR
            if why is not None or given is None:
                own.append(self._add(item.name, task, phase, why or "", parents))
                continue
            calls.append(
                Call(
                    self._name(item.name),
                    task["template"],
                    given,
                    parents,
                    self.node,
                    self.frame.depth + 1,
                    self.frame.on_exit,
                    capture_result=f"tasks.{name}.outputs.result" in self.text,
                    values={"tasks.name": item.name},
                )
            )
        self.items[name] = own
        order = {self._name(item.name): index for index, item in enumerate(items)}
        left = len(calls)

        def ended(call: Call, result: Node | Exception) -> None:
            nonlocal left
            left -= 1
            if isinstance(result, Node):
                ended_node = result
            else:
                found = run.nodes.find(call.name)
                ended_node = found if found is not None else run.add_node(call, NodeType.SKIPPED, Phase.ERROR)
                run.nodes.mark(ended_node, Phase.ERROR, f"task '{call.name}' errored: {result}")
            own.append(ended_node)
            if group is None:
                self.nodes[name] = ended_node
            elif left == 0:
                own.sort(key=lambda node: order[node.name])
                failed = [node.phase for node in own if node.phase.failed]
                run.nodes.mark(group, failed[-1] if failed else Phase.SUCCEEDED)
            self._advance()

        for call in calls:
            self.children.submit(call, lambda result, call=call: ended(call, result))  # type: ignore[misc]
        if not calls and group is not None:
            failed = [node.phase for node in own if node.phase.failed]
            run.nodes.mark(group, failed[-1] if failed else Phase.SUCCEEDED)

    def _name(self, task: str) -> str:
        return f"{self.node.name}.{task}"

    def _parents(self, name: str) -> tuple[Node, ...]:
        if not self.needs[name]:
            return (self.node,)
        return tuple(leaf for need in sorted(self.needs[name]) for leaf in self.run_.nodes.outbound(self.nodes[need]))

    def _add(self, name: str, task: Task, phase: Phase, message: str, parents: tuple[Node, ...]) -> Node:
        nodes = self.run_.nodes
        added = nodes.add(
            self._name(name), NodeType.SKIPPED, task["template"], boundary=self.node, phase=phase, message=message
        )
        for parent in parents:
            nodes.connect(parent, added)
        return added

    def _excluded(self, name: str, task: Task, phase: Phase, message: str) -> None:
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

    def _scope(self, ancestors: set[str]) -> Frame:
        from colchis.workflows.local.workflow import node_values

        values: dict[str, str] = {}
        artifacts: dict[str, str] = {}
        for name in ancestors & set(self.nodes):
            prefix, node = f"tasks.{name}", self.nodes[name]
            values |= node_values(prefix, node)
            if is_loop(self.tasks[name]):
                values |= loop_values(prefix, self.items[name])
            source = node.attempts[-1] if node.attempts else node
            artifacts |= {f"{prefix}.outputs.artifacts.{key}": where for key, where in source.outputs.artifacts.items()}
        return replace(self.frame.with_values(values), artifacts={**self.frame.artifacts, **artifacts})

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


__all__ = ["asyncio", "dependencies", "depends_logic", "run"]
