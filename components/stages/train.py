"""train: weights v_i and a batch in, weights v_(i+1) out, by one commit that holds everything."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

import click

from colchis.components.logs import event
from colchis.components.records.batch import Batch, read_batch
from colchis.components.records.weights import Adapter, Delta, Probe, WeightsManifest
from colchis.components.stages.batch import empty_batch
from colchis.components.stages.context import Stage, Stopwatch, scratch, stage_command
from colchis.components.store import Attempt, Commit, Payload, read_input
from colchis.components.weights.delta import encode
from colchis.components.weights.export import ADAPTER
from colchis.components.weights.manifest import build, describing
from colchis.components.weights.publish import read_manifest

logger = logging.getLogger(__name__)

MANIFEST = "weights-manifest.json"
"""Payload of the train commit that `reload` publishes as runs/R/weights/vN/manifest.json."""


@stage_command("train", epilog="Example: train --run first --iteration 3")
@click.option("--iteration", type=click.IntRange(0), required=True)
def command(stage: Stage, iteration: int) -> None:
    """Make version iteration + 1: new weights, optimiser state, random state, cursor and metrics, in one commit."""
    if stage.find(iteration, "train") is None:
        train(stage, iteration)


def train(stage: Stage, iteration: int) -> None:
    """One iteration of training. An empty batch makes no step, and the same weights under the next version; so does an
    iteration that was skipped because this stage refused its batch."""
    from colchis.components.trainer import train_iteration  # torch, which no other stage pays for

    watch, i = Stopwatch(), iteration
    admission, batch_commit, skip = stage.admitted(i), stage.read(i, "batch"), stage.find(i, "skip")
    before = stage.read(i - 1, "train") if i > 0 else None
    with scratch() as folder:
        needs_base = stage.config.algorithm.kl_coefficient > 0 or stage.config.trainer.lora_rank > 0
        batch = _batch(stage, batch_commit) if skip is None else empty_batch(stage, i)
        model = _model_folder(stage, i, folder / "model")
        state = _state_folder(stage, before, folder / "state") if before else None
        loaded_s = watch.seconds
        result = train_iteration(
            stage.config,
            iteration=i,
            batch=batch,
            model_folder=model,
            state_folder=state,
            base_folder=None if not needs_base else model if i == 0 else _model_folder(stage, 0, folder / "base"),
            output=folder / "output",
        )
        trained_s = watch.seconds
        attempt = stage.attempt(i, "train")
        output = folder / "output"
        weights, adapter = [], []
        with describing(sorted((output / "weights").glob("*.safetensors"))) as tensors:
            for path in sorted(p for p in output.rglob("*") if p.is_file()):
                payload = attempt.upload(path.relative_to(output).as_posix(), path)
                if payload.name.startswith("weights/") and path.suffix == ".safetensors":
                    weights.append((payload, path))
                elif payload.name.startswith(ADAPTER):
                    adapter.append(payload.model_copy(update={"name": path.name}))
        manifest = build(
            run=stage.run,
            version=i + 1,
            base_version=i,
            kind=result.kind,
            files=weights,
            model=stage.record.model,
            step=result.optimiser_steps,
            tensors=tensors.result(),
        )
        if stage.config.reload.delta == "auto" and result.kind == "full":
            manifest = _with_delta(stage, attempt, manifest, model, [path for _, path in weights], folder / "delta")
        if adapter and stage.config.reload.adapters == "auto":
            said, tolerance = result.probe, stage.config.probe_tolerance
            probe = Probe(token_ids=said.token_ids, logprobs=said.logprobs, tolerance=tolerance)
            manifest = _with_adapter(stage, manifest, adapter, probe)
        attempt.put(MANIFEST, manifest.to_bytes())
        commit = attempt.commit(
            outputs={
                "version": i + 1,
                "kind": result.kind,
                "weights_digest": manifest.weights_digest,
                "cursor": admission.cursor.model_dump(),
                "steps": result.steps,
                "metrics": dict(result.metrics),
                "votes": [v.model_dump(mode="json") for v in result.votes],
                "extraction": result.extraction.model_dump(mode="json"),
                "probe": result.probe.model_dump(mode="json"),
                "seconds": watch.seconds,
                "parts_s": {
                    "load": loaded_s,
                    "train": round(trained_s - loaded_s, 4),
                    "upload": round(watch.seconds - trained_s, 4),
                },
            },
            inputs={c.key: c.digest for c in (batch_commit, skip, before) if c},
        )
    headline = {name: round(result.metrics[name], 6) for name in ("loss", "grad_norm") if name in result.metrics}
    event(logger, "version committed", version=i + 1, kind=result.kind, attempt=commit.attempt, **headline)


def _with_delta(
    stage: Stage, attempt: Attempt, manifest: WeightsManifest, model: Path, new: Sequence[Path], out: Path
) -> WeightsManifest:
    """The manifest with the way from the version before, if that is shorter. `model`: where the trainer read that one."""
    base = read_manifest(stage.store, stage.run, manifest.version - 1)
    encoded = encode(
        [model / file.name for file in base.files],
        new,
        out,
        base_version=base.version,
        version=manifest.version,
        base_digest=base.weights_digest,
        digest=manifest.weights_digest,
    )
    if encoded is None:
        return manifest
    share = encoded.bytes / encoded.full_bytes
    event(logger, "delta", version=manifest.version, share=round(share, 4), seconds=round(encoded.seconds, 4))
    delta = Delta(
        base_version=base.version, base_digest=base.weights_digest, payload=attempt.upload("weights/delta", out)
    )
    return WeightsManifest.model_validate({**manifest.model_dump(), "delta": delta})


def _with_adapter(stage: Stage, manifest: WeightsManifest, files: list[Payload], probe: Probe) -> WeightsManifest:
    """The manifest with what an engine needs that serves the adapter beside v0, and with what proves it."""
    config = stage.config.trainer
    adapter = Adapter(
        base_version=0,
        base_digest=read_manifest(stage.store, stage.run, 0).weights_digest,
        rank=config.lora_rank,
        alpha=config.lora_alpha,
        targets=config.lora_targets,
        files=files,
        probe=probe,
    )
    return WeightsManifest.model_validate({**manifest.model_dump(), "adapter": adapter})


def _batch(stage: Stage, commit: Commit) -> Batch:
    payload = {p.name: p for p in commit.payload}
    parquet = payload.get("batch.parquet")
    return read_batch(
        stage.store.read(commit.payload_named("denominators.json")),
        stage.store.read(parquet) if parquet else None,
        source=commit.key,
    )


def _model_folder(stage: Stage, version: int, folder: Path) -> Path:
    """A Hugging Face folder with the weights of `version`: configuration from the base model, tensors from the store."""
    folder.mkdir(parents=True)
    for file in read_input(stage.store, stage.record.model).files:
        if file.name.endswith(".json"):
            stage.store.download(file, folder / file.name)
    for file in read_manifest(stage.store, stage.run, version).files:
        stage.store.download(file, folder / file.name)
    return folder


def _state_folder(stage: Stage, before: Commit, folder: Path) -> Path:
    """Optimiser and random state of the commit before."""
    for file in before.payload:
        if file.name.startswith("state/"):
            path = folder / file.name.removeprefix("state/")
            path.parent.mkdir(parents=True, exist_ok=True)
            stage.store.download(file, path)
    return folder
