"""Adapters on the engine's own disk, beside the whole versions of `staging`: small, each in a folder of its own.

adapters/RUN/v00000012.filling/  being fetched
adapters/RUN/v00000012/          whole: adapter_config.json, adapter_model.safetensors, manifest.json
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from colchis.components.agent.staging import FILLING, Place, Staging, manifest_in, version_of
from colchis.components.errors import BadData
from colchis.components.records.weights import Adapter, WeightsManifest
from colchis.components.store import Store, Transfer, keys
from colchis.components.weights.deadline import Deadline
from colchis.components.weights.header import read_header
from colchis.components.weights.manifest import not_finite
from colchis.components.weights.scan import scan

NAMES = ("adapter_config.json", "adapter_model.safetensors")


@dataclass(frozen=True)
class StagedAdapter:
    """An adapter that this process has read back from the disk."""

    manifest: WeightsManifest
    adapter: Adapter
    name: str
    folder: Path
    tensors: int
    transfers: tuple[Transfer, ...]
    """What fetching it cost; empty when an earlier agent fetched it."""

    @property
    def digest(self) -> str:
        return self.adapter.digest

    @property
    def place(self) -> Place:
        return self.manifest.run, self.manifest.version


class Shelf:
    """The adapters under one folder. Whoever calls for a version holds that version's lock of `Staging`."""

    def __init__(self, staging: Staging) -> None:
        self.folder = staging.folder / "adapters"
        self._staging = staging
        self._staged: dict[Place, StagedAdapter] = {}

    def find(self, run: str, version: int) -> StagedAdapter | None:
        """The adapter, read back first if an agent before this process staged it; None: it is not here. BadData when it is
        damaged."""
        staged = self._staged.get((run, version))
        if staged is not None:
            return staged
        folder = self._path(run, version)
        manifest = manifest_in(folder)
        if manifest is None or manifest.adapter is None or (manifest.run, manifest.version) != (run, version):
            return None
        return self._admit(manifest, manifest.adapter, folder, ())

    def fill(
        self, store: Store, manifest: WeightsManifest, adapter: Adapter, keep: Collection[Place], deadline: Deadline
    ) -> tuple[StagedAdapter, bool]:
        """Fetch and verify the adapter of a version. (adapter, whether it was here already). Adapters that are neither in
        `keep` nor newer go. BadData when it may not be served; nothing of such a fetch stays behind."""
        place = (manifest.run, manifest.version)
        folder = self._path(*place)
        if manifest_in(folder) == manifest:
            with suppress(BadData):  # damaged here: fetched again
                return self._admit(manifest, adapter, folder, self._transfers(place)), True
        names = sorted(f.name for f in adapter.files)
        if names != sorted(NAMES):
            raise BadData(
                f"weights v{manifest.version}: an adapter has the files {' and '.join(NAMES)}, found {', '.join(names)}",
                where=keys.weights_manifest(*place),
            )
        self._collect({place, *keep})
        filling = folder.with_name(folder.name + FILLING)
        shutil.rmtree(filling, ignore_errors=True)
        filling.mkdir(parents=True)
        try:
            transfers = []
            for payload in adapter.files:
                deadline.check(f"fetch of the adapter of weights v{manifest.version}", where=payload.key)
                transfers.append(store.download(payload, filling / payload.name))
            (filling / "manifest.json").write_bytes(manifest.to_bytes())
            _verify(adapter, filling)
            shutil.rmtree(folder, ignore_errors=True)
            filling.rename(folder)
        except BaseException:
            shutil.rmtree(filling, ignore_errors=True)
            raise
        return self._admit(manifest, adapter, folder, tuple(transfers)), False

    def reread(self, staged: StagedAdapter) -> StagedAdapter:
        """The adapter after its bytes were read again. BadData when they changed: then it is gone from here."""
        return self._admit(staged.manifest, staged.adapter, staged.folder, staged.transfers)

    def drop(self, run: str, version: int) -> None:
        """Forget an adapter: the version is to be served whole."""
        self._staged.pop((run, version), None)
        shutil.rmtree(self._path(run, version), ignore_errors=True)

    def versions(self) -> list[Place]:
        """Of the staged, verified adapters."""
        return sorted(self._staged)

    def _admit(
        self, manifest: WeightsManifest, adapter: Adapter, folder: Path, transfers: tuple[Transfer, ...]
    ) -> StagedAdapter:
        """The adapter, if every byte of it is right; else it goes."""
        place = (manifest.run, manifest.version)
        try:
            tensors = _verify(adapter, folder)
        except BadData:
            self.drop(*place)
            raise
        name = adapter.name(*place)
        staged = self._staged[place] = StagedAdapter(manifest, adapter, name, folder, tensors, transfers)
        return staged

    def _transfers(self, place: Place) -> tuple[Transfer, ...]:
        staged = self._staged.get(place)
        return staged.transfers if staged else ()

    def _collect(self, keep: Collection[Place]) -> None:
        newest = {run: max(v for r, v in keep if r == run) for run, _ in keep}
        for folder in sorted(self.folder.glob("*/v*")):
            run, version = folder.parent.name, version_of(folder)
            if version is None or (run, version) in keep or version > newest.get(run, 1 << 62):
                continue
            with self._staging.if_free(run, version) as free:
                if free:
                    self._staged.pop((run, version), None)
                    shutil.rmtree(folder, ignore_errors=True)

    def _path(self, run: str, version: int) -> Path:
        return self.folder / keys.label("run", run) / f"v{version:08d}"


def _verify(adapter: Adapter, folder: Path) -> int:
    """Read every byte back from the disk: what was committed, made as the manifest says, and finite. How many tensors there
    are."""
    for payload in adapter.files:
        found = payload.checksums()
        try:
            found.update((folder / payload.name).read_bytes())
        except OSError as error:
            raise BadData(f"a staged file of the adapter cannot be read: {error}", where=str(folder)) from error
        payload.check(found)
    _refuse_contradictions(adapter, folder / NAMES[0])
    path = folder / NAMES[1]
    spans = read_header(path)
    for span in spans:
        if (count := scan(path, span, sha256=False).not_finite) > 0:
            raise not_finite(span.name, count, str(path))
    return len(spans)


def _refuse_contradictions(adapter: Adapter, path: Path) -> None:
    """The file is what an engine goes by: another scale or another set of layers is another policy."""
    try:
        config = json.loads(path.read_bytes())
        targets = sorted(config["target_modules"])
        said = {"r": config["r"], "lora_alpha": config["lora_alpha"], "target_modules": targets}
    except (ValueError, KeyError, TypeError) as error:
        raise BadData(
            f"adapter_config.json has no r, lora_alpha and target_modules that can be read: {error!r}", where=str(path)
        ) from error
    meant = {"r": adapter.rank, "lora_alpha": adapter.alpha, "target_modules": sorted(adapter.targets)}
    for name, expected in meant.items():
        if said[name] != expected:
            raise BadData(
                f"adapter_config.json says {name}={said[name]}, the manifest {expected}",
                where=str(path),
                hint="the train commit contradicts itself: train this version again",
            )
