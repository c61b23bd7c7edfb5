from __future__ import annotations

import pytest

from cbgen.engine.sampling.params import derive_seed
from cbgen.errors import RowError, UsageError
from cbgen.generation.resolve import GenerationSettings


def settings(*, model=None, recipe=None, eos=(2,), run_seed=0, logprobs=None):
    return GenerationSettings(
        model=model or {},
        recipe=recipe or {},
        eos_token_ids=frozenset(eos),
        run_seed=run_seed,
        logprobs=logprobs,
    )


def params(row=None, **levels):
    return settings(**levels).resolve("r", row).samples[0]


def test_nothing_given_is_greedy_and_off():
    assert params().is_greedy
    resolved = params()
    assert (resolved.top_k, resolved.top_p, resolved.min_p) == (0, 1.0, 0.0)
    assert resolved.max_new_tokens is None


@pytest.mark.parametrize(
    ("model", "recipe", "row", "temperature"),
    [
        ({"temperature": 0.6}, {}, None, 0.6),
        ({"do_sample": True, "temperature": 0.6}, {}, None, 0.6),
        ({"do_sample": True}, {}, None, 1.0),
        ({"do_sample": False, "temperature": 0.6}, {}, None, 0.0),
        ({"do_sample": True, "temperature": 0.6}, {"do_sample": False}, None, 0.0),
        ({"do_sample": True, "temperature": 0.6}, {"temperature": 0.0}, None, 0.0),
        ({"do_sample": False}, {"temperature": 0.7}, None, 0.7),
        ({"temperature": 0.6}, {"do_sample": True}, None, 0.6),
        ({}, {"do_sample": True, "temperature": 0.7}, {"temperature": 0}, 0.0),
        ({}, {"do_sample": False}, {"temperature": 0.7}, 0.7),
        ({}, {"temperature": 0.7}, {"do_sample": False}, 0.0),
        ({}, {"temperature": 0.7}, {"top_k": 5}, 0.7),
        ({}, {"do_sample": True}, {"temperature": 2}, 2.0),
        ({}, {"do_sample": True, "temperature": 0.0}, None, 0.0),
    ],
)
def test_the_most_specific_opinion_on_sampling_decides(model, recipe, row, temperature):
    assert params(row, model=model, recipe=recipe).temperature == temperature


def test_fields_are_merged_one_by_one():
    resolved = params(
        {"top_p": 0.5},
        model={"top_k": 20, "top_p": 0.8, "min_p": 0.1, "temperature": 0.6},
        recipe={"top_k": 7},
    )
    assert (resolved.top_k, resolved.top_p, resolved.min_p) == (7, 0.5, 0.1)


def test_null_in_a_row_leaves_the_recipe_value():
    assert params({"top_k": None}, recipe={"top_k": 7}).top_k == 7


def test_ends_of_sequence_come_from_the_model_unless_set():
    assert params().stop_token_ids == {2}
    assert params(recipe={"eos_token_id": 5}).stop_token_ids == {5}
    assert params({"eos_token_id": [6, 7]}, recipe={"eos_token_id": 5}).stop_token_ids == {6, 7}


def test_stop_tokens_are_added_and_told_apart():
    resolved = settings(recipe={"stop_token_ids": [9]}).resolve("r", None)
    assert resolved.samples[0].stop_token_ids == {2, 9}
    assert resolved.eos_token_ids == {2}


def test_ignore_eos_leaves_the_stop_tokens():
    assert params(recipe={"ignore_eos": True, "stop_token_ids": [9]}).stop_token_ids == {9}


@pytest.mark.parametrize(
    ("model", "recipe", "row", "new", "length"),
    [
        ({}, {"max_new_tokens": 5, "max_length": 9}, None, 5, None),
        ({"max_new_tokens": 5}, {"max_length": 9}, None, None, 9),
        ({"max_length": 50}, {"max_new_tokens": 5}, None, 5, None),
        ({}, {"max_new_tokens": 5}, {"max_length": 9}, None, 9),
        ({}, {"max_length": 9}, {"max_new_tokens": 5}, 5, None),
    ],
)
def test_the_more_specific_bound_of_length_decides(model, recipe, row, new, length):
    resolved = settings(model=model, recipe=recipe).resolve("r", row)
    assert (resolved.samples[0].max_new_tokens, resolved.max_length) == (new, length)


def test_a_row_without_seed_draws_from_run_seed_and_id():
    assert params(run_seed=3).seed == derive_seed(3, "r")
    assert params(run_seed=3).seed != params(run_seed=4).seed


def test_a_rows_own_seed_stands_in_place_of_run_seed_and_id():
    one = settings(run_seed=1).resolve("a", {"seed": 42}).samples[0].seed
    other = settings(run_seed=2).resolve("b", {"seed": 42}).samples[0].seed
    assert one == other == 42


def seeds(resolved):
    return [params.seed for params in resolved.samples]


SAMPLING = {"temperature": 0.7, "num_return_sequences": 3}


def test_every_sample_has_a_seed_of_its_own_beginning_with_that_of_a_single_one():
    one = settings(run_seed=3, recipe={"temperature": 0.7}).resolve("r", None)
    three = settings(run_seed=3, recipe=SAMPLING).resolve("r", None)
    assert seeds(three) == [derive_seed(3, "r", index) for index in range(3)]
    assert seeds(one) == seeds(three)[:1]


def test_samples_of_a_row_with_its_own_seed_depend_on_that_seed_alone():
    one = seeds(settings(run_seed=1, recipe=SAMPLING).resolve("a", {"seed": 42}))
    other = seeds(settings(run_seed=2, recipe=SAMPLING).resolve("b", {"seed": 42}))
    third = seeds(settings(recipe=SAMPLING).resolve("a", {"seed": 43}))
    assert one == other
    assert one[0] == 42
    assert len({*one, *third}) == 6


