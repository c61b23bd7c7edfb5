from __future__ import annotations

import logging

import pytest

from cbgen.io.dialects import parse_prompt, with_dialect
from cbgen.io.ids import IdIndex
from cbgen.io.openai import requests as openai_requests
from cbgen.io.openai.body_fields import BodyError
from cbgen.io.prompts import Prompt
from tests.helpers.batch_files import USER, chat_line, completion_line, line_record
from tests.helpers.records import error_of, make_record, read_bytes


def parse(columns, input_format="openai") -> Prompt:
    return parse_prompt(line_record(columns, input_format), template=None)


def refusal(columns, input_format="openai") -> BodyError:
    with pytest.raises(BodyError) as caught:
        parse(columns, input_format)
    return caught.value


def changed(line, **members):
    return {**line, **members}


def without(line, name):
    return {key: value for key, value in line.items() if key != name}


@pytest.mark.parametrize(
    ("input_format", "dialect"),
    [("auto", "openai"), ("openai", "openai"), ("vllm", "vllm"), ("cbgen", None)],
)
def test_a_batch_line_has_the_dialect_of_the_format(input_format, dialect):
    record = line_record(chat_line("q1"), input_format)
    assert record.dialect == dialect
    assert record.id == ("q1" if dialect else 0)


@pytest.mark.parametrize("name", ["custom_id", "method", "url", "body"])
def test_auto_takes_a_row_without_all_four_fields_as_an_ordinary_one(name):
    assert line_record(without(chat_line(), name), "auto").dialect is None


@pytest.mark.parametrize("input_format", ["openai", "vllm"])
def test_a_named_format_takes_every_row_as_a_line_of_a_batch(input_format):
    record = line_record({"prompt": "Hi"}, input_format)
    assert record.dialect == input_format
    assert error_of(record).code == "invalid_custom_id"


def test_a_line_that_cannot_be_read_gets_the_named_dialect():
    (record,) = read_bytes(b"nonsense")
    assert with_dialect(record, "vllm").dialect == "vllm"
    assert with_dialect(record, "auto") is record


@pytest.mark.parametrize("custom_id", [7, None, ["a"], True])
def test_a_custom_id_that_is_no_string_is_an_error_of_the_line(custom_id):
    record = line_record(chat_line(custom_id))
    assert record.id is None
    assert "custom_id" in error_of(record).message


def test_the_custom_id_stands_in_place_of_a_bad_id():
    (record,) = read_bytes(
        b'{"id": [], "custom_id": "a", "method": "POST", "url": "u", "body": {}}\n'
    )
    record = with_dialect(record, "auto")
    assert (record.id, record.error) == ("a", None)


def test_a_repeated_custom_id_names_both_lines():
    ids = IdIndex()
    ids.admit(line_record(chat_line("a"), line=3))
    error = error_of(ids.admit(line_record(chat_line("a"), index=1, line=9)))
    assert error.code == "duplicate_id"
    assert "in.jsonl:9: custom_id 'a' was used already at in.jsonl:3" in error.message


def test_a_batch_line_read_as_a_row_names_the_remedy():
    with pytest.raises(Exception, match="--format auto") as caught:
        parse(chat_line(), "cbgen")
    assert caught.value.code == "no_prompt"


def test_a_row_that_lacks_a_field_of_a_batch_line_names_it():
    with pytest.raises(Exception, match="needs method and url"):
        parse({"custom_id": "a", "body": {}}, "auto")


@pytest.mark.parametrize(
    ("columns", "code", "param"),
    [
        (without(chat_line(), "method"), "missing_required_parameter", "method"),
        (changed(chat_line(), method="GET"), "invalid_method", "method"),
        (changed(chat_line(), method=1), "invalid_type", "method"),
        (without(chat_line(), "url"), "missing_required_parameter", "url"),
        (changed(chat_line(), url="/v1/embeddings"), "invalid_url", "url"),
        (changed(chat_line(), body="Hi"), "invalid_type", "body"),
        (changed(chat_line(), body=None), "missing_required_parameter", "body"),
        (changed(chat_line(), body={}), "missing_required_parameter", "messages"),
        (changed(completion_line(), body={}), "missing_required_parameter", "prompt"),
        (chat_line(messages=[]), "invalid_messages", "messages"),
        (chat_line(messages=[{"role": "user"}]), "invalid_messages", "messages"),
        (chat_line(tools={}), "invalid_tools", "tools"),
        (chat_line(tools=[]), "invalid_value", "tools"),
        (chat_line(stream=True), "unsupported_value", "stream"),
        (chat_line(n=129), "invalid_value", "n"),
        (chat_line(temperature="hot"), "invalid_type", "temperature"),
        (chat_line(temperature=-1), "invalid_value", "temperature"),
        (chat_line(max_tokens=0), "invalid_value", "max_tokens"),
        (chat_line(max_completion_tokens=True), "invalid_type", "max_completion_tokens"),
        (chat_line(truncate_prompt_tokens=0), "invalid_value", "truncate_prompt_tokens"),
        (chat_line(truncation_side="middle"), "invalid_value", "truncation_side"),
        (chat_line(reasoning_effort="huge"), "invalid_value", "reasoning_effort"),
        (
            chat_line(add_generation_prompt=True, continue_final_message=True),
            "invalid_value",
            "continue_final_message",
        ),
        (completion_line(prompt=["a", "b"]), "unsupported_value", "prompt"),
        (completion_line(prompt=[[1], [2]]), "unsupported_value", "prompt"),
        (completion_line(prompt=[]), "invalid_type", "prompt"),
        (completion_line(prompt=[1, -2]), "invalid_type", "prompt"),
        (completion_line(prompt={"a": 1}), "invalid_type", "prompt"),
        (completion_line(logprobs=2), "unsupported_value", "logprobs"),
        (completion_line(prompt=[1], echo=True), "unsupported_value", "echo"),
        (completion_line(logprobs=0, echo=True), "unsupported_value", "echo"),
        (completion_line(truncate_prompt_tokens=5, echo=True), "unsupported_value", "echo"),
    ],
)
@pytest.mark.parametrize("input_format", ["openai", "vllm"])
def test_a_wrong_request_is_refused_with_the_field(columns, code, param, input_format):
    error = refusal(columns, input_format)
    assert (error.code, error.param) == (code, param)
    assert param in error.message


