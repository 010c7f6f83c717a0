"""Every object has a closed schema: a mistyped or misplaced field is an error here, not silence on a cluster."""

from __future__ import annotations

import copy
import json
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from colchis.components.config import RunConfig, from_parameters
from colchis.workflows.documents import Document
from colchis.workflows.lint import lint, lint_files
from tests.manifests.conftest import MANIFESTS

SCHEMAS = json.loads((Path(__file__).parent / "schema/kinds.json").read_text())
REQUESTS = sorted((MANIFESTS / "runs").rglob("*.yaml"))


@cache
def validator(kind: str) -> jsonschema.Draft202012Validator:
    return jsonschema.Draft202012Validator({**SCHEMAS["kinds"][kind], "$defs": SCHEMAS["$defs"]})


def findings(document: Document) -> list[str]:
    """What a closed schema says of one object that is not Argo Workflows' own."""
    kind = f"{document.body.get('apiVersion')}/{document.kind}"
    if kind not in SCHEMAS["kinds"]:
        return [f"{document.file}: {kind} has no schema here: add it to schema/regenerate.py"]
    place = f"{document.file}: {document.kind}/{document.name}"
    errors = validator(kind).iter_errors(document.body)
    return [f"{place}: {'.'.join(map(str, e.absolute_path))}: {e.message[:200]}" for e in errors]


def test_every_object_has_the_fields_of_its_kind(documents: dict[str, list[Document]]) -> None:
    """Fault: a field that an API server drops or refuses."""
    found = [d for folder in documents.values() for d in folder if not d.is_argo]
    assert len(found) > 60
    assert [f for d in found for f in findings(d)] == []


def test_argos_objects_pass_the_lint(documents: dict[str, list[Document]]) -> None:
    """Fault: a patch of an overlay that breaks a template, or a value that YAML readers disagree on."""
    for folder, found in documents.items():
        assert [str(f) for f in lint(found)] == [], folder


@pytest.mark.parametrize(
    ("kind", "path", "value"),
    [
        ("StatefulSet", ("spec", "template", "spec", "containers", 0, "imagePulPolicy"), "Always"),
        ("StatefulSet", ("spec", "template", "spec", "containers", 0, "ports", 0, "containerPort"), "9000"),
        ("NetworkPolicy", ("spec", "engress"), []),
        ("Service", ("spec", "publishNotReadyAdresses"), True),
        ("Role", ("rules", 0, "verb"), ["get"]),
        ("ConfigMap", ("metadata", "anotations"), {}),
    ],
)
def test_a_typo_is_found(overlay: list[Document], kind: str, path: tuple[Any, ...], value: Any) -> None:
    """Fault: a check that cannot fail."""
    document = next(d for d in overlay if d.kind == kind)
    body = copy.deepcopy(document.body)
    *parents, last = path
    place = body
    for part in parents:
        place = place[part]
    place[last] = value
    assert len(findings(Document(document.file, body, document.node))) == 1


def test_gitops_objects_are_there(documents: dict[str, list[Document]]) -> None:
    """Fault: a folder whose kustomization forgot a file."""
    kinds = {folder: sorted(d.kind for d in found) for folder, found in documents.items() if "gitops" in folder}
    assert kinds == {
        "gitops/argocd": ["AppProject", "ApplicationSet"],
        "gitops/flux": ["GitRepository", "Kustomization", "Kustomization", "Role", "RoleBinding", "ServiceAccount"],
    }


def test_requests_stay_within_strict() -> None:
    """Fault: an example that a controller with templateReferencing: Strict refuses, or whose names differ."""
    assert REQUESTS
    assert [str(f) for f in lint_files([MANIFESTS / "base/templates", *REQUESTS])] == []


@pytest.mark.parametrize("path", REQUESTS, ids=lambda p: p.stem)
def test_a_request_names_its_run_and_is_never_pruned(path: Path) -> None:
    """Fault: a request whose deletion from git ends its run, or that starts a run of another name."""
    request = yaml.safe_load(path.read_text())
    given = {p["name"]: p["value"] for p in request["spec"]["arguments"]["parameters"]}
    assert request["metadata"]["name"] == given["run"] == path.stem
    annotations = request["metadata"]["annotations"]
    assert annotations["kustomize.toolkit.fluxcd.io/prune"] == "disabled"
    assert annotations["kustomize.toolkit.fluxcd.io/ssa"] == "IfNotPresent"
    assert "Prune=false" in annotations["argocd.argoproj.io/sync-options"]
    config = from_parameters({k: v for k, v in given.items() if k not in ("run", "pool", "start")})
    assert isinstance(config, RunConfig)


def test_every_rendered_template_is_in_the_base() -> None:
    """Fault: a new shape that no cluster gets, because the base does not list it."""
    listed = yaml.safe_load((MANIFESTS / "base/kustomization.yaml").read_text())["resources"]
    rendered = {f"templates/{p.name}" for p in (MANIFESTS / "base/templates").glob("*.yaml")}
    assert {r for r in listed if r.startswith("templates/")} == rendered
