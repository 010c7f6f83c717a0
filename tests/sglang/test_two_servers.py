"""Two SGLang servers, of which one fails: the step fails and names it, the other serves, and the next reload repairs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from colchis.components.errors import ColchisError
from colchis.components.rollout.client import Completion
from colchis.components.store import Store
from colchis.components.store.pools import pool_lease
from colchis.components.weights.protocol import EngineState
from colchis.workflows.local.weed import Weed
from tests.conftest import fresh_bucket
from tests.contract.replica import HASH, LOAD
from tests.faults import Fault, FaultProxy
from tests.sglang.adapters import TOLERANCE, Adapter, Pool, Server
from tests.waiting import eventually
from tests.weights.models import RUN

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(900)]

ADAPTER_LOAD = "/load_lora_adapter"
SHORT_S = 8.0
"""For reloads that are to fail: what cannot be reached is asked again until then."""
NEVER = 10_000
POOL = "two"


@pytest.fixture(scope="module")
def servers(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Server]]:
    found: list[Server] = []
    try:
        for number in range(2):
            found.append(Server.started(model, tmp_path_factory.mktemp(f"sglang-{number}")))
        yield found
    finally:
        for server in found:
            server.stop()


@pytest.fixture(scope="module")
def proxy(servers: list[Server]) -> Iterator[FaultProxy]:
    """Between the second server and its agent."""
    with FaultProxy(("127.0.0.1", servers[1].port)) as found:
        yield found


@pytest.fixture(scope="module")
def pool(
    servers: list[Server],
    adapters: list[Adapter],
    proxy: FaultProxy,
    weed: Weed,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Pool]:
    folder = tmp_path_factory.mktemp("agents")
    found = Pool(servers, adapters, Store(fresh_bucket(weed)), folder, through=[servers[0].url, proxy.url], name=POOL)
    yield found
    found.stop()


def reload_that_fails_at_the_second(pool: Pool, version: int) -> None:
    """The error names boundary 4 and that server's agent, and no other."""
    with pytest.raises(
        ColchisError, match=f"boundary 4 .*load.* of weights v{version} failed at 1 of 2 engines"
    ) as caught:
        pool.records(version, SHORT_S)
    assert [agent.url in caught.value.what for agent in pool.agents] == [False, True]


def repair(pool: Pool, version: int) -> None:
    """The next reload, which does nothing again at the first server."""
    records = [r for r in pool.records(version) if r.name == "load"]
    assert [(r.engine, r.proof["repeated"]) for r in records] == [("engine-0", True), ("engine-1", False)]
    assert served(pool) == [version, version]


def served(pool: Pool) -> list[int | None]:
    """The version that each server is proven to have, also where an activation failed that left it."""
    return [agent.status().version for agent in pool.agents]


def states(pool: Pool) -> list[EngineState]:
    return [agent.status().state for agent in pool.agents]


def assert_serves_adapter(pool: Pool, version: int) -> None:
    """Each server's own answer, token by token."""
    for number in range(len(pool.servers)):
        (answer,) = pool.ask(version, 1, 4, server=number)
        assert isinstance(answer, Completion)
        assert answer.logprobs == pytest.approx(pool.logprobs(version, answer.token_ids), abs=5e-5)


def test_adapters_are_served_by_both(pool: Pool) -> None:
    """Fault: a pool of which only the first server gets the adapter."""
    for version in (0, 1, 2):
        records = pool.records(version)
        assert [r.engine for r in records if r.name == "load"] == ["engine-0", "engine-1"]
        assert served(pool) == [version, version]
    assert [server.loaded() for server in pool.servers] == [pool.names(1, 2)] * 2
    assert_serves_adapter(pool, 2)


def test_an_adapter_that_one_server_refuses(pool: Pool, proxy: FaultProxy) -> None:
    """Fault: a step that goes on with half a pool; a server that keeps its old adapter under the new name; a repair that loads
    again what the other one has."""
    pool.records(1)
    proxy.add(Fault("POST", ADAPTER_LOAD, "status", times=NEVER, status=400))
    reload_that_fails_at_the_second(pool, 2)
    proxy.clear()
    assert served(pool) == [2, 1]
    assert states(pool) == [EngineState.SERVING, EngineState.FAILED]
    assert pool.name(2) not in pool.servers[1].loaded()
    repair(pool, 2)
    assert_serves_adapter(pool, 2)


def test_an_adapter_that_one_server_loads_and_nobody_hears_of_it(pool: Pool, proxy: FaultProxy) -> None:
    """Fault: an adapter that is there, though its load was called failed, and so is loaded twice or believed unproven."""
    pool.records(2)
    asked = proxy.count("POST", ADAPTER_LOAD)
    fault = proxy.add(Fault("POST", ADAPTER_LOAD, "swallow"))
    records = [r for r in pool.records(3) if r.name == "cache"]
    assert [r.proof["max_gap"] < TOLERANCE for r in records] == [True, True]
    assert fault.applied == 1
    assert proxy.count("POST", ADAPTER_LOAD) >= asked + 2
    assert_serves_adapter(pool, 3)


def test_a_whole_version_that_one_server_refuses(pool: Pool, proxy: FaultProxy) -> None:
    """Fault: a pool of two models; a paused server that is left behind."""
    pool.records(1)
    proxy.add(Fault("POST", LOAD, "status", times=NEVER, status=400))
    reload_that_fails_at_the_second(pool, pool.merged)
    proxy.clear()
    assert served(pool)[0] == pool.merged
    assert (served(pool)[1], states(pool)[1]) == (1, EngineState.FAILED)
    for server in pool.servers:
        body = {"input_ids": [3, 7], "sampling_params": {"max_new_tokens": 2}}
        assert server.post("/generate", body).status_code == 200, "it is paused"
    repair(pool, pool.merged)


def test_checksums_of_one_server_that_cannot_be_had(pool: Pool, proxy: FaultProxy) -> None:
    """Fault: a load that nobody could check, called a proof since the other server's checksums were right."""
    pool.records(0)
    proxy.add(Fault("POST", HASH, "status", times=NEVER, status=400))
    reload_that_fails_at_the_second(pool, pool.merged)
    proxy.clear()
    assert pool.agents[0].ready().status_code == 200
    assert pool.agents[1].ready().status_code == 503
    repair(pool, pool.merged)


def test_a_server_that_dies_in_the_load_of_an_adapter(pool: Pool, proxy: FaultProxy) -> None:
    """Fault: a reload that passes without the one that died, or a server that comes back without base or adapter."""
    pool.records(1)
    server = pool.servers[1]
    proxy.add(Fault("POST", ADAPTER_LOAD, "delay", before=server.stop))
    pool_lease(pool.store, POOL, RUN).acquire()
    pool.declare(1)
    reload_that_fails_at_the_second(pool, 2)
    assert [agent.ready().status_code for agent in pool.agents] == [503, 503], "v1 is declared, and the first has v2"
    server.start()
    eventually(lambda: pool.agents[1].ready().status_code == 200, "it is filled again", deadline_s=120)
    assert pool.agents[1].status().version == 1
    assert server.loaded() == pool.names(1)
    pool.records(2)
    assert_serves_adapter(pool, 2)
