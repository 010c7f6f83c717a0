"""The commands for a cluster: submit, request, logs; and diff, which compares runs wherever they ran."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from colchis.components.errors import BadConfig, BadData
from colchis.workflows.options import CONFIG, CONTEXT, JSON, NAMESPACE, POOL, RUN, RUN_NAME, SET, SHAPE, Name, example

if TYPE_CHECKING:
    from colchis.components.config import RunConfig


@click.command()
@CONFIG
@SET
@RUN_NAME
@POOL
@SHAPE
@NAMESPACE
@CONTEXT
@click.option("--server", metavar="URL", help="Submit through this Argo server; its token is read from $ARGO_TOKEN.")
@click.option("--watch", is_flag=True, help="Follow the run to its end; the exit code is 1 when it fails.")
@JSON
@example("colchis submit examples/arithmetic/run.yaml --run first -n colchis --watch")
def submit(
    config: Path,
    assignments: tuple[str, ...],
    name: str | None,
    pool: str,
    shape: str,
    namespace: str,
    context: str | None,
    server: str | None,
    watch: bool,
    as_json: bool,
) -> None:
    """Start a run on a cluster, or continue it: the same name and configuration go on where the run stands.

    Files that the configuration names are uploaded to the store in the COLCHIS_S3_* variables, which must be the
    cluster's.
    """
    from colchis.components.config import load
    from colchis.workflows.request import default_name, workflow

    if server is not None and watch:
        raise BadConfig(
            "--watch asks the API server, --server is for those who cannot",
            hint="submit without --watch; `colchis status RUN --watch` follows it by the store",
        )
    run = name or default_name(config)
    document = workflow(_pinned(load(config, assignments), config), run=run, pool=pool, shape=shape)
    if server is not None:
        from colchis.workflows.argo_server import submit as submit_to_server

        created = submit_to_server(server, os.environ.get("ARGO_TOKEN", ""), namespace, document)
    else:
        from colchis.workflows.cluster import Cluster

        created = Cluster(namespace, context=context).submit(document)
    if as_json:
        click.echo(json.dumps({"run": run, "workflow": created, "namespace": namespace}))
    else:
        click.echo(f"{created} (run {run})")
    if watch:
        sys.exit(follow(run, namespace, context, as_json=as_json))


def follow(run: str, namespace: str, context: str | None, *, as_json: bool) -> int:
    """Print what happens to the pods of a run until it ends. 0 when its newest Workflow succeeded, else 1.
    BadData when none is left to say so."""
    from colchis.workflows.cluster import Cluster

    cluster = Cluster(namespace, context=context)
    for change in cluster.follow(run):
        if as_json:
            click.echo(json.dumps(asdict(change)))
            continue
        colour = {"Succeeded": "green", "Failed": "red", "Error": "red"}.get(change.phase)
        what = f"{change.workflow}  {change.node}".rstrip()
        click.echo(f"{change.at}  {what}  {click.style(change.phase, fg=colour)}  {change.message}".rstrip())
    left = cluster.workflows(run)
    if not left:
        raise BadData(f"every Workflow of run '{run}' was deleted while it was followed", hint=f"colchis status {run}")
    return 0 if left[-1].get("status", {}).get("phase") == "Succeeded" else 1


@click.command()
@CONFIG
@SET
@click.option(
    "--run", "name", type=Name(), required=True, help="Name of the run; a hash of the request is added to it."
)
@POOL
@SHAPE
@click.option("--to", "folder", type=click.Path(path_type=Path), help="Folder for the file. [default: print it]")
@example("colchis request run.yaml --run sums --to manifests/runs/prod")
def request(config: Path, assignments: tuple[str, ...], name: str, pool: str, shape: str, folder: Path | None) -> None:
    """Write a run request for GitOps: committed where Argo CD or Flux looks for runs, it starts the run once.

    Files that the configuration names are uploaded when the COLCHIS_S3_* variables are set.
    """
    from colchis.components.config import load
    from colchis.workflows.render import to_yaml
    from colchis.workflows.request import REQUEST_HEADER
    from colchis.workflows.request import request as build

    document = build(_pinned(load(config, assignments), config), name=name, pool=pool, shape=shape)
    text = REQUEST_HEADER + to_yaml(document)
    if folder is None:
        click.echo(text, nl=False)
        return
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{document['metadata']['name']}.yaml"
    path.write_text(text, encoding="utf-8")
    click.echo(str(path))


def _pinned(config: RunConfig, source: Path) -> RunConfig:
    """The configuration with its files uploaded, if there is a store to upload them to."""
    from colchis.components.store import Store, StoreSettings
    from colchis.workflows.request import check_pinned, pin_files

    if os.environ.get("COLCHIS_S3_ENDPOINT"):
        config = pin_files(config, source, Store(StoreSettings.from_environment()))
    check_pinned(config)
    return config


@click.command()
@RUN
@click.option("--stage", help="Only this stage, e.g. train.")
@click.option("-n", "--namespace", envvar="COLCHIS_NAMESPACE", help="Namespace of a cluster. [default: this machine]")
@CONTEXT
@example("colchis logs arithmetic --stage train")
def logs(run: str, stage: str | None, namespace: str | None, context: str | None) -> None:
    """What the stages of a run wrote: of the pods that still exist, or of the runs on this machine."""
    if namespace is None:
        from colchis.workflows.home import Home
        from colchis.workflows.local.logs import lines

        for source, line in lines(Home.find().run_folder(run), stage):
            click.echo(f"{click.style(source, fg='cyan')}  {line}")
        return
    from colchis.workflows.cluster import Cluster

    cluster = Cluster(namespace, context=context)
    for pod in cluster.pods(run, stage):
        for container, line in cluster.log(pod):
            source = pod.metadata.name if container == "main" else f"{pod.metadata.name}/{container}"
            click.echo(f"{click.style(source, fg='cyan')}  {line}")


@click.command()
@click.argument("run_a", type=Name())
@click.argument("run_b", type=Name())
@JSON
@example("colchis diff sums-5f21a0f4 sums-9b1c77de")
def diff(run_a: str, run_b: str, as_json: bool) -> None:
    """Compare two runs of one store: what was asked, what ran it, what came out."""
    from colchis.components.report import status
    from colchis.workflows.compare import differences
    from colchis.workflows.home import Home, open_store

    with open_store(Home.find()) as store:
        found = differences(status(store, run_a), status(store, run_b))
    if as_json:
        click.echo(json.dumps([asdict(d) for d in found]))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table("", "field", run_a, run_b, box=None, pad_edge=False)
    for d in found:
        table.add_row(d.kind, d.field, *("-" if v is None else str(v) for v in (d.a, d.b)))
    console = Console()
    if not console.is_terminal:
        console.width = max(console.width, 160)
    console.print(table)


COMMANDS = (submit, request, logs, diff)
