"""The agent's HTTP face: bearer token, one route per request, errors as `Refusal`."""

from __future__ import annotations

import hmac
import logging
import time
from collections.abc import Awaitable, Callable
from types import FrameType
from typing import TypeVar

import uvicorn
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

import colchis
from colchis.components.agent.agent import Agent, AgentSettings
from colchis.components.agent.refill import Refill
from colchis.components.errors import BadConfig, Bug, ColchisError, refused_by_system
from colchis.components.logs import event
from colchis.components.store import StoreSettings
from colchis.components.weights.protocol import (
    ENGINE_HEADER,
    STATUS_OF,
    Activate,
    Activated,
    Prepare,
    Prepared,
    Probe,
    Probed,
    Refusal,
    Status,
    Verified,
    Verify,
)

log = logging.getLogger(__name__)

OPEN = {"/ready", "/live", "/metrics"}
"""Asked by kubelet and Prometheus, which have no token; they tell nothing but health."""
GRACE_S = 8
"""For requests that are under way when the agent is told to end."""
PAUSES_S = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100)

_Answer = TypeVar("_Answer")


class Metrics:
    """What Prometheus sees."""

    def __init__(self, agent: Agent) -> None:
        self.agent = agent
        self.registry = registry = CollectorRegistry()
        self.ready = Gauge("colchis_agent_ready", "1 if the engine serves the declared version", registry=registry)
        self.version = Gauge("colchis_agent_version", "Proven version of the engine, -1: none", registry=registry)
        self.calls = Counter("colchis_agent_calls", "Calls by outcome", ["call", "outcome"], registry=registry)
        self.fetched = Counter("colchis_agent_fetched_bytes", "Bytes fetched from the store", registry=registry)
        self.pause = Histogram("colchis_agent_pause_seconds", "Engine paused", buckets=PAUSES_S, registry=registry)
        self.load = Histogram("colchis_agent_load_seconds", "Engine loading", buckets=PAUSES_S, registry=registry)
        self.proof = Histogram(
            "colchis_agent_proof_seconds", "Engine serving what is being proven", buckets=PAUSES_S, registry=registry
        )

    def text(self) -> bytes:
        view = self.agent.view()
        self.ready.set(view.ready)
        self.version.set(view.served.manifest.version if view.served else -1)
        return generate_latest(self.registry)


def build_app(agent: Agent, token: str) -> FastAPI:
    """The application over one agent. Its routes are plain functions: they run in threads and may block."""
    app = FastAPI(title="Colchis agent", version=colchis.__version__, docs_url=None, redoc_url=None)
    expected = f"Bearer {token}".encode()
    metrics = Metrics(agent)

    def refuse(error: ColchisError) -> JSONResponse:
        status = next((status for kind, status in STATUS_OF.items() if isinstance(error, kind)), 500)
        return JSONResponse(Refusal.of(error).model_dump(), status)

    @app.middleware("http")
    async def authorise(request: Request, proceed: Callable[[Request], Awaitable[Response]]) -> Response:
        given = request.headers.get("authorization", "").encode()
        if request.url.path not in OPEN and not hmac.compare_digest(given, expected):
            refusal = Refusal.of(BadConfig("wrong or missing bearer token", hint="set COLCHIS_AGENT_TOKEN alike"))
            return JSONResponse(refusal.model_dump(), 401)
        response = await proceed(request)
        response.headers[ENGINE_HEADER] = agent.settings.engine_id
        return response

    @app.exception_handler(ColchisError)
    async def refused(request: Request, error: ColchisError) -> JSONResponse:
        return refuse(error)

    @app.exception_handler(OSError)
    async def refused_by_the_system(request: Request, error: OSError) -> JSONResponse:
        refusal = refused_by_system(error, str(agent.staging.folder))
        if refusal is None:
            log.error("an error of the system that nobody expected", exc_info=error)
        return refuse(refusal or Bug(f"{type(error).__name__}: {error}", where=request.url.path))

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> JSONResponse:
        problems = "; ".join(f"{'.'.join(map(str, e['loc'][1:]))}: {e['msg']}" for e in error.errors())
        return refuse(BadConfig(f"not a request that this agent understands: {problems}", where=request.url.path))

    def counted(call: str, work: Callable[[], _Answer]) -> _Answer:
        started = time.monotonic()
        try:
            answer = work()
        except Exception as error:
            kind = error.family if isinstance(error, ColchisError) else type(error).__name__
            metrics.calls.labels(call, kind).inc()
            event(log, f"{call} refused", error=str(error), seconds=round(time.monotonic() - started, 3))
            raise
        metrics.calls.labels(call, "ok").inc()
        return answer

    @app.get("/status")
    def status() -> Status:
        return agent.status()

    @app.post("/prepare")
    def prepare(request: Prepare) -> Prepared:
        answer = counted("prepare", lambda: agent.prepare(request))
        if not answer.repeated:
            metrics.fetched.inc(answer.bytes)
        return answer

    @app.post("/verify")
    def verify(request: Verify) -> Verified:
        return counted("verify", lambda: agent.verify(request))

    @app.post("/activate")
    def activate(request: Activate) -> Activated:
        answer = counted("activate", lambda: agent.activate(request))
        if not answer.repeated:
            if answer.pause_s:
                metrics.pause.observe(answer.pause_s)
                metrics.proof.observe(answer.proof_s)
            metrics.load.observe(answer.load_s)
        return answer

    @app.post("/probe")
    def probe(request: Probe) -> Probed:
        return counted("probe", lambda: agent.probe(request))

    @app.get("/ready")
    def ready() -> Response:
        view = agent.view()
        return PlainTextResponse(view.reason or "ready", 200 if view.ready else 503)

    @app.get("/live")
    async def live() -> Response:
        return PlainTextResponse("alive")

    @app.get("/metrics")
    def scrape() -> Response:
        return Response(metrics.text(), media_type="text/plain; version=0.0.4")

    return app


class _Server(uvicorn.Server):
    """Undoes a pause at the signal itself, not after the requests under way have ended."""

    def __init__(self, config: uvicorn.Config, agent: Agent) -> None:
        super().__init__(config)
        self.agent = agent

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.agent.stop()
        super().handle_exit(sig, frame)


def serve(settings: AgentSettings, store: StoreSettings, *, host: str, port: int, token: str) -> None:
    """Run an agent until SIGTERM or SIGINT. Port 0 takes a free one; the line `listening` in the log names it.

    BadConfig without a token, or when another agent has the staging folder.
    """
    if not token:
        raise BadConfig("an agent without a token would let anybody change the engine", hint="set COLCHIS_AGENT_TOKEN")
    agent = Agent(settings, store)
    refill = Refill(agent)
    try:
        config = uvicorn.Config(
            build_app(agent, token), host=host, port=port, log_config=None, timeout_graceful_shutdown=GRACE_S
        )
        socket = config.bind_socket()
        event(log, "listening", url=f"http://{host}:{socket.getsockname()[1]}", engine=settings.engine_url)
        refill.start()
        _Server(config, agent).run(sockets=[socket])
    finally:
        agent.stopping.set()
        refill.join()
        agent.close()
