"""What the stages that make text need to know of the base model: its tokenizer, its vocabulary, its context."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from colchis.components.environments.interface import Environment
from colchis.components.environments.tokenizer import Tokenizer
from colchis.components.errors import BadConfig, BadData, ColchisError
from colchis.components.records.rows import Row, Rows


@dataclass(frozen=True, slots=True)
class TextModel:
    """The part of a Hugging Face folder that has no weights."""

    tokenizer: Tokenizer
    vocabulary_size: int
    """Token ids from here on have no embedding: an engine dies of them."""
    context_tokens: int | None = None
    """Tokens that one sequence may have, generated ones included; None when `config.json` does not say."""

    @classmethod
    def from_folder(cls, folder: Path) -> Self:
        """From `config.json` and `tokenizer.json`. BadConfig names what is missing or no number."""
        path = folder / "config.json"
        try:
            document = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise BadConfig(
                "the model has no config.json", where=str(path), hint="name a Hugging Face folder"
            ) from None
        except (OSError, ValueError) as e:
            raise BadConfig(f"cannot be read as JSON ({e})", where=str(path)) from None
        if not isinstance(document, dict):
            raise BadConfig(f"expected an object, found {type(document).__name__}", where=str(path))

        def size(name: str) -> int:
            value = document.get(name)
            if type(value) is not int or value < 1:
                raise BadConfig(f"{name} is {value!r}, expected a positive integer", where=str(path))
            return value

        context = "max_position_embeddings"
        has_context = document.get(context) is not None
        return cls(Tokenizer.from_folder(folder), size("vocab_size"), size(context) if has_context else None)

    def outside(self, ids: Sequence[int]) -> int | None:
        """The first token id that has no embedding: SGLang ends on it. None: all have one."""
        return next((i for i in ids if not 0 <= i < self.vocabulary_size), None)

    def longest_tokens(self, limit: int) -> int:
        """The smaller one of `limit` and the context."""
        return min(limit, self.context_tokens or limit)


def check_prompts(environment: Environment, rows: Rows, model: TextModel, *, longest_tokens: int) -> None:
    """BadData unless every row's prompt becomes at least one and at most `longest_tokens` token ids, all below the
    model's vocabulary (an engine dies of a larger one), and no character is lost on the way."""
    for row in rows:
        prompt = _prompt(environment, row)
        if isinstance(prompt, str):
            lost = model.tokenizer.lost_character(prompt)
            if lost is not None:
                raise BadData(
                    f"row {row.index}: the model's tokenizer has no token for {lost!r} in prompt {prompt[:60]!r}",
                    hint="use prompts that the model can read",
                )
            ids = model.tokenizer.encode_prompt(prompt)
        else:
            ids = prompt
        if not ids:
            raise BadData(f"row {row.index}: prompt {row.prompt[:60]!r} has no tokens")
        if len(ids) > longest_tokens:
            raise BadData(
                f"row {row.index}: the prompt has {len(ids)} tokens, at most {longest_tokens} leave room for the turns",
                hint="shorten the prompts, or raise trainer.micro_batch_tokens or the model's context",
            )
        strange = model.outside(ids)
        if strange is not None:
            raise BadData(f"row {row.index}: token id {strange} is outside the vocabulary of {model.vocabulary_size}")


def _prompt(environment: Environment, row: Row) -> str | list[int]:
    try:
        prompt = environment.start(row, 0).prompt()
        return prompt if isinstance(prompt, str) else [int(i) for i in prompt]
    except ColchisError:
        raise
    except Exception as e:  # the environment's own code may raise anything, and return anything
        raise BadData(f"row {row.index}: the environment cannot start ({type(e).__name__}: {e})") from e
