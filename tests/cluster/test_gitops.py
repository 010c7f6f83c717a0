"""Commits on a real cluster, with Flux' own controllers: what is installed follows the branch, a file is a run, once."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from colchis.components.records.run import Serving
from colchis.components.store import Store, keys
from tests.cluster.client import GROUP, Cluster
from tests.cluster.conftest import EXAMPLE, SMALL
from tests.cluster.flux import MANIFESTS, Flux, install, kubectl, ready
from tests.cluster.repository import serve
from tests.cluster.runs import colchis
from tests.cluster.test_manifests import rights
from tests.manifests.test_rights import documented

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1800), pytest.mark.usefixtures("strict")]

BOTH = ("colchis", "colchis-runs")
RUN_S = 900.0
"""Longest time for a run of one iteration, on a loaded machine."""


@pytest.fixture(scope="module")
def flux(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Flux]:
    """Flux, following a repository whose first commit has no run; one template was missing on the cluster."""
    with serve(tmp_path_factory.mktemp("repository")) as repository:
        manifests = repository.work / "manifests"
        shutil.copytree(MANIFESTS / "base", manifests / "base")
        shutil.copytree(MANIFESTS / "runs", manifests / "runs")
        _write_overlay(manifests / "overlays/prod")
        repository.commit("What is installed")
        cluster.delete("workflowtemplates", "colchis-sync-h100x1")
        with install(cluster, repository, tmp_path_factory.mktemp("flux")) as flux:
            yield flux


def _write_overlay(folder: Path) -> None:
    """What the harness has installed already, but for what isn't of this namespace or changes with every cluster: the
    controller's settings, the store's keys, the pool (which the tests scale), the volume."""
    test = MANIFESTS / "overlays/test"
    kustomization = yaml.safe_load((test / "kustomization.yaml").read_text())
    patches = [p for p in kustomization["patches"] if "configmap" not in p["path"]]
    folder.mkdir(parents=True)
    for patch in patches:
        shutil.copy(test / patch["path"], folder)
    mine = {"namespace": "colchis", "resources": ["../../base"], "patches": patches}
    (folder / "kustomization.yaml").write_text(yaml.safe_dump(mine))


@dataclass(frozen=True)
class Request:
    """A file in the repository, and the Workflow that it asks for."""

    path: Path

    @property
    def name(self) -> str:
        return self.path.stem

    def found(self, cluster: Cluster) -> Any:
        return cluster.objects.get_namespaced_custom_object(**GROUP, plural="workflows", name=self.name)

    def ended(self, cluster: Cluster) -> Any:
        return cluster.wait([self.name], deadline_s=RUN_S)[self.name]


def ask(flux: Flux, run: str, *settings: str) -> Request:
    """A run request of one small iteration in the folder of runs, not committed yet."""
    given = [part for setting in (*SMALL, "loop.iterations=1", *settings) for part in ("--set", setting)]
    folder = flux.repository.work / "manifests/runs/prod"
    done = colchis("request", str(EXAMPLE), *given, "--run", run, "--to", str(folder))
    assert done.returncode == 0, done.stderr
    return Request(Path(done.stdout.strip()))


def workflows(cluster: Cluster) -> set[str]:
    found = cluster.objects.list_namespaced_custom_object(**GROUP, plural="workflows")["items"]
    return {workflow["metadata"]["uid"] for workflow in found}


def is_over(workflow: Any) -> bool:
    return bool(workflow.get("status", {}).get("finishedAt"))


@pytest.fixture(scope="module")
def first(flux: Flux, pool: list[str]) -> Request:
    """A run that a commit has started."""
    request = ask(flux, "committed")
    for kustomization in flux.push("Ask for a run", *BOTH):
        assert ready(kustomization)["status"] == "True", ready(kustomization)
    return request


def test_a_commit_installs_templates(flux: Flux, cluster: Cluster) -> None:
    """Fault: a base that Flux cannot build or apply; an empty folder of runs that blocks the sync."""
    for name in BOTH:
        kustomization = flux.sync(name)
        assert ready(kustomization)["status"] == "True", ready(kustomization)
    found = cluster.objects.list_namespaced_custom_object(**GROUP, plural="workflowtemplates")["items"]
    owner = "kustomize.toolkit.fluxcd.io/name"
    installed = {t["metadata"]["name"] for t in found if t["metadata"].get("labels", {}).get(owner) == "colchis"}
    assert installed == {p.stem for p in (MANIFESTS / "base/templates").glob("*.yaml")}


def test_a_template_that_left_the_branch_is_removed(flux: Flux, cluster: Cluster) -> None:
    """Fault: templates of long ago that stay submittable; `prune` of what is installed does nothing."""
    folder = flux.repository.work / "manifests/base"
    kustomization = (folder / "kustomization.yaml").read_text()
    (folder / "kustomization.yaml").write_text(kustomization.replace("  - templates/colchis-sync-h100x1.yaml\n", ""))
    flux.push("No H100 here", "colchis")
    found = cluster.objects.list_namespaced_custom_object(**GROUP, plural="workflowtemplates")["items"]
    assert "colchis-sync-h100x1" not in {t["metadata"]["name"] for t in found}
    (folder / "kustomization.yaml").write_text(kustomization)
    flux.push("It came back", "colchis")
    cluster.objects.get_namespaced_custom_object(**GROUP, plural="workflowtemplates", name="colchis-sync-h100x1")


def test_the_requester_may_do_what_the_table_says(flux: Flux) -> None:
    """Fault: an account for runs that could delete them, or cannot start one."""
    assert rights("colchis-requester") == documented()["colchis-requester"]


def test_commits_that_ask_for_nothing_new_start_and_change_nothing(
    first: Request, flux: Flux, cluster: Cluster
) -> None:
    """Fault: a run that starts with every commit, or that a commit changes while it goes on."""
    known, before = workflows(cluster), first.found(cluster)
    assert not is_over(before), "the commits have to come while it runs"
    (flux.repository.work / "README.md").write_text("Something else.\n")
    flux.push("Something else", *BOTH)
    text = first.path.read_text()
    first.path.write_text(text.replace('value: "main"', 'value: "other"') + "# a word\n")
    for kustomization in flux.push("The same request, edited by hand", *BOTH):
        assert ready(kustomization)["status"] == "True", ready(kustomization)
    after = first.found(cluster)
    first.path.write_text(text)
    flux.push("As it was", *BOTH)
    assert (after["metadata"]["uid"], after["spec"]) == (before["metadata"]["uid"], before["spec"])
    assert workflows(cluster) == known


def test_the_run_is_a_run_like_any_other(first: Request, cluster: Cluster, store: Store) -> None:
    """Fault: a request that Strict refuses, whose run has another name, or that trains nothing."""
    status = first.ended(cluster)
    assert status["phase"] == "Succeeded", cluster.logs(first.name)
    key = keys.serving(first.name)
    assert Serving.from_bytes(store.get(key).data, key).version == 1


def test_a_workflow_that_was_removed_comes_back_and_ends_at_once(
    first: Request, flux: Flux, cluster: Cluster, store: Store
) -> None:
    """Fault: a run that is trained again, or whose end is undone, when its Workflow's time is over and its file is there."""
    first.ended(cluster)
    before, uid = store.get(keys.serving(first.name)).data, first.found(cluster)["metadata"]["uid"]
    kept = store.list(f"runs/{first.name}/iterations/")
    cluster.delete("workflows", first.name)
    assert ready(flux.sync("colchis-runs"))["status"] == "True"
    assert first.found(cluster)["metadata"]["uid"] != uid
    status = first.ended(cluster)
    assert status["phase"] == "Succeeded", cluster.logs(first.name)
    pods = {node["templateName"] for node in status["nodes"].values() if node["type"] == "Pod"}
    assert pods == {"begin", "evaluate", "close"}, "the last version's evaluation is looked for, and found"
    assert store.get(keys.serving(first.name)).data == before
    assert store.list(f"runs/{first.name}/iterations/") == kept


