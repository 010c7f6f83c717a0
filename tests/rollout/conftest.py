"""A character tokenizer, a small table of rows, and one call of `rollout_groups` with what tests vary."""

from __future__ import annotations

import asyncio
import string

import pytest
import tokenizers
from tokenizers import decoders, models

from colchis.components.config import parse
from colchis.components.environments import SingleTurn, TextModel, Tokenizer
from colchis.components.records.rows import Row, Rows, Split
from colchis.components.rollout import PromptGroup, Wanted, rollout_groups

ALPHABET = string.digits + string.ascii_lowercase + "+-*= ?!.,:()[]\n"


def character_tokenizer() -> tokenizers.Tokenizer:
    """<pad> 0, <eos> 1, then one token per character."""
    vocabulary = {"<pad>": 0, "<eos>": 1} | {c: i + 2 for i, c in enumerate(ALPHABET)}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.add_special_tokens(["<pad>", "<eos>"])
    tokenizer.decoder = decoders.Fuse()
    return tokenizer


@pytest.fixture
def tokenizer() -> Tokenizer:
    return Tokenizer(character_tokenizer())


VERSION_3 = Wanted.exactly(3)


class Echo:
    """Single-turn environment."""

    version = "1"

    def prompts(self):
        return []

    def start(self, row, seed):
        return SingleTurn(row)


ROWS = Rows(tuple(Row(i, f"{i}+{i}=", str(2 * i), Split.HELDOUT if i == 9 else Split.TRAIN) for i in range(10)))


@pytest.fixture
def rows() -> Rows:
    return ROWS


@pytest.fixture
def generate(tokenizer):
    """generate(engines, ...) -> (groups in order of arrival, stats)."""

    def run(
        engines,
        *,
        groups=3,
        environment=None,
        sampling=None,
        on_group=None,
        iteration=3,
        wanted=VERSION_3,
        context_tokens=None,
        **rollout,
    ):
        config = parse(
            {
                "model": {"source": "file:x"},
                "environment": {"kind": "own", "name": "x"},
                "rollout": {"prompts": 4, "group_size": 4, "max_new_tokens": 6, "request_timeout_s": 5.0} | rollout,
                "trainer": {"micro_batch_tokens": 64},
                "loop": {"seed": 11},
            }
        )
        arrived = []
        stats = asyncio.run(
            rollout_groups(
                config,
                run="team/r1",
                iteration=iteration,
                wanted=wanted,
                groups=[PromptGroup(g, ROWS[g + 1]) for g in range(groups)],
                engines=engines,
                environment=environment or Echo(),
                model=TextModel(tokenizer, tokenizer.vocabulary_size, context_tokens),
                on_group=on_group or arrived.append,
                sampling=sampling,
            )
        )
        return arrived, stats

    return run
