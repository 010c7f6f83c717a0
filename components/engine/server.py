"""The HTTP routes: SGLang's names, fields and status codes over the scheduler."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import Future
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from fastapi import FastAPI, Query, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from pydantic import BaseModel, ConfigDict

from colchis.components.engine.advance import Piece
from colchis.components.engine.generate import Generation, answer, parse_generate
from colchis.components.engine.loader import Serving, load
from colchis.components.engine.metrics import Counters
from colchis.components.engine.sample import Sample
from colchis.components.engine.scheduler import PauseMode, Scheduler
from colchis.components.engine.settings import EngineSettings
from colchis.components.engine.text import Text
from colchis.components.engine.weights import tensor_checksum
from colchis.components.errors import BadData, PeerUnavailable

log = logging.getLogger(__name__)

OPEN_ROUTES = ("/health", "/ready", "/metrics", "/ping")
"""Prefixes that need no key: probes and scrapes."""

HEALTH_DEADLINE_S = 20.0
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


class UpdateVersion(Body):
    new_version: str | int
    abort_all_requests: bool = True


class Pause(Body):
    mode: PauseMode = PauseMode.ABORT


class Continue(Body):
    torch_empty_cache: bool = True


class Abort(Body):
    rid: str | None = None
    abort_all: bool = False
    abort_message: str | None = None


class CheckWeights(Body):
    action: Literal["checksum"] = "checksum"
    skip_tensor_list: list[str] | None = None
    selector: str | None = None


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
        self.counters = Counters()
        self.text = Text()
        self.serving: Serving | None = None
        self.update_lock = asyncio.Lock()
        self.waiters: dict[int, Waiter] = {}
        self.loop: asyncio.AbstractEventLoop | None = None
        self.crashed = False
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

    async def update_from_disk(self, body: UpdateFromDisk) -> str:
        """Reads and checks beside the running model, then swaps between two steps. Returns the message."""
        started = time.perf_counter()
        if body.load_format not in LOAD_FORMATS:
            raise BadData(f"load_format {body.load_format!r} is unknown", hint="auto or safetensors")
        async with self.update_lock:
            folder = Path(body.model_path)
            fresh = await asyncio.to_thread(load, folder, self.settings, self.serving, self.text)
            version = None if body.weight_version is None else str(body.weight_version)

            def install() -> None:
                self.scheduler.install(fresh.decoder, fresh.swap, version, flush=body.flush_cache)
                self.serving, self.text.tokenizer = fresh, fresh.tokenizer

            if body.abort_all_requests:
                self.scheduler.post(lambda: _discard(self.scheduler, None, "aborted by a weight update"))
            await self.in_scheduler(self.scheduler.call_when_idle(install))
        seconds = time.perf_counter() - started
        self.counters.weight_load_seconds.labels("disk").observe(seconds)
        log.info("weights from %s serve as version %s after %.3f s", folder, self.scheduler.weight_version, seconds)
        return f"Succeeded to update model weights from {folder} in {seconds:.3f} s."


def _discard(scheduler: Scheduler, wanted: set[int] | None, message: str) -> None:
    scheduler.abort(lambda sample: wanted is None or id(sample) in wanted, message)


def refusal(message: str, status: int) -> JSONResponse:
    """SGLang's error body, and `success` and `message` for its control routes."""
    error = {"message": message, "type": "BadRequestError" if status == 400 else "Unavailable", "code": status}
    return JSONResponse({"success": False, "message": message, "error": error}, status)


