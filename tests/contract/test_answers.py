"""What an answer of /generate says, and that it is true."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.contract.conftest import Flight
from tests.engine.processes import EngineProcess
from tests.engine.test_logprobs import reference

PROMPT = [5, 9, 2, 40, 17]
CLOSE = 2e-5
"""Between two float32 implementations of one model."""


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_logprobs_are_the_policys_at_the_temperature_of_sampling(
    engine: EngineProcess, models: dict[str, Path], temperature: float
) -> None:
    """Catches log-probabilities of another distribution than the one that was drawn from, which every ratio of the
    trainer would inherit."""
    answer = engine.sample(PROMPT, tokens=40, temperature=temperature)
    ids, meta = answer["output_ids"], answer["meta_info"]
    assert len(ids) == meta["completion_tokens"] == 40
    expected = reference(models["qwen2_a"], PROMPT + ids, temperature)
    for place, (logprob, token, *_) in enumerate(meta["output_token_logprobs"]):
        assert token == ids[place]
        assert logprob == pytest.approx(float(expected[len(PROMPT) + place - 1, token]), abs=CLOSE)


def test_a_prompt_is_scored_token_by_token(engine: EngineProcess, models: dict[str, Path]) -> None:
    """Catches a prompt that is changed on the way in, and probes that compare other places than the trainer's."""
    answer = engine.generate(
        input_ids=PROMPT, sampling_params={"max_new_tokens": 1}, return_logprob=True, logprob_start_len=0
    )
    rows = answer["meta_info"]["input_token_logprobs"]
    assert [row[1] for row in rows] == PROMPT
    assert rows[0][0] is None
    expected = reference(models["qwen2_a"], PROMPT)
    for place, row in enumerate(rows[1:]):
        assert row[0] == pytest.approx(float(expected[place, row[1]]), abs=CLOSE)


def test_greedy_is_the_argmax(engine: EngineProcess, models: dict[str, Path]) -> None:
    """Catches an evaluation that samples, by either way of asking for the likeliest token."""
    for params in ({"temperature": 0.0}, {"temperature": 1.0, "top_k": 1}):
        ids = engine.generate(input_ids=PROMPT, sampling_params={"max_new_tokens": 20, "ignore_eos": True, **params})[
            "output_ids"
        ]
        expected = reference(models["qwen2_a"], PROMPT + ids)
        assert ids == [int(row.argmax()) for row in expected[len(PROMPT) - 1 : -1]]


def test_a_batch_keeps_its_order_and_each_its_parameters(engine: EngineProcess) -> None:
    """Catches answers in order of completion: a reward would go to another prompt's answer."""
    lengths = [30, 1, 17, 4]
    answers = engine.generate(
        input_ids=[[7], [8, 8], [9, 9, 9], [10]],
        sampling_params=[{"max_new_tokens": length, "ignore_eos": True} for length in lengths],
        rid=["a", "b", "c", "d"],
        return_logprob=True,
        logprob_start_len=-1,
    )
    assert [len(answer["output_ids"]) for answer in answers] == lengths
    assert [answer["meta_info"]["id"] for answer in answers] == ["a", "b", "c", "d"]
    assert [answer["meta_info"]["prompt_tokens"] for answer in answers] == [1, 2, 3, 1]
    assert [len(answer["meta_info"]["output_token_logprobs"]) for answer in answers] == lengths


def test_samples_of_one_prompt_differ(engine: EngineProcess) -> None:
    """Catches a group that is one answer many times: every advantage would be zero."""
    answers = engine.generate(
        input_ids=[PROMPT] * 8,
        sampling_params=[{"max_new_tokens": 12, "ignore_eos": True, "sampling_seed": seed} for seed in range(8)],
    )
    assert len({tuple(answer["output_ids"]) for answer in answers}) == 8


