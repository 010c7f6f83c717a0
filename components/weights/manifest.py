"""From safetensors files to the manifest of a version, and what a manifest must agree with before a byte is moved."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from colchis.components.errors import BadData
from colchis.components.records.weights import TensorEntry, WeightsManifest, weights_digest
from colchis.components.store.payload import Payload
from colchis.components.weights.architecture import EMBEDDING, HEAD, expected_shapes, is_tied
from colchis.components.weights.header import LARGEST_HEADER_BYTES, TensorSpan, read_header
from colchis.components.weights.scan import in_parallel, scan

_FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,200}\.safetensors")


def describe(files: Sequence[Path]) -> list[TensorEntry]:
    """Every tensor of the files, hashed, sorted by name. Streams: memory stays at a few chunks.

    BadData when a file is malformed, a tensor is in two files, or a number is infinite or NaN.
    """
    spans = [(path, span) for path in files for span in read_header(path)]
    seen: dict[str, Path] = {}
    for path, span in spans:
        if (other := seen.setdefault(span.name, path)) is not path:
            raise BadData(f"tensor '{span.name}' is in {other.name} and in {path.name}", where=str(path))
    return sorted(in_parallel(lambda pair: _entry(*pair), spans), key=lambda entry: entry.name)


def _entry(path: Path, span: TensorSpan) -> TensorEntry:
    found = scan(path, span)
    assert found.sha256 is not None
    if found.not_finite:
        raise not_finite(span.name, found.not_finite, str(path))
    return TensorEntry(
        name=span.name,
        dtype=span.dtype,
        shape=span.shape,
        bytes=span.bytes,
        file=path.name,
        sha256=found.sha256,
        xxh3_128=found.xxh3_128,
    )


@contextmanager
def describing(files: Sequence[Path]) -> Iterator[Future[list[TensorEntry]]]:
    """`describe` the files while the block does something else with them, such as uploading."""
    with ThreadPoolExecutor(1, thread_name_prefix="describe") as reader:
        yield reader.submit(describe, files)


def not_finite(name: str, count: int, where: str) -> BadData:
    """The refusal of a tensor with numbers that no engine may serve."""
    return BadData(
        f"tensor '{name}' has {count} infinite or NaN elements",
        where=where,
        hint="look at loss and grad_norm of the step that made it; an engine would serve it without complaint",
    )


def build(
    *,
    run: str,
    version: int,
    base_version: int | None,
    kind: Literal["full", "same"],
    files: Sequence[tuple[Payload, Path]],
    model: str,
    step: int,
    tensors: Sequence[TensorEntry] | None = None,
) -> WeightsManifest:
    """The manifest of a version whose files were uploaded as the payloads beside them. `tensors`: what `describe` says of the
    files, when somebody asked it already.

    A payload keeps its key; in the manifest it is named as the file will be called in an engine's directory.
    """
    entries = list(describe([path for _, path in files]) if tensors is None else tensors)
    return WeightsManifest(
        run=run,
        version=version,
        base_version=base_version,
        kind=kind,
        files=[payload.model_copy(update={"name": path.name}) for payload, path in files],
        tensors=entries,
        weights_digest=weights_digest(entries),
        model=model,
        step=step,
    )


def check(manifest: WeightsManifest, *, where: str, config: Mapping[str, Any], base: WeightsManifest | None) -> None:
    """Refuse a manifest that cannot be served, before anything is fetched.

    `config` is the model's config.json; `base` is v0 of the same run, the reference for families whose tensors the
    configuration does not tell. BadData names the file or the tensor.
    """

    def bad(what: str) -> BadData:
        return BadData(f"weights v{manifest.version}: {what}", where=where)

    for file in manifest.files:
        if not _FILE_NAME.fullmatch(file.name):
            raise bad(f"file name {file.name!r} is not a plain NAME.safetensors")
        content_bytes = sum(t.bytes for t in manifest.tensors if t.file == file.name)
        if not content_bytes <= file.bytes <= content_bytes + LARGEST_HEADER_BYTES + 8:
            raise bad(f"file '{file.name}' has {file.bytes} bytes, but its tensors have {content_bytes}")

    found = {t.name: t.shape for t in manifest.tensors}
    expected = expected_shapes(config)
    if expected is not None and is_tied(config) and HEAD in found:
        expected[HEAD] = expected[EMBEDDING]
        sha256 = {t.name: t.sha256 for t in manifest.tensors}
        if sha256[HEAD] != sha256.get(EMBEDDING):
            raise bad(f"config.json ties the head to the embedding, but '{HEAD}' has other bytes")
    if expected is None and base is not None:
        expected = {t.name: t.shape for t in base.tensors}
    if expected is not None:
        if missing := sorted(expected.keys() - found.keys()):
            raise bad(f"{len(missing)} tensors are missing, first '{missing[0]}'")
        if extra := sorted(found.keys() - expected.keys()):
            raise bad(f"{len(extra)} tensors do not belong to the model, first '{extra[0]}'")
        for name, shape in expected.items():
            if found[name] != shape:
                raise bad(f"tensor '{name}' has shape {list(found[name])}, the model's is {list(shape)}")
    if base is not None:
        types = {t.name: t.dtype for t in base.tensors}
        for tensor in manifest.tensors:
            if tensor.dtype != types.get(tensor.name, tensor.dtype):
                raise bad(f"tensor '{tensor.name}' is {tensor.dtype}, in v{base.version} it is {types[tensor.name]}")
