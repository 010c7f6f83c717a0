"""A version as a folder that other software reads: what a run was for."""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from colchis.components.errors import BadConfig
from colchis.components.records.weights import WeightsManifest
from colchis.components.store import Payload, StageKey, Store, keys, read_commit
from colchis.components.weights.deadline import Deadline
from colchis.components.weights.fetch import fetch_model_folder, verify_files, write_index
from colchis.components.weights.publish import read_manifest

EXPORT_DEADLINE_S = 24 * 3600.0
"""A person watches, and ends it when it takes too long."""
ADAPTER = "state/adapter/"
"""Where a train commit has its adapter."""

OnFile = Callable[[Payload], None]


def export(store: Store, run: str, version: int, folder: Path, *, on_file: OnFile = lambda _: None) -> WeightsManifest:
    """Make `folder` the Hugging Face model of a version: configuration and tokenizer of the base model, and its weights,
    read back from the disk and compared with the manifest.

    BadConfig when something is there already, or the version does not exist; BadData when an object of it is lost or
    damaged.
    """
    manifest = _manifest(store, run, version)
    with _new(folder) as part:
        fetch_model_folder(store, manifest.model, part, Deadline(EXPORT_DEADLINE_S))
        for payload in manifest.files:
            on_file(payload)
            store.download(payload, part / payload.name)
        verify_files(manifest, part)
        write_index(manifest, part)
    return manifest


def export_adapter(
    store: Store, run: str, version: int, folder: Path, *, on_file: OnFile = lambda _: None
) -> WeightsManifest:
    """Make `folder` the adapter of a version, as PEFT and SGLang read it; it belongs on the base model of the run.
    Raises as `export`, and BadConfig for a version that was trained without adapters."""
    manifest = _manifest(store, run, version)
    commit = read_commit(store, StageKey(run, version - 1, "train")) if version else None
    payloads = [p for p in commit.payload if p.name.startswith(ADAPTER)] if commit else []
    if not payloads:
        raise BadConfig(
            f"version {version} of run '{run}' has no adapter",
            hint="leave --adapter out for the whole model; adapters are trained with trainer.lora_rank above 0",
        )
    with _new(folder) as part:
        for payload in payloads:
            on_file(payload)
            store.download(payload, part / payload.name.removeprefix(ADAPTER))
    return manifest


def _manifest(store: Store, run: str, version: int) -> WeightsManifest:
    if store.find(keys.weights_manifest(run, version)) is None:
        raise BadConfig(f"run '{run}' has no version {version}", hint=f"`colchis status {run}` shows what it has")
    return read_manifest(store, run, version)


@contextmanager
def _new(folder: Path) -> Iterator[Path]:
    """A folder beside `folder` that takes its place when the block has ended well; else nothing is left."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise BadConfig("something is there already", where=str(folder), hint="name a folder that is new or empty")
    folder.parent.mkdir(parents=True, exist_ok=True)
    part = folder.parent / f".{folder.name}.{uuid.uuid4().hex[:8]}.part"
    try:
        part.mkdir()
        yield part
        if folder.exists():
            folder.rmdir()
        part.rename(folder)
    finally:
        shutil.rmtree(part, ignore_errors=True)
