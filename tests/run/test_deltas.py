"""A whole run whose versions reach the engines as differences."""

from __future__ import annotations

import json

import pytest

from colchis.components.records.boundary import BoundaryRecord, Passage
from colchis.components.records.weights import WeightsManifest
from colchis.components.store import Store, keys
from colchis.workflows.local.weed import Weed
from tests.run.conftest import Project

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

SMALL_STEPS = ("--set", "trainer.learning_rate=1e-7")


def transfers(store: Store, version: int) -> list[BoundaryRecord]:
    """What boundary 3 proved of a version, per engine."""
    prefix = keys.weights_prefix("r", version) + "reloads/"
    found = [key for key in store.list(prefix) if key.endswith("/transfer.json")]
    return [record for key in found for record in Passage.from_bytes(store.get(key).data, key).records]


def test_small_steps_travel_as_differences_and_end_in_the_same_weights(project: Project, model: object) -> None:
    """Fault: a trainer that publishes deltas which nobody takes, or a way that depends on the transport."""
    done = project.run(*SMALL_STEPS)
    assert done.returncode == 0, done.stdout + done.stderr
    digests = project.digests()
    with Weed(project.home / "store") as weed:
        store = Store(weed.settings)
        for version in (1, 2):
            key = keys.weights_manifest("r", version)
            manifest = WeightsManifest.from_bytes(store.get(key).data, key)
            assert manifest.delta is not None
            assert manifest.delta.payload.bytes < 0.5 * manifest.file_bytes()
            records = transfers(store, version)
            assert len(records) == 2
            for record in records:
                assert record.proof["bytes"] == manifest.delta.payload.bytes, record.proof
    whole = project.colchis(
        "run", str(project.folder / "run.yaml"), "--run", "s", *SMALL_STEPS, "--set", "reload.delta=never"
    )
    assert whole.returncode == 0, whole.stdout + whole.stderr
    assert [
        s["weights_digest"] for s in json.loads(project.colchis("status", "s", "--json").stdout)["summaries"]
    ] == digests
