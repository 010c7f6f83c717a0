"""`colchis skip`: which iterations it takes. What comes of it: tests/run/test_steering.py."""

from __future__ import annotations

import pytest

from colchis.components.config import parse
from colchis.components.errors import BadConfig, BadData
from colchis.components.records.run import RunRecord
from colchis.components.store import Attempt, StageKey, Store, keys, read_commit
from colchis.workflows.runs import skip

CONFIG = parse({"model": {"source": f"input:{'a' * 64}"}, "environment": {"kind": "reasoning_gym", "task": "gcd"}})


@pytest.fixture
def run(store: Store) -> str:
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
    return "r"


def test_only_the_open_iteration_is_skipped_and_the_first_reason_stays(store: Store, run: str) -> None:
    """Fault: a hole in the chain of iterations, or a record that changes afterwards."""
    with pytest.raises(BadData, match="not the open one"):
        skip(store, run, 1, "no")
    skip(store, run, 0, "shard 3 is lost")
    skip(store, run, 0, "again")
    assert read_commit(store, StageKey(run, 0, "skip")).outputs["reason"] == "shard 3 is lost"


def test_an_iteration_that_never_comes_is_not_skipped(store: Store, run: str) -> None:
    """Fault: a skip that waits in the store, and strikes when the run is made longer."""
    with pytest.raises(BadData, match="has 10 iterations, so no iteration 10"):
        skip(store, run, 10, "no")


def test_an_iteration_that_made_a_version_is_not_skipped(store: Store, run: str) -> None:
    """Fault: a version that two records tell apart: weights by a step, an iteration without one."""
    Attempt(store, StageKey(run, 0, "train")).commit(outputs={"version": 1})
    with pytest.raises(BadData, match="has made v1 already"):
        skip(store, run, 0, "too late")


def test_unknown_run_is_named_with_those_that_exist(store: Store, run: str) -> None:
    with pytest.raises(BadConfig, match="no run 'q'; runs here: r"):
        skip(store, "q", 0, "no")
