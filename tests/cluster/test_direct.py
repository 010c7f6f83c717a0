"""Weights that the pod of a reload broadcasts into the pods of a pool."""

from __future__ import annotations

from pathlib import Path

import pytest

from colchis.components.records.boundary import Boundary
from colchis.components.report.status import find_boundaries
from colchis.components.store import Store
from tests.cluster.client import Cluster
from tests.cluster.runs import digests_of, ended, submit

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.usefixtures("strict", "small_pool", "alone"),
]


def test_versions_are_sent_from_pod_to_pod(config: Path, calm: list[str], cluster: Cluster, store: Store) -> None:
    """Fault: a sender that waits where only its own pod finds it, or a copy that the next container does not."""
    workflow = submit(config, "sent", "--set", "reload.transfer=gloo")
    ended(cluster, workflow)
    assert digests_of(store, "sent") == calm
    records = find_boundaries(store, "sent", 2)
    assert next(r.at for r in records if r.boundary == Boundary.BUFFER) == "sender"
    loads = [r for r in records if r.boundary == Boundary.LOAD]
    assert loads
    assert all(r.proof["direct"] and r.proof["checksums_equal"] for r in loads), loads
