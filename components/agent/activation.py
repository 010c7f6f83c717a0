"""One activation, top to bottom: pause, load, continue, prove, name.

The label of the engine (weight_version) is what every sampled token is believed by (`components/weights/labels.py`). So it
never names a version that is not proven: while the weights change it says `unproven-N`; from the load on it has a mark of this
very load, under which the engine serves again; and it gets the number only when its own checksums have been compared. Who has
tokens under the mark asks the agent what it proved. Whatever dies in between leaves a label that no client accepts.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

from colchis.components.agent.engine import Engine, EngineChecksums, EngineFacts, PauseMode, Unanswered
from colchis.components.agent.hashing import Hashing
from colchis.components.agent.pause import PauseLease
from colchis.components.agent.shelf import StagedAdapter
from colchis.components.agent.staging import Staged, Staging
from colchis.components.agent.ways import Held, Received, Way
from colchis.components.errors import BadConfig, BadData, ColchisError, PeerUnavailable
from colchis.components.records.boundary import Boundary
from colchis.components.records.weights import WeightsManifest
from colchis.components.weights.activate import passing
from colchis.components.weights.checksums import ENGINE_DTYPES, Prediction
from colchis.components.weights.deadline import Deadline
from colchis.components.weights.labels import loaded, unproven
from colchis.components.weights.protocol import Activate, Activated

CANARY_TOKENS = 16
CANARY_IDS = 2
"""Its token ids are below this, for nobody may know whose vocabulary the engine has: SGLang ends on ids outside of it."""
CANARY_TIMEOUT_S = 10.0
"""For an answer before the pause. After it an answer is waited for as long as the activation may take."""
CANARY_KEY = "colchis-canary"
"""SGLang keeps caches of different extra_keys apart: no real prompt can share a prefix with the canary."""
CONTINUE_GRACE_S = 5.0


@dataclass(frozen=True)
class Served:
    """What an engine process was proven to serve."""

    whole: Held
    """The version that is loaded."""
    start: str
    """`EngineFacts.start` at the proof."""
    checksum: str
    """Over the engine's own tensors."""
    proof: Activated
    adapter: StagedAdapter | None = None
    """What makes another version of the one that is loaded."""

    @property
    def prepared(self) -> Held | StagedAdapter:
        """What `prepare` made ready of it."""
        return self.adapter or self.whole

    @property
    def manifest(self) -> WeightsManifest:
        """Of the version that is served."""
        return self.adapter.manifest if self.adapter else self.whole.manifest

    @property
    def label(self) -> str:
        """What the engine calls itself while it serves that."""
        return self.adapter.adapter.base_label if self.adapter else str(self.whole.manifest.version)

    @property
    def name(self) -> str | None:
        """What a request gives to be answered by that version, where it has to."""
        return self.adapter.name if self.adapter else None


@dataclass(frozen=True)
class Before:
    """The engine before the pause."""

    facts: EngineFacts
    checksums: EngineChecksums | None
    """None when it has no weights."""
    canary: list[int] | None
    cached_tokens: int | None
    """Of the canary, asked twice."""


@dataclass(frozen=True)
class Loaded:
    """The engine after the pause."""

    mark: str
    """Its label from now on, until it is proven."""
    dirty: bool
    load_s: float
    pause_s: float
    pause_call_s: float


@dataclass(frozen=True)
class Proven:
    """What the engine was found to hold."""

    checksums: EngineChecksums
    changed: bool | None
    cached_tokens: int | None
    """Of the canary."""


class ActivationFailed(Exception):
    """Carries the error, and the version that the engine was proven to have kept."""

    def __init__(self, error: ColchisError, kept: Served | None) -> None:
        super().__init__(str(error))
        self.error, self.kept = error, kept


