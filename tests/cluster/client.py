"""Workflows on a cluster, through the API server's own client: create, follow to the end, delete."""

from __future__ import annotations

import base64
import gzip
import json
import secrets
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import yaml
from kubernetes import client, config, watch

Json = Any
NAMESPACE = "colchis"
GROUP: dict[str, Json] = {"group": "argoproj.io", "version": "v1alpha1", "namespace": NAMESPACE}


class Cluster:
    """The cluster that KUBECONFIG names."""

    def __init__(self) -> None:
        config.load_kube_config()
        self.objects = client.CustomObjectsApi()
        self.core = client.CoreV1Api()

    def create(self, workflow: Json) -> str | None:
        """Creates a Workflow, in place of one with that name; returns its name, or None when the API server refuses."""
        if name := workflow["metadata"].get("name"):
            self.delete("workflows", name)
        try:
            created = self.objects.create_namespaced_custom_object(**GROUP, plural="workflows", body=workflow)
        except client.ApiException as error:
            if error.status not in (400, 422):
                raise
            return None
        return str(created["metadata"]["name"])

    def apply_template(self, template: Json) -> None:
        """Creates a WorkflowTemplate, in place of one with that name."""
        self.delete("workflowtemplates", template["metadata"]["name"])
        self.objects.create_namespaced_custom_object(**GROUP, plural="workflowtemplates", body=template)

    def delete(self, plural: str, name: str) -> None:
        """Deletes an object and waits until it is gone (300 s at most: a finalizer may hold it); none is fine."""
        selector = f"metadata.name={name}"
        listed = self.objects.list_namespaced_custom_object(**GROUP, plural=plural, field_selector=selector)
        if not listed["items"]:
            return
        since = listed["metadata"]["resourceVersion"]
        self.objects.delete_namespaced_custom_object(**GROUP, plural=plural, name=name)
        follow = watch.Watch()
        for event in follow.stream(
            self.objects.list_namespaced_custom_object,
            **GROUP,
            plural=plural,
            field_selector=selector,
            resource_version=since,
            timeout_seconds=300,
        ):
            if event["type"] == "DELETED":
                follow.stop()
                return
        raise TimeoutError(f"{plural}/{name} still exists 300 s after its deletion")

    def running(self) -> list[str]:
        """Names of the Workflows that have not ended."""
        listed = self.objects.list_namespaced_custom_object(**GROUP, plural="workflows")["items"]
        return [w["metadata"]["name"] for w in listed if not _is_complete(w)]

    def wait(self, names: Iterable[str], deadline_s: float) -> dict[str, Json]:
        """The status of each Workflow when it has ended; TimeoutError names those that have not."""
        return dict(self._endings(set(names), deadline_s))

    def run_all(self, workflows: Mapping[str, Json], *, at_once: int, deadline_s: float) -> dict[str, Json]:
        """Creates every Workflow, `at_once` at a time, and gives their statuses under the same keys.

        None stands for one that the API server refuses. (The controller's own limit, `parallelism`, would not do: what
        it postpones, it no longer validates.)
        """
        left, keys, ended = dict(workflows), dict[str, str](), dict[str, Json]()
        waiting: set[str] = set()

        def fill() -> None:
            while left and len(waiting) < at_once:
                key = next(iter(left))
                name = self.create(left.pop(key))
                if name is None:
                    ended[key] = None
                else:
                    keys[name] = key
                    waiting.add(name)

        fill()
        for name, status in self._endings(waiting, deadline_s):
            ended[keys[name]] = status
            fill()
        return ended

    def _endings(self, waiting: set[str], deadline_s: float) -> Iterator[tuple[str, Json]]:
        """(name, status) as Workflows end. `waiting` loses them, and the caller may add to it."""
        until = time.monotonic() + deadline_s
        while waiting:
            left_s = int(until - time.monotonic())
            if left_s <= 0:
                listed = self.objects.list_namespaced_custom_object(**GROUP, plural="workflows")["items"]
                phases = {w["metadata"]["name"]: w.get("status", {}).get("phase", "Created") for w in listed}
                missing = {name: phases.get(name, "does not exist") for name in sorted(waiting)}
                raise TimeoutError(f"not ended after {deadline_s:.0f} s: {missing}")
            follow = watch.Watch()
            for event in follow.stream(
                self.objects.list_namespaced_custom_object, **GROUP, plural="workflows", timeout_seconds=left_s
            ):
                workflow = event["object"]
                name, status = workflow["metadata"]["name"], workflow.get("status", {})
                if name in waiting and event["type"] != "DELETED" and _is_complete(workflow):
                    waiting.discard(name)
                    yield name, {**status, "nodes": _nodes(status)}
                    if not waiting:
                        follow.stop()

    def pod_of(self, workflow: str, stage: str, *, deadline_s: float) -> Json:
        """A pod of a stage as soon as its containers run. TimeoutError when the Workflow ends before."""
        selector = f"workflows.argoproj.io/workflow={workflow},colchis.dev/stage={stage}"
        until = time.monotonic() + deadline_s
        while time.monotonic() < until:
            follow = watch.Watch()
            for event in follow.stream(
                self.core.list_namespaced_pod, NAMESPACE, label_selector=selector, timeout_seconds=10
            ):
                pod = event["object"]
                if event["type"] != "DELETED" and pod.status.phase == "Running":
                    follow.stop()
                    return pod
            now = self.objects.get_namespaced_custom_object(**GROUP, plural="workflows", name=workflow)
            if _is_complete(now):
                raise TimeoutError(
                    f"{workflow} ended ({now['status']['phase']}) before a pod of stage {stage} ran\n{self.logs(workflow)}"
                )
        raise TimeoutError(f"no pod of stage {stage} of {workflow} runs after {deadline_s:.0f} s")

    def node_message(self, workflow: str, template: str, word: str, *, deadline_s: float) -> str:
        """What a pod of a template says for itself, as soon as that has `word` in it."""
        follow = watch.Watch()
        for event in follow.stream(
            self.objects.list_namespaced_custom_object,
            **GROUP,
            plural="workflows",
            field_selector=f"metadata.name={workflow}",
            timeout_seconds=int(deadline_s),
        ):
            for node in _nodes(event["object"].get("status", {})).values():
                if node.get("templateName") == template and word in node.get("message", ""):
                    follow.stop()
                    return str(node["message"])
        raise TimeoutError(f"no pod of {template} of {workflow} said '{word}' in {deadline_s:.0f} s")

    def delete_pod(self, name: str, *, grace_s: int | None = None) -> None:
        """Asks for the end of a pod; with `grace_s=0` it is gone at once, for the API server."""
        self.core.delete_namespaced_pod(name, NAMESPACE, grace_period_seconds=grace_s)

    def drain_stages(self, workflow: str, stages: Collection[str], *, deadline_s: float) -> set[str]:
        """Deletes a pod of each stage as soon as it runs, until the Workflow is complete; where that one had ended by itself,
        the stage's next. The stages of which a pod was ended."""
        asked: dict[str, str] = {}
        drained: set[str] = set()
        until = time.monotonic() + deadline_s
        while time.monotonic() < until:
            for event in watch.Watch().stream(
                self.core.list_namespaced_pod,
                NAMESPACE,
                label_selector=f"workflows.argoproj.io/workflow={workflow}",
                timeout_seconds=5,
            ):
                pod = event["object"]
                stage, uid = pod.metadata.labels.get("colchis.dev/stage"), pod.metadata.uid
                main = next((s.state for s in pod.status.container_statuses or [] if s.name == "main"), None)
                runs = main is not None and main.running and pod.metadata.deletion_timestamp is None
                if uid in asked and main is not None and main.terminated:
                    del asked[uid]
                    drained |= {stage} if main.terminated.exit_code else set()
                if event["type"] == "DELETED":
                    asked.pop(uid, None)
                elif runs and stage in {*stages} - drained - {*asked.values()}:
                    asked[uid] = stage
                    self.delete_pod(pod.metadata.name)
            now = self.objects.get_namespaced_custom_object(**GROUP, plural="workflows", name=workflow)
            if _is_complete(now):
                return drained
        raise TimeoutError(f"{workflow} has not ended after {deadline_s:.0f} s\n{self.logs(workflow)}")

    def drain_pod(self, pod: Json, *, deadline_s: float = 120.0) -> int | None:
        """Deletes a pod and waits until it is gone; the exit code of its container `main`, None when nobody saw one."""
        self.delete_pod(pod.metadata.name)
        follow = watch.Watch()
        code: int | None = None
        for event in follow.stream(
            self.core.list_namespaced_pod,
            NAMESPACE,
            field_selector=f"metadata.name={pod.metadata.name}",
            timeout_seconds=int(deadline_s),
        ):
            seen = event["object"]
            if seen.metadata.uid != pod.metadata.uid:
                break
            for status in seen.status.container_statuses or []:
                if status.name == "main" and status.state.terminated:
                    code = status.state.terminated.exit_code
            if event["type"] == "DELETED":
                break
        follow.stop()
        return code

    def wait_for_node(self, *, ready: bool, deadline_s: float) -> None:
        """Until every node is ready, or one is not."""
        follow = watch.Watch()
        states: dict[str, bool] = {}
        for event in follow.stream(self.core.list_node, timeout_seconds=int(deadline_s)):
            conditions = event["object"].status.conditions or []
            states[event["object"].metadata.name] = any(c.type == "Ready" and c.status == "True" for c in conditions)
            if all(states.values()) == ready:
                return follow.stop()
        raise TimeoutError(f"nodes that are ready: {states}, after {deadline_s:.0f} s")

    def wait_for_no_pods(self, selector: str, *, deadline_s: float) -> None:
        """Until no pod is left that the selector finds."""
        until = time.monotonic() + deadline_s
        while left := self.core.list_namespaced_pod(NAMESPACE, label_selector=selector).items:
            if time.monotonic() > until:
                raise TimeoutError(f"pods that stay after {deadline_s:.0f} s: {[p.metadata.name for p in left]}")
            time.sleep(1)

    @contextmanager
    def quota(self, hard: Mapping[str, str]) -> Iterator[None]:
        """What the namespace may have, for as long as the block lasts."""
        body = {"metadata": {"name": "test"}, "spec": {"hard": dict(hard)}}
        self.core.create_namespaced_resource_quota(NAMESPACE, body)
        try:
            yield
        finally:
            self.core.delete_namespaced_resource_quota("test", NAMESPACE)

    def config_map(self, name: str, data: dict[str, str]) -> None:
        """Creates or replaces a ConfigMap."""
        body = {"metadata": {"name": name}, "data": data}
        try:
            self.core.replace_namespaced_config_map(name, NAMESPACE, body)
        except client.ApiException as error:
            if error.status != 404:
                raise
            self.core.create_namespaced_config_map(NAMESPACE, body)

    @contextmanager
    def scaled(self, name: str, replicas: int, *, deadline_s: float = 120.0) -> Iterator[dict[str, str]]:
        """A StatefulSet with that many running pods: name -> address. Back to none afterwards."""
        apps = client.AppsV1Api()
        apps.patch_namespaced_stateful_set_scale(name, NAMESPACE, {"spec": {"replicas": replicas}})
        try:
            addresses: dict[str, str] = {}
            follow = watch.Watch()
            for event in follow.stream(
                self.core.list_namespaced_pod, NAMESPACE, timeout_seconds=int(deadline_s), _request_timeout=deadline_s
            ):
                pod = event["object"]
                owners = [owner.name for owner in pod.metadata.owner_references or []]
                leaves = pod.metadata.deletion_timestamp is not None
                if name in owners and not leaves and pod.status.phase == "Running" and pod.status.pod_ip:
                    addresses[pod.metadata.name] = pod.status.pod_ip
                if len(addresses) == replicas:
                    follow.stop()
            if len(addresses) < replicas:
                raise TimeoutError(f"{name}: {len(addresses)} of {replicas} pods run after {deadline_s:.0f} s")
            yield addresses
        finally:
            none = apps.patch_namespaced_stateful_set_scale(name, NAMESPACE, {"spec": {"replicas": 0}})
            # whoever scales it up next must not take these pods for its own
            self.wait_for_no_pods(none.status.selector, deadline_s=deadline_s)

    @contextmanager
    def engine_keys(self) -> Iterator[dict[str, str]]:
        """Keys for locked engines in the Secret, for as long as it takes: what is started meanwhile has them."""
        values = {name: secrets.token_hex(16) for name in ("engineKey", "engineAdminKey")}
        self.core.patch_namespaced_secret("colchis-store", NAMESPACE, {"stringData": values})
        try:
            yield values
        finally:
            self.core.patch_namespaced_secret("colchis-store", NAMESPACE, {"data": dict.fromkeys(values)})

    def ready_pods(self, names: Iterable[str], *, deadline_s: float) -> set[str]:
        """Those of these pods that are ready, as soon as all are, or at the deadline."""
        wanted, ready = set(names), set[str]()
        follow = watch.Watch()
        for event in follow.stream(self.core.list_namespaced_pod, NAMESPACE, timeout_seconds=int(deadline_s)):
            pod = event["object"]
            is_ready = any(c.type == "Ready" and c.status == "True" for c in pod.status.conditions or [])
            if pod.metadata.name in wanted:
                ready = ready | {pod.metadata.name} if is_ready else ready - {pod.metadata.name}
            if ready == wanted:
                follow.stop()
        return ready

    @contextmanager
    def controller_setting(self, key: str, value: Json) -> Iterator[None]:
        """One setting of the workflow controller, which reads its ConfigMap as it changes; put back afterwards."""
        name = "workflow-controller-configmap"
        before = self.core.read_namespaced_config_map(name, NAMESPACE).data
        changed = yaml.safe_dump({**yaml.safe_load(before["config"]), key: value})
        self.config_map(name, {**before, "config": changed})
        try:
            yield
        finally:
            self.config_map(name, before)

    def logs(self, workflow: str, container: str = "main", *, lines: int = 40) -> str:
        """The last lines of every pod of a Workflow, for the message of a failed test."""
        pods = self.core.list_namespaced_pod(NAMESPACE, label_selector=f"workflows.argoproj.io/workflow={workflow}")
        texts = []
        for pod in pods.items:
            name = pod.metadata.name
            try:
                text = self.core.read_namespaced_pod_log(name, NAMESPACE, container=container, tail_lines=lines)
            except client.ApiException as error:
                text = f"no log: {error.reason}"
            texts.append(f"--- {name} ({pod.status.phase})\n{text}")
        return "\n".join(texts)


def _is_complete(workflow: Json) -> bool:
    return bool(workflow["metadata"].get("labels", {}).get("workflows.argoproj.io/completed") == "true")


def _nodes(status: Json) -> dict[str, Json]:
    """status.nodes; of a large Workflow it is compressed."""
    packed = status.get("compressedNodes")
    if packed:
        return dict(json.loads(gzip.decompress(base64.b64decode(packed))))
    return dict(status.get("nodes") or {})
