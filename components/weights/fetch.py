"""A version's files, moved from the store to a directory and verified there as they lie on the disk."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from colchis.components.errors import BadData
from colchis.components.records.weights import TensorEntry, WeightsManifest, weights_digest
from colchis.components.store import Payload, Store, Transfer, keys, read_input
from colchis.components.weights.deadline import Deadline
from colchis.components.weights.header import TensorSpan, read_header
from colchis.components.weights.manifest import not_finite
from colchis.components.weights.scan import in_parallel, scan

WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx", ".index.json")
"""Files of a base model that hold weights or point to them: a version brings its own."""


Download = Callable[[Payload, Path], Transfer]
"""How one object gets to a path: from the store, or by way of a cache."""


def fetch_files(
    manifest: WeightsManifest, folder: Path, deadline: Deadline, download: Download
) -> tuple[list[Transfer], str]:
    """A version's files into `folder`, and the weights digest of the manifest that they agree with: each file is read back from
    the disk while the next comes, and compared by xxh3-128 of every tensor. Compare sha256 too (`verify_files`) before
    anything is served.

    Raises as `download` and `verify_files`; PeerUnavailable when the deadline has passed before the last file.
    """
    transfers: list[Transfer] = []
    readings: list[Future[list[TensorEntry]]] = []
    with ThreadPoolExecutor(1, thread_name_prefix="read-back") as reader:
        try:
            for payload in manifest.files:
                deadline.check(f"fetch of weights v{manifest.version}", where=payload.key)
                transfers.append(download(payload, folder / payload.name))
                readings.append(reader.submit(verify_file, manifest, payload, folder, sha256=False))
            return transfers, weights_digest([entry for reading in readings for entry in reading.result()])
        except BaseException:
            reader.shutdown(cancel_futures=True)
            raise


def fetch_model_folder(store: Store, model: str, folder: Path, deadline: Deadline) -> list[Path]:
    """Download configuration and tokenizer of a base model into `folder`; files that are right stay as they are.

    BadData when the model has no config.json: no engine could load it.
    """
    chosen = [p for p in read_input(store, model).files if "/" not in p.name and not p.name.endswith(WEIGHT_SUFFIXES)]
    if not any(p.name == "config.json" for p in chosen):
        raise BadData("the base model has no config.json", where=keys.input_prefix(model))
    for payload in chosen:
        deadline.check("fetch of configuration and tokenizer", where=payload.key)
        store.download(payload, folder / keys.file_name(payload.name))
    return [folder / payload.name for payload in chosen]


def write_index(manifest: WeightsManifest, folder: Path) -> None:
    """The index that loaders want when a checkpoint has more than one file."""
    if len(manifest.files) > 1:
        index = {
            "metadata": {"total_size": manifest.tensor_bytes()},
            "weight_map": {t.name: t.file for t in manifest.tensors},
        }
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, sort_keys=True))


def verify_files(manifest: WeightsManifest, folder: Path, *, sha256: bool = True) -> str:
    """Read every byte of a version back from the disk; returns its weights digest, which is the manifest's. `sha256`: compare
    that beside xxh3-128.

    BadData names the file or tensor: missing, misplaced, of another type, shape or content, or not finite.
    """
    files = [verify_file(manifest, payload, folder, sha256=sha256) for payload in manifest.files]
    return weights_digest([entry for file in files for entry in file])


def verify_file(manifest: WeightsManifest, payload: Payload, folder: Path, *, sha256: bool = True) -> list[TensorEntry]:
    """One file of a version; its tensors. Raises as `verify_files`."""
    path = folder / payload.name
    spans = {span.name: span for span in read_header(path)}
    entries = {t.name: t for t in manifest.tensors if t.file == payload.name}
    if strangers := sorted(spans.keys() ^ entries.keys()):
        raise BadData(f"{path.name} and its manifest disagree about tensor '{strangers[0]}'", where=str(path))
    work: list[tuple[TensorSpan, TensorEntry]] = []
    for name, span in spans.items():
        entry = entries[name]
        if (span.dtype, span.shape) != (entry.dtype, entry.shape):
            raise BadData(
                f"tensor '{name}' is {span.dtype} {list(span.shape)}, "
                f"the manifest says {entry.dtype} {list(entry.shape)}",
                where=str(path),
            )
        work.append((span, entry))
    return in_parallel(lambda pair: _verified(path, *pair, sha256=sha256), work)


def _verified(path: Path, span: TensorSpan, entry: TensorEntry, *, sha256: bool) -> TensorEntry:
    found = scan(path, span, sha256=sha256)
    if found.not_finite:
        raise not_finite(span.name, found.not_finite, str(path))
    hashes = [("xxh3-128", found.xxh3_128, entry.xxh3_128), ("sha256", found.sha256, entry.sha256)]
    for what, actual, expected in hashes:
        if actual is not None and actual != expected:
            raise BadData(
                f"tensor '{span.name}' has other bytes than the manifest says: {what} {actual[:12]}, "
                f"expected {expected[:12]}",
                where=str(path),
                hint="the staged copy was changed after it was fetched: prepare the version again",
            )
    return entry


@dataclass(frozen=True)
class TransferSummary:
    """Boundary 3 in numbers."""

    bytes: int
    """That crossed the network."""
    seconds: float
    mb_per_s: float
    p95_s: float
    """95th percentile of the seconds per object."""
    retries: int

    @classmethod
    def of(cls, transfers: Sequence[Transfer]) -> TransferSummary:
        """Sum of some transfers made one after the other."""
        seconds, moved = sum(t.seconds for t in transfers), sum(t.bytes for t in transfers)
        ordered = sorted(t.seconds for t in transfers)
        p95_s = ordered[max(0, -(-len(ordered) * 95 // 100) - 1)] if ordered else 0.0
        return cls(
            bytes=moved,
            seconds=seconds,
            mb_per_s=moved / 1e6 / seconds if seconds else 0.0,
            p95_s=p95_s,
            retries=sum(t.retries for t in transfers),
        )
