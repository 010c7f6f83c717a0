"""Whether a failed attempt is followed by another one: `retryStrategy`, in the order in which a controller decides."""

from __future__ import annotations

from typing import Any

from colchis.workflows.local.calls import Frame, Template
from colchis.workflows.local.durations import seconds
from colchis.workflows.local.expressions import evaluate
from colchis.workflows.local.nodes import Node, Phase
from colchis.workflows.local.substitution import TAG, substitute

_RETRIED = {
    "Always": (Phase.FAILED, Phase.ERROR),
    "OnFailure": (Phase.FAILED,),
    "OnError": (Phase.ERROR,),
}


def attempt_values(parent: Node) -> dict[str, str]:
    """The tags `retries` and `lastRetry.*` inside the next attempt."""
    last = parent.attempts[-1] if parent.attempts else None
    return {
        "retries": str(len(parent.attempts)),
        "lastRetry.exitCode": "0" if last is None else _exit_code(last, "0"),
        "lastRetry.status": "" if last is None else str(last.phase),
        "lastRetry.duration": "0" if last is None else f"{last.seconds:g}",
        "lastRetry.message": "" if last is None else last.message,
    }


def next_attempt(parent: Node, template: Template, frame: Frame) -> float | str:
    """After a failed last attempt: seconds until the next one, or the message with which the Retry node ends."""
    last = parent.attempts[-1]
    expression = template["retryStrategy"].get("expression", "")
    strategy: dict[str, Any] = substitute(
        {key: value for key, value in template["retryStrategy"].items() if key != "expression"}, frame.scope
    )
    backoff = _backoff(strategy.get("backoff"), parent)
    if isinstance(backoff, str):
        return backoff
    policy = strategy.get("retryPolicy") or ("Always" if expression else "OnFailure")
    if last.phase not in _RETRIED[policy]:
        return last.message
    if "limit" in strategy and len(parent.attempts) > int(strategy["limit"]):
        return "No more retries left"
    if expression:
        variables = {
            "retries": str(len(parent.attempts) - 1),
            "lastRetry.exitCode": _exit_code(last, "-1"),
            "lastRetry.status": str(last.phase),
            "lastRetry.duration": f"{last.seconds:g}",
            "lastRetry.message": last.message,
        }
        text = TAG.sub(lambda tag: substitute(tag.group(), frame.scope), expression)
        if evaluate(text, variables) is not True:
            return "retryStrategy.expression evaluated to false"
    return backoff


def _exit_code(node: Node, absent: str) -> str:
    return absent if node.outputs.exit_code is None else str(node.outputs.exit_code)


def _backoff(backoff: dict[str, Any] | None, parent: Node) -> float | str:
    """duration * factor^(attempts - 1), at most `cap`; a message when that would pass `maxDuration`."""
    if backoff is None:
        return 0.0
    if not backoff.get("duration"):
        raise ValueError("no base duration specified for retryStrategy")
    wait_s = seconds(backoff["duration"])
    factor = int(backoff.get("factor") or 0)
    if factor > 0:
        wait_s *= factor ** (len(parent.attempts) - 1)
    if backoff.get("cap"):
        wait_s = min(wait_s, seconds(backoff["cap"]))
    last = parent.attempts[-1]
    if backoff.get("maxDuration") and last.finished_at is not None:
        elapsed_s = (last.finished_at - parent.attempts[0].started_at).total_seconds()
        if elapsed_s > seconds(backoff["maxDuration"]):
            return "Max duration limit exceeded"
        if elapsed_s + wait_s > seconds(backoff["maxDuration"]):
            return "Backoff would exceed max duration limit"
    return wait_s
