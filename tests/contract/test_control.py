"""Pauses, aborts, flushes and labels around requests in flight."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from colchis.components.agent.engine import DIRTY
from tests.contract.conftest import SGLANG, Flight
from tests.engine.processes import EngineProcess
from tests.engine.test_logprobs import reference
from tests.waiting import eventually

Fly = Callable[..., Flight]


def pause(engine: EngineProcess, mode: str) -> None:
    assert engine.client.post("/pause_generation", json={"mode": mode}).status_code == 200


def resume(engine: EngineProcess) -> None:
    assert engine.client.post("/continue_generation", json={}).status_code == 200


def test_retract_load_continue_keeps_every_token_under_its_own_weights(
    engine: EngineProcess, models: dict[str, Path], fly: Fly
) -> None:
    """Catches lost tokens, spans that lie, and keys and values of the old weights under the new ones: each token has
    the log-probability that the weights named by its span give it."""
    flights = [fly(prompt=[5, 3, place]) for place in (2, 3, 4)]
    pause(engine, "retract")
    assert engine.update(models["qwen2_b"], weight_version="1", flush_cache=True).status_code == 200
    assert not any(flight.over for flight in flights)
    resume(engine)
    for place, flight in zip((2, 3, 4), flights, strict=True):
        answer = flight.answer()
        meta, ids = answer["meta_info"], answer["output_ids"]
        assert meta["finish_reason"]["type"] == "length"
        assert (len(ids), meta["num_retractions"]) == (600, 1)
        first, second = meta["weight_versions"]
        assert (first["version"], first["start"]) == ("0", 0)
        assert (second["version"], second["end"], meta["weight_version"]) == ("1", 600, "1")
        assert first["end"] == second["start"] > 0
        for span, name in ((first, "qwen2_a"), (second, "qwen2_b")):
            expected = reference(models[name], [5, 3, place, *ids])[2:-1]
            for index in range(span["start"], span["end"]):
                logprob = meta["output_token_logprobs"][index][0]
                assert logprob == pytest.approx(float(expected[index, ids[index]]), abs=5e-5), (span, index)


def test_pause_abort_answers_with_the_partial_tokens(engine: EngineProcess, fly: Fly) -> None:
    """Catches an aborted request that hangs, or looks finished: it is a 200 whose finish_reason is abort."""
    flights = [fly(900), fly(900)]
    pause(engine, "abort")
    for flight in flights:
        answer = flight.answer()
        assert answer["meta_info"]["finish_reason"]["type"] == "abort"
        assert 0 < len(answer["output_ids"]) < 900
    resume(engine)
    engine.sample([1, 2])


def test_a_request_during_a_pause_waits_for_continue(engine: EngineProcess) -> None:
    """Catches requests that fail or run while paused, a /ready that says yes, and a liveness that says no."""
    pause(engine, "retract")
    with ThreadPoolExecutor(1) as pool:
        pending = pool.submit(engine.sample, [1, 2, 3])
        time.sleep(0.5)
        assert not pending.done()
        assert engine.client.get("/ready").status_code == 503
        assert engine.client.get("/ping").status_code == 200
        resume(engine)
        assert pending.result(30)["meta_info"]["finish_reason"]["type"] == "length"
    assert engine.client.get("/ready").status_code == 200


def test_one_continue_ends_every_pause(engine: EngineProcess) -> None:
    """Catches pauses that are counted: the agent pauses a second time over a pause that it found, and continues once."""
    for mode in ("in_place", "retract", "abort"):
        pause(engine, mode)
    assert engine.client.get("/ready").status_code == 503
    resume(engine)
    assert engine.client.get("/ready").status_code == 200
    engine.sample([1, 2])


def test_a_liveness_probe_in_a_pause_does_no_harm(engine: EngineProcess) -> None:
    """Catches a probe that hangs while the engine is paused, and leaves it unwell afterwards."""
    pause(engine, "retract")
    began = time.monotonic()
    assert engine.client.get("/health").status_code == 200
    assert time.monotonic() - began < 5
    resume(engine)
    for path in ("/ready", "/ping", "/health"):
        assert engine.client.get(path).status_code == 200
    engine.sample([1, 2])


def test_continue_is_harmless_when_nothing_is_paused(engine: EngineProcess) -> None:
    """Catches a clean-up that fails because there was nothing to clean: the agent continues on every path."""
    resume(engine)
    resume(engine)
    engine.sample([1, 2])


def test_an_update_without_a_pause_waits_for_what_runs(
    engine: EngineProcess, models: dict[str, Path], fly: Fly
) -> None:
    """Catches weights that change under a running request, unnamed."""
    flight = fly(400)
    with ThreadPoolExecutor(1) as pool:
        update = pool.submit(engine.update, models["qwen2_b"], weight_version="1")
        assert flight.answer()["meta_info"]["weight_versions"] == [{"version": "0", "start": 0, "end": 400}]
        assert update.result().status_code == 200
    assert engine.sample([4, 4])["meta_info"]["weight_version"] == "1"


def test_frozen_in_place_without_a_flush_goes_on_with_the_old_keys_and_values(
    engine: EngineProcess, models: dict[str, Path], fly: Fly
) -> None:
    """Catches tokens of new weights over old keys and values that look like the new version's own: the span changes, and
    the log-probabilities are nobody's. The agent never loads so."""
    flight = fly(400)
    pause(engine, "in_place")
    assert engine.update(models["qwen2_b"], weight_version="1", flush_cache=False).status_code == 200
    assert engine.info("weight_version") == "1"
    resume(engine)
    answer = flight.answer()
    ids, meta = answer["output_ids"], answer["meta_info"]
    assert [span["version"] for span in meta["weight_versions"]] == ["0", "1"]
    border = meta["weight_versions"][1]["start"]
    expected = reference(models["qwen2_b"], [5, 3, 8, *ids])[2:-1]
    gaps = [abs(meta["output_token_logprobs"][i][0] - float(expected[i, ids[i]])) for i in range(border, 400)]
    assert max(gaps) > 1e-2
    assert engine.client.post("/flush_cache?timeout=30").status_code == 200


