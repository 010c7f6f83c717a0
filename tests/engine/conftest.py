"""Tiny random models made by transformers, and real engine processes on loopback that serve them."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.processes import EOS, VOCAB, EngineProcess, end, fork_engine, spawn_engine, wait_until_up


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Model directories by name; qwen2_a and qwen2_b differ in their weights only, and have a tokenizer."""
    from tokenizers import Tokenizer, decoders
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Split
    from transformers import (
        GPT2Config,
        GPT2LMHeadModel,
        LlamaConfig,
        LlamaForCausalLM,
        Qwen2Config,
        Qwen2ForCausalLM,
        Qwen3Config,
        Qwen3ForCausalLM,
    )

    common: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 160,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 1024,
        "initializer_range": 0.2,
        "bos_token_id": 0,
        "eos_token_id": EOS,
    }
    llama3 = {
        "rope_type": "llama3",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    builders: dict[str, Callable[[], Any]] = {
        "qwen2_a": lambda: Qwen2ForCausalLM(Qwen2Config(**common, tie_word_embeddings=True)),
        "qwen2_b": lambda: Qwen2ForCausalLM(Qwen2Config(**common, tie_word_embeddings=True)),
        "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**common, head_dim=32, tie_word_embeddings=False)),
        "llama": lambda: LlamaForCausalLM(
            LlamaConfig(**common, tie_word_embeddings=False, rope_parameters=llama3, attention_bias=True)
        ),
        "gpt2": lambda: GPT2LMHeadModel(
            GPT2Config(
                vocab_size=VOCAB, n_embd=64, n_layer=2, n_head=4, n_positions=256, bos_token_id=0, eos_token_id=1
            )
        ),
    }
    root = tmp_path_factory.mktemp("models")
    tokenizer = Tokenizer(WordLevel({chr(40 + index): index for index in range(VOCAB - 40)}, unk_token="("))
    tokenizer.pre_tokenizer = Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    for number, (name, build) in enumerate(builders.items()):
        torch.manual_seed(number)
        model = build()
        with torch.no_grad():
            for key, parameter in model.named_parameters():
                if key.endswith("bias") or "norm" in key:
                    parameter.add_(0.1 * torch.randn_like(parameter))
        model.save_pretrained(root / name)
        if name.startswith("qwen2"):
            tokenizer.save(str(root / name / "tokenizer.json"))
    return {name: root / name for name in builders}


@pytest.fixture(scope="session")
def engines(models: dict[str, Path]) -> Iterator[dict[str, EngineProcess]]:
    """One engine per model family and per deterministic size, started together."""
    started = {
        "plain": fork_engine("--model-path", str(models["qwen2_a"]), "--weight-version", "0"),
        "qwen3": fork_engine("--model-path", str(models["qwen3"])),
        "llama": fork_engine("--model-path", str(models["llama"])),
        "gpt2": fork_engine("--model-path", str(models["gpt2"])),
        "fixed": fork_engine("--deterministic", "--model-path", str(models["qwen2_a"])),
        "fixed_small": fork_engine(
            "--deterministic", "--model-path", str(models["qwen2_a"]), "--max-running-requests", "5"
        ),
    }
    yield {name: wait_until_up(engine) for name, engine in started.items()}
    for engine in started.values():
        end(engine)


@pytest.fixture
def engine(engines: dict[str, EngineProcess], models: dict[str, Path]) -> EngineProcess:
    """The plain Qwen2 engine with the weights of qwen2_a as version 0, running, nothing in flight."""
    plain = engines["plain"]
    plain.client.post("/abort_request", json={"abort_all": True})
    plain.client.post("/continue_generation", json={})
    assert plain.update(models["qwen2_a"], weight_version="0").status_code == 200
    return plain


@pytest.fixture
def spawn() -> Iterator[Callable[..., EngineProcess]]:
    """Starts engines that a test may kill; whatever is left ends with the test."""
    started: list[EngineProcess] = []

    def start(*arguments: str) -> EngineProcess:
        started.append(spawn_engine(*arguments))
        return wait_until_up(started[-1])

    yield start
    for engine in started:
        end(engine)


@pytest.fixture
def broken(models: dict[str, Path], tmp_path: Path) -> Callable[..., Path]:
    """A copy of qwen2_b whose tensors (and config) a function has changed."""
    from safetensors.torch import load_file, save_file

    def make(change: Callable[[dict[str, torch.Tensor]], None] | None = None) -> Path:
        folder = tmp_path / "broken"
        shutil.copytree(models["qwen2_b"], folder)
        if change is not None:
            tensors = load_file(folder / "model.safetensors")
            change(tensors)
            save_file(tensors, folder / "model.safetensors")
        return folder

    return make
