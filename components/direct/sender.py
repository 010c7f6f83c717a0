"""The sending end of direct transfers: one version, broadcast to any number of engines, each in a group of its own."""

from __future__ import annotations

import logging
import socket
import threading
import uuid
from pathlib import Path
from urllib.parse import urlsplit

import torch

from colchis.components.direct.group import BackendName, Rendezvous
from colchis.components.errors import BadData, ColchisError, PeerUnavailable
from colchis.components.logs import event
from colchis.components.records.weights import WeightsManifest
from colchis.components.weights.buckets import Bucket, cut
from colchis.components.weights.checksums import predict
from colchis.components.weights.deadline import Deadline
from colchis.components.weights.header import TensorSpan, read_header
from colchis.components.weights.protocol import Offer, Predicted

log = logging.getLogger(__name__)

BUCKET_BYTES = 128 << 20


class Sender:
    """Sends the files of a version, which lie verified in `folder` beside the model's config.json.

    Each engine is served by a thread, from the page cache, and takes one bucket of memory. What is offered ends with the
    deadline, or with this process.
    """

    def __init__(
        self,
        manifest: WeightsManifest,
        folder: Path,
        *,
        backend: BackendName,
        deadline: Deadline,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        self.manifest, self.backend, self.deadline = manifest, backend, deadline
        self.bucket_bytes = bucket_bytes
        self._buckets = cut(manifest.tensors, bucket_bytes)
        self._places = {s.name: (folder / f.name, s) for f in manifest.files for s in read_header(folder / f.name)}
        found = predict(folder, {t.name: t.sha256 for t in manifest.tensors})
        self.prediction = Predicted(**vars(found)) if found else None

    def offer(self, receivers: int, *, towards: str) -> Offer:
        """Wait in the background for an engine of that many ranks, and send it the version when it comes.

        `towards` is the URL of its agent: the address by which this process reaches that is where it waits.
        """
        host = _own_address(towards)
        rendezvous = Rendezvous(host, 1 + receivers, self.deadline.left_s())
        name = f"colchis-{uuid.uuid4().hex}"
        threading.Thread(target=self._serve, args=(rendezvous, name), name="send", daemon=True).start()
        return Offer(
            host=host,
            port=rendezvous.port,
            group=name,
            ranks=rendezvous.ranks,
            backend=self.backend,
            bucket_bytes=self.bucket_bytes,
            prediction=self.prediction,
        )

    def _serve(self, rendezvous: Rendezvous, name: str) -> None:
        try:
            with rendezvous.meet(name, self.backend) as group:
                for bucket in self._buckets:
                    group.broadcast(self._read(bucket))
        except PeerUnavailable as error:  # the engine's agent says the same, with what it left behind
            event(log, "an engine did not take what it was to be sent", reason=str(error))
        except ColchisError as error:
            log.error("weights v%d cannot be sent: %s", self.manifest.version, error)

    def _read(self, bucket: Bucket) -> torch.Tensor:
        """uint8 [bytes of the bucket]."""
        buffer = torch.empty(bucket.bytes, dtype=torch.uint8)
        view, position = memoryview(buffer.numpy().data), 0
        for tensor in bucket.tensors:
            _read_into(view[position : position + tensor.bytes], *self._places[tensor.name])
            position += tensor.bytes
        return buffer.cuda() if self.backend == "nccl" else buffer


def _own_address(towards: str) -> str:
    """This machine's end of the way to a URL; no packet is sent. PeerUnavailable when there is no way."""
    parts = urlsplit(towards)
    try:
        family, kind, _, _, address = socket.getaddrinfo(parts.hostname, parts.port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    except OSError as e:
        raise PeerUnavailable(f"there is no way to {towards}: {e}") from e


def _read_into(view: memoryview, path: Path, span: TensorSpan) -> None:
    try:
        with path.open("rb", buffering=0) as file:
            file.seek(span.start)
            while view and (count := file.readinto(view)):
                view = view[count:]
    except OSError as e:
        raise BadData(f"{path.name} cannot be read ({e.strerror})", where=str(path)) from e
    if view:
        raise BadData(f"{path.name} ends {len(view)} bytes too early", where=str(path))
