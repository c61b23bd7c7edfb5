from __future__ import annotations

import datetime
import decimal
import io
import os
import sys
import tracemalloc
import uuid

import pyarrow as arrow
import pyarrow.parquet
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from cbgen.errors import UsageError
from cbgen.io.formats.parquet import ParquetRows
from cbgen.io.inputs import Inputs
from cbgen.io.records import records_from
from tests.helpers.packed import write_parquet
from tests.helpers.records import error_codes, error_of

UTC = datetime.UTC


@pytest.fixture
def read(tmp_path):
    """Write columns into a parquet file and read it as records."""

    def read(columns, **options):
        path = write_parquet(tmp_path / "in.parquet", columns, **options)
        return list(Inputs([path]).records())

    return read


def count_until_error(records):
    """Return how many records there are, and the UsageError that ends them."""
    count = 0
    try:
        for _ in records:
            count += 1
    except UsageError as error:
        return count, str(error)
    return count, ""


def columns_of(records):
    return [record.columns for record in records]


def test_rows_come_in_the_order_of_the_file_across_row_groups(read):
    records = read({"id": [f"q{n}" for n in range(5000)]}, row_group_size=700)
    assert [record.id for record in records] == [f"q{n}" for n in range(5000)]
    assert [record.line for record in records] == list(range(1, 5001))


def test_json_types_keep_their_values(read):
    rows = [
        {
            "id": 1,
            "prompt": "é\u2028",
            "score": 0.5,
            "yes": True,
            "none": None,
            "ids": [1, 2],
            "messages": [{"role": "user", "content": "hi"}],
            "big": 2**63 - 1,
        },
        {
            "id": 2,
            "prompt": "",
            "score": -1e300,
            "yes": None,
            "none": None,
            "ids": [],
            "messages": None,
            "big": -(2**63),
        },
    ]
    assert columns_of(read({name: [row[name] for row in rows] for name in rows[0]})) == rows


@pytest.mark.parametrize(
    ("values", "kind", "expected"),
    [
        ([2**64 - 1], arrow.uint64(), 2**64 - 1),
        ([1.5], arrow.float16(), 1.5),
        ([b"text"], arrow.binary(), "text"),
        ([b"text"], arrow.binary(4), "text"),
        (["a"], arrow.dictionary(arrow.int8(), arrow.string()), "a"),
        ([[("a", 1)]], arrow.map_(arrow.string(), arrow.int64()), {"a": 1}),
        ([[(5, 1)]], arrow.map_(arrow.int64(), arrow.int64()), {"5": 1}),
        ([[1, 2]], arrow.list_(arrow.int32(), 2), [1, 2]),
        ([[1, 2]], arrow.large_list(arrow.int32()), [1, 2]),
        ([datetime.date(2026, 1, 2)], arrow.date32(), "2026-01-02"),
        ([datetime.time(3, 4, 5)], arrow.time64("us"), "03:04:05"),
        ([decimal.Decimal("1.50")], arrow.decimal128(9, 2), 1.5),
        ([decimal.Decimal(10**30)], arrow.decimal256(40, 0), 10**30),
        ([uuid.UUID(int=1).bytes], arrow.uuid(), "00000000-0000-0000-0000-000000000001"),
    ],
)
def test_other_types_get_a_json_form(read, values, kind, expected):
    (record,) = read({"value": arrow.array(values, kind)})
    assert columns_of([record]) == [{"value": expected}]


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (arrow.timestamp("us"), "1970-01-01 00:00:05.000000"),
        (arrow.timestamp("ns"), "1970-01-01 00:00:00.005000000"),
        (arrow.timestamp("ms", "UTC"), "1970-01-01 01:23:20.000Z"),
        (arrow.timestamp("us", "America/New_York"), "1970-01-01 00:00:05.000000Z"),
    ],
)
@pytest.mark.parametrize("nested", [False, True])
def test_times_are_text_with_all_their_digits(read, kind, expected, nested):
    values = arrow.array([5_000_000], arrow.int64()).cast(kind)
    if nested:
        values = arrow.StructArray.from_arrays([values], ["at"])
    (record,) = read({"value": values})
    assert columns_of([record]) == [{"value": {"at": expected} if nested else expected}]


def test_a_decimal_keeps_all_its_digits(read):
    value = decimal.Decimal("12345678901234567890.123456789")
    (record,) = read({"value": arrow.array([value], arrow.decimal128(38, 9))})
    assert columns_of([record])[0]["value"].text == str(value)


def test_bytes_that_are_not_utf8_are_an_error_of_their_row_alone(read):
    records = read({"prompt": ["a", "b"], "image": [b"ok", b"\xff\xd8"]})
    assert error_codes(records) == [None, "unreadable_value"]
    message = error_of(records[1]).message
    assert "in.parquet:2: column 'image' holds a value that has no JSON form" in message


def test_text_that_is_not_utf8_is_an_error_of_its_row_alone(read):
    text = arrow.array([b"a", b"\xff", None]).view(arrow.string())
    records = read({"prompt": text})
    assert error_codes(records) == [None, "unreadable_value", None]
    assert "column 'prompt'" in error_of(records[1]).message


