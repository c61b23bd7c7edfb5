from __future__ import annotations

import pytest

from cbgen.generation.check import FieldError, check_generation_fields
from cbgen.generation.fields import (
    GENERATION_FIELDS,
    LIBRARY_FIELDS,
    Support,
)


def refusal(**values: object) -> FieldError:
    with pytest.raises(FieldError) as caught:
        check_generation_fields(values)
    return caught.value


@pytest.fixture(scope="module")
def library_class():
    return pytest.importorskip("transformers").GenerationConfig


def test_the_table_holds_exactly_the_fields_of_the_library(library_class):
    fields = {name for name in vars(library_class()) if not name.startswith("_")}
    assert set(LIBRARY_FIELDS) == fields


def test_the_defaults_of_the_library_are_accepted(library_class):
    check_generation_fields(library_class._get_default_generation_params())


def test_what_the_library_writes_for_a_model_is_accepted(library_class):
    config = library_class(eos_token_id=[1, 2], pad_token_id=0, temperature=0.6, do_sample=True)
    checked = check_generation_fields(config.to_dict())
    assert checked["eos_token_id"] == [1, 2]


@pytest.mark.parametrize("name", sorted(GENERATION_FIELDS))
def test_null_means_unset_for_every_field(name):
    assert check_generation_fields({name: None}) == {}


def test_neutral_values_are_accepted_and_kept():
    assert check_generation_fields({"repetition_penalty": 1, "num_beams": 1}) == {
        "repetition_penalty": 1.0,
        "num_beams": 1,
    }


def test_an_integer_becomes_a_float_where_one_is_wanted():
    checked = check_generation_fields({"temperature": 1, "top_p": 1})
    assert all(type(value) is float for value in checked.values())


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"temperature": -1}, "temperature must be at least 0 and at most 1000000, got -1"),
        (
            {"temperature": float("nan")},
            "temperature: expected a number, got NaN, which is not finite",
        ),
        ({"temperature": True}, "temperature: expected a number, got true"),
        ({"top_k": -1}, "top_k must be at least 0, got -1"),
        ({"top_k": 2.5}, "top_k: expected an integer, got 2.5"),
        ({"top_p": 0}, "top_p must be above 0 and at most 1, got 0"),
        ({"min_p": 1.5}, "min_p must be at least 0 and at most 1, got 1.5"),
        ({"max_new_tokens": 0}, "max_new_tokens must be at least 1, got 0"),
        ({"max_new_tokens": "9"}, 'max_new_tokens: expected an integer, got "9"'),
        ({"eos_token_id": [2, -1]}, "eos_token_id must be at least 0, got [2, -1]"),
        (
            {"eos_token_id": "</s>"},
            'eos_token_id: expected an integer or a list (each an integer), got "</s>"',
        ),
        ({"stop_token_ids": 3}, "stop_token_ids: expected a list (each an integer), got 3"),
        ({"do_sample": "yes"}, 'do_sample: expected true or false, got "yes"'),
        (
            {"num_beams": 4},
            "num_beams = 4 is not supported; remove it (accepted: 1 or null)",
        ),
        ({"num_beams": "4"}, 'num_beams = "4" is not supported; remove it (accepted: 1 or null)'),
        ({"repetition_penalty": 0}, "repetition_penalty must be above 0, got 0"),
        ({"stop_strings": [""]}, 'stop_strings must hold texts that are not empty, got [""]'),
        (
            {"stop_strings": 3},
            "stop_strings: expected text or a list (each text), got 3; put text in quotes",
        ),
        ({"json_schema": {}}, "json_schema = {} is not supported; remove it"),
        ({"thinking": {"budget": 1}}, 'thinking = {"budget": 1} is not supported; remove it'),
        ({"topk": 3}, "topk is not a known field (value 3); did you mean top_k?"),
        (
            {"max_tokens": 9},
            "max_tokens is not a known field (value 9); did you mean max_new_tokens?",
        ),
        ({"stop": "x"}, 'stop is not a known field (value "x"); did you mean stop_strings?'),
        ({"qqq": 1}, "qqq is not a known field (value 1)"),
        (
            {"do_sample": False, "temperature": 0.7},
            "do_sample = false contradicts temperature = 0.7; remove one",
        ),
        (
            {"num_return_sequences": 0},
            "num_return_sequences must be at least 1 and at most 128, got 0",
        ),
        (
            {"num_return_sequences": 3, "do_sample": False},
            "num_return_sequences = 3 asks for different answers, and greedy decoding has only "
            "one; set a temperature above 0 or do_sample: true, or num_return_sequences: 1",
        ),
    ],
)
def test_a_refusal_names_field_and_value(values, message):
    error = refusal(**values)
    assert str(error) == message
    assert error.field in values


@pytest.mark.parametrize("temperature", [0, 1, None])
def test_greedy_beside_a_neutral_temperature_is_accepted(temperature):
    check_generation_fields({"do_sample": False, "temperature": temperature})


@pytest.mark.parametrize("greedy", [{"do_sample": False}, {"do_sample": True, "temperature": 0}])
def test_samples_without_sampling_are_refused_as_the_library_refuses_them(greedy):
    assert refusal(num_return_sequences=2, **greedy).field == "num_return_sequences"
    check_generation_fields({"num_return_sequences": 1, **greedy})


def test_no_message_names_a_place():
    for name, field in GENERATION_FIELDS.items():
        if field.support in (Support.NEUTRAL, Support.REFUSED):
            assert "recipe" not in str(refusal(**{name: {"odd": "value"}}))


def test_what_the_library_notes_for_itself_is_left_out():
    assert check_generation_fields({"_from_model_config": True}) == {}


def test_every_refusal_of_a_long_value_is_short():
    assert len(str(refusal(suppress_tokens=list(range(1000))))) < 250
