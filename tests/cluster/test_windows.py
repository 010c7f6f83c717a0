"""A run longer than one Workflow: windows, each of which starts the next, and objects that stay small."""

from __future__ import annotations

import base64
import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from colchis.components.store import Store
from tests.cluster.client import GROUP, Cluster
from tests.cluster.runs import DEADLINE_S, argo, digests_of, ended, submit
from tests.cluster.sizes import Sampler, collected, first_and_last, iteration_seconds

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1800), pytest.mark.usefixtures("strict", "small_pool", "alone")]

SIXTY_S = 7200
"""Longest time for sixty iterations on a loaded machine."""
LARGEST_BYTES = 700 << 10
"""A Workflow in etcd: it must not come near the 1 MiB where Argo has to compress its nodes."""


def workflows_of(cluster: Cluster, run: str) -> list[dict[str, Any]]:
    """The Workflows of a run, as its label finds them, oldest first."""
    listed = cluster.objects.list_namespaced_custom_object(
        **GROUP, plural="workflows", label_selector=f"colchis.dev/run={run}"
    )["items"]
    return sorted(listed, key=lambda w: int(w["metadata"]["labels"]["colchis.dev/start"] or 0))


def bytes_of(workflow: dict[str, Any]) -> int:
    """Size as JSON, with the nodes as they are when nobody has compressed them."""
    status = dict(workflow["status"])
    if packed := status.pop("compressedNodes", None):
        status["nodes"] = json.loads(gzip.decompress(base64.b64decode(packed)))
    return len(json.dumps({**workflow, "status": status}, separators=(",", ":")))


def follow(
    cluster: Cluster, run: str, first: str, starts: range, *, deadline_s: float = DEADLINE_S
) -> list[dict[str, Any]]:
    """Waits for every window of a run; its Workflows."""
    for name in (first, *(f"{run}-from-{start}" for start in starts)):
        ended(cluster, name, deadline_s=deadline_s)
    return workflows_of(cluster, run)


def test_six_iterations_over_three_workflows(config: Path, calm: list[str], cluster: Cluster, store: Store) -> None:
    """Fault: a window that is lost, done twice, or that nobody finds by its run; weights that depend on the windows."""
    first = submit(config, "windows", "--set", "loop.iterations=6", "--set", "loop.window=2")
    found = follow(cluster, "windows", first, range(2, 6, 2))
    assert [w["metadata"]["labels"]["colchis.dev/start"] for w in found] == ["", "2", "4"]
    assert {w["metadata"]["labels"]["colchis.dev/pool"] for w in found} == {"main"}
    digests = digests_of(store, "windows", 6)
    assert digests[:2] == calm
    assert len(set(digests)) == 6
    assert max(map(bytes_of, found)) < LARGEST_BYTES

    argo("resubmit", found[1]["metadata"]["name"])
    (again,) = [
        w
        for w in workflows_of(cluster, "windows")
        if w["metadata"]["name"] not in {f["metadata"]["name"] for f in found}
    ]
    status = ended(cluster, again["metadata"]["name"])
    pods = {n["templateName"] for n in status["nodes"].values() if n["type"] == "Pod"}
    assert "train" not in pods, "a window that is closed is not repeated"
    assert digests_of(store, "windows", 6) == digests


@pytest.mark.slow
@pytest.mark.timeout(SIXTY_S)
def test_sixty_iterations(config: Path, cluster: Cluster, store: Store, figure: Callable[[str], None]) -> None:
    """Fault: iterations that cost more the longer a run is, Workflows that grow with it, run data that ends with them."""
    slow = ("--set", "trainer.learning_rate=1e-6", "--set", "loop.max_empty=60")  # else it has learned all by the tenth
    with Sampler() as sampler:
        first = submit(config, "long", "--set", "loop.iterations=60", "--set", "loop.window=20", *slow)
        found = follow(cluster, "long", first, range(20, 60, 20), deadline_s=SIXTY_S / 2)
    sizes = [bytes_of(w) for w in found]
    figure(first_and_last(iteration_seconds(found)))
    figure(
        f"{max(len(w['status']['nodes']) for w in found)} nodes and {max(sizes) / 1e3:.0f} kB in the largest Workflow"
    )
    assert len(found) == 3
    assert max(sizes) < LARGEST_BYTES
    assert max(sizes) < 1.1 * min(sizes), "each window holds as many nodes as the others"
    digests = digests_of(store, "long", 60)

    for w in found:
        cluster.delete("workflows", w["metadata"]["name"])
    assert digests_of(store, "long", 60) == digests, "the data of a run outlives its Workflows"
    if readings := sampler.readings:
        figure(f"at first: {readings[0]}")
        figure(f"controller at most {max(reading.controller for reading in readings) / 1e6:.0f} MB")
        figure(f"at the end: {readings[-1]}")
        figure(f"once the Workflows are deleted and etcd is compacted: {collected()}")
