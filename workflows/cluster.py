"""Runs on a cluster: submitted, followed and read through the API server, with whatever kubeconfig or account is there."""

from __future__ import annotations

import base64
import contextlib
import gzip
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from kubernetes import client, config, watch
from kubernetes.config import ConfigException
from urllib3.exceptions import HTTPError, ProtocolError, ReadTimeoutError

from colchis.components.errors import BadConfig, BadData, PeerUnavailable
from colchis.workflows.boundaries import BOUNDARIES
from colchis.workflows.request import RUN_LABEL

GROUP, VERSION = "argoproj.io", "v1alpha1"
WORKFLOW_LABEL = "workflows.argoproj.io/workflow"
COMPLETED_LABEL = "workflows.argoproj.io/completed"
STAGE_LABEL = "colchis.dev/stage"
WATCH_S = 300
"""The API server ends a watch after this. One that lives longer has lost its connection; both are opened anew."""
CONNECT_S = 10


@dataclass(frozen=True)
class NodeChange:
    """A pod or container of a run that entered a phase."""

    workflow: str
    node: str
    phase: str
    message: str
    at: str
    """UTC, as the controller wrote it."""


class Cluster:
    """One namespace of a cluster."""

    def __init__(self, namespace: str, *, context: str | None = None) -> None:
        self.namespace = namespace
        try:
            config.load_kube_config(context=context)
        except ConfigException as error:
            try:
                config.load_incluster_config()
            except ConfigException:
                raise BadConfig(
                    f"no cluster to talk to: {error}", hint="set KUBECONFIG, or choose a context with --context"
                ) from None
        self._objects: Any = client.CustomObjectsApi()
        self._core: Any = client.CoreV1Api()

    def submit(self, workflow: Mapping[str, Any]) -> str:
        """Create a Workflow; returns its name. BadConfig when its template is not installed, or the account may not."""
        wanted = workflow["spec"]["workflowTemplateRef"]["name"]
        installed = [t["metadata"]["name"] for t in self._list("workflowtemplates")]
        if wanted not in installed:
            raise BadConfig(
                f"no WorkflowTemplate '{wanted}' in namespace '{self.namespace}'",
                hint=f"installed: {', '.join(sorted(installed)) or 'none; apply an overlay of manifests/'}",
            )
        with _asking(f"create a Workflow in namespace '{self.namespace}'"):
            created = self._objects.create_namespaced_custom_object(
                GROUP, VERSION, self.namespace, "workflows", dict(workflow)
            )
        return str(created["metadata"]["name"])

    def workflows(self, run: str) -> list[dict[str, Any]]:
        """The Workflows of a run that still exist, oldest first."""
        found = self._list("workflows", label_selector=f"{RUN_LABEL}={run}")
        return sorted(found, key=lambda w: str(w["metadata"]["creationTimestamp"]))

    def follow(self, run: str) -> Iterator[NodeChange]:
        """What happens to the pods of a run, until every Workflow of it has ended. A Workflow creates its successor
        before it ends, so a run of many windows is followed to its end. BadData when there is none."""
        seen: dict[tuple[str, str], str] = {}
        found = self.workflows(run)
        if not found:
            raise BadData(f"no Workflow of run '{run}' in namespace '{self.namespace}'", hint="submit it first")
        while True:
            for workflow in found:
                yield from _changes(workflow, seen)
            ended = {w["metadata"]["name"] for w in found if is_complete(w)}
            if len(ended) == len(found):
                return
            yield from self._watch(run, seen, ended)
            found = self.workflows(run)

    def _watch(self, run: str, seen: dict[tuple[str, str], str], ended: set[str]) -> Iterator[NodeChange]:
        """Until a Workflow that is not among `ended` ends or is deleted, the connection dies, or WATCH_S have passed."""
        stream = watch.Watch()
        what = f"watch Workflows in namespace '{self.namespace}'"
        with _asking(what), contextlib.suppress(ProtocolError, ReadTimeoutError):
            for event in stream.stream(
                self._objects.list_namespaced_custom_object,
                GROUP,
                VERSION,
                self.namespace,
                "workflows",
                label_selector=f"{RUN_LABEL}={run}",
                timeout_seconds=WATCH_S,
                _request_timeout=(CONNECT_S, WATCH_S + CONNECT_S),
            ):
                workflow = event["object"]
                yield from _changes(workflow, seen)
                over = is_complete(workflow) or event["type"] == "DELETED"
                if over and workflow["metadata"]["name"] not in ended:
                    stream.stop()

    def pods(self, run: str, stage: str | None = None) -> list[Any]:
        """Pods of a run that still exist, oldest first; of one stage if given."""
        pods: list[Any] = []
        for workflow in self.workflows(run):
            selector = f"{WORKFLOW_LABEL}={workflow['metadata']['name']}"
            if stage is not None:
                selector += f",{STAGE_LABEL}={stage}"
            with _asking(f"list pods in namespace '{self.namespace}'"):
                pods += self._core.list_namespaced_pod(self.namespace, label_selector=selector).items
        return sorted(pods, key=lambda pod: str(pod.metadata.creation_timestamp))

    def log(self, pod: Any) -> Iterator[tuple[str, str]]:
        """(container, line) of a pod's stage containers; those that have not started have none."""
        started = {s.name for s in pod.status.container_statuses or [] if s.state.running or s.state.terminated}
        for container in pod.spec.containers:
            if container.name == "wait" or container.name not in started:
                continue
            with _asking(f"read logs in namespace '{self.namespace}'"):
                text = self._core.read_namespaced_pod_log(pod.metadata.name, self.namespace, container=container.name)
            for line in text.splitlines():
                yield container.name, line

    def _list(self, plural: str, **selection: str) -> list[dict[str, Any]]:
        with _asking(f"list {plural} in namespace '{self.namespace}'"):
            found = self._objects.list_namespaced_custom_object(GROUP, VERSION, self.namespace, plural, **selection)
        items: list[dict[str, Any]] = found["items"]
        return items


