"""Weight updates and pauses around requests in flight, as far as they are this engine's own: tests/contract has the rest."""

from __future__ import annotations

import hashlib
import json
import socket
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import torch

from tests.engine.processes import EngineProcess
from tests.waiting import eventually

LONG_TOKENS = 900


@contextmanager
def in_flight(engine: EngineProcess, count: int = 1, **extra: Any) -> Iterator[list[Future[Any]]]:
    """Long requests of which some tokens exist already."""
    before = engine.produced()
    params = {"max_new_tokens": LONG_TOKENS, "ignore_eos": True, "sampling_seed": 9}
    with ThreadPoolExecutor(count) as pool:
        futures = [
            pool.submit(
                engine.generate,
                **{"input_ids": [5, 3, place], "sampling_params": params, "return_logprob": True, **extra},
            )
            for place in range(count)
        ]
        eventually(lambda: engine.produced() > before + 5 * count, "all of them draw tokens")
        yield futures


def pause(engine: EngineProcess, mode: str) -> None:
    assert engine.client.post("/pause_generation", json={"mode": mode}).status_code == 200


def resume(engine: EngineProcess) -> None:
    assert engine.client.post("/continue_generation", json={}).status_code == 200


def test_in_place_with_flush_is_refused_before_anything_changes(engine: EngineProcess, models: dict[str, Path]) -> None:
    """Catches SGLang's two truths: 400 although the weights are new, and a version that depends on where one asks."""
    before = engine.checksum()
    with in_flight(engine) as (future,):
        pause(engine, "in_place")
        reply = engine.update(models["qwen2_b"], weight_version="1")
        assert reply.status_code == 400
        assert "frozen in place" in reply.json()["message"]
        assert engine.checksum() == before
        assert engine.info("weight_version") == "0"
        assert engine.update(models["qwen2_b"], weight_version="1", flush_cache=False).status_code == 200
        resume(engine)
        meta = future.result()["meta_info"]
    assert [span["version"] for span in meta["weight_versions"]] == ["0", "1"]
    assert meta["num_retractions"] == 0


def test_a_request_during_a_pause_waits_for_continue(engine: EngineProcess) -> None:
    """Catches requests that fail, run, or get lost while paused; and probes that lie about it."""
    pause(engine, "retract")
    with ThreadPoolExecutor(1) as pool:
        pending = pool.submit(engine.sample, [1, 2, 3])
        time.sleep(0.3)
        assert not pending.done()
        assert engine.client.get("/ready").status_code == 503
        assert engine.client.get("/health_generate").status_code == 503
        assert engine.client.get("/health").status_code == engine.client.get("/ping").status_code == 200
        resume(engine)
        assert pending.result(10)["meta_info"]["finish_reason"]["type"] == "length"
    assert engine.client.get("/ready").status_code == engine.client.get("/health_generate").status_code == 200


def test_an_update_without_pause_waits_for_those_before_it_and_holds_those_after(
    engine: EngineProcess, models: dict[str, Path]
) -> None:
    """Catches weights that change under a running request, and a later request served by the older weights."""
    with in_flight(engine) as (running,), ThreadPoolExecutor(2) as pool:
        update = pool.submit(engine.update, models["qwen2_b"], weight_version="1")
        time.sleep(0.15)
        later = pool.submit(engine.sample, [4, 4])
        assert update.result().status_code == 200
        assert running.result()["meta_info"]["weight_versions"] == [{"version": "0", "start": 0, "end": LONG_TOKENS}]
        assert later.result()["meta_info"]["weight_version"] in {"0", "1"}
    assert engine.sample([4, 4])["meta_info"]["weight_version"] == "1"


def test_a_client_that_hangs_up_frees_its_rows(engine: EngineProcess) -> None:
    """Catches rows that go on decoding for nobody, with and without streaming."""
    body = {"input_ids": [2, 2], "sampling_params": {"max_new_tokens": 1000, "ignore_eos": True, "n": 8}}
    before = engine.metric("num_aborted_requests_total")
    content = json.dumps(body).encode()
    head = f"POST /generate HTTP/1.1\r\nHost: engine\r\nContent-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
    address = urlsplit(engine.url)
    with socket.create_connection((address.hostname, address.port)) as client:
        client.sendall(head.encode() + content)
        eventually(lambda: engine.metric("num_running_reqs") == 8, "all of them run")
    eventually(lambda: engine.metric("num_aborted_requests_total") == before + 8, "all of them are aborted")
    with httpx.stream("POST", f"{engine.url}/generate", json={**body, "stream": True}) as reply:
        next(reply.iter_lines())
    eventually(lambda: engine.metric("num_aborted_requests_total") == before + 16, "all of them are aborted")
    assert engine.metric("num_running_reqs") == 0


def test_flush_cache_and_honest_cached_tokens(engine: EngineProcess, models: dict[str, Path]) -> None:
    """Catches a prefix cache that survives a flush or an update, and a prompt that is computed once per sample."""
    prompt = list(range(2, 30))

    def cached() -> int:
        count: int = engine.sample(prompt)["meta_info"]["cached_tokens"]
        return count

    engine.client.post("/flush_cache")
    assert [cached(), cached()] == [0, len(prompt)]
    assert engine.client.post("/flush_cache").status_code == 200
    assert [cached(), cached()] == [0, len(prompt)]
    engine.update(models["qwen2_a"], weight_version="0")
    group = engine.generate(input_ids=prompt, sampling_params={"n": 4, "max_new_tokens": 2})
    assert [answer["meta_info"]["cached_tokens"] for answer in group] == [0] + [len(prompt)] * 3
    with in_flight(engine) as (running,):
        assert engine.client.post("/flush_cache").status_code == 400
        assert not running.done()
        assert engine.client.post("/flush_cache?timeout=30").status_code == 200
        assert running.done() or running.result(5)


def test_checksums_are_those_predicted_from_the_checkpoint(engine: EngineProcess, models: dict[str, Path]) -> None:
    """Catches a checksum of something else than the tensors that serve: fusing order, dtype, or a stale copy."""
    from safetensors.torch import load_file

    for name in ("qwen2_b", "qwen2_a"):
        engine.update(models[name])
        tensors = load_file(models[name] / "model.safetensors")
        served = engine.client.post("/weights_checker", json={"action": "checksum"}).json()["ranks"][0]["checksums"]

        def predicted(*names: str, source: dict[str, torch.Tensor] = tensors) -> str:
            fused = torch.cat([source[name] for name in names])
            return hashlib.sha256(fused.numpy().tobytes()).hexdigest()[:16]

        for layer in range(2):
            prefix = f"model.layers.{layer}."
            parts = [f"{prefix}self_attn.{part}_proj" for part in "qkv"]
            for kind in ("weight", "bias"):
                expected = predicted(*(f"{part}.{kind}" for part in parts))
                assert served[f"{prefix}self_attn.qkv_proj.{kind}"] == expected
            gate_up = predicted(f"{prefix}mlp.gate_proj.weight", f"{prefix}mlp.up_proj.weight")
            assert served[f"{prefix}mlp.gate_up_proj.weight"] == gate_up
        assert served["model.embed_tokens.weight"] == predicted("model.embed_tokens.weight")
        assert "lm_head.weight" not in served
        assert len(served) == 2 * 7 + 2
        # the first answer was hashed during the load, this one is of what serves
        again = engine.client.post("/weights_checker", json={"action": "checksum"}).json()["ranks"][0]["checksums"]
        assert again == served
