"""The agent of one engine: what it is asked to do, and what it can prove about the engine at any moment."""

from __future__ import annotations

import json
import logging
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from colchis.components.agent.activation import Served
from colchis.components.agent.activator import PATIENCE_S, Activator
from colchis.components.agent.belief import Belief
from colchis.components.agent.cache import NodeCache
from colchis.components.agent.engine import Engine
from colchis.components.agent.pause import PauseLease
from colchis.components.agent.shelf import Shelf, StagedAdapter
from colchis.components.agent.staging import Place, Staged, Staging, vocabulary
from colchis.components.agent.ways import Received
from colchis.components.errors import BadConfig, BadData, ColchisError, PeerUnavailable, Temporary
from colchis.components.logs import event
from colchis.components.records.run import Serving
from colchis.components.records.weights import Adapter, WeightsManifest
from colchis.components.store import Store, StoreSettings, Transfer, keys
from colchis.components.store.pools import run_of_pool
from colchis.components.weights.buckets import can_cross
from colchis.components.weights.checksums import engine_tensors
from colchis.components.weights.deadline import Deadline
from colchis.components.weights.fetch import TransferSummary
from colchis.components.weights.protocol import (
    Activate,
    Activated,
    EngineState,
    FetchedObject,
    Prepare,
    Prepared,
    Probe,
    Probed,
    ServedAdapter,
    Status,
    Verified,
    Verify,
)
from colchis.components.weights.publish import read_manifest

log = logging.getLogger(__name__)

FRESH_S = 1.0
"""A look that found the engine ready answers all questions that come within this time."""
NOT_READY_FRESH_S = 0.1
"""The same for a look that did not: somebody waits for the change."""
STORE_DEADLINE_S = 3.0
UNDO_S = 2.0
REFILL_DEADLINE_S = 120.0
JOIN_DEADLINE_S = 3600.0
"""To fetch a whole version beside everything else; nobody waits for it."""


@dataclass(frozen=True)
class AgentSettings:
    """What an agent is started with."""

    engine_url: str
    engine_id: str
    staging: Path
    pool: str | None = None
    engine_staging: str | None = None
    """The staging folder as the engine sees it, when it is mounted elsewhere there."""
    engine_key: str | None = None
    engine_admin_key: str | None = None
    budget_bytes: int | None = None
    """Most bytes of staged versions; None: what the disk has."""
    cache: Path | None = None
    """A folder that all agents of this node share."""
    cache_bytes: int | None = None
    """Most bytes of the cache; None: the disk but a tenth, which stays free in any case."""


@dataclass(frozen=True)
class View:
    """The engine at one moment."""

    state: EngineState
    reason: str | None
    """Why it is not ready; None: it is."""
    start: str | None = None
    served: Served | None = None

    @property
    def ready(self) -> bool:
        return self.reason is None


UNDER_WAY = View(EngineState.ACTIVATING, "an activation is under way")


@dataclass(frozen=True)
class Ready:
    """A version that may be activated: staged whole, staged as an adapter, or expected from a sender."""

    digest: str
    adapter: str | None = None
    """Its name."""
    transfers: tuple[Transfer, ...] = ()
    receivers: int = 0
    """Ranks of the engine that a sender is to reach; 0: it is staged."""
    repeated: bool = False


