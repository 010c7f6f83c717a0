"""A version out of the trainer's files into the store, and into an agent's buffer, against plain boto3 transfers.

    python -m benchmarks.prepare [--layers 24] [--rounds 3] [--apart] [--json FILE]

`publish` uploads the files and describes them (two hashes and the finiteness of every tensor); `prepare` (boundary 3) fetches
them, reads them back from the disk and compares xxh3-128 and finiteness; `reread` (boundary 2) compares both hashes and predicts
the engine's checksums, which is held against sha256 alone, in one thread. All move one file of float32 weights of a Qwen2. Both
sides talk to one SeaweedFS on loopback and take turns in one run; ratio = plain seconds / our seconds, of the best turns. The CPU
seconds beside them are those of the turns that took least, of both processes, and of the store's alone: on a machine whose cores
they fill, no ratio can be better than that of their sums. With `--apart` the store has half of the cores, and its clients
have the others, as if it were elsewhere (Linux).
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import boto3
import click
from rich.console import Console
from rich.table import Table

from benchmarks.transfers import plain_client
from colchis.components.agent.staging import Staging
from colchis.components.store import Store, StoreSettings, keys, upload_input
from colchis.components.weights import build, publish
from colchis.components.weights.deadline import Deadline
from colchis.components.weights.manifest import describing
from colchis.workflows.local.weed import Weed
from tests.weights.models import config_of, write_model

RUN = "benchmark"
DEADLINE_S = 3600.0


@click.command(help=__doc__)
@click.option("--layers", default=24, show_default=True, help="Each has 46 MB; the embedding has 131 MB.")
@click.option("--rounds", default=3, show_default=True, help="Turns that each side takes.")
@click.option("--apart", is_flag=True, help="Half of the cores for the store, and the others for its clients.")
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Write the numbers to this file as well.")
def main(layers: int, rounds: int, apart: bool, json_path: Path | None) -> None:
    shape: dict[str, Any] = {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": layers}
    shape |= {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 64}
    with tempfile.TemporaryDirectory() as name, Weed(Path(name) / "weed") as weed:
        model = write_model(Path(name) / "model", config_of(vocabulary=32000, **shape), seed=0)
        assert weed.pid is not None
        if apart:
            usable = sorted(os.sched_getaffinity(0))
            keep_to(weed.pid, usable[: len(usable) // 2])
            keep_to(os.getpid(), usable[len(usable) // 2 :])
        result = measure(weed.settings, weed.pid, model, Path(name), rounds)
    cores = f"{os.cpu_count()} cores{', half of them for the store' if apart else ''}"
    table = Table(title=f"{result['mb']} MB, {cores}, boto3 {boto3.__version__}")
    for column in ("", "ours s", "plain s", "ratio", "CPU: ours s", "plain s", "ratio", "of it the store, plain s"):
        table.add_column(column, justify="right" if column else "left")
    for what in ("publish", "prepare", "reread"):
        wall, cpu = (result[what][kind] for kind in ("wall", "cpu"))
        times = [f"{row[side]:.2f}" for row in (wall, cpu) for side in ("ours", "plain", "ratio")]
        table.add_row(what, *times, f"{result[what]['store_cpu']['plain']:.2f}")
    Console().print(table)
    if json_path:
        json_path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def keep_to(pid: int, cores: list[int]) -> None:
    """Let a process run on these cores only; threads that it will start inherit that."""
    for thread in Path(f"/proc/{pid}/task").iterdir():
        os.sched_setaffinity(int(thread.name), cores)


def cpu_s(pid: int) -> float:
    """CPU seconds that a process has used so far, its children not counted (Linux)."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def measure(settings: StoreSettings, weed: int, model: Path, scratch: Path, rounds: int) -> dict[str, Any]:
    """Best seconds of both sides, each way; `weed` is the store's process."""
    store, bucket = Store(settings), settings.bucket
    file, target = model / "model.safetensors", scratch / "target"
    digest = upload_input(store, model)
    plain = plain_client(settings)

    def publish_version() -> None:
        with describing([file]) as tensors:
            payload = store.upload(f"{keys.iteration_prefix(RUN, 0)}{time.time_ns()}/model.safetensors", file)
        manifest = build(
            run=f"{RUN}-{time.time_ns()}",
            version=0,
            base_version=None,
            kind="full",
            files=[(payload, file)],
            model=digest,
            step=0,
            tensors=tensors.result(),
        )
        publish(store, manifest)
        runs.append(manifest.run)

    def prepare_version() -> None:
        for staging in stagings:
            staging.close()
        stagings[:] = [Staging(scratch / "staging")]
        stagings[0].fill(store, runs[-1], 0, set(), Deadline(DEADLINE_S))

    def reread_version() -> None:
        _, was_here = stagings[0].fill(store, runs[-1], 0, set(), Deadline(DEADLINE_S))
        assert was_here

    def hash_plainly() -> None:
        with target.open("rb") as stream:
            hashlib.file_digest(stream, "sha256")

    stagings: list[Staging] = []
    runs: list[str] = []
    sides: dict[str, tuple[Callable[[], None], Callable[[], Any]]] = {
        "publish": (publish_version, lambda: plain.upload_file(str(file), bucket, "plain")),
        "prepare": (prepare_version, lambda: plain.download_file(bucket, "plain", str(target))),
        "reread": (reread_version, hash_plainly),
    }
    best: dict[tuple[str, str], dict[str, float]] = {}
    for number in range(rounds):
        for what, (ours, theirs) in sides.items():
            turns = [("ours", ours), ("plain", theirs)]
            for side, action in turns if number % 2 else reversed(turns):
                os.sync()  # nobody pays for the pages that the turn before has left to be written
                started_s, ours_s, stores_s = time.perf_counter(), cpu_s(os.getpid()), cpu_s(weed)
                action()
                wall_s, store_s = time.perf_counter() - started_s, cpu_s(weed) - stores_s
                turn = {"wall": wall_s, "cpu": cpu_s(os.getpid()) - ours_s + store_s, "store_cpu": store_s}
                before = best.get((what, side), turn)
                best[what, side] = {kind: min(turn[kind], before[kind]) for kind in turn}
        target.unlink()
        shutil.rmtree(scratch / "staging")
    result: dict[str, Any] = {"mb": round(file.stat().st_size / 1e6)}
    for what in sides:
        ours_best, plain_best = best[what, "ours"], best[what, "plain"]
        result[what] = {
            kind: {"ours": round(ours_best[kind], 3), "plain": round(plain_best[kind], 3)} for kind in ours_best
        }
        for kind in ("wall", "cpu"):
            result[what][kind]["ratio"] = round(plain_best[kind] / ours_best[kind], 3)
    return result


if __name__ == "__main__":
    main()
