"""The tables of docs/security.md."""

from __future__ import annotations

from tests.manifests.conftest import REPOSITORY


def table(*header: str) -> list[list[str]]:
    """Cells of the rows of the table with this header."""
    lines = (REPOSITORY / "docs/security.md").read_text(encoding="utf-8").splitlines()
    start = lines.index(f"| {' | '.join(header)} |") + 2
    rows = []
    for line in lines[start:]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in line.strip("|").split("|")])
    return rows


def words(cell: str) -> list[str]:
    """The comma-separated parts of a cell."""
    return [word.strip() for word in cell.split(",")]
