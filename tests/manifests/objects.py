"""Pods and references in manifests, wherever a kind keeps them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from colchis.workflows.documents import Document

Json = Any
ARGO_IMAGE = "argoexec"
"""Stands for the image of a resource template's only container, which is Argo's own."""


@dataclass(frozen=True)
class Pod:
    """One kind of pod that a manifest makes."""

    where: str
    labels: Mapping[str, str]
    spec: Json
    is_argos: bool = False
    """A resource template: its container is Argo's, secured by the controller's settings."""

    @property
    def containers(self) -> Sequence[Json]:
        return [*self.spec.get("initContainers", []), *self.spec.get("containers", [])]

    @property
    def name(self) -> str:
        """As the table of flows has it: the stage, `engine`, or the name of the workload."""
        if "colchis.dev/pool" in self.labels:
            return "engine"
        return self.labels.get("colchis.dev/stage") or self.labels.get("app.kubernetes.io/name", "")


def pods(documents: Iterable[Document]) -> list[Pod]:
    """Every kind of pod that these objects make."""
    return [pod for document in documents for pod in _pods(document)]


def _pods(document: Document) -> Iterator[Pod]:
    where, spec = f"{document.file}: {document.kind}/{document.name}", document.body.get("spec") or {}
    if document.kind in ("StatefulSet", "Deployment", "DaemonSet", "Job"):
        template = spec["template"]
        claims = [claim["metadata"]["name"] for claim in spec.get("volumeClaimTemplates", [])]
        volumes = [{"name": name, "persistentVolumeClaim": {"claimName": None}} for name in claims]
        body = {**template["spec"], "volumes": [*template["spec"].get("volumes", []), *volumes]}
        yield Pod(where, template["metadata"].get("labels", {}), body)
    if document.kind == "WorkflowTemplate":
        for template in spec["templates"]:
            containers = [template["container"]] if "container" in template else []
            containers += template.get("containerSet", {}).get("containers", [])
            if not containers and "resource" not in template:
                continue
            shared = ("serviceAccountName", "automountServiceAccountToken", "securityContext", "executor")
            pod = {key: template.get(key, spec.get(key)) for key in shared}
            pod["containers"] = [{"name": "main", **c} for c in containers]
            pod["initContainers"] = template.get("initContainers", [])
            pod["volumes"] = [*spec.get("volumes", []), *template.get("volumes", [])]
            labels = (template.get("metadata") or {}).get("labels", {})
            yield Pod(f"{where}, template {template['name']}", labels, pod, is_argos="resource" in template)


def find(documents: Iterable[Document], kind: str) -> dict[str, Json]:
    """name -> body of the objects of a kind."""
    return {d.name: d.body for d in documents if d.kind == kind}


def selects(selector: Json, labels: Mapping[str, str]) -> bool:
    """Whether a label selector (matchLabels, matchExpressions) takes these labels; an empty one takes all."""
    for key, value in (selector.get("matchLabels") or {}).items():
        if labels.get(key) != value:
            return False
    for rule in selector.get("matchExpressions") or []:
        key, operator, values = rule["key"], rule["operator"], rule.get("values", [])
        there = labels.get(key)
        if operator == "Exists" and there is None:
            return False
        if operator == "DoesNotExist" and there is not None:
            return False
        if operator == "In" and there not in values:
            return False
        if operator == "NotIn" and there in values:
            return False
    return True
