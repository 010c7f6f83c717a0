"""Steps templates: groups one after the other, the steps of a group at once."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from colchis.workflows.local.calls import Call, Frame, Template, TemplateError, node_artifacts, node_values
from colchis.workflows.local.conditions import ConditionError
from colchis.workflows.local.fanout import (
    Children,
    Item,
    LoopError,
    arguments_of,
    collect_outputs,
    expand,
    is_loop,
    loop_reason,
    loop_values,
    should_run,
)
from colchis.workflows.local.nodes import Node, NodeType, Phase
from colchis.workflows.local.substitution import SubstitutionError

if TYPE_CHECKING:
    from colchis.workflows.local.workflow import WorkflowRun

FAIL_FAST = "template has failed or errored children and failFast enabled"
Step = Mapping[str, Any]


async def run(run: WorkflowRun, node: Node, template: Template, frame: Frame) -> None:
    """Runs the groups and marks `node`; ends with the first group that isn't successful."""
    children = Children(run, template)
    text = json.dumps(template)
    parents = [node]
    for number, steps in enumerate(template["steps"]):
        group_node = run.nodes.add(f"{node.name}[{number}]", NodeType.STEP_GROUP, "", boundary=node)
        for parent in parents:
            run.nodes.connect(parent, group_node)
        group = _Group(run, node, group_node, children, frame, text)
        await group.run(steps)
        leaves = [leaf for child in group_node.children for leaf in run.nodes.outbound(run.nodes[child])]
        parents = leaves or [group_node]
        node.outbound = [] if children.blocked else [leaf.id for leaf in leaves]
        if group_node.phase.failed:
            run.nodes.mark(node, Phase.FAILED, group_node.message)
            return
        frame = group.with_outputs(steps)
    collect_outputs(node, template, frame)
    run.nodes.mark(node, Phase.SUCCEEDED)


class _Group:
    """One group of steps. `nodes` are those of each step, in the order of its items."""

    def __init__(
        self, run: WorkflowRun, node: Node, group_node: Node, children: Children, frame: Frame, text: str
    ) -> None:
        self.workflow, self.node, self.group_node = run, node, group_node
        self.children, self.frame, self.text = children, frame, text
        self.nodes: dict[str, list[Node]] = {}
        self.errors: list[str] = []

    async def run(self, steps: list[Step]) -> None:
        """Runs the steps and marks the group's node."""
        self.nodes = {step["name"]: [] for step in steps}
        mark = self.workflow.nodes.mark
        try:
            calls = {call.name: (step["name"], call) for step in steps for call in self._calls(step)}
        except (ConditionError, LoopError) as error:
            mark(self.group_node, Phase.ERROR, str(error))
            return
        except SubstitutionError as error:
            mark(self.group_node, Phase.ERROR, f"failed to resolve references: {error}")
            return
        for name, call in calls.values():
            self.children.submit(call, partial(self._ended, name, call))
        await self.children.wait()
        order = list(calls)
        for nodes in self.nodes.values():
            nodes.sort(key=lambda node: order.index(node.name) if node.name in calls else -1)
        failed = next((node for nodes in self.nodes.values() for node in nodes if node.phase.failed), None)
        if self.errors:
            mark(self.group_node, Phase.ERROR, self.errors[0])
        elif self.children.blocked:
            mark(self.group_node, Phase.FAILED, FAIL_FAST)
        elif failed is not None:
            mark(self.group_node, Phase.FAILED, f"child '{failed.id}' failed")
        else:
            mark(self.group_node, Phase.SUCCEEDED)

    def _ended(self, step: str, call: Call, result: Node | TemplateError) -> None:
        if isinstance(result, TemplateError):
            self.errors.append(f"step group deemed errored due to child {call.name} error: {result}")
        else:
            self.nodes[step].append(result)

    def _calls(self, step: Step) -> list[Call]:
        """The calls of a step; what `when` excludes becomes a Skipped node at once."""
        reason = loop_reason(step, self.frame.scope) if is_loop(step) else None
        try:
            items = expand(step, self.frame.scope)
        except SubstitutionError:
            if reason is None:
                raise
            items = []
        if not items:
            self._skip(step, step["name"], "Skipped, empty params")
        calls = [self._call(step, item) for item in items]
        return [call for call in calls if call is not None]

    def _call(self, step: Step, item: Item) -> Call | None:
        frame = self.frame.with_values(item.values)
        try:
            reason = should_run(step, frame.scope)
        except ConditionError as error:
            if is_loop(step):
                self._skip(step, item.name, str(error), Phase.ERROR)
                raise
            raise SubstitutionError(str(error)) from error  # a controller finds it while it resolves the group
        if reason is not None:
            self._skip(step, item.name, reason)
            return None
        return Call(
            f"{self.group_node.name}.{item.name}",
            step["template"],
            arguments_of(step, frame),
            (self.group_node,),
            self.node,
            self.frame.depth + 1,
            self.frame.on_exit,
            capture_result=f"steps.{step['name']}.outputs.result" in self.text,
            values={"steps.name": item.name},
        )

    def _skip(self, step: Step, name: str, message: str, phase: Phase = Phase.SKIPPED) -> None:
        skipped = self.workflow.nodes.add(
            f"{self.group_node.name}.{name}",
            NodeType.SKIPPED,
            step["template"],
            boundary=self.node,
            phase=phase,
            message=message,
        )
        self.workflow.nodes.connect(self.group_node, skipped)
        self.nodes[step["name"]].append(skipped)

    def with_outputs(self, steps: list[Step]) -> Frame:
        """The frame that later groups see."""
        values: dict[str, str] = {}
        artifacts: dict[str, str] = {}
        for step in steps:
            prefix, nodes = f"steps.{step['name']}", self.nodes[step["name"]]
            if is_loop(step):
                values |= {**loop_values(prefix, nodes), f"{prefix}.status": str(self.group_node.phase)}
            elif nodes:
                values |= node_values(prefix, nodes[0])
                artifacts |= node_artifacts(prefix, nodes[0])
        return self.frame.with_values(values, artifacts)
