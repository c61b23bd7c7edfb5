r"""JSONL bytes to records, lazily.

Lines end at `\n` and nowhere else. Every line that is not blank becomes one Record, a bad one too:
no content makes the reader raise. Knows nothing of files, which are opened in input_files.py, and
nothing of prompts; what a record's columns mean is in dialects.py.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, BinaryIO, Literal

from cbgen.errors import RowError, UsageError
from cbgen.io.json_values import decode_row, shallow_columns
from cbgen.values import show

MAX_LINE_BYTES = 256 * 2**20
"""Longest line that is read into memory; a longer one becomes an error record."""

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_WHITE_SPACE = b" \t\r\n"
_BUFFER_BYTES = 2**20


@dataclass(frozen=True, slots=True)
class Record:
    """One line of the input that is not blank.

    Exactly one of `columns` and `error` is set, except that a line with a bad or repeated id, or
    one that is nested too deeply, has both; the columns of the latter are those of
    `shallow_columns`.
    """

    index: int
    """Counts the records from 0, bad ones too."""
    line: int
    """Counts the lines of the source from 1, blank ones too."""
    source: str
    """Name of the file, for messages."""
    id: str | int | None
    """The row's own id, else its index; None if the line could not be read or the id is bad."""
    columns: dict[str, Any] | None
    error: RowError | None
    dialect: Literal["openai", "vllm"] | None = None
    """How it is answered, where it is a line of a batch file; its id is then the `custom_id`."""
    digest: bytes = field(default=b"", compare=False)
    """8 bytes that tell its content from another's, white space around it aside."""
    num_bytes: int = field(default=0, compare=False)
    """Size of its line; what is made of it takes a few times as much memory."""

    @property
    def place(self) -> str:
        """Where the record stands, as `source:line`."""
        return f"{self.source}:{self.line}"


def read_lines(
    stream: BinaryIO, source: str, max_line_bytes: int = MAX_LINE_BYTES
) -> Iterator[bytes | RowError]:
    """Yield each line, or the error of one that is too long, holding one line at a time.

    Args:
        stream: bytes, read with `readline`.
        source: name of the stream for messages.
        max_line_bytes: a longer line is not kept.

    Raises:
        UsageError: the stream itself fails, as a broken disk or a torn .gz file does; every line
            before that was given.
    """
    longest = max_line_bytes + 1  # with its line end
    number = 0
    try:
        line = stream.readline(longest).removeprefix(_BYTE_ORDER_MARK)
        while line:
            if len(line) >= longest and not line.endswith(b"\n"):
                _skip_line(stream)
                message = f"the line is longer than {max_line_bytes} bytes"
                yield RowError("line_too_long", message)
            else:
                yield line
            number += 1
            line = stream.readline(longest)
    except OSError as error:
        reached = f" beyond line {number}" if number else ""
        raise UsageError(f"{source}: cannot be read{reached}: {error.strerror or error}") from error


def records_from(
    lines: Iterable[bytes | RowError], source: str, *, first_index: int = 0
) -> Iterator[Record]:
    """Yield one Record for each line that is not blank, or that could not be read."""
    index = first_index
    for number, line in enumerate(lines, 1):
        if isinstance(line, RowError) or line.strip(_WHITE_SPACE):
            yield _read_record(index, number, source, line)
            index += 1


def record_of(row: Mapping[str, Any], *, index: int, source: str) -> Record:
    """Return the record of a row that is a mapping already, as if a line held it as JSON.

    Its line number is the index + 1. A row without a JSON form becomes an error record.
    """
    line: bytes | RowError
    try:
        line = json.dumps(row if isinstance(row, dict) else dict(row)).encode()
    except (TypeError, ValueError, RecursionError) as error:
        line = RowError("not_json", f"the row has no JSON form: {error}")
    return _read_record(index, index + 1, source, line)


def _skip_line(stream: BinaryIO) -> None:
    while (part := stream.readline(_BUFFER_BYTES)) and not part.endswith(b"\n"):
        pass


def _read_record(index: int, number: int, source: str, line: bytes | RowError) -> Record:
    columns: dict[str, Any] | None = None
    row_id: str | int | None = None
    error: RowError | None = None
    try:
        if isinstance(line, RowError):
            raise line
        columns = decode_row(line)
    except RowError as failure:
        error = failure
        if isinstance(line, bytes) and error.code == "nested_too_deeply":
            columns = shallow_columns(line)
    if columns is not None:
        given = columns.get("id")
        if isinstance(given, str | int) and not isinstance(given, bool):
            row_id = given
        elif given is None:
            row_id = index
        else:
            message = f"id must be a string or an integer, got {show(given)}"
            error = RowError("invalid_id", message)
    if error is not None:
        error = RowError(error.code, f"{source}:{number}: {error.message}")
    content = line.code.encode() if isinstance(line, RowError) else line.strip(_WHITE_SPACE)
    return Record(
        index,
        number,
        source,
        row_id,
        columns,
        error,
        digest=hashlib.blake2b(content, digest_size=8).digest(),
        num_bytes=0 if columns is None else len(content),
    )
