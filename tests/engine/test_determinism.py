"""Deterministic mode: a result depends on weights, prompt, parameters and seed, and on nothing else."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tests.engine.processes import VOCAB, EngineProcess
from tests.waiting import eventually


def bits(answer: Any) -> tuple[list[int], list[float]]:
    """Tokens and log-probs, exactly as sent."""
    return answer["output_ids"], [entry[0] for entry in answer["meta_info"]["output_token_logprobs"]]


def probes(rng: random.Random) -> list[dict[str, Any]]:
    """Requests whose results are compared: prompt lengths on both sides of paddings and attention windows."""
    return [
        {
            "input_ids": [rng.randrange(VOCAB) for _ in range(length)],
            "sampling_params": {
                "max_new_tokens": 40,
                "sampling_seed": rng.randrange(2**31),
                "ignore_eos": True,
                "temperature": rng.choice([0.5, 1.0, 1.0]),
                "top_p": rng.choice([1.0, 0.9]),
            },
            "return_logprob": True,
        }
        for length in (1, 3, 15, 16, 17, 40, 63, 100, 120, 250, 300)
    ]


def companion(rng: random.Random) -> dict[str, Any]:
    length = rng.choice([1, 2, 8, 30, 90, 200, 600])
    return {
        "input_ids": [rng.randrange(VOCAB) for _ in range(length)],
        "sampling_params": {
            "max_new_tokens": rng.randrange(1, 80),
            "temperature": rng.choice([0.0, 0.7, 1.5]),
            "top_k": rng.choice([-1, 5]),
            "n": rng.randrange(1, 6),
        },
    }


def test_bits_do_not_depend_on_companions_slots_or_engine(engines: dict[str, EngineProcess]) -> None:
    """Catches every leak between rows: product kernels chosen by batch size, windows, padding, filters, row moves."""
    rng = random.Random(1)
    wanted = probes(rng)
    engine, small = engines["fixed"], engines["fixed_small"]
    alone = [bits(engine.generate(**body)) for body in wanted]
    crowd = [(None, companion(rng)) for _ in range(60)] + list(enumerate(wanted)) * 2
    rng.shuffle(crowd)
    with ThreadPoolExecutor(40) as pool:
        answers = list(pool.map(lambda item: (item[0], engine.generate(**item[1])), crowd))
        answers += list(pool.map(lambda item: (item[0], small.generate(**item[1])), crowd[:60]))
    compared = [place for place, _ in answers if place is not None]
    assert len(compared) >= 2 * len(wanted)
    for place, answer in answers:
        if place is not None:
            assert bits(answer) == alone[place]


def test_n_batch_and_single_requests_agree(engines: dict[str, EngineProcess]) -> None:
    """Catches seeds that mean another draw in another request form: n with a list, a batch, one by one."""
    engine, prompt, seeds = engines["fixed"], [3, 1, 4, 1, 5, 9], [11, 22, 33, 44]
    params: dict[str, Any] = {"max_new_tokens": 12, "ignore_eos": True}
    listed = engine.generate(
        input_ids=prompt, sampling_params={**params, "n": 4, "sampling_seed": seeds}, return_logprob=True
    )
    batch = engine.generate(
        input_ids=[prompt] * 4,
        sampling_params=[{**params, "sampling_seed": seed} for seed in seeds],
        return_logprob=True,
    )
    single = [
        engine.generate(input_ids=prompt, sampling_params={**params, "sampling_seed": seed}, return_logprob=True)
        for seed in seeds
    ]
    assert [bits(answer) for answer in listed] == [bits(answer) for answer in batch]
    assert [bits(answer) for answer in listed] == [bits(answer) for answer in single]
    assert len({tuple(answer["output_ids"]) for answer in listed}) == 4
    mixed = engine.generate(
        input_ids=prompt, sampling_params={**params, "n": 3, "sampling_seed": 11}, return_logprob=True
    )
    assert bits(mixed[0]) == bits(single[0])
    assert len({tuple(answer["output_ids"]) for answer in mixed}) == 3


def test_a_retraction_without_new_weights_changes_no_bit(engines: dict[str, EngineProcess]) -> None:
    """Catches keys and values that are rebuilt with other roundings than the ones that were dropped."""
    engine, prompt = engines["fixed"], [9, 8, 7]
    alone = bits(engine.sample(prompt, seed=5, tokens=400))
    with ThreadPoolExecutor(1) as pool:
        before = engine.produced()
        pending = pool.submit(engine.sample, prompt, seed=5, tokens=400)
        for tokens in (3, 40):
            eventually(lambda tokens=tokens: engine.produced() > before + tokens, "the others draw tokens")
            engine.client.post("/pause_generation", json={"mode": "retract"})
            engine.client.post("/continue_generation", json={})
        answer = pending.result()
    assert answer["meta_info"]["num_retractions"] == 2
    assert bits(answer) == alone


def test_plain_mode_repeats_a_seed(engine: EngineProcess, models: dict[str, Path]) -> None:
    """Catches draws that take their randomness from somewhere else than the seed."""
    assert bits(engine.sample([5, 6], seed=1))[0] == bits(engine.sample([5, 6], seed=1))[0]
    assert bits(engine.sample([5, 6], seed=1))[0] != bits(engine.sample([5, 6], seed=2))[0]
