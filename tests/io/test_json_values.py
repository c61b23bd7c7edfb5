from __future__ import annotations

import json
import math
import sys

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cbgen.errors import RowError
from cbgen.io.json_values import MAX_DEPTH, ExactFloat, decode_row, encode_row, encode_value

VALID_TEXT = st.text(st.characters(exclude_categories=["Cs"]))
JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | VALID_TEXT | st.floats(allow_nan=False),
    lambda inner: st.lists(inner) | st.dictionaries(VALID_TEXT, inner),
    max_leaves=10,
)
ROWS = st.dictionaries(VALID_TEXT, JSON_VALUES)


def round_trip(line: bytes) -> bytes:
    return encode_row(decode_row(line)).removesuffix(b"\n")


def encodes_fast(row) -> bool:
    """Whether orjson takes a row as it is: no integer is beyond 64 bits, no float infinite."""
    try:
        return orjson.loads(orjson.dumps(row)) == row
    except TypeError:
        return False


def nested(depth: int) -> bytes:
    """Return a row with this many levels, its own included."""
    return b'{"prompt":' + b"[" * (depth - 1) + b"]" * (depth - 1) + b"}"


@given(ROWS.filter(lambda row: "Infinity" not in json.dumps(row)), st.booleans())
def test_a_row_comes_back_with_the_same_values(row, ascii_only):
    line = json.dumps(row, ensure_ascii=ascii_only).encode()
    assert json.loads(round_trip(line)) == row


@given(ROWS)
def test_what_is_written_can_be_read_again_and_stays(row):
    line = encode_row(row)
    assert line.count(b"\n") == 1
    assert encode_row(decode_row(line)) == line


@given(st.dictionaries(st.text(), st.text() | st.floats() | st.integers()))
def test_a_row_of_any_values_is_valid_json_on_one_line(row):
    line = encode_row(row)
    assert line.endswith(b"\n")
    assert line.count(b"\n") == 1
    json.loads(line.decode("utf-8"), parse_constant=pytest.fail)


@given(st.integers(min_value=-(10**60), max_value=10**60))
def test_integers_of_any_size_keep_their_text(number):
    line = f'{{"id":{number},"deep":[{{"a":{number}}}]}}'.encode()
    assert round_trip(line) == line


@pytest.mark.parametrize("number", [2**63 - 1, 2**63, 2**64 - 1, 2**64, -(2**63), -(2**63) - 1])
def test_integers_at_the_border_of_64_bits_keep_their_text(number):
    line = f'{{"a":{number}}}'.encode()
    assert round_trip(line) == line


@pytest.mark.parametrize("text", ["1e400", "-1E+999", "0.1000000000000000055"])
def test_a_float_that_a_double_cannot_hold_keeps_its_text(text):
    line = f'{{"a":{text}}}'.encode()
    assert round_trip(line) == line


def test_a_float_beyond_doubles_counts_as_infinite():
    value = decode_row(b'{"a":1e400}')["a"]
    assert isinstance(value, ExactFloat)
    assert math.isinf(value)


@given(ROWS.filter(encodes_fast))
def test_both_parsers_read_the_same(row):
    big = orjson.Fragment("9" * 30)  # sends the line through the exact parser
    assert decode_row(orjson.dumps({"row": row, "big": big}))["row"] == row


@pytest.mark.parametrize("text", ["NaN", "Infinity", "-Infinity"])
def test_nan_and_infinity_are_read_and_written_as_null(text):
    line = f'{{"prompt":"a","score":{text}}}'.encode()
    assert round_trip(line) == b'{"prompt":"a","score":null}'


def test_of_a_key_that_occurs_twice_the_last_value_counts():
    assert decode_row(b'{"a":1,"a":2}') == {"a": 2}
    assert decode_row(b'{"a":1,"a":NaN,"a":2}') == {"a": 2}


@pytest.mark.parametrize(
    "line",
    [
        rb'{"text":"\ud800"}',
        rb'{"text":["\udc00\ud800"]}',
        rb'{"text":{"\ud83d":1}}',
        rb'{"text":10000000000000000000000,"text":"\uDFFF"}',
    ],
)
def test_a_lone_surrogate_is_an_error_that_names_the_column(line):
    with pytest.raises(RowError, match="'text'") as caught:
        decode_row(line)
    assert caught.value.code == "lone_surrogate"


def test_a_surrogate_pair_is_a_character():
    assert decode_row(rb'{"a":"\ud83d\ude00"}') == {"a": "\U0001f600"}
    assert decode_row(rb'{"a":"\ud83d\ude00","b":NaN}')["a"] == "\U0001f600"


def test_a_lone_surrogate_is_written_as_the_replacement_character():
    row = {"text": "a\ud800b", "\udfff": ["\ud83d\ude00", "\udc00\ud800"]}
    expected = {"text": "a\ufffdb", "\ufffd": ["\U0001f600", "\ufffd\ufffd"]}
    assert orjson.loads(encode_row(row)) == expected


def test_keys_that_are_no_strings_are_written_as_json_does():
    assert encode_row({2: "a", None: "b", True: "c"}) == b'{"2":"a","null":"b","true":"c"}\n'


def test_a_value_without_a_json_form_is_named():
    with pytest.raises(TypeError, match="complex"):
        encode_row({"a": 1j})


def test_a_row_may_be_nested_as_deep_as_the_limit_and_is_written_again():
    line = nested(MAX_DEPTH)
    assert round_trip(line) == line


@pytest.mark.parametrize("depth", [MAX_DEPTH + 1, 900, 1100, 100_000])
@pytest.mark.parametrize("extra", [b"", b'"a":NaN,', b'"a":10000000000000000000000,'])
def test_a_row_that_is_nested_deeper_is_an_error(depth, extra):
    line = nested(depth).replace(b"{", b"{" + extra)
    with pytest.raises(RowError) as caught:
        decode_row(line)
    assert caught.value.code == "nested_too_deeply"


def test_many_brackets_that_are_not_nested_are_no_depth():
    line = b'{"a":' + orjson.dumps(["{[" * 500, [[]] * 500]) + b"}"
    assert round_trip(line) == line


def test_an_integer_that_python_refuses_to_read_is_an_error():
    digits = b"9" * (sys.get_int_max_str_digits() + 1)
    with pytest.raises(RowError, match="write it as a string"):
        decode_row(b'{"a":' + digits + b"}")


def test_a_row_is_one_line_for_readers_that_know_other_line_ends():
    row = {"text": "".join(map(chr, range(0x3000))), "\u2028key": ["\x85"]}
    line = encode_row(row)
    assert len(line.decode().splitlines()) == 1
    assert orjson.loads(line) == row


def test_a_value_alone_is_compact_json():
    assert encode_value([1, 2.5, "é", 10**30]) == '[1,2.5,"é",1000000000000000000000000000000]'
