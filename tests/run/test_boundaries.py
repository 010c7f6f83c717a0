"""Killed between the trainer's weights and the serving engines, at every point where something is half done."""

from __future__ import annotations

import os
import signal

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
    "cache, before the version is declared": ("store", "PUT", "/serving.json", r'"version": ?1\b', "reset"),
    "cache, after the version is declared": ("store", "PUT", "/serving.json", r'"version": ?1\b', "swallow"),
    "cache, before the summary": ("store", "PUT", "iterations/000000/summary.json", None, "reset"),
}
"""At which request the boundary's process is killed; `delay` lets the request go on after its sender is dead."""


def test_killed_at_every_boundary(guest: Guest, calm: Account) -> None:
    """Fault: a reload that cannot be repeated because an earlier one was killed half-way, or that counts twice."""
    for point, (peer, method, path, body, action) in POINTS.items():
        proxies: list[FaultProxy] = [guest.services.store_proxy]
        if peer == "agent":
            proxies = [m.agent_proxy for m in guest.services.machines]
        runner = guest.start()
        killed: list[int] = []

        def strike(runner_pid: int = runner.pid, killed: list[int] = killed) -> None:
            for pid in stage_pids(guest.project, runner_pid, "reload"):
                os.kill(pid, signal.SIGKILL)
                killed.append(pid)

        for proxy in proxies:
            proxy.add(Fault(method, path, action, body=body, seconds=0.5, before=strike))  # type: ignore[arg-type]
        code, said = ended(runner)
        for proxy in proxies:
            proxy.clear()
        assert killed, f"{point}: nothing was killed\n{said}"
        assert code == 137, f"{point}: exit code {code}\n{said}"
        assert "exit code 137" in said
    code, said = guest.finish()
    assert code == 0, said
    assert Account.of(guest.services.store, guest.run) == calm
    assert [m.label() for m in guest.services.machines] == ["2", "2"]
