"""Make the base model of the example: a small Qwen2 with one token per character, warm-started by a short supervised
training that stops by accuracy, so that reinforcement learning has something to find and something to gain.

The rows are those of run.yaml's environment; held-out prompts are never shown. The result is cached by what it is made
from, and put into `base/`.

Example: python examples/arithmetic/make_base.py --target 0.25
"""

from __future__ import annotations

import hashlib
import os
import random
import shutil
import time
from pathlib import Path

import click
import tokenizers
import torch
import torch.nn.functional as F
from transformers import Qwen2Config, Qwen2ForCausalLM

from colchis.components.config import load
from colchis.components.environments import generate_rows
from colchis.components.records.rows import Rows, Split

HERE = Path(__file__).parent
PAD, EOS = 0, 1
CHARACTERS = [chr(code) for code in range(32, 127)]
BATCH, CHECK_EVERY, CHECKED_ROWS, LONGEST_STEPS = 128, 25, 300, 4000


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


def examples_of(rows: Rows, tokenizer: tokenizers.Tokenizer) -> list[tuple[list[int], list[int]]]:
    """(prompt ids, answer ids with <eos>) of the training rows."""
    train = [rows[i] for i in rows.indices(Split.TRAIN)]
    return [(tokenizer.encode(r.prompt).ids, [*tokenizer.encode(r.answer).ids, EOS]) for r in train]


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
def accuracy(model: Qwen2ForCausalLM, examples: list[tuple[list[int], list[int]]]) -> float:
    """Share of examples whose answer is what greedy decoding would say: every answer token is the most likely one."""
    right = 0
    for prompt, answer in examples:
        logits = model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
        right += int((logits.argmax(-1) == torch.tensor(answer)).all())
    return right / len(examples)


def warm_start(rows: Rows, *, target: float, seed: int) -> tuple[Qwen2ForCausalLM, tokenizers.Tokenizer]:
    """Train until greedy accuracy on unseen training rows reaches `target`."""
    torch.manual_seed(seed)
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    tokenizer, model, draw = make_tokenizer(), make_model(), random.Random(seed)
    examples = examples_of(rows, tokenizer)
    checked, shown = examples[:CHECKED_ROWS], examples[CHECKED_ROWS:]
    optimiser = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.95), weight_decay=0.0)
    started = time.monotonic()
    for step in range(1, LONGEST_STEPS + 1):
        loss = loss_of(model, draw.sample(shown, BATCH))
        loss.backward()
        optimiser.step()
        optimiser.zero_grad()
        if step % CHECK_EVERY == 0:
            reached = accuracy(model, checked)
            click.echo(
                f"step {step}: loss {loss.item():.3f}, accuracy {reached:.3f}, {time.monotonic() - started:.0f} s"
            )
            if reached >= target:
                return model, tokenizer
    raise click.ClickException(f"accuracy {target} was not reached in {LONGEST_STEPS} steps")


def cache_folder(config_text: bytes, target: float, seed: int) -> Path:
    """Where the result is kept: named by everything that it depends on."""
    key = hashlib.sha256(Path(__file__).read_bytes() + config_text + f"{target}/{seed}".encode()).hexdigest()[:16]
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    return cache / "colchis" / "models" / f"arithmetic-{key}"


@click.command(help=__doc__)
@click.option(
    "--target", default=0.25, show_default=True, type=click.FloatRange(0.01, 0.99), help="Greedy accuracy to stop at."
)
@click.option("--seed", default=0, show_default=True)
def main(target: float, seed: int) -> None:
    run = load(HERE / "run.yaml")
    environment = run.environment.model_dump_json().encode()
    cached, base = cache_folder(environment, target, seed), HERE / "base"
    if not cached.exists():
        click.echo("generating rows")
        model, tokenizer = warm_start(generate_rows(run.environment), target=target, seed=seed)
        staged = cached.with_suffix(f".{os.getpid()}")
        model.save_pretrained(staged)
        tokenizer.save(str(staged / "tokenizer.json"))
        staged.rename(cached)
    shutil.rmtree(base, ignore_errors=True)
    shutil.copytree(cached, base)
    click.echo(f"base model: {base}")


if __name__ == "__main__":
    main()
