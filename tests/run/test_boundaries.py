"""Killed between the trainer's weights and the serving engines, at every point where something is half done."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable

import pytest

from tests.faults import Fault
from tests.run.kept import Account, Guest, ended
from tests.run.test_kills import stage_pids

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

FIRST, SECOND = r'"version": ?1\b', r'"version": ?2\b'
POINTS = {
    "store, publishing": ("store", "PUT", "weights/v00000001/manifest.json", None, "reset"),
    "transfer": ("agent", "POST", "/prepare", FIRST, "delay"),
    "buffer": ("agent", "POST", "/verify", FIRST, "delay"),
    "load": ("agent", "POST", "/activate", FIRST, "delay"),
    "load, its record not stored": ("store", "PUT", "v00000002/reloads/.*/load.json", None, "reset"),
    "cache, before the version is declared": ("store", "PUT", "/serving.json", SECOND, "reset"),
    "cache, after the version is declared": ("store", "PUT", "/serving.json", SECOND, "swallow"),
    "cache, before the summary": ("store", "PUT", "iterations/000001/summary.json", None, "reset"),
}
"""At which request the boundary's process is killed; `delay` lets the request go on after its sender is dead. Each try of a pod
meets the next one: four at either version, which leaves one try for what nobody planned."""


def test_killed_at_every_boundary(guest: Guest, calm: Account) -> None:
    """Fault: a reload that cannot be repeated because an earlier one was killed half-way, or that counts twice; a pod whose
    first container was killed, and that is not tried again because its last one says only that it waited."""
    proxies = {"store": guest.services.store_proxy, "agent": guest.services.machines[0].agent_proxy}
    runner = guest.start()
    killed: dict[str, list[int]] = {point: [] for point in POINTS}
    for point, (peer, method, path, body, action) in POINTS.items():
        strike = strikes(guest, runner, killed[point])
        proxies[peer].add(Fault(method, path, action, body=body, seconds=0.5, before=strike))  # type: ignore[arg-type]
    code, said = ended(runner)
    assert all(killed.values()), f"{killed}\n{said}"
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
