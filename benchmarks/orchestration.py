"""Orchestration tax: a run by the interpreter against the same stages called one after the other in one process.

Both do the same iterations of examples/arithmetic on the same engines and store; services, `begin` and the first fill are
outside both clocks. Prints seconds per iteration and their ratio.

Example: python benchmarks/orchestration.py --iterations 10 --json
"""

from __future__ import annotations

import asyncio
import json
import os
import tempfile
import time
from collections.abc import Mapping
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


def interpreted(config: RunConfig, store: Store, pool: Pool, folder: Path) -> float:
    """Seconds per iteration of the interpreter, between the end of the first fill and the end of the last iteration."""
    ends: list[float] = []

    def note(event: Event) -> None:
        if event.kind is EventKind.NODE_FINISHED and event.node.endswith((".fill", ".reload")):
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
        arguments = {"run": "interpreted", "pool": pool.name, **to_parameters(config)}
        workflow: Mapping[str, Any] = {
            "apiVersion": "argoproj.io/v1alpha1",
            "kind": "Workflow",
            "metadata": {"name": "interpreted"},
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
    return (ends[-1] - ends[0]) / (len(ends) - 1)


def called(config: RunConfig, iterations: int) -> float:
    """Seconds per iteration of the same stages, called in this process."""

    def stage(name: str, *args: str) -> None:
        if (code := stage_main([name, "--run", "called", "--pool", "bench", *args])) != 0:
            raise click.ClickException(f"stage {name} {' '.join(args)} ended with {code}")

    def reload(version: int) -> None:
        for boundary in ("store", "transfer", "buffer", "load", "cache"):
            stage("reload", "--version", str(version), "--boundary", boundary)

    sections = [part for name, text in to_parameters(config).items() for part in ("--section", f"{name}={text}")]
    stage("begin", *sections)
    reload(0)
    started = time.monotonic()
    for i in range(iterations):
        stage("rollout", "--iteration", str(i))
        stage("batch", "--iteration", str(i))
        stage("train", "--iteration", str(i))
        reload(i + 1)
    seconds = time.monotonic() - started
    stage("close", "--workflow", "called", "--status", "Succeeded")  # gives the pool to the next run
    return seconds / iterations


@click.command(help=__doc__)
@click.option("--iterations", default=10, show_default=True)
@click.option("--json", "as_json", is_flag=True, help="Print JSON for scripts.")
def main(iterations: int, as_json: bool) -> None:
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
                direct_s = called(config, iterations)
                interpreted_s = interpreted(config, store, pool, home.folder / "workflows")
    result = {"iterations": iterations, "called_s": direct_s, "interpreted_s": interpreted_s}
    result["ratio"] = interpreted_s / direct_s
    if as_json:
        click.echo(json.dumps(result))
    else:
        click.echo(f"called in one process   {direct_s:.3f} s an iteration")
        click.echo(f"by the interpreter      {interpreted_s:.3f} s an iteration")
        click.echo(f"ratio                   {result['ratio']:.2f}")


if __name__ == "__main__":
    main()
