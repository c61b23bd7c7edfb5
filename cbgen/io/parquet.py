"""Parquet files to rows, a batch at a time, each as the line of JSON that JSONL would hold.

Times become text, decimals numbers with all their digits, bytes text where they are UTF-8. What has
no JSON form is an error of its row that names the column. pyarrow is imported when it is needed.
"""

from __future__ import annotations

import decimal
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, BinaryIO

import orjson

from cbgen.errors import RowError, UsageError
from cbgen.io.decode import MAX_DEPTH

if TYPE_CHECKING:
    import pyarrow
    import pyarrow.parquet

_BATCH_ROWS = 1024
_OPTIONS = orjson.OPT_NON_STR_KEYS  # of maps


class ParquetRows:
    """The rows of one file.

    Args:
        stream: the file, which can be sought in; closed by the caller.
        source: its name for messages.

    Raises:
        UsageError: pyarrow is not installed, the file is not parquet, or a column has a type
            without a JSON form.
    """

    def __init__(self, stream: BinaryIO, source: str) -> None:
        arrow = load_arrow()
        self._source = source
        try:
            self._file = arrow.parquet.ParquetFile(stream, pre_buffer=False)
            self._schema = self._file.schema_arrow
        except (arrow.ArrowException, OSError, ValueError) as error:
            raise UsageError(f"{source}: is not a whole parquet file: {error}") from error
        # Times with a zone are moved to UTC first, so that their text has one form.
        self._in_utc = _schema_with(self._schema, _to_utc, source)
        self._as_text = _schema_with(self._in_utc, _to_text, source)

    @property
    def num_rows(self) -> int:
        """Rows that the file holds."""
        return int(self._file.metadata.num_rows)

    def lines(self) -> Iterator[bytes | RowError]:
        """Yield each row as a line of JSON, or what is wrong with it.

        Raises:
            UsageError: the file is damaged.
        """
        arrow = load_arrow()
        count = 0
        try:
            for batch in self._file.iter_batches(batch_size=_BATCH_ROWS, use_threads=False):
                for line in self._lines_of(batch):
                    yield line
                    count += 1
        except (arrow.ArrowException, OSError, ValueError) as error:
            raise UsageError(
                f"{self._source}: cannot be read beyond row {count}: {error}"
            ) from error
        if count != self.num_rows:  # a damaged page header can end a column early, in silence
            raise UsageError(
                f"{self._source}: the file is damaged: it says that it has {self.num_rows} rows, "
                f"and {count} were found"
            )

    def _lines_of(self, batch: pyarrow.RecordBatch) -> Iterator[bytes | RowError]:
        batch = batch.cast(self._in_utc).cast(self._as_text)
        errors: dict[int, RowError] = {}
        columns = [
            _values(column, name, errors)
            for name, column in zip(batch.schema.names, batch.columns, strict=True)
        ]
        for number in range(batch.num_rows):
            if number in errors:
                yield errors[number]
                continue
            values = (column[number] for column in columns)
            yield _line_of(dict(zip(batch.schema.names, values, strict=True)))


def load_arrow() -> Any:  # noqa: ANN401  a module that is not always there
    """Return the module pyarrow, with `parquet` in it.

    Raises:
        UsageError: it is not installed.
    """
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise UsageError(
            ".parquet files need the package pyarrow: pip install 'cbgen[parquet]'"
        ) from error
    return pyarrow


def _values(column: pyarrow.Array, name: str, errors: dict[int, RowError]) -> list[Any]:
    """Return the values of a column; None, and an entry in `errors`, where Python has none."""
    try:
        return list(column.to_pylist(maps_as_pydicts="strict"))
    except (ValueError, KeyError, OverflowError):
        return [_value(column, name, number, errors) for number in range(len(column))]


def _value(column: pyarrow.Array, name: str, number: int, errors: dict[int, RowError]) -> object:
    try:
        return column[number].as_py(maps_as_pydicts="strict")
    except (ValueError, KeyError, OverflowError) as error:
        errors[number] = _unreadable(name, error)
        return None


def _line_of(row: dict[str, Any]) -> bytes | RowError:
    try:
        return orjson.dumps(row, default=_json_form, option=_OPTIONS)
    except TypeError:
        for name, value in row.items():
            try:
                orjson.dumps(value, default=_json_form, option=_OPTIONS)
            except TypeError as error:
                return _unreadable(name, error.__cause__ or error)
        raise


def _json_form(value: object) -> object:
    if isinstance(value, decimal.Decimal):
        return orjson.Fragment(format(value, "f"))
    if isinstance(value, bytes):
        return value.decode()
    raise TypeError(f"a value of type {type(value).__name__} has no JSON form")


def _unreadable(name: str, error: BaseException) -> RowError:
    message = f"column {name!r} holds a value that has no JSON form: {error}"
    return RowError("unreadable_value", message)


def _schema_with(
    schema: pyarrow.Schema,
    change: Callable[[pyarrow.DataType], pyarrow.DataType | None],
    source: str,
) -> pyarrow.Schema:
    """Return a schema with its innermost types changed."""
    arrow = load_arrow()
    fields = []
    for field in schema:
        try:
            fields.append(field.with_type(_with_leaves(field.type, change)))
        except TypeError as error:
            raise UsageError(
                f"{source}: column {field.name!r} is of type {field.type}: {error}; leave it out, "
                "or store it as a number or text"
            ) from None
    return arrow.schema(fields)


def _with_leaves(
    kind: pyarrow.DataType,
    change: Callable[[pyarrow.DataType], pyarrow.DataType | None],
    depth: int = 1,
) -> pyarrow.DataType:
    arrow = load_arrow()
    types = arrow.types
    if depth > MAX_DEPTH:
        raise TypeError(f"it is nested deeper than {MAX_DEPTH} levels")

    def inner(field: pyarrow.Field) -> pyarrow.Field:
        return field.with_type(_with_leaves(field.type, change, depth + 1))

    if types.is_struct(kind):
        return arrow.struct([inner(field) for field in kind])
    if types.is_map(kind):
        return arrow.map_(inner(kind.key_field), inner(kind.item_field))
    if types.is_fixed_size_list(kind):
        return arrow.list_(inner(kind.value_field), kind.list_size)
    if types.is_large_list(kind):
        return arrow.large_list(inner(kind.value_field))
    if types.is_list(kind):
        return arrow.list_(inner(kind.value_field))
    if types.is_dictionary(kind):
        return _with_leaves(kind.value_type, change, depth)
    return change(kind) or kind


def _to_utc(kind: pyarrow.DataType) -> pyarrow.DataType | None:
    arrow = load_arrow()
    if arrow.types.is_duration(kind) or arrow.types.is_interval(kind):
        raise TypeError("a length of time has no JSON form")
    if arrow.types.is_timestamp(kind) and kind.tz is not None:
        return arrow.timestamp(kind.unit, "UTC")
    return None


def _to_text(kind: pyarrow.DataType) -> pyarrow.DataType | None:
    arrow = load_arrow()
    return arrow.string() if arrow.types.is_timestamp(kind) else None
