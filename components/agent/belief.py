"""What an agent believes its engine to serve, and the ground for it: a proof made for this very process of the engine."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from typing import Any

from colchis.components.agent.activation import Served
from colchis.components.agent.engine import Engine, EngineFacts
from colchis.components.agent.shelf import Shelf
from colchis.components.agent.staging import Place, Staging
from colchis.components.agent.ways import Held, Received
from colchis.components.errors import BadData, ColchisError, PeerUnavailable
from colchis.components.logs import event
from colchis.components.records.weights import WeightsManifest
from colchis.components.weights.deadline import Deadline
from colchis.components.weights.protocol import Activated

log = logging.getLogger(__name__)

CHECKSUMS_DEADLINE_S = 3.0


@dataclass(frozen=True)
class Failure:
    """Of an activation."""

    reason: str
    start: str
    """Of the process of the engine that it happened in."""


class Belief:
    """Not thread-safe: whoever asks or changes it holds the engine's lock.

    `served.json` in the staging folder is for the agent after this one, which believes it only if the engine's own
    tensors agree.
    """

    def __init__(self, engine: Engine, staging: Staging, shelf: Shelf) -> None:
        self._engine, self._staging, self._shelf = engine, staging, shelf
        self._record = staging.folder / "served.json"
        self.served: Served | None = None
        self.previous: Served | None = None
        """What was served before it."""
        self.lost: WeightsManifest | None = None
        """The version that a restart took from the engine; None once something else was asked for."""
        self.failure: Failure | None = None
        """Of the last activation, in this process of the engine."""

    @property
    def places(self) -> set[Place]:
        """Of the versions that must stay staged, whole or as adapters."""
        kept = [served for served in (self.served, self.previous) if served]
        return {served.whole.place for served in kept} | {s.adapter.place for s in kept if s.adapter}

    def check(self, facts: EngineFacts) -> Served | None:
        """What this process of the engine was proven to serve. A restarted engine has lost it."""
        if self.served is None and self._record.exists():
            self._adopt(facts)
        served = self.served
        if served is not None and (facts.start != served.start or facts.label != served.label):
            event(log, "the engine lost its version", label=facts.label, version=served.manifest.version)
            if facts.start != served.start:  # under a foreign label somebody else drives the engine
                self.lost = served.manifest
            self.forget()
            self.failure = None
        if self.failure is not None and facts.start != self.failure.start:
            event(log, "the engine was restarted since its activation failed", reason=self.failure.reason)
            self.failure = None
        return self.served

    def hold(self, served: Served | None) -> None:
        """Believe a proof from now on; with None nothing."""
        self.served = served
        if served is None:
            return
        record: dict[str, Any] = {
            "run": served.manifest.run,
            "start": served.start,
            "proof": served.proof.model_dump(mode="json"),
        }
        if isinstance(served.whole, Received):  # nothing of it is staged
            received = {
                "manifest": served.whole.manifest.model_dump(mode="json"),
                "vocabulary": served.whole.vocabulary,
            }
            record["received"] = received
        written = self._record.with_suffix(".new")
        written.write_text(json.dumps(record))
        written.replace(self._record)

    def forget(self) -> None:
        """Believe nothing, and let no later agent do."""
        self.served = None
        self._record.unlink(missing_ok=True)

    def _adopt(self, facts: EngineFacts) -> None:
        """After a restart of the agent: believe the engine if its own tensors prove what the last agent wrote."""
        try:
            record = json.loads(self._record.read_bytes())
            proof = Activated.model_validate(record["proof"])
            run, version = str(record["run"]), proof.version
            adapter, whole = None, version
            if proof.adapter is not None:
                with self._staging.locked(run, version, Deadline(0)):
                    adapter = self._shelf.find(run, version)
                if adapter is None:
                    raise BadData(f"the adapter of v{version} is not here any more")
                whole = adapter.adapter.base_version
            received = record.get("received")
            held: Held
            if received is not None:
                held = Received(WeightsManifest.model_validate(received["manifest"]), int(received["vocabulary"]))
            else:
                with self._staging.locked(run, whole, Deadline(0)):
                    held = self._staging.require(run, whole)
            if record["start"] != facts.start:
                self.lost = (adapter or held).manifest
                raise BadData(f"the engine was restarted since v{version} was activated in it")
            served = Served(held, facts.start, proof.engine_checksum, proof, adapter)
            if facts.label != served.label:
                raise BadData(f"the engine calls itself '{facts.label}', not '{served.label}'")
            if self._engine.checksums(CHECKSUMS_DEADLINE_S).whole != proof.engine_checksum:
                raise BadData(f"the engine's tensors are not those of v{whole} any more")
            if adapter is not None and adapter.name not in self._engine.adapters(CHECKSUMS_DEADLINE_S):
                raise BadData(f"the engine has no adapter '{adapter.name}' any more")
        except (
            PeerUnavailable
        ) as error:  # a version's lock is held, or the engine is slow: asked again with the next look
            log.info("what the last agent served cannot be looked at yet: %s", error)
            return
        except (ColchisError, OSError, ValueError, KeyError) as error:
            log.warning("what the last agent served is not taken over: %s", error)
            self._record.unlink(missing_ok=True)
            return
        self.served = served
