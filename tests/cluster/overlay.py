"""What a Workflow of the conformance table needs in a namespace whose Pod Security standard is `restricted`.

The rendered templates need nothing: they say it themselves.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

Json = Any

POD_SECURITY = {
    "runAsNonRoot": True,
    "runAsUser": 10001,
    "runAsGroup": 10001,
    "fsGroup": 10001,
    "seccompProfile": {"type": "RuntimeDefault"},
}
CONTAINER_SECURITY = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}


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
