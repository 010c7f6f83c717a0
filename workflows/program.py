"""A manifest read as a program: templates, the calls between them, and the names that are in scope at each place.

Scopes follow Argo 4.0: a step sees the groups before its own, a task sees what it depends on, a template's outputs see
all calls, a container sees its inputs and the paths of its outputs.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from colchis.workflows.documents import Document

Json = Any

POD_KINDS = ("container", "script", "containerSet", "resource")
RECURSION_MARK = "colchis.dev/recursion"
"""Annotation on a template that may call itself: its value says what bounds the depth."""

_WORKFLOW = (
    *("workflow.name", "workflow.namespace", "workflow.mainEntrypoint", "workflow.serviceAccountName", "workflow.uid"),
    *("workflow.parameters", "workflow.annotations", "workflow.labels", "workflow.creationTimestamp"),
    *("workflow.priority", "workflow.scheduledTime", "workflow.duration"),
)
_WORKFLOW_OPEN = ("workflow.annotations.", "workflow.labels.", "workflow.creationTimestamp.")
_AT_EXIT = ("workflow.status", "workflow.failures")
_NODE = ("id", "ip", "status", "exitCode", "startedAt", "finishedAt", "hostNodeName", "outputs.result")


@dataclass(frozen=True)
class Scope:
    """The names that a tag may use: exact ones, and prefixes below which anything may stand."""

    names: frozenset[str] = frozenset()
    open: tuple[str, ...] = ()

    def plus(self, names: Iterable[str]) -> Scope:
        return Scope(self.names | frozenset(names), self.open)

    def below(self, *prefixes: str) -> Scope:
        return Scope(self.names, self.open + prefixes)

    def holds(self, name: str) -> bool:
        return name in self.names or any(name.startswith(prefix) for prefix in self.open)

    def holds_in_expression(self, name: str) -> bool:
        """Also whole maps, such as `inputs.parameters`."""
        return self.holds(name) or any(known.startswith(name + ".") for known in (*self.names, *self.open))


@dataclass(frozen=True)
class Call:
    """One step or task: a template, its arguments, and what it may look back on."""

    body: Mapping[str, Json]
    field: str
    family: str
    """`steps` or `tasks`: how tags name it."""
    before: frozenset[str]
    """Names of the calls whose outputs it sees."""

    @property
    def name(self) -> str:
        return str(self.body.get("name", ""))

    @property
    def loops(self) -> bool:
        return any(key in self.body for key in ("withItems", "withParam", "withSequence"))

    @property
    def may_be_skipped(self) -> bool:
        """Skipped by its `when`, or because a loop has no items."""
        return bool(self.body.get("when")) or self.loops

    def arguments(self, kind: str) -> dict[str, Json]:
        return {a["name"]: a for a in (self.body.get("arguments") or {}).get(kind) or ()}


@dataclass(frozen=True)
class Template:
    body: Mapping[str, Json]
    field: str

    @property
    def name(self) -> str:
        return str(self.body.get("name", ""))

    @property
    def is_pod(self) -> bool:
        return any(kind in self.body for kind in POD_KINDS)

    def declared(self, side: str, kind: str) -> dict[str, Json]:
        """side: `inputs` or `outputs`; kind: `parameters` or `artifacts`."""
        return {p["name"]: p for p in (self.body.get(side) or {}).get(kind) or ()}

    @cached_property
    def calls(self) -> tuple[Call, ...]:
        return tuple(self._steps()) if "steps" in self.body else tuple(self._tasks())

    def _steps(self) -> Iterator[Call]:
        before: set[str] = set()
        for i, group in enumerate(self.body.get("steps") or ()):
            steps = group if isinstance(group, list) else [group]
            for j, step in enumerate(steps):
                yield Call(step, f"{self.field}.steps[{i}][{j}]", "steps", frozenset(before))
            before |= {str(step.get("name", "")) for step in steps}

    def _tasks(self) -> Iterator[Call]:
        tasks = (self.body.get("dag") or {}).get("tasks") or ()
        direct = {str(t.get("name", "")): _dependencies(t) for t in tasks}
        for i, task in enumerate(tasks):
            reached: set[str] = set()
            waiting = list(direct[str(task.get("name", ""))])
            while waiting:
                name = waiting.pop()
                if name not in reached:
                    reached.add(name)
                    waiting += direct.get(name, ())
            yield Call(task, f"{self.field}.dag.tasks[{i}]", "tasks", frozenset(reached))


@dataclass(frozen=True)
class Program:
    """One Workflow or WorkflowTemplate, with the other documents in reach for references."""

    document: Document
    library: Mapping[str, Document]
    """WorkflowTemplates by name."""

    @property
    def spec(self) -> Mapping[str, Json]:
        return self.document.body.get("spec") or {}

    @cached_property
    def templates(self) -> dict[str, Template]:
        bodies = self.spec.get("templates") or ()
        return {str(b.get("name", "")): Template(b, f"spec.templates[{i}]") for i, b in enumerate(bodies)}

    @cached_property
    def parameters(self) -> dict[str, Json]:
        return {p["name"]: p for p in (self.spec.get("arguments") or {}).get("parameters") or ()}

    def callee(self, call: Mapping[str, Json]) -> Template | None:
        """The template that a step, task or hook runs; None when it does not exist."""
        if inline := call.get("inline"):
            return Template({"name": "inline", **inline}, "inline")
        if reference := call.get("templateRef"):
            other = self.library.get(str(reference.get("name")))
            return Program(other, self.library).templates.get(str(reference.get("template"))) if other else None
        return self.templates.get(str(call.get("template", "")))

    def workflow_scope(self, *, at_exit: bool = False) -> Scope:
        names = {*_WORKFLOW, *(f"workflow.parameters.{name}" for name in self.parameters)}
        for template in self.templates.values():
            for kind in ("parameters", "artifacts"):
                outputs = template.declared("outputs", kind).values()
                names |= {f"workflow.outputs.{kind}.{o['globalName']}" for o in outputs if o.get("globalName")}
        return Scope(frozenset(names), _WORKFLOW_OPEN).plus(_AT_EXIT if at_exit else ())

    def input_scope(self, template: Template, *, at_exit: bool = False) -> Scope:
        """What stands in a template before anything ran."""
        names = {f"inputs.parameters.{name}" for name in template.declared("inputs", "parameters")}
        for name in template.declared("inputs", "artifacts"):
            names |= {f"inputs.artifacts.{name}", f"inputs.artifacts.{name}.path"}
        return self.workflow_scope(at_exit=at_exit).plus({*names, "inputs.parameters", "node.name"})

    def pod_scope(self, template: Template, *, at_exit: bool = False) -> Scope:
        """What stands in the containers of a template."""
        names = {"pod.name", "steps.name", "tasks.name"}
        for kind in ("parameters", "artifacts"):
            names |= {f"outputs.{kind}.{name}.path" for name in template.declared("outputs", kind)}
        if "retryStrategy" in template.body:
            names.add("retries")
        return self.input_scope(template, at_exit=at_exit).plus(names)

    def result_scope(self, template: Template, names: frozenset[str] | None, *, at_exit: bool = False) -> Scope:
        """Inputs, and the results of the calls `names` (None: of all)."""
        seen: set[str] = set()
        for call in template.calls:
            if names is not None and call.name not in names:
                continue
            prefix = f"{call.family}.{call.name}"
            seen |= {f"{prefix}.{word}" for word in _NODE}
            callee = self.callee(call.body)
            for kind in ("parameters", "artifacts"):
                outputs = callee.declared("outputs", kind) if callee else ()
                seen |= {f"{prefix}.outputs.{kind}.{output}" for output in outputs}
            seen.add(f"{prefix}.outputs.parameters")
        return self.input_scope(template, at_exit=at_exit).plus(seen)

    @cached_property
    def reached_at_exit(self) -> frozenset[str]:
        """Templates that run, directly or not, as the exit handler or a hook of the workflow."""
        starts = [self.spec.get("onExit"), *(h.get("template") for h in (self.spec.get("hooks") or {}).values())]
        return frozenset(self._reached([str(name) for name in starts if name]))

    def _reached(self, names: list[str]) -> set[str]:
        reached: set[str] = set()
        while names:
            name = names.pop()
            if name in reached or name not in self.templates:
                continue
            reached.add(name)
            names += [str(c.body.get("template", "")) for c in self.templates[name].calls]
        return reached

    def cycles(self) -> Iterator[list[str]]:
        """Chains of templates that come back to their first."""
        for start in self.templates:
            chain = [start]
            yield from self._back_to(start, chain)

    def _back_to(self, start: str, chain: list[str]) -> Iterator[list[str]]:
        for call in self.templates[chain[-1]].calls:
            name = str(call.body.get("template", ""))
            if name == start:
                yield [*chain, name]
            elif name in self.templates and name not in chain and name > start:
                yield from self._back_to(start, [*chain, name])

    def depth(self, name: str, above: frozenset[str] = frozenset()) -> int:
        """Templates on the longest chain of calls from `name`; a cycle counts once."""
        if name in above or name not in self.templates:
            return 0
        calls = [str(c.body.get("template", "")) for c in self.templates[name].calls]
        return 1 + max((self.depth(callee, above | {name}) for callee in calls), default=0)


def _dependencies(task: Mapping[str, Json]) -> list[str]:
    words = re.findall(r"([A-Za-z0-9_-]+)(?:\.[A-Za-z]+)?", str(task.get("depends") or ""))
    return [*words, *(task.get("dependencies") or ())]