def test_a_date_beyond_the_calendar_is_an_error_of_its_row_alone(read):
    records = read({"day": arrow.array([0, 2**31 - 1], arrow.int32()).view(arrow.date32())})
    assert error_codes(records) == [None, "unreadable_value"]


def test_a_map_with_a_repeated_key_is_an_error_of_its_row_alone(read):
    kind = arrow.map_(arrow.string(), arrow.int64())
    records = read({"tags": arrow.array([[("a", 1), ("a", 2)], [("a", 1)]], kind)})
    assert error_codes(records) == ["unreadable_value", None]


def test_a_column_without_a_json_form_is_refused_before_anything_is_read(tmp_path):
    column = arrow.array([1], arrow.int64()).cast(arrow.duration("us"))
    path = write_parquet(tmp_path / "in.parquet", {"prompt": ["a"], "took": column})
    with pytest.raises(UsageError, match=r"column 'took' is of type duration\[us\].*leave it out"):
        Inputs([path])


def test_two_columns_of_one_name_are_refused(tmp_path):
    path = tmp_path / "in.parquet"
    table = arrow.Table.from_arrays([arrow.array(["a"]), arrow.array(["b"])], ["prompt", "prompt"])
    arrow.parquet.write_table(table, path)
    with pytest.raises(UsageError, match=r"two of its columns are called 'prompt'; rename one"):
        Inputs([str(path)])


def test_two_fields_of_one_name_in_a_struct_are_refused(tmp_path):
    path = tmp_path / "in.parquet"
    kind = arrow.struct([("a", arrow.int64()), ("a", arrow.int64())])
    arrow.parquet.write_table(arrow.table({"x": arrow.array([None], kind)}), path)
    with pytest.raises(UsageError, match=r"column 'x' .*two of its fields are called 'a'"):
        Inputs([str(path)])


def test_values_that_are_no_numbers_are_null(read):
    (record,) = read({"score": [float("nan")]})
    assert columns_of([record]) == [{"score": None}]


def test_a_file_without_rows_or_columns_has_no_records(read):
    assert read({"prompt": arrow.array([], arrow.string())}) == []
    assert read({}) == []


def test_a_file_that_is_not_whole_is_refused(tmp_path):
    path = tmp_path / "in.parquet"
    write_parquet(path, {"prompt": ["a"] * 100})
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(UsageError, match="is not a whole parquet file"):
        Inputs([str(path)])


def test_an_empty_file_is_refused(tmp_path):
    path = tmp_path / "in.parquet"
    path.write_bytes(b"")
    with pytest.raises(UsageError, match="is not a whole parquet file"):
        Inputs([str(path)])


def test_a_damaged_page_gives_the_rows_before_it_and_names_the_row(tmp_path):
    path = tmp_path / "in.parquet"
    values = [f"{number:09}" for number in range(20_000)]
    write_parquet(
        path, {"id": values}, row_group_size=5000, compression="gzip", use_dictionary=False
    )
    data = bytearray(path.read_bytes())
    middle = pyarrow.parquet.read_metadata(path).row_group(2).column(0).data_page_offset
    data[middle + 60 : middle + 400] = bytes(340)
    path.write_bytes(data)
    count, message = count_until_error(Inputs([str(path)]).records())
    assert count >= 9000
    assert message.startswith(f"{path}: cannot be read beyond row {count}: ")


def test_parquet_on_a_pipe_is_refused(tmp_path):
    path = tmp_path / "in.parquet"
    os.mkfifo(path)
    with pytest.raises(UsageError, match="cannot be read from a pipe"):
        Inputs([str(path)])


def test_without_pyarrow_the_extra_is_named(tmp_path, monkeypatch):
    path = write_parquet(tmp_path / "in.parquet", {"a": [1]})
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(UsageError, match=r"pip install 'cbgen\[parquet\]'"):
        Inputs([path])


def test_memory_does_not_grow_with_the_file(tmp_path):
    def peak(num_rows: int) -> int:
        path = write_parquet(
            tmp_path / f"{num_rows}.parquet",
            {"prompt": [f"{number:0100}" for number in range(num_rows)]},
            row_group_size=1000,
        )
        before = arrow.total_allocated_bytes()
        most = 0
        tracemalloc.start()
        for _ in Inputs([path]).records():
            most = max(most, arrow.total_allocated_bytes() - before)
        most += tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return most

    peak(1000)
    assert peak(30_000) < 2 * peak(3000)


@given(st.binary(max_size=60), st.integers(0, 600))
@example(b"\x00", 136)  # a page header that ends the column early
@settings(max_examples=60, deadline=None)
def test_any_bytes_give_records_or_a_usage_error(data, place):
    good = io.BytesIO()
    pyarrow.parquet.write_table(arrow.table({"prompt": ["a", "b"] * 9}), good)
    damaged = bytearray(good.getvalue())
    damaged[place : place + len(data)] = data

    def records():
        lines = ParquetRows(io.BytesIO(damaged), "in").lines()
        for number, record in enumerate(records_from(lines, "in"), 1):
            assert record.line == number
            yield record

    count, message = count_until_error(records())
    assert message.startswith("in: ") or (count, message) == (18, "")
