"""Prompts and answers from a JSONL or Parquet file. Every defect of the file is one line: file, row, column."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from colchis.components.config import DatasetConfig
from colchis.components.environments.interface import Prompt, SingleTurn
from colchis.components.errors import BadConfig, BadData
from colchis.components.records.rows import Row


class Dataset:
    """A single-turn environment. Other columns of the file become the rows' metadata."""

    version = "1"

    def __init__(self, config: DatasetConfig, path: Path | None) -> None:
        self.config = config
        self.path = path

    def start(self, row: Row, seed: int) -> SingleTurn:
        return SingleTurn(row)

    def prompts(self) -> Iterator[Prompt]:
        c = self.config
        path = _file(self.path)
        seen: dict[str, tuple[str, str]] = {}
        for place, record in _records(path, c):
            prompt = _text(record, c.prompt_column, path, place)
            answer = _text(record, c.answer_column, path, place)
            first, known = seen.setdefault(prompt, (place, answer))
            if known != answer:
                raise BadData(
                    f"{path.name}, {place}, column '{c.answer_column}': {answer[:40]!r}, but {first} has the same "
                    f"prompt with the answer {known[:40]!r}",
                    hint="keep one of them",
                )
            rest = {k: v for k, v in record.items() if k not in (c.prompt_column, c.answer_column)}
            yield Prompt(c.prompt_template.replace("{prompt}", prompt), answer, rest)
        if not seen:
            raise BadData(f"{path.name}: has no rows")


def _file(path: Path | None) -> Path:
    if path is None:
        raise BadConfig("environment.source: the data file was not given to this stage")
    if path.is_dir():
        files = sorted(p for p in path.iterdir() if p.is_file())
        if len(files) != 1:
            raise BadConfig(f"environment.source: {path} holds {len(files)} files, expected one .jsonl or .parquet")
        return files[0]
    if not path.is_file():
        raise BadConfig(f"environment.source: {path}: no such file")
    return path


def _records(path: Path, config: DatasetConfig) -> Iterator[tuple[str, dict[str, Any]]]:
    """(place, record) of every row; the place is what an editor or a query tool would call it."""
    match path.suffix:
        case ".jsonl":
            return _json_lines(path)
        case ".parquet":
            return _parquet(path, (config.prompt_column, config.answer_column))
    raise BadConfig(f"environment.source: {path.name}: expected a .jsonl or .parquet file")


def _json_lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    try:
        with path.open("rb") as file:
            for number, raw in enumerate(file, start=1):
                place = f"line {number}"
                try:
                    line = raw.decode("utf-8-sig" if number == 1 else "utf-8")
                except UnicodeDecodeError as e:
                    raise BadData(f"{path.name}, {place}: not UTF-8 (byte {e.start}: {e.reason})") from None
                if line.strip():
                    yield place, _object(line, path, place)
    except OSError as e:
        raise BadData(f"{path.name}: cannot be read ({e.strerror})") from None


def _object(line: str, path: Path, place: str) -> dict[str, Any]:
    try:
        value = json.loads(line, object_pairs_hook=_unique_keys, parse_constant=_no_constant)
    except (ValueError, RecursionError) as e:
        raise BadData(f"{path.name}, {place}: not JSON ({' '.join(str(e).split())})") from None
    if not isinstance(value, dict):
        raise BadData(f"{path.name}, {place}: expected an object, found {type(value).__name__}")
    return value


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        names = [k for k, _ in pairs]
        raise ValueError(f"key '{next(n for n in names if names.count(n) > 1)}' occurs twice")
    return result


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _parquet(path: Path, columns: tuple[str, str]) -> Iterator[tuple[str, dict[str, Any]]]:
    try:
        table = pq.ParquetFile(io.BytesIO(path.read_bytes()), page_checksum_verification=True).read()
    except (pa.ArrowException, OSError, ValueError) as e:
        raise BadData(f"{path.name}: not a readable Parquet file ({' '.join(str(e).split())[:200]})") from None
    repeated = [n for n in table.column_names if table.column_names.count(n) > 1]
    if repeated:
        raise BadData(f"{path.name}, column '{repeated[0]}': occurs twice")
    for name in columns:
        if name in table.column_names and not _is_text(table.column(name).type):
            raise BadData(f"{path.name}, column '{name}': expected text, found {table.column(name).type}")
    number = 0
    try:
        for batch in table.to_batches(max_chunksize=10_000):
            for record in batch.to_pylist():
                number += 1
                yield f"row {number}", record
    except (pa.ArrowException, UnicodeDecodeError, ValueError, OverflowError) as e:
        raise BadData(f"{path.name}, row {number + 1} or later: {' '.join(str(e).split())[:200]}") from None


def _is_text(kind: pa.DataType) -> bool:
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    # a column of nulls has no type of its own: its rows are refused one by one, as null
    return any(kind == text for text in (pa.string(), pa.large_string(), pa.string_view(), pa.null()))


def _text(record: dict[str, Any], column: str, path: Path, place: str) -> str:
    where = f"{path.name}, {place}, column '{column}'"
    if column not in record:
        raise BadData(f"{where}: missing, found {', '.join(map(repr, sorted(record))) or 'no column'}")
    value = record[column]
    if value is None:
        raise BadData(f"{where}: is null")
    if not isinstance(value, str):
        raise BadData(f"{where}: expected text, found {type(value).__name__} {str(value)[:40]}", hint="quote it")
    if not value.strip():
        raise BadData(f"{where}: is empty")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise BadData(f"{where}: holds a lone surrogate, which is no Unicode text") from None
    return value
