from __future__ import annotations

import json
import tracemalloc

import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cbgen.errors import UsageError
from cbgen.io.formats import parquet
from cbgen.io.formats.parquet import common_type, read_parquet, type_of, write_parquet
from cbgen.io.inputs import Inputs
from cbgen.io.json_values import decode_row, encode_row
from cbgen.io.output.output_file import OutputFile

ANSWERED = {
    "text": "an answer",
    "finish_reason": "stop",
    "stop_reason": None,
    "usage": {"prompt_tokens": 3, "completion_tokens": 2},
    "logprobs": None,
    "error": None,
}
FAILED = {
    **dict.fromkeys(ANSWERED),
    "finish_reason": "error",
    "error": {"type": "invalid_row", "code": "bad", "message": "it is bad"},
}


@pytest.fixture
def write(tmp_path):
    """Write rows and return the file's path."""

    def write_rows(*rows, name="out.parquet"):
        path = tmp_path / name
        lines = [encode_row(row) for row in rows]
        file = OutputFile.open(str(path), overwrite=True)
        file.cut()
        write_parquet(file, lambda: iter(lines))
        file.close()
        return path

    return write_rows


def row(index, columns=None, **changes):
    return {"id": f"r{index}", "index": index, **(columns or {}), **ANSWERED, **changes}


def table(path):
    with pyarrow.parquet.ParquetFile(path) as file:
        return file.read()


def test_own_fields_have_fixed_types_whatever_the_rows_hold(write):
    some = table(write(row(0))).schema
    others = table(write(row(0, **FAILED), row(1, stop_reason=7))).schema
    assert some == others
    assert str(some.field("usage").type) == (
        "struct<prompt_tokens: int64, completion_tokens: int64>"
    )
    assert str(some.field("error").type) == "struct<type: string, code: string, message: string>"
    assert some.field("logprobs").type.get_field_index("top") == 3


def test_errors_and_usage_are_null_where_there_are_none(write):
    rows = table(write(row(0), row(1, **FAILED))).to_pylist()
    assert [held["error"] is None for held in rows] == [True, False]
    assert rows[0]["usage"] == {"prompt_tokens": 3, "completion_tokens": 2}
    assert rows[1]["usage"] is None


def test_logprobs_and_token_ids_are_nested_columns(write):
    logprobs = {
        "tokens": ["a", "b"],
        "token_ids": [5, 6],
        "logprobs": [-0.5, None],
        "top": [[{"token": "a", "token_id": 5, "logprob": -0.5}], []],
    }
    path = write(row(0, logprobs=logprobs, token_ids=[5, 6]), row(1))
    first, second = table(path).to_pylist()
    assert first["logprobs"] == logprobs
    assert first["token_ids"] == [5, 6]
    assert second["logprobs"] is second["token_ids"] is None


def test_samples_are_a_column_of_structs(write):
    logprobs = {"tokens": ["a"], "token_ids": [5], "logprobs": [-0.5], "top": []}
    choices = [
        {"text": "a", "finish_reason": "stop", "stop_reason": 7, "logprobs": logprobs},
        {"text": "b", "finish_reason": "length", "stop_reason": None, "logprobs": None},
    ]
    sampled = {"id": "r1", "index": 1, "choices": choices, "usage": None, "error": None}
    path = write(row(0), sampled)
    assert table(path).schema.names[-2:] == ["choices", "error"]
    first, second = (json.loads(line) for line in read_parquet(str(path)))
    assert (first["text"], first["choices"]) == ("an answer", None)
    assert (second["text"], second["finish_reason"]) == (None, None)
    expected = [{**choice, "token_ids": None} for choice in choices]
    expected[0]["stop_reason"] = "7"
    assert second["choices"] == expected


def test_stop_reasons_of_both_kinds_are_text(write):
    rows = table(write(row(0, stop_reason=7), row(1, stop_reason="\n"))).to_pylist()
    assert [held["stop_reason"] for held in rows] == ["7", "\n"]


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([1, 2], "int64"),
        ([1, 2.5], "double"),
        ([1, None], "int64"),
        ([True, None], "bool"),
        (["a", None], "string"),
        ([None, None], "string"),
        ([[1], [2.5, None], []], "list<element: double>"),
        ([{"a": 1, "b": "x"}, {"b": "y", "a": 2}], "struct<a: int64, b: string>"),
        ([1, "a"], "json"),
        ([2**53 + 1, 0.5], "json"),
        ([2**64], "json"),
        ([[1, "a"]], "json"),
        ([{"a": 1}, {"b": 1}], "json"),
        ([{}], "json"),
        ([True, 1], "json"),
    ],
)
def test_a_carried_column_has_the_narrowest_type_that_holds_its_values(write, values, expected):
    path = write(*(row(index, {"x": value}) for index, value in enumerate(values)))
    field = table(path).schema.field("x")
    assert ("json" if field.metadata else str(field.type)) == expected
    back = [json.loads(line)["x"] for line in read_parquet(str(path))]
    assert back == values


