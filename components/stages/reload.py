"""reload: new weights into all engines, over five boundaries, each of which proves itself and leaves a record.

One command per boundary, in the order in which they can be observed: `store` (1), `transfer` (3), `buffer` (2),
`load` (4), `cache` (5). The first three touch nothing that serves; `load` is the only one that pauses an engine.
"""

from __future__ import annotations

import asyncio
import logging
import os
import tempfile
import uuid
from collections.abc import Sequence
from pathlib import Path

import click

from colchis.components.errors import BadData
from colchis.components.logs import event
from colchis.components.records.boundary import Boundary, BoundaryRecord, Passage
from colchis.components.records.iteration import Summary
from colchis.components.records.run import Serving
from colchis.components.records.weights import WeightsManifest
from colchis.components.report.iteration import iteration_page
from colchis.components.stages import sending
from colchis.components.stages.context import Stage, outputs_of, stage_command
from colchis.components.stages.summarise import summarise
from colchis.components.stages.train import MANIFEST
from colchis.components.store import Commit, Payload, keys
from colchis.components.weights import (
    Agents,
    activate_all,
    passing,
    prepare_all,
    probe_all,
    publish,
    read_manifest,
    verify_all,
    verify_published,
)

logger = logging.getLogger(__name__)


@stage_command("reload", epilog="Example: reload --run first --version 4 --boundary store")
@click.option("--version", type=click.IntRange(0), required=True, help="Version that the engines are to serve.")
@click.option("--boundary", type=click.Choice(["store", "transfer", "buffer", "load", "cache"]), required=True)
def command(stage: Stage, version: int, boundary: str) -> None:
    """Pass one of the five boundaries between the trainer's weights and the serving engines."""
    trained = stage.read(version - 1, "train") if version > 0 else None
    reload_id = _reload_id(first=boundary == "store")
    with passing(Boundary[boundary.upper()]):
        asyncio.run(_pass(stage, version, boundary, trained, reload_id))
    if boundary == "cache":
        summary, records = _close(stage, version, trained, reload_id)
        stage.write(version=version, report=None if summary is None else iteration_page(summary, records))


async def _pass(stage: Stage, version: int, boundary: str, trained: Commit | None, reload_id: str) -> None:
    knobs = stage.config.reload
    if boundary == "store":
        if trained is not None:
            _publish(stage, version, trained)
        records: Sequence[BoundaryRecord] = [verify_published(stage.store, stage.run, version)]
    else:
        if boundary == "transfer":
            stage.claim_pool()
        manifest = read_manifest(stage.store, stage.run, version)
        direct = knobs.transfer != "store"
        async with Agents.from_environment() as agents:
            match boundary:
                case "transfer":
                    if direct:
                        sending.refuse_without_torch()
                    records = await prepare_all(agents, manifest, direct=direct, deadline_s=knobs.prepare_deadline_s)
                    if sending.wants_copy(records):
                        records = [await asyncio.to_thread(sending.fetch_copy, stage, manifest), *records]
                case "buffer":
                    copies = await asyncio.to_thread(sending.verify_copy, manifest)
                    at_engines = await verify_all(agents, manifest, direct=direct, deadline_s=knobs.prepare_deadline_s)
                    records = [*copies, *at_engines]
                case "load":
                    with sending.sender_of(stage, manifest) as sender:
                        records = await activate_all(
                            agents, manifest, pause=knobs.pause, sender=sender, deadline_s=knobs.activate_deadline_s
                        )
                case _:
                    records = await probe_all(
                        agents,
                        manifest,
                        probe=outputs_of(trained).get("probe") if trained else None,
                        tolerance=stage.config.probe_tolerance,
                        deadline_s=knobs.activate_deadline_s,
                    )
    for record in records:
        fields = {"engine": record.engine, "version": version, "seconds": round(record.seconds, 4)}
        event(logger, f"boundary {record.boundary} {record.name}", **{**record.headline(), **fields})
    passage = Passage(reload=reload_id, records=list(records))
    stage.store.put(keys.reload_record(stage.run, version, reload_id, boundary), passage.to_bytes())


