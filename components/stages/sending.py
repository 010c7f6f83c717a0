"""A reload with `reload.transfer: gloo` or `nccl`: this pod's own copy of the version, from which engines are sent it.

The copy passes the boundaries that an agent's would: fetched and verified (3), read again (2), and hashed as it is sent (4).
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from colchis.components.errors import BadConfig, BadData, ColchisError
from colchis.components.records.boundary import Boundary, BoundaryRecord
from colchis.components.records.run import now
from colchis.components.records.weights import WeightsManifest
from colchis.components.stages.context import Stage
from colchis.components.weights.deadline import Deadline
from colchis.components.weights.fetch import TransferSummary, fetch_files, fetch_model_folder, verify_files

if TYPE_CHECKING:
    from colchis.components.direct.sender import Sender


def refuse_without_torch() -> None:
    """BadConfig where this pod's image cannot send."""
    if find_spec("torch") is None:
        raise BadConfig(
            "reload.transfer is not 'store', but the image of the reload has no torch to send with",
            hint="render a shape with `reload_from: trainer` (docs/reload.md), or set reload.transfer=store",
        )


def fetch_copy(stage: Stage, manifest: WeightsManifest) -> BoundaryRecord:
    """Boundary 3 at the sender: the version in this pod, read back as it lies there."""
    folder, deadline = _folder(manifest), Deadline(stage.config.reload.prepare_deadline_s)

    def fetch() -> dict[str, Any]:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        fetch_model_folder(stage.store, manifest.model, folder, deadline)
        transfers, digest = fetch_files(manifest, folder, deadline, stage.store.download)
        return {"weights_digest": digest, **vars(TransferSummary.of(transfers))}

    return _proven(Boundary.TRANSFER, manifest, fetch)


def verify_copy(manifest: WeightsManifest) -> list[BoundaryRecord]:
    """Boundary 2 at the sender; nothing where no engine is to be sent the version."""
    folder = _folder(manifest)
    if not folder.exists():
        return []

    def verify() -> dict[str, Any]:
        digest = verify_files(manifest, folder)
        return {"weights_digest": digest, "tensors": len(manifest.tensors), "bytes": manifest.tensor_bytes()}

    return [_proven(Boundary.BUFFER, manifest, verify)]


@contextmanager
def sender_of(stage: Stage, manifest: WeightsManifest) -> Iterator[Sender | None]:
    """A sender of this pod's copy; None where there is none."""
    folder, knobs = _folder(manifest), stage.config.reload
    if not folder.exists() or knobs.transfer == "store":
        yield None
        return
    from colchis.components.direct.sender import Sender

    yield Sender(manifest, folder, backend=knobs.transfer)
    shutil.rmtree(folder)


def wants_copy(records: Sequence[BoundaryRecord]) -> bool:
    """Whether an engine is to be sent the version, by what the agents said at boundary 3."""
    return any(record.proof.get("receivers") for record in records)


def _folder(manifest: WeightsManifest) -> Path:
    """The containers of a pod share it."""
    return Path(tempfile.gettempdir()) / "colchis-sender" / f"v{manifest.version:08d}"


def _proven(boundary: Boundary, manifest: WeightsManifest, work: Callable[[], dict[str, Any]]) -> BoundaryRecord:
    """The record of `work` at the sender, whose copy must be the commit's."""
    started_at, started = now(), time.monotonic()
    try:
        proof = work()
        if proof["weights_digest"] != manifest.weights_digest:
            raise BadData(f"it is {proof['weights_digest'][:16]}, committed was {manifest.weights_digest[:16]}")
    except ColchisError as error:
        what = f"{boundary.label}: the sender's copy of weights v{manifest.version}: {error.what}"
        raise type(error)(what, where=error.where, hint=error.hint) from error
    return BoundaryRecord.passed(
        boundary,
        manifest.run,
        manifest.version,
        engine=None,
        started_at=started_at,
        seconds=time.monotonic() - started,
        proof=proof,
    )
