"""One activation of an adapter: load beside the base, prove, name. Nobody waits, so nothing is paused.

An adapter's name says its version and its content, and no request names it before the engine's label says the version. So
what is in flight goes on under the adapter that it named, whose keys and values no other one shares.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from contextlib import suppress

from colchis.components.agent.activation import (
    CANARY_TOKENS,
    CONTINUE_GRACE_S,
    ActivationFailed,
    Served,
    unproven,
)
from colchis.components.agent.engine import Engine
from colchis.components.agent.shelf import Shelf, StagedAdapter
from colchis.components.errors import BadData, ColchisError, PeerUnavailable
from colchis.components.weights.deadline import Deadline
from colchis.components.weights.protocol import Activated


class AdapterActivation:
    """Brings one prepared adapter into an engine that provably holds its base. The caller holds the version's lock.

    `engine_folder` is the shelf as the engine sees it. `check_in` raises when the agent is to stop.
    """

    def __init__(self, engine: Engine, shelf: Shelf, *, engine_folder: str, check_in: Callable[[], None]) -> None:
        self.engine, self.shelf = engine, shelf
        self.engine_folder = engine_folder
        self.check_in = check_in

    def run(self, adapter: StagedAdapter, base: Served, deadline: Deadline) -> Served:
        """`base` is what the engine serves now: the base itself, or another adapter on it. ActivationFailed says whether it
        still does."""
        try:
            self._refuse_other_base(base, deadline)
            served = self._load_and_prove(adapter, base, deadline)
        except ColchisError as error:
            raise ActivationFailed(error, self._kept(adapter, base)) from error
        self._unload_old({served.name, base.name}, deadline)
        return served

    def _load_and_prove(self, adapter: StagedAdapter, base: Served, deadline: Deadline) -> Served:
        manifest, path = adapter.manifest, self._path_of(adapter)
        if adapter.name in self.engine.adapters(
            deadline.left_s()
        ):  # of an agent that died: loaded from what, nobody knows
            self.engine.unload_adapter(adapter.name, deadline.left_s())
        self.check_in()
        started = time.monotonic()
        self.engine.load_adapter(adapter.name, path, deadline.left_s())
        load_s = time.monotonic() - started
        digest_after = self.shelf.reread(adapter).digest
        loaded = self.engine.adapters(deadline.left_s())
        if loaded.get(adapter.name) != path:
            raise BadData(
                f"the engine has '{adapter.name}' from {loaded.get(adapter.name)}, it was told {path}",
                where=self.engine.url,
            )
        canary = random.choices(range(base.staged.vocabulary), k=CANARY_TOKENS)
        answer = self.engine.generate(
            canary, logprobs=True, extra_key=None, timeout_s=deadline.left_s(), adapter=adapter.name
        )
        if answer.cached_tokens:
            raise BadData(
                f"{answer.cached_tokens} tokens of a prompt were cached before the adapter's first request",
                where=self.engine.url,
                hint="another adapter bears its name",
            )
        self.check_in()
        self._refuse_other_base(base, deadline)
        version = str(manifest.version)
        self.engine.set_label(version, deadline.left_s())
        label = self.engine.label(deadline.left_s())
        if label != version:
            raise BadData(f"the engine calls itself '{label}' after it was told '{version}'", where=self.engine.url)
        proof = Activated(
            version=manifest.version,
            previous=base.manifest.version,
            weights_digest=manifest.weights_digest,
            adapter=adapter.name,
            pause_s=0.0,
            load_s=load_s,
            predicted=base.proof.predicted,
            checksums_equal=base.proof.checksums_equal,
            checksums=base.proof.checksums,
            engine_checksum=base.checksum,
            changed=False,
            version_reported=label,
            digest_before=adapter.digest,
            digest_after=digest_after,
            flush=False,
            cached_tokens_before=None,
            cached_tokens_after=answer.cached_tokens,
        )
        return Served(base.staged, base.start, base.checksum, proof, adapter)

    def _refuse_other_base(self, base: Served, deadline: Deadline) -> None:
        """The engine's own tensors must be those that the adapter was trained beside: its checksums say nothing of adapters."""
        if self.engine.facts(deadline.left_s()).start != base.start:
            raise PeerUnavailable("the engine restarted during the activation", where=self.engine.url)
        if self.engine.checksums(deadline.left_s()).whole != base.checksum:
            raise BadData(
                f"the engine's tensors are not those of v{base.staged.manifest.version} any more, on which the adapter belongs",
                where=self.engine.url,
                hint="somebody else changed them; the next reload brings the base again",
            )

    def _kept(self, adapter: StagedAdapter, base: Served) -> Served | None:
        """What was served before, if it still is; it gets its name back. Else the engine gets one that nobody believes."""
        grace = Deadline(CONTINUE_GRACE_S)
        with suppress(ColchisError):
            self.engine.unload_adapter(adapter.name, grace.left_s())
        try:
            self._refuse_other_base(base, grace)
            self.engine.set_label(str(base.manifest.version), grace.left_s())
        except ColchisError:
            with suppress(ColchisError):
                self.engine.set_label(unproven(adapter.manifest.version), CONTINUE_GRACE_S)
            return None
        return base

    def _unload_old(self, keep: set[str | None], deadline: Deadline) -> None:
        """Adapters of this shelf that no new request will name. Best effort: they cost memory, nothing else."""
        with suppress(ColchisError):
            for name, folder in self.engine.adapters(deadline.left_s()).items():
                if name not in keep and folder.startswith(self.engine_folder):
                    self.engine.unload_adapter(name, deadline.left_s())

    def _path_of(self, adapter: StagedAdapter) -> str:
        return f"{self.engine_folder}/{adapter.folder.relative_to(self.shelf.folder)}"