def test_an_update_may_abort_what_runs(kind: str, engine: EngineProcess, models: dict[str, Path], fly: Fly) -> None:
    """Catches an update that waits for the long tail although told not to. SGLang may flush before the abort is done, and says
    so."""
    flight = fly(900)
    reply = engine.update(models["qwen2_b"], weight_version="1", abort_all_requests=True)
    assert reply.status_code == 200 or (kind == SGLANG and DIRTY in reply.text)
    meta = flight.answer()["meta_info"]
    assert meta["finish_reason"]["type"] == "abort"
    assert meta["weight_versions"][0]["version"] == "0"


def test_abort_request_ends_only_the_named_one(engine: EngineProcess, fly: Fly) -> None:
    """Catches aborts that hit neighbours, and an error for a request that has just ended by itself."""
    mine, other = fly(900, rid="mine"), fly(600, rid="other")
    assert engine.client.post("/abort_request", json={"rid": "nobody"}).status_code == 200
    assert engine.client.post("/abort_request", json={"rid": "mine"}).status_code == 200
    assert mine.answer()["meta_info"]["finish_reason"]["type"] == "abort"
    assert other.answer()["meta_info"]["finish_reason"]["type"] == "length"


def test_a_flush_is_refused_while_requests_run_and_can_wait_for_them(engine: EngineProcess, fly: Fly) -> None:
    """Catches a flush that is acknowledged and did not happen."""
    flight = fly(600)
    reply = engine.client.post("/flush_cache")
    assert reply.status_code == 400
    assert not flight.over
    assert engine.client.post("/flush_cache?timeout=60").status_code == 200
    assert flight.answer()["meta_info"]["finish_reason"]["type"] == "length"


def test_a_flush_works_in_a_pause_by_retraction(engine: EngineProcess, fly: Fly) -> None:
    """Catches requests put back in the queue that block the flush which the pause was made for."""
    flight = fly(600)
    pause(engine, "retract")
    assert engine.client.post("/flush_cache").status_code == 200
    resume(engine)
    assert len(flight.answer()["output_ids"]) == 600


def test_a_label_moves_only_when_it_is_sent(engine: EngineProcess, models: dict[str, Path]) -> None:
    """Catches a version that is counted by the engine itself: it is a text that somebody set."""
    assert engine.update(models["qwen2_b"]).status_code == 200
    assert engine.info("weight_version") == "0"
    body = {"new_version": "7", "abort_all_requests": False}
    assert engine.client.post("/update_weight_version", json=body).status_code == 200
    assert engine.info("weight_version") == "7"
    assert engine.sample([2])["meta_info"]["weight_version"] == "7"
    assert engine.client.get("/server_info").json()["internal_states"][0]["weight_version"] == "7"


def test_a_label_can_change_without_an_abort(engine: EngineProcess, fly: Fly) -> None:
    """Catches a default: without `abort_all_requests: false` the change of a name ends every request."""
    flight = fly(600)
    body = {"new_version": "7", "abort_all_requests": False}
    assert engine.client.post("/update_weight_version", json=body).status_code == 200
    answer = flight.answer()
    assert answer["meta_info"]["finish_reason"]["type"] == "length"
    spans = answer["meta_info"]["weight_versions"]
    assert [span["version"] for span in spans] == ["0", "7"]
    assert (spans[0]["start"], spans[0]["end"], spans[1]["end"]) == (0, spans[1]["start"], 600)
    flight = fly(900)
    assert engine.client.post("/update_weight_version", json={"new_version": "8"}).status_code == 200
    assert flight.answer()["meta_info"]["finish_reason"]["type"] == "abort"


def test_a_client_that_hangs_up_frees_its_place(engine: EngineProcess) -> None:
    """Catches requests that go on for nobody after a deadline of the rollout has passed."""
    body = {"input_ids": [2, 2], "sampling_params": {"max_new_tokens": 1000, "ignore_eos": True}, "stream": True}
    with httpx.stream("POST", f"{engine.url}/generate", json=body, timeout=60) as reply:
        next(reply.iter_lines())
    eventually(lambda: engine.client.post("/flush_cache").status_code == 200, "its place is free", deadline_s=5)


def test_metrics_that_dashboards_use_are_there(engine: EngineProcess) -> None:
    """Catches renamed families: graphs would go empty without an error. SGLang's counter of retractions is not among them:
    it was seen to be missing after a pause that retracted."""
    engine.sample([1, 2])
    text = engine.client.get("/metrics").text
    for family in (
        *("num_running_reqs", "num_queue_reqs"),
        *("prompt_tokens_total", "generation_tokens_total", "num_requests_total", "num_aborted_requests_total"),
        *("e2e_request_latency_seconds_bucket", "time_to_first_token_seconds_bucket"),
        "weight_load_duration_seconds",
    ):
        assert f"\nsglang:{family}{{" in text or f"\nsglang:{family} " in text, family
