"""A whole run on a real cluster: `argo submit`, two iterations in pods, and what the store says afterwards."""

from __future__ import annotations

import json
import os
import subprocess
from typing import Any

import pytest
import yaml

from colchis.components.config import load, to_parameters
from colchis.components.records.run import Serving
from colchis.components.stages.context import StageKey
from colchis.components.store import Store, keys, read_commit
from colchis.workflows.boundaries import BOUNDARIES
from colchis.workflows.request import pin_files
from tests.cluster.client import Cluster
from tests.cluster.conftest import EXAMPLE, REPOSITORY, SMALL

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1200)]

RUN = "first"


@pytest.fixture(scope="module")
def finished(
    cluster: Cluster, store: Store, pool: list[str], strict: None, tmp_path_factory: pytest.TempPathFactory
) -> Any:
    """The example, small, submitted by the argo command to what manifests/overlays/test installed; how it ended."""
    config = pin_files(load(EXAMPLE, SMALL), EXAMPLE, store)
    parameters = tmp_path_factory.mktemp("run") / "run.yaml"
    parameters.write_text(yaml.safe_dump(to_parameters(config)))
    submit = [
        *("argo", "submit", "-n", "colchis", "--from", "workflowtemplate/colchis-sync-cpu", "-o", "name"),
        *("-p", f"run={RUN}", "-p", "pool=main", "--parameter-file", str(parameters)),
    ]
    done = subprocess.run(submit, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    name = done.stdout.strip().splitlines()[-1]
    return cluster.wait([name], deadline_s=1000)[name] | {"name": name}


def test_the_run_succeeds(finished: Any, cluster: Cluster) -> None:
    """Catches a template, an image, a right or a stage that works on a laptop and not in a pod."""
    failed = {n["name"]: n.get("message") for n in finished["nodes"].values() if n["phase"] in ("Failed", "Error")}
    assert finished["phase"] == "Succeeded", f"{finished.get('message')}: {failed}\n{cluster.logs(finished['name'])}"


def test_argo_shows_the_lines_of_each_stage(finished: Any) -> None:
    """Catches logs that are no lines of JSON, or that nobody keeps for the minute in which Argo's client asks."""
    done = subprocess.run(
        ["argo", "logs", "-n", "colchis", finished["name"], "--no-color"], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    lines = [line.partition(": ")[2] for line in done.stdout.splitlines()]
    assert "workflow closed" in [json.loads(line)["event"] for line in lines if line.startswith("{")]


def test_the_store_declares_two_versions(finished: Any, store: Store, pool: list[str]) -> None:
    """Catches iterations that pods ran but did not commit, and engines that serve something else."""
    serving = Serving.from_bytes(store.get(keys.serving(RUN)).data, keys.serving(RUN))
    assert (serving.version, serving.engines) == (2, pool)
    for iteration in (0, 1):
        assert read_commit(store, StageKey(RUN, iteration, "train")).outputs["version"] == iteration + 1
        assert read_commit(store, StageKey(RUN, iteration, "reload")).outputs["version"] == iteration + 1
        assert json.loads(store.get(keys.summary(RUN, iteration)).data)["iteration"] == iteration


def test_each_reload_shows_five_boundaries(finished: Any) -> None:
    """Catches a reload that hides its boundaries: each is a node of its own, on every reload."""
    containers = [n["displayName"] for n in finished["nodes"].values() if n["type"] == "Container"]
    assert sorted(set(containers)) == list(BOUNDARIES)
    assert {containers.count(name) for name in set(containers)} == {3}, "one fill and two reloads"


def test_engines_are_ready_by_version(finished: Any, cluster: Cluster, pool: list[str]) -> None:
    """Catches engines that stay out of the Service after a reload (before their first, they were: see the fixture)."""
    assert cluster.ready_pods(pool, deadline_s=60) == set(pool)


@pytest.mark.skipif("COLCHIS_BUILT_STAGE" not in os.environ, reason="make test-cluster-image builds the image")
def test_stages_ran_the_built_image(finished: Any, cluster: Cluster, pool: list[str]) -> None:
    """Catches a run that proves nothing about images/stage: the engine's image is the harness's own, the agent's is not."""
    statuses = cluster.core.read_namespaced_pod(pool[0], "colchis").status.container_statuses
    images = {status.name: status.image_id for status in statuses}
    assert images["agent"] != images["engine"]


def test_the_report_is_an_artifact(finished: Any, store: Store) -> None:
    """Catches an output artifact that Argo did not upload, or put under another key."""
    key = f"runs/{RUN}/reports/{finished['name']}.html"
    assert b"<html" in store.get(key).data[:2000]


def test_argo_lints_the_rendered_templates(cluster: Cluster) -> None:
    """Catches what Argo's own lint refuses and ours does not."""
    folder = REPOSITORY / "manifests/base/templates"
    done = subprocess.run(
        ["argo", "lint", "--offline", "--strict", str(folder)], capture_output=True, text=True, env=os.environ
    )
    assert done.returncode == 0, done.stdout + done.stderr
