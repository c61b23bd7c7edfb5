from __future__ import annotations

import math

import pytest
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_create_params

from cbgen.generation.check import check_generation_fields
from cbgen.generation.fields import GENERATION_FIELDS
from cbgen.io.openai.fields import (
    CHAT_FIELDS,
    COMPLETION_FIELDS,
    BodyError,
    Honoured,
    Neutral,
    read_fields,
)
from tests.helpers.sources import ROOT

BOTH = {**CHAT_FIELDS, **COMPLETION_FIELDS}


@pytest.mark.parametrize(
    ("params", "fields"),
    [
        (chat_create_params.CompletionCreateParamsNonStreaming, CHAT_FIELDS),
        (completion_create_params.CompletionCreateParamsNonStreaming, COMPLETION_FIELDS),
    ],
)
def test_every_field_of_the_openai_package_is_known(params, fields):
    given = params.__required_keys__ | params.__optional_keys__
    assert given - fields.keys() == set()


@pytest.mark.parametrize("fields", [CHAT_FIELDS, COMPLETION_FIELDS])
def test_null_counts_as_absent_for_every_field(fields):
    assert read_fields(fields, dict.fromkeys(fields)) == ({}, [])


@pytest.mark.parametrize("name", [name for name, rule in BOTH.items() if isinstance(rule, Neutral)])
def test_what_is_not_supported_is_refused_by_name_and_accepted_where_it_asks_for_nothing(name):
    rule = BOTH[name]
    for value in rule.values:
        rule.check(name, value)
    with pytest.raises(BodyError, match=f"^{name} = ") as caught:
        rule.check(name, {"something": "else"})
    assert caught.value.param == name


def test_every_setting_is_a_field_of_a_generation_config():
    settings = {rule.setting for rule in BOTH.values() if isinstance(rule, Honoured)} - {None}
    assert settings <= GENERATION_FIELDS.keys()


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
    ],
)
def test_the_limits_are_within_those_of_a_generation_config(name, value):
    rule = BOTH[name]
    check_generation_fields({rule.setting: rule.check(name, value)})


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
    ],
)
def test_wrong_kinds_and_values_are_refused(name, value):
    with pytest.raises(BodyError, match=f"^{name} "):
        BOTH[name].check(name, value)


def test_the_documentation_names_every_field_that_is_honoured_or_has_no_effect():
    page = (ROOT / "docs" / "openai-batch.md").read_text(encoding="utf-8")
    named = {name for name, rule in BOTH.items() if not isinstance(rule, Neutral)}
    assert [name for name in sorted(named) if f"`{name}`" not in page] == []


def test_a_refusal_shows_values_as_json():
    with pytest.raises(BodyError) as caught:
        BOTH["stream"].check("stream", True)
    assert caught.value.message == (
        "stream = true is not supported; remove it (accepted: false or null)"
    )


def test_a_long_value_is_cut_in_the_message():
    with pytest.raises(BodyError) as caught:
        BOTH["stop"].check("stop", ["a" * 1000])
    assert len(caught.value.message) < 200
