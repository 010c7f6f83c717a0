"""Adapters on real SGLang, with somebody between it and its agent."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator

import pytest

from colchis.components.errors import BadData
from colchis.components.records.boundary import BoundaryRecord
from colchis.components.rollout.client import Completion
from colchis.components.store import Store
from colchis.components.weights import activate_all
from colchis.components.weights.protocol import EngineState
from colchis.workflows.local.weed import Weed
from tests.agent.conftest import DEADLINE_S
from tests.conftest import fresh_bucket
from tests.contract.conftest import address
from tests.contract.replica import ASK
from tests.faults import Fault, FaultProxy
from tests.sglang.adapters import Adapter, Pool, Server

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def proxy(running: Server) -> Iterator[FaultProxy]:
    with FaultProxy(address(running.url)) as proxy:
        yield proxy


@pytest.fixture(scope="module")
def pool(
    running: Server, proxy: FaultProxy, adapters: list[Adapter], weed: Weed, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Pool]:
    store = Store(fresh_bucket(weed))
    pool = Pool([running], adapters, store, tmp_path_factory.mktemp("agent"), through=[proxy.url])
    yield pool
    pool.stop()


def test_a_name_that_another_adapter_answers_to_is_refused(pool: Pool, proxy: FaultProxy) -> None:
    """Fault: keys and values of the adapter before under the name of the new one: the first request that bears the new name is
    answered by the old one, which has that prompt cached."""
    pool.reload(1)
    pool.agent.prepare(2)
    old, new = pool.name(1).encode(), pool.name(2).encode()
    named = rf'"lora_path": ?"{re.escape(pool.name(2))}"'
    fault = proxy.add(Fault("POST", ASK, "rewrite", body=named, rewriting=(new, old)))

    async def activate() -> list[BoundaryRecord]:
        async with pool.agent.agents() as agents:
            return await activate_all(agents, pool.manifests[2], deadline_s=DEADLINE_S)

    with pytest.raises(
        BadData, match=r"\d tokens of a prompt were cached before the adapter's first request"
    ) as refused:
        asyncio.run(activate())
    assert re.findall(r"boundary \d", str(refused.value)) == ["boundary 5"]
    assert fault.applied == 1
    status = pool.agent.status()
    assert (status.state, status.version, status.adapter) == (EngineState.FAILED, 1, pool.served(1))
    assert pool.agent.ready().status_code == 503
    assert pool.server.loaded() == pool.names(1)
    assert all(isinstance(answer, Completion) for answer in pool.ask(1, 2, 8)), "what it served, it serves"

    proof = pool.reload(2)["load"]
    assert proof["cached_tokens_before"] > 0
    assert proof["cached_tokens_after"] == 0
    assert pool.agent.status().adapter == pool.served(2)
