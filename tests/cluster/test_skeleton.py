"""A whole run on a real cluster: `argo submit`, two iterations in pods, and what the store says afterwards."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import yaml

from colchis.components.config import load, to_parameters
from colchis.components.records.run import Serving
from colchis.components.stages.context import StageKey
from colchis.components.store import Store, StoreSettings, keys, read_commit
from colchis.workflows.local.services import Child
from colchis.workflows.render import read_templates
from colchis.workflows.runs import pin_files
from tests.cluster.client import Cluster
from tests.cluster.harness.cluster import ENGINES
from tests.cluster.overlay import with_environment

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1200)]

REPOSITORY = Path(__file__).parents[2]
EXAMPLE = REPOSITORY / "examples/arithmetic/run.yaml"
SMALL = (
    *("loop.iterations=2", "rollout.prompts=4", "rollout.group_size=4", "evaluation.prompts=8"),
    *("environment.rows=200", "environment.heldout_rows=20"),
)
RUN = "first"


@pytest.fixture(scope="module")
def store(cluster: Cluster) -> Store:
    return Store(StoreSettings.from_environment())


@pytest.fixture(scope="module")
def agents(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    """Pool `main`: two embedded engines with agents, which pods find by the name of a headless Service."""
    folder = tmp_path_factory.mktemp("pool")
    environment = {"OMP_NUM_THREADS": "1"}
    with ExitStack() as stack:
        children = []
        for number, host in enumerate(ENGINES):
            engine_url, agent_url = f"http://{host}:30000", f"http://{host}:9000"
            engine = [
                *(sys.executable, "-m", "colchis.components.engine", "--host", host, "--port", "30000"),
                *("--weight-version", "none", "--deterministic"),
            ]
            agent = [
                *(sys.executable, "-m", "colchis.components", "agent", "--engine-url", engine_url),
                *("--host", host, "--port", "9000", "--staging", str(folder / f"staging-{number}")),
                *("--engine-id", f"main-{number}", "--pool", "main"),
            ]
            for name, command, url in (("engine", engine, f"{engine_url}/ping"), ("agent", agent, f"{agent_url}/live")):
                child = Child(name, command, log=folder / f"{name}-{number}.log", environment=environment)
                stack.callback(child.stop)
                children.append((child, url))
        for child, url in children:
            child.wait_for(url, accept=(200, 503))
        yield [f"http://{host}:9000" for host in ENGINES]


@pytest.fixture(scope="module")
def strict(cluster: Cluster) -> Iterator[None]:
    """The controller takes runs only as references to templates, as in production."""
    with cluster.controller_setting("workflowRestrictions", {"templateReferencing": "Strict"}):
        yield


@pytest.fixture(scope="module")
def finished(
    cluster: Cluster, store: Store, agents: list[str], strict: None, tmp_path_factory: pytest.TempPathFactory
) -> Any:
    """The rendered template, applied; the example, small, submitted by the argo command; its status at the end."""
    for template in read_templates(REPOSITORY / "manifests/base/templates").values():
        cluster.apply_template(with_environment(template))
    cluster.config_map("colchis-pool-main", {"engines": "dns://main-agents:9000"})
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


def test_the_store_declares_two_versions(finished: Any, store: Store, agents: list[str]) -> None:
    """Catches iterations that pods ran but did not commit, and engines that serve something else."""
    serving = Serving.model_validate_json(store.get(keys.serving(RUN)).data)
    assert (serving.version, serving.engines) == (2, ["main-0", "main-1"])
    for iteration in (0, 1):
        assert read_commit(store, StageKey(RUN, iteration, "train")).outputs["version"] == iteration + 1
        assert read_commit(store, StageKey(RUN, iteration, "reload")).outputs["version"] == iteration + 1
        assert json.loads(store.get(keys.summary(RUN, iteration)).data)["iteration"] == iteration


def test_each_reload_shows_five_boundaries(finished: Any) -> None:
    """Catches a reload that hides its boundaries: each is a node of its own, on every reload."""
    containers = [n["displayName"] for n in finished["nodes"].values() if n["type"] == "Container"]
    assert sorted(set(containers)) == ["buffer", "load", "main", "store", "transfer"]
    assert {containers.count(name) for name in set(containers)} == {3}, "one fill and two reloads"


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
