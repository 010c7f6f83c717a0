"""The policy reads `12*7+3=`. It may answer at once, or first write `[12*7]` and read what the calculator says."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator

from colchis.components.environments import ModelTurn, Prompt, Reply
from colchis.components.records.rows import Row
from colchis.components.records.trajectories import SegmentKind

CALL = re.compile(r"\[(\d{1,6})([+*-])(\d{1,6})\]")


class Calculator:
    """Constructed as `Calculator(seed=environment.seed, **environment.options)`."""

    version = "1"

    def __init__(self, *, seed: int, prompts: int = 200, largest: int = 20, call_price: float = 0.1) -> None:
        self.seed, self.number, self.largest, self.call_price = seed, prompts, largest, call_price

    def prompts(self) -> Iterator[Prompt]:
        """Colchis drops repeated prompts and sets `environment.heldout_rows` of the rest aside."""
        draw = random.Random(self.seed)
        for _ in range(self.number):
            a, b, c = (draw.randint(1, self.largest) for _ in range(3))
            yield Prompt(f"{a}*{b}+{c}=", answer=str(a * b + c), metadata={"largest": max(a, b, c)})

    def start(self, row: Row, seed: int) -> CalculatorEpisode:
        return CalculatorEpisode(row, self.call_price)


class CalculatorEpisode:
    """Goes on as long as the policy calls the calculator (and `rollout.max_turns` allows)."""

    def __init__(self, row: Row, call_price: float) -> None:
        self.row, self.call_price = row, call_price
        self.calls = 0
        self.answer: str | None = None

    def prompt(self) -> str:
        return self.row.prompt

    def reply(self, turn: ModelTurn) -> Reply | None:
        call = CALL.search(turn.text)
        if call is None:
            self.answer = turn.text.strip()
            return None
        self.calls += 1
        return Reply(f"{_calculate(*call.groups())}\n", SegmentKind.TOOL)

    def score(self) -> float:
        """For `grader.face: environment`. An episode that ran out of turns has no answer: that is worth nothing."""
        return float(self.answer == self.row.answer) - self.call_price * self.calls


def _calculate(left: str, operator: str, right: str) -> int:
    a, b = int(left), int(right)
    return a + b if operator == "+" else a - b if operator == "-" else a * b
