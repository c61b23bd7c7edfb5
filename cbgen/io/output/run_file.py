"""OUT.run: what made OUT, so that a later run can tell whether it may go on with it.

A header line of JSON (recipe, inputs, shard), then 8 bytes for each record of the input in reading
order, its digest, then a mark where the input has ended. A record's digest is on its way to disk
before its row is. The file's lock keeps a second run off OUT. Knows nothing of rows.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import orjson

from cbgen.errors import UsageError
from cbgen.io.json_values import encode_row
from cbgen.io.output.output_file import (
    NEW,
    OutputFile,
    in_chunks,
    lock_output,
    replace_file,
    run_path,
    sync_folder,
)

FORMAT = 1
_DIGEST_BYTES = 8
_UNKNOWN = bytes(_DIGEST_BYTES)  # what a power failure may leave in place of digests
_END = b"\xff" * _DIGEST_BYTES
_STAND_IN = b"\x01" * _DIGEST_BYTES
_CHUNK_DIGESTS = 8192
_MAX_HEADER_BYTES = 2**24


@dataclass(frozen=True, slots=True, kw_only=True)
class RunHeader:
    """What a run is made of, but for the content of its input."""

    recipe_digest: str
    recipe: dict[str, Any] = field(default_factory=dict)
    """What the recipe says, section by section."""
    inputs: list[str] = field(default_factory=list)
    shard: str = "0/1"
    input_format: str = "auto"
    """How lines of batch files are told from rows."""
    cbgen: str = ""
    """Version that wrote it."""
    format: int = FORMAT


class RunFile:
    """The open and locked OUT.run of this run. Made by `open`.

    Until `begin` nothing in it changes. One thread may call `note` and `note_end` while another
    calls the rest.

    Attributes:
        path: its name.
        previous: what the run before was made of; None if there was none, or it never began.
        num_known: how many records the run before had read.
        has_ended: whether these were all that there are.
    """

    def __init__(self, path: str, file: OutputFile, header: RunHeader) -> None:
        self.path = path
        self._header = header
        self._file = file
        self._noted = bytearray()
        self._noting = threading.Lock()
        self._has_begun = False
        self._draft: OutputFile | None = None
        self.previous, self._start = _read_header(file.descriptor)
        self.num_known, self.has_ended = 0, False
        if self.previous is not None:
            self.num_known, self.has_ended = _count_known(file.descriptor, self._start)

    @classmethod
    def open(cls, output_path: str, header: RunHeader) -> RunFile:
        """Open and lock the file that belongs to an output.

        Raises:
            UsageError: another run is writing that output, or the file cannot be opened.
        """
        path = run_path(output_path)
        while True:
            file = OutputFile.open(path, overwrite=True)
            with contextlib.ExitStack() as undo:
                undo.callback(file.close)
                lock_output(file.descriptor, output_path)
                if _is_named(file.descriptor, path):  # else its owner has replaced or removed it
                    run = cls(path, file, header)
                    undo.pop_all()
                    return run

    def known(self) -> Iterator[bytes]:
        """Yield the digests that the run before noted, or those of the draft."""
        file = self._draft or self._file
        for place in range(0, self.num_known, _CHUNK_DIGESTS):
            count = min(_CHUNK_DIGESTS, self.num_known - place)
            offset = self._start + place * _DIGEST_BYTES
            chunk = os.pread(file.descriptor, count * _DIGEST_BYTES, offset)
            for start in range(0, len(chunk), _DIGEST_BYTES):
                yield chunk[start : start + _DIGEST_BYTES]

    def forget(self) -> None:
        """Take nothing over from the run before."""
        self.previous, self._start = None, 0
        self.num_known, self.has_ended = 0, False

    def draft(self, digests: Iterable[bytes]) -> None:
        """Let this run's header and these digests take the file's place when it begins.

        Raises:
            OutputError: they cannot be written.
        """
        draft = OutputFile.open(self.path + NEW, overwrite=True)
        with contextlib.ExitStack() as undo:
            undo.callback(draft.remove)
            draft.cut()
            draft.append(_header_line(self._header))
            start = draft.size
            for chunk in in_chunks(map(storable, digests), _CHUNK_DIGESTS * _DIGEST_BYTES):
                draft.append(b"".join(chunk))
            undo.pop_all()
        self._draft = draft
        self._start, self.num_known = start, (draft.size - start) // _DIGEST_BYTES

    def begin(self) -> None:
        """Let the file speak of this run. Rows of other records must be gone from OUT by then.

        Raises:
            OutputError: it cannot be written.
        """
        if self._draft is not None:
            self._draft.sync()
            lock_output(self._draft.descriptor, self.path)
            replace_file(self._draft.path, self.path)
            self._file.take_over(self._draft)
            self._draft = None
        elif self.previous is None:
            self._file.cut()
            self._file.append(_header_line(self._header))
        else:
            self._file.cut(self._start + self.num_known * _DIGEST_BYTES)
        Path(self.path + NEW).unlink(missing_ok=True)  # of a run that was killed here
        self._file.sync()
        sync_folder(self.path)
        self._has_begun = True

    def note(self, digest: bytes) -> None:
        """Note the next record behind those that are known."""
        with self._noting:
            self._noted += storable(digest)

    def note_end(self) -> None:
        """Note that the input has no more records."""
        with self._noting:
            self._noted += _END

    def flush(self) -> None:
        """Hand what was noted to the operating system.

        Raises:
            OutputError: it cannot be written.
        """
        if self._noted and self._has_begun:
            with self._noting:
                noted, self._noted = self._noted, bytearray()
            self._file.append(bytes(noted))

    def sync(self) -> None:
        """Put on disk what was noted.

        Raises:
            OutputError: the disk fails.
        """
        self.flush()
        self._file.sync()

    def close(self) -> None:
        """Close and unlock the file, and leave it."""
        self._file.close()
        if self._draft is not None:
            self._draft.remove()

    def remove_if_created(self) -> None:
        """Close and unlock the file; delete it, unless it was there before this run."""
        if self._draft is not None:
            self._draft.remove()
        self._file.remove_if_created()


def read_run(output_path: str) -> tuple[RunHeader, int] | None:
    """Return what the run that made an output was made of, and how many records it has read.

    None if nothing is noted of it.

    Raises:
        UsageError: the file cannot be read.
    """
    path = run_path(output_path)
    if not os.path.exists(path):
        return None
    try:
        with open(path, "rb") as stream:
            header, start = _read_header(stream.fileno())
            num_records, _ = _count_known(stream.fileno(), start)
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror}") from error
    return None if header is None else (header, num_records)


def storable(digest: bytes) -> bytes:
    """Return a digest as it is stored: two values have a meaning of their own."""
    return _STAND_IN if digest in (_UNKNOWN, _END) else digest


def _read_header(descriptor: int) -> tuple[RunHeader | None, int]:
    """Return the header and where the digests begin; None if it is torn or missing."""
    size = os.fstat(descriptor).st_size
    line = os.pread(descriptor, min(size, _MAX_HEADER_BYTES), 0)
    line = line[: line.find(b"\n") + 1]
    try:
        fields = orjson.loads(line)
        if fields["format"] != FORMAT:
            raise UsageError(
                f"the file that says what made the output has format {fields['format']}, and this "
                f"version reads {FORMAT}; go on with the version of cbgen that wrote it"
            )
        return RunHeader(**fields), len(line)
    except (orjson.JSONDecodeError, TypeError, KeyError):
        return None, 0


def _count_known(descriptor: int, start: int) -> tuple[int, bool]:
    """Return how many digests there are, and whether the mark of the end follows them."""
    count = 0
    while chunk := os.pread(descriptor, _CHUNK_DIGESTS * _DIGEST_BYTES, start):
        for offset in range(0, len(chunk), _DIGEST_BYTES):
            digest = chunk[offset : offset + _DIGEST_BYTES]
            if digest in (_END, _UNKNOWN) or len(digest) < _DIGEST_BYTES:
                return count, digest == _END
            count += 1
        start += len(chunk)
    return count, False


def _header_line(header: RunHeader) -> bytes:
    return encode_row(asdict(header))


def _is_named(descriptor: int, path: str) -> bool:
    """Whether a path still leads to an open file."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False
