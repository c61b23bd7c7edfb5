from __future__ import annotations

import gc
import io
import itertools
import tracemalloc
from types import MappingProxyType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cbgen.errors import UsageError
from cbgen.io.records import Record, record_of
from tests.helpers.records import error_codes, error_of, read_bytes, read_records

WHITE_SPACE = b" \t\r\n"


@given(st.binary())
def test_any_bytes_give_one_record_for_each_line_that_is_not_blank(data):
    lines = data.removeprefix(b"\xef\xbb\xbf").split(b"\n")
    records = read_bytes(data)
    expected = [number for number, line in enumerate(lines, 1) if line.strip(WHITE_SPACE)]
    assert [record.line for record in records] == expected
    assert [record.index for record in records] == list(range(len(expected)))
    assert all((record.columns is None) == (record.error is not None) for record in records)


@given(st.lists(st.sampled_from(list(b'{}[]"\\:,ud8e19-. \t\r\nNaI\xef\xbb\xbf\xff'))).map(bytes))
def test_bytes_that_resemble_json_never_raise(data):
    for record in read_bytes(b'{"a":' + data):
        assert record.columns is not None or record.error is not None


def test_a_byte_order_mark_at_the_start_is_dropped():
    (record,) = read_bytes(b'\xef\xbb\xbf{"prompt":"a"}')
    assert record.columns == {"prompt": "a"}


def test_a_byte_order_mark_on_a_later_line_is_an_error():
    assert error_codes(read_bytes(b'{"prompt":"a"}\n\xef\xbb\xbf{"prompt":"b"}\n')) == [
        None,
        "invalid_json",
    ]


def test_a_file_that_holds_a_byte_order_mark_alone_has_no_records():
    assert read_bytes(b"\xef\xbb\xbf") == []


def test_only_the_line_feed_ends_a_line():
    text = '{"prompt":"a\u2028b\u0085c"}\r\n'
    (first, second) = read_bytes(text.encode() + b'{"prompt":\r"d"}')
    assert first.columns == {"prompt": "a\u2028b\u0085c"}
    assert second.columns == {"prompt": "d"}


def test_a_raw_tab_in_a_string_is_an_error():
    assert error_codes(read_bytes(b'{"prompt":"a\tb"}\n')) == ["invalid_json"]


def test_blank_lines_count_as_lines_but_not_as_records():
    records = read_bytes(b'\n \t\r\n{"prompt":"a"}\n\n{"prompt":"b"}\n\n')
    assert [(record.index, record.line) for record in records] == [(0, 3), (1, 5)]


def test_bad_lines_take_an_index_too():
    records = read_bytes(b'{"prompt":"a"}\nnonsense\n{"prompt":"b"}\n')
    assert [record.index for record in records] == [0, 1, 2]
    assert error_codes(records) == [None, "invalid_json", None]


def test_a_last_line_without_a_line_feed_counts():
    assert len(read_bytes(b'{"prompt":"a"}\n{"prompt":"b"}')) == 2


def test_the_first_index_can_follow_an_earlier_file():
    assert [record.index for record in read_bytes(b"{}\n{}\n", first_index=7)] == [7, 8]


def test_the_error_of_a_bad_line_names_file_line_and_column():
    message = error_of(read_bytes(b'\n{"prompt": nope}\n')[0]).message
    assert message.startswith("in.jsonl:2: not JSON: Expecting value at column 12")


def test_a_line_that_is_not_utf8_names_the_byte():
    error = error_of(read_bytes(b'{"prompt":"caf\xe9"}\n')[0])
    assert error.code == "invalid_utf8"
    assert "0xe9 at offset 14" in error.message


@pytest.mark.parametrize(
    ("line", "kind"),
    [(b"[1]", "an array"), (b'"a"', "a string"), (b"1", "a number"), (b"true", "a boolean")],
)
def test_a_line_that_is_no_object_says_what_it_is(line, kind):
    error = error_of(read_bytes(line)[0])
    assert error.code == "not_an_object"
    assert kind in error.message


@pytest.mark.parametrize(("text", "value"), [('"q1"', "q1"), ("17", 17), ("-3", -3), ('""', "")])
def test_an_id_is_a_string_or_an_integer(text, value):
    assert read_bytes(b'{"id":' + text.encode() + b"}")[0].id == value


@pytest.mark.parametrize("line", [b"{}", b'{"id": null}'])
def test_a_missing_or_null_id_is_the_index(line):
    assert [record.id for record in read_bytes(b'{"id":"a"}\n' + line)] == ["a", 1]


