"""Every name that an object mentions is the name of an object that is there."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from colchis.workflows.documents import Document
from tests.manifests.conftest import overlay_of
from tests.manifests.objects import Pod, find, pods, selects

Json = Any
STORE_KEYS = {"endpoint", "bucket", "region", "accessKey", "secretKey", "agentToken"}
OPTIONAL = {"engineKey", "engineAdminKey"}
"""Keys of the Secret that docs/security.md leaves to the user."""

BROUGHT: dict[str, dict[tuple[str, str], set[str]]] = {
    "overlays/prod": {("Secret", "colchis-store"): STORE_KEYS},
    "overlays/prod-with-node-cache": {("Secret", "colchis-store"): STORE_KEYS},
    "overlays/prod-with-locks": {("Secret", "colchis-store"): STORE_KEYS | OPTIONAL},
}
"""Folder -> what docs/security.md asks the user to bring: (kind, name) -> keys."""


class Names:
    """What there is in one folder."""

    def __init__(self, documents: list[Document]) -> None:
        self.documents = documents
        self.accounts = set(find(documents, "ServiceAccount"))
        self.claims = set(find(documents, "PersistentVolumeClaim"))
        self.keys = {
            (kind, name): {*(body.get("data") or {}), *(body.get("stringData") or {})}
            for kind in ("Secret", "ConfigMap")
            for name, body in find(documents, kind).items()
        }
        self.keys |= BROUGHT.get(documents[0].file, {})

    def missing_key(self, kind: str, name: str, key: str) -> str | None:
        keys = self.keys.get((kind, name))
        return None if keys is not None and key in keys else f"{kind} {name} has no key {key}"

    def unresolved(self) -> Iterator[str]:
        for pod in pods(self.documents):
            yield from (f"{pod.where}: {problem}" for problem in self._pod(pod))
        for document in self.documents:
            yield from (f"{document.kind}/{document.name}: {problem}" for problem in self._object(document))

    def _pod(self, pod: Pod) -> Iterator[str]:
        account = pod.spec.get("serviceAccountName")
        if account and account not in self.accounts:
            yield f"account {account}"
        executor = (pod.spec.get("executor") or {}).get("serviceAccountName")
        if executor and ("Secret", f"{executor}.service-account-token") not in self.keys:
            yield f"token of {executor}"
        for container in pod.containers:
            for variable in container.get("env", []):
                for kind, field in (("Secret", "secretKeyRef"), ("ConfigMap", "configMapKeyRef")):
                    if reference := (variable.get("valueFrom") or {}).get(field):
                        name = reference["name"].replace("{{workflow.parameters.pool}}", "main")
                        if not (reference.get("optional") and reference["key"] in OPTIONAL):
                            yield from filter(None, [self.missing_key(kind, name, reference["key"])])
            mounted = {m["name"] for m in container.get("volumeMounts", [])}
            yield from (f"volume {name}" for name in mounted - {v["name"] for v in pod.spec.get("volumes", [])})
        for volume in pod.spec.get("volumes", []):
            claim = (volume.get("persistentVolumeClaim") or {}).get("claimName")
            if claim and claim not in self.claims:
                yield f"claim {claim}"

    def _object(self, document: Document) -> Iterator[str]:
        spec = document.body.get("spec") or {}
        services, everyone = find(self.documents, "Service"), pods(self.documents)
        if document.kind == "StatefulSet" and spec["serviceName"] not in services:
            yield f"service {spec['serviceName']}"
        if document.kind == "Service":
            behind = [p for p in everyone if selects({"matchLabels": spec["selector"]}, p.labels)]
            ports = {port["name"] for p in behind for c in p.containers for port in c.get("ports", [])}
            yield from (f"port {p['targetPort']} of no pod" for p in spec["ports"] if p["targetPort"] not in ports)
        if document.kind == "PodDisruptionBudget" and not any(selects(spec["selector"], p.labels) for p in everyone):
            yield "selects no pod"
        if document.kind == "RoleBinding":
            if document.body["roleRef"]["name"] not in find(self.documents, "Role"):
                yield f"role {document.body['roleRef']['name']}"
            for subject in document.body["subjects"]:
                if subject["kind"] == "ServiceAccount" and subject["name"] not in self.accounts:
                    yield f"account {subject['name']}"
        if document.kind == "WorkflowTemplate":
            reference = spec["artifactRepositoryRef"]
            yield from filter(None, [self.missing_key("ConfigMap", reference["configMap"], reference["key"])])
        if document.name == "artifact-repositories":
            for text in document.body["data"].values():
                store = yaml.safe_load(text)["s3"]
                for secret in (store["accessKeySecret"], store["secretKeySecret"]):
                    yield from filter(None, [self.missing_key("Secret", secret["name"], secret["key"])])
        if re.match("colchis-pool-", document.name) and document.kind == "ConfigMap":
            yield from self._pool(document, services)

    def _pool(self, document: Document, services: dict[str, Json]) -> Iterator[str]:
        """The agents' address is a headless Service that also names engines which are not ready."""
        address = re.fullmatch(r"dns://([a-z0-9-]+):(\d+)", document.body["data"]["engines"])
        service = services[address[1]]["spec"] if address and address[1] in services else None
        if address is None or service is None:
            yield f"engines: {document.body['data']['engines']}"
        elif service.get("clusterIP") != "None" or not service.get("publishNotReadyAddresses"):
            yield f"{address[1]} hides engines that are not ready"
        elif int(address[2]) not in {p["port"] for p in service["ports"]}:
            yield f"{address[1]} has no port {address[2]}"