def build_app(engine: Engine) -> FastAPI:
    """The application over one engine; the scheduler's thread lives as long as the app does."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        engine.loop = asyncio.get_running_loop()
        engine.scheduler.start()
        if engine.settings.model_path is not None:
            await engine.update_from_disk(UpdateFromDisk(model_path=str(engine.settings.model_path)))
        yield
        await asyncio.to_thread(engine.scheduler.stop)

    app = FastAPI(title="Colchis embedded engine", lifespan=lifespan, docs_url=None, redoc_url=None)

    @app.exception_handler(BadData)
    async def bad_data(request: Request, error: BadData) -> JSONResponse:
        return refusal(str(error), 400)

    @app.exception_handler(PeerUnavailable)
    async def unavailable(request: Request, error: PeerUnavailable) -> JSONResponse:
        return refusal(str(error), 503)

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> JSONResponse:
        fields = "; ".join(f"{'.'.join(map(str, item['loc']))}: {item['msg']}" for item in error.errors())
        return refusal(fields, 400)

    if engine.settings.api_key is not None:
        expected = f"Bearer {engine.settings.api_key}".encode()

        @app.middleware("http")
        async def authorise(request: Request, proceed: Callable[[Request], Awaitable[Response]]) -> Response:
            given = request.headers.get("authorization", "").encode()
            if request.url.path.startswith(OPEN_ROUTES) or hmac.compare_digest(given, expected):
                return await proceed(request)
            return refusal("missing or wrong bearer token", 401)

    _generation_routes(app, engine)
    _weight_routes(app, engine)
    _probe_routes(app, engine)
    return app


def _generation_routes(app: FastAPI, engine: Engine) -> None:
    scheduler = engine.scheduler

    async def generate(request: Request) -> Response:
        try:
            serving = engine.require_model()
            generation = parse_generate(
                await request.body(), engine.settings, serving.architecture, serving.eos_token_ids, engine.text
            )
        except BadData as error:
            return refusal(str(error), 400)
        except PeerUnavailable as error:
            return refusal(str(error), 503)
        waiter = engine.submit(generation)
        if generation.stream:
            return StreamingResponse(stream(waiter), media_type="text/event-stream")
        gone = asyncio.ensure_future(_disconnected(request))
        await asyncio.wait((waiter.done, gone), return_when=asyncio.FIRST_COMPLETED)
        if not waiter.done.done():
            engine.drop(generation, "the client disconnected")
            return Response(status_code=499)
        gone.cancel()
        engine.counters.requests.inc()
        version = scheduler.weight_version
        answers = [answer(generation, sample, engine.text, version) for sample in generation.samples]
        status = (
            503 if any((sample.finish_reason or {}).get("status_code") == 503 for sample in generation.samples) else 200
        )
        return Response(
            json.dumps(answers[0] if generation.single else answers).encode(),
            status,
            media_type="application/json",
        )

    async def stream(waiter: Waiter) -> AsyncIterator[str]:
        generation, left = waiter.generation, len(waiter.generation.samples)
        numbers = {id(sample): number for number, sample in enumerate(generation.samples)}
        try:
            while left:
                sample, piece = await waiter.pieces.get()
                so_far = None if piece is None else (piece.output_ids, piece.logprobs)
                left -= piece is None
                message = answer(generation, sample, engine.text, scheduler.weight_version, so_far)
                if not generation.single:
                    message["index"] = numbers[id(sample)]
                yield f"data: {json.dumps(message)}\n\n"
            engine.counters.requests.inc()
            yield "data: [DONE]\n\n"
        finally:
            if left:
                engine.drop(generation, "the client disconnected")

    # A plain Starlette route: FastAPI's dependency solving costs more than a short answer's share of a decode step.
    app.add_route("/generate", generate, methods=["POST", "PUT"])

    @app.post("/pause_generation")
    async def pause(body: Pause | None = None) -> dict[str, Any]:
        mode = (body or Pause()).mode
        count = await engine.in_scheduler(scheduler.call(lambda: scheduler.pause(mode)))
        engine.counters.paused.set(1)
        return {"status": "ok", "message": f"Generation paused ({mode.value}); {count} samples affected."}

    @app.post("/continue_generation")
    async def resume(body: Continue | None = None) -> dict[str, Any]:
        await engine.in_scheduler(scheduler.call(scheduler.resume))
        engine.counters.paused.set(0)
        return {"status": "ok", "message": "Generation continues."}

    @app.post("/abort_request")
    async def abort(body: Abort) -> Response:
        rid = body.rid
        if rid is None and not body.abort_all:
            raise BadData("give rid or abort_all")

        def wanted(sample: Sample) -> bool:
            return body.abort_all or (rid is not None and (sample.id == rid or sample.id.startswith(f"{rid}_")))

        message = body.abort_message or "aborted by request"
        await engine.in_scheduler(scheduler.call(lambda: scheduler.abort(wanted, message)))
        return Response(status_code=200)

    @app.api_route("/flush_cache", methods=["GET", "POST"])
    async def flush(timeout: Annotated[float, Query(ge=0, le=600)] = 0.0) -> Response:
        flushed = await engine.in_scheduler(scheduler.call(scheduler.flush))
        if not flushed and timeout:
            idle = asyncio.wrap_future(scheduler.call_when_idle(scheduler.flush))
            try:
                flushed = await asyncio.wait_for(idle, timeout)
            except TimeoutError:
                flushed = False
        if flushed:
            return PlainTextResponse("Cache flushed.\n")
        return PlainTextResponse("Flush cache failed.: samples are running; retry, or pause with mode retract\n", 400)


async def _disconnected(request: Request) -> None:
    """Returns when the client hangs up."""
    while (await request.receive())["type"] != "http.disconnect":
        continue


def _weight_routes(app: FastAPI, engine: Engine) -> None:
    scheduler = engine.scheduler

    @app.post("/update_weights_from_disk")
    async def update(body: UpdateFromDisk) -> dict[str, Any]:
        try:
            message = await engine.update_from_disk(body)
        except BadData as error:
            engine.counters.weight_loads.labels("refused").inc()
            log.warning("weights refused: %s", error)
            raise
        engine.counters.weight_loads.labels("served").inc()
        return {"success": True, "message": message, "num_paused_requests": 0}

    @app.post("/update_weight_version")
    async def update_version(body: UpdateVersion) -> dict[str, Any]:
        version = str(body.new_version)

        def apply() -> None:
            if body.abort_all_requests:
                scheduler.abort_all("aborted by a change of the weight version")
            scheduler.set_version(version)

        await engine.in_scheduler(scheduler.call(apply))
        return {"success": True, "message": f"Weight version updated to {version}", "new_version": version}

    @app.api_route("/weights_checker", methods=["GET", "POST"])
    async def check(body: CheckWeights | None = None) -> dict[str, Any]:
        skip = (body.skip_tensor_list if body else None) or []
        serving = engine.require_model()

        def named() -> list[tuple[str, torch.Tensor]]:
            return [
                (name, tensor)
                for name, tensor in serving.decoder.named_tensors()
                if not any(part in name for part in skip)
            ]

        # The references are taken between two steps; an update later replaces tensors, it never writes into them.
        tensors = await engine.in_scheduler(scheduler.call(named))
        checksums = await asyncio.to_thread(lambda: {name: tensor_checksum(tensor) for name, tensor in tensors})
        digest = hashlib.sha256()
        for name in sorted(checksums):
            digest.update(name.encode() + checksums[name].encode())
        per_gpu = digest.hexdigest()
        place = {
            "tp_rank": 0,
            "tp_size": 1,
            "dp_rank": 0,
            "dp_size": 1,
            "pp_rank": 0,
            "pp_size": 1,
            "rank": 0,
            "size": 1,
        }
        return {
            "success": True,
            "message": "Success.",
            "ranks": [{"checksums": checksums, "per_gpu_checksum": per_gpu, "parallelism_info": place}],
            "per_engine_checksum": hashlib.sha256(per_gpu.encode()).hexdigest(),
        }


def _probe_routes(app: FastAPI, engine: Engine) -> None:
    scheduler, settings = engine.scheduler, engine.settings

    @app.get("/health")
    @app.get("/ping")
    async def health() -> Response:
        """Liveness: the scheduler's thread runs. True while paused, and before the first weights."""
        return Response(status_code=200 if scheduler.alive else 503)

    @app.get("/ready")
    @app.get("/readiness")
    async def ready() -> Response:
        """Would a /generate be served now? Not without a model, and not while paused."""
        reason = (
            "the scheduler ended"
            if not scheduler.alive
            else "no model is loaded"
            if engine.serving is None
            else f"paused ({scheduler.paused.value})"
            if scheduler.paused
            else None
        )
        return Response(status_code=200) if reason is None else refusal(reason, 503)

    @app.get("/health_generate")
    async def health_generate() -> Response:
        """Draws one token. 503 at once while paused: SGLang hangs 20 s there and then stays unhealthy."""
        serving = engine.require_model()
        if scheduler.paused is not None:
            return refusal(f"paused ({scheduler.paused.value})", 503)
        body = b'{"input_ids": [0], "sampling_params": {"max_new_tokens": 1, "temperature": 0}}'
        generation = parse_generate(body, settings, serving.architecture, serving.eos_token_ids, engine.text)
        waiter = engine.submit(generation)
        try:
            await asyncio.wait_for(waiter.done, HEALTH_DEADLINE_S)
        except TimeoutError:
            engine.drop(generation, "the health probe gave up")
            return refusal(f"no token within {HEALTH_DEADLINE_S:.0f} s", 503)
        return Response(status_code=200)

    @app.get("/model_info")
    @app.get("/get_model_info")
    async def model_info() -> dict[str, Any]:
        serving = engine.serving
        path = str(serving.folder) if serving else None
        return {
            "model_path": path,
            "served_model_name": path,
            "tokenizer_path": path,
            "is_generation": True,
            "weight_version": scheduler.weight_version,
            "load_format": "safetensors",
            "model_type": serving.architecture.model_type if serving else None,
            "architectures": serving.config.get("architectures") if serving else None,
            "vocab_size": serving.architecture.vocab if serving else None,
            "context_length": serving.architecture.context_tokens if serving else None,
            "static_decode_loop": serving.architecture.static if serving else None,
        }

    @app.get("/server_info")
    @app.get("/get_server_info")
    async def server_info() -> dict[str, Any]:
        serving = engine.serving
        live = {
            "weight_version": scheduler.weight_version,
            "model_path": str(serving.folder) if serving else None,
            "paused": scheduler.paused.value if scheduler.paused else None,
            "num_running_reqs": scheduler.running,
            "num_queue_reqs": scheduler.queued,
            "row_quantum": getattr(serving.decoder, "quantum", 1) if serving else None,
        }
        return {**settings.public(), "engine": "colchis-embedded", "status": "ready", "internal_states": [live]}

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(engine.counters.exposition(), media_type="text/plain; version=0.0.4")
