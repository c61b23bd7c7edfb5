"""Factories for records and rows."""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import Any, BinaryIO

from cbgen.errors import RowError
from cbgen.io.records import Record, read_lines, records_from


def make_record(columns: dict[str, Any] | None = None, **changes: Any) -> Record:
    """Return the record of a row that is the first of its file, with some fields changed."""
    fields: dict[str, Any] = {
        "index": 0,
        "line": 1,
        "source": "in.jsonl",
        "id": 0,
        "columns": {"prompt": "Hello"} if columns is None else columns,
        "error": None,
    }
    return Record(**{**fields, **changes})


def read_records(
    stream: BinaryIO, source: str, *, first_index: int = 0, **options: Any
) -> Iterator[Record]:
    """Yield the records of a stream."""
    return records_from(read_lines(stream, source, **options), source, first_index=first_index)


def read_bytes(data: bytes, **options: Any) -> list[Record]:
    """Read all records of a file that holds these bytes."""
    return list(read_records(io.BytesIO(data), "in.jsonl", **options))


def error_codes(records: list[Record]) -> list[str | None]:
    """Return the code of each record's error, None where it has none."""
    return [None if record.error is None else record.error.code for record in records]


def error_of(record: Record) -> RowError:
    """Return the error of a record that has one."""
    assert record.error is not None
    return record.error
