"""Parquet files: rows of inputs as lines of JSON, and output rows to a file and back.

Reading: times become text, decimals numbers with all their digits, bytes text where they are UTF-8.
What has no JSON form is an error of its row that names the column.

Writing: cbgen's own fields have fixed types; a carried column has the narrowest type that holds all
its values exactly. Where they have no common type, or are objects that differ in keys, they are
stored as JSON text, which the field's metadata says and reading undoes. All types must be known
before the first row can be written, so rows are gone through twice. pyarrow is imported when it is
needed.
"""

from __future__ import annotations

import decimal
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, BinaryIO, ClassVar, Literal, Self

import orjson

from cbgen.errors import RowError, UsageError
from cbgen.io.json_values import MAX_DEPTH, ExactFloat, decode_row, encode_value
from cbgen.io.output.output_file import (
    NOT_OPEN,
    OutputFile,
    in_chunks,
    is_stream_output,
    refuse_path,
    replacement_of,
    sync_folder,
)
from cbgen.io.rows import ALWAYS_PRESENT, OWN_COLUMNS, ColumnType

if TYPE_CHECKING:
    import pyarrow
    import pyarrow.parquet

ROW_GROUP_BYTES = 8 * 2**20
"""Rows, as JSON, that are written together and so are in memory together."""

_BATCH_ROWS = 1024
_OPTIONS = orjson.OPT_NON_STR_KEYS | orjson.OPT_APPEND_NEWLINE  # keys of maps
_IS_JSON = {b"cbgen": b"json"}
_NO_PYTHON_VALUE = (ValueError, KeyError, OverflowError)
_EXACT_IN_FLOAT = 2**53
_LARGEST = 2**63
_MAX_LEVELS = 8


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
        self._in_utc = _readable_schema(self._schema, source, times_as="UTC")
        self._as_text = _readable_schema(self._in_utc, source, times_as="text")
        self._json_columns = [field.name for field in self._schema if field.metadata == _IS_JSON]

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

    def output_lines(self) -> Iterator[bytes]:
        """Yield the rows of a file that `write_parquet` wrote.

        Raises:
            UsageError: the file is damaged, or something else wrote it.
        """
        for line in self.lines():
            if isinstance(line, RowError):
                raise UsageError(f"{self._source}: {line.message}")
            yield line

    def _lines_of(self, batch: pyarrow.RecordBatch) -> Iterator[bytes | RowError]:
        batch = batch.cast(self._in_utc).cast(self._as_text)
        rows: Iterable[dict[str, Any] | RowError]
        try:
            rows = batch.to_pylist(maps_as_pydicts="strict")
        except _NO_PYTHON_VALUE:
            rows = (_row_of(batch, number) for number in range(batch.num_rows))
        for row in rows:
            if isinstance(row, RowError):
                yield row
                continue
            for name in self._json_columns:
                if row[name] is not None:
                    row[name] = orjson.Fragment(row[name])
            yield _line_of(row)


def _row_of(batch: pyarrow.RecordBatch, number: int) -> dict[str, Any] | RowError:
    """Return a row of a batch, of which some values may have no form in Python."""
    row = {}
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        try:
            row[name] = column[number].as_py(maps_as_pydicts="strict")
        except _NO_PYTHON_VALUE as error:
            return _unreadable(name, error)
    return row


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


def _refuse_repeated_names(names: Sequence[str], what: str) -> None:
    for place, name in enumerate(names):
        if name in names[:place]:
            raise TypeError(f"two of its {what} are called {name!r}")


def _readable_schema(
    schema: pyarrow.Schema, source: str, *, times_as: Literal["UTC", "text"]
) -> pyarrow.Schema:
    """Return a schema whose types have a JSON form, but for times in UTC.

    Raises:
        UsageError: a column has none.
    """
    arrow = load_arrow()
    try:
        _refuse_repeated_names(schema.names, "columns")
    except TypeError as error:
        raise UsageError(f"{source}: {error}; rename one of them") from None
    fields = []
    for field in schema:
        try:
            fields.append(field.with_type(_readable_type(field.type, times_as)))
        except TypeError as error:
            raise UsageError(
                f"{source}: column {field.name!r} is of type {field.type}: {error}; leave it out, "
                "or store it as a number or text"
            ) from None
    return arrow.schema(fields)


def _readable_type(kind: pyarrow.DataType, times_as: str, depth: int = 1) -> pyarrow.DataType:
    arrow = load_arrow()
    types = arrow.types
    if depth > MAX_DEPTH:
        raise TypeError(f"it is nested deeper than {MAX_DEPTH} levels")

    def inner(field: pyarrow.Field) -> pyarrow.Field:
        return field.with_type(_readable_type(field.type, times_as, depth + 1))

    if types.is_struct(kind):
        _refuse_repeated_names([field.name for field in kind], "fields")
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
        return _readable_type(kind.value_type, times_as, depth)
    if types.is_duration(kind) or types.is_interval(kind):
        raise TypeError("a length of time has no JSON form")
    if types.is_timestamp(kind) and times_as == "text":
        return arrow.string()
    if types.is_timestamp(kind) and kind.tz is not None:
        return arrow.timestamp(kind.unit, "UTC")
    return kind


