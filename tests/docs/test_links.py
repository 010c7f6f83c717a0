"""What the pages point to is there."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    {*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("tests/**/*.md"), *ROOT.glob("examples/**/*.md")}
)
LINK = re.compile(r"\]\(([^)#\s]*)(?:#([^)]*))?\)")
TEST = re.compile(r"`(tests/[\w/]+\.py)(?:::(\w+))?`")


def prose(page: Path) -> str:
    """Without blocks of code, in which brackets mean something else."""
    return re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)


def anchors(page: Path) -> set[str]:
    """Names of the headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", prose(page), flags=re.M)
    return {re.sub(r"[^\w\- ]", "", h.replace("`", "")).strip().lower().replace(" ", "-") for h in headings}


def broken(page: Path) -> Iterator[str]:
    for target, anchor in LINK.findall(prose(page)):
        if "://" in target:
            continue
        file = (page.parent / target).resolve() if target else page
        if not file.exists():
            yield target
        elif anchor and file.suffix == ".md" and anchor not in anchors(file):
            yield f"{target}#{anchor}"
    for file_name, function in TEST.findall(page.read_text(encoding="utf-8")):
        file = ROOT / file_name
        if not file.exists() or (function and f"def {function}(" not in file.read_text(encoding="utf-8")):
            yield f"{file_name}::{function}"


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    """Fault: a page or a test that moved, and a reader who finds nothing."""
    assert list(broken(page)) == []
