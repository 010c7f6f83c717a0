"""Records as Parquet bytes: an explicit Arrow schema, a format number, and errors that name field and row."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from colchis.components.errors import BadData

FORMAT_KEY = "colchis.format"
"""Schema metadata: `<record>/<number>`, e.g. `trajectories/1`."""


def fields(record: object, schema: pa.Schema) -> dict[str, Any]:
    """A dataclass as a row: like `asdict`, without a copy of every token."""
    return {name: getattr(record, name) for name in schema.names}


def write(
    rows: Sequence[Mapping[str, Any]], schema: pa.Schema, *, record: str, metadata: Mapping[str, str] | None = None
) -> bytes:
    """One Parquet file, zstd, with page checksums. `record` is `<name>/<format number>`."""
    columns = [pa.array([row[field.name] for row in rows], type=field.type) for field in schema]
    return write_table(pa.Table.from_arrays(columns, schema=schema), record=record, metadata=metadata)


def write_table(table: pa.Table, *, record: str, metadata: Mapping[str, str] | None = None) -> bytes:
    """As `write`, of a table that is there already."""
    labels = {FORMAT_KEY: record, **(metadata or {})}
    sink = io.BytesIO()
    pq.write_table(table.replace_schema_metadata(labels), sink, compression="zstd", write_page_checksum=True)
    return sink.getvalue()


def read(data: bytes, schema: pa.Schema, *, record: str, source: str) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """(rows, metadata), as `read_table`."""
    table, labels = read_table(data, schema, record=record, source=source)
    return table.to_pylist(), labels


def read_table(data: bytes, schema: pa.Schema, *, record: str, source: str) -> tuple[pa.Table, dict[str, str]]:
    """(table, metadata). BadData when `data` is not Parquet, corrupt, of another record or format, or when a column is
    missing, unknown, of another type, or null where the schema allows none. `source` is named in every message."""
    try:
        table = pq.ParquetFile(io.BytesIO(data), page_checksum_verification=True).read()
    except (pa.ArrowException, OSError, ValueError) as e:
        raise BadData(f"not a readable Parquet file ({_line(e)})", where=source) from None
    labels = {k.decode(): v.decode() for k, v in (table.schema.metadata or {}).items() if not k.startswith(b"ARROW:")}
    found = labels.get(FORMAT_KEY)
    if found != record:
        raise BadData(
            f"expected a table of format '{record}', found '{found or 'none'}'",
            where=source,
            hint="read it with the version of Colchis that wrote it",
        )
    for field in schema:
        if field.name not in table.schema.names:
            raise BadData(f"column '{field.name}' is missing", where=source)
        column = table.column(field.name)
        if column.type != field.type:
            raise BadData(f"column '{field.name}': expected {field.type}, found {column.type}", where=source)
        if not field.nullable and column.null_count:
            row = column.to_pylist().index(None)
            raise BadData(f"column '{field.name}', row {row}: is null", where=source)
    unknown = sorted(set(table.schema.names) - set(schema.names))
    if unknown:
        raise BadData(f"column '{unknown[0]}' is not part of '{record}'", where=source)
    return table.select(schema.names).replace_schema_metadata(), labels


def _line(error: BaseException) -> str:
    """The message of a library's error in one short line."""
    return " ".join(str(error).split())[:200]
