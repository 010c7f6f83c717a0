"""What the pages have in common: a document with its style, cards, tables. No script, no image, nothing from elsewhere."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path

STYLE = Path(__file__).with_name("report.css").read_text(encoding="utf-8")


def document(title: str, body: str) -> str:
    """A page of its own; `body` is HTML, `title` is text."""
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{escape(title)} - Colchis</title><style>{STYLE}</style></head>
<body>
<h1>{escape(title)}</h1>
{body}
</body></html>
"""


def card_row(cards: Iterable[tuple[str, str]]) -> str:
    """(value, label) pairs as cards."""
    drawn = "".join(
        f'<div class="card"><b>{escape(value)}</b><span>{escape(label)}</span></div>' for value, label in cards
    )
    return f'<div class="cards">{drawn}</div>'


def table(names: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A table of texts."""
    head = "".join(f"<th>{escape(name)}</th>" for name in names)
    body = "".join("<tr>" + "".join(f"<td>{escape(str(v))}</td>" for v in row) + "</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
