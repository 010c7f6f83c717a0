"""Two pools of engines, and who may have one."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from colchis.components.records.boundary import Passage
from colchis.components.store import Lease, Store, keys
from tests.cluster.client import Cluster
from tests.cluster.conftest import wait_for
from tests.cluster.runs import DEADLINE_S, ITERATIONS, REPOSITORY, digests_of, ended, submit

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.usefixtures("strict", "small_pool", "alone"),
]

SMALL_REQUESTS = """\
patches:
  - target: {kind: StatefulSet, name: colchis-engines}
    patch: |
      - {op: replace, path: /spec/template/spec/containers/0/resources/requests/cpu, value: 50m}
"""
"""What engines of the second pool ask for, so that two cores hold both pools and the pods of two runs."""


def kubectl(*words: str) -> None:
    done = subprocess.run(["kubectl", *words], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def node_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder of the node for the agents' user, made and given to the cluster as cluster-scoped/node-cache says."""
    folder = tmp_path_factory.mktemp("node") / "cache"
    folder.mkdir(mode=0o700)
    os.chown(folder, 10001, 10001)
    for parent in folder.parents[:2]:
        parent.chmod(0o755)
    volume = tmp_path_factory.mktemp("volume") / "volume.yaml"
    text = (REPOSITORY / "manifests/cluster-scoped/node-cache/volume.yaml").read_text()
    assert text.count("-main") == text.count("path: /var/cache/colchis") == 1
    volume.write_text(text.replace("-main", "-other").replace("path: /var/cache/colchis", f"path: {folder}"))
    kubectl("apply", "--server-side", "-f", str(volume))
    yield folder
    kubectl("delete", "-f", str(volume), "--wait=false")


@pytest.fixture(scope="module")
def other(cluster: Cluster, node_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A second pool, made as docs/operations.md says: a copy of the folder of the first, with another name in it. Its engines
    are locked, as docs/security.md says, and its agents share a folder of their node."""
    manifests = tmp_path_factory.mktemp("pools") / "manifests"
    shutil.copytree(REPOSITORY / "manifests", manifests)
    folder = manifests / "overlays/test/pool-other"
    shutil.copytree(manifests / "overlays/test/pool-main", folder)
    file = folder / "kustomization.yaml"
    pool = "../../../components/pool-embedded"
    more = "../../../components/lock-embedded, ../../../components/node-cache"
    text = file.read_text().replace(pool, f"{pool}, {more}").replace("main", "other")
    file.write_text(text + "namespace: colchis\n" + SMALL_REQUESTS)
    with cluster.engine_keys():
        kubectl("apply", "--server-side", "-k", str(folder))
        with cluster.scaled("colchis-engines-other", 2) as addresses:
            for address in addresses.values():
                for port, path in ((9000, "/live"), (30000, "/health")):
                    wait_for(f"http://{address}:{port}{path}", deadline_s=180)
                locked = httpx.post(f"http://{address}:30000/pause_generation", json={"mode": "abort"}, timeout=30)
                assert locked.status_code == 401, "a stranger may pause it"
            yield "other"
    kubectl("delete", "-k", str(folder))


def test_two_runs_at_once_and_a_third_that_is_refused(
    config: Path, calm: list[str], cluster: Cluster, store: Store, other: str
) -> None:
    """Fault: runs that mix their engines or wait for each other; a third that pushes its weights into a pool in use; a stage
    that has no key for locked engines."""
    east = submit(config, "east")
    cluster.pod_of(east, "rollout", deadline_s=DEADLINE_S)
    west, third = submit(config, "west", "--pool", other), submit(config, "intruder")
    ended(cluster, third, phase="Failed")
    assert "held by 'run east', wanted by 'run intruder'" in cluster.logs(third)
    for workflow in (east, west):
        ended(cluster, workflow)
    assert digests_of(store, "east") == digests_of(store, "west") == calm


def test_agents_of_one_node_fetch_once(store: Store, node_folder: Path) -> None:
    """Fault: a folder that only one container may write, or that each agent fills for itself. Of the run before."""
    transfers = [
        Passage.from_bytes(store.get(key).data, key)
        for key in store.list("runs/west/weights/")
        if key.endswith("/transfer.json")
    ]
    assert len(transfers) == ITERATIONS + 1, "run west, of the test before, did not reload"
    for transfer in transfers:
        fetched: dict[str, list[bool]] = {}
        for record in transfer.records:
            for fetch in record.proof["objects"]:
                fetched.setdefault(fetch["key"], []).append(fetch["reused"])
        assert fetched
        assert {key: sorted(reused) for key, reused in fetched.items()} == {key: [False, True] for key in fetched}
    assert [entry for entry in node_folder.iterdir() if entry.is_file()]


def test_the_pool_of_a_run_that_died_is_taken(config: Path, calm: list[str], cluster: Cluster, store: Store) -> None:
    """Fault: a Workflow that was deleted, so that nothing released its pool, keeps every other run out for good."""
    lease_s = 90
    Lease(store, keys.pool_lease("main"), holder="run dead", lease_s=lease_s).acquire()
    acquired_s = time.monotonic()
    ended(cluster, submit(config, "early"), phase="Failed")
    time.sleep(max(0.0, acquired_s + lease_s + 2 - time.monotonic()))
    ended(cluster, submit(config, "heir"))
    assert digests_of(store, "heir") == calm
