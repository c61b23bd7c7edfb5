from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cbgen.errors import RowError, UsageError
from cbgen.io.template import Template


def test_places_are_filled_from_the_columns():
    template = Template("Question: {question}\nAnswer in {language}:")
    columns = {"question": "Why?", "language": "French", "other": 1}
    assert template.render(columns) == "Question: Why?\nAnswer in French:"


def test_doubled_braces_are_literal():
    assert Template('{{"a": "{a}"}} {{}}').render({"a": "x"}) == '{"a": "x"} {}'


def test_values_are_not_filled_again():
    assert Template("{a}{b}").render({"a": "{b}", "b": "{a}"}) == "{b}{a}"


def test_a_template_without_places_is_its_text():
    assert Template("Write a poem.").render({}) == "Write a poem."


def test_column_names_may_hold_spaces_and_letters_of_any_script():
    assert Template("{Full Question} {größe}").render({"Full Question": "a", "größe": "b"}) == "a b"


@pytest.mark.parametrize(
    ("value", "text"),
    [(1, "1"), (1.5, "1.5"), (True, "true"), (["a", 1], '["a",1]'), (10**25, str(10**25))],
)
def test_values_that_are_no_strings_are_filled_in_as_json(value, text):
    assert Template("<{a}>").render({"a": value}) == f"<{text}>"


@pytest.mark.parametrize("value", [None, float("nan"), float("inf")])
def test_a_null_value_is_an_error_that_names_the_column(value):
    with pytest.raises(RowError, match="'a', which is null") as caught:
        Template("{a}").render({"a": value})
    assert caught.value.code == "null_column"


def test_a_missing_column_is_an_error_that_names_it_and_those_that_exist():
    with pytest.raises(RowError, match=r"'question'.*it has: id, prompt") as caught:
        Template("{question}").render({"id": 1, "prompt": "a"})
    assert caught.value.code == "missing_column"


@pytest.mark.parametrize(
    "place", ["a.b", "a[0]", "a!r", "a:>5", "a:", "", " a", "a ", "a.__class__", "0.b", "a\n"]
)
def test_a_place_that_is_more_than_a_name_is_refused(place):
    with pytest.raises(UsageError, match=r"prompt\.template"):
        Template("x {" + place + "} y")


@pytest.mark.parametrize(("text", "place"), [("a } b", 3), ("{", 1), ("ab{{{c", 5), ("{a{b}}", 1)])
def test_a_lone_brace_is_refused_with_its_place(text, place):
    with pytest.raises(UsageError, match=f"at character {place};"):
        Template(text)


def test_the_columns_of_a_template_are_known():
    assert Template("{b} {a} {{c}} {b}").columns == ["b", "a"]


@given(st.text())
def test_escaped_text_is_filled_in_as_it_is(text):
    assert Template(text.replace("{", "{{").replace("}", "}}")).render({}) == text
