"""close: what a Workflow does last, however it ended."""

from __future__ import annotations

import logging

import click

from colchis.components.logs import event
from colchis.components.records.run import Outcome
from colchis.components.report import find_run, render_report
from colchis.components.stages.context import Stage, stage_command
from colchis.components.store import Lease, keys

logger = logging.getLogger(__name__)


@stage_command("close", epilog="Example: close --run first --workflow first-x7k2p --status Succeeded")
@click.option("--workflow", required=True, help="Name of the Workflow that ends.")
@click.option("--status", required=True, help="Its status.")
def command(stage: Stage, workflow: str, status: str) -> None:
    """Release the pool, record the outcome, and write the report."""
    stage.store.put(keys.run_outcome(stage.run, workflow), Outcome(workflow=workflow, status=status).to_bytes())
    Lease(stage.store, keys.pool_lease(stage.pool), holder=f"run {stage.run}", lease_s=600).release()
    if find_run(stage.store, stage.run) is None:
        event(logger, "the run never began", run=stage.run, status=status)
        return
    stage.write(report=render_report(stage.store, stage.run))
    event(logger, "workflow closed", run=stage.run, workflow=workflow, status=status)