def is_complete(workflow: Mapping[str, Any]) -> bool:
    """Whether the controller is done with it."""
    return bool((workflow["metadata"].get("labels") or {}).get(COMPLETED_LABEL) == "true")


def nodes_of(workflow: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Its nodes by id. The controller compresses those of a large Workflow."""
    status = workflow.get("status") or {}
    if packed := status.get("compressedNodes"):
        return dict(json.loads(gzip.decompress(base64.b64decode(packed))))
    return dict(status.get("nodes") or {})


def _changes(workflow: Mapping[str, Any], seen: dict[tuple[str, str], str]) -> Iterator[NodeChange]:
    """Nodes whose phase is new since the last look, in the order in which they entered it; then the Workflow's own."""
    name = workflow["metadata"]["name"]
    found = []
    for key, node in nodes_of(workflow).items():
        phase = node.get("phase", "Pending")
        if node["type"] in ("Pod", "Container") and phase != "Pending" and seen.get((name, key)) != phase:
            seen[name, key] = phase
            at = str(node.get("finishedAt") or node.get("startedAt") or "")
            found.append(NodeChange(name, _short(node, name), phase, node.get("message") or "", at))
    yield from sorted(found, key=lambda change: change.at)
    phase = (workflow.get("status") or {}).get("phase", "Pending")
    if seen.get((name, "")) != phase:
        seen[name, ""] = phase
        status = workflow.get("status") or {}
        at = str(status.get("finishedAt") or status.get("startedAt") or workflow["metadata"]["creationTimestamp"])
        yield NodeChange(name, "", phase, status.get("message") or "", at)


def _short(node: Mapping[str, Any], workflow: str) -> str:
    """`rollout(0:0) of iteration 3` for a node of a window's fan-out."""
    given = {p["name"]: p.get("value", "") for p in (node.get("inputs") or {}).get("parameters") or []}
    place = f" of iteration {given['iteration']}" if "iteration" in given else ""
    place = place or (f" to version {given['version']}" if "version" in given else "")
    if node["type"] == "Container":
        return f"reload: {BOUNDARIES.get(node['displayName'], node['displayName'])}"
    return f"{node.get('displayName') or node['name'].removeprefix(workflow)}{place}"


@contextlib.contextmanager
def _asking(what: str) -> Iterator[None]:
    """Turns what the API server refuses into errors that say who may not do what."""
    try:
        yield
    except client.ApiException as error:
        reason = error.reason
        with contextlib.suppress(TypeError, ValueError, KeyError):
            reason = json.loads(error.body or "")["message"]
        if error.status in (401, 403):
            raise BadConfig(
                f"this account may not {what}: {reason}", hint="docs/security.md lists what each account needs"
            ) from None
        if error.status == 404:
            raise BadConfig(
                f"cannot {what}: {reason}", hint="is Argo Workflows installed, and the namespace right?"
            ) from None
        if error.status in (400, 409, 422):
            raise BadConfig(f"cannot {what}: {reason}") from None
        raise PeerUnavailable(f"cannot {what}: {error.status} {reason}") from None
    except HTTPError as error:
        raise PeerUnavailable(f"cannot {what}: {error}", hint="is the cluster up and reachable?") from None
