"""Every tag names something that is in scope where it stands, and every expression is one that both runners accept."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from colchis.workflows.local.expression_tree import ExpressionError, names, parse
from colchis.workflows.local.substitution import tags
from colchis.workflows.program import Call, Program, Scope, Template

Json = Any
Problems = Iterator[tuple[str, str]]

_LAST_RETRY = tuple(f"lastRetry.{word}" for word in ("exitCode", "status", "duration", "message"))
_MEASURED = ("status", "duration", "exitCode", "retries", "outputs.result")
_OUTPUT = re.compile(r"(?:steps|tasks)\.(?P<call>[^.]+)\.outputs\.(?P<kind>parameters|artifacts)\.(?P<name>[^.]+)")
_PATCHED_BY_NAME = re.compile(r"workflow\.(?:name|namespace|uid|parameters\.[a-z0-9-]+)|inputs\.parameters\.[a-z0-9-]+")


def spec_problems(program: Program) -> Problems:
    """Tags outside of templates. What runs per workflow sees the workflow; metrics also how it ended."""
    scope = program.workflow_scope()
    for key, value in program.spec.items():
        if key not in ("templates", "metrics"):
            yield from _unresolved(value, scope, f"spec.{key}")
    at_end = program.workflow_scope(at_exit=True).below("workflow.resourcesDuration.")
    yield from _unresolved(program.spec.get("metrics"), at_end, "spec.metrics")


def template_problems(program: Program, template: Template) -> Problems:
    """Tags inside a template, each part of it with the names that exist there."""
    at_exit = template.name in program.reached_at_exit
    inputs = program.input_scope(template, at_exit=at_exit)
    for call in template.calls:
        yield from _call_problems(program, template, call, at_exit=at_exit)
    results = program.result_scope(template, None, at_exit=at_exit)
    pod = program.pod_scope(template, at_exit=at_exit)
    for key, value in template.body.items():
        field = f"{template.field}.{key}"
        if key in ("steps", "dag"):
            continue
        if key == "outputs":
            scope = pod if template.is_pod else results
            yield from _unresolved(value, scope, field)
            yield from _without_default(program, template, value, field)
            for name, parameter in template.declared("outputs", "parameters").items():
                if expression := (parameter.get("valueFrom") or {}).get("expression"):
                    yield from _unknown_names(expression, scope, f"{field}.parameters ({name})")
        elif key == "retryStrategy":
            yield from _unresolved(value, inputs.plus([*_LAST_RETRY, "retries"]), field)
            if expression := value.get("expression"):
                yield from _unknown_names(expression, inputs.plus(_LAST_RETRY), f"{field}.expression")
        elif key == "metrics":
            own = {f"outputs.parameters.{name}" for name in template.declared("outputs", "parameters")}
            yield from _unresolved(value, inputs.plus({*_MEASURED, *own}).below("resourcesDuration."), field)
        elif template.is_pod:
            yield from _unresolved(value, pod, field)
        else:
            yield from _unresolved(value, inputs, field)
    yield from _injections(template)


def _call_problems(program: Program, template: Template, call: Call, *, at_exit: bool) -> Problems:
    field = f"{call.field} ({call.name})"
    seen = program.result_scope(template, call.before, at_exit=at_exit)
    own = {f"{call.family}.{call.name}.{word}" for word in ("status", "exitCode", "outputs.result")}
    for key, value in call.body.items():
        scope = seen.below("item.").plus(["item"]) if call.loops and not key.startswith("with") else seen
        if key == "hooks":
            scope = scope.plus(own)
        yield from _unresolved(value, scope, f"{field}.{key}")
        yield from _without_default(program, template, value, f"{field}.{key}")


def _unresolved(value: Json, scope: Scope, field: str) -> Problems:
    for is_expression, body in tags(value):
        if is_expression:
            yield from _unknown_names(body, scope, field)
        elif not scope.holds(body):
            yield field, f"{{{{{body}}}}} names nothing here: {_near(body, scope)}"


def _unknown_names(expression: str, scope: Scope, field: str) -> Problems:
    try:
        used = names(parse(expression))
    except ExpressionError as error:
        yield field, f"{error}: write it with what the local runner and a controller both take"
        return
    for name in sorted(used):
        if not scope.holds_in_expression(name):
            hint = _near(name, scope)
            if re.fullmatch(r"[a-z]+", name) or f"{name}-" in " ".join(scope.names):
                hint += "; a name with a hyphen is written inputs.parameters['a-b'] in an expression"
            yield field, f"{name} in {{{{={expression}}}}} names nothing here: {hint}"


def _without_default(program: Program, template: Template, value: Json, field: str) -> Problems:
    """An output of a call that may be skipped, read without a default: an error since Argo 4.0.7."""
    calls = {call.name: call for call in template.calls}
    for is_expression, body in tags(value):
        if is_expression and "??" in body:
            continue
        for match in _OUTPUT.finditer(" ".join(sorted(_names_of(body))) if is_expression else body):
            call = calls.get(match["call"])
            callee = program.callee(call.body) if call else None
            output = callee.declared("outputs", match["kind"]).get(match["name"]) if callee else None
            if call is None or output is None or not call.may_be_skipped:
                continue
            source = output.get("valueFrom") or {}
            if not ("default" in source or "default" in output or output.get("optional")):
                problem = (
                    f"{match.group()} has no value when {call.name!r} is skipped: give the output a valueFrom.default"
                )
                yield field, problem


def _names_of(expression: str) -> set[str]:
    try:
        return names(parse(expression))
    except ExpressionError:
        return set()


def _injections(template: Template) -> Problems:
    """Text that becomes structure may only hold names: anything else would let an argument write a pod's spec."""
    patches: Mapping[str, Json] = {"podSpecPatch": template.body.get("podSpecPatch")}
    for part, text in patches.items():
        for _, body in tags(text):
            yield f"{template.field}.{part}", f"{{{{{body}}}}}: no tag may enter a patch; render one template per shape"
    manifest = (template.body.get("resource") or {}).get("manifest")
    for is_expression, body in tags(manifest):
        if is_expression or not _PATCHED_BY_NAME.fullmatch(body):
            problem = f"{{{{{body}}}}}: only names may enter a manifest (a workflow's name, a parameter or an input)"
            yield f"{template.field}.resource.manifest", problem
    for line in str(manifest or "").splitlines():
        if "{{" in line and not re.search(r"""(["']).*\{\{.*\}\}.*\1\s*$""", line):
            yield f"{template.field}.resource.manifest", f"{line.strip()!r}: put the tag in quotes"


def _near(name: str, scope: Scope) -> str:
    parent = name.rpartition(".")[0]
    known = sorted(n for n in scope.names if n.startswith(parent + ".")) if parent else []
    return f"known are {', '.join(known[:8])}" if known else f"nothing under {parent or name!r} is in scope"
