"""A real store, a real embedded engine, and real agents as processes: what a test kills is a process."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, TypeVar

import httpx
import pytest

from colchis.components.http_client import pool_client
from colchis.components.records.run import Serving
from colchis.components.store import Store, StoreSettings, keys, upload_input
from colchis.components.weights.activate import AgentClient, Agents
from colchis.components.weights.protocol import Activate, Activated, Prepare, Prepared, Status
from colchis.workflows.local.ports import free_port
from colchis.workflows.local.services import Child
from tests.faults import FaultProxy
from tests.weights.models import RUN, config_of, publish_version, write_model

TOKEN = "token-of-the-tests"
DEADLINE_S = 60.0
START_S = 120.0
"""A loaded machine imports torch slowly."""

_Result = TypeVar("_Result")


class EngineProcess:
    """The embedded engine, without weights until an agent brings some."""

    def __init__(self, folder: Path, port: int | None = None) -> None:
        self.folder, self.port = folder, port or free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.child = self.start()

    def start(self, *more: str) -> Child:
        argv = [sys.executable, "-m", "colchis.components.engine", "--host", "127.0.0.1", "--port", str(self.port)]
        self.child = Child(
            "engine", [*argv, *more], log=self.folder / "engine.log", environment={"OMP_NUM_THREADS": "1"}
        )
        self.child.wait_for(f"{self.url}/ping", deadline_s=START_S)
        return self.child

    def post(self, path: str, body: Any) -> httpx.Response:
        return httpx.post(self.url + path, json=body, timeout=DEADLINE_S)

    def label(self) -> str:
        return str(httpx.get(self.url + "/model_info", timeout=DEADLINE_S).json()["weight_version"])

    def checksum(self) -> str:
        return str(self.post("/weights_checker", {"action": "checksum"}).json()["per_engine_checksum"])

    def paused(self) -> bool:
        return bool(httpx.get(self.url + "/server_info", timeout=DEADLINE_S).json()["internal_states"][0]["paused"])

    def generate(self, tokens: int = 4) -> dict[str, Any]:
        body = {"input_ids": [3, 4, 5], "sampling_params": {"max_new_tokens": tokens, "ignore_eos": True}}
        response = self.post("/generate", body)
        response.raise_for_status()
        return dict(response.json())


class AgentProcess:
    """One agent; `restart` keeps its staging folder."""

    def __init__(
        self,
        folder: Path,
        engine_url: str,
        store: StoreSettings,
        engine_id: str = "engine-0",
        *,
        more: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.folder, self.staging = folder, folder / "staging"
        self.engine_url, self.store, self.engine_id = engine_url, store, engine_id
        self.more, self.environment = more, environment or {}
        self.run = RUN
        self.start()

    def start(self) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        argv = [sys.executable, "-m", "colchis.components", "agent", "--engine-url", self.engine_url]
        argv += ["--port", str(self.port), "--staging", str(self.staging), "--engine-id", self.engine_id, *self.more]
        environment = {**self.store.to_environment(), "COLCHIS_AGENT_TOKEN": TOKEN, **self.environment}
        self.child = Child(f"agent {self.engine_id}", argv, log=self.folder / "agent.log", environment=environment)
        self.child.wait_for(f"{self.url}/live", deadline_s=START_S)

    def kill(self) -> None:
        """As the kernel does when memory is out: no handler runs."""
        self.child.process.send_signal(signal.SIGKILL)
        self.child.process.wait()

    def agents(self) -> Agents:
        return Agents([self.url], TOKEN)

    def ask(self, work: Callable[[AgentClient], Awaitable[_Result]]) -> _Result:
        """Run one or more calls against this agent."""

        async def run() -> _Result:
            async with pool_client() as client:
                return await work(AgentClient(self.url, TOKEN, client))

        return asyncio.run(run())

    def status(self) -> Status:
        return self.ask(lambda agent: agent.status())

    def ready(self) -> httpx.Response:
        return httpx.get(f"{self.url}/ready", timeout=DEADLINE_S)

    def prepare(self, version: int) -> Prepared:
        return self.ask(lambda a: a.prepare(Prepare(run=self.run, version=version, deadline_s=DEADLINE_S)))

    def activate(
        self, version: int, kind: Literal["full", "same"] = "full", pause: Literal["retract", "abort"] = "retract"
    ) -> Activated:
        request = Activate(run=self.run, version=version, kind=kind, pause=pause, deadline_s=DEADLINE_S)
        return self.ask(lambda a: a.activate(request))

    def bring(self, version: int, kind: Literal["full", "same"] = "full") -> Activated:
        self.prepare(version)
        return self.activate(version, kind)

    def staged(self, version: int) -> Path:
        return self.staging / "versions" / self.run / f"v{version:08d}"


class Versions:
    """Versions 0, 1, 2 of a tiny model as one run; v2 is of kind `same`."""

    def __init__(self, store: Store, folder: Path, run: str = RUN) -> None:
        self.run = run
        self.config = config_of()
        self.folders = [write_model(folder / f"v{n}", self.config, seed=min(n, 1)) for n in range(3)]
        self.model = upload_input(store, self.folders[0])
        for version, path in enumerate(self.folders):
            kind = "same" if version == 2 else "full"
            publish_version(store, path, model=self.model, version=version, kind=kind, run=run)


def declare(store: Store, version: int, digest: str) -> None:
    """What the run says that its engines serve."""
    record = Serving(run=RUN, version=version, weights_digest=digest, engines=["engine-0"])
    store.put(keys.serving(RUN), record.to_bytes())


@pytest.fixture
def versions(store: Store, tmp_path: Path) -> Versions:
    return Versions(store, tmp_path / "models")


@pytest.fixture(scope="session")
def shared_engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    """One engine for all tests that leave it alive: what it served for another test, no new agent believes."""
    engine = EngineProcess(tmp_path_factory.mktemp("engine"))
    yield engine
    engine.child.stop()


@pytest.fixture
def engine(shared_engine: EngineProcess) -> Iterator[EngineProcess]:
    if shared_engine.child.process.poll() is not None:
        shared_engine.start()
    yield shared_engine
    if shared_engine.child.process.poll() is None:
        shared_engine.post("/continue_generation", {})


@pytest.fixture
def start_agent(store_settings: StoreSettings, tmp_path: Path) -> Iterator[Callable[..., AgentProcess]]:
    started: list[AgentProcess] = []

    def start(engine: EngineProcess, engine_id: str = "engine-0") -> AgentProcess:
        started.append(AgentProcess(tmp_path / engine_id, engine.url, store_settings, engine_id))
        return started[-1]

    yield start
    for agent in started:
        agent.child.stop()


@pytest.fixture
def agent(start_agent: Callable[..., AgentProcess], engine: EngineProcess) -> AgentProcess:
    return start_agent(engine)


@pytest.fixture
def proxy(store_settings: StoreSettings) -> Iterator[FaultProxy]:
    host, _, port = store_settings.endpoint.removeprefix("http://").partition(":")
    with FaultProxy((host, int(port))) as running:
        yield running


@pytest.fixture
def through(proxy: FaultProxy, store_settings: StoreSettings) -> Store:
    """The store behind the proxy, which counts what crosses the network."""
    return Store(replace(store_settings, endpoint=proxy.url), deadline_s=20.0)
