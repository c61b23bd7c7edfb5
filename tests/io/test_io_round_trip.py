"""From input bytes to output bytes through every part of io, with answers made up."""

from __future__ import annotations

import json
import random

from hypothesis import given, settings
from hypothesis import strategies as st

from cbgen.errors import RowError
from cbgen.io.dialects import parse_prompt
from cbgen.io.ids import IdIndex
from cbgen.io.json_values import encode_row
from cbgen.io.output.writer import RowWriter
from cbgen.io.rows import OUTPUT_FIELDS, Answer, OutputRows, Sample
from tests.helpers.records import read_bytes

VALID_TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
COLUMN_NAMES = VALID_TEXT.filter(
    lambda name: name not in {*OUTPUT_FIELDS, "input_ids", "messages", "generation_config"}
)
FLOATS = st.floats(allow_nan=False, allow_infinity=False)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | VALID_TEXT | FLOATS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(VALID_TEXT, inner, max_size=3),
    max_leaves=6,
)
ROWS = st.lists(st.dictionaries(COLUMN_NAMES, VALUES, max_size=4), max_size=8)


def run(data: bytes, path, seed: int = 0) -> list[dict]:
    """Answer every row of an input with its own prompt, in a random order, and read the output."""
    index, output = IdIndex(), OutputRows()
    records = [index.admit(record) for record in read_bytes(data)]
    random.Random(seed).shuffle(records)
    with RowWriter(str(path)) as rows:
        for record in records:
            try:
                text = parse_prompt(record, template=None).text
                sample = Sample(text=text, finish_reason="stop", generated_tokens=[2])
                row = output.answer(record, Answer([1], [sample]))
            except RowError as error:
                row = output.failure(record, error)
            rows.write(record.index, encode_row(row))
    lines = path.read_bytes().splitlines(keepends=True)
    assert all(line.endswith(b"\n") for line in lines)
    return [json.loads(line) for line in path.read_text("utf-8").split("\n")[:-1]]


@given(rows=ROWS, seed=st.integers(0, 100))
@settings(max_examples=60)
def test_each_column_of_each_row_keeps_its_value(tmp_path_factory, rows, seed):
    path = tmp_path_factory.mktemp("out") / "out.jsonl"
    data = b"".join(json.dumps(row).encode() + b"\n" for row in rows)
    for index, (row, written) in enumerate(zip(rows, run(data, path, seed), strict=True)):
        assert written["index"] == index
        carried = {name: value for name, value in written.items() if name not in OUTPUT_FIELDS}
        assert carried == row


@given(data=st.lists(st.binary(max_size=30)).map(b"\n".join))
@settings(max_examples=60)
def test_any_input_gives_one_row_for_each_line_in_order(tmp_path_factory, data):
    rows = run(data, tmp_path_factory.mktemp("out") / "out.jsonl")
    assert [row["index"] for row in rows] == list(range(len(read_bytes(data))))


def test_one_bad_row_is_answered_among_the_good_ones(tmp_path):
    data = b'{"id":"a","prompt":"A"}\n{"id":"b","prompt":"\\ud800"}\n{"id":"c","prompt":"C"}\n'
    rows = run(data, tmp_path / "out.jsonl")
    assert [(row["id"], row["text"]) for row in rows] == [("a", "A"), (None, None), ("c", "C")]
    assert rows[1]["error"]["code"] == "lone_surrogate"


def test_ids_stay_with_their_rows_when_answers_come_in_any_order(tmp_path):
    data = b"".join(b'{"id":"q%d","prompt":"p%d"}\n' % (n, n) for n in range(200))
    rows = run(data, tmp_path / "out.jsonl", seed=3)
    assert [(row["id"], row["text"]) for row in rows] == [(f"q{n}", f"p{n}") for n in range(200)]


def test_if_every_row_fails_every_row_is_there(tmp_path):
    rows = run(b'nonsense\n{"id":"a"}\n{"id":"a","prompt":"p"}\n', tmp_path / "out.jsonl")
    assert [row["error"]["code"] for row in rows] == ["invalid_json", "no_prompt", "duplicate_id"]
    assert [row["id"] for row in rows] == [None, "a", "a"]


def test_a_column_with_nan_is_carried_as_null(tmp_path):
    (row,) = run(b'{"prompt":"a","score":NaN}\n', tmp_path / "out.jsonl")
    assert (row["text"], row["score"]) == ("a", None)


def test_a_large_integer_arrives_with_all_its_digits(tmp_path):
    number = 2**64 + 1
    (row,) = run(b'{"prompt":"a","id":%d,"user":%d}' % (number, number), tmp_path / "out.jsonl")
    assert (row["id"], row["user"]) == (number, number)
