"""The sending end of direct transfers: one version, broadcast to any number of engines, each in a group of its own."""

from __future__ import annotations

import logging
import socket
import threading
import uuid
from pathlib import Path
from urllib.parse import urlsplit

import torch
import xxhash

from colchis.components.direct.group import BackendName, Rendezvous, is_loopback
from colchis.components.errors import BadConfig, BadData, ColchisError, PeerUnavailable
from colchis.components.logs import event
from colchis.components.records.weights import WeightsManifest
from colchis.components.weights.buckets import Bucket, cut
from colchis.components.weights.checksums import predict
from colchis.components.weights.header import TensorSpan, read_header
from colchis.components.weights.protocol import Offer, Predicted

log = logging.getLogger(__name__)

BUCKET_BYTES = 128 << 20


class Sender:
    """Sends the files of a version, which lie verified in `folder` beside the model's config.json.

    Each engine is served by a thread, from the page cache, and takes one bucket of memory. Every tensor is hashed before it is
    sent: a copy that changed since it was verified never arrives whole.
    """

    def __init__(
        self,
        manifest: WeightsManifest,
        folder: Path,
        *,
        backend: BackendName,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        """BadConfig when this process cannot send over `backend`."""
        if backend == "nccl" and not torch.cuda.is_available():
            raise BadConfig(
                "reload.transfer is 'nccl', but the reload has no GPU to send from",
                hint="render a shape with GPUs and `reload_from: trainer`, or set reload.transfer=gloo",
            )
        self.manifest, self.backend, self.bucket_bytes = manifest, backend, bucket_bytes
        self.failure: ColchisError | None = None
        """Why it cannot send any more, whoever asks."""
        self._host: str | None = None
        self._buckets = cut(manifest.tensors, bucket_bytes)
        self._places = {s.name: (folder / f.name, s) for f in manifest.files for s in read_header(folder / f.name)}
        found = predict(folder, {t.name: t.sha256 for t in manifest.tensors})
        self.prediction = Predicted(**vars(found)) if found else None

    def offer(self, receivers: int, *, towards: str, timeout_s: float) -> Offer:
        """Wait in the background for an engine of that many ranks, and send it the version when it comes.

        `towards` is the URL of its agent: the address by which this process reaches that is where it waits. An offer that
        nobody takes ends after `timeout_s`, or with this process. Raises what sending has failed with before.
        """
        if self.failure is not None:
            raise self.failure
        host = _own_address(towards)
        if is_loopback(host) != is_loopback(self._host or host):
            raise BadConfig(
                "engines of this machine and of others cannot be sent a version by one reload",
                where=towards,
                hint="name all agents by addresses of the network, or set reload.transfer=store",
            )
        self._host = host
        rendezvous = Rendezvous(host, 1 + receivers, timeout_s)
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
            self.failure = error  # the group is closed, so the agent asks again, and is told

    def _read(self, bucket: Bucket) -> torch.Tensor:
        """uint8 [bytes of the bucket]."""
        buffer = torch.empty(bucket.bytes, dtype=torch.uint8)
        view, position = memoryview(buffer.numpy().data), 0
        for tensor in bucket.tensors:
            part = view[position : position + tensor.bytes]
            path, span = self._places[tensor.name]
            _read_into(part, path, span)
            if xxhash.xxh3_128_hexdigest(part) != tensor.xxh3_128:
                raise BadData(
                    f"the sender's copy of tensor '{tensor.name}' changed after it was verified",
                    where=str(path),
                    hint="reload again",
                )
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