def _publish(stage: Stage, version: int, trained: Commit) -> None:
    """runs/R/weights/vN/manifest.json as a copy of what the train commit decided; re-created when missing."""
    entry = trained.payload_named(MANIFEST)
    manifest = WeightsManifest.from_bytes(stage.store.read(entry), entry.key)
    if manifest.version != version or manifest.weights_digest != trained.outputs["weights_digest"]:
        raise BadData(
            f"the train commit decided v{version} with digest {trained.outputs['weights_digest']}, "
            f"its manifest says v{manifest.version} with {manifest.weights_digest}",
            where=trained.key,
            hint="the objects changed after the commit; restore them: a version that is committed is never made again",
        )
    publish(stage.store, manifest)


def _reload_id(*, first: bool) -> str:
    """One id for the five containers of a pod, which share a folder for temporary files. Drawn by the process."""
    path = Path(tempfile.gettempdir()) / "colchis-reload"
    if not first and path.exists():
        return path.read_text(encoding="utf-8")
    reload_id = uuid.uuid4().hex
    staged = path.with_suffix(f".{os.getpid()}")
    staged.write_text(reload_id, encoding="utf-8")
    staged.replace(path)
    return reload_id


def _close(
    stage: Stage, version: int, trained: Commit | None, reload_id: str
) -> tuple[Summary | None, list[BoundaryRecord]]:
    """All engines agree: move serving.json, and close the iteration that made the version.

    Gives its summary (None for the first fill, which no iteration made) and what the boundaries recorded.
    """
    records: list[BoundaryRecord] = []
    payload: list[Payload] = []
    for boundary in ("store", "transfer", "buffer", "load", "cache"):
        key = keys.reload_record(stage.run, version, reload_id, boundary)
        body = stage.store.get(key).data
        payload.append(Payload.of(f"{boundary}.json", key, body))
        records += Passage.from_bytes(body, key).records
    _declare(stage, version, records)
    if trained is None:
        return None, records
    iteration = version - 1
    pause_s = max((r.proof.get("pause_s", 0.0) for r in records), default=0.0)
    if stage.find(iteration, "reload") is None:
        attempt = stage.attempt(iteration, "reload")
        for entry in payload:
            attempt.adopt(entry)
        attempt.commit(
            outputs={"version": version, "pause_s": pause_s, "seconds": round(_seconds(records), 4)},
            inputs={trained.key: trained.digest},
        )
    summary = stage.summary(iteration)
    if summary is None:
        summary = summarise(stage, iteration)
        stage.store.create(keys.summary(stage.run, iteration), summary.to_bytes())
    event(logger, "iteration closed", iteration=iteration, version=version)
    return summary, records


def _seconds(records: list[BoundaryRecord]) -> float:
    """Boundaries follow each other; engines pass one together."""
    longest: dict[int, float] = {}
    for r in records:
        longest[r.boundary] = max(longest.get(r.boundary, 0.0), r.seconds)
    return sum(longest.values())


def _declare(stage: Stage, version: int, records: list[BoundaryRecord]) -> None:
    """Compare-and-swap serving.json to `version`; never back, except that a restored fill repeats the same version."""
    manifest = read_manifest(stage.store, stage.run, version)
    engines = sorted({r.engine for r in records if r.engine})
    serving = Serving(run=stage.run, version=version, weights_digest=manifest.weights_digest, engines=engines)
    key = keys.serving(stage.run)
    while True:
        found = stage.store.find(key)
        if found is None:
            if stage.store.create(key, serving.to_bytes()):
                return
            continue
        current = Serving.from_bytes(found.data, key)
        if current.version > version:
            raise BadData(
                f"serving.json declares v{current.version}, newer than v{version} of this reload",
                where=key,
                hint="another Workflow moved the run on; let it finish",
            )
        if (current.version == version and current.engines == engines) or stage.store.replace(
            key, serving.to_bytes(), found.etag
        ):
            return
