"""What can happen while an engine is paused for a load, on either engine: to whom, and who ends the pause."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from colchis.components.errors import BadData, ColchisError, PeerUnavailable
from colchis.components.rollout import Wanted
from colchis.components.weights.protocol import Activate, EngineState
from tests.agent.conftest import DEADLINE_S, TOKEN
from tests.contract.replica import LOAD, TOKENS, Replica, another_agent, held_activation, holding, scaled
from tests.waiting import eventually

CLOCK = Path(__file__).parents[1] / "run/clock"
DAY_S = 86400


def test_a_pause_ends_though_its_client_is_killed(replica: Replica) -> None:
    """Fault: a stage that is killed while the engine is paused on its behalf, and an engine that stays so
    (AReaL#1181)."""
    replica.agent.prepare(1)
    body = Activate(run=replica.versions.run, version=1, kind="full", deadline_s=DEADLINE_S).model_dump_json()
    client = (
        "import sys, urllib.request\n"
        "headers = {'Authorization': 'Bearer ' + sys.argv[3], 'Content-Type': 'application/json'}\n"
        "urllib.request.urlopen(urllib.request.Request(sys.argv[1], sys.argv[2].encode(), headers))\n"
    )
    with holding(replica.engine_proxy, "POST", LOAD) as hold:
        process = subprocess.Popen([sys.executable, "-c", client, f"{replica.agent.url}/activate", body, TOKEN])
        hold.wait()
        assert replica.paused
        assert replica.label == "unproven-1"
        process.kill()
        process.wait()
    eventually(lambda: not replica.paused, "the engine continues")
    eventually(lambda: replica.agent.status().version == 1, "what was asked for is done")
    replica.serves(1)


def test_the_agent_is_killed_in_the_pause(replica: Replica) -> None:
    """Fault: a pause that outlives the agent, and a load that was under way and is believed."""
    with held_activation(replica, 1) as (hold, activation):
        assert replica.paused
        assert replica.label == "unproven-1"
        replica.agent.kill()
        with pytest.raises(PeerUnavailable):
            activation.result()
        eventually(lambda: not replica.paused, "the watchdog continues the engine")
    hold.wait_until_over()  # it arrived, or its sender was gone first: so one like it arrives now
    live = replica.agent.staging / "live"
    assert replica.engine.update(live, weight_version="unproven-1", flush_cache=True).status_code == 200
    assert replica.holds(1)
    assert Wanted.at_least(0).read(replica.label) is None
    replica.agent.start()
    status = replica.agent.status()
    assert (status.version, status.ready, replica.agent.ready().status_code) == (None, False, 503)
    assert not (replica.agent.staging / "pause.json").exists()
    assert replica.agent.activate(1).checksums_equal
    replica.serves(1)


def test_the_agent_is_terminated_in_the_pause(replica: Replica) -> None:
    """Fault: a rolling update of the agents that leaves engines paused."""
    with held_activation(replica, 1) as (hold, activation):
        replica.agent.child.process.send_signal(signal.SIGTERM)
        eventually(lambda: not replica.paused, "the agent continues the engine at the signal")
        hold.open.set()
        with pytest.raises(ColchisError):
            activation.result()
    assert replica.agent.child.process.wait(DEADLINE_S) == 143
    assert not replica.paused
    assert Wanted.at_least(0).read(replica.label) is None
    replica.agent.start()
    assert replica.agent.activate(1).checksums_equal
    replica.serves(1)


def test_the_agent_hangs_in_the_pause(replica: Replica) -> None:
    """Fault: an agent that neither works nor ends keeps its engine paused for good: the watchdog goes by the lease."""
    replica.agent.prepare(1)
    lease_s = 3.0
    request = Activate(run=replica.versions.run, version=1, kind="full", deadline_s=lease_s)
    with holding(replica.engine_proxy, "POST", LOAD) as hold, ThreadPoolExecutor(1) as pool:
        activation = pool.submit(lambda: replica.agent.ask(lambda a: a.activate(request)))
        hold.wait()
        assert replica.paused
        replica.agent.child.process.send_signal(signal.SIGSTOP)
        try:
            eventually(lambda: not replica.paused, "the watchdog continues the engine")
        finally:
            replica.agent.child.process.send_signal(signal.SIGCONT)
            hold.open.set()
        with pytest.raises(PeerUnavailable):
            activation.result()
    assert not replica.paused
    assert Wanted.at_least(0).read(replica.label) is None
    assert replica.agent.bring(1).checksums_equal
    replica.serves(1)


def test_agent_and_watchdog_die_in_the_pause(replica: Replica) -> None:
    """Fault: a container that is killed takes both along, and nobody is left who knows of the pause."""
    agent = replica.agent.child.process.pid
    with held_activation(replica, 1) as (hold, activation):
        assert replica.paused
        for watchdog in children_of(agent):
            os.kill(watchdog, signal.SIGKILL)
        replica.agent.kill()
        with pytest.raises(PeerUnavailable):
            activation.result()
    hold.wait_until_over()
    assert replica.paused
    replica.agent.start()
    eventually(lambda: not replica.paused, "the next agent continues the engine")
    assert replica.agent.status().version is None
    assert replica.agent.activate(1).checksums_equal
    replica.serves(1)


def children_of(pid: int) -> list[int]:
    """Processes that it has started and that are alive (Linux)."""
    found = [
        int(child) for task in Path(f"/proc/{pid}/task").iterdir() for child in (task / "children").read_text().split()
    ]
    assert found, "no watchdog runs"
    return found


def test_a_pause_that_somebody_else_forgot(replica: Replica) -> None:
    """Fault: a replica that is ready and answers nothing: requests are sent to it until their deadlines pass. A client
    paused the engine and was killed."""
    assert replica.engine.client.post("/pause_generation", json={"mode": "retract"}).status_code == 200
    eventually(lambda: replica.agent.ready().status_code == 503, "a paused engine is not ready")
    status = replica.agent.status()
    assert (status.version, status.ready) == (0, False)
    assert "somebody else paused it" in str(status.reason)
    assert replica.engine.client.post("/continue_generation", json={}).status_code == 200
    eventually(lambda: replica.agent.ready().status_code == 200, "it is ready again")
    assert replica.engine.client.post("/pause_generation", json={"mode": "abort"}).status_code == 200
    assert replica.agent.bring(1).checksums_equal
    replica.serves(1)


def test_somebody_else_continues_in_the_pause(replica: Replica) -> None:
    """Fault: tokens that are drawn while weights change, under the name of a version (dynamo#13823)."""
    with held_activation(replica, 1) as (hold, activation):
        assert replica.engine.client.post("/continue_generation", json={}).status_code == 200
        drawn = replica.engine.sample(TOKENS, tokens=3)["meta_info"]
        assert {span["version"] for span in drawn["weight_versions"]} == {"unproven-1"}
        assert Wanted.at_least(0).read(drawn["weight_version"]) is None
        hold.open.set()
        assert activation.result().checksums_equal
    replica.serves(1)


def test_a_load_of_other_weights_is_not_believed(replica: Replica, tmp_path: Path) -> None:
    """Fault: an engine that says success and holds something else (sglang#9663, verl#7083): here its files were changed
    between the check and the load."""
    other = (scaled(replica, 1.25, tmp_path / "other") / "model.safetensors").read_bytes()
    with held_activation(replica, 1) as (hold, activation):
        file = replica.agent.staged(1) / "model.safetensors"
        file.unlink()
        file.write_bytes(other)
        hold.open.set()
        with pytest.raises(BadData, match=r"\d+ of the engine's tensors are not those of weights v1"):
            activation.result()
    status = replica.agent.status()
    assert (status.state, status.version, status.ready) == (EngineState.FAILED, None, False)
    assert not replica.paused
    drawn = replica.engine.sample(TOKENS, tokens=3)["meta_info"]
    assert Wanted.at_least(0).read(drawn["weight_version"]) is None
    assert replica.agent.bring(1).checksums_equal
    replica.serves(1)


def test_a_refused_load_keeps_the_old_version_by_proof(replica: Replica) -> None:
    """Fault: an engine that is lost to the run because it refused what it could not read; here its files went away."""
    with held_activation(replica, 1) as (hold, activation):
        (replica.agent.staging / "live").unlink()
        hold.open.set()
        with pytest.raises(BadData, match=r"refused|answers 400"):
            activation.result()
    status = replica.agent.status()
    assert (status.state, status.version, status.ready) == (EngineState.FAILED, 0, False)
    assert status.reason
    assert (replica.label, replica.holds(0), replica.paused) == ("0", True, False)
    assert replica.agent.activate(1).checksums_equal
    replica.serves(1)


def test_clocks_that_differ_and_jump(replica: Replica, tmp_path: Path) -> None:
    """Fault: a lease, a proof or a deadline that goes by the wall clock of one pod. The agent's is a day ahead, and jumps
    two days back while the engine is paused."""
    clock = tmp_path / "clock"
    clock.write_text(str(DAY_S))
    path = os.pathsep.join(filter(None, (str(CLOCK), os.environ.get("PYTHONPATH"))))
    with another_agent(replica, tmp_path / "a", environment={"PYTHONPATH": path, "CLOCK_JUMP": str(clock)}) as ahead:
        assert ahead.bring(0).checksums_equal
        with held_activation(replica, 1, ahead) as (hold, activation):
            for jump in (-DAY_S, 2 * DAY_S):
                clock.write_text(str(jump))
                assert replica.paused
                left_s = ahead.status().pause_lease_s
                assert left_s is not None
                assert 0 < left_s < 2 * DEADLINE_S
            hold.open.set()
            proof = activation.result()
        assert (proof.checksums_equal, proof.pause_s < DEADLINE_S, proof.load_s >= 0) == (True, True, True)
        clock.write_text(str(-DAY_S))
        ahead.kill()
        ahead.start()
        assert (ahead.status().version, ahead.ready().status_code) == (1, 200)
