"""One model turn that arrives in pieces: what an engine had drawn when a request was aborted, and the rest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from colchis.components.environments import Tokenizer
from colchis.components.records.trajectories import VersionSpan, joined
from colchis.components.rollout.client import Completion, Piece


@dataclass(slots=True)
class Partial:
    """The tokens of one sample's turn that are kept while the rest is asked for."""

    pieces: list[Piece] = field(default_factory=list)

    @property
    def token_ids(self) -> list[int]:
        return [i for piece in self.pieces for i in piece.token_ids]

    def keep(self, piece: Piece) -> None:
        self.pieces.append(piece)

    def if_full(self, max_new_tokens: int) -> Completion | None:
        """The turn's last piece when the abort came with, or after, its last possible token."""
        if len(self.token_ids) < max_new_tokens:
            return None
        last = self.pieces.pop()
        return Completion(
            token_ids=last.token_ids,
            logprobs=last.logprobs,
            versions=last.versions,
            cached_tokens=last.cached_tokens,
            finish_reason="length",
            stop_text=None,
        )

    def finish(self, last: Completion, stop: Sequence[str], tokenizer: Tokenizer) -> Completion:
        """The whole turn, as if one request had drawn it.

        An engine looks for stop texts in what it draws itself. One that lies across the border of two requests is found
        here, and the turn ends with it.
        """
        if not self.pieces:
            return last
        whole = replace(
            last,
            token_ids=tuple(self.token_ids) + last.token_ids,
            logprobs=tuple(p for piece in self.pieces for p in piece.logprobs) + last.logprobs,
            versions=_joined([*self.pieces, last]),
            cached_tokens=self.pieces[0].cached_tokens,
        )
        return _cut(whole, len(self.pieces[0].token_ids), stop, tokenizer)


def _joined(pieces: Sequence[Piece]) -> tuple[VersionSpan, ...]:
    """Spans over the joined tokens."""
    spans: list[VersionSpan] = []
    offset = 0
    for piece in pieces:
        spans += [VersionSpan(span.version, offset + span.start, offset + span.end) for span in piece.versions]
        offset += len(piece.token_ids)
    return joined(spans)


def _cut(whole: Completion, border: int, stop: Sequence[str], tokenizer: Tokenizer) -> Completion:
    """End the turn with the first token after `border`, the first one between two requests, that completes a stop text."""
    if not any(text in tokenizer.decode(whole.token_ids) for text in stop):
        return whole
    for length in range(border + 1, len(whole.token_ids) + 1):
        text = tokenizer.decode(whole.token_ids[:length])
        found = next((s for s in stop if s in text), None)
        if found is not None:
            kept = [replace(v, end=min(v.end, length)) for v in whole.versions if v.start < length]
            return replace(
                whole,
                token_ids=whole.token_ids[:length],
                logprobs=whole.logprobs[:length],
                versions=tuple(kept),
                finish_reason="stop",
                stop_text=found,
            )
    return whole
