"""Orchestration tax: a run by the interpreter against the same stages called one after the other in one process.

Both do the same iterations of examples/arithmetic on the same engines and store. Outside both clocks are services, `begin`,
the first fill, and the first iteration, beside which the interpreted run evaluates. Rounds alternate between the two; the
best median of an iteration of each side counts, so that a busy machine disturbs both alike.

Example: python benchmarks/orchestration.py --rounds 3 --iterations 8 --json
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import tempfile
import time
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import click

from colchis.components.__main__ import main as stage_main
from colchis.components.config import RunConfig, load, to_parameters
from colchis.components.store import Store
from colchis.workflows.home import Home, start_store
from colchis.workflows.local.calls import Event, EventKind
from colchis.workflows.local.interpreter import Interpreter
from colchis.workflows.local.parents import WarmLauncher
from colchis.workflows.local.services import Pool, start_pool
from colchis.workflows.render import TEMPLATES, read_templates
from colchis.workflows.request import pin_files
from colchis.workflows.runs import pool_environment, run_secrets

EXAMPLE = Path(__file__).parents[1] / "examples" / "arithmetic" / "run.yaml"


def interpreted(run_name: str, config: RunConfig, store: Store, pool: Pool, folder: Path) -> float:
    """Median seconds of an iteration of the interpreter, from the end of a reload to the end of the next one."""
    ends: list[float] = []

    def note(event: Event) -> None:
        if event.kind is EventKind.NODE_FINISHED and event.node.endswith(".reload"):
            ends.append(time.monotonic())

    async def run() -> bool:
        launcher = WarmLauncher()
        interpreter = Interpreter(
            read_templates(TEMPLATES),
            work_dir=folder,
            environment={},
            secrets=run_secrets(store, pool),
            launcher=launcher,
            on_event=note,
        )
        arguments = {"run": run_name, "pool": pool.name, **to_parameters(config)}
        workflow: Mapping[str, Any] = {
            "apiVersion": "argoproj.io/v1alpha1",
            "kind": "Workflow",
            "metadata": {"name": run_name},
            "spec": {
                "workflowTemplateRef": {"name": "colchis-sync-cpu"},
                "arguments": {"parameters": [{"name": k, "value": v} for k, v in arguments.items()]},
            },
        }
        try:
            return (await interpreter.run(workflow)).succeeded
        finally:
            await launcher.close()

    if not asyncio.run(run()):
        raise click.ClickException(f"the interpreted run failed; its logs are in {folder}")
    return statistics.median(end - before for before, end in pairwise(ends))


def called(run_name: str, config: RunConfig, iterations: int) -> float:
    """Median seconds of an iteration of the same stages, called in this process."""

    def stage(name: str, *args: str) -> None:
        if (code := stage_main([name, "--run", run_name, "--pool", "bench", *args])) != 0:
            raise click.ClickException(f"stage {name} {' '.join(args)} ended with {code}")

    def reload(version: int) -> None:
        for boundary in ("store", "transfer", "buffer", "load", "cache"):
            stage("reload", "--version", str(version), "--boundary", boundary)

    sections = [part for name, text in to_parameters(config).items() for part in ("--section", f"{name}={text}")]
    stage("begin", *sections)
    reload(0)
    ends: list[float] = []
    for i in range(iterations):
        stage("rollout", "--iteration", str(i))
        stage("batch", "--iteration", str(i))
        stage("train", "--iteration", str(i))
        reload(i + 1)
        ends.append(time.monotonic())
    stage("close", "--workflow", run_name, "--status", "Succeeded")  # gives the pool to the next run
    return statistics.median(end - before for before, end in pairwise(ends))


@click.command(help=__doc__)
@click.option("--iterations", type=click.IntRange(2), default=10, show_default=True)
@click.option("--rounds", type=click.IntRange(1), default=3, show_default=True)
@click.option("--json", "as_json", is_flag=True, help="Print JSON for scripts.")
def main(iterations: int, rounds: int, as_json: bool) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory() as text:
        home = Home(Path(text))
        with start_store(home) as store:
            config = pin_files(load(EXAMPLE, [f"loop.iterations={iterations}"]), EXAMPLE, store)
            environment = store.settings.to_environment()
            with start_pool(
                "bench", replicas=2, kind="embedded", folder=home.pools, store_environment=environment
            ) as pool:
                os.environ.update({**environment, **pool_environment(pool)})
                direct_s, interpreted_s = [], []
                for number in range(rounds):
                    direct_s.append(called(f"called-{number}", config, iterations))
                    folder = home.folder / f"workflows-{number}"
                    interpreted_s.append(interpreted(f"interpreted-{number}", config, store, pool, folder))
    ratio = min(interpreted_s) / min(direct_s)
    if as_json:
        click.echo(json.dumps({"called_s": direct_s, "interpreted_s": interpreted_s, "ratio": ratio}))
    else:
        for name, seconds in (("called in one process", direct_s), ("by the interpreter", interpreted_s)):
            click.echo(f"{name:<23} {min(seconds):.3f} s an iteration, of {', '.join(f'{s:.3f}' for s in seconds)}")
        click.echo(f"{'ratio':<23} {ratio:.2f}")


if __name__ == "__main__":
    main()