class Agent:
    """Thread-safe. The version that `status` shows is one that an agent proved for this very process of the engine."""

    def __init__(self, settings: AgentSettings, store: StoreSettings) -> None:
        self.settings = settings
        self.boot_id = uuid.uuid4().hex
        self.store = Store(store)
        self._quick_store = Store(store, deadline_s=STORE_DEADLINE_S)
        self.engine = Engine(settings.engine_url, key=settings.engine_key, admin_key=settings.engine_admin_key)
        cache = NodeCache(settings.cache, budget_bytes=settings.cache_bytes) if settings.cache else None
        self.staging = Staging(settings.staging, budget_bytes=settings.budget_bytes, cache=cache)
        self.lease = PauseLease(self.engine, self.staging.folder)
        self.shelf = Shelf(self.staging)
        self._belief = Belief(self.engine, self.staging, self.shelf)
        self._activator = Activator(
            self.engine,
            self.staging,
            self.shelf,
            self.lease,
            self._belief,
            engine_staging=settings.engine_staging,
            check_in=self._check_in,
        )
        self._engine_lock = threading.Lock()
        self._activating = threading.Event()
        self.stopping = threading.Event()
        self._view_lock = threading.Lock()
        self._view: tuple[float, View] | None = None
        for place in self.staging.crashed:
            log.warning(
                "a fetch of weights %s was cut off by a crash; the next one goes on from its whole files", place
            )
        self.lease.start_watchdog()
        if self.lease.is_open():
            log.warning("an agent died while the engine was paused; the engine continues")
            with suppress(PeerUnavailable, BadData):  # asked again with every look at the engine
                self.lease.end(Deadline(UNDO_S))

    # What it is asked to do

    def prepare(self, request: Prepare) -> Prepared:
        """Boundary 3: fetch a version and verify it as it lies on the disk: whole, or its adapter and what that belongs on
        where the engine serves adapters. Where a sender is to bring it, check its manifest. Idempotent."""
        deadline, started = Deadline(request.deadline_s), time.monotonic()
        self._adopt(deadline)
        with self.staging.locked(request.run, request.version, deadline):
            manifest = read_manifest(self.store, request.run, request.version)
            ready = self._make_ready(manifest, request.direct, deadline)
        summary = TransferSummary.of(ready.transfers)
        event(
            log,
            "prepared",
            run=request.run,
            version=request.version,
            adapter=ready.adapter,
            bytes=summary.bytes,
            receivers=ready.receivers,
            repeated=ready.repeated,
        )
        return Prepared(
            version=request.version,
            weights_digest=ready.digest,
            adapter=ready.adapter,
            bytes=summary.bytes,
            seconds=time.monotonic() - started,
            mb_per_s=summary.mb_per_s,
            p95_s=summary.p95_s,
            retries=summary.retries,
            objects=[
                FetchedObject(key=t.key, bytes=t.bytes, seconds=t.seconds, retries=t.retries, reused=t.reused)
                for t in ready.transfers
            ],
            receivers=ready.receivers,
            repeated=ready.repeated,
        )

    def _make_ready(self, manifest: WeightsManifest, direct: bool, deadline: Deadline) -> Ready:
        """In the form that this engine takes. Call it under the version's lock."""
        run, version, keep = manifest.run, manifest.version, self._belief.places
        if manifest.adapter is not None and self._serves(manifest.adapter, deadline):
            base, repeated = self._stage(run, manifest.adapter.base_version, keep, deadline)
            fetched = () if repeated else base.transfers
            adapter, repeated = self.shelf.fill(self.store, manifest, manifest.adapter, keep, deadline)
            return Ready(adapter.digest, adapter.name, (*fetched, *adapter.transfers), repeated=repeated)
        self.shelf.drop(run, version)
        if direct and (receivers := self._receivers(manifest, deadline)):
            files = {path.name: path for path in self.staging.check(self.store, manifest, deadline)}
            config = json.loads(files["config.json"].read_bytes())
            names = engine_tensors([t.name for t in manifest.tensors], config)
            self._activator.expect(Received(manifest, vocabulary(files["config.json"]), names))
            return Ready(manifest.weights_digest, receivers=receivers)
        found = self.staging.find(run, version)
        if direct and found is not None and self.staging.unchanged(found):  # asked again, between boundaries
            return Ready(found.digest, transfers=found.transfers, repeated=True)
        staged, repeated = self.staging.fill(self.store, run, version, keep, deadline)
        return Ready(staged.digest, transfers=staged.transfers, repeated=repeated)

    def _stage(self, run: str, version: int, keep: set[Place], deadline: Deadline) -> tuple[Staged, bool]:
        """A whole version that another one needs. What is staged and untouched is not read again."""
        with self.staging.locked(run, version, deadline):
            staged = self.staging.find(run, version)
            if staged is not None and self.staging.unchanged(staged):
                return staged, True
            return self.staging.fill(self.store, run, version, keep, deadline)

    def _serves(self, adapter: Adapter, deadline: Deadline) -> bool:
        """Whether this engine takes the adapter beside its base; else it gets the two merged."""
        facts = self.engine.facts(min(PATIENCE_S, deadline.left_s()))
        targets = facts.adapter_targets
        return facts.adapter_rank >= adapter.rank and (targets is None or set(adapter.targets) <= targets)

    def _receivers(self, manifest: WeightsManifest, deadline: Deadline) -> int:
        """Ranks of this engine that a sender can bring the version to; 0: it must be staged, or is."""
        if self.staging.find(manifest.run, manifest.version) is not None or not can_cross(manifest.tensors):
            return 0
        return self.engine.facts(min(PATIENCE_S, deadline.left_s())).receivers

    def _adopt(self, deadline: Deadline) -> None:
        """Know what an agent before this one served, before anything is fetched: it must stay on the disk."""
        if self._belief.served is None:
            with suppress(PeerUnavailable, BadData), self._exclusive(deadline):
                self._belief.check(self.engine.facts())

    def verify(self, request: Verify) -> Verified:
        """Boundary 2: read the staged copy again under its lock."""
        deadline, started = Deadline(request.deadline_s), time.monotonic()
        with self.staging.locked(request.run, request.version, deadline):
            staged = self._activator.prepared(request.run, request.version)
            if isinstance(staged, StagedAdapter):
                staged = self.shelf.reread(staged)
                return Verified(
                    version=request.version,
                    weights_digest=staged.digest,
                    adapter=staged.name,
                    tensors=staged.tensors,
                    bytes=sum(f.bytes for f in staged.adapter.files),
                    seconds=time.monotonic() - started,
                )
            staged = self.staging.reread(staged)
        return Verified(
            version=request.version,
            weights_digest=staged.digest,
            tensors=len(staged.manifest.tensors),
            bytes=staged.manifest.tensor_bytes(),
            seconds=time.monotonic() - started,
        )

    def activate(self, request: Activate) -> Activated:
        """Boundaries 4 and 5. The engine continues on every path; on a failure it is not ready, and says why."""
        deadline = Deadline(request.deadline_s)
        with self._one_activation(deadline), self.staging.locked(request.run, request.version, deadline):
            self._belief.lost = None
            return self._activator.activate(request, deadline)

    def refill(self) -> Activated | None:
        """Bring an engine that serves nothing what its run declares; None: nothing to do, or nobody declares anything.

        A restarted engine gets back what it lost. One that never had a version (a new pod in the place of one that is
        gone, a replica more) fetches that of the run which holds its pool. Either is an activation like any other: same
        locks, same proofs. Raises as `prepare` and `activate`.
        """
        state, lost = self.view().state, self._belief.lost  # the look is what notices a restart
        if state is EngineState.UNREACHABLE or (lost is None and state is not EngineState.EMPTY):
            return None
        declared = self._declared(lost.run if lost else self._run_of_pool())
        if declared is None:
            return None
        if lost is not None and (declared.version, declared.weights_digest) != (lost.version, lost.weights_digest):
            return None  # a reload is to bring another version
        if lost is None or lost.adapter is not None or not self.staging.holds(lost.run, lost.version):
            self.prepare(Prepare(run=declared.run, version=declared.version, deadline_s=JOIN_DEADLINE_S))
        return self._fill(declared, lost)

    def _fill(self, declared: Serving, lost: WeightsManifest | None) -> Activated | None:
        deadline = Deadline(REFILL_DEADLINE_S)
        with self._one_activation(deadline), self.staging.locked(declared.run, declared.version, deadline):
            if self._belief.lost is not lost or self._belief.served is not None:
                return None  # a reload came first
            kind = self._activator.prepared(declared.run, declared.version).manifest.kind
            request = Activate(run=declared.run, version=declared.version, kind=kind, deadline_s=REFILL_DEADLINE_S)
            event(log, "the engine is filled", run=declared.run, version=declared.version, restarted=lost is not None)
            try:
                proof = self._activator.activate(request, deadline)
            except (BadData, BadConfig):
                self._belief.lost = None  # another try would end alike: the next reload brings what is right
                raise
            except ColchisError:
                self._belief.forget()  # of an adapter's base, if that is what it got: the next look fills it again
                self._belief.failure = None
                raise
            self._belief.lost = None
            return proof

    def _run_of_pool(self) -> str | None:
        return run_of_pool(self._quick_store, self.settings.pool) if self.settings.pool else None

    def _declared(self, run: str | None) -> Serving | None:
        found = self._quick_store.find(keys.serving(run)) if run else None
        return None if found is None or run is None else Serving.from_bytes(found.data, keys.serving(run))

    def probe(self, request: Probe) -> Probed:
        """Log-probabilities of given tokens from the engine itself, ready or not."""
        deadline, started = Deadline(request.deadline_s), time.monotonic()
        with self._exclusive(deadline):
            served = self._belief.check(self.engine.facts(min(PATIENCE_S, deadline.left_s())))
        if served is None:
            raise BadData("the engine serves no version that could be probed", hint="activate one first")
        served_ids = range(served.whole.vocabulary)
        strange = next((i for ids in request.token_ids for i in ids if i not in served_ids), None)
        if strange is not None:
            raise BadData(f"token id {strange} is outside the vocabulary of {served.whole.vocabulary}")
        logprobs: list[list[float]] = []
        versions: set[str] = set()
        for token_ids in request.token_ids:
            answer = self.engine.generate(
                token_ids, logprobs=True, extra_key=None, timeout_s=deadline.left_s(), adapter=served.name
            )
            logprobs.append(answer.of(token_ids, vocabulary=served.whole.vocabulary))
            versions.add(answer.weight_version)
        if len(versions) > 1:
            raise BadData(f"the engine changed its version while it was probed: {', '.join(sorted(versions))}")
        return Probed(
            version=served.manifest.version,
            adapter=served.name,
            weight_version=versions.pop(),
            logprobs=logprobs,
            cached_tokens=served.proof.cached_tokens_after,
            cached_tokens_before=served.proof.cached_tokens_before,
            seconds=time.monotonic() - started,
        )

    # What it knows

    def status(self) -> Status:
        """A fresh look, at most FRESH_S old."""
        view = self.view()  # before what an activation may have proven meanwhile
        manifest = view.served.manifest if view.served else None
        return Status(
            engine_id=self.settings.engine_id,
            engine_url=self.settings.engine_url,
            pool=self.settings.pool,
            state=view.state,
            version=manifest.version if manifest else None,
            run=manifest.run if manifest else None,
            weights_digest=manifest.weights_digest if manifest else None,
            adapter=_served_adapter(view.served),
            reason=view.reason,
            prepared=self._prepared(),
            ready=view.ready,
            boot_id=self.boot_id,
            engine_start=view.start,
            proven=self._activator.proven,
            pause_lease_s=self.lease.left_s(),
        )

    def _prepared(self) -> dict[str, list[int]]:
        places = {(run, v) for run, versions in self.staging.versions().items() for v in versions}
        found: dict[str, list[int]] = {}
        for run, version in sorted(places | set(self.shelf.versions())):
            found.setdefault(run, []).append(version)
        return found

    def view(self) -> View:
        """State and readiness; one look answers all who ask within a moment."""
        if self._activating.is_set():
            return UNDER_WAY
        with self._view_lock:
            now = time.monotonic()
            if self._view is None or now - self._view[0] > (FRESH_S if self._view[1].ready else NOT_READY_FRESH_S):
                self._view = (now, self._look())
            return self._view[1]

    def stop(self) -> None:
        """The agent is to end: undo a pause now; an activation under way gives up at its next step.

        The lease stays open until that activation ends it, so the watchdog undoes what it may still do.
        """
        self.stopping.set()
        if self.lease.is_open():
            try:
                self.engine.resume(UNDO_S)
            except ColchisError as error:
                log.error("the pause could not be undone, the watchdog goes on trying: %s", error)

    def close(self) -> None:
        """Free the staging folder; the watchdog undoes a pause that is still open."""
        self.lease.close()
        self.engine.close()
        self.staging.close()

    def _look(self) -> View:
        if not self._engine_lock.acquire(timeout=STORE_DEADLINE_S):
            return UNDER_WAY
        try:
            if self.lease.is_open():
                self.lease.end(Deadline(0))
            facts = self.engine.facts()
            served = self._belief.check(facts)
        except ColchisError as error:
            return View(EngineState.UNREACHABLE, str(error))
        finally:
            self._engine_lock.release()
        if self._belief.failure is not None:
            return View(EngineState.FAILED, self._belief.failure.reason, facts.start, served)
        if served is None:
            return View(EngineState.EMPTY, f"serves no version of ours (its label is '{facts.label}')", facts.start)
        if facts.paused:  # our own pauses are over: the lease is not open
            reason = f"serves v{served.manifest.version}, but somebody else paused it and did not continue it"
            return View(EngineState.SERVING, reason, facts.start, served)
        return View(EngineState.SERVING, self._undeclared(served), facts.start, served)

    def _undeclared(self, served: Served) -> str | None:
        """Why the version is not the one that the run declares, when the store says so."""
        manifest = served.manifest
        try:
            declared = self._declared(manifest.run)
        except (PeerUnavailable, BadConfig) as error:
            log.warning("readiness goes by the engine alone: %s", error)
            return None
        except BadData as error:
            return str(error)
        if declared is None or declared.version == manifest.version:
            return None
        return f"serves v{manifest.version}, run '{manifest.run}' declares v{declared.version}"

    def _check_in(self) -> None:
        if self.stopping.is_set():
            raise Temporary("the agent is terminating; the activation was given up", hint="activate again")

    @contextmanager
    def _one_activation(self, deadline: Deadline) -> Iterator[None]:
        self._check_in()
        with self._exclusive(deadline):
            self._activating.set()
            try:
                yield
            finally:
                with self._view_lock:
                    self._view = None
                    self._activating.clear()

    @contextmanager
    def _exclusive(self, deadline: Deadline) -> Iterator[None]:
        """Nobody else changes the engine, or what is believed of it."""
        if not self._engine_lock.acquire(timeout=deadline.left_s()):
            raise PeerUnavailable(f"another call worked on the engine for {deadline.seconds:g} s")
        try:
            yield
        finally:
            self._engine_lock.release()


def _served_adapter(served: Served | None) -> ServedAdapter | None:
    return ServedAdapter(name=served.adapter.name, label=served.label) if served and served.adapter else None
