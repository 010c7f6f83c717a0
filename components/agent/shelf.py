"""Adapters on the engine's own disk, beside the whole versions of `staging`: small, each in a folder of its own.

adapters/RUN/v00000012.filling/  being fetched
adapters/RUN/v00000012/          whole: adapter_config.json, adapter_model.safetensors, manifest.json
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from colchis.components.agent.staging import FILLING, Place, manifest_in, version_of
from colchis.components.errors import BadData
from colchis.components.records.weights import WeightsManifest
from colchis.components.store import Payload, Store, Transfer, keys
from colchis.components.weights.deadline import Deadline
from colchis.components.weights.header import read_header
from colchis.components.weights.manifest import not_finite
from colchis.components.weights.scan import scan

NAMES = ("adapter_config.json", "adapter_model.safetensors")


@dataclass(frozen=True)
class StagedAdapter:
    """An adapter that this process has read back from the disk."""

    manifest: WeightsManifest
    folder: Path
    transfers: tuple[Transfer, ...] = ()

    @property
    def name(self) -> str:
        return self.manifest.adapter_name

    @property
    def digest(self) -> str:
        assert self.manifest.adapter is not None
        return self.manifest.adapter.digest

    @property
    def files(self) -> list[Payload]:
        assert self.manifest.adapter is not None
        return self.manifest.adapter.files

    @property
    def tensors(self) -> int:
        """How many the adapter has."""
        return len(read_header(self.folder / NAMES[1]))

    @property
    def place(self) -> Place:
        return self.manifest.run, self.manifest.version


class Shelf:
    """The adapters under one folder. Whoever calls for a version holds that version's lock of `Staging`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder.absolute()
        self._staged: dict[Place, StagedAdapter] = {}

    def find(self, run: str, version: int) -> StagedAdapter | None:
        """The adapter, if this process has verified it."""
        return self._staged.get((run, version))

    def require(self, run: str, version: int) -> StagedAdapter:
        """The adapter, one of an agent before this process read back first. BadData when there is none, or it is damaged."""
        staged = self.find(run, version)
        if staged is not None:
            return staged
        folder = self._path(run, version)
        manifest = manifest_in(folder)
        if manifest is None or manifest.adapter is None or (manifest.run, manifest.version) != (run, version):
            raise BadData(
                f"the adapter of v{version} of run '{run}' is not prepared here",
                where=str(folder),
                hint="call prepare first",
            )
        return self.reread(StagedAdapter(manifest, folder))

    def fill(
        self, store: Store, manifest: WeightsManifest, keep: Collection[Place], deadline: Deadline
    ) -> tuple[StagedAdapter, bool]:
        """Fetch and verify the adapter of a version. (adapter, whether it was here already). Adapters that are neither in
        `keep` nor newer go. BadData when it may not be served; nothing of such a fetch stays behind."""
        assert manifest.adapter is not None
        place = (manifest.run, manifest.version)
        staged = self.find(*place)
        if staged is not None and staged.manifest == manifest:
            return self.reread(staged), True
        _check(manifest)
        self._collect({place, *keep})
        folder = self._path(*place)
        filling = folder.with_name(folder.name + FILLING)
        shutil.rmtree(filling, ignore_errors=True)
        shutil.rmtree(folder, ignore_errors=True)
        filling.mkdir(parents=True)
        try:
            transfers = []
            for payload in manifest.adapter.files:
                deadline.check(f"fetch of the adapter of weights v{manifest.version}", where=payload.key)
                transfers.append(store.download(payload, filling / payload.name))
            (filling / "manifest.json").write_bytes(manifest.to_bytes())
            _verify(manifest, filling)
            filling.rename(folder)
        except BaseException:
            shutil.rmtree(filling, ignore_errors=True)
            raise
        staged = self._staged[place] = StagedAdapter(manifest, folder, tuple(transfers))
        return staged, False

    def reread(self, staged: StagedAdapter) -> StagedAdapter:
        """The adapter after its bytes were read again. BadData when they changed: then it is gone from here."""
        try:
            _verify(staged.manifest, staged.folder)
        except BadData:
            self._staged.pop(staged.place, None)
            shutil.rmtree(staged.folder, ignore_errors=True)
            raise
        self._staged[staged.place] = staged
        return staged

    def versions(self) -> list[Place]:
        """Of the staged, verified adapters."""
        return sorted(self._staged)

    def _collect(self, keep: Collection[Place]) -> None:
        newest = {run: max(v for r, v in keep if r == run) for run, _ in keep}
        for folder in sorted(self.folder.glob("*/v*")):
            run, version = folder.parent.name, version_of(folder)
            if version is not None and (run, version) not in keep and version <= newest.get(run, 1 << 62):
                self._staged.pop((run, version), None)
                shutil.rmtree(folder, ignore_errors=True)

    def _path(self, run: str, version: int) -> Path:
        return self.folder / keys.label("run", run) / f"v{version:08d}"


def _check(manifest: WeightsManifest) -> None:
    """Refuse, before a byte is moved, what is no adapter."""
    assert manifest.adapter is not None
    names = sorted(f.name for f in manifest.adapter.files)
    if names != sorted(NAMES):
        raise BadData(
            f"weights v{manifest.version}: an adapter has the files {' and '.join(NAMES)}, found {', '.join(names)}",
            where=keys.weights_manifest(manifest.run, manifest.version),
        )


def _verify(manifest: WeightsManifest, folder: Path) -> None:
    """Read every byte back from the disk: what was committed, of the rank that the manifest says, and finite."""
    assert manifest.adapter is not None
    for payload in manifest.adapter.files:
        found = payload.checksums()
        try:
            found.update((folder / payload.name).read_bytes())
        except OSError as error:
            raise BadData(f"a staged file of the adapter cannot be read: {error}", where=str(folder)) from error
        payload.check(found)
    config = json.loads((folder / NAMES[0]).read_bytes())
    if config.get("r") != manifest.adapter.rank:
        raise BadData(
            f"adapter_config.json says rank {config.get('r')}, the manifest {manifest.adapter.rank}", where=str(folder)
        )
    path = folder / NAMES[1]
    for span in read_header(path):
        if (count := scan(path, span).not_finite) > 0:
            raise not_finite(span.name, count, str(path))