class Activation:
    """Brings one prepared version into one engine. The caller holds the version's lock and runs one at a time.

    `check_in` is called between two steps and raises when the agent is to stop.
    """

    def __init__(
        self,
        engine: Engine,
        staging: Staging,
        lease: PauseLease,
        *,
        check_in: Callable[[], None],
    ) -> None:
        self.engine, self.staging, self.lease = engine, staging, lease
        self.check_in = check_in
        self._hashing = Hashing(engine, check_in)

    def run(
        self, way: Way, request: Activate, facts: EngineFacts, previous: Served | None, deadline: Deadline
    ) -> Served:
        """`facts` are those by which `previous` was found. Raises a plain ColchisError while the engine is untouched,
        ActivationFailed from the pause on."""
        held = way.held
        manifest = held.manifest
        self._refuse_contradictions(held, request.kind, previous)
        self._refuse_another_type(facts, manifest)
        digest_before = held.digest
        before = self._look(held, facts, previous, deadline)
        prediction = held.prediction if _predictable(before.facts, held) else None
        try:
            loaded = self._load(way, request.pause, before, previous, deadline)
            began = time.monotonic()
            proven = self._prove(held, loaded.mark, before, previous, prediction, deadline)
            proof_s = time.monotonic() - began
            digest_after = way.digest_after()
        except ColchisError as error:
            raise ActivationFailed(error, self._kept(before, previous, manifest.version)) from error
        proof = Activated(
            version=manifest.version,
            previous=previous.manifest.version if previous else None,
            weights_digest=manifest.weights_digest,
            pause_s=loaded.pause_s,
            pause_call_s=loaded.pause_call_s,
            load_s=loaded.load_s,
            proof_s=proof_s,
            mark=loaded.mark,
            predicted=prediction is not None,
            checksums_equal=True if prediction else None,
            checksums=len(proven.checksums.tensors),
            engine_checksum=proven.checksums.whole,
            changed=proven.changed,
            version_reported=str(manifest.version),
            direct=isinstance(held, Received),
            digest_before=digest_before,
            digest_after=digest_after,
            flush=True,
            cached_tokens_before=before.cached_tokens,
            cached_tokens_after=proven.cached_tokens,
            dirty_load=loaded.dirty,
        )
        return Served(held, before.facts.start, proven.checksums.whole, proof)

    def _load(self, way: Way, mode: PauseMode, before: Before, previous: Served | None, deadline: Deadline) -> Loaded:
        """What happens while the engine is paused."""
        version, brings = way.held.manifest.version, False
        self.lease.take(deadline.left_s() + CONTINUE_GRACE_S)
        try:
            asked = time.monotonic()
            self.engine.pause(mode, deadline.left_s())  # which SGLang acknowledges before its step under way has ended
            pause_call_s = time.monotonic() - asked
            self.engine.set_label(unproven(version), deadline.left_s())
            paused_at = time.monotonic()
            self.check_in()
            started = time.monotonic()
            brings = True
            dirty = way.bring(unproven(version), deadline)
            brings = False
            load_s = time.monotonic() - started
            if dirty:  # new weights over old keys and values: only a retraction makes the flush possible
                self.engine.pause("retract", deadline.left_s())
                self._flush(deadline)  # else the load did it: once more would cost SGLang 0.4 s
            self.check_in()
            mark = loaded(version)
            self.engine.set_label(mark, deadline.left_s())
        except ColchisError as error:
            if brings and isinstance(error, Unanswered):  # what it has now says nothing of what it has in a moment
                self._unname(version)
                raise ActivationFailed(error, None) from error
            raise ActivationFailed(error, self._kept(before, previous, version)) from error
        finally:
            self._continue()
        return Loaded(mark, dirty, load_s, time.monotonic() - paused_at, pause_call_s)

    def _flush(self, deadline: Deadline) -> None:
        try:
            self.engine.flush(deadline.left_s())
        except BadData as refusal:
            raise BadData(
                f"{Boundary.CACHE.label}: new weights over keys and values of those before: {refusal.what}",
                where=refusal.where,
                hint="activate the version again",
            ) from refusal

    def _prove(
        self,
        held: Held,
        mark: str,
        before: Before,
        previous: Served | None,
        prediction: Prediction | None,
        deadline: Deadline,
    ) -> Proven:
        """What happens while the engine serves under the mark. It has the version's number when this returns."""
        cached_tokens = self._cached_after(before, deadline)
        if cached_tokens:
            raise BadData(
                f"{Boundary.CACHE.label}: {cached_tokens} tokens of a prompt were still cached after the flush: keys and values "
                "of the weights before",
                where=self.engine.url,
                hint="activate the version again",
            )
        after = self._hashing.checksums(before.facts, held.manifest.tensors, deadline)
        changed = None if before.checksums is None else after.whole != before.checksums.whole
        differing = after.differences(prediction) if prediction else []
        self._refuse_wrong_weights(held, differing, changed, previous)
        if self.engine.start(deadline.left_s()) != before.facts.start:
            raise PeerUnavailable("the engine restarted during the activation", where=self.engine.url)
        self._refuse_other_label(mark, deadline)
        self.engine.set_label(str(held.manifest.version), deadline.left_s())
        self._refuse_other_label(str(held.manifest.version), deadline)
        return Proven(after, changed, cached_tokens)

    def _cached_after(self, before: Before, deadline: Deadline) -> int | None:
        """Cached tokens of the canary after the flush. Where they were cached before, only an answer tells that they are gone."""
        if before.canary is None:
            return None
        left_s = deadline.left_s()
        with passing(Boundary.CACHE):
            try:
                return self._ask_canary(
                    before.canary, left_s if before.cached_tokens else min(CANARY_TIMEOUT_S, left_s)
                )
            except PeerUnavailable as silence:
                if not before.cached_tokens:
                    return None  # the engine caches no prompts: its answer would tell nothing
                raise PeerUnavailable(
                    f"nobody knows whether a prompt is still cached after the flush: {silence.what}",
                    where=silence.where,
                    hint="activate the version again, with a longer deadline when the engine was busy",
                ) from silence

    def _refuse_other_label(self, told: str, deadline: Deadline) -> None:
        """Who gives the engine a label may have given it other weights."""
        label = self.engine.label(deadline.left_s())
        if label != told:
            raise BadData(f"the engine calls itself '{label}' after it was told '{told}'", where=self.engine.url)

    def _continue(self) -> None:
        """A fresh deadline: the engine must continue also when the activation's own has passed."""
        try:
            self.lease.end(Deadline(CONTINUE_GRACE_S))
        except ColchisError as error:
            raise ActivationFailed(error, None) from error

    def _refuse_contradictions(self, held: Held, kind: Literal["full", "same"], previous: Served | None) -> None:
        manifest = held.manifest
        if kind != manifest.kind:
            raise BadData(f"weights v{manifest.version} are of kind '{manifest.kind}', activate asks for '{kind}'")
        base = previous.whole.manifest if previous else None
        follows = base is not None and (base.run, base.version) == (manifest.run, manifest.base_version)
        if kind == "same" and base is not None and follows and base.weights_digest != manifest.weights_digest:
            raise BadData(
                f"weights v{manifest.version} are said to be the same as v{base.version}, but their digests are "
                f"{manifest.weights_digest[:12]} and {base.weights_digest[:12]}",
                hint="the train commit contradicts itself",
            )

    def _refuse_another_type(self, facts: EngineFacts, manifest: WeightsManifest) -> None:
        """An engine that casts what it loads samples from another policy than the one that is trained, by its rounding."""
        types = {ENGINE_DTYPES.get(tensor.dtype) for tensor in manifest.tensors}
        written = types.pop() if len(types) == 1 else None
        if written is None or facts.serves(written):
            return
        raise BadConfig(
            f"the engine runs with dtype {facts.dtype}, weights v{manifest.version} are {written}",
            where=self.engine.url,
            hint=f"start it again, with --dtype {written} (an embedded one without it takes the type of the first weights "
            "that come), or set the run's model.dtype to what it serves",
        )

    def _look(self, held: Held, facts: EngineFacts, previous: Served | None, deadline: Deadline) -> Before:
        try:
            serving = previous.whole if previous else held
            checksums = self._hashing.checksums(facts, serving.manifest.tensors, deadline)
        except (BadData, PeerUnavailable):
            checksums = None  # an engine that waits for its first weights has none to report
        canary, cached = None, None
        if not facts.paused:
            canary = random.choices(range(CANARY_IDS), k=CANARY_TOKENS)
            try:
                for _ in range(2):
                    cached = self._ask_canary(canary, min(CANARY_TIMEOUT_S, deadline.left_s()))
            except PeerUnavailable:
                canary, cached = None, None  # too busy to be asked: the flush is acknowledged, and that must do
        return Before(facts, checksums, canary, cached)

    def _ask_canary(self, canary: list[int], timeout_s: float) -> int:
        """Cached tokens of the canary."""
        return self.engine.generate(canary, logprobs=False, extra_key=CANARY_KEY, timeout_s=timeout_s).cached_tokens

    def _refuse_wrong_weights(
        self, held: Held, differing: list[str], changed: bool | None, previous: Served | None
    ) -> None:
        manifest = held.manifest
        if differing:
            raise BadData(
                f"{len(differing)} of the engine's tensors are not those of weights v{manifest.version}, "
                f"first '{differing[0]}'",
                where=self.engine.url,
                hint="the engine loaded something else: see its log, then activate again",
            )
        if changed is not None and previous is not None:
            expected = previous.whole.manifest.weights_digest != manifest.weights_digest
            if changed != expected:
                raise BadData(
                    f"from v{previous.whole.manifest.version} to v{manifest.version} the engine's tensors "
                    f"{'changed' if changed else 'did not change'}, but the commits say that they "
                    f"{'do' if expected else 'do not'}",
                    where=self.engine.url,
                    hint="the engine did not load what it was given",
                )

    def _kept(self, before: Before, previous: Served | None, version: int) -> Served | None:
        """The version before, if the engine's tensors are provably still its; it gets its name back then. Else the engine gets a
        label that nobody believes: it may have the mark by now. Not for an engine that may still load."""
        grace = Deadline(CONTINUE_GRACE_S)
        with suppress(ColchisError):  # not proven; the error that brought us here is the one to report
            if (
                previous is not None
                and self.engine.checksums(grace.left_s()).whole == previous.checksum
                and self.engine.start(grace.left_s()) == before.facts.start
            ):
                if isinstance(previous.whole, Staged):
                    self.staging.swap(previous.whole)
                self.engine.set_label(previous.label, grace.left_s())
                return previous
        self._unname(version)
        return None

    def _unname(self, version: int) -> None:
        with suppress(ColchisError):  # an engine that cannot be told is not ready either way
            self.engine.set_label(unproven(version), CONTINUE_GRACE_S)


def _predictable(facts: EngineFacts, held: Held) -> bool:
    """Whether this engine hashes its tensors in the way that the prediction assumes."""
    return (
        held.prediction is not None
        and facts.device == "cpu"
        and facts.shards == 1
        and facts.serves(held.prediction.dtype)
    )
