"""Steps templates: groups one after the other, the steps of a group at once."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from colchis.workflows.local.conditions import ConditionError
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
from colchis.workflows.local.substitution import SubstitutionError

if TYPE_CHECKING:
    from colchis.workflows.local.workflow import Frame, WorkflowRun

FAIL_FAST = "template has failed or errored children and failFast enabled"


async def run(run: WorkflowRun, node: Node, template: Mapping[str, Any], frame: Frame) -> None:
    """Runs the groups and marks `node`; stops after the first group that isn't successful."""
    children = Children(run, template)
    text = json.dumps(template)
    group_node: Node | None = None
    for number, group in enumerate(template["steps"]):
        before, group_node = group_node, _group_node(run, node, number, group_node)
        nodes = await _Group(run, node, group_node, children, frame, text).run(group)
        if group_node.phase.failed:
            node.outbound = [leaf.id for child in group_node.children for leaf in run.nodes.outbound(run.nodes[child])]
            run.nodes.mark(node, Phase.FAILED, group_node.message)
            return
        frame = _with_outputs(frame, group, nodes)
        del before
    if group_node is not None:
        node.outbound = [leaf.id for child in group_node.children for leaf in run.nodes.outbound(run.nodes[child])]
    collect_outputs(node, template, frame)
    run.nodes.mark(node, Phase.SUCCEEDED)


def _group_node(run: WorkflowRun, node: Node, number: int, before: Node | None) -> Node:
    group = run.nodes.add(f"{node.name}[{number}]", NodeType.STEP_GROUP, "", boundary=node)
    parents = [node]
    if before is not None:
        parents = [leaf for child in before.children for leaf in run.nodes.outbound(run.nodes[child])] or [before]
    for parent in parents:
        run.nodes.connect(parent, group)
    return group


def _with_outputs(frame: Frame, group: list[Mapping[str, Any]], nodes: Mapping[str, list[Node]]) -> Frame:
    from dataclasses import replace

    from colchis.workflows.local.workflow import node_values

    values: dict[str, str] = {}
    artifacts: dict[str, str] = {}
    for step in group:
        prefix, own = f"steps.{step['name']}", nodes[step["name"]]
        if is_loop(step):
            values |= loop_values(prefix, own)
            values[f"{prefix}.status"] = str(Phase.SUCCEEDED)
        elif own:
            values |= node_values(prefix, own[0])
            source = own[0].attempts[-1] if own[0].attempts else own[0]
            artifacts |= {f"{prefix}.outputs.artifacts.{name}": key for name, key in source.outputs.artifacts.items()}
    return replace(frame.with_values(values), artifacts={**frame.artifacts, **artifacts})


class _Group:
    def __init__(
        self, run: WorkflowRun, node: Node, group_node: Node, children: Children, frame: Frame, text: str
    ) -> None:
        self.run_, self.node, self.group_node = run, node, group_node
        self.children, self.frame, self.text = children, frame, text

    async def run(self, group: list[Mapping[str, Any]]) -> dict[str, list[Node]]:
        """Runs one group and marks its node; the nodes of each step, in order of its items."""
        from colchis.workflows.local.workflow import Call

        run, group_node = self.run_, self.group_node
        calls: list[tuple[str, Call]] = []
        nodes: dict[str, list[Node]] = {step["name"]: [] for step in group}
        errors: list[str] = []
        try:
            for step in group:
                calls += [(step["name"], call) for call in self._calls(step, nodes[step["name"]])]
        except SubstitutionError as error:
            run.nodes.mark(group_node, Phase.ERROR, f"failed to resolve references: {error}")
            return nodes
        except ConditionError as error:
            run.nodes.mark(group_node, Phase.ERROR, str(error))
            return nodes
        order = {call.name: index for index, (_, call) in enumerate(calls)}
        for name, call in calls:

            def ended(result: Node | Exception, name: str = name, call: Call = call) -> None:
                if isinstance(result, Node):
                    nodes[name].append(result)
                else:
                    errors.append(f"step group deemed errored due to child {call.name} error: {result}")

            self.children.submit(call, ended)
        await self.children.wait()
        for own in nodes.values():
            own.sort(key=lambda node: order.get(node.name, -1))
        self._mark(nodes, errors)
        return nodes

    def _calls(self, step: Mapping[str, Any], nodes: list[Node]) -> list[Any]:
        """The calls of a step; what `when` excludes becomes a Skipped node at once."""
        from colchis.workflows.local.workflow import Call

        run, node, group_node = self.run_, self.node, self.group_node
        if is_loop(step) and "{{item" not in step.get("when", ""):
            reason = should_run(step, self.frame.scope)
            items = expand(step, self.frame.scope) if reason is None else _items_or_none(step, self.frame)
        else:
            items = expand(step, self.frame.scope)
        if not items:
            nodes.append(self._skipped(step, step["name"], "Skipped, empty params"))
        calls = []
        for item in items:
            frame = self.frame.with_values(item.values)
            name = f"{group_node.name}.{item.name}"
            try:
                reason = should_run(step, frame.scope)
            except ConditionError as error:
                skipped = self._skipped(step, item.name, str(error))
                run.nodes.mark(skipped, Phase.ERROR)
                raise
            if reason is not None:
                nodes.append(self._skipped(step, item.name, reason))
                continue
            calls.append(
                Call(
                    name,
                    step["template"],
                    arguments_of(step, frame),
                    (group_node,),
                    node,
                    self.frame.depth + 1,
                    self.frame.on_exit,
                    capture_result=f"steps.{step['name']}.outputs.result" in self.text,
                    values={"steps.name": item.name},
                )
            )
        return calls

    def _skipped(self, step: Mapping[str, Any], name: str, message: str) -> Node:
        skipped = self.run_.nodes.add(
            f"{self.group_node.name}.{name}",
            NodeType.SKIPPED,
            step["template"],
            boundary=self.node,
            phase=Phase.SKIPPED,
            message=message,
        )
        self.run_.nodes.connect(self.group_node, skipped)
        return skipped

    def _mark(self, nodes: Mapping[str, list[Node]], errors: list[str]) -> None:
        run, group_node = self.run_, self.group_node
        if errors:
            run.nodes.mark(group_node, Phase.ERROR, errors[0])
        elif self.children.blocked:
            run.nodes.mark(group_node, Phase.FAILED, FAIL_FAST)
        else:
            failed = next((n for own in nodes.values() for n in own if n.phase.failed), None)
            if failed is not None:
                run.nodes.mark(group_node, Phase.FAILED, f"child '{failed.id}' failed")
            else:
                run.nodes.mark(group_node, Phase.SUCCEEDED)


def _items_or_none(step: Mapping[str, Any], frame: Frame) -> list[Any]:
    """Of a loop whose `when` is false: its items if they can be had, because each becomes a Skipped node."""
    try:
        return expand(step, frame.scope)
    except SubstitutionError:
        return []
