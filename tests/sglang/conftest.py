"""Real SGLang on a CPU with a real agent and a real store. Needs `make test-sglang`; starting the server takes a minute."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from colchis.components.engine.sglang_cpu import environment, launch_command
from colchis.components.store import Store
from colchis.workflows.local.ports import free_port
from colchis.workflows.local.services import Child
from colchis.workflows.local.weed import Weed
from tests.agent.conftest import AgentProcess, Versions
from tests.run.conftest import model

__all__ = ["model", "sglang"]

START_S = 400.0


@dataclass(frozen=True)
class Sglang:
    """A server that has an agent, and three versions in a store."""

    url: str
    child: Child
    agent: AgentProcess
    versions: Versions
    store: Store

    def post(self, path: str, body: Any) -> httpx.Response:
        return httpx.post(self.url + path, json=body, timeout=120)

    def generate(self, token_ids: list[int], tokens: int, **more: Any) -> dict[str, Any]:
        sampling = {"max_new_tokens": tokens, "ignore_eos": True, "temperature": 1.0}
        response = self.post("/generate", {"input_ids": token_ids, "sampling_params": sampling, **more})
        assert response.status_code == 200, response.text
        return dict(response.json())

    def checksums(self) -> dict[str, str]:
        answer = self.post("/weights_checker", {"action": "checksum"}).json()
        return dict(answer["ranks"][0]["checksums"])


@pytest.fixture(scope="session")
def sglang(weed: Weed, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sglang]:
    if environment.find() is None:
        pytest.skip("the environment of SGLang has not been built: run `make test-sglang`")
    folder: Path = tmp_path_factory.mktemp("sglang")
    settings = replace(weed.settings, bucket=f"sglang-{uuid.uuid4().hex[:16]}")
    store = Store(settings)
    store.requests.client.create_bucket(Bucket=settings.bucket)
    versions = Versions(store, folder / "models")
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    child = Child("sglang", launch_command(model=versions.folders[0], port=port), log=folder / "log", environment={})
    try:
        child.wait_for(f"{url}/ready", deadline_s=START_S)
        agent = AgentProcess(folder / "agent", url, settings)
        try:
            yield Sglang(url, child, agent, versions, store)
        finally:
            agent.child.stop()
    finally:
        child.stop()
