from __future__ import annotations

import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cbgen.io.ids import IdIndex
from cbgen.io.records import Record
from tests.helpers.records import error_codes, error_of, make_record, read_bytes


def admit_all(data: bytes, on_duplicate: str = "error") -> list[Record]:
    index = IdIndex(on_duplicate)
    return [index.admit(record) for record in read_bytes(data)]


def test_the_later_of_two_rows_with_one_id_gets_an_error_that_names_both_lines():
    records = admit_all(b'{"id":"a"}\n\n{"id":"b"}\n{"id":"a"}\n')
    assert error_codes(records) == [None, None, "duplicate_id"]
    assert error_of(records[2]).message.startswith(
        "in.jsonl:4: id 'a' was used already at in.jsonl:1"
    )


def test_the_id_is_kept_in_the_row_that_repeats_it():
    assert admit_all(b'{"id":"a"}\n{"id":"a","x":1}\n')[1].id == "a"


def test_an_integer_and_its_text_are_one_id():
    assert error_codes(admit_all(b'{"id":1}\n{"id":"1"}\n')) == [None, "duplicate_id"]


def test_an_id_equal_to_another_rows_index_is_a_repetition():
    assert error_codes(admit_all(b'{"id":1}\n{}\n')) == [None, "duplicate_id"]
    assert error_codes(admit_all(b'{}\n{"id":"0"}\n')) == [None, "duplicate_id"]


def test_lines_that_could_not_be_read_take_no_id():
    assert error_codes(admit_all(b"{}\nnonsense\n{}\n")) == [None, "invalid_json", None]


def test_a_repetition_in_another_file_names_that_file():
    index = IdIndex()
    places = [("a.jsonl", 3), ("a.jsonl", 9), ("b.jsonl", 2), ("b.jsonl", 5)]
    for number, (source, line) in enumerate(places):
        assert index.admit(make_record(id=f"q{number}", source=source, line=line)).error is None
    for number, (source, line) in enumerate(places):
        repeated = index.admit(make_record(id=f"q{number}", source="c.jsonl", line=number + 1))
        assert f"already at {source}:{line};" in error_of(repeated).message


def test_the_same_file_may_be_read_twice_in_a_row():
    index = IdIndex()
    index.admit(make_record(id="a", line=1))
    repeated = index.admit(make_record(id="a", line=1))
    assert error_codes([repeated]) == ["duplicate_id"]


def test_a_suffix_makes_repeated_ids_unique():
    records = admit_all(b'{"id":"a"}\n' * 4, "suffix")
    assert [record.id for record in records] == ["a", "a-2", "a-3", "a-4"]


def test_a_suffix_avoids_the_ids_of_other_rows():
    records = admit_all(b'{"id":"a-2"}\n{"id":"a"}\n{"id":"a"}\n{"id":"a-3"}\n', "suffix")
    assert [record.id for record in records] == ["a-2", "a", "a-3", "a-3-2"]


@given(st.lists(st.sampled_from(["a", "a-2", "a-3", "a-2-2", 1, "1", "1-2"]), max_size=40))
def test_suffixed_ids_are_unique_whatever_comes(ids):
    index = IdIndex("suffix")
    given_ids = [
        index.admit(make_record(id=identifier, line=line)).id
        for line, identifier in enumerate(ids, 1)
    ]
    assert len(set(map(str, given_ids))) == len(ids)


@given(st.lists(st.text(max_size=2)))
def test_a_row_has_an_error_exactly_if_its_id_came_before(ids):
    index = IdIndex()
    for line, identifier in enumerate(ids, 1):
        record = index.admit(make_record(id=identifier, line=line))
        assert (record.error is not None) == (identifier in ids[: line - 1])


def test_ten_thousand_rows_with_one_id_take_no_long():
    index = IdIndex("suffix")
    ids = [index.admit(make_record(id="a", line=line)).id for line in range(1, 10_001)]
    assert ids[-1] == "a-10000"


@pytest.mark.parametrize("num_rows", [60_000, 100_000])
def test_a_row_takes_sixteen_bytes(num_rows):
    index = IdIndex()
    tracemalloc.start()
    for line in range(1, num_rows + 1):
        index.admit(make_record(id=line, line=line))
    current, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert current <= 16 * num_rows + 10_000
    assert peak <= 18 * num_rows + 10_000
