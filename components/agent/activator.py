"""From a prepared version to a served one: which activation brings it in, and what is believed of the engine after it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

from colchis.components.agent.activation import Activation, ActivationFailed, Served
from colchis.components.agent.adapter_activation import AdapterActivation
from colchis.components.agent.belief import Belief, Failure
from colchis.components.agent.engine import Engine, EngineFacts
from colchis.components.agent.pause import PauseLease
from colchis.components.agent.shelf import Shelf, StagedAdapter
from colchis.components.agent.staging import Place, Staged, Staging
from colchis.components.agent.ways import FromDisk, FromSender, Held, Received, Way, find_sender
from colchis.components.errors import BadData, ColchisError
from colchis.components.logs import event
from colchis.components.weights.checksums import Prediction
from colchis.components.weights.deadline import Deadline
from colchis.components.weights.protocol import Activate, Activated, Offer

log = logging.getLogger(__name__)

MARKS = 8
PATIENCE_S = 30.0
"""For the first answer of an engine that is to be activated or probed: a busy machine is no dead engine."""


class Activator:
    """Not thread-safe: whoever calls it holds the engine's lock and that of the version.

    `engine_staging` is the staging folder as the engine sees it, where that is another path. `check_in` is called between
    two steps and raises when the agent is to stop.
    """

    def __init__(
        self,
        engine: Engine,
        staging: Staging,
        shelf: Shelf,
        lease: PauseLease,
        belief: Belief,
        *,
        engine_staging: str | None,
        check_in: Callable[[], None],
    ) -> None:
        self._engine, self._staging, self._shelf = engine, staging, shelf
        self._lease, self._belief = lease, belief
        self._engine_staging = engine_staging
        self._check_in = check_in
        self._expected: Received | None = None
        self.proven: dict[str, int] = {}
        """Mark of a load -> version that it was proven to be: of the last MARKS loads. Never changed, only replaced."""

    def expect(self, version: Received) -> None:
        """A sender will bring that version; the one that was expected before it will not come any more."""
        self._expected = version

    def prepared(self, run: str, version: int) -> Staged | StagedAdapter:
        """What was staged of a version. BadData when nothing was, or it is damaged."""
        return self._shelf.find(run, version) or self._staging.require(run, version)

    def activate(self, request: Activate, deadline: Deadline) -> Activated:
        """Bring it in, or say again what proved it. Raises what the agent answers with."""
        offer = request.offer
        ready: Held | StagedAdapter
        ready = self.prepared(request.run, request.version) if offer is None else self._offered(request, offer)
        facts = self._engine.facts(min(PATIENCE_S, deadline.left_s()))
        previous = self._belief.check(facts)
        if previous is not None and previous.prepared == ready and self._belief.failure is None:
            return previous.proof.model_copy(update={"repeated": True})
        if isinstance(ready, StagedAdapter):
            served = self._activate_adapter(ready, request, facts, previous, deadline)
        else:
            served = self._activate_whole(ready, request, facts, previous, deadline)
        if previous is not None and previous.manifest != served.manifest:
            self._belief.previous = previous
        event(log, "activated", run=request.run, version=request.version, pause_s=round(served.proof.pause_s, 4))
        return served.proof

    def _offered(self, request: Activate, offer: Offer) -> Received:
        """The version that a sender has, with what it says of its checksums."""
        expected, place = self._expected, (request.run, request.version)
        if expected is None or expected.place != place:
            raise BadData(
                f"weights v{request.version} of run '{request.run}' are not expected from a sender here",
                hint="call prepare first",
            )
        if offer.prediction is None:
            return expected
        prediction = Prediction(**offer.prediction.model_dump())
        of_another = [t.name for t in expected.manifest.tensors if prediction.contradicts(t)]
        of_another += sorted(expected.tensors ^ prediction.checksums.keys())
        if of_another:
            raise BadData(
                f"the sender has other tensors than weights v{request.version}, first '{of_another[0]}'",
                where=f"{offer.host}:{offer.port}",
                hint="its copy is of another version",
            )
        return replace(expected, prediction=prediction)

    def _activate_whole(
        self, held: Held, request: Activate, facts: EngineFacts, previous: Served | None, deadline: Deadline
    ) -> Served:
        way = self._way(held, request.offer)
        activation = Activation(self._engine, self._staging, self._lease, check_in=self._check_in)
        return self._believed(
            previous, held.place, facts.start, lambda: activation.run(way, request, facts, previous, deadline)
        )

    def _way(self, held: Held, offer: Offer | None) -> Way:
        if isinstance(held, Received):
            assert offer is not None
            find_sender(offer)
            return FromSender(self._engine, held, offer, self._staging.folder / "group", self._check_in)
        if not (held.sha256_compared and self._staging.unchanged(held)):
            held = self._staging.reread(held)
        return FromDisk(self._engine, self._staging, held, self._seen_by_engine(self._staging.live), self._check_in)

    def _activate_adapter(
        self,
        staged: StagedAdapter,
        request: Activate,
        facts: EngineFacts,
        previous: Served | None,
        deadline: Deadline,
    ) -> Served:
        """The adapter into an engine that holds its base; another engine gets the base first."""
        if request.kind != staged.manifest.kind:
            raise BadData(
                f"weights v{request.version} are of kind '{staged.manifest.kind}', activate asks for '{request.kind}'"
            )
        base = previous
        if base is None or base.whole.manifest.weights_digest != staged.adapter.base_digest:
            base = self._activate_base(staged, request, facts, previous, deadline)
        activation = AdapterActivation(
            self._engine,
            self._shelf,
            engine_folder=self._seen_by_engine(self._shelf.folder),
            check_in=self._check_in,
        )
        served = self._believed(base, staged.place, facts.start, partial(activation.run, staged, base, deadline))
        activation.unload_others({served.name, base.name})
        if base is previous:
            return served
        proof = served.proof.model_copy(  # what the base cost, and what it took the place of
            update={
                "pause_s": base.proof.pause_s,
                "pause_call_s": base.proof.pause_call_s,
                "proof_s": base.proof.proof_s,
                "previous": base.proof.previous,
                "changed": base.proof.changed,
            }
        )
        served = replace(served, proof=proof)
        self._belief.hold(served)
        return served

    def _activate_base(
        self,
        adapter: StagedAdapter,
        request: Activate,
        facts: EngineFacts,
        previous: Served | None,
        deadline: Deadline,
    ) -> Served:
        """What an adapter belongs on, by an activation like any other."""
        version = adapter.adapter.base_version
        with self._staging.locked(request.run, version, deadline):
            staged = self._staging.require(request.run, version)
            if staged.digest != adapter.adapter.base_digest:
                raise BadData(
                    f"the adapter of v{request.version} belongs on {adapter.adapter.base_digest[:12]}, v{version} is "
                    f"{staged.digest[:12]}",
                    hint="the train commit contradicts itself",
                )
            order = request.model_copy(update={"version": version, "kind": staged.manifest.kind, "offer": None})
            return self._activate_whole(staged, order, facts, previous, deadline)

    def _believed(self, previous: Served | None, place: Place, start: str, activate: Callable[[], Served]) -> Served:
        """Run one activation in the process of the engine that began at `start`. Afterwards believe what it proved, or what it
        proved to be left."""
        self._belief.forget()
        try:
            served = activate()
        except ActivationFailed as failure:
            self._belief.failure = Failure(str(failure.error), start)
            self._belief.hold(failure.kept)
            event(log, "activation failed", version=place[1], reason=self._belief.failure.reason)
            raise failure.error from failure
        except ColchisError:
            self._belief.hold(previous)  # refused before the engine was touched
            raise
        self._belief.failure = None
        self._belief.hold(served)
        if served.proof.mark is not None:
            self.proven = dict([*self.proven.items(), (served.proof.mark, served.proof.version)][-MARKS:])
        return served

    def _seen_by_engine(self, path: Path) -> str:
        """A path under the staging folder, as the engine has it mounted."""
        return f"{self._engine_staging or self._staging.folder}/{path.relative_to(self._staging.folder)}"
