"""How a prepared version gets into an engine while that is paused: from the staged copy, or from a sender."""

from __future__ import annotations

import socket
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from colchis.components.agent.engine import Engine
from colchis.components.agent.staging import Place, Staged, Staging
from colchis.components.errors import BadData, ColchisError, PeerUnavailable
from colchis.components.records.weights import WeightsManifest
from colchis.components.weights.buckets import cut
from colchis.components.weights.checksums import Prediction
from colchis.components.weights.deadline import Deadline
from colchis.components.weights.protocol import Offer

CONNECT_S = 3.0
LEAVE_S = 3.0
"""For an engine to leave a group, or an update that broke off: it has failed already."""
NOT_RECEIVED = "failed to receive"
"""In an engine's refusal: its sender is gone, and it may have loaded a part of the version."""


@dataclass(frozen=True)
class Received:
    """A version that is not staged here: its sender has the copy that was verified."""

    manifest: WeightsManifest
    vocabulary: int
    """Token ids are below this; others would end SGLang."""
    tensors: frozenset[str] = field(default=frozenset(), compare=False)
    """Names in the engine, where its family is known: a prediction must have them all."""
    prediction: Prediction | None = field(default=None, compare=False)

    @property
    def place(self) -> Place:
        return self.manifest.run, self.manifest.version

    @property
    def digest(self) -> str:
        return self.manifest.weights_digest


Held = Staged | Received
"""A whole version, wherever its bytes are."""


class Way(Protocol):
    """One way into the engine, for one version."""

    @property
    def held(self) -> Held:
        """The version."""
        ...

    def bring(self, label: str, deadline: Deadline) -> bool:
        """Into the paused engine, under a label that is no version. True: keys and values of the weights before are still
        cached."""
        ...

    def digest_after(self) -> str | None:
        """Of the copy that was brought, read once more; None when somebody else has it."""
        ...


@dataclass(frozen=True)
class FromDisk:
    """The engine loads the staged copy from the one stable path, `live_path` as the engine sees it."""

    engine: Engine
    staging: Staging
    held: Staged
    live_path: str
    check_in: Callable[[], None]
    """Called between two steps; raises when the agent is to stop."""

    def bring(self, label: str, deadline: Deadline) -> bool:
        self.staging.swap(self.held)
        self.check_in()
        return self.engine.load(self.live_path, label, deadline.left_s())

    def digest_after(self) -> str:
        return self.staging.reread(self.held).digest


def find_sender(offer: Offer) -> None:
    """PeerUnavailable when nobody waits where the offer says."""
    try:
        socket.create_connection((offer.host, offer.port), CONNECT_S).close()
    except OSError as e:
        raise PeerUnavailable(
            f"nobody waits with weights any more ({e.strerror or e})",
            where=f"{offer.host}:{offer.port}",
            hint="the sender ended; activate again",
        ) from e


@dataclass(frozen=True)
class FromSender:
    """The engine and the sender meet in a group, and the sender broadcasts bucket by bucket."""

    engine: Engine
    held: Received
    offer: Offer
    mark: Path
    """Names the group while the engine may be in it: an agent that dies there leaves it to the next one."""
    check_in: Callable[[], None]

    def bring(self, label: str, deadline: Deadline) -> bool:
        """PeerUnavailable when the sender is gone; the engine may hold a part of the version then."""
        dirty = False
        find_sender(self.offer)  # once more, for SGLang asks half an hour for a sender that it does not find
        self._leave_what_was_left()
        self.mark.write_text(self.offer.group)
        try:
            self.engine.join(self.offer, deadline.left_s())
            self.engine.begin_update(deadline.left_s())
            buckets = cut(self.held.manifest.tensors, self.offer.bucket_bytes)
            for bucket in buckets:
                self.check_in()
                last = bucket is buckets[-1]  # one flush does for all
                dirty = self.engine.receive(bucket, self.offer.group, label, flush=last, timeout_s=deadline.left_s())
            self.engine.end_update(deadline.left_s())
        except ColchisError as error:
            with suppress(ColchisError):  # else the next update would find this one open
                self.engine.end_update(LEAVE_S)
            if isinstance(error, BadData) and NOT_RECEIVED in error.what.lower():
                raise PeerUnavailable(error.what, where=error.where, hint="the sender ended; activate again") from error
            raise
        finally:
            self._leave(self.offer.group)
        return dirty

    def _leave_what_was_left(self) -> None:
        """By an update that nobody ended: engines refuse a second one while the first is open."""
        if self.mark.exists():
            with suppress(ColchisError):
                self.engine.end_update(LEAVE_S)
            self._leave(self.mark.read_text())

    def _leave(self, group: str) -> None:
        """The mark stays while the engine may be in the group, for the next update to try again."""
        with suppress(PeerUnavailable):
            with suppress(BadData):  # it is not in that group
                self.engine.leave(group, LEAVE_S)
            self.mark.unlink(missing_ok=True)

    def digest_after(self) -> None:
        return None
