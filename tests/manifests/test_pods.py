"""Every pod of every overlay meets Pod Security `restricted`, and what Colchis asks beyond it."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from colchis.workflows.documents import Document
from tests.manifests.objects import Pod, find, pods

Json = Any
VOLUMES = {
    *("configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "persistentVolumeClaim", "projected", "secret"),
}
"""The types of volumes that `restricted` allows."""


def restricted(pod: Pod) -> Iterator[str]:
    """Where a pod does not meet the standard (Pod Security Standards, `restricted`, Linux)."""
    spec, security = pod.spec, pod.spec.get("securityContext") or {}
    for field in ("hostNetwork", "hostPID", "hostIPC"):
        if spec.get(field):
            yield f"{pod.where}: {field}"
    for volume in spec.get("volumes", []):
        kinds = set(volume) - {"name"}
        if not kinds <= VOLUMES:
            yield f"{pod.where}: volume {volume['name']} is a {', '.join(sorted(kinds))}"
    for container in pod.containers:
        own = container.get("securityContext") or {}
        where = f"{pod.where}, container {container['name']}"
        if own.get("runAsNonRoot", security.get("runAsNonRoot")) is not True:
            yield f"{where}: runAsNonRoot"
        if own.get("runAsUser", security.get("runAsUser")) == 0:
            yield f"{where}: runAsUser"
        profile = own.get("seccompProfile", security.get("seccompProfile")) or {}
        if profile.get("type") not in ("RuntimeDefault", "Localhost"):
            yield f"{where}: seccompProfile"
        if own.get("allowPrivilegeEscalation") is not False:
            yield f"{where}: allowPrivilegeEscalation"
        if own.get("privileged"):
            yield f"{where}: privileged"
        capabilities = own.get("capabilities") or {}
        if "ALL" not in capabilities.get("drop", []) or set(capabilities.get("add", [])) - {"NET_BIND_SERVICE"}:
            yield f"{where}: capabilities"
        if any(port.get("hostPort") for port in container.get("ports", [])):
            yield f"{where}: hostPort"


def beyond(pod: Pod) -> Iterator[str]:
    """What every container of ours has besides."""
    if pod.spec.get("automountServiceAccountToken") is not False:
        yield f"{pod.where}: mounts a token"
    for container in pod.containers:
        where = f"{pod.where}, container {container['name']}"
        if (container.get("securityContext") or {}).get("readOnlyRootFilesystem") is not True:
            yield f"{where}: readOnlyRootFilesystem"
        resources = container.get("resources") or {}
        if not {"cpu", "memory"} <= set(resources.get("requests") or {}) or "memory" not in resources.get("limits", {}):
            yield f"{where}: resources"
        name, _, tag = container["image"].rpartition(":")
        if not name or tag == "latest":
            yield f"{where}: image {container['image']} names no version"


def test_every_pod_is_restricted(overlay: list[Document]) -> None:
    """Fault: a pod that the namespace does not admit."""
    found = pods(overlay)
    assert len(found) > 15
    assert [finding for pod in found for finding in restricted(pod)] == []


def test_every_pod_is_locked_down_further(overlay: list[Document]) -> None:
    """Fault: a container that writes to its image, mounts a token, or tells the scheduler nothing."""
    assert [finding for pod in pods(overlay) for finding in beyond(pod)] == []


@pytest.mark.parametrize(
    "change",
    [
        {"hostNetwork": True},
        {"volumes": [{"name": "host", "hostPath": {"path": "/"}}]},
        {"securityContext": {"runAsNonRoot": True}},
        {"securityContext": {"seccompProfile": {"type": "RuntimeDefault"}}},
        {"containers": [{"name": "x", "image": "x:1"}]},
    ],
    ids=["host network", "host path", "no seccomp profile", "root", "nothing said"],
)
def test_a_pod_that_is_not_is_found(overlay: list[Document], change: Json) -> None:
    """Fault: a check that cannot fail."""
    pod = next(p for p in pods(overlay) if p.name == "engine")
    spec = {**copy.deepcopy(pod.spec), **change}
    for container in spec["containers"]:
        for field in ("runAsNonRoot", "seccompProfile"):
            (container.get("securityContext") or {}).pop(field, None)
    assert list(restricted(Pod(pod.where, pod.labels, spec)))


def test_argos_own_containers_are_restricted(documents: dict[str, list[Document]]) -> None:
    """Fault: settings under which the namespace refuses every pod of a run, or that break one.

    runAsUser would make input artifacts unreadable, readOnlyRootFilesystem breaks resource templates.
    """
    settings = _settings(documents["argo"])
    security = settings["executor"]["securityContext"]
    pod = Pod("executor", {}, {"containers": [{"name": "wait", "securityContext": security}]})
    assert list(restricted(pod)) == []
    assert not {"runAsUser", "readOnlyRootFilesystem"} & set(security)
    assert settings["workflowRestrictions"] == {"templateReferencing": "Strict"}


def test_the_test_overlay_differs_from_the_settings_in_strictness_only(documents: dict[str, list[Document]]) -> None:
    """Fault: tests that pass under other settings than the documented ones."""
    settings = _settings(documents["argo"])
    del settings["workflowRestrictions"]
    assert _settings(documents["overlays/test"]) == settings


def _settings(documents: list[Document]) -> Json:
    return yaml.safe_load(find(documents, "ConfigMap")["workflow-controller-configmap"]["data"]["config"])


def test_the_namespace_enforces_it(documents: dict[str, list[Document]]) -> None:
    """Fault: a namespace that admits anything."""
    labels = find(documents["cluster-scoped"], "Namespace")["colchis"]["metadata"]["labels"]
    assert {labels.get(f"pod-security.kubernetes.io/{mode}") for mode in ("enforce", "warn", "audit")} == {"restricted"}


def test_engines_have_no_credentials(overlay: list[Document]) -> None:
    """Fault: a container that runs a third party's server and holds the keys of the store. Only its own are in a locked one."""
    engines = [p for p in pods(overlay) if p.name == "engine"]
    assert engines
    own = {
        "overlays/dev-with-locks": {"COLCHIS_ENGINE_KEY": "engineKey"},
        "overlays/prod-with-locks": {"COLCHIS_ENGINE_KEY": "engineKey", "COLCHIS_ENGINE_ADMIN_KEY": "engineAdminKey"},
    }
    for pod in engines:
        engine = next(c for c in pod.containers if c["name"] == "engine")
        keys = {e["name"]: e["valueFrom"]["secretKeyRef"]["key"] for e in engine["env"] if "valueFrom" in e}
        assert keys == own.get(overlay[0].file, {})
        assert str(engine).count("secretKeyRef") == len(keys)
        assert all(name in " ".join(engine["args"]) for name in keys), "a key that the engine is not told to use"
        assert {m["mountPath"]: m.get("readOnly", False) for m in engine["volumeMounts"]}["/staging"] is True


def test_readiness_is_by_version(overlay: list[Document]) -> None:
    """Fault: an engine that gets traffic before its first reload, or is killed because it has no weights yet."""
    for pod in (p for p in pods(overlay) if p.name == "engine"):
        by_name = {c["name"]: c for c in pod.containers}
        assert by_name["agent"]["readinessProbe"]["httpGet"] == {"path": "/ready", "port": "agent"}
        assert "readinessProbe" not in by_name["engine"]
        assert by_name["engine"]["livenessProbe"]["httpGet"]["path"] == "/health"
    services = find(overlay, "Service")
    agents, engines = services["colchis-agents-main"]["spec"], services["colchis-engines-main"]["spec"]
    assert (agents["clusterIP"], agents["publishNotReadyAddresses"]) == ("None", True)
    assert not engines.get("publishNotReadyAddresses")
