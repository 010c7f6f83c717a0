"""Checks manifests before a cluster sees them: a closed schema, and what neither a schema nor the API server checks.

    colchis lint FILE...

A finding names the file, the template, the field and what to do. `lint` finds nothing in what `render` writes.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

import jsonschema
import yaml

from colchis.components.errors import BadConfig
from colchis.workflows import lint_pods, lint_tags
from colchis.workflows.documents import Document, misreadable, parse, read, repeated_keys
from colchis.workflows.program import RECURSION_MARK, Call, Program, Template

Json = Any

DEPTH_BUDGET = 20
"""Templates in each other; a controller stops at 100, and every reconcile walks the chain."""
SIZE_BUDGET_BYTES = 256 * 1024
"""A Workflow with its status must stay under 1 MiB, and the stored template counts too."""

MAY_OVERRIDE = {
    *("workflowTemplateRef", "arguments", "entrypoint", "shutdown", "suspend", "activeDeadlineSeconds", "priority"),
    *("ttlStrategy", "podGC", "volumeClaimGC", "archiveLogs", "workflowMetadata", "metrics", "artifactGC"),
}
"""Fields of a run's spec that a controller with `templateReferencing: Strict` permits (seen on a live one)."""


@dataclass(frozen=True)
class Finding:
    """One thing to mend. `template` is empty when the finding is not inside a template."""

    file: str
    template: str
    field: str
    problem: str
    """What is wrong and what to do."""

    def __str__(self) -> str:
        place = f"template {self.template}, " if self.template else ""
        return f"{self.file}: {place}{self.field}: {self.problem}"


def lint(documents: Iterable[Document]) -> list[Finding]:
    """Findings of all documents. References between them (workflowTemplateRef, templateRef) must resolve among them."""
    documents = list(documents)
    library = {d.name: d for d in documents if d.is_argo and d.kind == "WorkflowTemplate"}
    findings: list[Finding] = []
    for document in documents:
        findings += _yaml_findings(document)
        if document.is_argo:
            malformed = list(_schema_findings(document))
            findings += malformed or _program_findings(Program(document, library))
    return findings


def lint_files(paths: Iterable[Path]) -> list[Finding]:
    """Findings of files, and of the `*.yaml` in folders. BadConfig when one cannot be read."""
    documents: list[Document] = []
    findings: list[Finding] = []
    for path in (file for p in paths for file in (sorted(p.rglob("*.yaml")) if p.is_dir() else [p])):
        try:
            documents += read(path)
        except OSError as error:
            raise BadConfig(
                f"cannot read {path}: {error.strerror}", hint="name a manifest or a folder of them"
            ) from error
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            findings.append(Finding(str(path), "", "(document)", " ".join(str(error).split())))
    return findings + lint(documents)


def _yaml_findings(document: Document) -> Iterator[Finding]:
    for field, value in misreadable(document.node):
        yield Finding(
            document.file, "", field, f"readers of YAML disagree on {value}: quote it, or write true or false"
        )
    for field in repeated_keys(document.node):
        yield Finding(document.file, "", field, "stands twice in one mapping: keep one")


@cache
def _validator() -> jsonschema.Draft202012Validator:
    text = resources.files("colchis.workflows").joinpath("schema", "workflow.json").read_text(encoding="utf-8")
    return jsonschema.Draft202012Validator(json.loads(text))


def _schema_findings(document: Document) -> Iterator[Finding]:
    for error in sorted(_validator().iter_errors(document.body), key=lambda e: list(map(str, e.absolute_path))):
        field = "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in error.absolute_path).lstrip(".")
        message = error.message if len(error.message) < 300 else f"{error.message[:300]} ..."
        yield Finding(document.file, "", field or "(document)", f"{message} (schema of Argo's full CRDs)")


def _program_findings(program: Program) -> Iterator[Finding]:
    file = program.document.file
    size = len(json.dumps(program.document.body, separators=(",", ":")))
    if size > SIZE_BUDGET_BYTES:
        yield Finding(file, "", "(document)", f"{size} bytes as JSON, budget {SIZE_BUDGET_BYTES}: split the template")
    if "workflowTemplateRef" in program.spec:
        yield from _run_findings(program)
        return
    yield from _spec_findings(program)
    for template in program.templates.values():
        for field, problem in _template_problems(program, template):
            yield Finding(file, template.name, field, problem)
        for field, manifest in _inline_runs(template):
            for finding in _manifest_findings(program, manifest):
                yield Finding(file, template.name, f"{field}: {finding.field}", finding.problem)