def test_columns_come_in_the_order_of_a_row(write):
    path = write(row(0, {"b": 1, "a": 2}), row(1, {"c": 3}, token_ids=[1]))
    names = table(path).schema.names
    assert names[:5] == ["id", "index", "b", "a", "c"]
    assert names[5:] == [
        "text", "finish_reason", "stop_reason", "usage", "logprobs", "token_ids", "error",
    ]  # fmt: skip


def test_ids_are_integers_where_all_are_and_text_otherwise(write):
    ids = table(write(row(0, id=5), row(1, id=6))).column("id").to_pylist()
    assert ids == [5, 6]
    ids = table(write(row(0, id=5), row(1, id="a"), row(2, id=None))).column("id").to_pylist()
    assert ids == ["5", "a", None]


def test_numbers_that_no_column_holds_keep_their_text(write):
    line = b'{"id":"a","index":0,"x":123456789012345678901234567890,"y":1e400}\n'
    path = write(decode_row(line))
    held = table(path).to_pylist()[0]
    assert (held["x"], held["y"]) == ("123456789012345678901234567890", "1e400")
    assert b'"x":123456789012345678901234567890,"y":1e400' in next(read_parquet(str(path)))


def test_json_text_of_an_output_is_a_value_again_in_an_input(write):
    values = ["a", 5, {"k": [1]}, None]
    path = write(*(row(index, {"x": value}) for index, value in enumerate(values)))
    records = Inputs([str(path)]).records()
    assert [record.columns["x"] for record in records] == values


def test_lines_of_batch_files_are_stored_by_their_own_fields(write):
    response = {"status_code": 200, "request_id": "q", "body": {"choices": [{"text": "a"}]}}
    line = {"id": "vllm-0-0123456789abcdef", "custom_id": "a", "response": response, "error": None}
    failed = {**line, "error": {"error": {"message": "bad"}}}
    path = write(line, failed)
    assert table(path).schema.names == ["id", "custom_id", "response", "error"]
    assert [json.loads(row) for row in read_parquet(str(path))] == [line, failed]


def test_no_rows_are_a_table_without_rows(write):
    assert table(write()).num_rows == 0


def test_row_groups_and_memory_are_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr(parquet, "ROW_GROUP_BYTES", 20_000)
    file = OutputFile.open(str(tmp_path / "out.parquet"), overwrite=True)
    tracemalloc.start()
    write_parquet(file, lambda: (encode_row(row(index)) for index in range(5000)))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    file.close()
    assert peak < 3_000_000
    with pyarrow.parquet.ParquetFile(tmp_path / "out.parquet") as written:
        assert written.metadata.num_row_groups > 20
        assert written.metadata.num_rows == 5000


def test_a_file_that_is_no_parquet_is_named(tmp_path):
    path = tmp_path / "out.parquet"
    path.write_bytes(b"PAR1 and no more")
    with pytest.raises(UsageError, match=r"out\.parquet: is not a whole parquet file"):
        list(read_parquet(str(path)))


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=12,
)


@given(values=st.lists(JSON_VALUES, min_size=1, max_size=6))
@settings(max_examples=60)
def test_every_column_comes_back_as_it_was(tmp_path_factory, values):
    path = tmp_path_factory.mktemp("any") / "out.parquet"
    lines = [encode_row(row(index, {"x": value})) for index, value in enumerate(values)]
    file = OutputFile.open(str(path), overwrite=True)
    write_parquet(file, lambda: iter(lines))
    file.close()
    back = [decode_row(line).get("x") for line in read_parquet(str(path))]
    assert back == [decode_row(line)["x"] for line in lines]


@given(first=JSON_VALUES, second=JSON_VALUES)
def test_the_common_type_does_not_depend_on_the_order(first, second):
    one, other = type_of(first), type_of(second)
    assert str_of(common_type(one, other)) == str_of(common_type(other, one))
    assert common_type(one, one) == one


def str_of(kind):
    """Return a type with the keys of its objects sorted."""
    if isinstance(kind, str):
        return kind
    if isinstance(kind, list):
        return f"[{str_of(kind[0])}]"
    return sorted((name, str_of(held)) for name, held in kind.items())
