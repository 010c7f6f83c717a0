"""Pods and parts of the cluster killed in the middle of a run: it ends with the weights of an undisturbed one."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from colchis.components.store import StageKey, Store, find_commit, keys
from colchis.workflows.boundaries import BOUNDARIES
from tests.cluster.client import Cluster
from tests.cluster.faults import killed
from tests.cluster.runs import DEADLINE_S, digests_of, ended, submit
from tests.waiting import eventually

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1800), pytest.mark.usefixtures("strict", "small_pool", "alone")]


def test_pods_deleted_while_they_run(config: Path, calm: list[str], cluster: Cluster, store: Store) -> None:
    """Fault: a node that is drained ends the run, or its work is lost or done twice: each stage once."""
    workflow = submit(config, "drained")
    stages = ("begin", "reload", "rollout", "batch", "train", "evaluate", "close")
    drained = cluster.drain_stages(workflow, stages, deadline_s=DEADLINE_S)
    ended(cluster, workflow)
    assert digests_of(store, "drained") == calm
    assert len(drained) >= 5, f"most had ended before they were disturbed: {sorted(drained)} had not"


@pytest.mark.slow
def test_a_reload_is_drained_at_each_boundary(config: Path, calm: list[str], cluster: Cluster, store: Store) -> None:
    """Fault: a pod of several containers that counts as refused, because one of them says that another one ended."""
    workflow = submit(config, "emptied")
    # the first reload has passed then: it has no training before it
    cluster.pod_of(workflow, "train", deadline_s=DEADLINE_S)
    boundaries, codes = list(BOUNDARIES.values()), []
    for before in [None, *boundaries[:-1]]:
        if before is not None:
            _wait_for_record(store, "emptied", before)
        codes.append(cluster.drain_pod(cluster.pod_of(workflow, "reload", deadline_s=DEADLINE_S)))
    ended(cluster, workflow)
    assert digests_of(store, "emptied") == calm
    # not by the nodes: Argo makes a pod of the same node again when it was gone before the controller had seen it end
    assert sum(code != 0 for code in codes) >= 4, f"most had ended before they were disturbed: {codes}"


def _wait_for_record(store: Store, run: str, boundary: str) -> None:
    """Until a reload of v1 has passed it. Its record tells that sooner than its container does: the next has only begun to
    start."""
    prefix, name = f"{keys.weights_prefix(run, 1)}reloads/", f"/{boundary}.json"
    eventually(lambda: any(k.endswith(name) for k in store.list(prefix)), f"{name} is written", deadline_s=DEADLINE_S)


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
    cluster.pod_of(workflow, "reload", deadline_s=DEADLINE_S)
    with killed("argo"):  # it went on, but asks for its ConfigMap without a pause since then (docs/operations.md)
        pass
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
def test_a_node_is_not_ready_and_comes_back(config: Path, calm: list[str], cluster: Cluster, store: Store) -> None:
    """Fault: a run that takes a silent node for a failed stage, or waits for ever for what ended meanwhile."""
    workflow = submit(config, "silent")
    cluster.pod_of(workflow, "train", deadline_s=DEADLINE_S)
    with killed("kubelet"):
        cluster.wait_for_node(ready=False, deadline_s=120)
    cluster.wait_for_node(ready=True, deadline_s=120)
    ended(cluster, workflow)
    assert digests_of(store, "silent") == calm
