"""Rules of the accepted subset that need more than one field: where a local run would silently differ from a cluster."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from colchis.components.errors import BadConfig
from colchis.workflows.local.expression_tree import ExpressionError, parse
from colchis.workflows.local.substitution import TAG, tags

Refuse = Callable[[str, str, str], BadConfig]
Template = Mapping[str, Any]


def declared_paths(template: Template) -> dict[str, str]:
    """The paths that a template declares for its outputs and input artifacts, by the tag that stands for them."""
    found = {}
    for side in ("inputs", "outputs"):
        for artifact in template.get(side, {}).get("artifacts", []):
            if "path" in artifact:
                found[f"{side}.artifacts.{artifact['name']}.path"] = artifact["path"]
    for parameter in template.get("outputs", {}).get("parameters", []):
        if "path" in parameter["valueFrom"]:
            found[f"outputs.parameters.{parameter['name']}.path"] = parameter["valueFrom"]["path"]
    return found


def check_rules(spec: Mapping[str, Any], refuse: Refuse) -> None:
    """Raises what `refuse(path, why, hint)` makes of the first violation in the templates of a spec."""
    templates = {template["name"]: template for template in spec.get("templates", [])}
    for name, template in templates.items():
        path = f"templates.{name}"
        _fail_fast(template, templates, path, refuse)
        _outputs(template, path, refuse)
        _written_paths(template, path, spec.get("volumes", []), refuse)
        _container_order(template, path, refuse)
        _expressions(template, path, refuse)


def _containers(template: Template) -> list[Mapping[str, Any]]:
    return [*template.get("containerSet", {}).get("containers", []), *filter(None, [template.get("container")])]


def _fail_fast(template: Template, templates: Mapping[str, Template], path: str, refuse: Refuse) -> None:
    if not template.get("failFast"):
        return
    steps = [step for group in template.get("steps", []) for step in group]
    for step in [*steps, *template.get("dag", {}).get("tasks", [])]:
        if "retryStrategy" in templates.get(step["template"], {}):
            why = (
                f"{step['template']!r}, which it calls, has a retryStrategy: a controller counts a failed attempt as a"
                " failed child and ends the template before the retry"
            )
            raise refuse(f"{path}.failFast", why, "call the retried template from one of its own, without failFast")


def _outputs(template: Template, path: str, refuse: Refuse) -> None:
    """What a pod gives has a path; what Steps and DAGs give comes from their children."""
    wanted = ("parameter", "expression") if "steps" in template or "dag" in template else ("path",)
    for parameter in template.get("outputs", {}).get("parameters", []):
        if not any(source in parameter["valueFrom"] for source in wanted):
            where = f"{path}.outputs.parameters.{parameter['name']}.valueFrom"
            raise refuse(where, f"expected {' or '.join(wanted)}", "correct the manifest")
    names = [container.get("name") for container in template.get("containerSet", {}).get("containers", [])]
    if names and "main" not in names and (template.get("outputs") or template.get("inputs", {}).get("artifacts")):
        why = 'containers must have a container named "main" for input or output'
        raise refuse(f"{path}.containerSet", why, "name the last container main")


def _container_order(template: Template, path: str, refuse: Refuse) -> None:
    """The containers of a set depend on each other without a cycle: one would wait for ever."""
    containers = template.get("containerSet", {}).get("containers", [])
    needs = {container["name"]: set(container.get("dependencies", [])) for container in containers}
    while ready := {name for name, left in needs.items() if not left}:
        needs = {name: left - ready for name, left in needs.items() if name not in ready}
    for name, left in needs.items():
        where = f"{path}.containerSet.containers.{name}.dependencies"
        raise refuse(where, f"{', '.join(sorted(left))}: a cycle, or no such container", "correct the dependencies")


def _written_paths(template: Template, path: str, volumes: list[Any], refuse: Refuse) -> None:
    """A declared path may not be written out in a command: on this machine it lies elsewhere."""
    containers = _containers(template)
    mounts = [m for holder in (template.get("containerSet", {}), *containers) for m in holder.get("volumeMounts", [])]
    known = {volume["name"]: "emptyDir" in volume for volume in [*template.get("volumes", []), *volumes]}
    for mount in mounts:
        if mount["name"] not in known:
            raise refuse(f"{path}.volumeMounts.{mount['name']}", "no such volume", "declare it under volumes")
    paths = {*declared_paths(template).values(), *(m["mountPath"] for m in mounts if known[m["name"]])}
    words = [TAG.sub("\0", word) for c in containers for word in [*c["command"], *c.get("args", [])]]
    for declared in sorted(paths):
        pattern = re.compile(rf"(?<![\w./-]){re.escape(declared.rstrip('/'))}(?![\w.-])")
        for word in words:
            if pattern.search(word):
                why = f"its command names {declared}, which it declares as an output, artifact or mount: {word[:80]!r}"
                hint = (
                    "use {{outputs.parameters.NAME.path}}, {{outputs.artifacts.NAME.path}},"
                    " {{inputs.artifacts.NAME.path}}, or $(NAME) of an env variable that holds the path"
                )
                raise refuse(path, why, hint)


def _expressions(template: Template, path: str, refuse: Refuse) -> None:
    for source in _sources(template):
        try:
            parse(source)
        except ExpressionError as error:
            raise refuse(path, f"expression: {error}", "see expressions.py for the accepted subset") from error


def _sources(template: Template) -> Iterator[str]:
    used = ("inputs", "outputs", "container", "containerSet", "steps", "dag", "resource", "retryStrategy")
    for is_expression, source in tags({key: template[key] for key in used if key in template}):
        if is_expression:
            yield source
    retry = template.get("retryStrategy", {}).get("expression", "")
    if retry and "{{" not in retry:
        yield retry
    for parameter in template.get("outputs", {}).get("parameters", []):
        if "expression" in parameter["valueFrom"]:
            yield parameter["valueFrom"]["expression"]
