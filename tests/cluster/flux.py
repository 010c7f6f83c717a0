"""Flux beside the cluster: its source and kustomize controllers as processes, and manifests/gitops/flux applied.

The controllers have the accounts and rights of an installation of Flux (flux-rights.yaml), and follow a repository of
the test's own.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from kubernetes import watch

from colchis.workflows.local.ports import free_port
from tests.cluster.client import NAMESPACE, Cluster
from tests.cluster.repository import Repository

Json = Any
HERE = Path(__file__).parent
MANIFESTS = HERE.parents[1] / "manifests"
SYNC_S = 120.0
"""Longest time from a commit to its being applied; it takes seconds."""
GROUPS = {"gitrepositories": "source.toolkit.fluxcd.io", "kustomizations": "kustomize.toolkit.fluxcd.io"}
REQUESTED = "reconcile.fluxcd.io/requestedAt"
UNDECIDED = ("Progressing", "DependencyNotReady", "ArtifactFailed")
"""Why a Kustomization isn't ready that has not been tried yet."""


@dataclass(frozen=True)
class Flux:
    """The controllers, following `repository`."""

    cluster: Cluster
    repository: Repository

    def push(self, message: str, *names: str) -> list[Json]:
        """Commits what lies in the work tree, and what became of it: the Kustomizations of these names, once decided.

        The git host's webhook is replaced by its effect: the source is asked to look now, not within its minute.
        """
        revision = self.repository.commit(message)
        self._ask("gitrepositories", "colchis")
        self._wait(
            "gitrepositories",
            "colchis",
            lambda o: o.get("status", {}).get("artifact", {}).get("revision", "").endswith(revision),
        )

        def is_decided(kustomization: Json) -> bool:
            status = kustomization.get("status", {})
            return status.get("lastAttemptedRevision", "").endswith(revision) and _is_decided(kustomization)

        return [self._wait("kustomizations", name, is_decided) for name in names]

    def sync(self, name: str) -> Json:
        """A Kustomization when it has been applied again, at the commit that is there: what its interval does."""
        token = self._ask("kustomizations", name)
        return self._wait(
            "kustomizations",
            name,
            lambda o: o.get("status", {}).get("lastHandledReconcileAt") == token and _is_decided(o),
        )

    def change(self, name: str, spec: Mapping[str, Json]) -> None:
        """Changes fields of a Kustomization's spec."""
        self.cluster.objects.patch_namespaced_custom_object(
            GROUPS["kustomizations"], "v1", NAMESPACE, "kustomizations", name, {"spec": dict(spec)}
        )

    def _ask(self, plural: str, name: str) -> str:
        token = uuid.uuid4().hex
        body = {"metadata": {"annotations": {REQUESTED: token}}}
        self.cluster.objects.patch_namespaced_custom_object(GROUPS[plural], "v1", NAMESPACE, plural, name, body)
        return token

    def _wait(self, plural: str, name: str, is_done: Callable[[Json], bool]) -> Json:
        follow, seen = watch.Watch(), None
        for event in follow.stream(
            self.cluster.objects.list_namespaced_custom_object,
            group=GROUPS[plural],
            version="v1",
            namespace=NAMESPACE,
            plural=plural,
            field_selector=f"metadata.name={name}",
            timeout_seconds=int(SYNC_S),
        ):
            seen = event["object"]
            if event["type"] != "DELETED" and is_done(seen):
                follow.stop()
                return seen
        raise TimeoutError(f"{plural}/{name} after {SYNC_S:.0f} s: {(seen or {}).get('status')}")


def ready(kustomization: Json) -> Json:
    """Its condition Ready: status, reason, message."""
    found = [c for c in kustomization.get("status", {}).get("conditions", []) if c["type"] == "Ready"]
    return found[0] if found else {"status": "Unknown", "reason": "Progressing", "message": ""}


def _is_decided(kustomization: Json) -> bool:
    condition = ready(kustomization)
    is_current = condition.get("observedGeneration") == kustomization["metadata"]["generation"]
    return is_current and condition["status"] != "Unknown" and condition["reason"] not in UNDECIDED


@contextmanager
def install(cluster: Cluster, repository: Repository, folder: Path) -> Iterator[Flux]:
    """Flux, and manifests/gitops/flux with the repository's address in place of the example's; all gone afterwards, but
    for the CRDs and what the first commits installed."""
    if os.environ.get("COLCHIS_TEST_CLUSTER") != "harness":
        pytest.skip("starts Flux' controllers beside the cluster, which takes the harness")
    binaries = Path(shutil.which("kustomize-controller") or "").parent
    kubectl("apply", "--server-side", "-f", str(binaries / "crds"), "-f", str(HERE / "flux-rights.yaml"))
    crds = [yaml.safe_load(p.read_text())["metadata"]["name"] for p in sorted((binaries / "crds").iterdir())]
    kubectl("wait", "--for=condition=Established", "--timeout=60s", "crd", *crds)
    shutil.copytree(MANIFESTS / "gitops/flux", folder / "flux")
    where = {"op": "replace", "path": "/spec/url", "value": repository.url}
    kustomization = {
        "resources": ["flux"],
        "patches": [{"target": {"kind": "GitRepository"}, "patch": yaml.safe_dump([where])}],
    }
    (folder / "kustomization.yaml").write_text(yaml.safe_dump(kustomization))
    artifacts = f"127.0.0.1:{free_port()}"
    storage = (f"--storage-path={folder}/artifacts", f"--storage-addr={artifacts}", f"--storage-adv-addr={artifacts}")
    (folder / "artifacts").mkdir()
    with ExitStack() as stack:
        stack.enter_context(_controller("source-controller", folder, *storage))
        stack.enter_context(_controller("kustomize-controller", folder, "--requeue-dependency=1s"))
        kubectl("apply", "-k", str(folder))
        flux = Flux(cluster, repository)
        try:
            yield flux
        finally:
            flux.change("colchis", {"deletionPolicy": "Orphan"})
            kubectl("delete", "-k", str(folder), "--timeout=60s")


@contextmanager
def _controller(name: str, folder: Path, *options: str) -> Iterator[None]:
    """One controller, under its own account; its log lies beside those of the cluster."""
    admin = Path(os.environ["KUBECONFIG"])
    config = yaml.safe_load(admin.read_text())
    token = kubectl("create", "token", name, "--namespace=flux-system", "--duration=12h").strip()
    config["users"][0]["user"] = {"token": token}
    own = folder / f"{name}.conf"
    own.touch(mode=0o600)
    own.write_text(yaml.safe_dump(config))
    scratch = folder / f"{name}-tmp"
    scratch.mkdir()
    here = {"KUBECONFIG": str(own), "RUNTIME_NAMESPACE": "flux-system", "TMPDIR": str(scratch), "HOME": str(scratch)}
    command = [name, *options, "--metrics-addr=0", f"--health-addr=127.0.0.1:{free_port()}", "--log-level=info"]
    with (admin.parents[1] / "logs" / f"{name}.log").open("wb") as log:
        process = subprocess.Popen(command, env={**os.environ, **here}, stdout=log, stderr=log)
    try:
        yield
    finally:
        process.kill()
        process.wait()


def kubectl(*words: str) -> str:
    done = subprocess.run(["kubectl", *words], capture_output=True, text=True, timeout=180, check=False)
    assert done.returncode == 0, f"kubectl {' '.join(words)}: {done.stderr}"
    return done.stdout
