"""Real SGLang in a pod: the pool that production uses, without a GPU."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator

import httpx
import pytest

from colchis.components.engine.sglang_cpu import environment
from colchis.components.records.iteration import Summary
from colchis.components.store import Store, keys
from colchis.components.store.pools import pool_lease
from colchis.workflows.boundaries import BOUNDARIES
from tests.cluster.client import Cluster
from tests.cluster.conftest import EXAMPLE, REPOSITORY, SMALL, wait_for
from tests.cluster.runs import colchis, ended, submit

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.sglang,
    pytest.mark.timeout(1800),
    pytest.mark.usefixtures("strict", "alone"),
]

POOL = "sglang"
RUN = "on-sglang"
START_S = 600.0
"""Longest wait for SGLang: it imports for a minute on a loaded machine."""


def kubectl(*words: str) -> None:
    done = subprocess.run(["kubectl", *words], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def engine_keys(cluster: Cluster) -> Iterator[dict[str, str]]:
    with cluster.engine_keys() as values:
        yield values


def served(address: str, engine_keys: dict[str, str]) -> str:
    """The version that a locked engine says it serves."""
    url, key = f"http://{address}:30000/model_info", engine_keys["engineKey"]
    assert httpx.get(url, timeout=30).status_code == 401
    answer = httpx.get(url, timeout=30, headers={"Authorization": f"Bearer {key}"})
    return str(answer.raise_for_status().json()["weight_version"])


@pytest.fixture(scope="module")
def engines(
    cluster: Cluster, tmp_path_factory: pytest.TempPathFactory, engine_keys: dict[str, str]
) -> Iterator[dict[str, str]]:
    """The pool with one engine, locked by keys: its pod and address."""
    python = environment.find()
    assert python is not None  # else the test had been skipped
    folder = tmp_path_factory.mktemp("sglang")
    model = folder / "model"
    shutil.copytree(EXAMPLE.parent / "base", model)
    model.chmod(0o755)  # pods are another user
    for file in model.iterdir():
        file.chmod(0o644)
    shutil.copytree(REPOSITORY / "manifests", folder / "manifests")
    overlay = folder / "manifests/overlays/test/pool-sglang"
    shutil.copytree(REPOSITORY / "tests/cluster/pool-sglang", overlay)
    volumes = overlay / "volumes.yaml"
    filled = volumes.read_text().replace("ENVIRONMENT", str(python.parents[1])).replace("MODEL", str(model))
    volumes.write_text(filled)
    kubectl("apply", "--server-side", "-f", str(volumes))
    kubectl("apply", "--server-side", "-k", str(overlay))
    with cluster.scaled(f"colchis-engines-{POOL}", 1) as addresses:
        for address in addresses.values():
            wait_for(f"http://{address}:30000/health", deadline_s=START_S)
            wait_for(f"http://{address}:9000/live", deadline_s=180)
        assert cluster.ready_pods(addresses, deadline_s=3) == set(), "ready with the weights that it started with"
        yield addresses
    kubectl("delete", "-k", str(overlay), "--wait=true")
    kubectl("delete", "-f", str(volumes), "--wait=true")


def test_a_run_trains_sglang_over_five_boundaries(
    cluster: Cluster, store: Store, engines: dict[str, str], engine_keys: dict[str, str]
) -> None:
    """Catches what only the pods have: the launcher under `restricted`, a shared folder between two users, probes that a
    pause upsets, addresses by a headless Service, keys out of a Secret."""
    overrides = [word for setting in SMALL for word in ("--set", setting)]
    workflow = submit(EXAMPLE, RUN, "--pool", POOL, *overrides)
    status = ended(cluster, workflow)
    containers = [n["displayName"] for n in status["nodes"].values() if n["type"] == "Container"]
    assert {name: containers.count(name) for name in set(containers)} == dict.fromkeys(BOUNDARIES, 3), (
        "one fill and two reloads"
    )
    summaries = [Summary.from_bytes(store.get(key).data, key) for key in (keys.summary(RUN, i) for i in range(2))]
    assert [s.version for s in summaries] == [1, 2]
    for address in engines.values():
        assert served(address, engine_keys) == "2"
    assert cluster.ready_pods(engines, deadline_s=60) == set(engines)
    shown = colchis("status", RUN)
    assert shown.returncode == 0
    for boundary in BOUNDARIES.values():
        assert boundary in shown.stdout


def test_an_engine_that_comes_back_gets_what_its_run_declares(
    cluster: Cluster, store: Store, engines: dict[str, str], engine_keys: dict[str, str]
) -> None:
    """Catches a restarted SGLang that takes requests with the weights that it was started with: it is not ready until
    its agent, whose staged copy went with the pod, has put in what the run that holds the pool declares."""
    (pod,) = engines
    lease = pool_lease(store, POOL, RUN)  # as its stages hold it while it goes on
    lease.acquire()
    try:
        cluster.delete_pod(pod, grace_s=0)
        assert cluster.ready_pods(engines, deadline_s=START_S) == set(engines)
    finally:
        lease.release()
    address = cluster.core.read_namespaced_pod(pod, "colchis").status.pod_ip
    assert served(address, engine_keys) == "2"
