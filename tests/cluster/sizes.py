"""What a run costs the cluster as it goes on: seconds per iteration, memory of Argo's controller, etcd.

The last two are read from the processes of the harness; on a cluster of your own there is nothing to read."""

from __future__ import annotations

import statistics
import threading
import time
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import httpx
from prometheus_client.parser import text_string_to_metric_families

PIDS = Path("/run/colchis/pids")
ETCD = "http://127.0.0.1:2379/metrics"
EVERY_S = 5.0
COMPACTED_S = 1200.0
"""Longest wait for etcd to forget what was deleted: every five minutes the API server has it forget what is older than that."""
MB = 1e6


class Reading(NamedTuple):
    """Bytes."""

    controller: float
    """Resident memory of Argo's controller."""
    etcd_file: float
    etcd_in_use: float

    def __str__(self) -> str:
        controller, file, in_use = (value / MB for value in self)
        return f"controller {controller:.0f} MB, etcd's file {file:.0f} MB, in use {in_use:.0f} MB"


def read() -> Reading:
    status = Path(f"/proc/{(PIDS / 'argo').read_text().strip()}/status").read_text()
    resident = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS"))
    sizes, total = _etcd(), "etcd_mvcc_db_total_size"
    return Reading(1024.0 * resident, sizes[f"{total}_in_bytes"], sizes[f"{total}_in_use_in_bytes"])


def _etcd() -> dict[str, float]:
    families = text_string_to_metric_families(httpx.get(ETCD, timeout=10).text)
    return {sample.name: sample.value for family in families for sample in family.samples}


class Sampler:
    """Reads until the block ends. `readings` in order of time, the last one at its end; none on a cluster of your own."""

    def __init__(self) -> None:
        self.readings: list[Reading] = []
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._read, daemon=True)

    def __enter__(self) -> Sampler:
        if PIDS.exists():
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end.set()
        if self._thread.ident:
            self._thread.join()

    def _read(self) -> None:
        last = False
        while not last:
            last = self._end.wait(EVERY_S if self.readings else 0)
            try:
                self.readings.append(read())
            except (OSError, httpx.HTTPError):  # being restarted by a test
                continue


def collected() -> Reading:
    """When etcd has forgotten all that is deleted by now. TimeoutError when that takes too long."""
    now, end = _etcd()["etcd_debugging_mvcc_current_revision"], time.monotonic() + COMPACTED_S
    while _etcd()["etcd_debugging_mvcc_compact_revision"] < now:
        if time.monotonic() > end:
            raise TimeoutError(f"etcd was not compacted within {COMPACTED_S:g} s")
        time.sleep(EVERY_S)
    return read()


def iteration_seconds(workflows: list[dict[str, Any]]) -> list[float]:
    """Between the ends of iterations, over all windows."""
    ends = sorted(
        datetime.fromisoformat(node["finishedAt"]).timestamp()
        for workflow in workflows
        for node in workflow["status"]["nodes"].values()
        if node["displayName"].startswith("iterate(")
    )
    return [after - before for before, after in pairwise(ends)]


def first_and_last(seconds: list[float], count: int = 10) -> str:
    first, last = statistics.median(seconds[: count - 1]), statistics.median(seconds[-count:])
    return f"median seconds per iteration: first {count} {first:.1f}, last {count} {last:.1f}"
