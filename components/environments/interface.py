"""What an environment is: prompts, and an episode per sample that answers the model turn by turn.

An episode only speaks in text. Token ids of the model's turns are appended to the sequence as they were drawn, and only
the environment's own new text is tokenised: a history that is rendered and tokenised again would train other tokens
than those that were sampled.

An environment of your own is a class with `version`, `prompts` and `start`, named by an entry point in the group
`colchis.environments`. It is constructed as `YourEnvironment(seed=..., **options)` in the stages that need it. With the
grader face `environment`, the grader plays the recorded model turns again (in a process of its own, with a time limit)
and asks the episode for its score; so an episode must depend on its row, its seed and the model's turns alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from colchis.components.records.rows import Row, Split
from colchis.components.records.trajectories import SegmentKind


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt as an environment offers it; becomes a `Row` once duplicates are gone and the split is drawn."""

    text: str
    answer: str = ""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """JSON-able; kept with the row."""
    split: Split | None = None
    """Set on all prompts of an environment that brings its own held-out set; None on all: Colchis draws it."""


@dataclass(frozen=True, slots=True)
class ModelTurn:
    """What the policy said."""

    text: str
    """Decoded without special tokens, cut before the stop text that ended it."""
    token_ids: tuple[int, ...]
    finish_reason: str
    """`stop` or `length`: a turn cut at `rollout.max_new_tokens` may hold half a tool call."""


@dataclass(frozen=True, slots=True)
class Reply:
    """What the policy reads next, as raw text: markers of a chat template are the environment's to write."""

    text: str
    kind: SegmentKind = SegmentKind.ENVIRONMENT
    """`environment`, or `tool` for what a tool returned."""


class Episode(Protocol):
    """One sample's conversation. Methods may block: each runs in a thread of its own, under a time limit. Native code that
    keeps the interpreter's lock past it stops all the others, so that it ends the rollout instead of its episode."""

    def prompt(self) -> str | Sequence[int]:
        """The first text (or token ids) of the sequence; the same for all samples of a row."""

    def reply(self, turn: ModelTurn) -> Reply | None:
        """Answer one model turn; None ends the episode."""

    def score(self) -> float | None:
        """The environment's own verdict after the last turn; None when it has none (the episode was cut off)."""


@runtime_checkable
class Environment(Protocol):
    """Prompts and episodes."""

    @property
    def version(self) -> str:
        """Recorded with every verdict of the face `environment`; change it with the behaviour."""

    def prompts(self) -> Iterable[Prompt]:
        """All prompts, in an order that depends on the options and the seed alone."""

    def start(self, row: Row, seed: int) -> Episode:
        """A fresh episode. `seed` differs between the samples of a row and is recorded with the trajectory."""


@dataclass(slots=True)
class SingleTurn:
    """An episode that ends after the first model turn and leaves the verdict to a grader."""

    row: Row
    turn: ModelTurn | None = None

    def prompt(self) -> str:
        return self.row.prompt

    def reply(self, turn: ModelTurn) -> Reply | None:
        self.turn = turn
        return None

    def score(self) -> float | None:
        return None
