"""Rows: the prompts of an environment, generated once per run and stored by digest, training and held-out."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import pyarrow as pa

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


@dataclass(frozen=True, slots=True)
class Rows:
    """The table. BadData when positions, prompts or splits contradict each other."""

    rows: tuple[Row, ...]

    def __post_init__(self) -> None:
        prompts: set[str] = set()
        for position, row in enumerate(self.rows):
            if row.index != position:
                raise BadData(f"row {position}: index is {row.index}")
            if not row.prompt:
                raise BadData(f"row {position}: the prompt is empty")
            if row.prompt in prompts:
                raise BadData(f"row {position}: prompt {row.prompt[:60]!r} occurs twice")
            prompts.add(row.prompt)
        for split in Split:
            if not any(row.split is split for row in self.rows):
                raise BadData(f"no row of split '{split}'")

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Row:
        return self.rows[index]

    def indices(self, split: Split) -> list[int]:
        """Positions of the rows of one split, ascending."""
        return [row.index for row in self.rows if row.split is split]

    def digest(self) -> str:
        """sha256 over the canonical JSON of all rows; independent of the Parquet library that wrote them."""
        body = hashlib.sha256()
        for row in self.rows:
            body.update(_canonical([row.index, row.prompt, row.answer, row.split, row.metadata]).encode() + b"\n")
        return body.hexdigest()


SCHEMA = pa.schema(
    [
        pa.field("index", pa.int64(), nullable=False),
        pa.field("prompt", pa.string(), nullable=False),
        pa.field("answer", pa.string(), nullable=False),
        pa.field("split", pa.string(), nullable=False),
        pa.field("metadata", pa.string(), nullable=False),
    ]
)


def _canonical(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def to_parquet(rows: Rows) -> bytes:
    records = [
        {
            "index": row.index,
            "prompt": row.prompt,
            "answer": row.answer,
            "split": row.split,
            "metadata": _canonical(row.metadata),
        }
        for row in rows.rows
    ]
    return tables.write(records, SCHEMA, record=RECORD, metadata={"colchis.digest": rows.digest()})


def from_parquet(data: bytes, *, source: str = "rows") -> Rows:
    """Inverse of `to_parquet`. BadData also when the digest in the file is not that of its rows."""
    records, labels = tables.read(data, SCHEMA, record=RECORD, source=source)
    result = []
    for number, record in enumerate(records):
        try:
            metadata = json.loads(record["metadata"])
            split = Split(record["split"])
        except ValueError as e:
            raise BadData(f"row {number}: {e}", where=source) from None
        result.append(Row(record["index"], record["prompt"], record["answer"], split, metadata))
    rows = Rows(tuple(result))
    if labels.get("colchis.digest") != rows.digest():
        raise BadData("the rows do not have the digest that the file names", where=source, hint="generate them again")
    return rows
