"""begin: validate, create or continue the run, decide the window of this Workflow."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

import click

import colchis
from colchis.components.config import SECTIONS, DatasetConfig, RunConfig, from_parameters
from colchis.components.environments import check_prompts, generate_rows, open_environment
from colchis.components.errors import BadConfig, BadData
from colchis.components.grader import name_and_version
from colchis.components.logs import event
from colchis.components.records.rows import Rows
from colchis.components.records.run import Outcome, RunRecord, now
from colchis.components.report import find_run, find_stop
from colchis.components.stages.admit import open_iteration_of, reason_to_stop
from colchis.components.stages.context import Stage, fetch_text_model, scratch, stage_command
from colchis.components.stages.interface import check_interface
from colchis.components.store import download_input, keys, probe, read_input, upload_input
from colchis.components.weights.publish import base_manifest, publish

logger = logging.getLogger(__name__)

NEVER = 1_000_000_000
"""`every` when only the first and last version are evaluated: iteration 0 is a multiple of everything."""


@dataclass(frozen=True)
class Window:
    """Iterations [first, first + count) are this Workflow's; `more` asks for a successor that starts at `next`."""

    first: int
    count: int
    next: int
    more: bool


def window(config: RunConfig, *, start: int | None, open_iteration: int, stop: str | None) -> Window:
    """The part of the run that this Workflow does. A window that is closed already has count 0."""
    total, size = config.loop.iterations, config.loop.window
    begin = open_iteration if start is None else start
    if begin > open_iteration and not stop:  # the successor of a window that stopped early has nothing to do
        raise BadData(
            f"this window starts at iteration {begin}, but the run stands at {open_iteration}",
            hint="resume the earlier window (argo retry), or submit again without 'start'",
        )
    end = min(begin + size, total)
    first = max(begin, open_iteration)
    count = 0 if stop else max(0, end - first)
    return Window(first, count, end, more=not stop and end < total)


@stage_command("begin", epilog="Example: begin --run first --start 0 --section model='{source: input:12ab...}' ...")
@click.option("--template", default="", help="Name of the WorkflowTemplate that runs this.")
@click.option("--template-digest", default="", help="Its digest, as rendered.")
@click.option("--interface", type=int, help="What the template takes stages to be, as rendered.")
@click.option("--workflow", default="", help="Name of this Workflow.")
@click.option("--start", default="", help="First iteration of this window; empty: where the run stands.")
@click.option("--section", "sections", multiple=True, metavar="NAME=TEXT", help="One section, as YAML or JSON text.")
def command(
    stage: Stage,
    template: str,
    template_digest: str,
    interface: int | None,
    workflow: str,
    start: str,
    sections: tuple[str, ...],
) -> None:
    """Validate the configuration, create or continue the run, and decide the window of this Workflow."""
    check_interface(interface)
    given = dict(section.split("=", 1) for section in sections)
    probe(stage.store)
    asked = _asked(given)
    program = {"template": template, "template_digest": template_digest, "code_version": colchis.__version__}
    record = find_run(stage.store, stage.run)
    if record is None:
        if asked is None:
            raise BadConfig(
                f"run '{stage.run}' does not exist and no configuration was given",
                hint="pass the sections, e.g. with --parameter-file run.yaml",
            )
        record = _create(stage, asked, program)
    elif asked is not None and not _succeeded(stage, workflow):
        record = _continue(stage, record, asked, program)
        stage.store.delete(keys.run_stop(stage.run))
    _publish_base(stage, record)
    open_iteration = open_iteration_of(stage)
    wish = find_stop(stage.store, stage.run)
    stop = wish.reason if wish else reason_to_stop(record.config, stage.summary(open_iteration - 1))
    w = window(record.config, start=_start(start), open_iteration=open_iteration, stop=stop)
    last_version = open_iteration + w.count
    final = not w.more and stage.find(last_version, "evaluate") is None
    if w.count > 0 or final:
        stage.claim_pool()
    if stop:
        event(logger, "the run stops here", run=stage.run, reason=stop)
    event(
        logger,
        "window",
        run=stage.run,
        first=w.first,
        count=w.count,
        more=w.more,
        iterations=record.config.loop.iterations,
    )
    config = record.config
    serving = stage.serving()
    stage.write(
        # a reload that ended between serving.json and the summary has moved the run on: what is declared never goes back
        version=max(open_iteration, serving.version if serving else 0),
        first=w.first,
        count=w.count,
        next=w.next,
        more=w.more,
        fill=w.count > 0 or final,
        shards=config.rollout.shards,
        grade_shards=config.grader.shards if config.grader.placement == "step" else 0,
        every=config.evaluation.every or NEVER,
    )


def _succeeded(stage: Stage, workflow: str) -> bool:
    """Whether a Workflow of this name has done its part already: GitOps makes it anew after it was garbage-collected, and
    that is no wish of anybody's to go on, nor to have its settings back."""
    found = stage.store.find(key := keys.run_outcome(stage.run, workflow)) if workflow else None
    return found is not None and Outcome.from_bytes(found.data, key).status == "Succeeded"


