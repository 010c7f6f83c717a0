"""A version as a folder that other software reads: what a run was for."""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Callable
from pathlib import Path

from colchis.components.errors import BadConfig
from colchis.components.records.weights import WeightsManifest
from colchis.components.store import Payload, Store, keys
from colchis.components.weights.deadline import Deadline
from colchis.components.weights.fetch import fetch_model_folder, verify_files, write_index
from colchis.components.weights.publish import read_manifest

EXPORT_DEADLINE_S = 24 * 3600.0
"""A person watches, and ends it when it takes too long."""


def export(
    store: Store, run: str, version: int, folder: Path, *, on_file: Callable[[Payload], None] = lambda _: None
) -> WeightsManifest:
    """Make `folder` the Hugging Face model of a version: configuration and tokenizer of the base model, and its weights,
    read back from the disk and compared with the manifest.

    `folder` appears when it is complete; what an interrupted export leaves is `.NAME.*.part` beside it. BadConfig when it
    exists already, or the version does not; BadData when an object of the version is lost or damaged.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise BadConfig("something is there already", where=str(folder), hint="name a folder that is new or empty")
    if store.find(keys.weights_manifest(run, version)) is None:
        raise BadConfig(f"run '{run}' has no version {version}", hint=f"`colchis status {run}` shows what it has")
    manifest = read_manifest(store, run, version)
    folder.parent.mkdir(parents=True, exist_ok=True)
    part = folder.parent / f".{folder.name}.{uuid.uuid4().hex[:8]}.part"
    try:
        part.mkdir()
        fetch_model_folder(store, manifest.model, part, Deadline(EXPORT_DEADLINE_S))
        for payload in manifest.files:
            on_file(payload)
            store.download(payload, part / payload.name)
        verify_files(manifest, part)
        write_index(manifest, part)
        if folder.exists():
            folder.rmdir()
        part.rename(folder)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise
    return manifest
