"""Real engine processes on loopback, and a client for them."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import httpx

from colchis.workflows.local.ports import free_port

VOCAB = 100
EOS = 1
START_DEADLINE_S = 90.0


@dataclass
class EngineProcess:
    """A running engine, a client for it, and the models it can be given."""

    process: subprocess.Popen[bytes] | ForkServerProcess
    url: str
    client: httpx.Client

    def generate(self, **body: Any) -> Any:
        reply = self.client.post("/generate", json=body)
        assert reply.status_code == 200, reply.text
        return reply.json()

    def sample(self, prompt: list[int], seed: int = 7, tokens: int = 8, **params: Any) -> Any:
        """One sample with log-probs, fixed by its seed."""
        sampling = {"max_new_tokens": tokens, "sampling_seed": seed, "ignore_eos": True, **params}
        return self.generate(input_ids=prompt, sampling_params=sampling, return_logprob=True)

    def update(self, folder: Path, **body: Any) -> httpx.Response:
        return self.client.post("/update_weights_from_disk", json={"model_path": str(folder), **body})

    def info(self, field: str) -> Any:
        return self.client.get("/model_info").json()[field]

    def metric(self, name: str) -> float:
        """0 as long as the family is not there: SGLang shows some only after the first request."""
        lines = self.client.get("/metrics").text.splitlines()
        values = (line.split()[-1] for line in lines if line.startswith((f"sglang:{name} ", f"sglang:{name}{{")))
        return float(next(values, 0.0))

    def busy(self) -> bool:
        """Whether requests are running, told by a cache that cannot be flushed; metrics of SGLang lag behind."""
        return self.client.post("/flush_cache").status_code != 200

    def produced(self) -> float:
        """Tokens drawn since the engine started."""
        return self.metric("generation_tokens_total")

    def checksum(self) -> str:
        digest: str = self.client.post("/weights_checker", json={"action": "checksum"}).json()["per_engine_checksum"]
        return digest


def client_of(url: str) -> httpx.Client:
    """Many requests at once, each with a minute."""
    return httpx.Client(base_url=url, timeout=60, limits=httpx.Limits(max_connections=200))


def spawn_engine(*arguments: str) -> EngineProcess:
    """Starts `python -m colchis.components.engine`, as a user would."""
    port = free_port()
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = str(Path(__file__).parents[2] / "src")
    process = subprocess.Popen(
        [sys.executable, "-m", "colchis.components.engine", "--port", str(port), *arguments], env=environment
    )
    url = f"http://127.0.0.1:{port}"
    return EngineProcess(process, url, client_of(url))


def run_engine(arguments: list[str]) -> None:
    from colchis.components.engine.__main__ import main

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    main(arguments)


def fork_engine(*arguments: str) -> EngineProcess:
    """Starts the same command in a process forked from one that has torch imported: seconds less for each."""
    port = free_port()
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["transformers", "colchis.components.engine.__main__"])
    process = context.Process(target=run_engine, args=(["--port", str(port), *arguments],), daemon=True)
    process.start()
    url = f"http://127.0.0.1:{port}"
    return EngineProcess(process, url, client_of(url))


def wait_until_up(engine: EngineProcess) -> EngineProcess:
    deadline = time.monotonic() + START_DEADLINE_S
    while time.monotonic() < deadline:
        code = engine.process.poll() if isinstance(engine.process, subprocess.Popen) else engine.process.exitcode
        assert code is None, f"the engine exited with {code}"
        try:
            if engine.client.get("/health").status_code == 200:
                return engine
        except httpx.TransportError:
            time.sleep(0.1)
    raise AssertionError(f"{engine.url} did not answer within {START_DEADLINE_S} s")


def end(engine: EngineProcess) -> None:
    engine.client.close()
    engine.process.kill()
    engine.process.wait(10) if isinstance(engine.process, subprocess.Popen) else engine.process.join(10)