@pytest.fixture(scope="module")
def second(first: Request, flux: Flux, cluster: Cluster) -> Request:
    """The request of the first run, changed: its file is replaced, in one commit."""
    first.ended(cluster)
    request = ask(flux, "committed", "loop.seed=2")
    first.path.unlink()
    flux.push("Another seed", *BOTH)
    return request


@pytest.mark.slow
def test_a_changed_request_is_another_run(second: Request, first: Request, cluster: Cluster) -> None:
    """Fault: a change that alters the run that was, or starts none."""
    assert second.name != first.name
    assert second.name.startswith("committed-")
    assert not is_over(second.found(cluster))
    assert first.found(cluster)["status"]["phase"] == "Succeeded", "and its predecessor's Workflow is still there"


@pytest.mark.slow
def test_a_run_goes_on_when_its_file_is_deleted(second: Request, flux: Flux, cluster: Cluster) -> None:
    """Fault: a clean-up of the repository that ends runs. Pruning is on here: the request's annotation alone holds."""
    assert not is_over(second.found(cluster)), "the commit has to come while it runs"
    flux.change("colchis-runs", {"prune": True})
    try:
        second.path.unlink()
        _, runs = flux.push("Tidy up", *BOTH)
        assert ready(runs)["status"] == "True", f"tried to remove it, and may not: {ready(runs)}"
    finally:
        flux.change("colchis-runs", {"prune": False})
    status = second.ended(cluster)
    assert status["phase"] == "Succeeded", cluster.logs(second.name)


def test_a_refused_configuration_is_a_failed_run(flux: Flux, cluster: Cluster) -> None:
    """Fault: a sync that is stuck, a run that waits, or a failure without its reason."""
    request = ask(flux, "refused")
    text = request.path.read_text()
    assert "learning_rate: 0.0005" in text
    request.path.write_text(text.replace("learning_rate: 0.0005", "learning_rate: fast"))
    for kustomization in flux.push("A learning rate in words", *BOTH):
        assert ready(kustomization)["status"] == "True", ready(kustomization)
    status = request.ended(cluster)
    assert status["phase"] == "Failed"
    begin = next(n for n in status["nodes"].values() if n["type"] == "Pod" and n["templateName"] == "begin")
    assert "exit code 78" in begin["message"]
    assert "trainer.learning_rate" in begin["message"]
    cluster.delete("workflows", request.name)
    flux.sync("colchis-runs")
    assert request.ended(cluster)["phase"] == "Failed", "made again while its file is there, it is tried again"
    request.path.unlink()
    flux.push("Take it back", "colchis-runs")


def test_a_file_that_is_no_workflow_stops_the_sync_and_says_so(flux: Flux, cluster: Cluster) -> None:
    """Fault: a mistyped request that is applied in part, or refused in silence; the next commit has to heal it."""
    request = ask(flux, "mistyped")
    text = request.path.read_text()
    request.path.write_text(text.replace("workflowTemplateRef:\n    name:", "workflowTemplateRef:\n    names:"))
    _, runs = flux.push("A typo", *BOTH)
    assert ready(runs)["status"] == "False"
    assert request.name in ready(runs)["message"]
    assert "names" in ready(runs)["message"]
    request.path.unlink()
    _, runs = flux.push("Take it back", *BOTH)
    assert ready(runs)["status"] == "True"
    assert kubectl("get", "workflow", request.name, "-n", "colchis", "--ignore-not-found") == ""
