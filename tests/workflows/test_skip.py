"""`colchis skip`: an iteration committed as empty, on the record, in a form that the trainer reads."""

from __future__ import annotations

import pytest

from colchis.components.config import parse
from colchis.components.errors import BadConfig, BadData
from colchis.components.records.batch import read_batch
from colchis.components.records.run import RunRecord
from colchis.components.store import StageKey, Store, keys, read_commit
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


def test_a_skipped_iteration_is_an_empty_batch(store: Store, run: str) -> None:
    """Fault: a skip that the next stage cannot read, so that the run is stuck for good."""
    skip(store, run, 0, "shard 3 is lost")
    commit = read_commit(store, StageKey(run, 0, "batch"))
    assert commit.outputs["decision"] == "skipped"
    assert commit.outputs["reason"] == "shard 3 is lost"
    batch = read_batch(store.read(commit.payload_named("denominators.json")), None)
    assert batch.decision == "empty"
    assert batch.samples == ()


def test_only_the_open_iteration_is_skipped_and_only_once(store: Store, run: str) -> None:
    """Fault: a committed batch that is thrown away, or a hole in the chain of iterations."""
    with pytest.raises(BadData, match="not the open one"):
        skip(store, run, 1, "no")
    skip(store, run, 0, "yes")
    with pytest.raises(BadData, match="has a batch commit already"):
        skip(store, run, 0, "again")


def test_unknown_run_is_named_with_those_that_exist(store: Store, run: str) -> None:
    with pytest.raises(BadConfig, match="no run 'q'; runs here: r"):
        skip(store, "q", 0, "no")
