"""The engine's log-probs against transformers' own forward pass over the same directory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.processes import EngineProcess

FAMILIES = {"plain": "qwen2_a", "fixed": "qwen2_a", "qwen3": "qwen3", "llama": "llama", "gpt2": "gpt2"}

CLOSE = 2e-5
"""Between two float32 implementations of one model: kernels round by the processor, up to 1.2e-5 was seen."""


def reference(folder: Path, ids: list[int], temperature: float = 1.0) -> torch.Tensor:
    """log-probs float32 [tokens, V] of the next token after each of `ids`."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.inference_mode():
        logits: torch.Tensor = model(input_ids=torch.tensor([ids])).logits[0]
    return (logits.float() / temperature).log_softmax(-1)


@pytest.mark.parametrize("name", FAMILIES)
def test_logprobs_equal_a_transformers_forward(
    engines: dict[str, EngineProcess], models: dict[str, Path], name: str
) -> None:
    """Catches a wrong rotary table, mask, norm, bias, head grouping or cache position, in prefill and in decode.

    The rows have different lengths and temperatures and run together; 150 tokens cross several attention windows.
    """
    prompts = [[5, 9, 2], list(range(2, 90)), [7] * 40]
    params = [
        {"max_new_tokens": 150, "temperature": temperature, "ignore_eos": True, "sampling_seed": 3}
        for temperature in (1.0, 0.7, 1.3)
    ]
    answers = engines[name].generate(
        input_ids=prompts, sampling_params=params, return_logprob=True, logprob_start_len=0, top_logprobs_num=2
    )
    for prompt, param, answer in zip(prompts, params, answers, strict=True):
        ids, meta = answer["output_ids"], answer["meta_info"]
        assert len(ids) == meta["completion_tokens"] == 150
        raw = reference(models[FAMILIES[name]], prompt + ids)
        scaled = reference(models[FAMILIES[name]], prompt + ids, param["temperature"])
        for place, (logprob, token, _) in enumerate(meta["output_token_logprobs"]):
            assert token == ids[place]
            expected = scaled[len(prompt) + place - 1]
            assert logprob == pytest.approx(float(expected[token]), abs=CLOSE)
            top = meta["output_top_logprobs"][place]
            assert [entry[0] for entry in top] == pytest.approx(expected.topk(2).values.tolist(), abs=CLOSE)
        inputs = meta["input_token_logprobs"]
        assert inputs[0] == [None, prompt[0], None]
        assert [entry[1] for entry in inputs] == prompt
        for place, (logprob, token, _) in enumerate(inputs[1:]):
            assert logprob == pytest.approx(float(raw[place, token]), abs=CLOSE)


def test_greedy_is_the_argmax_and_asked_ids_get_their_logprob(engine: EngineProcess, models: dict[str, Path]) -> None:
    """Catches greedy that samples, and log-probs reported for other ids than asked."""
    answer = engine.generate(
        input_ids=[4, 8, 15],
        sampling_params={"max_new_tokens": 20, "temperature": 0, "ignore_eos": True},
        return_logprob=True,
        token_ids_logprob=[3, 50],
    )
    ids = answer["output_ids"]
    expected = reference(models["qwen2_a"], [4, 8, 15, *ids])[2:-1]
    assert ids == expected.argmax(-1).tolist()
    for place, entries in enumerate(answer["meta_info"]["output_token_ids_logprobs"]):
        assert [entry[1] for entry in entries] == [3, 50]
        assert [entry[0] for entry in entries] == pytest.approx(expected[place, [3, 50]].tolist(), abs=CLOSE)


def test_samples_follow_the_distribution_and_its_filters(engine: EngineProcess, models: dict[str, Path]) -> None:
    """Catches a biased draw and filters that keep what they should cut: frequencies of 4000 first tokens."""
    prompt, count = [11, 12], 4000
    probs = reference(models["qwen2_a"], prompt)[-1].exp()
    seeds = list(range(count))
    answers = engine.generate(
        input_ids=prompt, sampling_params={"max_new_tokens": 1, "n": count, "sampling_seed": seeds}
    )
    drawn = torch.bincount(torch.tensor([answer["output_ids"][0] for answer in answers]), minlength=100) / count
    deviation = (drawn - probs) / (probs * (1 - probs) / count).sqrt().clamp(min=1e-4)
    assert float(deviation.abs().max()) < 5
    ordered = probs.sort(descending=True)
    nucleus = int((ordered.values.cumsum(0) < 0.5).sum()) + 1
    for params, kept in (
        ({"top_k": 3}, set(ordered.indices[:3].tolist())),
        ({"top_p": 0.5}, set(ordered.indices[:nucleus].tolist())),
        ({"min_p": 0.5}, set((probs >= 0.5 * probs.max()).nonzero().flatten().tolist())),
    ):
        answers = engine.generate(
            input_ids=prompt, sampling_params={"max_new_tokens": 1, "n": 500, "sampling_seed": 5, **params}
        )
        assert {answer["output_ids"][0] for answer in answers} == kept