def test_several_samples_of_a_greedy_recipe_are_refused():
    with pytest.raises(UsageError, match=r"generation_config\.num_return_sequences = 3 .*greedy"):
        settings(recipe={"num_return_sequences": 3})


def test_a_model_that_samples_makes_several_samples_possible():
    resolved = settings(model={"do_sample": True}, recipe={"num_return_sequences": 3})
    assert len(resolved.resolve("r", None).samples) == 3


@pytest.mark.parametrize(
    ("recipe", "row"),
    [
        ({}, {"num_return_sequences": 2}),
        (SAMPLING, {"temperature": 0}),
        (SAMPLING, {"do_sample": False}),
        ({"do_sample": True}, {"num_return_sequences": 2, "temperature": 0}),
    ],
)
def test_several_samples_of_a_greedy_row_are_the_rows_error(recipe, row):
    with pytest.raises(
        RowError, match=r"num_return_sequences = \d .*temperature above 0"
    ) as caught:
        settings(recipe=recipe).resolve("r", row)
    assert caught.value.code == "invalid_generation_config"


def test_a_row_may_want_one_sample_where_the_recipe_wants_several():
    row = {"num_return_sequences": 1, "temperature": 0}
    assert settings(recipe=SAMPLING).resolve("r", row).samples[0].is_greedy


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"temperature": -1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_q": 1}, "top_q"),
        ({"repetition_penalty": 0.0}, "repetition_penalty"),
        ({"no_repeat_ngram_size": 2}, "no_repeat_ngram_size"),
        ({"do_sample": False, "temperature": 0.5}, "do_sample"),
        ({"max_new_tokens": 0}, "max_new_tokens"),
        ({"seed": -1}, "seed"),
        ({"num_return_sequences": 129}, "at least 1 and at most 128, got 129"),
    ],
)
def test_a_wrong_row_field_is_the_rows_error(row, message):
    with pytest.raises(RowError, match=message) as caught:
        settings().resolve("r", row)
    assert caught.value.code == "invalid_generation_config"


def test_an_unsupported_field_of_the_model_is_refused_with_the_remedy():
    with pytest.raises(UsageError, match=r"no_repeat_ngram_size.*generation_defaults: none"):
        settings(model={"no_repeat_ngram_size": 3})


def test_a_recipe_overrides_an_unsupported_field_of_the_model():
    resolved = settings(
        model={"no_repeat_ngram_size": 3}, recipe={"no_repeat_ngram_size": 0}
    ).resolve("r", None)
    assert resolved.samples[0].is_greedy


@pytest.mark.parametrize(
    ("model", "recipe", "row", "penalty"),
    [
        ({"repetition_penalty": 1.1}, {}, None, 1.1),
        ({"repetition_penalty": 1.1}, {"repetition_penalty": 1.0}, None, 1.0),
        ({}, {"repetition_penalty": 1.2}, {"repetition_penalty": 1.3}, 1.3),
        ({}, {}, None, 1.0),
    ],
)
def test_a_repetition_penalty_holds_from_every_level(model, recipe, row, penalty):
    assert params(row, model=model, recipe=recipe).repetition_penalty == penalty


@pytest.mark.parametrize(
    ("given", "stop_strings"), [("ab", ("ab",)), (["ab", "c"], ("ab", "c")), ([], ())]
)
def test_stop_strings_are_one_text_or_several(given, stop_strings):
    assert params(recipe={"stop_strings": given}).stop_strings == stop_strings
    assert params({"stop_strings": given}).stop_strings == stop_strings


def test_effective_settings_show_what_is_given_of_penalties_and_stops():
    shown = settings(
        model={"repetition_penalty": 1.1}, recipe={"stop_strings": ["a"], "ignore_eos": True}
    ).effective()
    assert shown["repetition_penalty"] == (1.1, "model")
    assert shown["stop_strings"] == (["a"], "recipe")
    assert shown["ignore_eos"] == (True, "recipe")


def test_effective_settings_name_their_origin():
    shown = settings(
        model={"top_p": 0.8}, recipe={"temperature": 0.7, "max_new_tokens": 9}
    ).effective()
    assert shown["do_sample"] == (True, "recipe")
    assert shown["temperature"] == (0.7, "recipe")
    assert shown["top_p"] == (0.8, "model")
    assert shown["top_k"] == (0, "default")
    assert shown["max_new_tokens"] == (9, "recipe")
    assert shown["eos_token_id"] == ([2], "model")


def test_effective_settings_name_the_number_of_samples_where_it_is_given():
    assert settings(recipe=SAMPLING).effective()["num_return_sequences"] == (3, "recipe")
    assert "num_return_sequences" not in settings().effective()


def test_logprobs_follow_the_recipe():
    assert params(logprobs="raw").logprobs == "raw"


def test_a_row_may_want_log_probabilities_or_none():
    resolve = settings(logprobs=None).resolve
    assert resolve("r", None, logprobs=True).samples[0].logprobs == "raw"
    assert resolve("r", {"seed": 1}, logprobs=True).samples[0].logprobs == "raw"
    assert settings(logprobs="raw").resolve("r", None, logprobs=False).samples[0].logprobs is None


def test_log_probabilities_of_a_row_are_of_the_recipes_mode():
    resolved = GenerationSettings(
        model={},
        recipe={},
        eos_token_ids=frozenset(),
        run_seed=0,
        logprobs=None,
        logprobs_mode="processed",
    ).resolve("r", None, logprobs=True)
    assert resolved.samples[0].logprobs == "processed"
