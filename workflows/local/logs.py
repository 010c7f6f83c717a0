"""The logs of a run on this machine, as its step folders hold them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from colchis.components.errors import BadData


def lines(folder: Path, stage: str | None = None) -> Iterator[tuple[str, str]]:
    """(step, line) of every step in the order in which they ended. BadData when the run left nothing here."""
    found = [path for path in folder.glob("workflows/*/*/*.log") if stage is None or _stage(path) == stage]
    if not found:
        raise BadData(
            f"no logs of {f'stage {stage!r} of ' if stage else ''}run '{folder.name}' on this machine",
            where=str(folder),
            hint="for a run on a cluster give its namespace: -n NAMESPACE",
        )
    for path in sorted(found, key=lambda p: p.stat().st_mtime_ns):
        for line in path.read_text(errors="replace").splitlines():
            yield _name(path), line


def _stage(path: Path) -> str:
    return path.parent.name.rpartition("-")[0]


def _name(path: Path) -> str:
    """The node's name as Argo would give it; of a container set with the container's."""
    try:
        name = str(json.loads((path.parent / "status.json").read_text())["name"])
    except (OSError, ValueError, KeyError):
        name = path.parent.name  # it has not ended yet
    container = path.name.split(".")[0]
    return name if container in ("stdout", "stderr") else f"{name}.{container}"
