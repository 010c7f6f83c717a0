"""Weight updates, pauses and aborts around requests that are in flight."""

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
import pytest
import torch

from tests.engine.processes import EngineProcess, wait_for
from tests.engine.test_logprobs import reference

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
        wait_for(lambda: engine.produced() > before + 5 * count)
        yield futures


def pause(engine: EngineProcess, mode: str) -> None:
    assert engine.client.post("/pause_generation", json={"mode": mode}).status_code == 200


def resume(engine: EngineProcess) -> None:
    assert engine.client.post("/continue_generation", json={}).status_code == 200


def test_retract_update_continue_keeps_tokens_and_goes_on_under_the_new_weights(
    engine: EngineProcess, models: dict[str, Path]
) -> None:
    """Catches lost tokens, spans that lie, and keys and values of the old weights under the new ones."""
    with in_flight(engine, 3) as futures:
        pause(engine, "retract")
        assert engine.client.get("/flush_cache").status_code == 200
        reply = engine.update(models["qwen2_b"], weight_version="1")
        assert reply.status_code == 200
        assert reply.json()["success"] is True
        assert not any(future.done() for future in futures)
        resume(engine)
        answers = [future.result() for future in futures]
    for place, answer in enumerate(answers):
        meta, ids = answer["meta_info"], answer["output_ids"]
        assert meta["finish_reason"] == {"type": "length", "length": LONG_TOKENS}
        assert meta["num_retractions"] == 1
        first, second = meta["weight_versions"]
        assert (first["version"], first["start"]) == ("0", 0)
        assert (second["version"], second["end"], meta["weight_version"]) == ("1", LONG_TOKENS, "1")
        assert first["end"] == second["start"] > 0
        for span, name in ((first, "qwen2_a"), (second, "qwen2_b")):
            expected = reference(models[name], [5, 3, place, *ids])[2:-1]
            for index in range(span["start"], span["end"]):
                logprob = meta["output_token_logprobs"][index][0]
                assert logprob == pytest.approx(float(expected[index, ids[index]]), abs=2e-5)


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


def test_pause_abort_answers_200_with_the_partial_tokens(engine: EngineProcess) -> None:
    """Catches aborted requests that hang, lose their tokens, or look finished."""
    with in_flight(engine, 2) as futures:
        pause(engine, "abort")
        for future in futures:
            answer = future.result(10)
            assert answer["meta_info"]["finish_reason"]["type"] == "abort"
            assert 0 < len(answer["output_ids"]) < LONG_TOKENS
            assert len(answer["meta_info"]["output_token_logprobs"]) == len(answer["output_ids"])
    resume(engine)


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


def test_abort_all_requests_lets_an_update_through_at_once(engine: EngineProcess, models: dict[str, Path]) -> None:
    """Catches an update that waits for the long tail although told not to."""
    with in_flight(engine) as (running,):
        assert engine.update(models["qwen2_b"], weight_version="1", abort_all_requests=True).status_code == 200
        meta = running.result(10)["meta_info"]
    assert meta["finish_reason"]["type"] == "abort"
    assert meta["weight_versions"][0]["version"] == "0"


def test_abort_request_ends_only_the_named_one(engine: EngineProcess) -> None:
    """Catches aborts that hit neighbours, or an unknown rid that is an error."""
    with in_flight(engine, 1, rid="mine") as (mine,), in_flight(engine, 1, rid="other") as (other,):
        assert engine.client.post("/abort_request", json={"rid": "nobody"}).status_code == 200
        assert engine.client.post("/abort_request", json={"rid": "mine"}).status_code == 200
        assert mine.result(10)["meta_info"]["finish_reason"]["type"] == "abort"
        assert mine.result()["meta_info"]["id"] == "mine"
        assert other.result()["meta_info"]["finish_reason"]["type"] == "length"


def test_a_client_that_hangs_up_frees_its_rows(engine: EngineProcess) -> None:
    """Catches rows that go on decoding for nobody, with and without streaming."""
    body = {"input_ids": [2, 2], "sampling_params": {"max_new_tokens": 1000, "ignore_eos": True, "n": 8}}
    before = engine.metric("num_aborted_requests_total")
    content = json.dumps(body).encode()
    head = f"POST /generate HTTP/1.1\r\nHost: engine\r\nContent-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
    address = urlsplit(engine.url)
    with socket.create_connection((address.hostname, address.port)) as client:
        client.sendall(head.encode() + content)
        wait_for(lambda: engine.metric("num_running_reqs") == 8, 30)
    wait_for(lambda: engine.metric("num_aborted_requests_total") == before + 8, 30)
    with httpx.stream("POST", f"{engine.url}/generate", json={**body, "stream": True}) as reply:
        next(reply.iter_lines())
    wait_for(lambda: engine.metric("num_aborted_requests_total") == before + 16, 30)
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


def test_version_labels(engine: EngineProcess, models: dict[str, Path]) -> None:
    """Catches a label that moves without being sent, or doesn't when it is."""
    engine.update(models["qwen2_b"])
    assert engine.info("weight_version") == "0"
    reply = engine.client.post("/update_weight_version", json={"new_version": "7", "abort_all_requests": False})
    assert reply.status_code == 200
    assert engine.sample([2])["meta_info"]["weight_version"] == "7"
    assert engine.client.get("/server_info").json()["internal_states"][0]["weight_version"] == "7"


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