def _start(text: str) -> int | None:
    if not text.strip():
        return None
    if not text.strip().isdigit():
        raise BadConfig(f"parameter 'start': expected a number of an iteration or nothing, found {text!r}")
    return int(text)


def _asked(given: dict[str, str]) -> RunConfig | None:
    """The configuration in the parameters, or None when all sections are empty (a successor)."""
    unknown = sorted(set(given) - set(SECTIONS))
    if unknown:
        raise BadConfig(f"section '{unknown[0]}' is unknown; known: {', '.join(SECTIONS)}")
    if not any(text.strip() for name, text in given.items() if name != "mode"):
        return None
    return from_parameters(given)


def _create(stage: Stage, config: RunConfig, program: dict[str, str]) -> RunRecord:
    if stage.store.find(keys.weights_manifest(stage.run, 0)) is not None:
        raise BadData(
            f"run '{stage.run}' has published weights but lost its record",
            where=keys.run_record(stage.run),
            hint="put the record back, or use another run name: what was trained belongs to the configuration it says",
        )
    if not config.model.source.startswith("input:"):
        raise BadConfig(
            f"model.source: a pod cannot read '{config.model.source}'",
            hint="launch with `colchis run|submit|request`, which upload files, or `colchis upload` and use input:SHA256",
        )
    name_and_version(config)  # a grader that is not installed would be found an iteration later
    model = config.model.source.removeprefix("input:")
    read_input(stage.store, model)
    with scratch() as folder:
        rows = generate_rows(config.environment, dataset=_dataset(stage, config, folder / "dataset"))
        (folder / "rows").mkdir()
        (folder / "rows" / "rows.parquet").write_bytes(rows.to_parquet())
        digest = upload_input(stage.store, folder / "rows")
        _check_prompts(stage, config, model, rows, folder / "model")
    record = RunRecord(
        **program,
        run=stage.run,
        config=config,
        config_digest=config.digest(),
        identity_digest=config.identity_digest(),
        rows=digest,
        model=model,
    )
    if stage.store.create(keys.run_record(stage.run), record.to_bytes()):
        event(logger, "run created", run=stage.run, config=record.config_digest[:12], rows=len(rows))
        return record
    winner = find_run(stage.store, stage.run)
    assert winner is not None
    return _continue(stage, winner, config, program)


def _check_prompts(stage: Stage, config: RunConfig, model: str, rows: Rows, folder: Path) -> None:
    """Every prompt must become token ids of the model and leave room for the turns, before any engine sees one."""
    text_model = fetch_text_model(stage.store, model, folder)
    turns = config.rollout.max_new_tokens * config.rollout.max_turns
    check_prompts(
        open_environment(config.environment),
        rows,
        text_model,
        longest_tokens=text_model.longest_tokens(config.trainer.micro_batch_tokens) - turns,
    )


def _dataset(stage: Stage, config: RunConfig, folder: Path) -> Path | None:
    """The file of a `dataset` environment, fetched; other environments bring their own prompts."""
    if not isinstance(config.environment, DatasetConfig):
        return None
    if not config.environment.source.startswith("input:"):
        raise BadConfig(
            f"environment.source: a pod cannot read '{config.environment.source}'",
            hint="launch with `colchis run`, which uploads files, or `colchis upload` and use input:SHA256",
        )
    download_input(stage.store, config.environment.source.removeprefix("input:"), folder)
    return folder


def _continue(stage: Stage, record: RunRecord, asked: RunConfig, program: dict[str, str]) -> RunRecord:
    """Same identity: resume, recording what changed outside it, and what runs it now. Another identity is another run."""
    before, after = record.config.identity(), asked.identity()
    if before != after:
        names = [n for n in sorted(before.keys() | after.keys()) if before.get(n) != after.get(n)]
        diff = "; ".join(f"{n}: {before.get(n)!r} -> {after.get(n)!r}" for n in names)
        raise BadConfig(
            f"run '{stage.run}' exists with another identity: {diff}",
            hint="use another run name, or restore these fields",
        )
    old = record.config.flat() | {name: getattr(record, name) for name in program}
    new = asked.flat() | program
    changed = {n: [old.get(n), new.get(n)] for n in sorted(old.keys() | new.keys()) if old.get(n) != new.get(n)}
    if not changed:
        return record
    update = {"config": asked, "config_digest": asked.digest(), "changed": changed, "created_at": now()}
    change = record.model_copy(update=update | program)
    number = 1
    while not stage.store.create(keys.run_change(stage.run, number), change.to_bytes()):
        number += 1
    event(logger, "configuration changed", run=stage.run, changed=changed)
    return change


def _publish_base(stage: Stage, record: RunRecord) -> None:
    """Version 0 is the base model; its manifest is a copy of what the input says."""
    if stage.store.find(keys.weights_manifest(stage.run, 0)) is not None:
        return
    with scratch() as folder:
        manifest = base_manifest(
            stage.store, run=stage.run, model=record.model, dtype=record.config.model.dtype, scratch=folder
        )
    publish(stage.store, manifest)
