"""Make the base model of the example: a small Qwen2 with one token per character, warm-started by a short supervised
training on flawed data.

Most rows of that data have an answer that is one too high. The model learns to add, and learns the flaw with it: it
knows both answers and prefers the wrong one. Which of the two is rewarded is what reinforcement learning then finds out.
The training stops by accuracy: once most samples are one of the two, and most of those the wrong one. Its rows are those
of run.yaml's environment; held-out prompts are never shown. The result is cached by what it is made from, and put into
`base/`.

Example: python examples/arithmetic/make_base.py --target 0.68
"""

from __future__ import annotations

import hashlib
import os
import random
import shutil
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import click
import tokenizers
import torch
import torch.nn.functional as F
from transformers import Qwen2Config, Qwen2ForCausalLM
from transformers.utils import logging as transformers_logging

from colchis.components.config import load
from colchis.components.environments import generate_rows
from colchis.components.records.rows import Rows, Split

HERE = Path(__file__).parent
PAD, EOS = 0, 1
CHARACTERS = [chr(code) for code in range(32, 127)]
FLAWED = 0.7
"""Share of the shown rows whose answer is one too high."""
MOSTLY_FLAWED = 0.35
"""Largest share of the right answer among the two at the end."""
BATCH, CHECK_EVERY, CHECKED_ROWS, LONGEST_STEPS = 128, 50, 300, 4000


def make_tokenizer() -> tokenizers.Tokenizer:
    """One token per printable ASCII character, after <pad> and <eos>."""
    vocabulary = {"<pad>": PAD, "<eos>": EOS} | {c: i + 2 for i, c in enumerate(CHARACTERS)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.decoder = tokenizers.decoders.Fuse()
    tokenizer.add_special_tokens(["<pad>", "<eos>"])
    return tokenizer


def make_model() -> Qwen2ForCausalLM:
    """About 400 thousand parameters, fp32."""
    config = Qwen2Config(
        vocab_size=len(CHARACTERS) + 2,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=EOS,
        pad_token_id=PAD,
    )
    return Qwen2ForCausalLM(config)


@dataclass(frozen=True)
class Example:
    """Token ids of a prompt and of its right and its flawed answer, each with <eos>."""

    prompt: list[int]
    right: list[int]
    flawed: list[int]


def examples_of(rows: Rows, tokenizer: tokenizers.Tokenizer) -> list[Example]:
    """The training rows."""

    def answer(number: int) -> list[int]:
        return [*tokenizer.encode(str(number)).ids, EOS]

    train = [rows[i] for i in rows.indices(Split.TRAIN)]
    return [Example(tokenizer.encode(r.prompt).ids, answer(int(r.answer)), answer(int(r.answer) + 1)) for r in train]


def loss_of(model: Qwen2ForCausalLM, batch: list[tuple[list[int], list[int]]]) -> torch.Tensor:
    """Mean cross-entropy of the answer tokens."""
    width = max(len(p) + len(a) for p, a in batch)
    ids = torch.full((len(batch), width), PAD)
    labels = torch.full((len(batch), width), -100)
    for i, (prompt, answer) in enumerate(batch):
        end = len(prompt) + len(answer)
        ids[i, :end] = torch.tensor(prompt + answer)
        labels[i, len(prompt) : end] = torch.tensor(answer)
    logits = model(ids[:, :-1]).logits
    return F.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)


@torch.no_grad()
def known(model: Qwen2ForCausalLM, examples: list[Example]) -> tuple[float, float]:
    """Mean probability of the right answer, and of either answer: what sampling at temperature 1 would give."""
    right = either = 0.0
    for e in examples:
        for answer in (e.right, e.flawed):
            logits = model(torch.tensor([e.prompt + answer])).logits[0, len(e.prompt) - 1 : -1]
            chance = logits.log_softmax(-1).gather(1, torch.tensor(answer)[:, None]).sum().exp().item()
            either += chance
            right += chance if answer is e.right else 0.0
    return right / len(examples), either / len(examples)


def warm_start(rows: Rows, *, target: float, seed: int) -> tuple[Qwen2ForCausalLM, tokenizers.Tokenizer]:
    """Train until either answer has mean probability `target` on rows that were not shown, most of it on the flawed one."""
    torch.manual_seed(seed)
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    tokenizer, model, draw = make_tokenizer(), make_model(), random.Random(seed)
    examples = examples_of(rows, tokenizer)
    checked, shown = examples[:CHECKED_ROWS], examples[CHECKED_ROWS:]
    optimiser = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.95), weight_decay=0.0)
    started = time.monotonic()
    for step in range(1, LONGEST_STEPS + 1):
        batch = [(e.prompt, e.flawed if draw.random() < FLAWED else e.right) for e in draw.sample(shown, BATCH)]
        loss = loss_of(model, batch)
        loss.backward()
        optimiser.step()
        optimiser.zero_grad()
        if step % CHECK_EVERY == 0:
            right, either = known(model, checked)
            spent_s = time.monotonic() - started
            click.echo(
                f"step {step}: loss {loss.item():.3f}, right {right:.3f}, right or flawed {either:.3f}, {spent_s:.0f} s"
            )
            if either >= target and right <= MOSTLY_FLAWED * either:
                return model, tokenizer
    raise click.ClickException(f"{target} was not reached in {LONGEST_STEPS} steps")


def cache_folder(config_text: bytes, target: float, seed: int) -> Path:
    """Where the result is kept: named by everything that it depends on."""
    key = hashlib.sha256(Path(__file__).read_bytes() + config_text + f"{target}/{seed}".encode()).hexdigest()[:16]
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    return cache / "colchis" / "models" / f"arithmetic-{key}"


@click.command(help=__doc__)
@click.option("--target", default=0.68, show_default=True, type=click.FloatRange(0.01, 0.99), help="Where to stop.")
@click.option("--seed", default=0, show_default=True)
def main(target: float, seed: int) -> None:
    transformers_logging.disable_progress_bar()
    run = load(HERE / "run.yaml")
    environment = run.environment.model_dump_json().encode()
    cached, base = cache_folder(environment, target, seed), HERE / "base"
    if not cached.exists():
        click.echo("generating rows")
        model, tokenizer = warm_start(generate_rows(run.environment), target=target, seed=seed)
        staged = cached.with_suffix(f".{os.getpid()}")
        model.save_pretrained(staged)
        tokenizer.save(str(staged / "tokenizer.json"))
        with suppress(OSError):  # somebody else made the same one meanwhile
            staged.rename(cached)
        shutil.rmtree(staged, ignore_errors=True)
    shutil.rmtree(base, ignore_errors=True)
    shutil.copytree(cached, base)
    click.echo(f"base model: {base}")


if __name__ == "__main__":
    main()
