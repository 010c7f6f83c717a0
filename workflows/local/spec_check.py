"""The checks that a controller makes of a whole Workflow before it starts anything: templates, inputs, tags, cycles.

A violation fails the workflow with `invalid spec: ...`. Only what can be reached from the entrypoint and the exit handler
is looked at, as on the controller; the tags inside expressions are left for when they are evaluated.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from colchis.workflows.local.dag import dependencies
from colchis.workflows.local.fanout import is_loop
from colchis.workflows.local.rules import declared_paths
from colchis.workflows.local.substitution import tags

_KNOWN_LATER = ("workflow.creationTimestamp", "workflow.duration", "tasks.name", "steps.name", "node.name", "pod.name")
_RETRY = {"retries", "lastRetry.exitCode", "lastRetry.status", "lastRetry.duration", "lastRetry.message"}
_NODE = ("id", "status", "startedAt", "finishedAt", "exitCode", "outputs.result")


class InvalidSpec(ValueError):
    """What the controller's message says after `invalid spec: `."""


def check_spec(spec: Mapping[str, Any], values: Iterable[str]) -> None:
    """Raises InvalidSpec. `values` are the names of the `workflow.*` tags."""
    check = _SpecCheck({template["name"]: template for template in spec["templates"]}, set(values))
    check.template(spec["entrypoint"], "spec.entrypoint", None)
    if spec.get("onExit"):
        check.values |= {"workflow.status", "workflow.failures"}
        check.visited.clear()
        check.template(spec["onExit"], "spec.onExit", {})


class _SpecCheck:
    def __init__(self, templates: Mapping[str, Mapping[str, Any]], values: set[str]) -> None:
        self.templates, self.values = templates, values
        self.visited: set[str] = set()

    def template(self, name: str, path: str, arguments: Mapping[str, Any] | None) -> None:
        """Checks a template and all that it calls. `arguments` None: the workflow's own, known by name."""
        if name not in self.templates:
            raise InvalidSpec(f"{path} template name '{name}' undefined")
        template = self.templates[name]
        inputs = template.get("inputs", {})
        given = {a["name"] for kind in ("parameters", "artifacts") for a in (arguments or {}).get(kind, [])}
        for parameter in inputs.get("parameters", []):
            supplied = parameter["name"] in given or "value" in parameter or "default" in parameter
            if not supplied and not (arguments is None and f"workflow.parameters.{parameter['name']}" in self.values):
                raise InvalidSpec(f"{path} templates.{name} inputs.parameters.{parameter['name']} was not supplied")
        for artifact in inputs.get("artifacts", []):
            if artifact["name"] not in given and "s3" not in artifact and not artifact.get("optional"):
                raise InvalidSpec(f"{path} templates.{name} inputs.artifacts.{artifact['name']} was not supplied")
        if name in self.visited:
            return
        self.visited.add(name)
        scope = {f"inputs.parameters.{p['name']}" for p in inputs.get("parameters", [])} | {"inputs.parameters"}
        scope |= {f"inputs.artifacts.{a['name']}" for a in inputs.get("artifacts", [])}
        if "steps" in template:
            scope = self.steps(name, template, scope)
            self.resolve(template.get("outputs", {}), scope, f"templates.{name}.outputs")
        elif "dag" in template:
            scope = self.dag(name, template, scope)
            self.resolve(template.get("outputs", {}), scope, f"templates.{name}.outputs")
        else:
            retry = _RETRY if "retryStrategy" in template else set()
            self.resolve(template, scope | retry | set(declared_paths(template)), f"templates.{name}:")

    def steps(self, name: str, template: Mapping[str, Any], scope: set[str]) -> set[str]:
        seen: set[str] = set()
        for number, group in enumerate(template["steps"]):
            before = set(scope)
            for step in group:
                path = f"templates.{name}.steps[{number}].{step['name']}"
                if step["name"] in seen:
                    raise InvalidSpec(f"templates.{name}.steps[{number}].name '{step['name']}' is not unique")
                seen.add(step["name"])
                self.resolve(step, before | _items(step), f"templates.{name}.steps")
                self.template(step["template"], path, step.get("arguments", {}))
                scope |= self.outputs(step, f"steps.{step['name']}")
        return scope

    def dag(self, name: str, template: Mapping[str, Any], scope: set[str]) -> set[str]:
        tasks = {task["name"]: task for task in template["dag"]["tasks"]}
        if len(tasks) < len(template["dag"]["tasks"]):
            raise InvalidSpec(f"templates.{name}: the names of tasks are not unique")
        if any(task.get("depends") for task in tasks.values()) and any(t.get("dependencies") for t in tasks.values()):
            raise InvalidSpec(f"templates.{name} cannot use both 'depends' and 'dependencies' in the same DAG template")
        ancestors = {task: _ancestors(task, tasks, name) for task in tasks}
        outputs = {task: self.outputs(tasks[task], f"tasks.{task}") for task in tasks}
        for task_name, task in tasks.items():
            path = f"templates.{name}.tasks.{task_name}"
            _check_dependencies(task, ancestors[task_name], set(tasks), path)
            visible = scope | _items(task) | set().union(*(outputs[above] for above in ancestors[task_name]))
            self.resolve(task, visible, path)
            self.template(task["template"], path, task.get("arguments", {}))
        return scope | set().union(*outputs.values())

    def outputs(self, step: Mapping[str, Any], prefix: str) -> set[str]:
        """The tags under which later steps see what a step gives."""
        outputs = self.templates.get(step["template"], {}).get("outputs", {})
        found = {f"{prefix}.{field}" for field in _NODE}
        found |= {f"{prefix}.outputs.parameters.{p['name']}" for p in outputs.get("parameters", [])}
        if is_loop(step):
            found.add(f"{prefix}.outputs.parameters")
        return found | {f"{prefix}.outputs.artifacts.{a['name']}" for a in outputs.get("artifacts", [])}

    def resolve(self, value: Any, scope: set[str], path: str) -> None:
        for is_expression, tag in tags(value):
            known = tag in scope or tag in self.values or tag.startswith(_KNOWN_LATER)
            if not is_expression and not known and not (tag.startswith("item.") and "item" in scope):
                raise InvalidSpec(f"{path} failed to resolve {{{{{tag}}}}}")


def _items(step: Mapping[str, Any]) -> set[str]:
    return {"item"} if is_loop(step) else set()


def _check_dependencies(task: Mapping[str, Any], ancestors: set[str], tasks: set[str], path: str) -> None:
    """An argument that is the output of another task needs that task as an ancestor."""
    arguments = task.get("arguments", {})
    sources = [("parameter", p["name"], p.get("value", "")) for p in arguments.get("parameters", [])]
    sources += [("artifact", a["name"], a.get("from", "")) for a in arguments.get("artifacts", [])]
    for kind, name, source in sources:
        other = source.removeprefix("{{tasks.").partition(".")[0] if source.startswith("{{tasks.") else ""
        if other in tasks - ancestors:
            raise InvalidSpec(f"{path} missing dependency '{other}' for {kind} '{name}'")


def _ancestors(task: str, tasks: Mapping[str, Mapping[str, Any]], template: str) -> set[str]:
    found: set[str] = set()
    queue = [task]
    while queue:
        current = queue.pop()
        for need in dependencies(tasks[current]):
            if need not in tasks:
                raise InvalidSpec(f"templates.{template}.tasks.{current} dependency '{need}' not defined")
            if need == task:
                raise InvalidSpec(f"templates.{template}.tasks dependency cycle detected: {current}->{need}")
            if need not in found:
                found.add(need)
                queue.append(need)
    return found
