"""What docs/operations.md says of Argo's own commands: stop, terminate, retry, resubmit; and what they show of a run."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path

import pytest

from colchis.components.store import Store, keys
from colchis.workflows.boundaries import BOUNDARIES
from tests.cluster.client import Cluster
from tests.cluster.runs import DEADLINE_S, argo, digests_of, ended, submit

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.usefixtures("strict", "small_pool", "alone"),
]


def holder(store: Store) -> str | None:
    """Who has pool `main`."""
    found = store.find(keys.pool_lease("main"))
    record = json.loads(found.data) if found else {"released": True}
    return None if record["released"] else str(record["holder"])


def test_stopped_and_retried(config: Path, calm: list[str], cluster: Cluster, store: Store) -> None:
    """Fault: a run that was stopped in the middle of an iteration cannot go on, or does so from somewhere else."""
    workflow = submit(config, "paused")
    cluster.pod_of(workflow, "train", deadline_s=DEADLINE_S)
    argo("stop", workflow)
    ended(cluster, workflow, phase="Failed")
    assert holder(store) is None, "close frees the pool"
    argo("retry", workflow)
    cluster.pod_of(workflow, "train", deadline_s=DEADLINE_S)
    ended(cluster, workflow)
    assert digests_of(store, "paused") == calm


def test_terminated_and_submitted_again(config: Path, calm: list[str], cluster: Cluster, store: Store) -> None:
    """Fault: a run that nobody closed cannot have its own pool back, or begins anew."""
    workflow = submit(config, "cut")
    cluster.pod_of(workflow, "train", deadline_s=DEADLINE_S)
    argo("terminate", workflow)
    status = ended(cluster, workflow, phase="Failed")
    assert "close" not in {n["templateName"] for n in status["nodes"].values() if n["type"] == "Pod"}
    assert holder(store) == "run cut", "nothing freed the pool"
    again = argo("resubmit", workflow, "-o", "name").split()[-1]
    ended(cluster, again)
    assert digests_of(store, "cut") == calm


def test_what_is_shown(config: Path, calm: list[str], cluster: Cluster) -> None:
    """Fault: runs that cannot be found by what they are, nodes that hide their boundaries, logs that are no lines of JSON."""
    workflow = argo("list", "-l", "colchis.dev/run=calm", "-o", "name").split()[-1]
    assert workflow in argo("list", "-l", "colchis.dev/mode=sync", "-o", "name").split()
    tree = argo("get", workflow)
    for stage in ("begin", "rollout", "batch", "train", "reload", "close"):
        assert re.search(rf"\s{stage}\s", tree), stage
    nodes = json.loads(argo("get", workflow, "-o", "json"))["status"]["nodes"].values()
    boundaries = [n["displayName"] for n in nodes if n["type"] == "Container"]  # the command's tree draws pods only
    assert Counter(boundaries) == dict.fromkeys(BOUNDARIES, 3)


def test_pods_go_and_what_they_made_stays(calm: list[str], cluster: Cluster, store: Store) -> None:
    """Fault: a namespace that fills with ended pods, or a policy that takes the run's data with them."""
    workflow = argo("list", "-l", "colchis.dev/run=calm", "-o", "name").split()[-1]
    cluster.wait_for_no_pods(f"workflows.argoproj.io/workflow={workflow}", deadline_s=180)
    assert digests_of(store, "calm") == calm
    assert store.find(f"runs/calm/reports/{workflow}.html") is not None
    assert argo("get", workflow, "-o", "name").strip() == workflow, "the Workflow itself stays for its own time"
