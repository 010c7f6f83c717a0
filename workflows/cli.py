"""The `colchis` command."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any, NoReturn

import click

import colchis
from colchis.components.errors import BadData, ColchisError, refused_by_system
from colchis.workflows.cluster_commands import COMMANDS
from colchis.workflows.options import CONFIG, JSON, RUN, RUN_NAME, SET, SHAPE, Name, example, write_text

INTERRUPTED = 130
"""Exit code of what Ctrl-C ended: 128 and the number of the signal, as shells have it."""


class _Cli(click.Group):
    """Turns Colchis' own errors into one message and their exit code."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            click.echo("interrupted", err=True)
            ctx.exit(INTERRUPTED)
        except ColchisError as e:
            _end(ctx, e)
        except (OSError, ExceptionGroup) as e:
            if (refusal := _refused_by_system(e)) is None:
                raise
            _end(ctx, refusal)


def _refused_by_system(error: Exception) -> ColchisError | None:
    if isinstance(error, ExceptionGroup):
        return next((refusal for e in error.exceptions if (refusal := _refused_by_system(e)) is not None), None)
    return refused_by_system(error, os.environ.get("COLCHIS_HOME", "")) if isinstance(error, OSError) else None


def _end(ctx: click.Context, error: ColchisError) -> NoReturn:
    click.echo(f"{click.style('error', fg='red', bold=True)}: {error}", err=True)
    ctx.exit(error.exit_code)


