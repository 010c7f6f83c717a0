"""Objects that were changed or lost after their commit, and two processes at one stage."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from colchis.components.config import parse, to_parameters
from colchis.components.store import Payload, StageKey, Store, keys, read_commit
from colchis.workflows.local.services import Pool, start_pool
from colchis.workflows.runs import pool_environment
from tests.run.conftest import DEADLINE_S

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

BATCH, TRAIN = StageKey("r", 1, "batch"), StageKey("r", 1, "train")
ROLLOUT, TRAINED_BEFORE = StageKey("r", 1, "rollout", 0), StageKey("r", 0, "train")


@dataclass(frozen=True)
class Stages:
    """The stage command on the store of a run, as a pod would call it."""

    store: Store
    scratch: Path
    pool: Pool | None = None

    def start(self, *args: str) -> subprocess.Popen[str]:
        environment = {**os.environ, **self.store.settings.to_environment(), "OMP_NUM_THREADS": "1"}
        environment |= {"TMPDIR": str(self.scratch)} | (pool_environment(self.pool) if self.pool else {})
        return subprocess.Popen(
            [sys.executable, "-m", "colchis.components", args[0], "--run", "r", *args[1:]],
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, *args: str) -> tuple[int, str]:
        """Exit code and what was said on stderr."""
        process = self.start(*args)
        said = process.communicate(timeout=DEADLINE_S)[1]
        return process.returncode, said


@pytest.fixture
def stages(opened: Store, tmp_path: Path) -> Stages:
    return Stages(opened, tmp_path)


@contextmanager
def without(store: Store, key: str) -> Iterator[bytes]:
    """The object is gone for as long as the block lasts; afterwards it is what it was."""
    body = store.get(key).data
    store.delete(key)
    try:
        yield body
    finally:
        store.put(key, body)


@contextmanager
def flipped(store: Store, key: str, position: int | None = None) -> Iterator[None]:
    """One bit of one byte is another for as long as the block lasts: the middle one, or that at `position`."""
    body = store.get(key).data
    at = len(body) // 2 if position is None else position
    store.put(key, body[:at] + bytes([body[at] ^ 1]) + body[at + 1 :])
    try:
        yield
    finally:
        store.put(key, body)


def payload(store: Store, stage: StageKey, prefix: str) -> Payload:
    return next(p for p in read_commit(store, stage).payload if p.name.startswith(prefix))


CONSUMED = {
    "weights": (TRAIN, TRAINED_BEFORE, "weights/"),
    "optimiser state": (TRAIN, TRAINED_BEFORE, "state/"),
    "batch": (TRAIN, BATCH, "batch.parquet"),
    "denominators": (TRAIN, BATCH, "denominators.json"),
    "trajectories": (BATCH, ROLLOUT, "trajectories-"),
    "verdicts": (BATCH, ROLLOUT, "verdicts-"),
}
"""Who reads the object, whose payload it is, and how its name begins."""


@pytest.mark.parametrize("damage", ["one bit", "lost"])
@pytest.mark.parametrize(("reader", "writer", "name"), CONSUMED.values(), ids=CONSUMED.keys())
def test_damaged_object_is_refused_by_name(
    stages: Stages, reader: StageKey, writer: StageKey, name: str, damage: str
) -> None:
    """Fault: training on bytes that are not those that were committed, or an error that doesn't say which object."""
    store = stages.store
    key = payload(store, writer, name).key
    broken = flipped(store, key) if damage == "one bit" else without(store, key)
    with without(store, reader.commit), broken:
        code, said = stages.run(reader.stage, "--iteration", "1")
        assert code == 65, said
        assert key in said
        assert store.find(reader.commit) is None


def test_unreadable_commit_is_refused_by_name(stages: Stages) -> None:
    """Fault: a damaged decision that is taken for a missing one, and decided again."""
    with without(stages.store, TRAIN.commit), flipped(stages.store, BATCH.commit, 0):
        code, said = stages.run("train", "--iteration", "1")
        assert code == 65, said
        assert BATCH.commit in said
        assert stages.store.find(TRAIN.commit) is None


def test_a_run_that_lost_its_record_is_not_begun_anew(stages: Stages) -> None:
    """Fault: weights of one configuration, continued under another that nothing compares them with."""
    sections = to_parameters(parse(json.loads(stages.store.get(keys.run_record("r")).data)["config"]))
    with without(stages.store, keys.run_record("r")):
        code, said = stages.run("begin", *(f"--section={name}={text}" for name, text in sections.items()))
        assert code == 65, said
        assert keys.run_record("r") in said
        assert stages.store.find(keys.run_record("r")) is None


@contextmanager
def changed(store: Store, key: str, output: str) -> Iterator[None]:
    """The document is still JSON and still valid, but one of its outputs says something else."""
    body = store.get(key).data
    document = json.loads(body)
    before = document["outputs"][output]
    document["outputs"][output] = (before[::-1] + "x") if isinstance(before, str) else before + 1
    store.put(key, json.dumps(document).encode())
    try:
        yield
    finally:
        store.put(key, body)


@pytest.mark.parametrize(
    ("reader", "writer", "output"),
    [(TRAIN, BATCH, "decision"), (BATCH, ROLLOUT, "tokens"), (TRAIN, TRAINED_BEFORE, "version")],
    ids=["batch", "rollout", "train"],
)
def test_changed_commit_is_refused_by_name(stages: Stages, reader: StageKey, writer: StageKey, output: str) -> None:
    """Fault: a decision that was edited after it was made, and is believed because it can be read."""
    store = stages.store
    with without(store, reader.commit), changed(store, writer.commit, output):
        code, said = stages.run(reader.stage, "--iteration", "1")
        assert code == 65, said
        assert writer.commit in said
        assert store.find(reader.commit) is None


