"""Rows to a parquet file and back.

cbgen's own fields have fixed types; a carried column has the narrowest type that holds all its
values, else it is JSON text, which its field's metadata says. All types must be known before the
first row can be written, so rows are gone through twice. pyarrow is imported when it is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, BinaryIO

import orjson

from cbgen.errors import UsageError
from cbgen.io.column_types import ColumnType, ListType, ObjectType, common_type, type_of
from cbgen.io.decode import decode_row
from cbgen.io.encode import encode_row, encode_value
from cbgen.io.output_file import OutputFile
from cbgen.io.parquet import load_arrow

ROW_GROUP_BYTES = 8 * 2**20
"""Rows, as JSON, that are written together and so are in memory together."""

_READ_ROWS = 1024
_BUFFER_BYTES = 2**20
_OWN = "own"  # the type of cbgen's own fields while types are collected
_IS_JSON = {b"cbgen": b"json"}
_FIRST = ("id", "index")
_LAST = ("text", "finish_reason", "stop_reason", "usage", "logprobs", "error")
_OPTIONAL = ("choices", "token_ids", "prompt_token_ids", "reasoning", "valid")
_CHOICE_FIELDS = ("text", "finish_reason", "stop_reason", "logprobs", "token_ids")


def write_parquet(file: OutputFile, lines: Callable[[], Iterator[bytes]]) -> None:
    """Write rows as a parquet file.

    Args:
        file: takes the bytes.
        lines: gives the rows as lines of JSON; called twice.

    Raises:
        OutputError: the file cannot be written.
    """
    arrow = load_arrow()
    types = _collect_types(lines())
    schema = arrow.schema([_field(name, kind) for name, kind in types.items()])
    sink = _Sink(file)
    with arrow.parquet.ParquetWriter(sink, schema) as writer:
        for group in _groups(lines()):
            rows = [_storable(decode_row(line), types) for line in group]
            writer.write_batch(arrow.RecordBatch.from_pylist(rows, schema))
    sink.end()


def read_parquet(path: str, stream: BinaryIO | None = None) -> Iterator[bytes]:
    """Yield the rows of a file that `write_parquet` wrote, as lines of JSON.

    Args:
        path: the file.
        stream: the file where it is open already.

    Raises:
        UsageError: it cannot be read.
    """
    arrow = load_arrow()
    try:
        with arrow.parquet.ParquetFile(stream or path) as file:
            as_json = [field.name for field in file.schema_arrow if field.metadata == _IS_JSON]
            for batch in file.iter_batches(batch_size=_READ_ROWS, use_threads=False):
                for row in batch.to_pylist():
                    for name in as_json:
                        if row[name] is not None:
                            row[name] = orjson.Fragment(row[name])
                    yield encode_row(row)
    except (arrow.ArrowException, OSError) as error:
        raise UsageError(f"{path}: is not a whole parquet file: {error}") from error


class _Sink:
    """The file object that pyarrow writes to."""

    closed = False

    def __init__(self, file: OutputFile) -> None:
        self._file = file
        self._buffer = bytearray()

    def write(self, data: Any) -> int:  # noqa: ANN401  any buffer
        self._buffer += data
        if len(self._buffer) >= _BUFFER_BYTES:
            self.end()
        return len(data)

    def end(self) -> None:
        """Write what is buffered."""
        self._file.append(bytes(self._buffer))
        self._buffer.clear()

    def flush(self) -> None:
        """Do nothing: pyarrow asks for it after each small piece."""

    def close(self) -> None:
        """Do nothing: the file's owner closes it."""


def _collect_types(lines: Iterable[bytes]) -> dict[str, ColumnType]:
    """Return the type of every column, in the order of the columns."""
    own = (*_FIRST[1:], *_LAST, *_OPTIONAL)
    types: dict[str, ColumnType] = dict.fromkeys(own[: -len(_OPTIONAL)], _OWN)
    is_empty = True
    for line in lines:
        row = decode_row(line)
        if is_empty and "index" not in row:
            types = {}  # lines of a batch file have other fields
        is_empty = False
        for name, value in row.items():
            kind = _OWN if name in own and "index" in row else type_of(value)
            types[name] = common_type(types.get(name, "null"), kind)
    if types.get("id") not in ("int", "long"):
        types["id"] = "text"
    carried = [name for name in types if name not in (*_FIRST, *_LAST, *_OPTIONAL)]
    order = (*_FIRST, *carried, *_LAST[:-1], *_OPTIONAL, _LAST[-1])
    return {name: types[name] for name in order if name in types}


def _field(name: str, kind: ColumnType) -> Any:  # noqa: ANN401
    arrow = load_arrow()
    if kind == "json":
        return arrow.field(name, arrow.string(), metadata=_IS_JSON)
    return arrow.field(name, _own_type(name) if kind == _OWN else _arrow_type(kind))


def _arrow_type(kind: ColumnType) -> Any:  # noqa: ANN401
    arrow = load_arrow()
    if isinstance(kind, ListType):
        return arrow.list_(_arrow_type(kind.item))
    if isinstance(kind, ObjectType):
        return arrow.struct([(name, _arrow_type(held)) for name, held in kind.fields])
    if kind in ("int", "long"):
        return arrow.int64()
    return {"bool": arrow.bool_(), "float": arrow.float64()}.get(kind, arrow.string())


def _own_type(name: str) -> Any:  # noqa: ANN401
    arrow = load_arrow()
    text, number, real = arrow.string(), arrow.int64(), arrow.float64()
    if name == "usage":
        return arrow.struct([("prompt_tokens", number), ("completion_tokens", number)])
    if name == "error":
        return arrow.struct([("type", text), ("code", text), ("message", text)])
    if name == "logprobs":
        top = arrow.struct([("token", text), ("token_id", number), ("logprob", real)])
        return arrow.struct(
            [
                ("tokens", arrow.list_(text)),
                ("token_ids", arrow.list_(number)),
                ("logprobs", arrow.list_(real)),
                ("top", arrow.list_(arrow.list_(top))),
            ]
        )
    if name in ("token_ids", "prompt_token_ids"):
        return arrow.list_(number)
    if name == "choices":
        return arrow.list_(arrow.struct([(held, _own_type(held)) for held in _CHOICE_FIELDS]))
    return {"index": number, "valid": arrow.bool_()}.get(name, text)


def _storable(row: dict[str, Any], types: dict[str, ColumnType]) -> dict[str, Any]:
    """Return a row with everything as text that is stored as text."""
    for name, value in row.items():
        if value is None:
            continue
        if types[name] == "json":
            row[name] = encode_value(value)
        elif name in ("id", "stop_reason") and types[name] in ("text", _OWN):
            row[name] = str(value)
        elif name == "choices" and types[name] == _OWN:
            row[name] = [_storable(choice, dict.fromkeys(choice, _OWN)) for choice in value]
    return row


def _groups(lines: Iterable[bytes]) -> Iterator[list[bytes]]:
    group: list[bytes] = []
    size = 0
    for line in lines:
        group.append(line)
        size += len(line)
        if size >= ROW_GROUP_BYTES:
            yield group
            group, size = [], 0
    if group:
        yield group