@click.group(cls=_Cli, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(colchis.__version__, prog_name="colchis")
def main() -> None:
    """RL post-training of language models as Argo Workflows, on a laptop or a cluster.

    Shell completion: eval "$(_COLCHIS_COMPLETE=bash_source colchis)" (or zsh_source, fish_source).
    """


@main.command()
@CONFIG
@SET
@JSON
@example("colchis validate examples/arithmetic/run.yaml --set loop.iterations=200")
def validate(config: Path, assignments: tuple[str, ...], as_json: bool) -> None:
    """Check a configuration file; names every field that is wrong."""
    from colchis.components.config import load

    run = load(config, assignments)
    if as_json:
        click.echo(
            json.dumps(
                {"digest": run.digest(), "identity": run.identity_digest(), "config": run.model_dump(mode="json")}
            )
        )
    else:
        click.echo(
            f"{config}: valid (mode {run.mode}, digest {run.digest()[:12]}, identity {run.identity_digest()[:12]})"
        )


@main.command()
@CONFIG
@SET
@RUN_NAME
@click.option("--pool", type=Name(), help="Pool of engines. [default: the one that is up, or main]")
@click.option("--engines", type=click.IntRange(1, 64), help="Engines in the pool. [default: those that are up, or 2]")
@click.option(
    "--engine",
    "kind",
    type=click.Choice(["embedded", "sglang"]),
    help="Kind of engine. [default: the one that is up, or embedded]",
)
@SHAPE
@click.option("--exec", "exec_", is_flag=True, help="Start every stage as a fresh process (the slow reference).")
@click.option("--manifests", type=click.Path(path_type=Path), help="Folder of rendered templates.")
@JSON
@example("colchis run examples/arithmetic/run.yaml --set loop.iterations=20")
def run(
    config: Path,
    assignments: tuple[str, ...],
    name: str | None,
    pool: str | None,
    engines: int | None,
    kind: str | None,
    shape: str,
    exec_: bool,
    manifests: Path | None,
    as_json: bool,
) -> None:
    """Run a configuration on this machine, with the manifests that a cluster runs.

    Starts a store and engines on loopback, interprets the rendered Workflow, stops everything it started. Running it
    again continues where the run stands.
    """
    from colchis.components.config import load
    from colchis.workflows.progress import follow
    from colchis.workflows.render import TEMPLATES
    from colchis.workflows.request import default_name
    from colchis.workflows.runs import LocalRun

    local = LocalRun(
        config=load(config, assignments),
        source=config,
        run=name or default_name(config),
        pool=pool,
        engines=engines,
        kind=kind,
        shape=shape,
        exec_=exec_,
        manifests=manifests or TEMPLATES,
    )
    sys.exit(follow(local, as_json=as_json))


@main.command()
@click.option("--pool", type=Name(), default="main", show_default=True, help="Name of the pool.")
@click.option("--engines", default=2, show_default=True, type=click.IntRange(1, 64), help="Engines in the pool.")
@click.option("--engine", "kind", type=click.Choice(["embedded", "sglang"]), default="embedded", show_default=True)
@click.option(
    "--model", type=click.Path(path_type=Path, exists=True), help="Model folder, which SGLang wants at start."
)
@click.option("--detach", is_flag=True, help="Keep them in the background; end them with `colchis down`.")
@example("colchis up --detach")
def up(pool: str, engines: int, kind: str, model: Path | None, detach: bool) -> None:
    """Keep a store and a pool of engines running, so that runs start at once."""
    from colchis.workflows.home import Home
    from colchis.workflows.services import detach_services, keep_services

    home = Home.find()
    if detach:
        log = detach_services(home, sys.argv[1:])
        click.echo(f"up; log: {log}")
    else:
        keep_services(home, pool, engines, kind, model=model, on_ready=lambda: click.echo("up; Ctrl-C ends it"))


@main.command()
@example("colchis down")
def down() -> None:
    """End the services that `colchis up --detach` keeps."""
    from colchis.workflows.home import Home
    from colchis.workflows.services import end_services

    click.echo("down" if end_services(Home.find()) else "nothing was up")


@main.command()
@click.option("--to", "folder", type=click.Path(path_type=Path), help="Folder. [default: manifests/base/templates]")
@click.option("--check", is_flag=True, help="Change nothing; fail when the files differ from their source.")
@example("colchis render --check")
def render(folder: Path | None, check: bool) -> None:
    """Write the WorkflowTemplates that are defined in workflows/*.py."""
    from colchis.workflows import render as renderer

    folder = folder or renderer.TEMPLATES
    if check:
        difference = renderer.drift(folder)
        if difference:
            click.echo(difference, nl=False)
            click.echo(f"error: {folder} differs from its source; run `colchis render`", err=True)
            sys.exit(65)
        click.echo(f"{folder}: as rendered")
        return
    for path in renderer.write(folder):
        click.echo(str(path))


@main.command()
@click.argument("files", nargs=-1, type=click.Path(path_type=Path))
@JSON
@example("colchis lint manifests/base/templates/*.yaml")
def lint(files: tuple[Path, ...], as_json: bool) -> None:
    """Check manifests against Argo's closed schema and the semantic rules. Without FILES: what is rendered."""
    from colchis.workflows.lint import lint_files
    from colchis.workflows.render import TEMPLATES

    findings = lint_files(list(files) or sorted(TEMPLATES.glob("*.yaml")))
    if as_json:
        click.echo(json.dumps([f.__dict__ for f in findings]))
    else:
        for finding in findings:
            click.echo(str(finding))
        click.echo(f"{len(findings)} finding(s)", err=True)
    sys.exit(65 if findings else 0)


@main.command()
@JSON
@example("colchis runs")
def runs(as_json: bool) -> None:
    """List the runs in the store."""
    from colchis.components.report import list_runs
    from colchis.components.report import status as read_status
    from colchis.workflows.home import Home, open_store

    listed: list[dict[str, Any]] = []
    failed = 0
    with open_store(Home.find()) as store:
        for name in list_runs(store):
            try:
                s = read_status(store, name, last=1)
            except BadData as e:  # one damaged run does not hide the others
                failed = e.exit_code
                listed.append({"run": name, "error": str(e)})
                line = click.style(str(e), fg="red")
            else:
                listed.append(s.to_json())
                version = s.serving.version if s.serving else 0
                line = f"{version:>6}/{s.record.config.loop.iterations} iterations  {s.record.created_at}"
            if not as_json:
                click.echo(f"{name:24} {line}")
    if as_json:
        click.echo(json.dumps(listed))
    sys.exit(failed)


@main.command()
@RUN
@click.option("--last", default=10, show_default=True, type=click.IntRange(1), help="Iterations to show.")
@click.option("--watch", is_flag=True, help="Show changes until the run's last iteration is closed.")
@JSON
@example("colchis status arithmetic --last 5")
def status(run: str, last: int, watch: bool, as_json: bool) -> None:
    """Where a run stands: version, reward, gap, seconds per stage, evaluations.

    Reads the store in the COLCHIS_S3_* variables (a cluster's, for example), or the one on this machine.
    """
    from colchis.components.report import status as read_status
    from colchis.workflows.home import Home, open_store
    from colchis.workflows.progress import print_status, watch_status

    if watch and as_json:
        raise click.UsageError("--watch is for people, --json for scripts: choose one")
    with open_store(Home.find()) as store:
        if watch:
            watch_status(store, run, last)
            return
        found = read_status(store, run, last)
    if as_json:
        click.echo(json.dumps(found.to_json()))
    else:
        print_status(found)


@main.command()
@RUN
@click.option("--to", type=click.Path(path_type=Path), help="File. [default: RUN.html]")
@example("colchis report arithmetic --to report.html")
def report(run: str, to: Path | None) -> None:
    """Write a run's report: one static HTML page with its curves, boundaries and denominators."""
    from colchis.components.report import render_report
    from colchis.workflows.home import Home, open_store

    path = to or Path(f"{run}.html")
    with open_store(Home.find()) as store:
        write_text(path, render_report(store, run))
    click.echo(str(path))


@main.command()
@RUN
@click.option("--to", "folder", type=click.Path(path_type=Path), help="New folder. [default: RUN-vN]")
@click.option("--version", type=click.IntRange(0), help="Of the weights. [default: the one that the engines serve]")
@click.option("--adapter", is_flag=True, help="The adapter alone, of a run with trainer.lora_rank above 0.")
@JSON
@example("colchis export arithmetic --to my-model")
def export(run: str, folder: Path | None, version: int | None, adapter: bool, as_json: bool) -> None:
    """Write a version as a Hugging Face model folder: what transformers, SGLang and others load.

    Every byte is compared with the run's record on the way.
    """
    from colchis.components.report import find_serving, known_run
    from colchis.components.weights.export import export as export_model
    from colchis.components.weights.export import export_adapter
    from colchis.workflows.home import Home, open_store

    with open_store(Home.find()) as store:
        known_run(store, run)
        if version is None:
            serving = find_serving(store, run)
            version = serving.version if serving else 0
        to = folder or Path(f"{run}-v{version}")
        write_folder = export_adapter if adapter else export_model
        manifest = write_folder(
            store, run, version, to, on_file=lambda p: click.echo(f"{p.name}: {p.bytes / 1e6:.1f} MB", err=True)
        )
    if as_json:
        click.echo(json.dumps({"folder": str(to), "version": version, "weights_digest": manifest.weights_digest}))
    else:
        click.echo(f"{to}: version {version} of run {run}, weights {manifest.weights_digest[:12]}")


@main.command()
@RUN
@click.option("--reason", default="asked for", show_default=True)
@example('colchis stop arithmetic --reason "reward is flat"')
def stop(run: str, reason: str) -> None:
    """Let the running iteration end and start no further one. `colchis run` continues the run later."""
    from colchis.workflows.home import Home, open_store
    from colchis.workflows.runs import stop as wish_stop

    with open_store(Home.find()) as store:
        wish_stop(store, run, reason)
    click.echo(f"{run}: no further iteration will start")


@main.command()
@RUN
@click.option("--iteration", type=click.IntRange(0), required=True, help="The open iteration.")
@click.option("--reason", required=True, help="Goes into the record.")
@example('colchis skip arithmetic --iteration 12 --reason "shard 3 is lost"')
def skip(run: str, iteration: int, reason: str) -> None:
    """Commit an iteration as empty, on the record, after a refusal that will not go away."""
    from colchis.workflows.home import Home, open_store
    from colchis.workflows.runs import skip as commit_skip

    with open_store(Home.find()) as store:
        commit_skip(store, run, iteration, reason)
    click.echo(f"{run}: iteration {iteration} is skipped; continue with `colchis run`")


@main.command()
@click.argument("path", type=click.Path(path_type=Path, exists=True))
@example("colchis upload examples/arithmetic/base")
def upload(path: Path) -> None:
    """Upload a model or data file to the store; prints `input:SHA256` for configurations that pods read."""
    from colchis.workflows.home import Home, open_store
    from colchis.workflows.request import upload as upload_path

    with open_store(Home.find()) as store:
        click.echo(f"input:{upload_path(store, path)}")


@main.command()
@click.option("--check", is_flag=True, help="Change nothing; fail when the files differ from the code.")
@example("colchis reference")
def reference(check: bool) -> None:
    """Write docs/configuration.md, docs/configuration.schema.json and docs/agent.md from the code."""
    from colchis.components.config.reference import json_schema, markdown
    from colchis.components.weights.reference import markdown as agent_markdown
    from colchis.workflows.render import REPOSITORY

    files = {
        REPOSITORY / "docs" / "configuration.md": markdown(),
        REPOSITORY / "docs" / "agent.md": agent_markdown(),
        REPOSITORY / "docs" / "configuration.schema.json": json.dumps(json_schema(), indent=1) + "\n",
    }
    for path, text in files.items():
        if not check:
            path.write_text(text, encoding="utf-8")
            click.echo(str(path))
        elif not path.exists() or path.read_text(encoding="utf-8") != text:
            click.echo(f"error: {path} differs from the code; run `colchis reference`", err=True)
            sys.exit(65)


for command in COMMANDS:
    main.add_command(command)


if __name__ == "__main__":
    main()
