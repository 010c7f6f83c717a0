"""Services that outlive runs, as `colchis up` keeps them: a store, and engines with agents, each behind a proxy.

Whatever is killed stays dead until the test starts it again, on the same address and over the same folder, as a
kubelet would.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

import httpx

from colchis.components.records import trajectories as trajectory_records
from colchis.components.store import StageKey, Store, find_commit, keys
from colchis.workflows.home import started_at
from colchis.workflows.local.ports import free_port
from colchis.workflows.local.services import Child, engine_command
from colchis.workflows.local.weed import Weed
from tests.faults import FaultProxy

if TYPE_CHECKING:
    from tests.run.conftest import Project

DEADLINE_S = 400.0
"""Longest time for one command: a loaded machine may need a minute to import torch."""
TOKEN = "token-of-the-tests"
START_S = 240.0
"""Longest wait for an engine to start on a loaded machine."""


class Machine:
    """One engine and its agent: SGLang where a model for it is given. Start them from the main thread: a child dies with the
    thread that started it."""

    def __init__(self, number: int, folder: Path, store_environment: dict[str, str], model: Path | None = None) -> None:
        self.id, self.folder, self.model = f"main-{number}", folder / f"main-{number}", model
        self.staging = self.folder / "staging"
        self._port, self._agent_port = free_port(), free_port()
        self._environment = {**store_environment, "COLCHIS_AGENT_TOKEN": TOKEN, "OMP_NUM_THREADS": "1"}
        self.engine_proxy = FaultProxy(("127.0.0.1", self._port))
        self.agent_proxy = FaultProxy(("127.0.0.1", self._agent_port))
        self._children: dict[str, Child] = {}

    def pid(self, name: str) -> int:
        """Process of the `engine` or the `agent`."""
        return self._children[name].process.pid

    def kill(self, name: str) -> None:
        """SIGKILL to all of its processes, and nothing comes after it."""
        os.killpg(self.pid(name), signal.SIGKILL)
        self._children[name].process.wait()

    def freeze(self) -> None:
        """The engine hangs: its connections stay open and nothing is answered."""
        os.kill(self.pid("engine"), signal.SIGSTOP)

    def thaw(self) -> None:
        os.kill(self.pid("engine"), signal.SIGCONT)

    def start(self, *, wait: bool = True) -> None:
        """Start whichever of the two does not run."""
        if self._ended("engine"):
            argv = engine_command("sglang" if self.model else "embedded", port=self._port, model=self.model)
            self._start("engine", argv)
        if self._ended("agent"):
            argv = [
                *(sys.executable, "-m", "colchis.components", "agent", "--engine-url", self.engine_proxy.url),
                *("--host", "127.0.0.1", "--port", str(self._agent_port), "--staging", str(self.staging)),
                *("--engine-id", self.id, "--pool", "main"),
            ]
            self._start("agent", argv)
        if wait:
            self.wait()

    def wait(self) -> None:
        """Until both answer."""
        self._children["engine"].wait_for(f"http://127.0.0.1:{self._port}/ping", deadline_s=START_S, accept=(200, 503))
        self._children["agent"].wait_for(f"http://127.0.0.1:{self._agent_port}/live", deadline_s=START_S)

    def status(self) -> dict[str, object]:
        """What the agent says."""
        headers = {"Authorization": f"Bearer {TOKEN}"}
        answer = httpx.get(f"http://127.0.0.1:{self._agent_port}/status", headers=headers, timeout=30)
        result: dict[str, object] = answer.json()
        return result

    def label(self) -> str:
        """The version under which the engine itself answers a request."""
        answer = httpx.post(
            f"http://127.0.0.1:{self._port}/generate",
            json={"input_ids": [18, 13, 19, 31], "sampling_params": {"max_new_tokens": 1}},
            timeout=60,
        )
        return str(answer.json()["meta_info"]["weight_version"])

    def stop(self) -> None:
        for child in self._children.values():
            if child.process.poll() is None:
                os.kill(child.process.pid, signal.SIGCONT)
            child.stop()

    def _ended(self, name: str) -> bool:
        return name not in self._children or self._children[name].process.poll() is not None

    def _start(self, name: str, argv: Sequence[str]) -> None:
        self._children[name] = Child(
            f"{name} {self.id}", argv, log=self.folder / f"{name}.log", environment=self._environment
        )


@dataclass
class Services:
    """What a run finds in `services.json`. `store` is the way around the proxy."""

    weed: Weed
    store: Store
    store_proxy: FaultProxy
    machines: list[Machine]

    @property
    def environment(self) -> dict[str, str]:
        settings = replace(self.weed.settings, endpoint=self.store_proxy.url)
        agents = ",".join(m.agent_proxy.url for m in self.machines)
        return {**settings.to_environment(), "COLCHIS_ENGINES": agents, "COLCHIS_AGENT_TOKEN": TOKEN}

    def repair(self) -> None:
        """Whole again: no faults, everything runs, and no run has the pool."""
        for proxy in (self.store_proxy, *(p for m in self.machines for p in (m.engine_proxy, m.agent_proxy))):
            proxy.clear()
        if self.weed.pid is None:
            self.weed.start()
        for machine in self.machines:
            machine.start(wait=False)
        for machine in self.machines:
            machine.thaw()
            machine.wait()
        self.store.delete(keys.pool_lease("main"))


@contextmanager
def keep_services(folder: Path, *, machines: int = 2, model: Path | None = None) -> Iterator[Services]:
    """Start everything; end it with the block. `model`: what SGLang starts with, in place of embedded engines."""
    with ExitStack() as stack:
        weed = stack.enter_context(Weed(folder / "store"))
        port = int(weed.settings.endpoint.rpartition(":")[2])
        proxy = stack.enter_context(FaultProxy(("127.0.0.1", port)))
        pool = [Machine(n, folder, weed.environment(), model) for n in range(machines)]
        for machine in pool:
            stack.enter_context(machine.engine_proxy)
            stack.enter_context(machine.agent_proxy)
            stack.callback(machine.stop)
            machine.start(wait=False)
        for machine in pool:
            machine.wait()
        yield Services(weed, Store(weed.settings, deadline_s=30.0), proxy, pool)


@dataclass
class Guest:
    """One run on kept services, from a home of its own."""

    services: Services
    project: Project
    run: str
    changed: dict[str, str] = field(default_factory=dict)
    """Variables of the runner's own environment."""
    started: list[subprocess.Popen[str]] = field(default_factory=list)

    def announce(self, **changes: str) -> None:
        """Write `services.json`, with other values where `changes` has them."""
        self.project.home.mkdir(parents=True, exist_ok=True)
        state = {
            "pid": os.getpid(),
            "since": started_at(os.getpid()),
            "kept": True,
            "environment": self.services.environment | changes,
        }
        (self.project.home / "services.json").write_text(json.dumps(state))

    def start(self, *args: str) -> subprocess.Popen[str]:
        """`colchis run` in the background."""
        runner = subprocess.Popen(
            self.project.command("run", str(self.project.folder / "run.yaml"), "--run", self.run, *args),
            env=self.project.environment | self.changed,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self.started.append(runner)
        return runner

    def finish(self, *args: str) -> tuple[int, str]:
        """`colchis run` to its end: exit code and what it said."""
        return ended(self.start(*args))

    def stage_folder(self) -> Path:
        """Where the steps of the run have their folders."""
        return self.project.home / "runs" / self.run

    def close(self) -> None:
        """End what a failed test left."""
        for runner in self.started:
            if runner.poll() is None:
                os.killpg(runner.pid, signal.SIGKILL)
                runner.wait()


def ended(runner: subprocess.Popen[str]) -> tuple[int, str]:
    """Exit code of a runner and what it said."""
    said = runner.communicate(timeout=DEADLINE_S)[0]
    return runner.returncode, said


@dataclass(frozen=True)
class Account:
    """What must not depend on what went wrong meanwhile."""

    digests: list[str]
    """Weights of every version, in order."""
    steps: list[object]
    """Optimiser steps of every train commit."""
    trajectories: list[str]
    """Iteration/prompt/sample of everything in committed shards, sorted."""

    @classmethod
    def of(cls, store: Store, run: str) -> Account:
        """Read from the commits of a run, which hold no trajectory twice."""
        digests, steps, ids = [], [], []
        for iteration in count():
            train = find_commit(store, StageKey(run, iteration, "train"))
            if train is None:
                break
            digests.append(str(train.outputs["weights_digest"]))
            steps.append(train.outputs["steps"])
            for shard in count():
                rollout = find_commit(store, StageKey(run, iteration, "rollout", shard))
                if rollout is None:
                    break
                for payload in rollout.payload:
                    if payload.name.startswith("trajectories-"):
                        ids += [t.id for t in trajectory_records.from_parquet(store.read(payload))]
        assert len(set(ids)) == len(ids), "a trajectory is committed twice"
        return cls(digests, steps, sorted(i.partition("/")[2] for i in ids))
