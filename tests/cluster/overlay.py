"""What a manifest needs to run on the test cluster, and nothing more.

The test cluster has no image registry: one image, with Debian's python3.11, stands for all stages, and its code and
packages are mounted from a volume. Manifests that say nothing about security get the least that the namespace's Pod
Security standard, `restricted`, asks for; those that do are taken as they are.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

Json = Any

VOLUME = {"name": "environment", "persistentVolumeClaim": {"claimName": "colchis-environment", "readOnly": True}}
MOUNT = {"name": "environment", "mountPath": "/opt/colchis", "readOnly": True}
POD_SECURITY = {
    "runAsNonRoot": True,
    "runAsUser": 10001,
    "runAsGroup": 10001,
    "fsGroup": 10001,
    "seccompProfile": {"type": "RuntimeDefault"},
}
CONTAINER_SECURITY = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}


def with_environment(manifest: Json) -> Json:
    """A WorkflowTemplate or Workflow whose containers see the code and the packages at /opt/colchis."""
    manifest = copy.deepcopy(manifest)
    spec = manifest["spec"]
    spec["volumes"] = [*spec.get("volumes", []), VOLUME]
    for template in spec.get("templates", []):
        places = [template[kind] for kind in ("container", "script", "containerSet") if kind in template]
        for place in (*places, *template.get("initContainers", []), *template.get("sidecars", [])):
            place["volumeMounts"] = [*place.get("volumeMounts", []), MOUNT]
    return manifest


def with_security(manifest: Json) -> Json:
    """A Workflow that `restricted` admits, with the accounts of the namespace, where it doesn't say so itself."""
    manifest = copy.deepcopy(manifest)
    spec = manifest["spec"]
    spec.setdefault("securityContext", POD_SECURITY)
    spec.setdefault("serviceAccountName", "colchis-workflow")
    spec.setdefault("automountServiceAccountToken", False)
    spec.setdefault("executor", {"serviceAccountName": "colchis-executor"})
    for template in spec.get("templates", []):
        for container in _containers(template):
            container.setdefault("securityContext", CONTAINER_SECURITY)
    return manifest


def _containers(template: Json) -> Iterator[Json]:
    yield from (template[kind] for kind in ("container", "script") if kind in template)
    yield from template.get("containerSet", {}).get("containers", [])
    yield from template.get("initContainers", [])
    yield from template.get("sidecars", [])
