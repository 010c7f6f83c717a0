"""Pods and parts of the cluster killed in the middle of a run: it ends with the weights of an undisturbed one."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from colchis.components.records.iteration import Summary
from colchis.components.store import StageKey, Store, find_commit, keys
from tests.cluster.client import Cluster
from tests.cluster.conftest import REPOSITORY
from tests.cluster.faults import killed
from tests.cluster.test_commands import colchis
from tests.run.conftest import make_project, model

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1800), pytest.mark.usefixtures("strict", "pool")]

__all__ = ["model"]

DEADLINE_S = 900.0
"""Longest time for a run of two iterations and all its faults, on a loaded machine."""
ITERATIONS = 2


@pytest.fixture(scope="module")
def config(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two iterations whose weights change in both."""
    return make_project(model, tmp_path_factory.mktemp("project")).folder / "run.yaml"


@pytest.fixture(scope="module")
def calm(config: Path, cluster: Cluster, store: Store) -> list[str]:
    """The weights of an undisturbed run, by version."""
    ended(cluster, submit(config, "calm"))
    digests = digests_of(store, "calm")
    assert len(set(digests)) == ITERATIONS, "each iteration changes the weights"
    return digests


def submit(config: Path, run: str, *words: str) -> str:
    """Starts a run; the name of its Workflow."""
    done = colchis("submit", str(config), "--run", run, "--json", *words)
    assert done.returncode == 0, done.stdout + done.stderr
    return str(json.loads(done.stdout.splitlines()[0])["workflow"])


def ended(cluster: Cluster, workflow: str, *, phase: str = "Succeeded") -> dict[str, Any]:
    """The status of a Workflow when it has ended, as it should."""
    status = cluster.wait([workflow], deadline_s=DEADLINE_S)[workflow]
    failed = {n["name"]: n.get("message") for n in status["nodes"].values() if n["phase"] in ("Failed", "Error")}
    assert status["phase"] == phase, f"{status.get('message')}: {failed}\n{cluster.logs(workflow)}"
    return dict(status)


def digests_of(store: Store, run: str) -> list[str]:
    found = [keys.summary(run, iteration) for iteration in range(ITERATIONS)]
    return [Summary.from_bytes(store.get(key).data, key).weights_digest for key in found]


def test_pods_deleted_while_they_run(config: Path, calm: list[str], cluster: Cluster, store: Store) -> None:
    """Fault: a node that is drained ends the run, or its work is lost or done twice: each stage once."""
    workflow = submit(config, "drained")
    codes = {}
    for stage in ("begin", "reload", "rollout", "batch", "train", "evaluate", "close"):
        codes[stage] = cluster.drain_pod(cluster.pod_of(workflow, stage, deadline_s=DEADLINE_S))
    ended(cluster, workflow)
    assert digests_of(store, "drained") == calm
    assert sum(code != 0 for code in codes.values()) >= 5, f"most had ended before they were disturbed: {codes}"


def test_pods_deleted_right_after_their_commit(config: Path, calm: list[str], cluster: Cluster, store: Store) -> None:
    """Fault: a stage whose pod vanished between its commit and its report is done again, with another outcome."""
    workflow = submit(config, "vanished")
    for stage, shard in (("rollout", 0), ("batch", None), ("train", None), ("reload", None)):
        key = StageKey("vanished", 0, stage, shard)
        until = time.monotonic() + DEADLINE_S
        while find_commit(store, key) is None:
            assert time.monotonic() < until, f"no commit of {stage}"
            time.sleep(0.05)
        cluster.delete_pod(cluster.pod_of(workflow, stage, deadline_s=60).metadata.name, grace_s=0)
    ended(cluster, workflow)
    assert digests_of(store, "vanished") == calm


def test_pods_forced_off_at_their_start(config: Path, calm: list[str], cluster: Cluster, store: Store) -> None:
    """Fault: what Argo then does twice (the pod is started again, by the same name) is trained twice."""
    workflow = submit(config, "forced")
    for stage in ("rollout", "train"):
        cluster.delete_pod(cluster.pod_of(workflow, stage, deadline_s=DEADLINE_S).metadata.name, grace_s=0)
    ended(cluster, workflow)
    assert digests_of(store, "forced") == calm


