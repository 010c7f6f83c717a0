"""The record of one boundary of a reload at one engine: what was proven, and by which numbers."""

from __future__ import annotations

from enum import IntEnum
from typing import Any, Literal

from pydantic import Field

from colchis.components.records.run import now
from colchis.components.store import Record

Proof = dict[str, Any]


class Boundary(IntEnum):
    """The five places where new weights can stop being the trainer's weights without anybody noticing."""

    STORE = 1
    """Trainer weights complete in the store."""
    BUFFER = 2
    """The agent's staging buffer, read under its one-writer lock: digest before = after = commit; or the sender's copy."""
    TRANSFER = 3
    """Bytes moved from the store to the engine's disk, or to a sender's."""
    LOAD = 4
    """The engine's own tensors are the commit's."""
    CACHE = 5
    """No key or value computed under the old weights is left."""

    @property
    def label(self) -> str:
        """As messages name it, e.g. `boundary 4 (load)`."""
        return f"boundary {self.value} ({self.name.lower()})"

    @classmethod
    def named_by(cls, message: str) -> Boundary | None:
        """The boundary whose label a message begins with."""
        return next((boundary for boundary in cls if message.startswith(boundary.label)), None)


class BoundaryRecord(Record):
    """What one engine proved, or the store, or a sender."""

    format: Literal[1] = 1
    boundary: Boundary
    name: str
    engine: str | None
    """Id of the engine; None for boundary 1, which is the store's, and for the copy of a sender."""
    run: str
    version: int
    ok: bool
    started_at: str = Field(default_factory=now)
    seconds: float = Field(ge=0)
    proof: Proof = Field(default_factory=dict)
    """The numbers; which ones depends on the boundary (docs/architecture.md)."""

    @classmethod
    def passed(
        cls,
        boundary: Boundary,
        run: str,
        version: int,
        *,
        engine: str | None,
        started_at: str,
        seconds: float,
        proof: Proof,
    ) -> BoundaryRecord:
        """What was proven by an engine, or by the store or a sender (None)."""
        return cls(
            boundary=boundary,
            name=boundary.name.lower(),
            engine=engine,
            run=run,
            version=version,
            ok=True,
            started_at=started_at,
            seconds=seconds,
            proof=proof,
        )

    @property
    def at(self) -> str:
        """Who proved it, for people."""
        return self.engine or ("store" if self.boundary is Boundary.STORE else "sender")

    def headline(self) -> dict[str, Any]:
        """The scalars of the proof, short enough for a log line; what the record itself says is left out."""
        line: dict[str, Any] = {"seconds": round(self.seconds, 4)}
        for name, value in self.proof.items():
            if name in type(self).model_fields:
                continue
            if isinstance(value, float):
                line[name] = round(value, 6)
            elif isinstance(value, str):
                line[name] = value[:16]
            elif isinstance(value, bool | int):
                line[name] = value
        return line


class Passage(Record):
    """`weights/vN/reloads/<id>/BOUNDARY.json`: one boundary, passed by all engines."""

    format: Literal[1] = 1
    reload: str
    records: list[BoundaryRecord]