class TableFile(OutputFile):
    """An output that is written as a whole, beside its name first, when all its rows are there.

    Until `write_all` it is not open: it does not exist, or is an earlier run's.
    """

    is_table: ClassVar[bool] = True

    @classmethod
    def open(cls, path: str, overwrite: bool) -> Self:
        """Choose the file that is going to be written.

        Raises:
            UsageError: it exists and `overwrite` is false, is no regular file, or pyarrow is
                missing.
        """
        load_arrow()
        refuse_path(path, overwrite=overwrite)
        if is_stream_output(path):
            raise UsageError(f"{path}: parquet needs a file; use another suffix for a pipe")
        return cls(path, NOT_OPEN, created=False)

    def cut(self, size: int = 0) -> None:
        """Delete the file, unless it stays as it is."""
        if not size:
            self.remove()
            sync_folder(self.path)

    def write_all(self, lines: Callable[[], Iterator[bytes]]) -> None:
        """Write the file; until then, nothing has its name."""
        with replacement_of(self.path) as file:
            write_parquet(file, lines)
        file.close()


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
    with arrow.parquet.ParquetWriter(_Sink(file), schema) as writer:
        for group in in_chunks(lines(), ROW_GROUP_BYTES):
            rows = [_storable(decode_row(line), types) for line in group]
            writer.write_batch(arrow.RecordBatch.from_pylist(rows, schema))


def read_parquet(path: str) -> Iterator[bytes]:
    """Yield the rows of an output; errors are those of `ParquetRows`."""
    with open(path, "rb") as stream:
        yield from ParquetRows(stream, path).output_lines()


class _Sink:
    """The file object that pyarrow writes to."""

    closed = False

    def __init__(self, file: OutputFile) -> None:
        self._file = file

    def write(self, data: Any) -> int:  # noqa: ANN401  any buffer
        self._file.append(bytes(data))
        return len(data)

    def flush(self) -> None:
        """Do nothing: nothing is buffered."""

    def close(self) -> None:
        """Do nothing: the file's owner closes it."""


def _collect_types(lines: Iterable[bytes]) -> dict[str, ColumnType]:
    """Return the type of every column, in the order of the columns."""
    types: dict[str, ColumnType] = {name: OWN_COLUMNS[name] for name in ALWAYS_PRESENT}
    is_empty = True
    for line in lines:
        row = decode_row(line)
        is_own = "index" in row
        if is_empty and not is_own:
            types = {}  # lines of a batch file have other fields
        is_empty = False
        for name, value in row.items():
            kind = OWN_COLUMNS[name] if is_own and name in OWN_COLUMNS else type_of(value)
            types[name] = common_type(types.get(name, "null"), kind)
    if types.get("id") not in ("int", "long"):
        types["id"] = "text"
    carried = [name for name in types if name != "id" and name not in OWN_COLUMNS]
    first, *rest = OWN_COLUMNS
    return {name: types[name] for name in ("id", first, *carried, *rest) if name in types}


def type_of(value: object, levels: int = _MAX_LEVELS) -> ColumnType:
    """Return the narrowest type that holds a value exactly; one nested deeper is JSON text."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "bool"
    if isinstance(value, int):
        if abs(value) <= _EXACT_IN_FLOAT:
            return "int"
        return "long" if -_LARGEST <= value < _LARGEST else "json"
    if isinstance(value, float):
        return "json" if isinstance(value, ExactFloat) else "float"
    if isinstance(value, str):
        return "text"
    if levels == 0:
        return "json"
    if isinstance(value, list):
        item: ColumnType = "null"
        for element in value:
            item = common_type(item, type_of(element, levels - 1))
        return "json" if item == "json" else [item]
    assert isinstance(value, Mapping), "JSON has no other values"
    return _object_type({key: type_of(held, levels - 1) for key, held in value.items()})


def common_type(first: ColumnType, second: ColumnType) -> ColumnType:
    """Return the narrowest type that holds values of both types."""
    if first == second or second == "null":
        return first
    if first == "null":
        return second
    if isinstance(first, str) and isinstance(second, str):
        both = {first, second}
        if both == {"int", "long"}:
            return "long"
        return "float" if both == {"int", "float"} else "json"
    if isinstance(first, list) and isinstance(second, list):
        item = common_type(first[0], second[0])
        return "json" if item == "json" else [item]
    if isinstance(first, dict) and isinstance(second, dict) and first.keys() == second.keys():
        return _object_type({key: common_type(kind, second[key]) for key, kind in first.items()})
    return "json"


def _object_type(fields: dict[str, ColumnType]) -> ColumnType:
    return "json" if not fields or "json" in fields.values() else fields


def _field(name: str, kind: ColumnType) -> Any:  # noqa: ANN401
    arrow = load_arrow()
    if kind == "json":
        return arrow.field(name, arrow.string(), metadata=_IS_JSON)
    return arrow.field(name, _arrow_type(kind))


def _arrow_type(kind: ColumnType) -> Any:  # noqa: ANN401
    arrow = load_arrow()
    if isinstance(kind, list):
        return arrow.list_(_arrow_type(kind[0]))
    if isinstance(kind, dict):
        return arrow.struct([(name, _arrow_type(held)) for name, held in kind.items()])
    if kind in ("int", "long"):
        return arrow.int64()
    return {"bool": arrow.bool_(), "float": arrow.float64()}.get(kind, arrow.string())


def _storable(row: dict[str, Any], types: Mapping[str, ColumnType]) -> dict[str, Any]:
    """Return a row with everything as text that is stored as text."""
    for name, value in row.items():
        kind = types.get(name)
        if value is None:
            continue
        if kind == "json":
            row[name] = encode_value(value)
        elif kind == "text" and not isinstance(value, str):
            row[name] = str(value)
        elif name == "choices" and kind == OWN_COLUMNS[name]:
            row[name] = [_storable(choice, OWN_COLUMNS) for choice in value]
    return row