def _run_findings(program: Program) -> Iterator[Finding]:
    """A run request: arguments for a template, and nothing that Strict refuses."""
    file, spec = program.document.file, program.spec
    for field in sorted(set(spec) - MAY_OVERRIDE):
        problem = "a run may not set this (templateReferencing: Strict): set it in the WorkflowTemplate"
        yield Finding(file, "", f"spec.{field}", problem)
    reference = str((spec.get("workflowTemplateRef") or {}).get("name", ""))
    if reference not in program.library:
        problem = (
            f"WorkflowTemplate {reference!r} is not among the files that are checked: add its file, or mend the name"
        )
        yield Finding(file, "", "spec.workflowTemplateRef.name", problem)
        return
    target = Program(program.library[reference], program.library)
    for name, parameter in program.parameters.items():
        if name not in target.parameters:
            known = ", ".join(target.parameters)
            problem = f"{reference} has no parameter {name!r} (it has {known}); a controller would not say so"
            yield Finding(file, "", "spec.arguments.parameters", problem)
            continue
        yield from _not_in_enum(file, "", f"spec.arguments.parameters ({name})", parameter, target.parameters[name])
    for name, parameter in target.parameters.items():
        if "value" not in parameter and "default" not in parameter and name not in program.parameters:
            yield Finding(file, "", "spec.arguments.parameters", f"{reference} wants a value for {name!r}: add one")
    entrypoint = spec.get("entrypoint")
    if entrypoint and entrypoint not in target.templates:
        yield Finding(file, "", "spec.entrypoint", f"{reference} has no template {entrypoint!r}")


def _spec_findings(program: Program) -> Iterator[Finding]:
    """Entrypoint, exit handler, parameters, cycles and depth."""
    file, spec = program.document.file, program.spec
    handlers = {f"hooks.{n}.template": h.get("template") for n, h in (spec.get("hooks") or {}).items()}
    for field, name in {"entrypoint": spec.get("entrypoint"), "onExit": spec.get("onExit"), **handlers}.items():
        if name is None and field == "entrypoint":
            yield Finding(file, "", "spec.entrypoint", "a Workflow needs one: name the template to start with")
        elif name is not None and name not in program.templates:
            yield Finding(
                file, "", f"spec.{field}", f"there is no template {name!r}: it has {_some(program.templates)}"
            )
        elif name is not None:
            for missing in _missing_inputs(program.templates[name], given=set(program.parameters)):
                problem = f"template {name!r} wants input {missing!r}: give it a value in spec.arguments"
                yield Finding(file, str(name), f"spec.{field}", problem)
    if len(program.templates) != len(spec.get("templates") or ()):
        yield Finding(file, "", "spec.templates", "two templates have one name: rename one")
    for name, parameter in program.parameters.items():
        field = f"spec.arguments.parameters ({name})"
        yield from _not_in_enum(file, "", field, parameter, parameter)
        if program.document.kind == "Workflow" and "value" not in parameter and "valueFrom" not in parameter:
            yield Finding(file, "", field, "has no value, and nobody is asked for one: give it one")
    for chain in program.cycles():
        if not any(_is_marked(program.templates[name]) for name in chain):
            problem = f"calls itself ({' -> '.join(chain)}): break the cycle, or annotate it {RECURSION_MARK}: BOUND"
            yield Finding(file, chain[0], program.templates[chain[0]].field, problem)
    depth = program.depth(str(spec.get("entrypoint", "")))
    if depth > DEPTH_BUDGET:
        yield Finding(file, "", "spec.entrypoint", f"{depth} templates deep, budget {DEPTH_BUDGET}: flatten the calls")
    for field, problem in lint_tags.spec_problems(program):
        yield Finding(file, "", field, problem)
    for field, problem in lint_pods.spec_problems(program):
        yield Finding(file, "", field, problem)


def _template_problems(program: Program, template: Template) -> Iterator[tuple[str, str]]:
    body, field = template.body, template.field
    kinds = [
        k for k in ("container", "script", "containerSet", "resource", "steps", "dag", "suspend", "data") if k in body
    ]
    kinds += [k for k in ("http", "plugin") if k in body]
    if len(kinds) != 1:
        found = ", ".join(kinds) or "none"
        yield field, f"a template has exactly one of container, script, containerSet, resource, steps, dag ...: {found}"
    for word in ("activeDeadlineSeconds", "timeout"):
        if word in body and ("steps" in body or "dag" in body):
            yield f"{field}.{word}", "only leaf templates have a deadline: put it on the pods, or on the workflow"
    for side in ("inputs", "outputs"):
        for name, parameter in template.declared(side, "parameters").items():
            for problem in _enum_problems(parameter, parameter):
                yield f"{field}.{side}.parameters ({name})", problem
    names = [call.name for call in template.calls]
    for name in sorted({n for n in names if names.count(n) > 1}):
        yield field, f"two calls are named {name!r}: rename one"
    for call in template.calls:
        yield from _call_problems(program, call)
        callee = program.callee(call.body)
        if body.get("failFast") and callee and "retryStrategy" in callee.body:
            problem = (
                f"{callee.name!r} has a retryStrategy, but failFast ends {template.name!r} at its first failed try"
            )
            yield f"{field}.failFast", f"{problem}: put a template without failFast between them"
    yield from _dependency_problems(template)
    yield from lint_tags.template_problems(program, template)
    yield from lint_pods.template_problems(template)


