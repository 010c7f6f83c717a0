"""The artifact repository of local runs: a folder, with keys as paths, packed as Argo packs."""

from __future__ import annotations

import os
import shutil
import tarfile
import uuid
from pathlib import Path

from colchis.components.errors import BadData


class Repository:
    """Artifacts under `folder` by key. An artifact is stored whole or not at all."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def path(self, key: str) -> Path:
        """Where a key lies; refuses one that leaves the repository."""
        parts = Path(key.strip("/")).parts
        if not parts or ".." in parts:
            raise BadData(f"artifact key {key!r} is empty or leaves the repository", where=str(self.folder))
        return self.folder.joinpath(*parts)

    def save(self, source: Path, key: str, *, pack: bool) -> None:
        """Stores a file or folder: as one tar+gzip when `pack`, else as it is (`archive: {none: {}}`)."""
        target = self.path(key)
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = target.with_name(f".{target.name}.{uuid.uuid4().hex}")
        if pack:
            with tarfile.open(temporary, "w:gz") as tar:
                tar.add(source, arcname=source.name)
        elif source.is_dir():
            shutil.copytree(source, temporary)
        else:
            shutil.copyfile(source, temporary)
        if target.is_dir():
            shutil.rmtree(target)
        os.replace(temporary, target)

    def load(self, key: str, target: Path, unpack: bool) -> bool:
        """Puts an artifact at `target`; False when there is none. A tar is unpacked when `unpack`, as Argo does."""
        source = self.path(key)
        if not source.exists():
            return False
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, target, dirs_exist_ok=True)
        elif unpack and tarfile.is_tarfile(source):
            self._unpack(source, target)
        else:
            shutil.copyfile(source, target)
        return True

    def _unpack(self, source: Path, target: Path) -> None:
        """The single member at the top of the archive becomes `target`, whatever it was called."""
        temporary = target.with_name(f".{target.name}.{uuid.uuid4().hex}")
        temporary.mkdir()
        try:
            with tarfile.open(source) as tar:
                tar.extractall(temporary, filter="data")
            members = list(temporary.iterdir())
            if target.is_dir() and len(members) == 1 and members[0].is_dir():
                shutil.copytree(members[0], target, dirs_exist_ok=True)
            else:
                os.replace(members[0] if len(members) == 1 else temporary, target)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
