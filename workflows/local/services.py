"""Store, engines and agents on loopback: what a cluster's overlays deploy, as child processes.

Each child dies with its parent (PR_SET_PDEATHSIG), so that not even `kill -9` leaves one behind.
"""

from __future__ import annotations

import ctypes
import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import httpx

from colchis.components.config import TrainerConfig
from colchis.components.engine.settings import type_of
from colchis.components.errors import BadConfig, PeerUnavailable
from colchis.components.weights.header import read_header
from colchis.workflows.local.ports import free_port

PR_SET_PDEATHSIG = 1
START_S = 120.0
"""Longest wait for a child to answer."""
SGLANG_START_S = 600.0
"""The same for real SGLang: half a minute on a free machine, minutes on a loaded one. A child that ends is noticed at once."""


def die_with_parent() -> None:
    """Run in the child between fork and exec."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


class Child:
    """A child process with a log file, in a process group of its own."""

    def __init__(self, name: str, argv: Sequence[str], *, log: Path, environment: Mapping[str, str]) -> None:
        self.name, self.log = name, log
        log.parent.mkdir(parents=True, exist_ok=True)
        self._out: IO[bytes] = log.open("ab")
        self.process = subprocess.Popen(
            argv,
            env={**os.environ, **environment},
            stdin=subprocess.DEVNULL,
            stdout=self._out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=die_with_parent,
        )

    def wait_for(self, url: str, *, deadline_s: float = START_S, accept: tuple[int, ...] = (200,)) -> None:
        """Wait until `url` answers. PeerUnavailable shows the end of the log when the child dies or is too slow."""
        end = time.monotonic() + deadline_s
        while time.monotonic() < end:
            if self.process.poll() is not None:
                break
            try:
                if httpx.get(url, timeout=2.0).status_code in accept:
                    return
            except httpx.HTTPError:
                time.sleep(0.05)
        state = f"ended with {self.process.returncode}" if self.process.poll() is not None else "does not answer"
        tail = self.log.read_text(errors="replace")[-600:].strip()
        raise PeerUnavailable(f"{self.name} {state} ({url}); its last words: {tail}", where=str(self.log))

    def stop(self, grace_s: float = 10.0) -> None:
        """SIGTERM, then SIGKILL of the whole group."""
        if self.process.poll() is None:
            self._signal(signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(grace_s)
        self._signal(signal.SIGKILL)
        self.process.wait()
        self._out.close()

    def _signal(self, number: int) -> None:
        try:
            os.killpg(self.process.pid, number)
        except ProcessLookupError:
            return


@dataclass(frozen=True)
class EngineProcess:
    """One engine with its agent."""

    engine_id: str
    engine_url: str
    agent_url: str
    engine: Child
    agent: Child


@dataclass(frozen=True)
class Pool:
    """The engines of one pool."""

    name: str
    engines: list[EngineProcess]
    """Those that this process started."""
    addresses: str
    """The value of COLCHIS_ENGINES."""
    token: str


def engine_command(kind: str, *, port: int, model: Path | None, trainer: TrainerConfig | None = None) -> list[str]:
    """How an engine of this kind is started. `trainer`: of the run that it is for, whose adapters it is to serve."""
    if kind == "embedded":
        return [
            *(sys.executable, "-m", "colchis.components.engine"),
            *("--host", "127.0.0.1", "--port", str(port), "--weight-version", "none", "--deterministic"),
        ]
    if kind == "sglang":
        from colchis.components.engine.sglang_cpu import adapter_arguments, launch_command

        if model is None:
            raise BadConfig("engines of kind 'sglang' need the model's folder at start")
        written = {span.dtype for path in model.glob("*.safetensors") for span in read_header(path)}
        more = adapter_arguments(trainer.lora_rank, trainer.lora_targets) if trainer and trainer.lora_rank else ()
        return launch_command(model=model, port=port, dtype=type_of(written), more=more)
    raise BadConfig(f"engine kind '{kind}' is unknown; use 'embedded' or 'sglang'")


@contextmanager
def start_pool(
    name: str,
    *,
    replicas: int,
    kind: str,
    folder: Path,
    store_environment: Mapping[str, str],
    model: Path | None = None,
    trainer: TrainerConfig | None = None,
) -> Iterator[Pool]:
    """Start `replicas` engines with agents; stop them on leaving."""
    token = secrets.token_urlsafe(24)
    environment = {**store_environment, "COLCHIS_AGENT_TOKEN": token, "OMP_NUM_THREADS": "1"}
    engines: list[EngineProcess] = []
    with ExitStack() as stack:
        for number in range(replicas):
            engine_id, logs = f"{name}-{number}", folder / f"{name}-{number}"
            port, agent_port = free_port(), free_port()
            engine_url, agent_url = f"http://127.0.0.1:{port}", f"http://127.0.0.1:{agent_port}"
            engine = Child(
                f"engine {engine_id}",
                engine_command(kind, port=port, model=model, trainer=trainer),
                log=logs / "engine.log",
                environment=environment,
            )
            stack.callback(engine.stop)
            agent = Child(
                f"agent {engine_id}",
                [
                    *(sys.executable, "-m", "colchis.components", "agent", "--engine-url", engine_url),
                    *("--host", "127.0.0.1", "--port", str(agent_port), "--staging", str(logs / "staging")),
                    *("--engine-id", engine_id, "--pool", name),
                ],
                log=logs / "agent.log",
                environment=environment,
            )
            stack.callback(agent.stop)
            engines.append(EngineProcess(engine_id, engine_url, agent_url, engine, agent))
        for e in engines:
            start_s = SGLANG_START_S if kind == "sglang" else START_S
            e.engine.wait_for(f"{e.engine_url}/ping", deadline_s=start_s, accept=(200, 503))
            e.agent.wait_for(f"{e.agent_url}/live")
        yield Pool(name, engines, ",".join(e.agent_url for e in engines), token)


def write_state(path: Path, state: Mapping[str, object]) -> None:
    """Write a small JSON file atomically, readable by its owner only (it holds credentials)."""
    staged = path.with_suffix(f".{os.getpid()}")
    staged.touch(mode=0o600)
    staged.write_text(json.dumps(state, indent=1), encoding="utf-8")
    staged.replace(path)
