"""The agent's buffer: versions on the engine's own disk, each written once, by one writer, whole or not at all.

agent.lock                       held for the life of the agent: two agents never share a buffer
inputs/<model digest>/           configuration and tokenizer, shared by the versions of a run
versions/RUN/v00000012.filling/  being fetched, or a fetch that broke off: its whole files are kept for the next try
versions/RUN/v00000012/          whole: configuration, tokenizer, weights, manifest.json
live -> versions/RUN/v00000012   the one path that the engine loads from
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO

from colchis.components.agent.cache import NodeCache
from colchis.components.errors import BadConfig, BadData, PeerUnavailable
from colchis.components.records.weights import WeightsManifest
from colchis.components.store import Payload, Store, Transfer, keys
from colchis.components.weights.checksums import Prediction, predict
from colchis.components.weights.deadline import Deadline
from colchis.components.weights.delta import apply
from colchis.components.weights.fetch import fetch_files, fetch_model_folder, verify_files, write_index
from colchis.components.weights.manifest import check
from colchis.components.weights.publish import read_manifest

log = logging.getLogger(__name__)

FILLING = ".filling"
Signature = tuple[tuple[str, int, int, int], ...]
Place = tuple[str, int]
"""(run, version)."""


@dataclass(frozen=True)
class Staged:
    """A version that this process has read back from the disk."""

    manifest: WeightsManifest
    folder: Path
    digest: str
    vocabulary: int
    """Token ids are below this; others would end SGLang."""
    signature: Signature
    """Of the files when they were read: a change of any means that they must be read again."""
    transfers: tuple[Transfer, ...]
    """What fetching it cost; empty when an earlier agent fetched it."""
    sha256_compared: bool = field(compare=False)
    """Of every tensor; not yet while it was compared by xxh3-128 alone, as it arrived."""
    prediction: Prediction | None = field(compare=False)
    """None also while sha256 was not compared: both are made when the version is read for the second time."""

    @property
    def place(self) -> Place:
        return self.manifest.run, self.manifest.version


class Staging:
    """The versions under one folder. Thread-safe: each version has a lock, which its writer and its readers take."""

    def __init__(self, folder: Path, *, budget_bytes: int | None = None, cache: NodeCache | None = None) -> None:
        self.folder = folder.absolute()
        self.budget_bytes = budget_bytes
        self.cache = cache
        for part in ("versions", "inputs"):
            (self.folder / part).mkdir(parents=True, exist_ok=True)
        self._process_lock = _lock_process(self.folder / "agent.lock")
        self._guard = threading.Lock()
        self._locks: dict[Place, threading.Lock] = {}
        self._staged: dict[Place, Staged] = {}
        half_filled = sorted((self.folder / "versions").glob(f"*/*{FILLING}"))
        self.crashed = [f"{folder.parent.name}/{folder.name.removesuffix(FILLING)}" for folder in half_filled]

    @property
    def live(self) -> Path:
        """The stable path; a link to the version that was swapped in last."""
        return self.folder / "live"

    def close(self) -> None:
        """Let another agent use the folder."""
        self._process_lock.close()

    @contextmanager
    def locked(self, run: str, version: int, deadline: Deadline) -> Iterator[None]:
        """Hold the one lock of a version, as its writer or as a reader that nobody may write under.

        PeerUnavailable when another call holds it past the deadline.
        """
        with self._guard:
            lock = self._locks.setdefault((run, version), threading.Lock())
        if not lock.acquire(timeout=deadline.left_s()):
            raise PeerUnavailable(
                f"another call held the staged copy of weights v{version} for {deadline.seconds:g} s", where=run
            )
        try:
            yield
        finally:
            lock.release()

    @contextmanager
    def if_free(self, run: str, version: int) -> Iterator[bool]:
        """Hold the lock of a version if nobody else does; False: somebody does."""
        with self._guard:
            lock = self._locks.setdefault((run, version), threading.Lock())
        taken = lock.acquire(blocking=False)
        try:
            yield taken
        finally:
            if taken:
                lock.release()

    def find(self, run: str, version: int) -> Staged | None:
        """The version, if this process has verified it."""
        return self._staged.get((run, version))

    def require(self, run: str, version: int) -> Staged:
        """The version; call it under its lock. One that an agent before this process staged is read back first.

        BadData when it was not prepared, or is damaged.
        """
        staged = self.find(run, version)
        if staged is not None:
            return staged
        folder = self._path(run, version)
        manifest = manifest_in(folder)
        if manifest is None or (manifest.run, manifest.version) != (run, version):
            raise BadData(
                f"weights v{version} of run '{run}' are not prepared here", where=str(folder), hint="call prepare first"
            )
        return self._admit(manifest, folder, verify_files(manifest, folder))

    def versions(self) -> dict[str, list[int]]:
        """Run -> its staged, verified versions."""
        result: dict[str, list[int]] = {}
        for run, version in sorted(self._staged):
            result.setdefault(run, []).append(version)
        return result

    def fill(self, store: Store, run: str, version: int, keep: set[Place], deadline: Deadline) -> tuple[Staged, bool]:
        """Fetch and verify a version; call it under its lock. (version, whether it was here already).

        `keep` are versions that must stay on the disk. BadData when the version may not be served, BadConfig when there
        is no room: nothing of such a fetch stays behind. PeerUnavailable when the store or the time was not enough: files
        that are whole stay, and the next try goes on from them.
        """
        manifest = read_manifest(store, run, version)
        staged = self.find(run, version)
        if staged is not None and staged.manifest == manifest:
            try:
                return self.reread(staged), True
            except BadData as damage:
                log.warning("staged weights v%d of run '%s' are fetched again: %s", version, run, damage)

        extra = self.check(store, manifest, deadline)
        folder = self._path(run, version)
        _unlink_link(folder)
        if manifest_in(folder) == manifest:  # an earlier agent fetched it
            try:
                return self._admit(manifest, folder, verify_files(manifest, folder)), True
            except BadData as damage:
                log.warning("staged weights v%d of run '%s' are fetched again: %s", version, run, damage)

        self.collect(keep | {(run, version)})
        filling = folder.with_name(folder.name + FILLING)
        shutil.rmtree(folder, ignore_errors=True)
        _keep_only(filling, {file.name for file in manifest.files})
        try:
            self._make_room(manifest, filling)
            self._borrow(manifest, filling)
            transfers, digest = self._fetch(store, manifest, filling, deadline)
            for path in extra:
                shutil.copyfile(path, filling / path.name)
            write_index(manifest, filling)
            (filling / "manifest.json").write_bytes(manifest.to_bytes())
            filling.rename(folder)  # no fsync: whoever takes a folder over reads every byte of it first
        except PeerUnavailable:
            raise
        except BaseException as error:
            shutil.rmtree(filling, ignore_errors=True)
            if self.cache is not None and isinstance(error, BadData):
                self.cache.forget(manifest.files)
            raise
        return self._admit(manifest, folder, digest, tuple(transfers), sha256_compared=False), False

    def check(self, store: Store, manifest: WeightsManifest, deadline: Deadline) -> list[Path]:
        """Refuse a manifest that is not of this model, before anything of the version moves. The files of the model's
        configuration and tokenizer, which are here then."""
        model = self.folder / "inputs" / manifest.model
        files = fetch_model_folder(store, manifest.model, model, deadline)
        base = read_manifest(store, manifest.run, 0) if manifest.version else None
        config = json.loads((model / "config.json").read_bytes())
        check(manifest, where=keys.weights_manifest(manifest.run, manifest.version), config=config, base=base)
        return files

    def holds(self, run: str, version: int) -> bool:
        """Whether the version lies here, read back or not."""
        return self.find(run, version) is not None or manifest_in(self._path(run, version)) is not None

    def reread(self, staged: Staged) -> Staged:
        """The version after its bytes were read again, by both hashes; call it under its lock. BadData when they changed."""
        try:
            digest = verify_files(staged.manifest, staged.folder)
        except BadData:
            self._staged.pop(staged.place, None)
            shutil.rmtree(staged.folder, ignore_errors=True)
            raise
        assert digest == staged.digest
        if not staged.sha256_compared:
            staged = replace(staged, sha256_compared=True, prediction=_prediction(staged.manifest, staged.folder))
        self._staged[staged.place] = staged
        return staged

    def unchanged(self, staged: Staged) -> bool:
        """Whether no file of the version was touched since it was read (by inode, size and time of change)."""
        return _signature(staged.folder) == staged.signature

    def swap(self, staged: Staged | None) -> None:
        """Point the stable path at a version, atomically; None removes it."""
        if staged is None:
            self.live.unlink(missing_ok=True)
            return
        link = self.folder / "live.new"
        link.unlink(missing_ok=True)
        link.symlink_to(staged.folder.relative_to(self.folder))
        link.replace(self.live)

    def collect(self, keep: set[Place]) -> list[Place]:
        """Remove versions that nobody needs: not in `keep`, not live, not newer than those of their run, not locked."""
        live = self.live.resolve()
        newest = {run: max(v for r, v in keep if r == run) for run, _ in keep}
        removed = []
        for folder in sorted((self.folder / "versions").glob("*/v*")):
            run, version = folder.parent.name, version_of(folder)
            if version is None or folder == live or (run, version) in keep or version > newest.get(run, 1 << 62):
                continue
            with self.if_free(run, version) as free:
                if free:
                    self._staged.pop((run, version), None)
                    shutil.rmtree(folder, ignore_errors=True)
                    removed.append((run, version))
        return removed

    def _admit(
        self,
        manifest: WeightsManifest,
        folder: Path,
        digest: str,
        transfers: tuple[Transfer, ...] = (),
        *,
        sha256_compared: bool = True,
    ) -> Staged:
        """A version whose files were compared with its manifest a moment ago; `digest` is that of both."""
        staged = Staged(
            manifest=manifest,
            folder=folder,
            digest=digest,
            vocabulary=vocabulary(folder / "config.json"),
            signature=_signature(folder),
            transfers=transfers,
            sha256_compared=sha256_compared,
            prediction=_prediction(manifest, folder) if sha256_compared else None,
        )
        self._staged[staged.place] = staged
        return staged

    def _path(self, run: str, version: int) -> Path:
        return self.folder / "versions" / keys.label("run", run) / f"v{version:08d}"

    def _fetch(
        self, store: Store, manifest: WeightsManifest, filling: Path, deadline: Deadline
    ) -> tuple[list[Transfer], str]:
        """The files into `filling`, read back: from the version before and what differs from it, where that is at hand;
        else whole. What it cost, and the weights digest."""

        def download(payload: Payload, path: Path) -> Transfer:
            if self.cache is None:
                return store.download(payload, path)
            return self.cache.download(store, payload, path, deadline)

        delta = manifest.delta
        base = self.find(manifest.run, delta.base_version) if delta else None
        if delta is None or base is None or base.digest != delta.base_digest:
            return fetch_files(manifest, filling, deadline, download)
        file = filling / "delta"
        try:
            deadline.check(f"fetch of the delta of weights v{manifest.version}", where=delta.payload.key)
            transfer = download(delta.payload, file)
            apply(file, [base.folder / f.name for f in base.manifest.files], filling, base_digest=base.digest)
        except BadData as damage:  # a longer way to the same bytes
            log.warning("weights v%d of run '%s' are fetched whole: %s", manifest.version, manifest.run, damage)
            return fetch_files(manifest, filling, deadline, download)
        finally:
            file.unlink(missing_ok=True)
        return [transfer], verify_files(manifest, filling, sha256=False)

    def _borrow(self, manifest: WeightsManifest, filling: Path) -> None:
        """Link files that a staged version has under the same checksums: a version of kind `same` moves no byte."""
        present = {
            (f.bytes, f.sha256, f.xxh3_128): staged.folder / f.name
            for staged in self._staged.values()
            for f in staged.manifest.files
        }
        for file in manifest.files:
            source = present.get((file.bytes, file.sha256, file.xxh3_128))
            target = filling / file.name
            if source is not None and source.exists() and not target.exists():
                os.link(source, target)

    def _make_room(self, manifest: WeightsManifest, filling: Path) -> None:
        there = sum(file.stat().st_size for file in filling.iterdir())
        needed = manifest.file_bytes() - there + (manifest.delta.payload.bytes if manifest.delta else 0)
        free = shutil.disk_usage(self.folder).free
        if self.budget_bytes is not None:
            used = sum(p.lstat().st_size for p in (self.folder / "versions").rglob("*") if p.is_file())
            free = min(free, self.budget_bytes - used)
        if needed > free:
            raise BadConfig(
                f"weights v{manifest.version} need {needed} bytes, {max(0, free)} are free for staging",
                where=str(self.folder),
                hint="the disk must hold three versions: the served one, the one before, and the next",
            )


def _lock_process(path: Path) -> IO[str]:
    file = path.open("a+")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.seek(0)
        holder = file.read().strip()
        file.close()
        raise BadConfig(
            f"another agent (process {holder or 'unknown'}) uses this staging folder",
            where=str(path.parent),
            hint="give each engine's agent a folder of its own",
        ) from None
    file.truncate(0)
    file.write(f"{os.getpid()}\n")
    file.flush()
    return file


def _keep_only(folder: Path, names: set[str]) -> None:
    """Make sure of a folder, and leave nothing else in it: not half a file of a fetch that broke off, and no link."""
    _unlink_link(folder)
    folder.mkdir(parents=True, exist_ok=True)
    for entry in folder.iterdir():
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        elif entry.name not in names or entry.is_symlink():
            entry.unlink()


def _unlink_link(path: Path) -> None:
    """What a link points to is somebody else's, who may change it after it was read; an engine may not see it at all."""
    if path.is_symlink():
        path.unlink()


def _prediction(manifest: WeightsManifest, folder: Path) -> Prediction | None:
    """`predict` of files whose sha256 was compared with the manifest."""
    return predict(folder, {t.name: t.sha256 for t in manifest.tensors})


def vocabulary(config: Path) -> int:
    """How many token ids a model has, by its config.json; 0 where that does not say."""
    return int(json.loads(config.read_bytes()).get("vocab_size", 0))


def version_of(folder: Path) -> int | None:
    digits = folder.name.removeprefix("v").removesuffix(FILLING)
    return int(digits) if folder.is_dir() and digits.isdecimal() else None


def manifest_in(folder: Path) -> WeightsManifest | None:
    try:
        return WeightsManifest.from_bytes((path := folder / "manifest.json").read_bytes(), str(path))
    except (OSError, BadData):
        return None  # not here, or not whole: it is fetched again


def _signature(folder: Path) -> Signature:
    stats = ((path.name, path.stat()) for path in sorted(folder.glob("*.safetensors")))
    return tuple((name, s.st_ino, s.st_size, s.st_mtime_ns) for name, s in stats)
