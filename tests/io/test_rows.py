from __future__ import annotations

import math

import orjson
import pytest

from cbgen.errors import RowError
from cbgen.io.json_values import encode_row
from cbgen.io.rows import (
    FIELDS,
    OUTPUT_FIELDS,
    OWN_COLUMNS,
    Answer,
    OutputRows,
    Sample,
    logprobs_object,
)
from tests.helpers.records import error_of, make_record, read_bytes

PROMPT_IDS = list(range(12))
SO = Sample(text="So.", finish_reason="stop", stop_reason="\n", generated_tokens=[1] * 8)
OR = Sample(text="Or", finish_reason="length", generated_tokens=[2, 3])
ANSWER = Answer(PROMPT_IDS, [SO])
FIELDS_AFTER_COLUMNS = ["text", "finish_reason", "stop_reason", "usage", "logprobs", "error"]


def carried(columns, selection="all") -> dict:
    """Return the columns that the output row of a record carries."""
    row = OutputRows(selection).answer(make_record(columns), ANSWER)
    return {name: value for name, value in row.items() if name not in OUTPUT_FIELDS}


def test_an_answer_has_the_fields_in_their_order():
    row = OutputRows().answer(make_record({"question": "Why?"}, id="q1"), ANSWER)
    assert encode_row(row) == (
        b'{"id":"q1","index":0,"question":"Why?","text":"So.","finish_reason":"stop",'
        b'"stop_reason":"\\n","usage":{"prompt_tokens":12,"completion_tokens":8},'
        b'"logprobs":null,"error":null}\n'
    )


def test_several_samples_stand_in_choices_in_place_of_the_flat_fields():
    answer = Answer(PROMPT_IDS, [SO, OR])
    row = OutputRows().answer(make_record({"question": "Why?"}, id="q1"), answer)
    assert encode_row(row) == (
        b'{"id":"q1","index":0,"question":"Why?","choices":['
        b'{"text":"So.","finish_reason":"stop","stop_reason":"\\n","logprobs":null},'
        b'{"text":"Or","finish_reason":"length","stop_reason":null,"logprobs":null}],'
        b'"usage":{"prompt_tokens":12,"completion_tokens":10},"error":null}\n'
    )


def test_each_choice_has_its_token_ids_and_the_row_those_of_the_prompt():
    samples = [
        Sample(text="a", finish_reason="stop", generated_tokens=[number]) for number in (4, 5)
    ]
    row = OutputRows(options={"token_ids"}).answer(make_record(), Answer([3], samples))
    assert [choice["token_ids"] for choice in row["choices"]] == [[4], [5]]
    assert row["prompt_token_ids"] == [3]
    assert list(row)[-1] == "error"


def test_a_failure_has_the_same_fields_with_its_error():
    error = RowError("prompt_too_long", "the prompt has 9 tokens", type="invalid_request")
    row = OutputRows().failure(make_record({"question": "Why?"}, id="q1"), error)
    assert list(row) == ["id", "index", "question", *FIELDS_AFTER_COLUMNS]
    assert row["text"] is None
    assert row["finish_reason"] == "error"
    assert row["error"] == {
        "type": "invalid_request",
        "code": "prompt_too_long",
        "message": "the prompt has 9 tokens",
    }


def test_a_line_that_could_not_be_read_gets_a_row_too():
    (record,) = read_bytes(b"nonsense\n")
    row = OutputRows().failure(record, error_of(record))
    assert (row["id"], row["index"]) == (None, 0)
    assert row["error"]["code"] == "invalid_json"


def test_every_input_line_gets_one_valid_row_even_if_all_fail():
    records = read_bytes(b"nonsense\n\xff\n[]\n{}\n")
    rows = [
        OutputRows().failure(record, record.error or RowError("no_prompt", "none"))
        for record in records
    ]
    assert [orjson.loads(encode_row(row))["index"] for row in rows] == [0, 1, 2, 3]


def test_token_ids_are_written_where_they_are_asked_for():
    sample = Sample(text="a", finish_reason="length", generated_tokens=[4, 5])
    row = OutputRows(options={"token_ids"}).answer(make_record(), Answer((3,), [sample]))
    assert (row["token_ids"], row["prompt_token_ids"]) == ([4, 5], [3])
    assert list(row)[-1] == "error"


def test_rows_and_parquet_columns_have_the_fields_of_the_one_table():
    row = OutputRows("none", options={"token_ids"}).answer(make_record(), ANSWER)
    assert list(row) == ["id", "index", *(field.name for field in FIELDS), "error"]
    assert set(OWN_COLUMNS) == {*row, "choices"} - {"id"}
    assert set(OWN_COLUMNS) <= OUTPUT_FIELDS


def test_all_carries_prompt_and_messages_but_no_ids_and_settings():
    columns = {
        "id": "a",
        "prompt": "p",
        "messages": [],
        "tools": [],
        "topic": None,
        "prompt_token_ids": [1],
        "input_ids": [1],
        "generation_config": {},
    }
    expected = {"prompt": "p", "messages": [], "tools": [], "topic": None}
    assert carried(columns) == expected


def test_none_carries_nothing():
    assert carried({"prompt": "p", "topic": "x"}, "none") == {}


def test_names_carry_those_columns_in_their_order():
    columns = {"id": "a", "prompt": "p", "input_ids": [1], "generation_config": {"seed": 1}}
    selection = ["generation_config", "input_ids", "absent", "id"]
    assert carried(columns, selection) == {"generation_config": {"seed": 1}, "input_ids": [1]}


@pytest.mark.parametrize("name", sorted(OUTPUT_FIELDS - {"id", "prompt_token_ids"}))
def test_a_column_named_like_an_output_field_is_renamed(name):
    assert carried({name: "mine"}) == {f"input_{name}": "mine"}


def test_a_new_name_that_is_taken_gets_another_prefix():
    columns = {"text": 1, "input_text": 2, "input_input_text": 3}
    assert carried(columns) == {
        "input_input_input_text": 1,
        "input_text": 2,
        "input_input_text": 3,
    }


def test_a_column_of_prompt_token_ids_that_was_asked_for_is_renamed():
    assert carried({"prompt_token_ids": [1]}, ["prompt_token_ids"]) == {
        "input_prompt_token_ids": [1]
    }


def test_a_renamed_column_is_reported_once(caplog):
    rows = OutputRows("all")
    for columns in ({"text": 1}, {"text": 2}, {"text": 3, "error": 4}, {"text": 5}):
        rows.answer(make_record(columns), ANSWER)
    assert [record.args for record in caplog.records] == [
        ("text", "input_text"),
        ("error", "input_error"),
    ]


def test_the_output_can_be_the_next_input():
    first = OutputRows().answer(make_record({"prompt": "p"}, id="a"), ANSWER)
    (record,) = read_bytes(encode_row(first))
    second = OutputRows().answer(record, ANSWER)
    assert second["id"] == "a"
    assert second["input_text"] == "So."
    assert second["prompt"] == "p"


def test_log_probabilities_that_are_not_finite_or_masked_are_null():
    result = logprobs_object(
        tokens=["a", "b", "c", "d"],
        token_ids=[1, 2, 3, 4],
        logprobs=[-0.5, -math.inf, math.nan, -3.4e38],
        top=[[("a", 1, -0.5), ("z", 9, -math.inf)], [], [], []],
    )
    assert result["logprobs"] == [-0.5, None, None, None]
    assert result["top"][0] == [
        {"token": "a", "token_id": 1, "logprob": -0.5},
        {"token": "z", "token_id": 9, "logprob": None},
    ]
