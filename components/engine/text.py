"""Token ids to text and back, when the model directory holds a `tokenizer.json`."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer

from colchis.components.engine.sample import Sample
from colchis.components.errors import BadData


class Text:
    """A fast tokenizer, or none: then text in is refused and text out is empty, as with --skip-tokenizer-init."""

    def __init__(self) -> None:
        self.tokenizer: Tokenizer | None = None

    def load(self, folder: Path) -> Tokenizer | None:
        """Reads the directory's tokenizer; None when it has no tokenizer.json."""
        path = folder / "tokenizer.json"
        if not path.exists():
            return None
        try:
            return Tokenizer.from_file(str(path))
        except Exception as error:  # tokenizers raises bare Exception
            raise BadData(f"tokenizer.json is not readable: {error}", where=str(path)) from error

    def encode(self, text: str) -> list[int]:
        if self.tokenizer is None:
            raise BadData("the model came without tokenizer.json: send input_ids instead of text")
        ids: list[int] = self.tokenizer.encode(text).ids
        return ids

    def decode(self, ids: list[int], *, skip_special: bool = True) -> str:
        if self.tokenizer is None or not ids:
            return ""
        text: str = self.tokenizer.decode(ids, skip_special_tokens=skip_special)
        return text

    def stop_string(self, sample: Sample, ids: list[int]) -> str | None:
        """The first stop string that the end of the output completes."""
        stops = sample.params.stop_strings
        # A stop string may begin inside one token and end inside another: as many tokens as it has characters, and some.
        tail = ids[-(max(map(len, stops)) + 8) :]
        text = self.decode(tail, skip_special=sample.params.skip_special_tokens)
        return next((stop for stop in stops if stop in text), None)

    def output(self, sample: Sample, ids: list[int]) -> str:
        """The answer's text: without the stop token or string that ended it, unless `no_stop_trim`."""
        matched = (sample.finish_reason or {}).get("matched")
        trim = not sample.params.no_stop_trim
        if trim and isinstance(matched, int) and ids:
            ids = ids[:-1]
        text = self.decode(ids, skip_special=sample.params.skip_special_tokens)
        if trim and isinstance(matched, str) and matched in text:
            text = text[: text.rindex(matched)]
        return text
