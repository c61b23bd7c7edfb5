from __future__ import annotations

import io

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cbgen.io.formats import compressed
from cbgen.io.formats.compressed import FrameFile, gzip_codec, read_frames, zstd_codec
from cbgen.io.output.writer import RowWriter
from tests.helpers.packed import pack, unpack

KINDS = ["gzip", "zstd"]
CODECS = {codec.name: codec for codec in (gzip_codec(), zstd_codec())}
SUFFIXES = {"gzip": ".gz", "zstd": ".zst"}


def read(data: bytes, kind: str, start: int = 0) -> list[bytes | int]:
    return list(read_frames(io.BytesIO(data), CODECS[kind], start))


def line_of(index: int) -> bytes:
    return b'{"index":%d}\n' % index


@pytest.mark.parametrize("kind", KINDS)
@given(lines=st.lists(st.lists(st.binary(max_size=20), max_size=5), max_size=5))
def test_whole_frames_are_read_with_their_ends(kind, lines):
    parts = [[line.replace(b"\n", b"") + b"\n" for line in frame] for frame in lines]
    packed = [pack(b"".join(part), kind) for part in parts]
    expected: list[bytes | int] = []
    end = 0
    for part, data in zip(parts, packed, strict=True):
        end += len(data)
        expected += [*part, end]
    assert read(b"".join(packed), kind) == expected


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_of_a_torn_frame_is_read(kind):
    first, second = pack(line_of(1), kind), pack(line_of(2) * 1000, kind)
    whole = [line_of(1), len(first)]
    for size in range(len(second)):
        assert read(first + second[:size], kind) == whole
    assert read(first + bytes(50), kind) == whole
    assert read(first + b"garbage", kind) == whole


@pytest.mark.parametrize("kind", KINDS)
def test_reading_can_begin_where_a_frame_ends(kind):
    first, second = pack(line_of(1), kind), pack(line_of(2), kind)
    assert read(first + second, kind, len(first)) == [line_of(2), len(first + second)]


@pytest.mark.parametrize("kind", KINDS)
def test_a_frame_that_ends_within_a_line_is_no_place_to_cut(kind):
    first, second = pack(b"one\ntw", kind), pack(b"o\nthree\n", kind)
    end = len(first + second)
    assert read(first + second, kind) == [b"one\n", b"two\n", b"three\n", end]


@pytest.mark.parametrize("kind", KINDS)
def test_frames_have_about_the_size_that_they_should(tmp_path, kind, monkeypatch):
    monkeypatch.setattr(compressed, "FRAME_BYTES", 100)
    path = tmp_path / "out"
    file = FrameFile.open_packed(str(path), CODECS[kind], False)
    lines = [line_of(index) for index in range(100)]
    for line in lines:
        file.append(line)
    file.sync()
    file.close()
    items = read(path.read_bytes(), kind)
    assert [item for item in items if isinstance(item, bytes)] == lines
    assert 10 < sum(isinstance(item, int) for item in items) < 20


@pytest.mark.parametrize("kind", KINDS)
def test_rows_wait_in_the_journal_until_a_second_has_passed(tmp_path, kind, monkeypatch):
    now = 100.0
    monkeypatch.setattr("cbgen.io.output.writer.time.monotonic", lambda: now)
    path = tmp_path / f"out{SUFFIXES[kind]}"
    rows = RowWriter(str(path), order="completion")
    rows.write(3, line_of(3))
    assert path.read_bytes() == b""
    assert (tmp_path / f"{path.name}.journal").read_bytes() == line_of(3)
    now += 1
    rows.sync_if_due()
    assert unpack(path.read_bytes(), kind) == line_of(3)
    rows.write(1, line_of(1))
    rows.close()
    assert unpack(path.read_bytes(), kind) == line_of(3) + line_of(1)
    assert [file.name for file in tmp_path.iterdir()] == [path.name]
