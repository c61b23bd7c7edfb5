"""Ranges of a request's parameters, and the seed of a row that gives none."""

from __future__ import annotations

import pytest

from cbgen.engine.sampling.params import MAX_SEED, SamplingParams, derive_seed

NAN, INFINITY = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1),
        ("temperature", NAN),
        ("temperature", INFINITY),
        ("top_k", -1),
        ("top_p", 0.0),
        ("top_p", 1.01),
        ("top_p", NAN),
        ("min_p", -0.01),
        ("min_p", 1.01),
        ("min_p", NAN),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", -1.5),
        ("repetition_penalty", NAN),
        ("repetition_penalty", INFINITY),
        ("seed", -1),
        ("seed", MAX_SEED + 1),
        ("max_new_tokens", 0),
        ("logprobs", True),
    ],
)
def test_a_value_out_of_range_is_refused_with_name_and_value(name, value):
    with pytest.raises(ValueError, match=rf"{name} must be .*, got {value}"):
        SamplingParams(**{name: value})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", 0),
        ("temperature", 1),
        ("temperature", 1e6),
        ("top_k", 0),
        ("top_k", 10**9),
        ("top_p", 1),
        ("top_p", 1e-300),
        ("min_p", 0),
        ("min_p", 1),
        ("repetition_penalty", 1e-6),
        ("repetition_penalty", 2),
        ("seed", 0),
        ("seed", MAX_SEED),
        ("max_new_tokens", 1),
        ("max_new_tokens", None),
        ("stop_strings", ()),
        ("stop_strings", ("\n", "User:")),
    ],
)
def test_values_at_the_border_are_taken(name, value):
    assert getattr(SamplingParams(**{name: value}), name) == value


@pytest.mark.parametrize("texts", ["stop", ("",), ("a", 3)])
def test_stop_strings_that_are_not_texts_are_refused(texts):
    with pytest.raises(ValueError, match="stop_strings must hold texts that are not empty"):
        SamplingParams(stop_strings=texts)


def test_a_temperature_of_zero_is_greedy():
    assert SamplingParams().is_greedy
    assert not SamplingParams(temperature=0.1).is_greedy


def test_a_derived_seed_is_the_same_in_every_version_and_process():
    assert derive_seed(0, "a") == 6713522722224487935


def test_a_derived_seed_is_a_valid_seed():
    seeds = [derive_seed(7, str(number)) for number in range(1000)]
    assert all(0 <= seed <= MAX_SEED for seed in seeds)
    assert len(set(seeds)) == 1000


def test_run_seed_id_and_sample_index_each_change_the_seed():
    seeds = {derive_seed(0, "a"), derive_seed(1, "a"), derive_seed(0, "b"), derive_seed(0, "a", 1)}
    assert len(seeds) == 4


def test_run_seed_and_id_are_not_run_together():
    assert derive_seed(1, "23") != derive_seed(12, "3")


def test_an_id_that_is_not_valid_unicode_has_a_seed():
    assert 0 <= derive_seed(0, "\ud800") <= MAX_SEED
