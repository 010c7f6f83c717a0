"""What every pod template must say for itself: rights, resources, a deadline, and where its artifacts go."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from colchis.workflows.program import Program, Template

Json = Any
Problems = Iterator[tuple[str, str]]


def spec_problems(program: Program) -> Problems:
    """The workflow's own part: what its pods run as."""
    spec = program.spec
    if not any(template.is_pod for template in program.templates.values()):
        return
    security = spec.get("securityContext") or {}
    if security.get("runAsNonRoot") is not True:
        yield "spec.securityContext.runAsNonRoot", "pods must not run as root: set true"
    if (security.get("seccompProfile") or {}).get("type") not in ("RuntimeDefault", "Localhost"):
        yield "spec.securityContext.seccompProfile", "the restricted standard asks for RuntimeDefault"
    if not spec.get("serviceAccountName"):
        yield "spec.serviceAccountName", "pods would run as `default`: name an account without rights"
    if spec.get("automountServiceAccountToken") is not False:
        yield "spec.automountServiceAccountToken", "stages need no token of the cluster: set false"
    elif not (spec.get("executor") or {}).get("serviceAccountName"):
        yield "spec.executor.serviceAccountName", "Argo's own containers need an account that reports results: name it"
    if (spec.get("artifactGC") or {}).get("strategy", "Never") != "Never":
        yield "spec.artifactGC.strategy", "its finalizer can block the deletion of a run: Never, and a lifecycle rule"


def template_problems(template: Template) -> Problems:
    """A template's own part; nothing for steps and dags."""
    body, field = template.body, template.field
    if template.is_pod and "resource" not in body:
        if "activeDeadlineSeconds" not in body:
            yield f"{field}.activeDeadlineSeconds", "a pod without a deadline can wait for ever: set one"
        for place, container in _containers(template):
            yield from _container_problems(place, container)
    names = [container.get("name") for container in (body.get("containerSet") or {}).get("containers") or ()]
    if names and "main" not in names and (body.get("outputs") or template.declared("inputs", "artifacts")):
        yield (
            f"{field}.containerSet.containers",
            "outputs and artifacts belong to a container called main: name the last so",
        )
    for side in ("inputs", "outputs"):
        for name, artifact in template.declared(side, "artifacts").items():
            yield from _artifact_problems(f"{field}.{side}.artifacts ({name})", artifact, side)


def _containers(template: Template) -> Iterator[tuple[str, Mapping[str, Json]]]:
    body, field = template.body, template.field
    for kind in ("container", "script"):
        if kind in body:
            yield f"{field}.{kind}", body[kind]
    for i, container in enumerate((body.get("containerSet") or {}).get("containers") or ()):
        yield f"{field}.containerSet.containers[{i}]", container
    for kind in ("initContainers", "sidecars"):
        for i, container in enumerate(body.get(kind) or ()):
            yield f"{field}.{kind}[{i}]", container


def _container_problems(field: str, container: Mapping[str, Json]) -> Problems:
    image = str(container.get("image", ""))
    if "@" not in image and ":" not in image.rpartition("/")[2]:
        yield f"{field}.image", f"{image!r} has no tag: name a version"
    elif image.endswith(":latest"):
        yield f"{field}.image", f"{image!r} changes under the run: name a version"
    security = container.get("securityContext") or {}
    wanted = {"allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True}
    for key, value in wanted.items():
        if security.get(key) is not value:
            yield f"{field}.securityContext.{key}", f"set {str(value).lower()}"
    if "ALL" not in ((security.get("capabilities") or {}).get("drop") or ()):
        yield f"{field}.securityContext.capabilities.drop", "the restricted standard asks for [ALL]"
    if security.get("privileged") or security.get("runAsUser") == 0:
        yield f"{field}.securityContext", "a stage needs no privilege and no root"
    resources = container.get("resources") or {}
    for kind, quantity in (("requests", "cpu"), ("requests", "memory"), ("limits", "memory")):
        if quantity not in (resources.get(kind) or {}):
            yield f"{field}.resources.{kind}.{quantity}", "the scheduler must know: set it"


def _artifact_problems(field: str, artifact: Mapping[str, Json], side: str) -> Problems:
    store = artifact.get("s3") or {}
    for secret in ("endpoint", "bucket", "accessKeySecret", "secretKeySecret"):
        if secret in store:
            yield f"{field}.s3.{secret}", "belongs to the artifact repository, not to a manifest: keep only the key"
    key = str(store.get("key", ""))
    if side == "outputs" and not key:
        yield f"{field}.s3.key", "an output needs a key of its own, or nobody finds it after the run"
    if key.startswith("/") or "//" in key:
        yield f"{field}.s3.key", f"{key!r} has an empty part: remove the slash"
    if key.endswith("/"):
        yield f"{field}.s3.key", f"{key!r}: with a slash at the end, SeaweedFS gives back an empty file for the folder"
    if side == "outputs" and key and "{{" not in key:
        yield f"{field}.s3.key", f"{key!r} is the same for all runs: put the run's name in"
