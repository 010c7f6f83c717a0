"""What every stage shares: the store, the run, and where the outputs go."""

from __future__ import annotations

import functools
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click

from colchis.components.config import RunConfig
from colchis.components.environments import TextModel
from colchis.components.errors import BadConfig, BadData
from colchis.components.records.iteration import Admission, Summary
from colchis.components.records.rows import Rows
from colchis.components.records.run import RunRecord, Serving
from colchis.components.report import find_run, find_serving, find_summary
from colchis.components.store import (
    Attempt,
    Commit,
    InputManifest,
    Payload,
    StageKey,
    Store,
    StoreSettings,
    find_commit,
    keys,
    read_commit,
    read_input,
)
from colchis.components.store.pools import pool_lease
from colchis.components.weights.deadline import Deadline
from colchis.components.weights.fetch import fetch_model_folder


@dataclass(frozen=True)
class Stage:
    """One invocation of a stage command."""

    run: str
    pool: str
    store: Store
    outputs: Mapping[str, Path]
    _known: dict[str, Commit | Admission] = field(default_factory=dict, compare=False)
    """What is there stays as it is: it is read once."""

    def write(self, **values: object) -> None:
        """Write the outputs that the manifest asked for, those that are not None; names use '-' where Python uses '_'."""
        given = {name.replace("_", "-"): value for name, value in values.items()}
        for name, path in self.outputs.items():
            if name not in given:
                raise BadConfig(f"--out {name}: this stage has no such output; known: {', '.join(sorted(given))}")
            value = given[name]
            if value is None:
                continue
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(("true" if value else "false") if isinstance(value, bool) else str(value), encoding="utf-8")

    def key(self, iteration: int, stage: str, shard: int | None = None) -> StageKey:
        return StageKey(self.run, iteration, stage, shard)

    def find(self, iteration: int, stage: str, shard: int | None = None) -> Commit | None:
        key = self.key(iteration, stage, shard)
        commit = self._known.get(key.commit) or find_commit(self.store, key)
        if commit is not None:
            self._known[key.commit] = commit
        assert not isinstance(commit, Admission)
        return commit

    def read(self, iteration: int, stage: str, shard: int | None = None) -> Commit:
        return self.find(iteration, stage, shard) or read_commit(self.store, self.key(iteration, stage, shard))

    def attempt(self, iteration: int, stage: str, shard: int | None = None) -> Attempt:
        return Attempt(self.store, self.key(iteration, stage, shard))

    @functools.cached_property
    def record(self) -> RunRecord:
        """run.json with the latest recorded change applied."""
        record = find_run(self.store, self.run)
        if record is None:
            raise BadData(f"run '{self.run}' has not begun", where=keys.run_record(self.run), hint="run `begin` first")
        return record

    @property
    def config(self) -> RunConfig:
        return self.record.config

    @functools.cached_property
    def rows(self) -> Rows:
        """The environment's rows, from the inputs of the run."""
        manifest = read_input(self.store, self.record.rows)
        return Rows.from_parquet(self.store.read(input_file(manifest, "rows.parquet")))

    def serving(self) -> Serving | None:
        return find_serving(self.store, self.run)

    def summary(self, iteration: int) -> Summary | None:
        """None while the iteration is open; so also for the one before the first."""
        if iteration < 0:
            return None
        return find_summary(self.store, self.run, iteration)

    def admission(self, iteration: int) -> Admission | None:
        key = keys.admission(self.run, iteration)
        known = self._known.get(key)
        if known is None and (found := self.store.find(key)) is not None:
            known = self._known[key] = Admission.from_bytes(found.data, key)
        assert not isinstance(known, Commit)
        return known

    def admitted(self, iteration: int) -> Admission:
        """As `admission`, for stages that run only after it."""
        found = self.admission(iteration)
        if found is None:
            raise BadData(
                f"iteration {iteration} was never admitted",
                where=keys.admission(self.run, iteration),
                hint="its rollout runs first",
            )
        return found

    def claim_pool(self) -> None:
        """For stages that are about to ask the engines. BadConfig names the run that has them."""
        pool_lease(self.store, self.pool, self.run).acquire()

    def text_model(self, folder: Path) -> TextModel:
        """Tokenizer and sizes of the base model; `folder` takes its files."""
        return fetch_text_model(self.store, self.record.model, folder)


def fetch_text_model(store: Store, model: str, folder: Path) -> TextModel:
    """Of the input `model`; `folder` takes its files."""
    fetch_model_folder(store, model, folder, Deadline(600.0))
    return TextModel.from_folder(folder)


def outputs_of(commit: Commit) -> dict[str, Any]:
    """A commit's outputs, for readers who know what its stage writes."""
    return dict(commit.outputs)


def input_file(manifest: InputManifest, name: str) -> Payload:
    """One file of an input. BadData when it is not there."""
    for payload in manifest.files:
        if payload.name == name:
            return payload
    raise BadData(
        f"input {manifest.digest[:12]} has no file '{name}', only {', '.join(p.name for p in manifest.files)}",
        hint="upload a complete Hugging Face folder: config.json, tokenizer.json, *.safetensors",
    )


def stage_command(name: str, *, epilog: str = "") -> Callable[[Callable[..., None]], click.Command]:
    """Turn a function `(stage: Stage, **options) -> None` into the command of a stage."""

    def decorate(function: Callable[..., None]) -> click.Command:
        @click.command(name, help=function.__doc__, epilog=epilog or None)
        @click.option("--run", required=True, help="Name of the run.")
        @click.option("--pool", default="main", show_default=True, help="Pool of engines.")
        @click.option("--out", "outs", multiple=True, metavar="NAME=PATH", help="Write output NAME to PATH.")
        @functools.wraps(function)
        def wrapper(run: str, pool: str, outs: tuple[str, ...], **options: Any) -> None:
            for option, value in (("--run", run), ("--pool", pool)):
                keys.name(option, value)
            outputs = {out.partition("=")[0]: Path(out.partition("=")[2]) for out in outs}
            store = Store(StoreSettings.from_environment())
            with pool_lease(store, pool, run).kept():  # a stage may take longer than the lease lasts
                function(Stage(run, pool, store, outputs), **options)

        return wrapper

    return decorate


@contextmanager
def scratch() -> Iterator[Path]:
    """A folder of the process's own, gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="colchis-") as folder:
        yield Path(folder)


class Progress:
    """`N/M` for Argo's progress column, and the local runner's."""

    def __init__(self, total: int) -> None:
        self.total, self.done = max(total, 1), 0
        self.path = os.environ.get("ARGO_PROGRESS_FILE")

    def advance(self, n: int = 1) -> None:
        self.done += n
        if self.path:
            Path(self.path).write_text(f"{self.done}/{self.total}", encoding="utf-8")


class Stopwatch:
    """Seconds since it was made, on the monotonic clock."""

    def __init__(self) -> None:
        self._start = time.monotonic()

    @property
    def seconds(self) -> float:
        return round(time.monotonic() - self._start, 4)
