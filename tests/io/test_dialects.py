"""What is known of a row that an earlier run wrote."""

from __future__ import annotations

import json

import pytest

from cbgen.io.dialects import read_outcome
from cbgen.io.rows import RowOutcome

USAGE = {"prompt_tokens": 3, "completion_tokens": 7}


def outcome(**fields) -> RowOutcome | None:
    return read_outcome(json.dumps({"index": 4, "usage": USAGE, "error": None, **fields}).encode())


def test_a_row_of_one_sample_ended_in_one_way():
    assert outcome(finish_reason="stop") == RowOutcome(4, ("stop",), None, 3, 7)


def test_a_row_of_several_samples_ended_in_the_way_of_each():
    choices = [{"finish_reason": reason} for reason in ("stop", "length", "stop")]
    expected = RowOutcome(4, ("stop", "length", "stop"), None, 3, 7)
    assert outcome(choices=choices) == expected
    assert outcome(choices=choices, finish_reason=None) == expected  # as a parquet file has it


def test_a_column_of_samples_may_be_empty_for_a_row():
    assert outcome(choices=None, finish_reason="length") == RowOutcome(4, ("length",), None, 3, 7)


@pytest.mark.parametrize(
    "fields", [{}, {"choices": []}, {"choices": 5}, {"choices": [{}]}, {"choices": ["stop"]}]
)
def test_a_line_that_does_not_say_how_it_ended_is_no_row(fields):
    assert outcome(**fields) is None


def test_a_failed_row_has_its_code():
    failed = outcome(finish_reason="error", error={"code": "no_prompt"})
    assert failed == RowOutcome(4, ("error",), "no_prompt")


def test_a_line_of_a_batch_file_ended_in_the_way_of_each_choice():
    choices = [{"finish_reason": "stop"}, {"finish_reason": "length"}]
    body = {"choices": choices, "usage": USAGE}
    line = {
        "id": f"batch_req_a_{'0' * 16}",
        "custom_id": "q",
        "response": {"status_code": 200, "body": body},
        "error": None,
    }
    expected = RowOutcome(10, ("stop", "length"), None, 3, 7)
    assert read_outcome(json.dumps(line).encode()) == expected
