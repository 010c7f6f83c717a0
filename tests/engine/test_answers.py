"""The shape of answers: stops, streams, batches, text."""

from __future__ import annotations

import json
from typing import Any

from tests.engine.processes import EOS, EngineProcess


def events(engine: EngineProcess, **body: Any) -> list[Any]:
    """The messages of a stream, which must end with [DONE]."""
    with engine.client.stream("POST", "/generate", json={**body, "stream": True}) as reply:
        assert reply.headers["content-type"].startswith("text/event-stream")
        lines = [line.removeprefix("data: ") for line in reply.iter_lines() if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def test_a_stream_is_cumulative_and_ends_with_the_plain_answer(engine: EngineProcess) -> None:
    """Catches lost, repeated or reordered tokens, and a stream that differs from the plain answer."""
    body = {
        "input_ids": [4, 5, 6],
        "return_logprob": True,
        "sampling_params": {"max_new_tokens": 12, "sampling_seed": 4, "ignore_eos": True},
    }
    plain, messages = engine.generate(**body), events(engine, **body)
    assert [len(message["output_ids"]) for message in messages] == list(range(1, 13))
    for count, message in enumerate(messages, 1):
        assert message["output_ids"] == plain["output_ids"][:count]
        logprobs = message["meta_info"]["output_token_logprobs"]
        assert logprobs == plain["meta_info"]["output_token_logprobs"][:count]
    assert [message["meta_info"]["finish_reason"] for message in messages[:-1]] == [None] * 11
    assert messages[-1]["meta_info"]["finish_reason"] == {"type": "length", "length": 12}
    assert messages[-1]["text"] == plain["text"]


def test_a_stream_of_several_samples_tells_them_apart(engine: EngineProcess) -> None:
    """Catches messages of one sample under another's index."""
    params = {"max_new_tokens": 5, "sampling_seed": [1, 2, 3], "n": 3, "ignore_eos": True}
    plain = engine.generate(input_ids=[9, 9], sampling_params=params)
    last: dict[int, list[int]] = {}
    for message in events(engine, input_ids=[9, 9], sampling_params=params):
        last[message["index"]] = message["output_ids"]
    assert [last[index] for index in range(3)] == [answer["output_ids"] for answer in plain]


def test_stop_ids_eos_and_min_new_tokens(engine: EngineProcess) -> None:
    """Catches stops that are missed, come a token late, or before min_new_tokens."""
    free = engine.sample([8, 3], seed=2, tokens=60)["output_ids"]
    stop = free[20]
    first = free.index(stop)
    stopped = engine.sample([8, 3], seed=2, tokens=60, stop_token_ids=[stop])
    assert stopped["output_ids"] == free[: first + 1]
    assert stopped["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}
    group = engine.generate(
        input_ids=[8, 3], sampling_params={"n": 200, "max_new_tokens": 60, "sampling_seed": 1, "temperature": 2.0}
    )
    ended = [answer for answer in group if answer["meta_info"]["finish_reason"]["type"] == "stop"]
    assert ended
    for answer in group:
        assert EOS not in answer["output_ids"][:-1]
        assert (answer["output_ids"][-1] == EOS) == (answer in ended)
    shortest = min(len(answer["output_ids"]) for answer in ended)
    later = engine.generate(
        input_ids=[8, 3],
        sampling_params={
            "n": 200,
            "max_new_tokens": 60,
            "sampling_seed": 1,
            "temperature": 2.0,
            "min_new_tokens": shortest + 10,
        },
    )
    assert min(len(answer["output_ids"]) for answer in later) >= shortest + 10
    assert all(EOS not in answer["output_ids"][:-1] for answer in later)


def test_stop_strings_end_and_trim_the_text(engine: EngineProcess) -> None:
    """Catches stop strings that span tokens, and text that keeps them."""
    text = engine.sample([8, 3], seed=6, tokens=40)["text"]
    stop = text[10:12]
    at = text.index(stop)
    answer = engine.sample([8, 3], seed=6, tokens=40, stop=["never", stop])
    assert answer["text"] == text[:at]
    assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}
    kept = engine.sample([8, 3], seed=6, tokens=40, stop=stop, no_stop_trim=True)
    assert kept["text"] == text[: at + 2]


def test_text_in_is_the_tokenizers_ids(engine: EngineProcess) -> None:
    """Catches a text prompt that is tokenised otherwise than by the model's tokenizer."""
    params = {"max_new_tokens": 5, "sampling_seed": 1}
    by_text = engine.generate(text="*+,", sampling_params=params)
    assert by_text["output_ids"] == engine.generate(input_ids=[2, 3, 4], sampling_params=params)["output_ids"]
    assert by_text["meta_info"]["prompt_tokens"] == 3


def test_batches_keep_order_and_ids(engine: EngineProcess) -> None:
    """Catches answers in order of completion, and shapes that depend on the batch's size."""
    lengths = [30, 1, 17, 4]
    answers = engine.generate(
        input_ids=[[7], [8], [9], [10]],
        sampling_params=[{"max_new_tokens": length, "ignore_eos": True} for length in lengths],
        rid=["a", "b", "c", "d"],
    )
    assert [len(answer["output_ids"]) for answer in answers] == lengths
    assert [answer["meta_info"]["id"] for answer in answers] == ["a", "b", "c", "d"]
    assert isinstance(engine.generate(input_ids=[[7]], sampling_params={"max_new_tokens": 1}), list)
    assert isinstance(engine.generate(input_ids=[7], sampling_params={"max_new_tokens": 1}), dict)


def test_a_prompt_can_be_scored_without_drawing(engine: EngineProcess) -> None:
    """Catches max_new_tokens 0 that draws, and a logprob_start_len that is off by one."""
    prompt = [2, 7, 1, 8, 2, 8]
    whole, tail = (
        engine.generate(
            input_ids=prompt, sampling_params={"max_new_tokens": 0}, return_logprob=True, logprob_start_len=start
        )
        for start in (0, 3)
    )
    assert whole["output_ids"] == tail["output_ids"] == []
    assert [entry[1] for entry in whole["meta_info"]["input_token_logprobs"]] == prompt
    assert tail["meta_info"]["input_token_logprobs"][0] == [None, prompt[3], None]
    assert tail["meta_info"]["input_token_logprobs"][1:] == whole["meta_info"]["input_token_logprobs"][4:]
