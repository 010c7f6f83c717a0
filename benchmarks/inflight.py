"""What requests in flight lose by a reload: tokens thrown away, and seconds more, with each mode of the pause, in one run.

Clients keep an engine busy, each with one request after the other. Half of the turns go undisturbed; in the other half the
agent activates version after version, as far apart as `--every`. A request that ends as `abort` has lost its tokens and is
sent again, as a rollout does; its latency counts until it is answered. Turns alternate, and all answers of a kind count.
`call` and `pause` are medians of what the reloads report: how long the call took that paused the engine, and how long it then
stood still.

    python -m benchmarks.inflight --seconds 20 --json inflight.json
    python -m benchmarks.inflight --engine sglang
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import click
import httpx
from rich.console import Console
from rich.table import Table

from benchmarks.activation import COMMON, DEADLINE_S, MAKE_MODELS, RUN, SIZES, publish_versions
from colchis.components.store import Store
from colchis.components.weights import Agents, activate_all, prepare_all, read_manifest
from colchis.workflows.local.services import Pool, start_pool
from colchis.workflows.local.weed import Weed

Mode = Literal["undisturbed", "retract", "abort"]


@dataclass
class Answers:
    """Of one mode."""

    seconds: list[float] = field(default_factory=list)
    tokens: int = 0
    lost_tokens: int = 0
    aborted: int = 0
    pauses: list[dict[str, float]] = field(default_factory=list)
    """Of each reload: seconds of the call that paused the engine, and of the pause."""

    def percentile_s(self, percent: int) -> float:
        return statistics.quantiles(self.seconds, n=100)[percent - 1]


class Clients:
    """So many threads, each of which asks for `tokens` tokens, again and again."""

    def __init__(self, url: str, count: int, tokens: int, answers: Answers) -> None:
        self.url, self.tokens, self.answers = url, tokens, answers
        self._lock, self._end = threading.Lock(), threading.Event()
        self._threads = [threading.Thread(target=self._ask, args=(n,), daemon=True) for n in range(count)]

    def _ask(self, number: int) -> None:
        sampling = {"max_new_tokens": self.tokens, "ignore_eos": True}
        body = {"input_ids": [3 + number, 4, 5], "sampling_params": sampling, "return_logprob": True}
        with httpx.Client(base_url=self.url, timeout=DEADLINE_S) as client:
            while not self._end.is_set():
                started, lost, aborted = time.perf_counter(), 0, 0
                while True:
                    answer = client.post("/generate", json=body).raise_for_status().json()
                    if answer["meta_info"]["finish_reason"]["type"] != "abort":
                        break
                    lost, aborted = lost + len(answer["output_ids"]), aborted + 1
                with self._lock:
                    self.answers.seconds.append(time.perf_counter() - started)
                    self.answers.tokens += len(answer["output_ids"])
                    self.answers.lost_tokens += lost
                    self.answers.aborted += aborted

    def __enter__(self) -> Clients:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        for thread in self._threads:
            thread.join(DEADLINE_S)


async def reload_until(pool: Pool, store: Store, mode: Mode, end_s: float, every_s: float) -> list[dict[str, float]]:
    """Activate the two versions in turn until the time has come; what `Answers.pauses` has of each."""
    found: list[dict[str, float]] = []
    async with Agents([e.agent_url for e in pool.engines], pool.token) as agents:
        while time.monotonic() < end_s:
            manifest = read_manifest(store, RUN, len(found) % 2)
            await prepare_all(agents, manifest, deadline_s=DEADLINE_S)
            pause: Any = mode
            (record,) = await activate_all(agents, manifest, deadline_s=DEADLINE_S, pause=pause)
            found.append({name: record.proof[name] for name in ("pause_call_s", "pause_s")})
            await asyncio.sleep(max(0.0, min(every_s, end_s - time.monotonic())))
    return found


@contextmanager
def served(kind: str, size: str, folder: Path) -> Iterator[tuple[Pool, Store]]:
    """One engine that serves v0, with its agent."""
    fields = json.dumps({**SIZES[size], **COMMON})
    subprocess.run([sys.executable, "-c", MAKE_MODELS, str(folder / "models"), fields], check=True, capture_output=True)
    with Weed(folder / "weed") as weed:
        store = Store(weed.settings)
        publish_versions(store, folder / "models")
        environment = store.settings.to_environment()
        model = folder / "models" / "v0"
        with start_pool(
            "bench", replicas=1, kind=kind, folder=folder / "pool", store_environment=environment, model=model
        ) as pool:
            asyncio.run(reload_until(pool, store, "retract", time.monotonic() + 1.0, every_s=0.2))
            yield pool, store


@click.command(help=__doc__)
@click.option("--engine", "kind", type=click.Choice(["embedded", "sglang"]), default="embedded", show_default=True)
@click.option("--size", type=click.Choice(list(SIZES)), default="small", show_default=True)
@click.option("--clients", default=8, show_default=True, help="Requests in flight.")
@click.option("--tokens", default=256, show_default=True, help="Of each answer.")
@click.option("--seconds", default=15.0, show_default=True, help="Of each turn.")
@click.option("--every", "every_s", default=2.0, show_default=True, help="Seconds between two reloads.")
@click.option("--rounds", default=2, show_default=True, help="Turns of each mode.")
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Write the numbers to this file as well.")
def main(
    kind: str,
    size: str,
    clients: int,
    tokens: int,
    seconds: float,
    every_s: float,
    rounds: int,
    json_path: Path | None,
) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    modes: tuple[Mode, ...] = ("undisturbed", "retract", "abort")
    results = {mode: Answers() for mode in modes}
    with tempfile.TemporaryDirectory() as name, served(kind, size, Path(name)) as (pool, store):
        for _ in range(rounds):
            for mode in modes:
                with Clients(pool.engines[0].engine_url, clients, tokens, results[mode]):
                    end_s = time.monotonic() + seconds
                    if mode == "undisturbed":
                        time.sleep(seconds)
                    else:
                        results[mode].pauses += asyncio.run(reload_until(pool, store, mode, end_s, every_s))
    table = Table(title=f"{kind} engine, {clients} clients, {tokens} tokens an answer, {os.cpu_count()} cores")
    for column in ("mode", "reloads", "answers", "aborted", "tokens", "lost", "p50 s", "p99 s", "call s", "pause s"):
        table.add_column(column, justify="left" if column == "mode" else "right")
    for mode, a in results.items():
        counts = (len(a.pauses), len(a.seconds), a.aborted, a.tokens, a.lost_tokens)
        times = [a.percentile_s(50), a.percentile_s(99)]
        times += [statistics.median(p[name] for p in a.pauses) for name in ("pause_call_s", "pause_s") if a.pauses]
        table.add_row(mode, *map(str, counts), *(f"{s:.3f}" for s in times))
    Console().print(table)
    if json_path is not None:
        rows = [{"mode": mode, **asdict(answers)} for mode, answers in results.items()]
        json_path.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