def test_a_stop_token_ends_the_answer_and_is_part_of_it(engine: EngineProcess) -> None:
    """Catches stops that are missed or trimmed: the trainer must see the token that ended the episode."""
    params: dict[str, Any] = {"max_new_tokens": 40, "temperature": 0.0, "ignore_eos": True}
    free = engine.generate(input_ids=PROMPT, sampling_params=params)["output_ids"]
    stop = free[20]
    first = free.index(stop)
    answer = engine.generate(
        input_ids=PROMPT,
        sampling_params={"max_new_tokens": 40, "temperature": 0.0, "stop_token_ids": [stop]},
        return_logprob=True,
    )
    assert answer["output_ids"] == free[: first + 1]
    assert answer["meta_info"]["finish_reason"]["type"] == "stop"
    assert answer["meta_info"]["finish_reason"]["matched"] == stop
    assert len(answer["meta_info"]["output_token_logprobs"]) == first + 1


def test_the_limit_is_told_from_a_stop(engine: EngineProcess) -> None:
    answer = engine.sample(PROMPT, tokens=9)
    assert answer["meta_info"]["finish_reason"] == {"type": "length", "length": 9}


def test_one_span_covers_an_undisturbed_answer(engine: EngineProcess) -> None:
    """Catches answers that say nothing of their version, which the rollout would have to believe blindly."""
    meta = engine.sample(PROMPT, tokens=9)["meta_info"]
    assert meta["weight_version"] == "0"
    assert meta["weight_versions"] == [{"version": "0", "start": 0, "end": 9}]


def test_a_stream_is_cumulative(engine: EngineProcess) -> None:
    """Catches a stream of pieces: tokens seen before an abort would be lost or doubled."""
    body = {
        "input_ids": PROMPT,
        "sampling_params": {"max_new_tokens": 12, "ignore_eos": True},
        "return_logprob": True,
    }
    flight = Flight(engine, body).start()
    last = flight.answer()
    assert len(last["output_ids"]) == 12
    for message in flight.messages:
        count = len(message["output_ids"])
        assert message["output_ids"] == last["output_ids"][:count]
        rows = message["meta_info"]["output_token_logprobs"]
        assert rows == last["meta_info"]["output_token_logprobs"][:count]
    assert {str(message["meta_info"]["finish_reason"]) for message in flight.messages[:-1]} <= {"None"}


def test_cached_tokens_say_what_was_reused(engine: EngineProcess) -> None:
    """Catches a cache that cannot be seen from outside: boundary 5 asks by exactly this number."""
    prompt = list(range(2, 34))

    def cached(**more: Any) -> int:
        answer = engine.generate(input_ids=prompt, sampling_params={"max_new_tokens": 1, "top_k": 1}, **more)
        return int(answer["meta_info"]["cached_tokens"])

    assert cached() == 0
    assert cached() >= len(prompt) - 1
    assert cached(extra_key="canary") == 0  # an extra key keeps caches apart
    assert cached(extra_key="canary") >= len(prompt) - 1
    assert engine.client.post("/flush_cache").status_code == 200
    assert cached() == 0


def test_many_requests_at_once_get_their_own_answers(engine: EngineProcess) -> None:
    """Catches answers that are swapped between clients."""

    def ask(number: int) -> tuple[int, dict[str, Any]]:
        params = {"max_new_tokens": 5 + number, "ignore_eos": True}
        return number, engine.generate(input_ids=[3] * (1 + number), sampling_params=params, rid=f"r{number}")

    with ThreadPoolExecutor(16) as pool:
        for number, answer in pool.map(ask, range(32)):
            meta = answer["meta_info"]
            assert (meta["id"], meta["prompt_tokens"], meta["completion_tokens"]) == (
                f"r{number}",
                1 + number,
                5 + number,
            )


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"input_ids": [1], "sampling_params": {"temperature": -1}},
        {"input_ids": [1], "sampling_params": {"top_p": 0}},
        {"input_ids": [1] * 2000, "sampling_params": {"max_new_tokens": 1}},
    ],
    ids=["nothing", "temperature", "top_p", "too long"],
)
def test_bad_requests_are_answered_400(engine: EngineProcess, body: dict[str, Any]) -> None:
    """Catches a refusal that looks like an outage, which would be retried for ever."""
    reply = engine.client.post("/generate", json=body)
    assert reply.status_code == 400, reply.text
    assert reply.json()["error"]["message"]
    engine.sample([1])


def test_bytes_that_are_no_json_are_refused(engine: EngineProcess) -> None:
    headers = {"content-type": "application/json"}
    assert engine.client.post("/generate", content=b"{", headers=headers).status_code == 400
    engine.sample([1])
