from __future__ import annotations

import pytest

from cbgen.errors import RowError
from cbgen.io.dialects import parse_prompt
from cbgen.io.prompts import Prompt
from cbgen.io.template import Template
from tests.helpers.records import make_record, read_bytes

USER = {"role": "user", "content": "Hi"}


def parse(columns, template=None) -> Prompt:
    return parse_prompt(make_record(columns), template=template)


def refusal(columns, template=None) -> RowError:
    with pytest.raises(RowError) as caught:
        parse(columns, template)
    return caught.value


def test_a_prompt_is_text():
    assert parse({"prompt": "Hello", "topic": "x"}) == Prompt(text="Hello")


def test_an_empty_prompt_is_left_to_the_job():
    assert parse({"prompt": ""}) == Prompt(text="")


def test_messages_are_taken_with_their_tools():
    tools = [{"type": "function", "function": {"name": "f"}}]
    prompt = parse({"messages": [USER], "tools": tools})
    assert prompt == Prompt(messages=[USER], tools=tools)


@pytest.mark.parametrize("name", ["prompt_token_ids", "input_ids"])
def test_token_ids_go_by_two_names(name):
    assert parse({name: [0, 5, 7]}) == Prompt(prompt_ids=[0, 5, 7])


def test_a_template_makes_the_prompt_from_the_columns():
    prompt = parse({"question": "Why?", "messages": "a column"}, Template("Q: {question}"))
    assert prompt == Prompt(text="Q: Why?")


@pytest.mark.parametrize(
    "columns", [{"prompt": "a"}, {"messages": [USER]}, {"input_ids": [1]}, {"question": "a"}]
)
def test_every_form_may_hold_a_generation_config(columns):
    template = Template("{question}") if "question" in columns else None
    prompt = parse({**columns, "generation_config": {"seed": 3}}, template)
    assert prompt.generation_config == {"seed": 3}


@pytest.mark.parametrize("value", [[], "greedy", 1])
def test_a_generation_config_that_is_no_object_is_refused(value):
    error = refusal({"prompt": "a", "generation_config": value})
    assert error.code == "invalid_generation_config"


def test_null_fields_count_as_absent():
    columns = {"prompt": "a", "messages": None, "generation_config": None, "continuation": None}
    assert parse(columns) == Prompt(text="a")


@pytest.mark.parametrize("columns", [{}, {"prompt": None}, {"question": "Why?"}])
def test_a_row_without_a_form_is_refused(columns):
    assert refusal(columns).code == "no_prompt"


def test_the_refusal_of_a_row_without_a_form_names_its_columns():
    assert "question, answer" in refusal({"question": "Why?", "answer": "So."}).message


def test_two_forms_are_refused_by_name():
    error = refusal({"prompt": "a", "messages": [USER]})
    assert error.code == "ambiguous_prompt"
    assert "prompt and messages" in error.message


@pytest.mark.parametrize("value", [1, ["a"], {"text": "a"}, True])
def test_a_prompt_that_is_no_string_is_refused(value):
    assert refusal({"prompt": value}).code == "invalid_prompt"


@pytest.mark.parametrize(
    ("messages", "place"),
    [
        ([], "messages must"),
        ("Hi", "messages must"),
        ({"role": "user"}, "messages must"),
        (["Hi"], "messages[0] must"),
        ([USER, {"content": "Hi"}], "messages[1].role"),
        ([{"role": 1, "content": "Hi"}], "messages[0].role"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "user", "content": None}], "messages[0].content"),
        ([{"role": "user", "content": 7}], "messages[0].content"),
        ([{"role": "user", "content": ["Hi"]}], "messages[0].content[0]"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
    ],
)
def test_messages_of_a_wrong_shape_are_refused_with_the_place(messages, place):
    error = refusal({"messages": messages})
    assert error.code == "invalid_messages"
    assert error.message.startswith(place)


def test_a_content_may_be_a_list_of_text_parts():
    messages = [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}]
    assert parse({"messages": messages}).messages == messages


def test_an_assistant_that_only_calls_tools_has_no_content():
    messages = [USER, {"role": "assistant", "content": None, "tool_calls": []}]
    assert parse({"messages": messages}).messages == messages


def test_a_part_that_is_no_text_is_not_supported():
    messages = [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]
    error = refusal({"messages": messages})
    assert error.code == "unsupported"
    assert "image_url" in error.message


@pytest.mark.parametrize("tools", [{}, "f", ["f"]])
def test_tools_of_a_wrong_shape_are_refused(tools):
    assert refusal({"messages": [USER], "tools": tools}).code == "invalid_tools"


@pytest.mark.parametrize("value", [[], "1 2", [1, -2], [1, True], [1.0], [[1]], {"a": 1}])
def test_token_ids_of_a_wrong_shape_are_refused(value):
    assert refusal({"prompt_token_ids": value}).code == "invalid_prompt_token_ids"


def test_a_long_value_is_cut_in_the_message():
    assert len(refusal({"prompt": ["a" * 1000]}).message) < 200


def test_a_continuation_is_not_supported_yet():
    assert refusal({"prompt": "a", "continuation": "b"}).code == "unsupported"


def test_a_record_with_an_error_raises_it():
    (record,) = read_bytes(b"nonsense")
    with pytest.raises(RowError) as caught:
        parse_prompt(record, template=None)
    assert caught.value is record.error
