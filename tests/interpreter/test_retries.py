"""When another attempt is made, and how long after the last one."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from colchis.workflows.local.calls import Frame
from colchis.workflows.local.durations import seconds
from colchis.workflows.local.nodes import Node, NodeType, Phase
from colchis.workflows.local.retries import next_attempt

START = datetime(2026, 1, 1, tzinfo=UTC)


def failed(attempts: int, code: int = 75, each_s: float = 1.0) -> Node:
    """A Retry node after so many failed attempts, each of which began when the one before had ended."""
    parent = Node("r", "r", "r", NodeType.RETRY, "t", Phase.RUNNING)
    for number in range(attempts):
        attempt = Node(f"r({number})", f"r({number})", f"r({number})", NodeType.POD, "t", Phase.FAILED)
        attempt.started_at = START + timedelta(seconds=number * each_s)
        attempt.finished_at = attempt.started_at + timedelta(seconds=each_s)
        attempt.outputs.exit_code = code
        attempt.message = f"main: Error (exit code {code})"
        parent.attempts.append(attempt)
    return parent


def decide(parent: Node, **strategy: Any) -> float | str:
    return next_attempt(parent, {"retryStrategy": strategy}, Frame({"inputs.parameters.n": "2"}, {}, 1))


@given(st.integers(1, 12), st.integers(0, 4), st.integers(1, 30))
def test_backoff_grows_by_its_factor_up_to_its_cap(attempts: int, factor: int, duration_s: int) -> None:
    """Catches a backoff that is constant, off by one attempt, or without an end."""
    backoff = {"duration": f"{duration_s}s", "factor": str(factor), "cap": "2m"}
    growth = factor ** (attempts - 1) if factor else 1
    assert decide(failed(attempts), backoff=backoff) == min(duration_s * growth, 120)


@given(st.integers(0, 5), st.integers(1, 8))
def test_limit_is_the_number_of_retries(limit: int, attempts: int) -> None:
    """Catches a limit that counts attempts instead of retries."""
    decision = decide(failed(attempts), limit=str(limit))
    assert decision == (0.0 if attempts <= limit else "No more retries left")


def test_max_duration_counts_from_the_first_attempt() -> None:
    backoff = {"duration": "2s", "maxDuration": "5s"}
    assert decide(failed(3), backoff=backoff) == 2.0
    assert decide(failed(4), backoff=backoff) == "Backoff would exceed max duration limit"
    assert decide(failed(6), backoff=backoff) == "Max duration limit exceeded"


def test_expression_sees_tags_and_the_last_attempt() -> None:
    given = "asInt(retries) < {{inputs.parameters.n}} && lastRetry.exitCode == '75'"
    assert decide(failed(1), expression=given) == 0.0
    assert decide(failed(3), expression=given) == "retryStrategy.expression evaluated to false"
    assert decide(failed(1, code=65), expression=given) == "retryStrategy.expression evaluated to false"


@pytest.mark.parametrize(
    ("text", "value"), [("15", 15.0), ("1m30s", 90.0), ("1.5h", 5400.0), ("250ms", 0.25), (7, 7.0), ("0s", 0.0)]
)
def test_durations(text: str | int, value: float) -> None:
    assert seconds(text) == value


@pytest.mark.parametrize("text", ["", "s", "1x", "1 m", "-1s", "1m 30"])
def test_bad_durations(text: str) -> None:
    with pytest.raises(ValueError, match="unable to parse"):
        seconds(text)
