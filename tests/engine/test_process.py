"""The engine as a process: starting empty, keys, signals, and death in the middle of a load."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from colchis.workflows.local.ports import free_port
from tests.engine.processes import EngineProcess


def test_empty_start_key_kill_during_load_and_restart(
    spawn: Callable[..., EngineProcess], models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a 200 without a model, routes without the key, and a death during a load that outlives the process."""
    monkeypatch.setenv("ENGINE_KEY", "secret")
    engine = spawn("--api-key-env", "ENGINE_KEY")
    assert engine.client.post("/generate", json={"input_ids": [1]}).status_code == 401
    assert engine.client.get("/ready").status_code == 503
    engine.client.headers["Authorization"] = "Bearer secret"
    reply = engine.client.post("/generate", json={"input_ids": [1]})
    assert reply.status_code == 503
    assert "no model is loaded" in reply.json()["error"]["message"]
    assert engine.info("weight_version") == "none"
    assert engine.update(models["qwen2_a"], weight_version="4").status_code == 200
    assert engine.client.get("/ready").status_code == 200
    expected = engine.sample([3, 3])
    with ThreadPoolExecutor(1) as pool:
        load = pool.submit(engine.update, models["qwen2_b"], weight_version="5")
        os.kill(engine.process.pid, signal.SIGKILL)
        with contextlib.suppress(httpx.TransportError):
            load.result()
    engine.process.wait(10)
    again = spawn("--model-path", str(models["qwen2_a"]), "--weight-version", "4")
    assert again.info("weight_version") == "4"
    assert again.sample([3, 3])["output_ids"] == expected["output_ids"]


def test_sigterm_answers_what_is_in_flight_and_exits(
    spawn: Callable[..., EngineProcess], models: dict[str, Path]
) -> None:
    """Catches a stop that waits for long answers, or drops them without a word."""
    engine = spawn("--model-path", str(models["qwen2_a"]))
    with ThreadPoolExecutor(1) as pool:
        body = {"input_ids": [2], "sampling_params": {"max_new_tokens": 1000, "ignore_eos": True, "n": 50}}
        pending = pool.submit(engine.client.post, "/generate", json=body)
        while engine.client.get("/server_info").json()["internal_states"][0]["num_running_reqs"] == 0:
            assert not pending.done()
        engine.process.send_signal(signal.SIGTERM)
        reply = pending.result(10)
    assert reply.status_code == 200
    assert {answer["meta_info"]["finish_reason"]["type"] for answer in reply.json()} == {"abort"}
    assert engine.process.wait(10) in {0, -signal.SIGTERM}


def test_a_bad_model_at_start_exits_65_and_says_why(tmp_path: Path) -> None:
    """Catches an engine that starts without the model it was told to serve."""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2] / "src"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "colchis.components.engine", "--port", str(free_port())]
    ended = subprocess.run(
        [*command, "--model-path", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=60,
        env=environment,
        check=False,
    )
    assert ended.returncode == 65
    assert "no config.json" in ended.stderr
