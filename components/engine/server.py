"""The HTTP routes: SGLang's names, fields and status codes over the scheduler."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated, Any, Literal

from fastapi import FastAPI, Query, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from starlette.types import Receive, Scope, Send

from colchis.components.engine import receive
from colchis.components.engine.generate import parse_generate
from colchis.components.engine.generate_route import GenerateRoute
from colchis.components.engine.sample import Sample
from colchis.components.engine.scheduler import PauseMode
from colchis.components.engine.service import Body, Engine, UpdateFromDisk, refusal
from colchis.components.errors import BadConfig, BadData, ColchisError, PeerUnavailable

log = logging.getLogger(__name__)

OPEN_ROUTES = ("/health", "/ready", "/metrics", "/ping")
"""Prefixes that need no key: probes and scrapes."""

HEALTH_DEADLINE_S = 20.0


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


class FrontDoor:
    """Asks for the bearer token, except on probes and scrapes, and takes /generate past the framework, whose layers
    cost more than decoding a short answer does."""

    def __init__(self, app: FastAPI, engine: Engine) -> None:
        self.app = app
        self.generate = GenerateRoute(engine)
        key = engine.settings.api_key
        self.expected = None if key is None else f"Bearer {key}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        if self.expected is not None and not scope["path"].startswith(OPEN_ROUTES):
            given = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
            if not hmac.compare_digest(given, self.expected):
                await refusal("missing or wrong bearer token", 401)(scope, receive, send)
                return
        if scope["path"] == "/generate" and scope["method"] in ("POST", "PUT"):
            await self.generate(scope, receive, send)
        else:
            await self.app(scope, receive, send)


def build_app(engine: Engine) -> FrontDoor:
    """The application over one engine; the scheduler's thread lives as long as the app does."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        engine.loop = asyncio.get_running_loop()
        engine.scheduler.start()
        if engine.settings.model_path is not None:
            try:
                await engine.update_from_disk(UpdateFromDisk(model_path=str(engine.settings.model_path)))
            except ColchisError as error:
                engine.start_error = error
                raise
        yield
        await asyncio.to_thread(engine.scheduler.stop)

    app = FastAPI(title="Colchis embedded engine", lifespan=lifespan, docs_url=None, redoc_url=None)

    @app.exception_handler(BadData)
    @app.exception_handler(BadConfig)
    async def bad_data(request: Request, error: BadData | BadConfig) -> JSONResponse:
        return refusal(str(error), 400)

    @app.exception_handler(PeerUnavailable)
    async def unavailable(request: Request, error: PeerUnavailable) -> JSONResponse:
        return refusal(str(error), 503)

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> JSONResponse:
        fields = "; ".join(f"{'.'.join(map(str, item['loc']))}: {item['msg']}" for item in error.errors())
        return refusal(fields, 400)

    _control_routes(app, engine)
    _weight_routes(app, engine)
    receive.add_routes(app, engine)
    _probe_routes(app, engine)
    return FrontDoor(app, engine)


def _control_routes(app: FastAPI, engine: Engine) -> None:
    scheduler = engine.scheduler

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
        checksums = await engine.checksums((body.skip_tensor_list if body else None) or [])
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
            "row_quantum": getattr(serving.decoder, "quantum", None) if serving else None,
            "attention_windows": getattr(serving.decoder, "windows", None) if serving else None,
        }
        receives = serving is not None and serving.architecture.static
        dtype = str(serving.dtype).removeprefix("torch.") if serving else settings.dtype
        identity = {
            "dtype": dtype,
            "engine": "colchis-embedded",
            "start_id": engine.start_id,
            "receives_weights": receives,
        }
        return {**settings.public(), **identity, "status": "ready", "internal_states": [live]}

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(engine.counters.exposition(), media_type="text/plain; version=0.0.4")
