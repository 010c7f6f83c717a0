"""A version becomes visible: its manifest under the version's own name, once, as the train commit decided it."""

from __future__ import annotations

from pathlib import Path

from colchis.components.errors import BadConfig, BadData
from colchis.components.records.weights import WeightsManifest
from colchis.components.store import Store, keys, read_input
from colchis.components.weights.checksums import ENGINE_DTYPES
from colchis.components.weights.manifest import build


def publish(store: Store, manifest: WeightsManifest) -> WeightsManifest:
    """Put the manifest at `runs/R/weights/vNNNNNNNN/manifest.json`; returns it.

    Whoever finds it missing calls this again with what the commit says, as often as needed. BadData when the version
    already has another content: two histories of one run.
    """
    key = keys.weights_manifest(manifest.run, manifest.version)
    data = manifest.to_bytes()
    if not store.create(key, data):
        present = WeightsManifest.from_bytes(store.get(key).data, key)
        if present != manifest:
            raise BadData(
                f"weights v{manifest.version} of run '{manifest.run}' is published with other content: "
                f"digest {present.weights_digest[:12]} of step {present.step}, "
                f"the commit says {manifest.weights_digest[:12]} of step {manifest.step}",
                where=key,
                hint="somebody else writes to this run: compare the train commits, and start a new run if they differ",
            )
    return manifest


def read_manifest(store: Store, run: str, version: int) -> WeightsManifest:
    """The manifest of a version. BadData when it is absent, malformed, or another version's."""
    key = keys.weights_manifest(run, version)
    manifest = WeightsManifest.from_bytes(store.get(key).data, key)
    if (manifest.run, manifest.version) != (run, version):
        raise BadData(f"this manifest is v{manifest.version} of run '{manifest.run}'", where=key)
    return manifest


def base_manifest(store: Store, *, run: str, model: str, dtype: str, scratch: Path) -> WeightsManifest:
    """v0 of a run: the base model as it lies in `inputs/<model>/`, described, not copied.

    `scratch` takes the files while they are read. BadConfig when the model is not stored in `dtype` (`float32`, ...):
    engines and trainer would hold different numbers from the start.
    """
    weights = [p for p in read_input(store, model).files if p.name.endswith(".safetensors") and "/" not in p.name]
    if not weights:
        raise BadConfig("the base model has no *.safetensors file", where=keys.input_prefix(model))
    for payload in weights:
        store.download(payload, scratch / payload.name)
    manifest = build(
        run=run,
        version=0,
        base_version=None,
        kind="full",
        files=[(payload, scratch / payload.name) for payload in weights],
        model=model,
        step=0,
    )
    types = {t.dtype for t in manifest.tensors}
    if {ENGINE_DTYPES.get(t, t) for t in types} != {dtype}:
        raise BadConfig(
            f"the base model's tensors are {', '.join(sorted(types))}, the configuration says {dtype}",
            where=keys.input_prefix(model),
            hint=f"set model.dtype, or save the model in {dtype} (`model.to(torch.{dtype}).save_pretrained(...)`)",
        )
    return manifest
