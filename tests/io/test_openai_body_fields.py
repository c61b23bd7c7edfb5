from __future__ import annotations

import math

import pytest
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_create_params

from cbgen.generation.check import check_generation_fields
from cbgen.generation.fields import Support
from cbgen.io.openai.body_fields import CHAT_FIELDS, COMPLETION_FIELDS, BodyError, BodyFields
from tests.helpers.sources import ROOT

BOTH = CHAT_FIELDS.rules | COMPLETION_FIELDS.rules
NOT_SUPPORTED = (Support.NEUTRAL, Support.REFUSED)


def fields_with(name: str) -> BodyFields:
    return COMPLETION_FIELDS if name in COMPLETION_FIELDS.rules else CHAT_FIELDS


def read(name: str, value: object, dialect: str = "vllm"):
    return fields_with(name).read({name: value}, dialect)


@pytest.mark.parametrize(
    ("params", "fields"),
    [
        (chat_create_params.CompletionCreateParamsNonStreaming, CHAT_FIELDS),
        (completion_create_params.CompletionCreateParamsNonStreaming, COMPLETION_FIELDS),
    ],
)
def test_every_field_of_the_openai_package_is_known(params, fields):
    given = params.__required_keys__ | params.__optional_keys__
    assert given - fields.rules.keys() == set()


@pytest.mark.parametrize("fields", [CHAT_FIELDS, COMPLETION_FIELDS])
def test_null_counts_as_absent_for_every_field(fields):
    values = fields.read(dict.fromkeys(fields.rules), "openai")
    assert (values.own, values.settings, values.unknown) == ({}, {}, [])


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        (fields, name)
        for fields in (CHAT_FIELDS, COMPLETION_FIELDS)
        for name, rule in fields.rules.items()
        if rule.support in NOT_SUPPORTED
    ],
)
def test_what_is_not_supported_is_refused_by_name_and_accepted_where_it_asks_for_nothing(
    fields, name
):
    for value in fields.rules[name].neutral:
        assert not fields.read({name: value}, "openai").settings
    with pytest.raises(BodyError, match=f"^{name} = ") as caught:
        fields.read({name: {"something": "else"}}, "openai")
    assert caught.value.param == name


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", 1e6),
        ("temperature", 0),
        ("top_p", 1),
        ("min_p", 1),
        ("min_p", 0),
        ("top_k", 10**30),
        ("max_tokens", 10**30),
        ("n", 1),
        ("n", 128),
        ("stop_token_ids", [0, 10**30]),
        ("stop", "."),
        ("stop", [str(number) for number in range(9)]),
        ("repetition_penalty", 1.3),
        ("top_k", -1),
        ("top_p", 0),
        ("seed", -(2**63)),
    ],
)
def test_the_limits_are_within_those_of_a_generation_config(name, value):
    settings = read(name, value).settings
    assert check_generation_fields(settings)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", True),
        ("temperature", math.inf),
        ("temperature", math.nan),
        ("top_k", 1.5),
        ("stop_token_ids", [True]),
        ("stop_token_ids", [1.0]),
        ("stop_token_ids", [-1]),
        ("seed", 2**63),
        ("ignore_eos", 1),
        ("model", 5),
        ("chat_template_kwargs", []),
        ("documents", ["a"]),
        ("n", True),
        ("n", 0),
        ("n", 129),
        ("n", 1.5),
        ("response_format", {"type": "json_object"}),
        ("tool_choice", "required"),
        ("stop", ""),
        ("stop", ["a", ""]),
        ("stop", 5),
        ("repetition_penalty", 0),
        ("truncation_side", "middle"),
    ],
)
def test_wrong_kinds_and_values_are_refused(name, value):
    with pytest.raises(BodyError, match=f"^{name} "):
        read(name, value)


def test_openais_api_takes_four_stop_texts_at_most():
    stop = list("abcde")
    assert read("stop", stop[:4], "openai").settings == {"stop_strings": stop[:4]}
    assert read("stop", stop, "vllm").settings == {"stop_strings": stop}
    with pytest.raises(BodyError, match=r"^stop holds 5 values.* at most 4.*--format vllm"):
        read("stop", stop, "openai")


def test_the_second_name_of_the_length_wins_in_any_order():
    for names in (["max_tokens", "max_completion_tokens"], ["max_completion_tokens", "max_tokens"]):
        body = {name: 1 + len(name) for name in names}
        assert CHAT_FIELDS.read(body, "openai").settings == {"max_new_tokens": 22}


def test_the_documentation_names_every_field_that_is_honoured_or_has_no_effect():
    page = (ROOT / "docs" / "openai-batch.md").read_text(encoding="utf-8")
    named = {name for name, rule in BOTH.items() if rule.support not in NOT_SUPPORTED}
    assert [name for name in sorted(named) if f"`{name}`" not in page] == []


def test_a_refusal_shows_values_as_json():
    with pytest.raises(BodyError) as caught:
        read("stream", True)
    assert caught.value.message == (
        "stream = true is not supported; remove it (accepted: false or null)"
    )


def test_a_long_value_is_cut_in_the_message():
    with pytest.raises(BodyError) as caught:
        read("bad_words", ["a" * 1000])
    assert len(caught.value.message) < 200
