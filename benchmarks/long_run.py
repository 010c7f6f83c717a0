"""What a long run on Argo costs as it goes on: seconds per iteration, size of its Workflows, memory of the controller, etcd.

A run that never learns enough to stop, in windows. The first and the last ten iterations are compared; the controller's resident
memory and etcd's file are read every few seconds, and once more when the Workflows have been deleted and etcd has been compacted
(the API server does that every five minutes). Needs the test cluster:

    python -m tests.cluster.harness run .venv/bin/python -m benchmarks.long_run --iterations 60 --window 20
"""

from __future__ import annotations

import json
import statistics
import threading
import time
from collections.abc import Callable
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import Any

import click
import httpx
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.argo import EXAMPLE
from colchis.components.config import load
from colchis.components.store import Store, StoreSettings
from colchis.workflows.request import pin_files, workflow
from tests.cluster.client import Cluster
from tests.cluster.conftest import wait_for
from tests.cluster.test_windows import bytes_of, workflows_of

PIDS = Path("/run/colchis/pids")
ETCD = "http://127.0.0.1:2379/metrics"
EVERY_S = 5.0
COMPACTED_S = 900.0
"""Longest wait for etcd to forget what was deleted."""
DEADLINE_S = 7200.0
RUN = "long"
MB = 1e6

Json = Any


def controller_bytes() -> float:
    """Resident memory of Argo's controller."""
    status = Path(f"/proc/{(PIDS / 'argo').read_text().strip()}/status").read_text()
    return 1024.0 * next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS"))


def etcd_bytes() -> tuple[float, float]:
    """(file, in use)."""
    families = text_string_to_metric_families(httpx.get(ETCD, timeout=10).text)
    sizes = {s.name: s.value for f in families for s in f.samples if s.name.startswith("etcd_mvcc_db_total_size")}
    return sizes["etcd_mvcc_db_total_size_in_bytes"], sizes["etcd_mvcc_db_total_size_in_use_in_bytes"]


class Sampler:
    """Reads both until the block ends. `controller` and `etcd` are in bytes, in order of time."""

    def __init__(self) -> None:
        self.controller: list[float] = []
        self.etcd: list[tuple[float, float]] = []
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._read, daemon=True)

    def __enter__(self) -> Sampler:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end.set()
        self._thread.join()

    def _read(self) -> None:
        while True:
            self.controller.append(controller_bytes())
            self.etcd.append(etcd_bytes())
            if self._end.wait(EVERY_S):
                return


def iteration_seconds(workflows: list[Json]) -> list[float]:
    """Between the ends of iterations, over all windows."""
    ends = sorted(
        datetime.fromisoformat(node["finishedAt"]).timestamp()
        for w in workflows
        for node in w["status"]["nodes"].values()
        if node["displayName"].startswith("iterate(")
    )
    return [after - before for before, after in pairwise(ends)]


def compacted(in_use: float, progress: Callable[[float], None]) -> tuple[float, float]:
    """etcd's sizes when less is in use than `in_use`, or when that does not happen in time."""
    end = time.monotonic() + COMPACTED_S
    while True:
        sizes = etcd_bytes()
        if sizes[1] < in_use or time.monotonic() > end:
            return sizes
        progress(end - time.monotonic())
        time.sleep(EVERY_S)


def run_to_the_end(cluster: Cluster, store: Store, iterations: int, window: int) -> tuple[list[Json], Sampler]:
    """The Workflows of the run when all have ended well, and what was read beside it."""
    overrides = [f"loop.iterations={iterations}", f"loop.window={window}", f"loop.max_empty={iterations}"]
    config = pin_files(load(EXAMPLE, [*overrides, "trainer.learning_rate=1e-6"]), EXAMPLE, store)
    with cluster.scaled("colchis-engines-main", 2) as addresses:
        for address in addresses.values():
            wait_for(f"http://{address}:9000/live", deadline_s=180)
        with Sampler() as sampler:
            first = cluster.create(workflow(config, run=RUN, pool="main", shape="cpu"))
            assert first is not None
            for name in (first, *(f"{RUN}-from-{start}" for start in range(window, iterations, window))):
                status = cluster.wait([name], DEADLINE_S)[name]
                click.echo(f"{name}: {status['phase']}", err=True)
                if status["phase"] != "Succeeded":
                    raise click.ClickException(f"{name}: {status.get('message')}\n{cluster.logs(name)}")
    return workflows_of(cluster, RUN), sampler


@click.command(help=__doc__)
@click.option("--iterations", type=click.IntRange(4), default=60, show_default=True)
@click.option("--window", type=click.IntRange(1), default=20, show_default=True)
@click.option("--json", "as_json", is_flag=True, help="Print JSON for scripts.")
def main(iterations: int, window: int, as_json: bool) -> None:
    cluster, store = Cluster(), Store(StoreSettings.from_environment())
    workflows, sampler = run_to_the_end(cluster, store, iterations, window)
    seconds, ten = iteration_seconds(workflows), min(10, iterations // 2)
    for w in workflows:
        cluster.delete("workflows", w["metadata"]["name"])
    file_after, in_use_after = compacted(
        sampler.etcd[-1][1], lambda left_s: click.echo(f"waiting for etcd, {left_s:.0f} s at most", err=True)
    )
    result: dict[str, Any] = {
        "seconds_first": statistics.median(seconds[: ten - 1]),
        "seconds_last": statistics.median(seconds[-ten:]),
        "workflows": len(workflows),
        "nodes_most": max(len(w["status"]["nodes"]) for w in workflows),
        "kb_most": max(map(bytes_of, workflows)) / 1e3,
        "controller_mb": [v / MB for v in (sampler.controller[0], max(sampler.controller), sampler.controller[-1])],
        "etcd_file_mb": [sampler.etcd[0][0] / MB, sampler.etcd[-1][0] / MB, file_after / MB],
        "etcd_in_use_mb": [sampler.etcd[0][1] / MB, sampler.etcd[-1][1] / MB, in_use_after / MB],
    }
    if as_json:
        click.echo(json.dumps(result))
        return
    click.echo(f"seconds per iteration, median of the first {ten}: {result['seconds_first']:.1f}")
    click.echo(f"                               of the last {ten}: {result['seconds_last']:.1f}")
    click.echo(f"{len(workflows)} Workflows of at most {result['nodes_most']} nodes and {result['kb_most']:.0f} kB")
    for name, values, words in (
        ("controller, resident", result["controller_mb"], ("at first", "at most", "at the end")),
        ("etcd, its file", result["etcd_file_mb"], ("at first", "at the end", "when collected")),
        ("etcd, in use", result["etcd_in_use_mb"], ("at first", "at the end", "when collected")),
    ):
        click.echo(f"{name:<22}" + ", ".join(f"{v:.0f} MB {w}" for v, w in zip(values, words, strict=True)))


if __name__ == "__main__":
    main()
