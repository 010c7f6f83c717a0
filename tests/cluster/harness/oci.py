"""Writes OCI image archives that `ctr image import` takes, without a registry and without a build daemon."""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

_MANIFEST = "application/vnd.oci.image.manifest.v1+json"
_CONFIG = "application/vnd.oci.image.config.v1+json"
_LAYER = "application/vnd.oci.image.layer.v1.tar"


@dataclass(frozen=True)
class Image:
    """One image of one layer. `files` maps paths in the image to files or folders here; owners and modes are kept."""

    name: str
    files: Mapping[str, Path]
    entrypoint: tuple[str, ...] = ()
    user: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)
    skip: Iterable[str] = ()
    """Paths in the image, without a leading slash, whose content is left out (a folder itself stays)."""


def write(image: Image, archive: Path) -> None:
    """Packs `image` into the OCI archive `archive`, its layer uncompressed (import is faster than gunzip)."""
    layer = archive.with_suffix(".layer")
    with tarfile.open(layer, "w", format=tarfile.PAX_FORMAT) as tar:
        if "/" not in image.files:
            for folder in _parents(image.files):
                tar.addfile(_folder(folder, 0o755))
            tar.addfile(_folder("tmp", 0o1777))
        for target, source in sorted(image.files.items()):
            tar.add(source, arcname=target.strip("/") or ".", filter=_keep(tuple(image.skip)))
    layer_digest, layer_bytes = _sha256(layer), layer.stat().st_size

    config = _json(
        {
            "architecture": "amd64",
            "os": "linux",
            "config": {
                "Entrypoint": list(image.entrypoint) or None,
                "User": image.user,
                "Env": [f"{k}={v}" for k, v in sorted(image.environment.items())],
            },
            "rootfs": {"type": "layers", "diff_ids": [layer_digest]},
            "history": [{"created_by": "tests/cluster/harness/oci.py"}],
        }
    )
    manifest = _json(
        {
            "schemaVersion": 2,
            "mediaType": _MANIFEST,
            "config": {"mediaType": _CONFIG, "digest": _digest(config), "size": len(config)},
            "layers": [{"mediaType": _LAYER, "digest": layer_digest, "size": layer_bytes}],
        }
    )
    names = {"io.containerd.image.name": image.name, "org.opencontainers.image.ref.name": image.name.split(":")[-1]}
    entry = {"mediaType": _MANIFEST, "digest": _digest(manifest), "size": len(manifest), "annotations": names}
    with tarfile.open(archive, "w") as tar:
        _add_bytes(tar, "oci-layout", b'{"imageLayoutVersion":"1.0.0"}')
        _add_bytes(tar, "index.json", _json({"schemaVersion": 2, "manifests": [entry]}))
        for blob in (config, manifest):
            _add_bytes(tar, _blob(_digest(blob)), blob)
        tar.add(layer, arcname=_blob(layer_digest))
    layer.unlink()


def _parents(files: Iterable[str]) -> list[str]:
    return sorted({str(p).strip("/") for f in files for p in Path("/", f).parents if str(p) != "/"} - {"tmp"})


def _keep(skip: tuple[str, ...]) -> Callable[[tarfile.TarInfo], tarfile.TarInfo | None]:
    def keep(info: tarfile.TarInfo) -> tarfile.TarInfo | None:
        path = info.name.removeprefix("./")
        return None if any(path.startswith(s + "/") for s in skip) else info

    return keep


def _folder(name: str, mode: int) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.mode = tarfile.DIRTYPE, mode
    return info


def _add_bytes(tar: tarfile.TarFile, name: str, data: bytes) -> None:
    info = tarfile.TarInfo(name)
    info.size, info.mode = len(data), 0o644
    tar.addfile(info, io.BytesIO(data))


def _json(value: object) -> bytes:
    return json.dumps(value).encode()


def _digest(data: bytes) -> str:
    return "sha256:" + hashlib.sha256(data).hexdigest()


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return "sha256:" + hashlib.file_digest(file, "sha256").hexdigest()


def _blob(digest: str) -> str:
    return "blobs/" + digest.replace(":", "/")
