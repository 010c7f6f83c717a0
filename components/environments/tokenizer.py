"""Text to token ids and back with a model's own tokenizer.json, without torch and transformers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import tokenizers

from colchis.components.errors import BadConfig


class Tokenizer:
    """A prompt begins a sequence and gets the tokenizer's special tokens; a message continues one and gets none."""

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._readable: dict[str, bool] = {}
        # truncation or padding saved in the file would cut prompts or fill them up without a word
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()

    @classmethod
    def from_folder(cls, folder: Path) -> Tokenizer:
        """From `folder/tokenizer.json`. BadConfig when there is none or it cannot be read."""
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise BadConfig(
                "the model has no tokenizer.json", where=str(path), hint="save it with a fast tokenizer of transformers"
            )
        try:
            return cls(tokenizers.Tokenizer.from_file(str(path)))
        except Exception as e:  # the library raises bare Exception
            raise BadConfig(f"not a tokenizer ({' '.join(str(e).split())[:200]})", where=str(path)) from None

    @property
    def vocabulary_size(self) -> int:
        """Number of token ids, special ones included."""
        return self._tokenizer.get_vocab_size(with_added_tokens=True)

    def encode_prompt(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=True).ids)

    def encode_message(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text without special tokens."""
        return self._tokenizer.decode(list(token_ids), skip_special_tokens=True)

    def lost_character(self, text: str) -> str | None:
        """The first character that no token stands for: a tokenizer without an unknown token drops it. Asked character
        by character, as the offsets of a text with dropped ones are shifted."""
        for character in text:
            if character not in self._readable:
                self._readable[character] = character.isspace() or bool(self.encode_message(character))
            if not self._readable[character]:
                return character
        return None
