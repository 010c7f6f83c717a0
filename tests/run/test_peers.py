"""Store, engines and agents that die, hang or lie in the middle of a run, and are started again as a kubelet would."""

from __future__ import annotations

import subprocess
import time

import pytest

from colchis.components.store import StageKey, find_commit
from tests.faults import Fault
from tests.run.kept import DEADLINE_S, Account, Guest, ended

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

LOAD = "/update_weights_from_disk"
AWAY_S = 20.0
SHORT = tuple(
    part
    for name in ("rollout.deadline_s", "reload.prepare_deadline_s", "reload.activate_deadline_s")
    for part in ("--set", f"{name}=20")
)
PATIENT = ("--set", "rollout.request_timeout_s=20")


def wait_for(fault: Fault, runner: subprocess.Popen[str]) -> None:
    """Until the fault has struck; fails when the runner ends before it."""
    end = time.monotonic() + DEADLINE_S
    while not fault.struck.wait(0.5):
        assert runner.poll() is None, runner.communicate()[0]
        assert time.monotonic() < end


def finish(guest: Guest, calm: Account, runner: subprocess.Popen[str]) -> None:
    """The run ends as if nothing had happened."""
    code, said = ended(runner)
    assert code == 0, said
    assert Account.of(guest.services.store, guest.run) == calm
    assert [m.label() for m in guest.services.machines] == ["2", "2"]


@pytest.mark.parametrize("moment", ["while engines generate", "while it loads"])
def test_killed_agent_is_started_again(guest: Guest, calm: Account, moment: str) -> None:
    """Fault: a run that ends because a sidecar was restarted, or an engine that stays paused without its agent."""
    machine = guest.services.machines[0]
    path = "/generate" if moment == "while engines generate" else LOAD
    fault = machine.engine_proxy.add(Fault("POST", path, "delay", before=lambda: machine.kill("agent")))
    runner = guest.start(*PATIENT)
    wait_for(fault, runner)
    machine.start()
    finish(guest, calm, runner)


@pytest.mark.parametrize("moment", ["before", "after"])
def test_engine_killed_during_a_load_is_started_again(guest: Guest, calm: Account, moment: str) -> None:
    """Fault: an engine that died with half a version, before or after its memory changed, and is believed."""
    machine = guest.services.machines[1]
    hook = {moment: lambda: machine.kill("engine")}
    runner = guest.start()
    committed = guest.services.store_proxy.add(Fault("PUT", "000000/train/commit.json", "delay"))
    wait_for(committed, runner)
    fault = machine.engine_proxy.add(Fault("POST", LOAD, "delay", **hook))
    wait_for(fault, runner)
    machine.start()
    finish(guest, calm, runner)


def test_store_killed_during_an_upload_is_started_again(guest: Guest, calm: Account) -> None:
    """Fault: half a weights file that is committed, or a trainer that gives up at the first silence of its store."""
    services = guest.services
    fault = services.store_proxy.add(
        Fault("PUT", "000000/train/attempts/.*/weights/.*safetensors", "cut", before=services.weed.kill)
    )
    runner = guest.start()
    wait_for(fault, runner)
    services.weed.start()
    finish(guest, calm, runner)


def test_overloaded_store_is_waited_for(guest: Guest, calm: Account) -> None:
    """Fault: a stage that takes SlowDown for an end, or does its work twice because of it."""
    store_proxy = guest.services.store_proxy

    def overload() -> None:
        store_proxy.add(Fault("*", ".", "status", status=503, until_s=AWAY_S))

    store_proxy.add(Fault("PUT", "000000/batch/commit.json", "delay", after=overload))
    finish(guest, calm, guest.start())
    assert store_proxy.count("PUT", f"{guest.run}/iterations/000000/batch/commit.json") == 1


@pytest.mark.parametrize("path", ["/generate", LOAD])
def test_engines_that_answer_500_are_waited_for(guest: Guest, calm: Account, path: str) -> None:
    """Fault: an outage of all engines for twenty seconds that ends the run, at sampling or at a load."""
    runner = guest.start()
    admitted = guest.services.store_proxy.add(Fault("PUT", "000000/admission.json", "delay"))
    wait_for(admitted, runner)
    faults = [
        machine.engine_proxy.add(Fault("POST", path, "status", status=500, until_s=AWAY_S))
        for machine in guest.services.machines
    ]
    finish(guest, calm, runner)
    assert min(fault.applied for fault in faults) > 1


def test_hung_engine_is_named_and_its_run_continues(guest: Guest, calm: Account) -> None:
    """Fault: a run that hangs with its engine, that hides which one it is, or whose store is left half-way."""
    hung = guest.services.machines[0]
    fault = guest.services.store_proxy.add(Fault("PUT", "000000/train/commit.json", "delay", before=hung.freeze))
    code, said = ended(guest.start(*SHORT))
    assert fault.struck.is_set(), said
    assert code == 69, said
    assert "boundary 4" in said
    assert hung.agent_proxy.url in said
    hung.thaw()
    finish(guest, calm, guest.start(*SHORT))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"AWS_SECRET_ACCESS_KEY": "wrong"}, "check AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY"),
        ({"COLCHIS_S3_BUCKET": "no-such-bucket"}, "no bucket 'no-such-bucket'"),
        ({"COLCHIS_AGENT_TOKEN": "wrong"}, "COLCHIS_AGENT_TOKEN"),
    ],
    ids=["secret", "bucket", "token"],
)
def test_wrong_credentials_are_a_clear_error(guest: Guest, changes: dict[str, str], words: str) -> None:
    """Fault: minutes of retries for what no repetition can cure, or an error that does not say what is wrong where."""
    guest.announce(**changes)
    code, said = guest.finish()
    assert code == 78, said
    assert words in said
    at_agents = "COLCHIS_AGENT_TOKEN" in changes
    assert (guest.services.machines[0].agent_proxy if at_agents else guest.services.store_proxy).url in said
    assert find_commit(guest.services.store, StageKey(guest.run, 0, "train")) is None
