"""Pods and parts of the cluster killed in the middle of a run: it ends with the weights of an undisturbed one."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from colchis.components.store import StageKey, Store, find_commit, keys
from tests.cluster.client import Cluster
from tests.cluster.faults import killed
from tests.cluster.runs import DEADLINE_S, argo, digests_of, ended, shape, submit

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1800), pytest.mark.usefixtures("strict", "small_pool")]


@pytest.fixture(autouse=True)
def alone(cluster: Cluster, store: Store) -> Iterator[None]:
    """A test that fails leaves the pool to the next one."""
    yield
    for workflow in cluster.running():
        cluster.delete("workflows", workflow)
        store.delete(keys.pool_lease("main"))


def test_pods_deleted_while_they_run(config: Path, calm: list[str], cluster: Cluster, store: Store) -> None:
    """Fault: a node that is drained ends the run, or its work is lost or done twice: each stage once."""
    workflow = submit(config, "drained")
    codes = {}
    for stage in ("begin", "reload", "rollout", "batch", "train", "evaluate", "close"):
        codes[stage] = cluster.drain_pod(cluster.pod_of(workflow, stage, deadline_s=DEADLINE_S))
    ended(cluster, workflow)
    assert digests_of(store, "drained") == calm
    assert sum(code != 0 for code in codes.values()) >= 5, f"most had ended before they were disturbed: {codes}"


@pytest.mark.slow
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


@pytest.mark.slow
def test_pods_forced_off_at_their_start(config: Path, calm: list[str], cluster: Cluster, store: Store) -> None:
    """Fault: what Argo then does twice (the pod is started again, by the same name) is trained twice."""
    workflow = submit(config, "forced")
    for stage in ("rollout", "train"):
        cluster.delete_pod(cluster.pod_of(workflow, stage, deadline_s=DEADLINE_S).metadata.name, grace_s=0)
    ended(cluster, workflow)
    assert digests_of(store, "forced") == calm


@pytest.mark.slow
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


@pytest.mark.slow
def test_the_store_is_away(config: Path, calm: list[str], cluster: Cluster, store: Store) -> None:
    """Fault: a stage that ends for a store which comes back within its deadline, or that writes half."""
    workflow = submit(config, "unstored")
    for stage in ("rollout", "train"):
        cluster.pod_of(workflow, stage, deadline_s=DEADLINE_S)
        with killed("store"):
            time.sleep(10)
    ended(cluster, workflow)
    assert digests_of(store, "unstored") == calm


@pytest.mark.slow
def test_an_engine_is_killed(
    config: Path, calm: list[str], cluster: Cluster, store: Store, small_pool: list[str]
) -> None:
    """Fault: an engine that serves before its first reload after a restart, or a run that goes on without it."""
    workflow = submit(config, "maimed")
    cluster.pod_of(workflow, "train", deadline_s=DEADLINE_S)
    cluster.delete_pod(small_pool[0], grace_s=0)
    ended(cluster, workflow)
    assert digests_of(store, "maimed") == calm
    assert cluster.ready_pods(small_pool, deadline_s=60) == set(small_pool)


@pytest.mark.slow
def test_two_submissions_of_one_run(config: Path, calm: list[str], cluster: Cluster, store: Store) -> None:
    """Fault: two Workflows of one run that train side by side; the second has to wait, and then finds it done."""
    both = [submit(config, "double"), submit(config, "double")]
    for workflow in both:
        ended(cluster, workflow)
    assert digests_of(store, "double") == calm


@pytest.mark.slow
def test_a_trainer_out_of_memory(config: Path, cluster: Cluster) -> None:
    """Fault: a trainer that is killed for memory is tried for ever, or fails without the word."""
    shape(cluster, "narrow", lambda train: train["container"]["resources"]["limits"].update(memory="64Mi"))
    status = ended(cluster, submit(config, "narrow", "--shape", "narrow"), phase="Failed")
    tries = [n for n in status["nodes"].values() if n["type"] == "Pod" and n["templateName"] == "train"]
    assert len(tries) == 6, "once, and five times more"
    assert {"OOMKilled" in n["message"] for n in tries} == {True}, [n["message"] for n in tries]
    assert any(n["type"] == "Retry" and "OOMKilled" in n["message"] for n in status["nodes"].values())


@pytest.mark.slow
def test_an_image_that_is_not_there(config: Path, cluster: Cluster) -> None:
    """Fault: a run that waits without saying for what."""
    shape(cluster, "unbuilt", lambda train: train["container"].update(image="localhost/colchis/unbuilt:1"))
    workflow = submit(config, "unbuilt", "--shape", "unbuilt")
    message = cluster.node_message(workflow, "train", "unbuilt:1", deadline_s=DEADLINE_S)
    assert "ImagePullBackOff" in message or "ErrImagePull" in message
    argo("stop", workflow)
    ended(cluster, workflow, phase="Failed")


@pytest.mark.slow
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
