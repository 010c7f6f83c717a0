"""The same client against the embedded engine: a real server process with a small random model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import numpy as np
import pytest
from safetensors.numpy import save_file

from colchis.components.environments import Reply
from colchis.components.errors import BadConfig
from colchis.components.records.rows import Row
from colchis.components.records.trajectories import SegmentKind
from colchis.components.rollout import Engines
from colchis.workflows.local.ports import free_port
from tests.rollout.conftest import character_tokenizer

HIDDEN, LAYERS, KEYS = 32, 2, 16
CONFIG = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "vocab_size": 64,
    "hidden_size": HIDDEN,
    "intermediate_size": 64,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "eos_token_id": 1,
    "dtype": "float32",
}


def write_model(folder: Path) -> None:
    """Random weights, written without importing torch."""
    draw = np.random.default_rng(0)
    shapes = {"model.embed_tokens.weight": (64, HIDDEN), "model.norm.weight": (HIDDEN,)}
    for i in range(LAYERS):
        layer = f"model.layers.{i}."
        shapes |= {layer + f"{n}_layernorm.weight": (HIDDEN,) for n in ("input", "post_attention")}
        shapes |= {layer + f"mlp.{n}_proj.weight": (64, HIDDEN) for n in ("gate", "up")}
        shapes |= {layer + "mlp.down_proj.weight": (HIDDEN, 64), layer + "self_attn.o_proj.weight": (HIDDEN, HIDDEN)}
        for n, width in (("q", HIDDEN), ("k", KEYS), ("v", KEYS)):
            shapes |= {
                layer + f"self_attn.{n}_proj.weight": (width, HIDDEN),
                layer + f"self_attn.{n}_proj.bias": (width,),
            }
    tensors = {
        name: np.ones(shape, np.float32) if "norm" in name else draw.normal(0, 0.3, shape).astype(np.float32)
        for name, shape in shapes.items()
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(CONFIG))
    character_tokenizer().save(str(folder / "tokenizer.json"))


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    write_model(folder)
    return folder


@pytest.fixture(scope="module")
def engine(model):
    """Address of an engine that serves random weights as version 3."""
    with started(model) as url:
        yield url


@contextmanager
def started(model: Path, *more: str, **environment: str) -> Iterator[str]:
    port = free_port()
    command = [sys.executable, "-m", "colchis.components.engine", "--port", str(port), "--deterministic"]
    command += ["--model-path", str(model), "--weight-version", "3", *more]
    process = subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1", **environment})
    url = f"http://127.0.0.1:{port}"
    deadline = time.monotonic() + 120
    try:
        while not _answers(url):
            assert process.poll() is None, "the engine ended"
            assert time.monotonic() < deadline, "the engine did not start"
            time.sleep(0.1)
        yield url
    finally:
        process.terminate()
        process.wait(30)


def _answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/ready", timeout=5).status_code == 200
    except httpx.HTTPError:
        return False


class Counter:
    """Answers each of the first two turns with its number: an episode of three turns whatever the policy says."""

    version = "1"

    def prompts(self):
        return []

    def start(self, row: Row, seed: int):
        return CounterEpisode(row)


class CounterEpisode:
    def __init__(self, row: Row) -> None:
        self.row, self.turns = row, 0

    def prompt(self) -> str:
        return self.row.prompt

    def reply(self, turn):
        self.turns += 1
        return Reply(f"<{self.turns}>\n".replace("<", "[").replace(">", "]")) if self.turns < 3 else None

    def score(self):
        return None


def contents(arrived):
    return {t.id: (t.token_ids, t.logprobs, t.loss_mask, t.finish_reason) for group in arrived for t in group}


def test_samples_depend_on_names_only(generate, engine):
    """A repeated shard, or one with other companions in the batch, must draw the same tokens."""
    alone, _ = generate(Engines.at([engine]), groups=4, concurrency=1)
    spread, stats = generate(Engines.at([engine]), groups=4, concurrency=4)
    assert contents(alone) == contents(spread)
    assert stats.faults == {}
    assert len({tuple(t.token_ids) for t in alone[0]}) > 1, "the samples of a group are all the same"
    other, _ = generate(Engines.at([engine]), groups=4, iteration=4)
    assert {k.split("/", 3)[3]: v for k, v in contents(other).items()} != {
        k.split("/", 3)[3]: v for k, v in contents(alone).items()
    }


def test_episodes_of_several_turns_keep_every_sampled_id(generate, engine, tokenizer):
    arrived, stats = generate(Engines.at([engine]), groups=2, environment=Counter(), max_turns=5)
    assert stats.turns == 2 * 4 * 3
    for t in (t for group in arrived for t in group):
        kinds = [s.kind for s in t.segments]
        assert kinds == [SegmentKind.MODEL, SegmentKind.ENVIRONMENT] * 2 + [SegmentKind.MODEL]
        replies = [s for s in t.segments if s.kind is SegmentKind.ENVIRONMENT]
        assert [tokenizer.decode(t.token_ids[s.start : s.end]) for s in replies] == ["[1]\n", "[2]\n"]
        sampled = sum(s.end - s.start for s in t.segments if s.kind is SegmentKind.MODEL)
        assert t.trained_tokens == sampled
        assert all((p < 0) == m for p, m in zip(t.logprobs, t.loss_mask, strict=True))


def test_log_probabilities_of_a_turn_are_those_of_the_whole_sequence(generate, engine):
    """A later turn is scored in the context of the very ids before it: asked about the finished sequence, the engine
    gives the log-probabilities that were recorded turn by turn."""
    arrived, _ = generate(Engines.at([engine]), groups=1, environment=Counter(), max_turns=5)
    for t in arrived[0]:
        body = {
            "input_ids": t.token_ids,
            "sampling_params": {"max_new_tokens": 1, "temperature": 1.0},
            "return_logprob": True,
            "logprob_start_len": 0,
        }
        answer = httpx.post(f"{engine}/generate", json=body, timeout=30).json()
        whole = [entry[0] for entry in answer["meta_info"]["input_token_logprobs"]]
        for position, trained in enumerate(t.loss_mask):
            if trained:
                assert whole[position] == pytest.approx(t.logprobs[position], abs=1e-4)


def test_stop_text_ends_a_turn_and_is_cut_from_its_text(generate, engine, tokenizer):
    arrived, _ = generate(Engines.at([engine]), groups=4, stop=list("abcdefghijklm"), max_new_tokens=16)
    stopped = [t for g in arrived for t in g if t.finish_reason == "stop" and t.token_ids[-1] != 1]
    assert stopped
    for t in stopped:
        said = tokenizer.decode(t.token_ids[t.prompt_tokens :])
        assert said[-1] in "abcdefghijklm"
        assert t.completion == said[:-1]


def test_a_prompt_over_the_context_is_refused_with_the_engines_words(generate, engine):
    from colchis.components.errors import BadData

    class Long(Counter):
        def start(self, row, seed):
            return CounterEpisode(Row(row.index, "1" * 59, "x"))

    with pytest.raises(BadData, match="the prompt has 59 tokens, expected 1 to 58"):
        generate(Engines.at([engine]), groups=1, environment=Long())


def test_an_engine_that_wants_a_key(generate, model):
    """A pool whose engines are locked must be of use, and the lack of a key must not look like engines that are down."""
    with started(model, "--api-key-env", "THE_KEY", THE_KEY="key-of-the-tests") as url:
        arrived, stats = generate(Engines.at([url], key="key-of-the-tests"), groups=2)
        assert (len(arrived), stats.faults) == (2, {})
        for key in ("", "another"):
            with pytest.raises(BadConfig, match="wants a key"):
                generate(Engines.at([url], key=key), groups=1)