def test_two_processes_train_once(stages: Stages) -> None:
    """Fault: two pods of one stage, two versions of the weights."""
    before = read_commit(stages.store, TRAIN)
    with without(stages.store, TRAIN.commit):
        racers = [stages.start("train", "--iteration", "1") for _ in range(2)]
        said = [r.communicate(timeout=DEADLINE_S)[1] for r in racers]
        assert [r.returncode for r in racers] == [0, 0], said
        commit = read_commit(stages.store, TRAIN)
        assert commit.attempt != before.attempt
        assert commit.outputs["weights_digest"] == before.outputs["weights_digest"]
        assert commit.outputs["version"] == 2
        assert all(commit.attempt in text for text in said), said
        assert stages.run("train", "--iteration", "1")[0] == 0
        assert read_commit(stages.store, TRAIN) == commit


@pytest.fixture
def pool(opened: Store, tmp_path: Path) -> Iterator[Pool]:
    """One engine with its agent, on the store of the finished run."""
    environment = opened.settings.to_environment()
    with start_pool("main", replicas=1, kind="embedded", folder=tmp_path / "pool", store_environment=environment) as p:
        yield p


def serve_the_first(stages: Stages) -> None:
    """Bring v1 into the engine, out of turn: meanwhile nothing is declared, or the agent would fill its engine with that."""
    with without(stages.store, keys.serving("r")):
        for boundary in ("store", "transfer", "buffer", "load"):
            code, said = stages.run("reload", "--version", "1", "--boundary", boundary)
            assert code == 0, said


def test_damaged_weights_never_reach_an_engine(opened: Store, pool: Pool, tmp_path: Path) -> None:
    """Fault: an engine that loads what the trainer didn't make, or that stops serving because of it."""
    stages, engine = Stages(opened, tmp_path, pool), pool.engines[0]
    serve_the_first(stages)
    key = payload(opened, TRAIN, "weights/").key
    with flipped(opened, key):
        code, said = stages.run("reload", "--version", "2", "--boundary", "store")
        assert code == 65, said
        assert "boundary 1" in said
        assert key in said
        code, said = stages.run("reload", "--version", "2", "--boundary", "transfer")
        assert code == 65, said
        assert "boundary 3" in said
        assert engine.agent_url in said, said
        assert key in said
    status = httpx.get(f"{engine.agent_url}/status", headers={"Authorization": f"Bearer {pool.token}"}).json()
    assert (status["version"], status["state"]) == (1, "serving")
    answer = httpx.post(
        f"{engine.engine_url}/generate",
        json={"input_ids": [18, 13, 19, 31], "sampling_params": {"max_new_tokens": 1}},
        timeout=60,
    )
    assert answer.json()["meta_info"]["weight_version"] == "1"
    assert json.loads(opened.get(keys.serving("r")).data)["version"] == 2


def test_each_boundary_names_itself_and_no_other(opened: Store, pool: Pool, tmp_path: Path) -> None:
    """Fault: an error in a log that leaves open where the weights went wrong, or names the place where it was noticed as well."""
    stages, engine = Stages(opened, tmp_path, pool), pool.engines[0]
    serve_the_first(stages)
    payload_key = payload(opened, TRAIN, "weights/").key

    def refused(boundary: str) -> str:
        code, said = stages.run("reload", "--version", "2", "--boundary", boundary)
        assert code == 65, said
        (named,) = set(re.findall(r"boundary \d \(\w+\)", said))
        return str(named)

    def passed(boundary: str) -> None:
        code, said = stages.run("reload", "--version", "2", "--boundary", boundary)
        assert code == 0, said

    with (
        without(opened, keys.weights_manifest("r", 2)),
        without(opened, payload(opened, TRAIN, "weights-manifest").key),
    ):
        assert refused("store") == "boundary 1 (store)"
    with flipped(opened, payload_key):
        assert refused("store") == "boundary 1 (store)"
        assert refused("transfer") == "boundary 3 (transfer)"
    with without(opened, keys.weights_manifest("r", 2)):
        assert refused("transfer") == "boundary 3 (transfer)"
    passed("store")
    for boundary, label in (("buffer", "boundary 2 (buffer)"), ("load", "boundary 4 (load)")):
        passed("transfer")
        (staged,) = (tmp_path / "pool").rglob("versions/r/v00000002/model.safetensors")
        body = bytearray(staged.read_bytes())
        body[-1] ^= 1
        staged.write_bytes(body)
        assert refused(boundary) == label
    for boundary in ("transfer", "buffer", "load"):
        passed(boundary)
    (base,) = (tmp_path / "pool").rglob("versions/r/v00000001")
    stranger = {"model_path": str(base), "weight_version": "2"}
    answer = httpx.post(f"{engine.engine_url}/update_weights_from_disk", json=stranger, timeout=60)
    assert answer.status_code == 200, answer.text
    assert refused("cache") == "boundary 5 (cache)"


def test_a_reload_never_goes_back(opened: Store, pool: Pool, tmp_path: Path) -> None:
    """Fault: a counter that began anew after a failover declares an old version, and rollouts take it for the newest."""
    stages = Stages(opened, tmp_path, pool)
    before = opened.get(keys.serving("r")).data
    serve_the_first(stages)
    code, said = stages.run("reload", "--version", "1", "--boundary", "cache")
    assert code == 65, said
    assert "serving.json declares v2, newer than v1 of this reload" in said
    assert opened.get(keys.serving("r")).data == before
    ready = httpx.get(f"{pool.engines[0].agent_url}/ready")
    assert (ready.status_code, ready.text) == (503, "serves v1, run 'r' declares v2")
