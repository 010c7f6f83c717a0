"""The engine behind the routes: the scheduler, the model that serves, and the requests in flight."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict

from colchis.components.engine.advance import Piece
from colchis.components.engine.generate import Generation
from colchis.components.engine.loader import Serving, load
from colchis.components.engine.metrics import Counters
from colchis.components.engine.sample import Sample
from colchis.components.engine.scheduler import Scheduler
from colchis.components.engine.settings import EngineSettings
from colchis.components.engine.text import Text
from colchis.components.engine.weights import checksums
from colchis.components.errors import BadData, ColchisError, PeerUnavailable

log = logging.getLogger(__name__)

LOAD_FORMATS = {None, "auto", "safetensors"}


class Body(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class UpdateFromDisk(Body):
    """The last four fields are SGLang's that change nothing here."""

    model_path: str
    load_format: str | None = None
    flush_cache: bool = True
    weight_version: str | int | None = None
    abort_all_requests: bool = False
    recapture_cuda_graph: bool = False
    torch_empty_cache: bool = False
    token_step: int = 0
    manifest: dict[str, Any] | None = None


class Waiter:
    """One /generate request: counts down its samples, and passes stream pieces on."""

    def __init__(self, generation: Generation) -> None:
        self.generation = generation
        self.open = len(generation.samples)
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.pieces: asyncio.Queue[tuple[Sample, Piece | None]] = asyncio.Queue()


class Engine:
    """What the routes share: the scheduler, the model that serves, and the requests in flight (by sample)."""

    def __init__(self, settings: EngineSettings, on_crash: Callable[[], None]) -> None:
        self.settings = settings
        self.start_id = secrets.token_hex(8)
        """Tells this process from the one before it on the same port, whatever label both were started with."""
        self.counters = Counters()
        self.text = Text()
        self.serving: Serving | None = None
        self.fresh_checksums: dict[str, Future[str]] | None = None
        """Of the last load, hashed while it was reading; they answer one question, all others are answered anew."""
        self.update_lock = asyncio.Lock()
        self.waiters: dict[int, Waiter] = {}
        self.loop: asyncio.AbstractEventLoop | None = None
        self.crashed = False
        self.start_error: ColchisError | None = None
        self._on_crash = on_crash
        self.scheduler = Scheduler(settings, self.counters, self._deliver, self.text.stop_string, self._crash)

    def _crash(self) -> None:
        self.crashed = True
        self._on_crash()

    def _deliver(self, finished: list[Sample], pieces: list[Piece]) -> None:
        """Called in the scheduler's thread, once a step."""
        if self.loop is not None and not self.loop.is_closed():
            self.loop.call_soon_threadsafe(self._hand_out, finished, pieces)

    def _hand_out(self, finished: list[Sample], pieces: list[Piece]) -> None:
        for piece in pieces:
            waiter = self.waiters.get(id(piece.sample))
            if waiter is not None:
                waiter.pieces.put_nowait((piece.sample, piece))
        for sample in finished:
            waiter = self.waiters.pop(id(sample), None)
            if sample.finished_s is not None:
                self.counters.latency.observe(sample.finished_s - sample.created_s)
            if sample.first_token_s is not None:
                self.counters.first_token.observe(sample.first_token_s - sample.created_s)
            if waiter is None:
                continue
            waiter.open -= 1
            if waiter.generation.stream:
                waiter.pieces.put_nowait((sample, None))
            if waiter.open == 0 and not waiter.done.done():
                waiter.done.set_result(None)

    def submit(self, generation: Generation) -> Waiter:
        waiter = Waiter(generation)
        for sample in generation.samples:
            self.waiters[id(sample)] = waiter
        self.scheduler.submit(generation.samples)
        return waiter

    def drop(self, generation: Generation, message: str) -> None:
        """Frees the rows of a request that nobody waits for."""
        mine = {id(sample) for sample in generation.samples}
        self.scheduler.post(lambda: _discard(self.scheduler, mine, message))

    async def in_scheduler(self, future: Future[Any]) -> Any:
        return await asyncio.wrap_future(future)

    def require_model(self) -> Serving:
        if self.serving is None:
            raise PeerUnavailable(
                "no model is loaded", hint="POST /update_weights_from_disk with a model directory first"
            )
        return self.serving

    async def checksums(self, skip: list[str]) -> dict[str, str]:
        """By name, of the tensors that serve now, less those whose name contains one of `skip`."""
        serving = self.require_model()

        def take() -> tuple[list[tuple[str, torch.Tensor]], dict[str, Future[str]] | None]:
            named = [(n, t) for n, t in serving.decoder.named_tensors() if not any(part in n for part in skip)]
            fresh, self.fresh_checksums = self.fresh_checksums, None
            return named, fresh

        # The references are taken between two steps; an update later replaces tensors, it never writes into them.
        named, fresh = await self.in_scheduler(self.scheduler.call(take))
        if fresh is None:
            return await asyncio.to_thread(checksums, named)
        return {name: await asyncio.wrap_future(fresh[name]) for name, _ in named}

    async def update_from_disk(self, body: UpdateFromDisk) -> str:
        """Reads and checks beside the running model, then swaps between two steps. Returns the message."""
        started = time.perf_counter()
        if body.load_format not in LOAD_FORMATS:
            raise BadData(f"load_format {body.load_format!r} is unknown", hint="auto or safetensors")
        async with self.update_lock:
            folder = Path(body.model_path)
            fresh = await asyncio.to_thread(load, folder, self.settings, self.serving, self.text)
            version = None if body.weight_version is None else str(body.weight_version)
            if body.abort_all_requests:
                self.scheduler.post(lambda: _discard(self.scheduler, None, "aborted by a weight update"))
            await self.install(fresh, version, flush=body.flush_cache)
        seconds = time.perf_counter() - started
        self.counters.weight_load_seconds.labels("disk").set(seconds)
        log.info("weights from %s serve as version %s after %.3f s", folder, self.scheduler.weight_version, seconds)
        return f"Succeeded to update model weights from {folder} in {seconds:.3f} s."

    async def install(self, fresh: Serving, version: str | None, *, flush: bool) -> None:
        """Serve that from now on, between two steps, when nothing runs or all is paused. Hold `update_lock`."""

        def install() -> None:
            self.scheduler.install(fresh.decoder, fresh.swap, version, flush=flush)
            self.serving, self.text.tokenizer = fresh, fresh.tokenizer
            self.fresh_checksums = fresh.checksums

        await self.in_scheduler(self.scheduler.call_when_idle(install))


def _discard(scheduler: Scheduler, wanted: set[int] | None, message: str) -> None:
    scheduler.abort(lambda sample: wanted is None or id(sample) in wanted, message)


def refusal(message: str, status: int) -> JSONResponse:
    """SGLang's error body, and `success` and `message` for its control routes."""
    error = {"message": message, "type": "BadRequestError" if status == 400 else "Unavailable", "code": status}
    return JSONResponse({"success": False, "message": message, "error": error}, status)
