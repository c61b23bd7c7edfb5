from __future__ import annotations

import logging

import pytest


def test_an_override_wins_over_the_file(load):
    assert load("prompt: {chat: false}\n", "prompt.chat=true").prompt.chat is True


def test_the_last_override_of_a_key_wins(load):
    assert load("", "prompt.max_length=1", "prompt.max_length=2").prompt.max_length == 2


def test_the_value_is_yaml_and_may_hold_equals_signs(load):
    recipe = load("", "output.columns=[a, no]", "prompt.template='a=b: {q}'")
    assert recipe.output.columns == ("a", "no")
    assert recipe.prompt.template == "a=b: {q}"


def test_a_text_field_takes_its_value_as_it_stands(load):
    recipe = load("", "prompt.template=Q: {question}", "prompt.system={be brief", "model.path=12")
    assert recipe.prompt.template == "Q: {question}"
    assert recipe.prompt.system == "{be brief"
    assert recipe.model.path == "12"


def test_an_override_reaches_into_mappings(load):
    recipe = load("", "model.config_overrides.rope_scaling.factor=2", "model.config_overrides.w=4")
    assert recipe.model.config_overrides == {"rope_scaling": {"factor": 2}, "w": 4}


def test_switches_and_spellings_may_be_set(load):
    recipe = load("", "generation_defaults=none", "GenerationConfig.top_k=3")
    assert recipe.generation_defaults == "none"
    assert recipe.generation_config == {"top_k": 3}


def test_an_empty_value_unsets(load):
    assert load("prompt: {max_length: 5}\n", "prompt.max_length=").prompt.max_length is None


def test_block_size_may_be_set_and_wins_over_the_page_size_of_the_file(load, caplog):
    with caplog.at_level(logging.WARNING):
        recipe = load(
            "continuous_batching_config: {page_size: 64}\n",
            "continuous_batching_config.block_size=32",
        )
    assert recipe.continuous_batching_config.page_size == 32
    assert "block_size is deprecated; use page_size" in caplog.text


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("prompt.chat", "expected section.key=value"),
        ("=1", "expected section.key=value"),
        ("prompt..chat=1", "expected section.key=value"),
        (
            "prompt={}",
            "expected section.key=value with one of the sections model, prompt, "
            "generation_config, continuous_batching_config, output",
        ),
        ("prompt.caht=1", "prompt.caht is not a known key (value 1); did you mean chat?"),
        ("promt.chat=1", 'promt is not a known key (value {"chat": 1}); did you mean prompt?'),
        ("prompt.max_length=x", 'prompt.max_length: expected an integer or null, got "x"'),
        ("model.path.x=1", 'model.path is "tiny", which has no fields'),
        (
            "generation_config.top_p=2",
            "generation_config.top_p must be above 0 and at most 1, got 2",
        ),
        (
            "continuous_batching_config.page_size=1",
            "continuous_batching_config.page_size must be at least 4, got 1",
        ),
        ("output.columns=[a", None),
        ("deterministic=true", "deterministic = true is not supported yet; remove it"),
    ],
)
def test_an_error_repeats_the_override(refusal, override, message):
    text = refusal("", override)
    assert text.startswith(f"--set {override}: {message or 'not valid YAML'}")


def test_an_override_mends_a_bad_value_of_the_file(load):
    assert load("prompt: {max_length: x}\n", "prompt.max_length=3").prompt.max_length == 3


def test_a_seed_that_contradicts_the_file_is_refused_with_both_places(refusal):
    message = refusal("continuous_batching_config: {seed: 3}\n", "generation_config.seed=5")
    assert message.startswith(
        "--set generation_config.seed=5: generation_config.seed = 5 contradicts"
    )
    assert "(recipe.yaml:2)" in message
