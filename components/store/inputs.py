"""Inputs by content: models, tokenizers and datasets that runs name by digest and never by path."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Literal

from colchis.components.errors import BadConfig, BadData
from colchis.components.store import keys
from colchis.components.store.payload import Checksums, Payload
from colchis.components.store.record import Record
from colchis.components.store.store import Store
from colchis.components.store.transfers import CHUNK_BYTES


class InputManifest(Record):
    """The files of one input, sorted by name. Every file has a sha256: the digest of the input is made of them."""

    format: Literal[1] = 1
    files: list[Payload]

    @property
    def digest(self) -> str:
        """sha256 over the sorted lines `[name, bytes, sha256]` in JSON."""
        lines = sorted(json.dumps([file.name, file.bytes, file.sha256], ensure_ascii=False) for file in self.files)
        return hashlib.sha256("".join(line + "\n" for line in lines).encode()).hexdigest()


def upload_input(store: Store, folder: Path) -> str:
    """Store every file of `folder` by content; returns the digest. Idempotent: what an interrupted upload left is read
    back and not sent again.

    Names that begin with a dot are left out (caches and editors put things there that are not content); links are
    followed. The manifest is written last, so an input is there whole or not at all.
    """
    local = _read_folder(folder)
    digest = InputManifest(files=[payload for payload, _ in local]).digest
    if store.find(keys.input_manifest(digest)) is not None:
        read_input(store, digest)
        return digest
    files = []
    for payload, path in local:
        placed = payload.model_copy(update={"key": keys.input_file(digest, payload.name)})
        if not store.holds(placed):
            sent = store.upload(placed.key, path, name=placed.name)
            if (sent.bytes, sent.xxh3_128) != (placed.bytes, placed.xxh3_128):
                raise BadData(f"{path} changed while it was uploaded", where=placed.key, hint="run the command again")
        files.append(placed)
    store.create(keys.input_manifest(digest), InputManifest(files=files).to_bytes())
    read_input(store, digest)
    return digest


def read_input(store: Store, digest: str) -> InputManifest:
    """The manifest of an input. BadData when it is absent or is not what its name says."""
    key = keys.input_manifest(digest)
    manifest = InputManifest.from_bytes(store.get(key).data, key)
    if manifest.digest != digest:
        raise BadData(
            f"input {digest[:12]} has the content of {manifest.digest[:12]}", where=key, hint="upload it again"
        )
    return manifest


def download_input(store: Store, digest: str, folder: Path) -> InputManifest:
    """Fetch an input into `folder`, verified file by file; files that are there and right are not fetched again."""
    manifest = read_input(store, digest)
    for file in manifest.files:
        store.download(file, folder / keys.file_name(file.name))
    return manifest


def _read_folder(folder: Path) -> list[tuple[Payload, Path]]:
    if not folder.is_dir():
        raise BadConfig(f"{folder}: no such folder", hint="an input is a folder of files, e.g. a Hugging Face model")
    found = []
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if not path.is_file() or any(part.startswith(".") for part in name.split("/")):
            continue
        checksums = Checksums(sha256=True, xxh3_128=True)
        try:
            with path.open("rb", buffering=0) as file:
                while data := file.read(CHUNK_BYTES):
                    checksums.update(data)
        except OSError as error:
            raise BadConfig(f"{path}: cannot be read ({error.strerror})") from error
        found.append((Payload.measured(keys.file_name(name), name, checksums), path))
    if not found:
        raise BadConfig(f"{folder}: no files in it", hint="an input is a folder of files, e.g. a Hugging Face model")
    return found
