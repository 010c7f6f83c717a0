"""Which run has a pool: what stages ask for before they ask an engine, and what a Workflow leaves at its end."""

from __future__ import annotations

import json

import pytest

from colchis.components.__main__ import main
from colchis.components.config import parse
from colchis.components.errors import BadConfig
from colchis.components.records.iteration import Summary
from colchis.components.records.run import RunRecord, Serving
from colchis.components.stages.context import Stage
from colchis.components.store import Store, StoreSettings, keys
from colchis.components.store.pools import pool_lease

CONFIG = parse(
    {
        "model": {"source": f"input:{'a' * 64}"},
        "environment": {"kind": "reasoning_gym", "task": "gcd"},
        "loop": {"iterations": 4},
    }
)


def begin(store: Store, *, closed: int) -> None:
    """A run `r` of four iterations, of which so many are closed, that has pool `main`."""
    record = RunRecord(
        run="r",
        config=CONFIG,
        config_digest=CONFIG.digest(),
        identity_digest=CONFIG.identity_digest(),
        template="t",
        code_version="0",
        rows="b" * 64,
        model="a" * 64,
    )
    store.create(keys.run_record("r"), record.to_bytes())
    for i in range(closed):
        summary = Summary(
            run="r", iteration=i, version=i + 1, kind="full", weights_digest="d" * 64, decision="trainable"
        )
        store.create(keys.summary("r", i), summary.to_bytes())
    serving = Serving(run="r", version=closed, weights_digest="d" * 64, engines=["main-0"])
    store.create(keys.serving("r"), serving.to_bytes())
    pool_lease(store, "main", "r").acquire()


def close(settings: StoreSettings, monkeypatch: pytest.MonkeyPatch, status: str) -> None:
    for name, value in settings.to_environment().items():
        monkeypatch.setenv(name, value)
    assert main(["close", "--run", "r", "--workflow", "w", "--status", status]) == 0


def is_free(store: Store) -> bool:
    return bool(json.loads(store.get(keys.pool_lease("main")).data)["released"])


@pytest.mark.parametrize(
    ("closed", "status", "free"), [(2, "Succeeded", False), (4, "Succeeded", True), (2, "Failed", True)]
)
def test_only_a_window_with_a_successor_keeps_the_pool(
    store: Store, store_settings: StoreSettings, monkeypatch: pytest.MonkeyPatch, closed: int, status: str, free: bool
) -> None:
    """Fault: another run takes the pool between two windows; or a run that is over or failed keeps it."""
    begin(store, closed=closed)
    close(store_settings, monkeypatch, status)
    assert is_free(store) is free


def test_a_stage_is_refused_the_pool_of_another_run(store: Store) -> None:
    """Fault: a run whose pool was taken over goes on asking its engines."""
    begin(store, closed=0)
    with pytest.raises(BadConfig, match="held by 'run r', wanted by 'run q'"):
        Stage("q", "main", store, {}).claim_pool()
    Stage("r", "main", store, {}).claim_pool()
