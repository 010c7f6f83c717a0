"""Which fields of a manifest the interpreter runs, which have no meaning on one machine, and that all others are refused.

A field that is neither used nor listed as ignored could change what a workflow does, so it is an error that names the
file, the template and the field. Nothing is dropped silently: ignored fields are returned, for one report per run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

from colchis.components.errors import BadConfig
from colchis.workflows.local.rules import check_rules

PARAMETER_LIMIT_BYTES = 256 * 1024
_SCHEDULING = {
    *(
        "nodeSelector",
        "tolerations",
        "affinity",
        "schedulerName",
        "priorityClassName",
        "podPriorityClassName",
        "priority",
    ),
    *("hostAliases", "dnsPolicy", "dnsConfig", "imagePullSecrets", "hostNetwork"),
}
_SECURITY = {"serviceAccountName", "automountServiceAccountToken", "securityContext", "executor"}
_SPEC_USED = {
    *("entrypoint", "arguments", "templates", "workflowTemplateRef", "parallelism", "onExit", "activeDeadlineSeconds"),
    *("synchronization", "volumes", "workflowMetadata", "podSpecPatch"),
}
_SPEC_IGNORED = (
    _SCHEDULING
    | _SECURITY
    | {
        *("podGC", "ttlStrategy", "artifactGC", "metrics", "podMetadata", "podDisruptionBudget", "volumeClaimGC"),
        *("artifactRepositoryRef", "archiveLogs"),
    }
)
_TEMPLATE_USED = {
    *("name", "inputs", "outputs", "container", "containerSet", "steps", "dag", "resource", "parallelism", "failFast"),
    *("retryStrategy", "activeDeadlineSeconds", "volumes", "podSpecPatch"),
}
_TEMPLATE_IGNORED = _SCHEDULING | _SECURITY | {"metadata", "metrics", "annotations", "archiveLocation"}
_CONTAINER_USED = {"name", "command", "args", "env", "envFrom", "workingDir", "volumeMounts"}
_CONTAINER_IGNORED = {
    *("image", "imagePullPolicy", "resources", "securityContext", "ports", "livenessProbe", "readinessProbe"),
    *("startupProbe", "terminationMessagePath", "terminationMessagePolicy"),
}
_POD_PATCH_IGNORED = {
    *(
        "terminationGracePeriodSeconds",
        "priorityClassName",
        "runtimeClassName",
        "topologySpreadConstraints",
        "hostname",
    ),
    *("enableServiceLinks", "shareProcessNamespace", "nodeSelector", "tolerations", "affinity"),
}
_PARAMETER_NOTES = {"description", "enum"}
TEMPLATE_TYPES = ("container", "containerSet", "steps", "dag", "resource")
_FIELD_REFERENCES = {"metadata.name", "metadata.namespace", "metadata.uid", "spec.nodeName", "status.podIP"}


class Manifest(dict[str, Any]):
    """A manifest that knows the file it came from."""

    source: str = ""


def load_manifests(path: Path) -> list[Manifest]:
    """The documents of a YAML file, or of all YAML files in a folder (sorted)."""
    files = sorted([*path.glob("*.yaml"), *path.glob("*.yml")]) if path.is_dir() else [path]
    found = []
    for file in files:
        try:
            documents = list(yaml.load_all(file.read_text(), Loader=yaml.CSafeLoader))
        except yaml.YAMLError as error:
            raise BadConfig(f"not valid YAML: {error}", where=str(file)) from error
        for document in filter(None, documents):
            manifest = Manifest(document)
            manifest.source = str(file)
            found.append(manifest)
    return found


def load_templates(path: Path) -> dict[str, dict[str, Any]]:
    """The WorkflowTemplates of a file or folder by name; other kinds are passed over."""
    return {
        manifest["metadata"]["name"]: manifest
        for manifest in load_manifests(path)
        if manifest.get("kind") == "WorkflowTemplate"
    }


def check(manifest: Mapping[str, Any]) -> list[str]:
    """Refuses (BadConfig) a Workflow or WorkflowTemplate with anything outside the accepted subset.

    Returns the names of the fields that it ignores, such as `nodeSelector`.
    """
    name = manifest.get("metadata", {}).get("name") or manifest.get("metadata", {}).get("generateName")
    source = getattr(manifest, "source", "") or f"{manifest.get('kind', 'manifest')}/{name}"
    checker = _Checker(source)
    checker.manifest(manifest)
    check_rules(manifest["spec"], checker.refuse)
    return sorted(checker.ignored)


class _Checker:
    def __init__(self, source: str) -> None:
        self.source = source
        self.ignored: set[str] = set()

    def refuse(self, path: str, why: str, hint: str = "") -> BadConfig:
        hint = hint or "render the manifest without it, or run it on a cluster"
        return BadConfig(f"{path}: {why}", where=self.source, hint=hint)

    def mapping(self, value: Any, path: str, used: Iterable[str], ignored: Iterable[str] = ()) -> Mapping[str, Any]:
        if not isinstance(value, Mapping):
            raise self.refuse(path, f"expected a mapping, found {type(value).__name__}", "correct the manifest")
        for key in value:
            if key in ignored:
                self.ignored.add(key)
            elif key not in used:
                raise self.refuse(f"{path}.{key}", "the local interpreter does not accept this field")
        return value

    def items(self, value: Any, path: str, check: Callable[[Any, str], None], *, label: str = "name") -> None:
        if not isinstance(value, list):
            raise self.refuse(path, f"expected a list, found {type(value).__name__}", "correct the manifest")
        for index, item in enumerate(value):
            named = item.get(label) if isinstance(item, Mapping) else None
            check(item, f"{path}.{named}" if isinstance(named, str) else f"{path}[{index}]")

    def text(self, value: Any, path: str) -> None:
        if not isinstance(value, str):
            raise self.refuse(
                path, f"must be a string, found {value!r} ({type(value).__name__})", "quote it in the YAML"
            )

    def texts(self, value: Any, path: str) -> None:
        self.items(value, path, self.text)

    def each(self, value: Mapping[str, Any], path: str, checks: Mapping[str, Callable[[Any, str], None]]) -> None:
        for key, check_one in checks.items():
            if key in value:
                check_one(value[key], f"{path}.{key}")

    def manifest(self, manifest: Mapping[str, Any]) -> None:
        self.mapping(manifest, "manifest", {"apiVersion", "kind", "metadata", "spec"}, {"status"})
        if manifest.get("kind") not in ("Workflow", "WorkflowTemplate"):
            raise self.refuse("kind", f"expected Workflow or WorkflowTemplate, found {manifest.get('kind')!r}")
        spec = self.mapping(manifest.get("spec"), "spec", _SPEC_USED, _SPEC_IGNORED)
        self.each(spec, "spec", {"entrypoint": self.text, "onExit": self.text, "arguments": self.arguments})
        if "workflowTemplateRef" in spec:
            self.mapping(spec["workflowTemplateRef"], "spec.workflowTemplateRef", {"name"})
        if "synchronization" in spec:
            self.mapping(spec["synchronization"], "spec.synchronization", {"mutexes"})
            self.items(spec["synchronization"]["mutexes"], "spec.synchronization.mutexes", self.mutex)
        if "workflowMetadata" in spec:
            metadata = self.mapping(
                spec["workflowMetadata"], "spec.workflowMetadata", {"labels", "annotations", "labelsFrom"}
            )
            for label, source in metadata.get("labelsFrom", {}).items():
                self.mapping(source, f"spec.workflowMetadata.labelsFrom.{label}", {"expression"})
        self.each(spec, "spec", {"volumes": self.volumes, "podSpecPatch": self.pod_patch})
        self.items(spec.get("templates", []), "templates", self.template)

    def mutex(self, value: Any, path: str) -> None:
        self.mapping(value, path, {"name"}, {"namespace"})

    def volumes(self, value: Any, path: str) -> None:
        def volume(item: Any, path: str) -> None:
            kinds = {
                "configMap",
                "secret",
                "persistentVolumeClaim",
                "hostPath",
                "projected",
                "csi",
                "nfs",
                "downwardAPI",
            }
            self.mapping(item, path, {"name", "emptyDir"}, kinds)

        self.items(value, path, volume)

    def pod_patch(self, value: Any, path: str) -> None:
        try:
            patch = yaml.load(value, Loader=yaml.CSafeLoader)
        except yaml.YAMLError as error:
            raise self.refuse(path, f"not YAML: {error}", "correct the manifest") from error
        self.mapping(patch, path, (), _POD_PATCH_IGNORED)

    def arguments(self, value: Any, path: str) -> None:
        self.mapping(value, path, {"parameters"})
        self.items(value.get("parameters", []), f"{path}.parameters", self.parameter)

    def parameter(self, value: Any, path: str) -> None:
        self.mapping(value, path, {"name", "value", "default", *_PARAMETER_NOTES})
        self.each(value, path, {"value": self.text, "default": self.text})

    def call_arguments(self, value: Any, path: str) -> None:
        def artifact(item: Any, path: str) -> None:
            self.mapping(item, path, {"name", "from", "s3", "optional", "archive"})
            self.each(item, path, {"s3": self.s3, "archive": self.archive, "from": self.text})

        self.mapping(value, path, {"parameters", "artifacts"})
        self.items(value.get("parameters", []), f"{path}.parameters", self.parameter)
        self.items(value.get("artifacts", []), f"{path}.artifacts", artifact)

    def s3(self, value: Any, path: str) -> None:
        self.mapping(value, path, {"key"})
        self.each(value, path, {"key": self.text})

    def archive(self, value: Any, path: str) -> None:
        self.mapping(value, path, {"none", "tar"})
        if "tar" in value:
            self.mapping(value["tar"], f"{path}.tar", (), {"compressionLevel"})

    def template(self, template: Any, path: str) -> None:
        self.mapping(template, path, _TEMPLATE_USED, _TEMPLATE_IGNORED)
        kinds = [kind for kind in TEMPLATE_TYPES if kind in template]
        if len(kinds) != 1:
            raise self.refuse(path, f"expected one of {', '.join(TEMPLATE_TYPES)}, found {kinds or 'none'}")
        if "activeDeadlineSeconds" in template and kinds[0] in ("steps", "dag"):
            raise self.refuse(f"{path}.activeDeadlineSeconds", "is only valid for leaf templates", "move it to a leaf")
        self.each(
            template,
            path,
            {
                "inputs": self.inputs,
                "outputs": self.outputs,
                "retryStrategy": self.retry,
                "volumes": self.volumes,
                "container": self.container,
                "containerSet": self.container_set,
                "dag": self.dag,
                "steps": self.steps,
                "resource": self.resource,
                "podSpecPatch": self.pod_patch,
            },
        )

    def inputs(self, value: Any, path: str) -> None:
        def artifact(item: Any, path: str) -> None:
            self.mapping(item, path, {"name", "path", "optional", "s3", "archive"}, {"mode"})
            self.each(item, path, {"s3": self.s3, "archive": self.archive, "path": self.text})

        self.mapping(value, path, {"parameters", "artifacts"})
        self.items(value.get("parameters", []), f"{path}.parameters", self.parameter)
        self.items(value.get("artifacts", []), f"{path}.artifacts", artifact)

    def outputs(self, value: Any, path: str) -> None:
        def parameter(item: Any, path: str) -> None:
            self.mapping(item, path, {"name", "valueFrom", "description"})
            source = self.mapping(
                item.get("valueFrom"), f"{path}.valueFrom", {"path", "parameter", "expression", "default"}
            )
            self.each(source, f"{path}.valueFrom", dict.fromkeys(source, self.text))

        def artifact(item: Any, path: str) -> None:
            self.mapping(item, path, {"name", "path", "from", "optional", "s3", "archive"})
            self.each(item, path, {"s3": self.s3, "archive": self.archive, "path": self.text, "from": self.text})

        self.mapping(value, path, {"parameters", "artifacts"})
        self.items(value.get("parameters", []), f"{path}.parameters", parameter)
        self.items(value.get("artifacts", []), f"{path}.artifacts", artifact)

    def retry(self, value: Any, path: str) -> None:
        self.mapping(value, path, {"limit", "retryPolicy", "expression", "backoff"}, {"affinity"})
        if "backoff" in value:
            self.mapping(value["backoff"], f"{path}.backoff", {"duration", "factor", "maxDuration", "cap"})
        policies = (None, "Always", "OnFailure", "OnError")
        if value.get("retryPolicy") not in policies:
            raise self.refuse(f"{path}.retryPolicy", f"{value['retryPolicy']!r} is not one of {policies[1:]}")

    def container(self, value: Any, path: str, used: frozenset[str] = frozenset(_CONTAINER_USED)) -> None:
        self.mapping(value, path, used, _CONTAINER_IGNORED)
        if not value.get("command"):
            why = "is required: without it a controller asks a registry for the image's entrypoint"
            raise self.refuse(f"{path}.command", why, "name the command")
        self.each(value, path, {"command": self.texts, "args": self.texts})
        self.items(value.get("env", []), f"{path}.env", self.env)
        self.items(value.get("envFrom", []), f"{path}.envFrom", self.env_from)
        self.items(value.get("volumeMounts", []), f"{path}.volumeMounts", self.mount)

    def mount(self, value: Any, path: str) -> None:
        self.mapping(value, path, {"name", "mountPath"}, {"readOnly", "subPath"})

    def env(self, value: Any, path: str) -> None:
        self.mapping(value, path, {"name", "value", "valueFrom"})
        self.each(value, path, {"value": self.text})
        source = value.get("valueFrom", {})
        self.mapping(source, f"{path}.valueFrom", {"secretKeyRef", "configMapKeyRef", "fieldRef"})
        for kind in ("secretKeyRef", "configMapKeyRef"):
            if kind in source:
                self.mapping(source[kind], f"{path}.valueFrom.{kind}", {"name", "key", "optional"})
        if "fieldRef" in source:
            reference = self.mapping(source["fieldRef"], f"{path}.valueFrom.fieldRef", {"fieldPath"}, {"apiVersion"})
            if reference.get("fieldPath") not in _FIELD_REFERENCES:
                accepted = ", ".join(sorted(_FIELD_REFERENCES))
                raise self.refuse(f"{path}.valueFrom.fieldRef.fieldPath", f"accepted are {accepted}")

    def env_from(self, value: Any, path: str) -> None:
        self.mapping(value, path, {"secretRef", "configMapRef", "prefix"})
        for kind in ("secretRef", "configMapRef"):
            if kind in value:
                self.mapping(value[kind], f"{path}.{kind}", {"name", "optional"})

    def container_set(self, value: Any, path: str) -> None:
        self.mapping(value, path, {"containers", "retryStrategy", "volumeMounts"})
        if "retryStrategy" in value:
            self.mapping(value["retryStrategy"], f"{path}.retryStrategy", {"retries", "duration"})
        self.items(value.get("volumeMounts", []), f"{path}.volumeMounts", self.mount)
        self.items(
            value.get("containers"),
            f"{path}.containers",
            lambda item, path: self.container(item, path, frozenset(_CONTAINER_USED | {"dependencies"})),
        )

    def resource(self, value: Any, path: str) -> None:
        self.mapping(value, path, {"action", "manifest"})
        if value.get("action") not in ("create", "apply"):
            raise self.refuse(f"{path}.action", f"accepted are create and apply, found {value.get('action')!r}")
        self.text(value.get("manifest"), f"{path}.manifest")

    def steps(self, value: Any, path: str) -> None:
        self.items(value, path, lambda group, path: self.items(group, path, self.step))

    def step(self, value: Any, path: str, more: frozenset[str] = frozenset()) -> None:
        used = {"name", "template", "arguments", "when", "withItems", "withSequence", "withParam"}
        self.mapping(value, path, used | more)
        for key in ("name", "template"):
            self.text(value.get(key), f"{path}.{key}")
        self.each(value, path, {"when": self.text, "withParam": self.text, "arguments": self.call_arguments})
        if "withSequence" in value:
            sequence = self.mapping(value["withSequence"], f"{path}.withSequence", {"count", "start", "end"})
            if "count" in sequence and "end" in sequence:
                raise self.refuse(f"{path}.withSequence", "count and end exclude each other", "give one of them")
        if "withItems" in value and not isinstance(value["withItems"], list):
            raise self.refuse(f"{path}.withItems", "expected a list", "use withParam for a list in a parameter")

    def dag(self, value: Any, path: str) -> None:
        self.mapping(value, path, {"tasks", "failFast"})
        self.items(value.get("tasks"), f"{path}.tasks", self.task)

    def task(self, value: Any, path: str) -> None:
        self.step(value, path, frozenset({"depends", "dependencies"}))
        if value.get("depends") and value.get("dependencies"):
            raise self.refuse(path, "depends and dependencies exclude each other", "use depends")
