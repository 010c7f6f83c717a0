"""Rows: the prompts of an environment, generated once per run and stored by digest, training and held-out."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from colchis.components.errors import BadData
from colchis.components.records import tables

RECORD = "rows/1"


class Split(StrEnum):
    TRAIN = "train"
    HELDOUT = "heldout"


@dataclass(frozen=True, slots=True)
class Row:
    """One prompt. `index` is its position in the table: what trajectories call `prompt_index`."""

    index: int
    prompt: str
    answer: str
    split: Split = Split.TRAIN
    metadata: dict[str, Any] = field(default_factory=dict)
    """JSON-able; what the environment needs besides prompt and answer."""


SCHEMA = pa.schema(
    [
        pa.field("index", pa.int64(), nullable=False),
        pa.field("prompt", pa.string(), nullable=False),
        pa.field("answer", pa.string(), nullable=False),
        pa.field("split", pa.string(), nullable=False),
        pa.field("metadata", pa.string(), nullable=False),
    ]
)


class Rows:
    """The table. BadData when positions, prompts or splits contradict each other.

    A row is made when it is asked for: tables are long, and an iteration needs few of them.
    """

    def __init__(self, rows: Iterable[Row]) -> None:
        records = [(r.index, r.prompt, r.answer, r.split.value, _canonical(r.metadata)) for r in rows]
        columns = [[record[i] for record in records] for i in range(len(SCHEMA))]
        self._table = pa.table([pa.array(c, f.type) for c, f in zip(columns, SCHEMA, strict=True)], schema=SCHEMA)
        self._check("rows")

    @classmethod
    def from_parquet(cls, data: bytes, *, source: str = "rows") -> Rows:
        """Inverse of `to_parquet`."""
        rows = cls.__new__(cls)
        rows._table = tables.read_table(data, SCHEMA, record=RECORD, source=source)[0]
        rows._check(source)
        return rows

    def to_parquet(self) -> bytes:
        return tables.write_table(self._table, record=RECORD)

    def __len__(self) -> int:
        return int(self._table.num_rows)

    def __getitem__(self, index: int) -> Row:
        record = {name: self._table.column(name)[index].as_py() for name in SCHEMA.names}
        try:
            metadata = json.loads(record["metadata"])
        except ValueError as error:
            raise BadData(f"row {index}: metadata is not JSON: {error}") from None
        return Row(record["index"], record["prompt"], record["answer"], Split(record["split"]), metadata)

    def __iter__(self) -> Iterator[Row]:
        return (self[i] for i in range(len(self)))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Rows) and self._table.equals(other._table)

    __hash__ = None  # type: ignore[assignment]

    def indices(self, split: Split) -> list[int]:
        """Positions of the rows of one split, ascending."""
        positions: list[int] = pc.indices_nonzero(pc.equal(self._table.column("split"), split.value)).to_pylist()
        return positions

    def _check(self, source: str) -> None:
        def bad(position: int, what: str) -> BadData:
            return BadData(f"row {position}: {what}", where=source)

        index = self._table.column("index").to_numpy()
        if (moved := (index != np.arange(len(index))).nonzero()[0]).size:
            raise bad(moved[0], f"index is {index[moved[0]]}")
        prompts = self._table.column("prompt")
        if (empty := pc.indices_nonzero(pc.equal(prompts, ""))) and len(empty):
            raise bad(empty[0].as_py(), "the prompt is empty")
        if pc.count_distinct(prompts).as_py() < len(prompts):
            seen: set[str] = set()
            for position, prompt in enumerate(prompts.to_pylist()):
                if prompt in seen:
                    raise bad(position, f"prompt {prompt[:60]!r} occurs twice")
                seen.add(prompt)
        found = set(pc.unique(self._table.column("split")).to_pylist())
        if strange := sorted(found - set(Split)):
            raise BadData(f"column 'split': {strange[0]!r} is none of {', '.join(Split)}", where=source)
        if missing := [split for split in Split if split not in found]:
            raise BadData(f"no row of split '{missing[0]}'", where=source)


def _canonical(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
