from __future__ import annotations

import contextlib
import io
import os
import re
import sys
import threading
import tracemalloc

import pytest
import zstandard
from hypothesis import example, given, settings
from hypothesis import strategies as st

from cbgen.errors import UsageError
from cbgen.io.input_files import check_input, open_input
from tests.helpers.packed import pack
from tests.helpers.records import error_codes, read_records

KINDS = {"gzip": ".gz", "zstd": ".zst"}
ROWS = b"".join(b'{"prompt":"row %d"}\n' % number for number in range(500))

packed = pytest.mark.parametrize("kind", KINDS)


@pytest.fixture
def file_of(tmp_path):
    """Write a file and return its path."""

    def write(data: bytes, name: str = "in.jsonl") -> str:
        path = tmp_path / name
        path.write_bytes(data)
        return str(path)

    return write


def content_of(path: str) -> bytes:
    with open_input(path) as stream:
        return stream.read()


def read_until_error(path: str) -> tuple[int, str]:
    """Return how many rows were read, and the UsageError that ended it."""
    count = 0
    try:
        with open_input(path) as stream:
            for _ in read_records(stream, path):
                count += 1
    except UsageError as error:
        return count, str(error)
    return count, ""


def test_a_file_is_opened_for_bytes(file_of):
    assert content_of(file_of(b'{"prompt":"a"}\r\n')) == b'{"prompt":"a"}\r\n'


@packed
def test_packed_rows_are_unpacked(file_of, kind):
    assert content_of(file_of(pack(ROWS, kind), "in.jsonl" + KINDS[kind])) == ROWS


@packed
def test_a_suffix_in_capitals_counts(file_of, kind):
    assert content_of(file_of(pack(ROWS, kind), "IN" + KINDS[kind].upper())) == ROWS


@packed
def test_members_and_frames_follow_one_another_wherever_they_end(file_of, kind):
    data = b"".join(pack(ROWS[start : start + 777], kind) for start in range(0, len(ROWS), 777))
    assert content_of(file_of(data + pack(b"", kind), "in" + KINDS[kind])) == ROWS


@packed
def test_an_empty_file_has_no_rows(file_of, kind):
    assert content_of(file_of(b"", "in" + KINDS[kind])) == b""


def test_frames_to_be_skipped_are_skipped(file_of):
    skipped = b"\x53\x2a\x4d\x18" + (5).to_bytes(4, "little") + b"hello"
    frame = pack(ROWS, "zstd")
    assert content_of(file_of(skipped + frame + skipped + frame, "in.zst")) == ROWS * 2


def test_zeros_between_gzip_members_are_padding(file_of):
    member = pack(ROWS, "gzip")
    assert content_of(file_of(member + bytes(700) + member + bytes(9), "in.gz")) == ROWS * 2


@packed
def test_a_torn_end_gives_the_rows_before_it_and_names_the_line(file_of, kind):
    torn = pack(ROWS, kind) + pack(ROWS, kind)[:-30]
    path = file_of(torn, "in" + KINDS[kind])
    count, message = read_until_error(path)
    assert count >= 500
    assert message == (
        f"{path}: cannot be read beyond line {count}: the {kind} data ends in the middle; "
        "its rest is missing"
    )


@packed
def test_a_file_torn_in_its_first_bytes_is_told(file_of, kind):
    path = file_of(pack(ROWS, kind)[:6], "in" + KINDS[kind])
    assert read_until_error(path) == (
        0,
        f"{path}: cannot be read: the {kind} data ends in the middle; its rest is missing",
    )


@packed
def test_damage_gives_the_rows_before_it_and_names_the_line(file_of, kind):
    path = file_of(pack(ROWS, kind) + b"garbage", "in" + KINDS[kind])
    count, message = read_until_error(path)
    assert count == 500
    assert message.startswith(f"{path}: cannot be read beyond line 500: the {kind} data is damaged")


@packed
@settings(deadline=None)
@given(data=st.binary(max_size=200), place=st.integers(0, 2000), rows=st.integers(0, 40))
@example(data=b"\x07", place=151, rows=22)  # makes a blank line of gzip's
def test_any_packed_bytes_give_records_or_a_usage_error(tmp_path_factory, kind, data, place, rows):
    good = bytearray(pack(ROWS[: rows * 18], kind))
    good[place % len(good) :] = data
    path = tmp_path_factory.mktemp("in") / ("in" + KINDS[kind])
    path.write_bytes(good)
    count, message = read_until_error(str(path))
    assert message == "" or message.startswith(f"{path}: ")
    if count and message:
        told = re.search(r"beyond line (\d+): ", message)
        assert told is not None
        assert int(told[1]) >= count  # damage can make blank lines, which are no rows


