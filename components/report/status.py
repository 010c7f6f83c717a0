"""Where a run stands, read from its records alone."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from colchis.components.errors import BadConfig, BadData
from colchis.components.records.boundary import Boundary, BoundaryRecord, Passage
from colchis.components.records.iteration import Evaluation, Summary
from colchis.components.records.run import Outcome, RunRecord, Serving, StopWish
from colchis.components.store import StageKey, Store, find_commit, keys
from colchis.components.store.pools import run_of_pool

PASSED_IN = (Boundary.STORE, Boundary.TRANSFER, Boundary.BUFFER, Boundary.LOAD, Boundary.CACHE)
"""The order in which boundaries can be observed, which is not that of their numbers (docs/reload.md)."""


def find_run(store: Store, run: str) -> RunRecord | None:
    """The run's record as last changed, or None when it never began."""
    found = store.find(key := keys.run_record(run))
    if found is None:
        return None
    record = RunRecord.from_bytes(found.data, key)
    number = 1
    while (change := store.find(key := keys.run_change(run, number))) is not None:
        record = RunRecord.from_bytes(change.data, key)
        number += 1
    return record


@dataclass(frozen=True)
class Status:
    """Where a run stands."""

    record: RunRecord
    serving: Serving | None
    summaries: list[Summary]
    evaluations: list[Evaluation]
    stop: StopWish | None
    boundaries: list[BoundaryRecord] = field(default_factory=list)
    """Of the last reload of the serving version, or of the one after it that is under way or failed: as they were passed."""

    def to_json(self) -> dict[str, Any]:
        return {
            "run": self.record.run,
            "iterations": self.record.config.loop.iterations,
            "closed": len(self.summaries),
            "serving": self.serving.model_dump(mode="json") if self.serving else None,
            "stop": self.stop.model_dump(mode="json") if self.stop else None,
            "summaries": [s.model_dump(mode="json") for s in self.summaries],
            "evaluations": [e.model_dump(mode="json") for e in self.evaluations],
            "boundaries": [b.model_dump(mode="json") for b in self.boundaries],
        }


def status(store: Store, run: str, last: int | None = None) -> Status:
    """Read a run's records; `last` limits the summaries to the newest ones."""
    record = known_run(store, run)
    serving = find_serving(store, run)
    version = serving.version if serving else 0
    first = 0 if last is None else max(0, version - last)
    summaries = [s for i in range(first, version) if (s := find_summary(store, run, i)) is not None]
    return Status(
        record=record,
        serving=serving,
        summaries=summaries,
        evaluations=find_evaluations(store, record, version),
        stop=find_stop(store, run),
        boundaries=find_boundaries(store, run, version + 1) or find_boundaries(store, run, version),
    )


def find_summary(store: Store, run: str, iteration: int) -> Summary | None:
    """None while the iteration is open."""
    found = store.find(key := keys.summary(run, iteration))
    return Summary.from_bytes(found.data, key) if found else None


def find_serving(store: Store, run: str) -> Serving | None:
    """None before the first fill of the engines. BadData when it was lost: an iteration is closed only after it."""
    found = store.find(key := keys.serving(run))
    if found is None and store.find(keys.summary(run, 0)) is not None:
        raise BadData(
            f"run '{run}' has closed iterations but no declared version",
            where=key,
            hint="put the object back: it says which weights the engines serve",
        )
    return Serving.from_bytes(found.data, key) if found else None


def find_stop(store: Store, run: str) -> StopWish | None:
    """None while nobody wishes the run to stop."""
    found = store.find(key := keys.run_stop(run))
    return StopWish.from_bytes(found.data, key) if found else None


def find_evaluations(store: Store, record: RunRecord, version: int) -> list[Evaluation]:
    """Evaluations of the first and the serving version, and of those between that the configuration asks for."""
    every = record.config.evaluation.every
    wanted = sorted({0, version, *(range(0, version + 1, every) if every else ())})
    commits = [find_commit(store, StageKey(record.run, v, "evaluate")) for v in wanted]
    fields = Evaluation.model_fields
    return [Evaluation.model_validate({k: v for k, v in c.outputs.items() if k in fields}) for c in commits if c]


def find_boundaries(store: Store, run: str, version: int) -> list[BoundaryRecord]:
    """What the last reload of a version proved, in the order in which it was proven; a listing, so for people only."""
    found = [key for key in store.list(keys.weights_prefix(run, version) + "reloads/") if key.endswith(".json")]
    passages = [Passage.from_bytes(store.get(key).data, key) for key in found]
    if not passages:
        return []
    last = max(passages, key=lambda p: max(r.started_at for r in p.records)).reload
    records = [record for passage in passages if passage.reload == last for record in passage.records]
    return sorted(records, key=lambda r: (PASSED_IN.index(r.boundary), r.engine or ""))


def list_runs(store: Store) -> list[str]:
    """Names of all runs that have begun, also of those that lost their record."""
    marks = (keys.run_record, lambda run: keys.weights_manifest(run, 0))
    return [run for run in store.folders("runs/") if any(store.find(mark(run)) is not None for mark in marks)]


def find_outcome(store: Store, run: str) -> Outcome | None:
    """How the latest Workflow of the run ended; None while none has, or while a pool is held for the run."""
    if any(run_of_pool(store, pool) == run for pool in store.folders("pools/")):
        return None
    names = store.list(f"{keys.run_prefix(run)}outcomes/")
    outcomes = [Outcome.from_bytes(found.data, key) for key in names if (found := store.find(key)) is not None]
    return max(outcomes, key=lambda outcome: outcome.at, default=None)


def known_run(store: Store, run: str) -> RunRecord:
    record = find_run(store, run)
    if record is None:
        runs = list_runs(store)
        if run in runs:
            raise BadData(f"run '{run}' has no record", where=keys.run_record(run), hint="it was lost: put it back")
        raise BadConfig(f"no run '{run}'", hint=f"runs here: {', '.join(runs)}" if runs else "no runs here yet")
    return record