def test_every_reference_resolves(overlay: list[Document]) -> None:
    """Fault: a pod that waits for a ConfigMap, Secret, account or claim that nobody makes."""
    assert list(Names(overlay).unresolved()) == []


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("Secret", "colchis-executor.service-account-token"),
        ("ConfigMap", "artifact-repositories"),
        ("ConfigMap", "colchis-pool-main"),
        ("ServiceAccount", "colchis-workflow"),
        ("Service", "colchis-agents-main"),
        ("Role", "colchis-submitter"),
    ],
)
def test_a_missing_object_is_found(overlay: list[Document], kind: str, name: str) -> None:
    """Fault: a check that cannot fail."""
    left = [d for d in overlay if (d.kind, d.name) != (kind, name)]
    assert len(left) == len(overlay) - 1
    assert list(Names(left).unresolved())


@pytest.mark.parametrize("folder", ["overlays/dev-with-node-cache", "overlays/prod-with-node-cache"])
def test_the_cache_of_a_node_has_a_volume(documents: dict[str, list[Document]], folder: str) -> None:
    """Fault: a claim that no volume of ours fits, so that no engine of the pool ever starts; a volume of one node alone."""
    (volume,) = find(documents["cluster-scoped/node-cache"], "PersistentVolume").values()
    claim = find(documents[folder], "PersistentVolumeClaim")["colchis-node-cache-main"]
    for field in ("accessModes", "storageClassName"):
        assert claim["spec"][field] == volume["spec"][field]
    assert claim["spec"]["resources"]["requests"] == volume["spec"]["capacity"]
    assert "nodeAffinity" not in volume["spec"]
    (pod,) = [p for p in pods(documents[folder]) if p.name == "engine"]
    mounts = {
        c["name"]: {m["mountPath"] for m in c["volumeMounts"] if m["name"] == "node-cache"} for c in pod.containers
    }
    assert mounts == {"engine": set(), "agent": {"/cache"}}


def test_no_placeholder_is_left(overlay: list[Document]) -> None:
    """Fault: an overlay that forgot to name its store or its API server."""
    for document in overlay:
        text = yaml.safe_dump(document.body)
        assert "192.0.2.1" not in text, document.name
        assert ".invalid" not in text, document.name


def test_namespaced_objects_are_in_the_namespace(overlay: list[Document]) -> None:
    """Fault: an object that lands in `default`."""
    everywhere = {"PersistentVolume", "MutatingAdmissionPolicy", "MutatingAdmissionPolicyBinding"}
    namespaces = {d.body["metadata"].get("namespace") for d in overlay if d.kind not in everywhere}
    assert namespaces == {"colchis"}


def test_no_secret_value_is_in_git(documents: dict[str, list[Document]]) -> None:
    """Fault: keys in a manifest. Tokens of accounts are filled in by the cluster, colchis-store from store.env."""
    for folder, found in documents.items():
        for name, body in find(found, "Secret").items():
            is_token = body.get("type") == "kubernetes.io/service-account-token" and not body.get("data")
            is_made = name == "colchis-store" and overlay_of(folder) != "overlays/prod"
            assert is_token or is_made, f"{folder}: {name}"