@packed
def test_an_endless_line_takes_little_memory(file_of, kind):
    path = file_of(pack(bytes(2**28), kind), "in" + KINDS[kind])
    tracemalloc.start()
    with open_input(path) as stream:
        records = list(read_records(stream, "in", max_line_bytes=2**16))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert error_codes(records) == ["line_too_long"]
    assert peak < 80 * 2**20


@packed
def test_a_packed_file_without_its_suffix_is_refused(file_of, kind):
    path = file_of(pack(ROWS, kind), "in.jsonl")
    with pytest.raises(UsageError, match=rf"holds {kind} data; .* ends in \{KINDS[kind]}"):
        check_input(path)


@pytest.mark.parametrize(("name", "kind"), [("in.gz", "gzip"), ("in.zst", "zstd")])
def test_a_plain_file_with_a_packed_name_is_refused(file_of, name, kind):
    with pytest.raises(UsageError, match=f"is named like {kind} data and holds none"):
        check_input(file_of(ROWS, name))


@pytest.mark.parametrize(
    ("head", "what", "remedy"),
    [
        (b"BZh91AY&SY", "bzip2", "bzcat"),
        (b"\xfd7zXZ\x00\x00", "xz", "xzcat"),
        (b"PK\x03\x04....", "zip", "unzip"),
        ("\ufeff{}".encode("utf-16-le"), "UTF-16", "iconv"),
        (b"PAR1....", "parquet", r"\.parquet"),
        (bytes(257) + b"ustar\x00", "tar", "unpack"),
    ],
)
def test_content_that_is_not_read_is_refused_with_the_way_around(file_of, head, what, remedy):
    with pytest.raises(UsageError, match=f"holds {what} data.*{remedy}"):
        check_input(file_of(head + ROWS))


@packed
def test_data_that_is_packed_twice_is_refused(file_of, kind):
    path = file_of(pack(pack(ROWS, "gzip"), kind), "in" + KINDS[kind])
    with pytest.raises(UsageError, match="holds gzip data inside of packed data"):
        open_input(path)


@pytest.mark.parametrize("name", ["missing.jsonl", "missing.gz", "."])
def test_an_input_that_cannot_be_opened_is_refused_by_name(tmp_path, name):
    with pytest.raises(UsageError, match="cannot be opened"):
        open_input(str(tmp_path / name))


def test_without_zstandard_the_extra_is_named(file_of, monkeypatch):
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(UsageError, match=r"pip install 'cbgen\[zstd\]'"):
        check_input(file_of(pack(ROWS, "zstd"), "in.zst"))


def test_a_dash_is_stdin(monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"{}\n")))
    assert content_of("-") == b"{}\n"


@packed
def test_packed_rows_are_recognised_on_stdin(monkeypatch, kind):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(pack(ROWS, kind))))
    assert content_of("-") == ROWS


def test_parquet_on_stdin_is_refused(monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"PAR1....")))
    with pytest.raises(UsageError, match="-: holds parquet data; give it as a file"):
        open_input("-")


@pytest.mark.parametrize("open_it", [open_input, check_input])
def test_a_closed_stdin_is_refused(monkeypatch, open_it):
    monkeypatch.setattr(sys, "stdin", None)
    with pytest.raises(UsageError, match="stdin is closed"):
        open_it("-")


@pytest.fixture
def pipe(tmp_path):
    """A named pipe: its path, and the function that writes into it and keeps it open."""
    path = tmp_path / "pipe.gz"
    os.mkfifo(path)
    descriptors = []

    def write(data: bytes) -> None:
        if not descriptors:
            descriptors.append(os.open(path, os.O_WRONLY))
        os.write(descriptors[0], data)

    yield str(path), write
    for descriptor in descriptors:
        os.close(descriptor)


def first_record(path: str):
    with open_input(path) as stream:
        return next(read_records(stream, path))


@pytest.mark.parametrize("data", [b"{}\n", pack(b"{}\n", "gzip"), pack(b"{}\n", "zstd")])
def test_a_row_of_a_pipe_is_read_while_the_pipe_is_open(pipe, data):
    path, write = pipe

    def feed():
        # The reader leaves after the first row, which may be before the end of its frame.
        with contextlib.suppress(BrokenPipeError):
            for byte in data:
                write(bytes([byte]))

    writer = threading.Thread(target=feed)
    writer.start()
    assert first_record(path).columns == {}
    writer.join()


def test_a_window_beyond_what_is_unpacked_is_told(file_of):
    parameters = zstandard.ZstdCompressionParameters(window_log=28)
    stream = io.BytesIO()
    compressor = zstandard.ZstdCompressor(compression_params=parameters)
    with compressor.stream_writer(stream, closefd=False) as writer:
        writer.write(ROWS)
    path = file_of(stream.getvalue(), "in.zst")
    assert "too much memory" in read_until_error(path)[1]