def test_an_unknown_field_is_refused_by_openai_and_ignored_by_vllm(caplog):
    openai_requests._tell_ignored.cache_clear()
    line = chat_line(temprature=0.5)
    assert refusal(line).code == "unknown_parameter"
    with caplog.at_level(logging.WARNING, logger="cbgen.io.openai.requests"):
        assert parse(line, "vllm").messages is not None
        parse(line, "vllm")
    assert [record.getMessage() for record in caplog.records] == [
        "field 'temprature' is not one of /v1/chat/completions and is ignored"
    ]


def test_a_chat_request_is_messages_with_its_tools():
    tools = [{"type": "function", "function": {"name": "f"}}]
    prompt = parse(chat_line(tools=tools))
    assert (prompt.messages, prompt.tools) == ([USER], tools)


def test_tools_are_left_out_where_none_may_be_called():
    assert parse(chat_line(tools=[{"type": "function"}], tool_choice="none")).tools is None


@pytest.mark.parametrize("prompt", ["Hi", ["Hi"]])
def test_a_completion_of_text_is_never_sent_as_chat(prompt):
    parsed = parse(completion_line(prompt=prompt))
    assert parsed.text == "Hi"
    assert parsed.rendering.is_plain


@pytest.mark.parametrize("prompt", [[1, 2], [[1, 2]]])
def test_a_completion_may_have_token_ids(prompt):
    parsed = parse(completion_line(prompt=prompt))
    assert parsed.prompt_ids == [1, 2]


@pytest.mark.parametrize("make", [chat_line, completion_line])
def test_settings_get_the_names_of_a_generation_config(make):
    line = make(
        temperature=0.5,
        top_p=0.9,
        top_k=7,
        min_p=0.1,
        max_tokens=5,
        seed=3,
        stop_token_ids=[4],
        ignore_eos=True,
        skip_special_tokens=False,
    )
    assert parse(line).generation_config == {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 7,
        "min_p": 0.1,
        "max_new_tokens": 5,
        "seed": 3,
        "stop_token_ids": [4],
        "ignore_eos": True,
        "skip_special_tokens": False,
    }


@pytest.mark.parametrize(
    ("given", "setting"),
    [
        ({"max_tokens": 5, "max_completion_tokens": 9}, {"max_new_tokens": 9}),
        ({"max_completion_tokens": 9, "max_tokens": 5}, {"max_new_tokens": 9}),
        ({"max_tokens": 5.0}, {"max_new_tokens": 5}),
        ({"top_k": -1}, {"top_k": 0}),
        ({"seed": -1}, {"seed": 2**63 - 1}),
        ({"temperature": None, "top_p": None, "max_tokens": None, "seed": None}, {}),
    ],
)
def test_other_ways_to_write_a_setting(given, setting):
    assert parse(chat_line(**given)).generation_config == setting


def test_a_top_p_of_0_keeps_the_best_token_alone():
    assert 0 < parse(chat_line(top_p=0)).generation_config["top_p"] < 1e-6


@pytest.mark.parametrize(
    ("line", "wants"),
    [
        (chat_line(), None),
        (chat_line(logprobs=True), True),
        (chat_line(logprobs=False), False),
        (completion_line(), None),
        (completion_line(logprobs=0), True),
    ],
)
def test_a_body_says_whether_it_wants_log_probabilities(line, wants):
    assert parse(line).logprobs is wants


def test_rendering_options_are_those_of_the_body():
    rendering = parse(
        chat_line(
            continue_final_message=True,
            add_special_tokens=True,
            chat_template_kwargs={"tone": "kind"},
            documents=[{"title": "t"}],
            reasoning_effort="none",
            truncate_prompt_tokens=8,
            truncation_side="right",
        )
    ).rendering
    assert (rendering.add_generation_prompt, rendering.continue_final_message) == (False, True)
    assert rendering.add_special_tokens is True
    assert rendering.chat_template_kwargs == {"tone": "kind"}
    assert rendering.variables == {
        "documents": {"documents": [{"title": "t"}]},
        "reasoning_effort": {"reasoning_effort": "none", "enable_thinking": False},
    }
    assert (rendering.truncate_to, rendering.truncation) == (8, "right")


def test_a_body_without_options_starts_a_new_answer():
    rendering = parse(chat_line()).rendering
    assert (rendering.add_generation_prompt, rendering.continue_final_message) == (True, False)
    assert rendering.add_special_tokens is None


def test_a_template_of_the_recipe_is_not_for_batch_lines():
    record = with_dialect(make_record(chat_line()), "auto")
    assert parse_prompt(record, template=object()).messages is not None
