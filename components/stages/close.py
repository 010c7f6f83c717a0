"""close: what a Workflow does last, however it ended."""

from __future__ import annotations

import logging

import click

from colchis.components.logs import event
from colchis.components.records.run import Outcome
from colchis.components.report import find_run, render_report
from colchis.components.stages.admit import open_iteration_of, stopped
from colchis.components.stages.context import Stage, stage_command
from colchis.components.store import keys
from colchis.components.store.pools import pool_lease

logger = logging.getLogger(__name__)


@stage_command("close", epilog="Example: close --run first --workflow first-x7k2p --status Succeeded")
@click.option("--workflow", required=True, help="Name of the Workflow that ends.")
@click.option("--status", required=True, help="Its status.")
def command(stage: Stage, workflow: str, status: str) -> None:
    """Record the outcome, write the report, and release the pool, unless the next window of the run waits for it."""
    stage.store.put(keys.run_outcome(stage.run, workflow), Outcome(workflow=workflow, status=status).to_bytes())
    begun = find_run(stage.store, stage.run) is not None
    if not (begun and status == "Succeeded" and _goes_on(stage)):
        pool_lease(stage.store, stage.pool, stage.run).release()
    if not begun:
        event(logger, "the run never began", run=stage.run, status=status)
        return
    stage.write(report=render_report(stage.store, stage.run))
    event(logger, "workflow closed", run=stage.run, workflow=workflow, status=status)


def _goes_on(stage: Stage) -> bool:
    """Whether this Workflow has started a successor."""
    open_iteration = open_iteration_of(stage)
    return open_iteration < stage.config.loop.iterations and not stopped(stage, open_iteration)
