"""One activation of an adapter: load it beside the base, and prove it. Nobody waits, so nothing is paused.

Two names say what a token was drawn with: the engine's label names the base, and each request names the adapter. Neither
changes for what is in flight, whose keys and values no other adapter shares.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress

from colchis.components.agent.activation import CONTINUE_GRACE_S, ActivationFailed, Served
from colchis.components.agent.engine import Engine
from colchis.components.agent.hashing import Hashing
from colchis.components.agent.shelf import Shelf, StagedAdapter
from colchis.components.errors import BadData, ColchisError, PeerUnavailable
from colchis.components.records.boundary import Boundary
from colchis.components.weights.deadline import Deadline
from colchis.components.weights.gap import Gap
from colchis.components.weights.labels import unproven
from colchis.components.weights.protocol import Activated

UNLOAD_S = 3.0
"""SGLang unloads an adapter when the last request that names it has ended; nobody waits longer for that."""


class AdapterActivation:
    """Brings one prepared adapter into an engine that provably holds its base. The caller holds the version's lock.

    `engine_folder` is the shelf as the engine sees it. `check_in` raises when the agent is to stop.
    """

    def __init__(self, engine: Engine, shelf: Shelf, *, engine_folder: str, check_in: Callable[[], None]) -> None:
        self.engine, self.shelf = engine, shelf
        self.engine_folder = engine_folder
        self.check_in = check_in
        self._hashing = Hashing(engine, check_in)

    def run(self, staged: StagedAdapter, base: Served, deadline: Deadline) -> Served:
        """`base` is what the engine serves now: the base itself, or another adapter on it. ActivationFailed says whether it
        still does."""
        try:
            if self.engine.facts(deadline.left_s()).paused:  # by somebody else: nothing could be proven
                self.engine.resume(deadline.left_s())
            self._refuse_other_base(base, deadline)
            return self._load_and_prove(staged, base, deadline)
        except ColchisError as error:
            raise ActivationFailed(error, self._kept(staged, base)) from error

    def unload_others(self, keep: set[str | None]) -> None:
        """Forget the adapters of this shelf that no new request will name. Best effort: they only take memory."""
        with suppress(ColchisError):
            for name, folder in self.engine.adapters(UNLOAD_S).items():
                if name not in keep and folder.startswith(f"{self.engine_folder}/"):
                    with suppress(ColchisError):
                        self.engine.unload_adapter(name, UNLOAD_S)

    def _load_and_prove(self, staged: StagedAdapter, base: Served, deadline: Deadline) -> Served:
        path = f"{self.engine_folder}/{staged.folder.relative_to(self.shelf.folder)}"
        with suppress(
            BadData
        ):  # refused where there is none; one that an agent left that died was loaded from who knows what
            self.engine.unload_adapter(staged.name, deadline.left_s())
        self.check_in()
        started = time.monotonic()
        self.engine.load_adapter(staged.name, path, deadline.left_s())
        load_s = time.monotonic() - started
        digest_after = self.shelf.reread(staged).digest
        loaded = self.engine.adapters(deadline.left_s()).get(staged.name)
        if loaded != path:
            raise BadData(
                f"the engine has adapter '{staged.name}' from {loaded}, it was told {path}", where=self.engine.url
            )
        cached_before, cached_after = self._probe(staged, base, deadline)
        self.check_in()
        self._refuse_other_base(base, deadline)
        label = staged.adapter.base_label
        self.engine.set_label(label, deadline.left_s())
        reported = self.engine.label(deadline.left_s())
        if reported != label:
            raise BadData(f"the engine calls itself '{reported}' after it was told '{label}'", where=self.engine.url)
        proof = Activated(
            version=staged.manifest.version,
            previous=base.manifest.version,
            weights_digest=staged.manifest.weights_digest,
            adapter=staged.name,
            pause_s=0.0,
            load_s=load_s,
            predicted=base.proof.predicted,
            checksums_equal=base.proof.checksums_equal,
            checksums=base.proof.checksums,
            engine_checksum=base.checksum,
            changed=False,
            version_reported=reported,
            digest_before=staged.digest,
            digest_after=digest_after,
            flush=False,
            cached_tokens_before=cached_before,
            cached_tokens_after=cached_after,
        )
        return Served(base.whole, base.start, base.checksum, proof, staged)

    def _probe(self, staged: StagedAdapter, base: Served, deadline: Deadline) -> tuple[int, int]:
        """The engine's log-probabilities under the new name are the trainer's, and nothing that it cached under the name
        before is used. Cached tokens of one prompt under the old name, asked twice, and then under the new one."""
        probe = staged.adapter.probe
        cached = []
        for name in (base.name, base.name, staged.name):
            answer = self.engine.generate(
                probe.token_ids[0], logprobs=False, extra_key=None, timeout_s=deadline.left_s(), adapter=name
            )
            cached.append(answer.cached_tokens)
        if cached[-1]:
            raise BadData(
                f"{Boundary.CACHE.label}: {cached[-1]} tokens of a prompt were cached before the adapter's first request",
                where=self.engine.url,
                hint="another adapter bears its name",
            )
        found = []
        for token_ids in probe.token_ids:
            answer = self.engine.generate(
                token_ids, logprobs=True, extra_key=None, timeout_s=deadline.left_s(), adapter=staged.name
            )
            found.append(answer.of(token_ids, vocabulary=base.whole.vocabulary))
        if excess := Gap.of(found, probe.logprobs).excess(probe.tolerance):
            raise BadData(
                f"log-probabilities of the trainer and under adapter '{staged.name}' {excess}",
                where=self.engine.url,
                hint="the engine does not apply the adapter as it was trained; set reload.adapters=merged",
            )
        return cached[1], cached[2]

    def _refuse_other_base(self, base: Served, deadline: Deadline) -> None:
        """The engine's own tensors must be those that the adapter was trained beside: its checksums say nothing of adapters."""
        facts = self.engine.facts(deadline.left_s())
        if facts.start != base.start:
            raise PeerUnavailable("the engine restarted during the activation", where=self.engine.url)
        if self._hashing.checksums(facts, base.whole.manifest.tensors, deadline).whole != base.checksum:
            raise BadData(
                f"the engine's tensors are not those of v{base.whole.manifest.version} any more, on which the adapter belongs",
                where=self.engine.url,
                hint="somebody else changed them; the next reload brings the base again",
            )

    def _kept(self, staged: StagedAdapter, base: Served) -> Served | None:
        """What was served before, if it still is; it gets its name back. Else the engine gets one that nobody believes."""
        grace = Deadline(CONTINUE_GRACE_S)
        with suppress(ColchisError):
            self.engine.unload_adapter(staged.name, UNLOAD_S)
        try:
            self._refuse_other_base(base, grace)
            self.engine.set_label(base.label, grace.left_s())
        except ColchisError:
            with suppress(ColchisError):
                self.engine.set_label(unproven(staged.manifest.version), CONTINUE_GRACE_S)
            return None
        return base
