"""One suite, two engines: what the loop relies on, asked of the embedded engine and of real SGLang over the same HTTP.

The embedded side runs with `make test`; the other needs `make test-sglang`. Both are started as users start them.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from colchis.components.engine.sglang_cpu import launch_command
from colchis.components.store import Store, StoreSettings
from colchis.workflows.local.ports import free_port
from colchis.workflows.local.services import Child
from colchis.workflows.local.weed import Weed
from tests.agent.conftest import AgentProcess
from tests.conftest import fresh_bucket
from tests.contract.replica import Replica, Versions
from tests.engine.conftest import broken, models
from tests.engine.processes import EngineProcess, client_of, end, spawn_engine, wait_until_up
from tests.faults import FaultProxy

__all__ = ["broken", "models"]

EMBEDDED, SGLANG = "embedded", "sglang"
ENGINES = [EMBEDDED, pytest.param(SGLANG, marks=[pytest.mark.sglang, pytest.mark.timeout(600)])]
START_S = 400.0


@contextmanager
def started(kind: str, model: Path, log: Path) -> Iterator[EngineProcess]:
    """A server of that kind over `model`, as version 0, until the end of the block."""
    if kind == EMBEDDED:
        engine = wait_until_up(spawn_engine("--model-path", str(model), "--weight-version", "0"))
        try:
            yield engine
        finally:
            end(engine)
        return
    port = free_port()
    child = Child("sglang", launch_command(model=model, port=port, weight_version="0"), log=log, environment={})
    url = f"http://127.0.0.1:{port}"
    try:
        child.wait_for(f"{url}/ready", deadline_s=START_S)
        yield EngineProcess(child.process, url, client_of(url))
    finally:
        child.stop()


@pytest.fixture(scope="session", params=ENGINES)
def kind(request: pytest.FixtureRequest) -> str:
    """`embedded` or `sglang`."""
    return str(request.param)


@pytest.fixture(scope="session")
def server(kind: str, models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    """One server of each kind for all tests that leave it alive."""
    with started(kind, models["qwen2_a"], tmp_path_factory.mktemp(kind) / "log") as engine:
        yield engine


@pytest.fixture
def engine(server: EngineProcess, models: dict[str, Path]) -> EngineProcess:
    """It runs, nothing is in flight, and it serves the weights of qwen2_a as version 0."""
    server.client.post("/abort_request", json={"abort_all": True})
    server.client.post("/continue_generation", json={})
    assert server.client.post("/flush_cache?timeout=30").status_code == 200
    assert server.update(models["qwen2_a"], weight_version="0").status_code == 200
    return server


@pytest.fixture
def mortal(kind: str, models: dict[str, Path], tmp_path: Path) -> Iterator[EngineProcess]:
    """A server that the test may end or spoil."""
    with started(kind, models["qwen2_a"], tmp_path / "log") as engine:
        yield engine


@pytest.fixture(scope="session")
def bucket(weed: Weed) -> StoreSettings:
    """One bucket for all reloads: an agent knows one store."""
    return fresh_bucket(weed)


@pytest.fixture(scope="session")
def engine_proxy(server: EngineProcess) -> Iterator[FaultProxy]:
    """Between the agent and the server."""
    with FaultProxy(address(server.url)) as proxy:
        yield proxy


@pytest.fixture(scope="session")
def store_proxy(bucket: StoreSettings) -> Iterator[FaultProxy]:
    """Between the agent and the store."""
    with FaultProxy(address(bucket.endpoint)) as proxy:
        yield proxy


@pytest.fixture(scope="session")
def agent(
    engine_proxy: FaultProxy, store_proxy: FaultProxy, bucket: StoreSettings, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[AgentProcess]:
    """The agent of the server."""
    settings = replace(bucket, endpoint=store_proxy.url)
    running = AgentProcess(tmp_path_factory.mktemp("agent"), engine_proxy.url, settings)
    yield running
    running.child.stop()


@pytest.fixture
def replica(
    kind: str,
    engine: EngineProcess,
    agent: AgentProcess,
    engine_proxy: FaultProxy,
    store_proxy: FaultProxy,
    bucket: StoreSettings,
    models: dict[str, Path],
) -> Iterator[Replica]:
    """The server and its agent, which serve v0 of a run of their own; v1 is published."""
    store = Store(bucket, deadline_s=20.0)
    versions = Versions(store, models)
    agent.run = versions.run
    replica = Replica(kind, engine, agent, engine_proxy, store_proxy, store, versions)
    agent.bring(0)
    yield replica
    for proxy in (engine_proxy, store_proxy):
        proxy.clear()
    if agent.child.process.poll() is not None:
        agent.start()


def address(url: str) -> tuple[str, int]:
    """Host and port of `http://HOST:PORT`."""
    host, _, port = url.removeprefix("http://").partition(":")
    return host, int(port)


@dataclass
class Flight:
    """A streamed request; `messages` grows while it runs.

    What arrives is parsed when it is asked for: each message has all tokens so far, and to parse every one would take this
    process, which also is the proxy before the engine, so long that requests end before the pause that shall meet them.
    """

    engine: EngineProcess
    body: dict[str, Any]
    _lines: list[str] = field(default_factory=list)
    _changed: threading.Condition = field(default_factory=threading.Condition)
    _over: bool = False
    _thread: threading.Thread | None = None

    def start(self) -> Flight:
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()
        return self

    def _read(self) -> None:
        try:
            with httpx.stream(
                "POST", f"{self.engine.url}/generate", json={**self.body, "stream": True}, timeout=120
            ) as reply:
                for line in reply.iter_lines():
                    data = line.removeprefix("data: ")
                    if data and data != "[DONE]":
                        with self._changed:
                            self._lines.append(data)
                            self._changed.notify_all()
        finally:
            with self._changed:
                self._over = True
                self._changed.notify_all()

    @property
    def messages(self) -> list[dict[str, Any]]:
        """All so far, in order."""
        return [json.loads(line) for line in self._lines]

    @property
    def tokens(self) -> int:
        """Drawn so far, as the client has seen."""
        return len(json.loads(self._lines[-1])["output_ids"]) if self._lines else 0

    @property
    def over(self) -> bool:
        return self._over

    def wait(self, condition: Callable[[Flight], bool], deadline_s: float = 60) -> Flight:
        with self._changed:
            assert self._changed.wait_for(lambda: condition(self), deadline_s), f"{self.tokens} tokens so far"
        return self

    def answer(self, deadline_s: float = 60) -> dict[str, Any]:
        """The last message: the whole answer."""
        self.wait(lambda flight: flight.over, deadline_s)
        assert self._lines, "the stream ended without an answer"
        return dict(json.loads(self._lines[-1]))


@pytest.fixture
def fly(engine: EngineProcess) -> Iterator[Callable[..., Flight]]:
    """Starts requests of `tokens` tokens that have some already when it returns; what is left ends with the test."""

    def start(tokens: int = 600, prompt: list[int] | None = None, **more: Any) -> Flight:
        body = {
            "input_ids": prompt or [5, 3, 8],
            "sampling_params": {"max_new_tokens": tokens, "ignore_eos": True, "temperature": 1.0},
            "return_logprob": True,
            **more,
        }
        return Flight(engine, body).start().wait(lambda flight: flight.tokens > 5)

    yield start
    engine.client.post("/abort_request", json={"abort_all": True})
    engine.client.post("/continue_generation", json={})
