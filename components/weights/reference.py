"""docs/agent.md, made from the messages of the protocol."""

from __future__ import annotations

from colchis.components.config.reference import field_table
from colchis.components.weights.protocol import (
    ENGINE_HEADER,
    STATUS_OF,
    Activate,
    Activated,
    EngineState,
    FetchedObject,
    Message,
    Prepare,
    Prepared,
    Probe,
    Probed,
    Refusal,
    Status,
    Verified,
    Verify,
)

ROUTES: tuple[tuple[str, str, type[Message] | None, type[Message] | None, str], ...] = (
    ("GET", "/status", None, Status, "What the agent knows of its engine."),
    ("POST", "/prepare", Prepare, Prepared, "Boundary 3: fetch and verify a version while the engine serves."),
    ("POST", "/verify", Verify, Verified, "Boundary 2: read the staged copy again."),
    ("POST", "/activate", Activate, Activated, "Boundary 4: pause, load, continue, prove, name."),
    ("POST", "/probe", Probe, Probed, "Boundary 5: log-probabilities of given tokens."),
)
OPEN_ROUTES = (
    (
        "/ready",
        "200 when the engine provably serves what its run declares, else 503 and why, such as an activation under way; for"
        " readiness probes.",
    ),
    ("/live", "200 while the agent lives, whatever its engine does; for liveness probes."),
    ("/metrics", "Prometheus: calls by outcome, bytes fetched, seconds of pauses and loads, readiness, version."),
)
HEAD = f"""\
# The agent's HTTP interface

Made from `components/weights/protocol.py` by `colchis reference`; do not edit. [reload.md](reload.md) says who calls what when.

Bodies are JSON; unknown fields are refused on both sides. Calls carry `Authorization: Bearer TOKEN` (Secret `colchis-store`, key
`agentToken`); answers name the engine in the header `{ENGINE_HEADER}`. With the token, `GET /openapi.json` gives the same
as an OpenAPI document, for tools. Every call may be repeated.
"""


def markdown() -> str:
    """The reference as Markdown."""
    lines = [HEAD, "| route | body | answer | what it does |", "|---|---|---|---|"]
    for method, path, body, answer, what in ROUTES:
        names = ["" if m is None else f"[{m.__name__}](#{m.__name__.lower()})" for m in (body, answer)]
        lines.append(f"| `{method} {path}` | {names[0]} | {names[1]} | {what} |")
    lines += ["", "Without a token:", "", "| route | answer |", "|---|---|"]
    lines += [f"| `GET {path}` | {what} |" for path, what in OPEN_ROUTES]
    codes = ", ".join(f"{kind.__name__} {status}" for kind, status in STATUS_OF.items())
    lines += [
        "",
        f"Anything that is not 200 has a [Refusal](#refusal) as its body: {codes}; 401 without the token.",
        "",
    ]
    lines += [f"States of an engine: {', '.join(f'`{state}`' for state in EngineState)}.", ""]
    messages: list[type[Message]] = [m for _, _, body, answer, _ in ROUTES for m in (body, answer) if m is not None]
    messages += [FetchedObject, Refusal]
    for message in messages:
        lines += [f"## {message.__name__}", "", *field_table(message), ""]
    return "\n".join(lines).rstrip() + "\n"
