"""Two runs side by side: what they were asked, what ran them, and what came out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from colchis.components.report import Status


@dataclass(frozen=True)
class Difference:
    """One line: a field, and its value in each run; None where a run has none."""

    kind: str
    """config, code or outcome."""
    field: str
    a: Any
    b: Any


def differences(a: Status, b: Status) -> list[Difference]:
    """What differs in the configuration and the code, then the outcome whether it differs or not."""
    before, after = a.record.config.flat(), b.record.config.flat()
    found = [
        Difference("config", name, before.get(name), after.get(name))
        for name in sorted(before.keys() | after.keys())
        if before.get(name) != after.get(name)
    ]
    for name in ("template", "template_digest", "code_version"):
        values = getattr(a.record, name), getattr(b.record, name)
        if values[0] != values[1]:
            found.append(Difference("code", name, *values))
    first, second = outcome(a), outcome(b)
    return found + [Difference("outcome", name, first[name], second[name]) for name in first]


def outcome(status: Status) -> dict[str, Any]:
    """The end of a run in a few numbers."""
    last = status.summaries[-1] if status.summaries else None
    evaluation = max(status.evaluations, key=lambda e: e.version, default=None)
    return {
        "version": status.serving.version if status.serving else 0,
        "weights_digest": status.serving.weights_digest if status.serving else None,
        "reward_mean": last.reward_mean if last else None,
        "accuracy": evaluation.accuracy if evaluation else None,
        "accuracy_interval": [evaluation.low, evaluation.high] if evaluation else None,
        "accuracy_version": evaluation.version if evaluation else None,
        "samples": sum(s.samples for s in status.summaries),
        "tokens": sum(s.tokens for s in status.summaries),
        "iterations_not_trained": sum(s.decision != "trainable" for s in status.summaries),
        "seconds": round(sum(sum(v for k, v in s.seconds.items() if k != "pause") for s in status.summaries), 1),
    }