def test_the_controller_and_the_api_server_are_away(
    config: Path, calm: list[str], cluster: Cluster, store: Store
) -> None:
    """Fault: a run that is lost with what watches it."""
    workflow = submit(config, "unwatched")
    cluster.pod_of(workflow, "rollout", deadline_s=DEADLINE_S)
    with killed("argo"):
        time.sleep(20)
    cluster.pod_of(workflow, "train", deadline_s=DEADLINE_S)
    with killed("apiserver"):
        time.sleep(20)
    ended(cluster, workflow)
    assert digests_of(store, "unwatched") == calm


def test_the_store_is_away(config: Path, calm: list[str], cluster: Cluster, store: Store) -> None:
    """Fault: a stage that ends for a store which comes back within its deadline, or that writes half."""
    workflow = submit(config, "unstored")
    for stage in ("rollout", "train"):
        cluster.pod_of(workflow, stage, deadline_s=DEADLINE_S)
        with killed("store"):
            time.sleep(10)
    ended(cluster, workflow)
    assert digests_of(store, "unstored") == calm


def test_an_engine_is_killed(config: Path, calm: list[str], cluster: Cluster, store: Store, pool: list[str]) -> None:
    """Fault: an engine that serves before its first reload after a restart, or a run that goes on without it."""
    workflow = submit(config, "maimed")
    cluster.pod_of(workflow, "train", deadline_s=DEADLINE_S)
    cluster.delete_pod(pool[0], grace_s=0)
    ended(cluster, workflow)
    assert digests_of(store, "maimed") == calm
    assert cluster.ready_pods(pool, deadline_s=60) == set(pool)


def test_two_submissions_of_one_run(config: Path, calm: list[str], cluster: Cluster, store: Store) -> None:
    """Fault: two Workflows of one run that train side by side; the second has to wait, and then finds it done."""
    both = [submit(config, "double"), submit(config, "double")]
    for workflow in both:
        ended(cluster, workflow)
    assert digests_of(store, "double") == calm


def test_a_trainer_out_of_memory(config: Path, cluster: Cluster) -> None:
    """Fault: a trainer that is killed for memory is tried for ever, or fails without the word."""
    shape(cluster, "narrow", lambda train: train["container"]["resources"]["limits"].update(memory="64Mi"))
    status = ended(cluster, submit(config, "narrow", "--shape", "narrow"), phase="Failed")
    tries = [n for n in status["nodes"].values() if n["type"] == "Pod" and n["templateName"] == "train"]
    assert len(tries) == 6, "once, and five times more"
    assert {"OOMKilled" in n["message"] for n in tries} == {True}, [n["message"] for n in tries]
    assert any(n["type"] == "Retry" and "OOMKilled" in n["message"] for n in status["nodes"].values())


def test_an_image_that_is_not_there(config: Path, cluster: Cluster) -> None:
    """Fault: a run that waits without saying for what."""
    shape(cluster, "unbuilt", lambda train: train["container"].update(image="localhost/colchis/unbuilt:1"))
    workflow = submit(config, "unbuilt", "--shape", "unbuilt")
    message = cluster.node_message(workflow, "train", "unbuilt:1", deadline_s=DEADLINE_S)
    assert "ImagePullBackOff" in message or "ErrImagePull" in message
    argo("stop", workflow)
    ended(cluster, workflow, phase="Failed")


def test_stopped_and_retried(config: Path, calm: list[str], cluster: Cluster, store: Store) -> None:
    """Fault: a run that was stopped in the middle of an iteration cannot go on, or does so from somewhere else."""
    workflow = submit(config, "paused")
    cluster.pod_of(workflow, "train", deadline_s=DEADLINE_S)
    argo("stop", workflow)
    ended(cluster, workflow, phase="Failed")
    argo("retry", workflow)
    cluster.pod_of(workflow, "train", deadline_s=DEADLINE_S)
    ended(cluster, workflow)
    assert digests_of(store, "paused") == calm


def argo(*words: str) -> None:
    done = subprocess.run(["argo", *words, "-n", "colchis"], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def shape(cluster: Cluster, name: str, change: Callable[[dict[str, Any]], None]) -> None:
    """Installs the template of the mode for another shape: that of `cpu` with another `train`."""
    template = yaml.safe_load((REPOSITORY / "manifests/base/templates/colchis-sync-cpu.yaml").read_text())
    template["metadata"].update(name=f"colchis-sync-{name}", namespace="colchis")
    change(next(t for t in template["spec"]["templates"] if t["name"] == "train"))
    cluster.apply_template(template)
