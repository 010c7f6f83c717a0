"""Whole runs on real SGLang that are disturbed from outside: nothing is lost, doubled or misnamed.

Which tokens SGLang draws depends on what else it serves, so the weights of two runs differ; what must not differ is what was
counted, and what serves in the end.
"""

from __future__ import annotations

import subprocess
import uuid
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path

import pytest

from colchis.components.records import trajectories as trajectory_records
from colchis.components.records.boundary import Boundary
from colchis.components.records.run import Serving
from colchis.components.report.status import find_boundaries
from colchis.components.store import StageKey, keys, read_commit
from tests.faults import Fault
from tests.run.conftest import make_project
from tests.run.kept import Guest, Services, ended, keep_services
from tests.run.test_boundaries import strikes
from tests.run.test_peers import LOAD, wait_for

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(1200)]

SAMPLES = 16
"""Of an iteration of the tests' run."""


@pytest.fixture(scope="module")
def two_servers(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Services]:
    """A store and two SGLang servers with their agents."""
    with keep_services(tmp_path_factory.mktemp("kept"), model=model) as running:
        yield running


@pytest.fixture
def run(two_servers: Services, model: Path, tmp_path: Path) -> Iterator[Guest]:
    """A run that has not begun."""
    two_servers.repair()
    guest = Guest(two_servers, make_project(model, tmp_path), f"r-{uuid.uuid4().hex[:8]}")
    guest.announce()
    yield guest
    guest.close()


def check(guest: Guest) -> None:
    """Every sample is there once, under the version that drew it, and both servers have the last one in truth and in name."""
    store = guest.services.store
    for iteration in range(2):
        commit = read_commit(store, StageKey(guest.run, iteration, "rollout", 0))
        shards = [p for p in commit.payload if p.name.startswith("trajectories-")]
        found = list(chain.from_iterable(trajectory_records.from_parquet(store.read(shard)) for shard in shards))
        assert len({t.id for t in found}) == len(found) == SAMPLES
        assert {span.version for t in found for span in t.versions} == {iteration}
    declared = Serving.from_bytes(store.get(keys.serving(guest.run)).data, keys.serving(guest.run))
    assert (declared.version, declared.engines) == (2, ["main-0", "main-1"])
    records = find_boundaries(store, guest.run, 2)
    loads, caches = ([r for r in records if r.boundary == b] for b in (Boundary.LOAD, Boundary.CACHE))
    assert [r.engine for r in loads] == [r.engine for r in caches] == declared.engines
    assert all(r.proof["checksums_equal"] for r in loads)
    assert all(r.proof["max_gap"] < 1e-4 for r in caches)
    assert [m.label() for m in guest.services.machines] == ["2", "2"]


def wait_until_filled(run: Guest, runner: subprocess.Popen[str]) -> None:
    """SGLang starts with the weights of version 0: what comes after them can be told apart from them."""
    wait_for(run.services.store_proxy.add(Fault("PUT", "serving.json", "delay")), runner)


@pytest.mark.parametrize("moment", ["while it generates", "before its load", "after its load"])
def test_a_server_is_killed(run: Guest, moment: str) -> None:
    """Fault: a server that comes back with what it was started with and is believed, or an answer that counts twice."""
    machine = run.services.machines[1]
    hooks: dict[str, tuple[str, dict[str, Callable[[], None]]]] = {
        "while it generates": ("/generate", {"before": lambda: machine.kill("engine")}),
        "before its load": (LOAD, {"before": lambda: machine.kill("engine")}),
        "after its load": (LOAD, {"after": lambda: machine.kill("engine")}),
    }
    path, hook = hooks[moment]
    runner = run.start()
    wait_until_filled(run, runner)
    wait_for(machine.engine_proxy.add(Fault("POST", path, "delay", **hook)), runner)  # type: ignore[arg-type]
    machine.start()
    code, said = ended(runner)
    assert code == 0, said
    check(run)


def test_an_agent_is_killed_while_its_server_loads(run: Guest) -> None:
    """Fault: a server that stays paused without its agent, or that serves what nobody has proven."""
    machine = run.services.machines[0]
    runner = run.start()
    wait_until_filled(run, runner)
    wait_for(machine.engine_proxy.add(Fault("POST", LOAD, "delay", before=lambda: machine.kill("agent"))), runner)
    machine.start()
    code, said = ended(runner)
    assert code == 0, said
    check(run)


def test_a_reload_is_killed_at_each_boundary(run: Guest) -> None:
    """Fault: a version that is activated twice, or half."""
    agent, first = run.services.machines[0].agent_proxy, r'"version": ?1\b'
    runner = run.start()
    published = "weights/v00000001/manifest.json"
    killed: dict[str, list[int]] = {published: [], "/prepare": [], "/verify": [], "/activate": [], "/probe": []}
    run.services.store_proxy.add(Fault("PUT", published, "reset", before=strikes(run, runner, killed[published])))
    for path in ("/prepare", "/verify", "/activate"):
        agent.add(Fault("POST", path, "delay", body=first, seconds=0.5, before=strikes(run, runner, killed[path])))
    agent.add(Fault("POST", "/probe", "delay", seconds=0.5, before=strikes(run, runner, killed["/probe"])))
    code, said = ended(runner)
    assert all(killed.values()), f"{killed}\n{said}"
    assert code == 0, said
    check(run)
