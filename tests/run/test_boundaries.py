"""Killed between the trainer's weights and the serving engines, at every point where something is half done."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable

import pytest

from tests.faults import Fault, FaultProxy
from tests.run.kept import Account, Guest, ended
from tests.run.test_kills import stage_pids

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

FIRST = r'"version": ?1\b'
POINTS = {
    "store, publishing": ("store", "PUT", "weights/v00000001/manifest.json", None, "reset"),
    "transfer": ("agent", "POST", "/prepare", FIRST, "delay"),
    "buffer": ("agent", "POST", "/verify", FIRST, "delay"),
    "load": ("agent", "POST", "/activate", FIRST, "delay"),
    "load, its record not stored": ("store", "PUT", "v00000001/reloads/.*/load.json", None, "reset"),
}
"""At which request the boundary's process is killed; `delay` lets the request go on after its sender is dead. The pod ends
with 64, as Argo has it, and the run with it."""
LAST = {
    "before the version is declared": ("PUT", "/serving.json", FIRST, "reset"),
    "after the version is declared": ("PUT", "/serving.json", FIRST, "swallow"),
    "before the summary": ("PUT", "iterations/000000/summary.json", None, "reset"),
}
"""In the last boundary, whose exit code is the pod's: it is tried again by the same run, and meets them one after another."""


def test_killed_at_every_boundary(guest: Guest, calm: Account) -> None:
    """Fault: a reload that cannot be repeated because an earlier one was killed half-way, or that counts twice."""
    for point, (peer, method, path, body, action) in POINTS.items():
        proxies: list[FaultProxy] = [guest.services.store_proxy]
        if peer == "agent":
            proxies = [m.agent_proxy for m in guest.services.machines]
        runner = guest.start()
        killed: list[int] = []
        for proxy in proxies:
            strike = strikes(guest, runner, killed)
            proxy.add(Fault(method, path, action, body=body, seconds=0.5, before=strike))  # type: ignore[arg-type]
        code, said = ended(runner)
        for proxy in proxies:
            proxy.clear()
        assert killed, f"{point}: nothing was killed\n{said}"
        assert code == 137, f"{point}: exit code {code}\n{said}"
        assert "exit code 137" in said
    runner = guest.start()
    killed = []
    faults = [
        guest.services.store_proxy.add(
            Fault(method, path, action, body=body, before=strikes(guest, runner, killed))  # type: ignore[arg-type]
        )
        for method, path, body, action in LAST.values()
    ]
    code, said = ended(runner)
    assert {name: fault.applied for name, fault in zip(LAST, faults, strict=True)} == dict.fromkeys(LAST, 1), said
    assert len(killed) >= len(LAST), said
    assert code == 0, said
    code, said = guest.finish()
    assert code == 0, said
    assert Account.of(guest.services.store, guest.run) == calm
    assert [m.label() for m in guest.services.machines] == ["2", "2"]


def strikes(guest: Guest, runner: subprocess.Popen[str], killed: list[int]) -> Callable[[], None]:
    """What kills the processes of the reload that goes on, and notes their pids."""

    def strike() -> None:
        for pid in stage_pids(guest.project, runner.pid, "reload"):
            os.kill(pid, signal.SIGKILL)
            killed.append(pid)

    return strike
