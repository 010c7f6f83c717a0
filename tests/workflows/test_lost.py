"""Objects that say what a run is, lost: refused by name, and hidden from nobody."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from colchis.components.config import parse
from colchis.components.errors import BadData
from colchis.components.records.iteration import Summary
from colchis.components.records.run import RunRecord, Serving
from colchis.components.report import known_run, list_runs, status
from colchis.components.store import Store, keys
from colchis.workflows.cli import main

CONFIG = parse({"model": {"source": f"input:{'a' * 64}"}, "environment": {"kind": "reasoning_gym", "task": "gcd"}})


@pytest.fixture
def run(store: Store) -> str:
    """A run `r` with one closed iteration."""
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
    summary = Summary(run="r", iteration=0, version=1, kind="full", weights_digest="d" * 64, decision="trainable")
    serving = Serving(run="r", version=1, weights_digest="d" * 64, engines=["main-0"])
    store.put(keys.run_record("r"), record.to_bytes())
    store.put(keys.weights_manifest("r", 0), b"{}")
    store.put(keys.summary("r", 0), summary.to_bytes())
    store.put(keys.serving("r"), serving.to_bytes())
    return "r"


def test_a_run_without_its_declared_version_is_no_run_that_never_began(store: Store, run: str) -> None:
    store.delete(keys.serving(run))
    with pytest.raises(BadData, match=r"closed iterations but no declared version .*serving\.json"):
        status(store, run)


def test_a_run_without_its_record_is_not_unknown(store: Store, run: str) -> None:
    store.delete(keys.run_record(run))
    assert list_runs(store) == [run]
    with pytest.raises(BadData, match=r"run 'r' has no record .*run\.json.*put it back"):
        known_run(store, run)


def test_what_only_holds_a_lease_is_no_run(store: Store) -> None:
    """A configuration that is refused leaves the lease of a run that never began."""
    store.put(keys.run_lease("refused"), b"{}")
    assert list_runs(store) == []


def test_one_damaged_run_hides_no_other(store: Store, run: str, monkeypatch: pytest.MonkeyPatch) -> None:
    store.put(keys.run_record("a"), b"{")
    for name, value in store.settings.to_environment().items():
        monkeypatch.setenv(name, value)
    said = CliRunner().invoke(main, ["runs", "--json"])
    assert said.exit_code == 65
    damaged, whole = json.loads(said.stdout)
    assert damaged["run"] == "a"
    assert "runs/a/run.json" in damaged["error"]
    assert (whole["run"], whole["closed"]) == ("r", 1)
    lines = CliRunner().invoke(main, ["runs"]).stdout.splitlines()
    assert [line.split()[0] for line in lines] == ["a", "r"]