def _dependency_problems(template: Template) -> Iterator[tuple[str, str]]:
    """Of a DAG: every dependency exists, none leads back, and all are written in one way."""
    tasks = (template.body.get("dag") or {}).get("tasks") or ()
    if any("depends" in t for t in tasks) and any("dependencies" in t for t in tasks):
        yield (
            f"{template.field}.dag",
            "has tasks with depends and tasks with dependencies: write depends in all of them",
        )
    names = {call.name for call in template.calls}
    for call in template.calls:
        for missing in sorted(call.before - names):
            yield f"{call.field} ({call.name})", f"depends on {missing!r}, which is no task here: it has {_some(names)}"
        if call.name in call.before:
            yield f"{call.field} ({call.name})", "depends on itself, by way of others perhaps: break the cycle"


def _call_problems(program: Program, call: Call) -> Iterator[tuple[str, str]]:
    """One step or task: its template exists and gets what it asks for, no more and no less."""
    field, body = f"{call.field} ({call.name})", call.body
    if "depends" in body and "continueOn" in body:
        yield field, "continueOn has no effect with depends: write depends: A || A.Failed"
    callee = program.callee(body)
    if callee is None:
        reference = body.get("templateRef") or {}
        name = "/".join(str(part) for part in reference.values()) if reference else str(body.get("template", ""))
        yield field, f"there is no template {name!r}: it has {_some(program.templates)}"
        return
    for kind in ("parameters", "artifacts"):
        given, wanted = call.arguments(kind), callee.declared("inputs", kind)
        for name in given:
            if name not in wanted:
                yield (
                    field,
                    f"template {callee.name!r} has no input {name!r} (it has {_some(wanted)}): a controller drops it",
                )
            elif kind == "parameters":
                for problem in _enum_problems(given[name], wanted[name]):
                    yield f"{field}.arguments.parameters ({name})", problem
    given_names = {*call.arguments("parameters"), *call.arguments("artifacts")}
    for missing in _missing_inputs(callee, given_names):
        yield field, f"template {callee.name!r} wants input {missing!r}: add the argument"
    for name, hook in (body.get("hooks") or {}).items():
        if program.callee(hook) is None:
            yield f"{field}.hooks.{name}", f"there is no template {hook.get('template')!r}"


def _missing_inputs(template: Template, given: set[str]) -> Iterator[str]:
    for name, parameter in template.declared("inputs", "parameters").items():
        has_own = any(key in parameter for key in ("value", "default", "valueFrom"))
        if name not in given and not has_own:
            yield name
    locations = ("s3", "raw", "http", "git", "gcs", "azure", "oss", "hdfs", "artifactory")
    for name, artifact in template.declared("inputs", "artifacts").items():
        if name not in given and not artifact.get("optional") and not any(k in artifact for k in locations):
            yield name


def _enum_problems(parameter: Mapping[str, Json], declared: Mapping[str, Json]) -> Iterator[str]:
    allowed = declared.get("enum")
    for key in ("value", "default"):
        value = parameter.get(key)
        if allowed and isinstance(value, str) and "{{" not in value and value not in allowed:
            yield f"{value!r} is not one of {', '.join(allowed)}: neither a controller nor its server would say so"


def _not_in_enum(
    file: str, template: str, field: str, parameter: Mapping[str, Json], declared: Mapping[str, Json]
) -> Iterator[Finding]:
    for problem in _enum_problems(parameter, declared):
        yield Finding(file, template, field, problem)


def _is_marked(template: Template) -> bool:
    metadata = template.body.get("metadata") or {}
    return RECURSION_MARK in (metadata.get("annotations") or {})


def _inline_runs(template: Template) -> Iterator[tuple[str, str]]:
    manifest = (template.body.get("resource") or {}).get("manifest")
    if manifest:
        yield f"{template.field}.resource.manifest", str(manifest)


def _manifest_findings(program: Program, manifest: str) -> Iterator[Finding]:
    """The Workflow inside a resource template: a run request like any other."""
    try:
        documents = parse(manifest, program.document.file)
    except yaml.YAMLError as error:
        reason = str(error).replace("\n", " ")
        yield Finding(
            program.document.file, "", "(manifest)", f"is not YAML before substitution ({reason}): quote the tags"
        )
        return
    library = {**program.library}
    if program.document.kind == "WorkflowTemplate":
        library.setdefault(program.document.name, program.document)
    for document in documents:
        yield from _yaml_findings(document)
        if document.is_argo:
            malformed = list(_schema_findings(document))
            yield from malformed or _program_findings(Program(document, library))


def _some(names: Iterable[str]) -> str:
    names = sorted(names)
    return ", ".join(names[:12]) + (" ..." if len(names) > 12 else "") if names else "none"