@pytest.mark.parametrize("value", [b"true", b"1.5", b"[1]", b"{}", b"NaN", b"1e400"])
def test_another_id_is_an_error_that_keeps_the_columns(value):
    (record,) = read_bytes(b'{"prompt":"a","id":' + value + b"}")
    assert error_codes([record]) == ["invalid_id"]
    assert record.id is None
    assert record.columns is not None


@pytest.mark.parametrize(
    ("depth", "is_closed"),
    [(250, True), (900, True), (1100, True), (100_000, True), (100_000, False)],
)
def test_a_line_that_is_nested_too_deeply_keeps_its_scalars(depth, is_closed):
    deep = b"[" * depth + (b"]" * depth if is_closed else b"")
    line = b'{"a": {"id": "other"}, "id": "r\\u0031", "deep": ' + deep
    after = b', "b": 1e400, "c": [1, "id"], "d": null}' if is_closed else b""
    (record,) = read_bytes(line + after)
    assert error_of(record).code == "nested_too_deeply"
    assert record.id == "r1"
    scalars = {"a": None, "id": "r1", "deep": None}
    if is_closed:
        scalars |= {"b": float("inf"), "c": None, "d": None}
    assert record.columns == scalars


def test_a_line_that_is_nested_too_deeply_without_an_id_has_its_index():
    (_, record) = read_bytes(b'{}\n{"a": ' + b"[" * 300 + b"]" * 300 + b"}")
    assert record.id == 1
    assert error_of(record).message.startswith("in.jsonl:2: ")


def test_a_line_beyond_the_limit_is_an_error_and_reading_goes_on():
    long_line = b'{"prompt":"' + b"a" * 100 + b'"}'
    records = read_bytes(long_line + b'\n{"prompt":"b"}\n' + long_line, max_line_bytes=50)
    assert error_codes(records) == ["line_too_long", None, "line_too_long"]
    assert [record.line for record in records] == [1, 2, 3]


def test_a_line_exactly_as_long_as_the_limit_is_read():
    line = b'{"prompt":"abc"}'
    assert error_codes(read_bytes(line + b"\n" + line, max_line_bytes=len(line))) == [None, None]
    assert error_codes(read_bytes(line, max_line_bytes=len(line) - 1)) == ["line_too_long"]


class EndlessStream(io.RawIOBase):
    """Rows without end, to be read through a buffer."""

    def readable(self):
        return True

    def readinto(self, buffer):
        row = b'{"prompt":"x"}\n'
        size = len(buffer) // len(row) * len(row)
        buffer[:size] = row * (size // len(row))
        return size


def test_records_come_before_the_input_ends():
    stream = io.BufferedReader(EndlessStream())
    records = list(itertools.islice(read_records(stream, "-"), 3))
    assert [record.columns for record in records] == [{"prompt": "x"}] * 3


def test_reading_many_rows_takes_no_memory():
    stream = io.BufferedReader(EndlessStream())
    records = itertools.islice(read_records(stream, "-"), 20_000)
    next(records)
    gc.collect()
    tracemalloc.start()
    for _ in records:
        pass
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 100_000


def test_an_endless_line_takes_no_memory():
    class Zeros(EndlessStream):
        remaining = 64 * 2**20

        def readinto(self, buffer):
            size = min(len(buffer), self.remaining)
            buffer[:size] = bytes(size)
            self.remaining -= size
            return size

    tracemalloc.start()
    records = list(read_records(io.BufferedReader(Zeros()), "-", max_line_bytes=2**16))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert error_codes(records) == ["line_too_long"]
    assert peak < 4 * 2**20


def test_a_failing_disk_is_told_with_the_source():
    class Broken(EndlessStream):
        def readinto(self, buffer):
            raise OSError(5, "Input/output error")

    with pytest.raises(UsageError, match=r"in\.jsonl: cannot be read: Input/output error"):
        list(read_records(io.BufferedReader(Broken()), "in.jsonl"))


def test_a_mapping_is_read_as_the_line_that_holds_it():
    row = {"id": "a", "ids": (1, 2), "big": 2**70, "text": "é\n", 5: None}
    record = record_of(MappingProxyType(row), index=3, source="rows")
    columns = {"id": "a", "ids": [1, 2], "big": 2**70, "text": "é\n", "5": None}
    assert record == Record(3, 4, "rows", "a", columns, None)


def test_a_mapping_under_the_rules_of_lines_can_be_an_error():
    rows = [{"text": "\ud800"}, {"id": 1.5}, {"a": b"bytes"}, ["a"], 7, endless_row()]
    records = [record_of(row, index=index, source="rows") for index, row in enumerate(rows)]
    assert error_codes(records) == ["lone_surrogate", "invalid_id", *["not_json"] * 4]
    assert error_of(records[2]).message.startswith("rows:3: the row has no JSON form")


def endless_row() -> dict:
    row: dict = {}
    row["self"] = row
    return row
