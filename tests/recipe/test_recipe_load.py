from __future__ import annotations

import logging
from pathlib import Path

import pytest

from cbgen.errors import RecipeError
from cbgen.recipe.load import load_recipe, recipe_from_mapping


def test_a_recipe_with_only_a_model_has_all_defaults(load):
    recipe = load()
    assert recipe.model.path == "tiny"
    assert recipe.continuous_batching_config.page_size == 256
    assert recipe.generation_config == {}
    assert recipe.generation_defaults == "model"
    assert recipe.deterministic == "auto"


def test_every_section_reaches_its_field(load):
    recipe = load(
        "prompt: {template: 'Q: {q}', truncation: left}\n"
        "generation_config: {temperature: 1, top_k: 5}\n"
        "continuous_batching_config: {page_size: 16, safety_margin: 0}\n"
        "output: {columns: [id, yes], order: completion}\n"
        "generation_defaults: none\n"
    )
    assert recipe.prompt.template == "Q: {q}"
    assert recipe.generation_config == {"temperature": 1.0, "top_k": 5}
    assert recipe.continuous_batching_config.safety_margin == 0.0
    assert recipe.output.columns == ("id", "yes")
    assert recipe.generation_defaults == "none"


def test_origins_name_file_and_line_or_the_command_line(load):
    recipe = load("prompt:\n  chat: true\n", "output.order=completion")
    assert recipe.origins == {
        "model.path": "recipe.yaml:1",
        "prompt.chat": "recipe.yaml:3",
        "output.order": "command line",
    }


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "output:\n  ordr: input\n",
            'recipe.yaml:3: output.ordr is not a known key (value "input"); did you mean order?',
        ),
        (
            "ouput: {}\n",
            "recipe.yaml:2: ouput is not a known key (value {}); did you mean output?",
        ),
        (
            "generation_config:\n  temprature: 0.7\n",
            "recipe.yaml:3: generation_config.temprature is not a known key (value 0.7); "
            "did you mean temperature?",
        ),
        (
            "temperature: 0.7\n",
            "recipe.yaml:2: temperature is not a known key (value 0.7); "
            "did you mean generation_config.temperature?",
        ),
        (
            "generation_config:\n  page_size: 16\n",
            "recipe.yaml:3: generation_config.page_size is not a known key (value 16); "
            "did you mean continuous_batching_config.page_size?",
        ),
        (
            "generation_config: {max_tokens: 5}\n",
            "recipe.yaml:2: generation_config.max_tokens is not a known key (value 5); "
            "did you mean max_new_tokens?",
        ),
    ],
)
def test_an_unknown_key_names_place_value_and_nearest_key(refusal, text, message):
    assert refusal(text) == message


def test_an_unknown_key_near_nothing_lists_the_known_ones(refusal):
    assert "; known: model, prompt, generation_config" in refusal("zzz: 1\n")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "prompt:\n  max_length: many\n",
            'recipe.yaml:3: prompt.max_length: expected an integer or null, got "many"',
        ),
        (
            "prompt:\n  system: 5\n",
            "recipe.yaml:3: prompt.system: expected text or null, got 5; put text in quotes",
        ),
        (
            "output:\n  token_ids: yes\n",
            'recipe.yaml:3: output.token_ids: expected true or false, got "yes"',
        ),
        (
            "prompt:\n  truncation: no\n",
            'recipe.yaml:3: prompt.truncation: expected error or left or right or middle, got "no"',
        ),
        (
            "continuous_batching_config:\n  page_size: true\n",
            "recipe.yaml:3: continuous_batching_config.page_size: expected an integer, got true",
        ),
        (
            "continuous_batching_config:\n  page_size: 16.0\n",
            "recipe.yaml:3: continuous_batching_config.page_size: expected an integer, got 16.0",
        ),
        (
            "continuous_batching_config:\n  safety_margin: .nan\n",
            "recipe.yaml:3: continuous_batching_config.safety_margin: expected a number or null, "
            "got NaN, which is not finite",
        ),
        ("prompt: text\n", 'recipe.yaml:2: prompt: expected a mapping of fields, got "text"'),
        (
            "deterministic: false\n",
            "recipe.yaml:2: deterministic: expected auto or true, got false",
        ),
    ],
)
def test_a_wrong_type_names_place_value_and_expectation(refusal, text, message):
    assert refusal(text) == message


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "continuous_batching_config:\n  num_blocks: 9\n  page_size: 3\n",
            "recipe.yaml:4: continuous_batching_config.page_size must be at least 4, got 3",
        ),
        (
            "continuous_batching_config:\n  use_cuda_graph: [true, false]\n",
            "recipe.yaml:3: continuous_batching_config.use_cuda_graph = (True, False) "
            "is not supported yet; remove it",
        ),
        (
            "prompt:\n  max_length: 0\n",
            "recipe.yaml:3: prompt.max_length must be at least 1, got 0",
        ),
        (
            "output:\n  top_logprobs: 3\n",
            "recipe.yaml:3: output.top_logprobs = 3 is not supported yet; remove it",
        ),
        (
            "output:\n  prompt_logprobs: 0\n",
            "recipe.yaml:3: output.prompt_logprobs = 0 is not supported yet; remove it",
        ),
        (
            "deterministic: true\n",
            "recipe.yaml:2: deterministic = true is not supported yet; remove it",
        ),
        (
            "generation_config:\n  top_p: 1.5\n",
            "recipe.yaml:3: generation_config.top_p must be above 0 and at most 1, got 1.5",
        ),
        (
            "generation_config:\n  bad_words_ids: [[5]]\n",
            "recipe.yaml:3: generation_config.bad_words_ids = [[5]] is not supported; "
            "remove it (accepted: [] or null)",
        ),
        (
            "continuous_batching_config:\n  seed: -1\n",
            "recipe.yaml:3: continuous_batching_config.seed must be at least 0 and at most "
            "9223372036854775807, got -1",
        ),
    ],
)
def test_a_value_that_cannot_be_had_names_the_line_of_its_key(refusal, text, message):
    assert refusal(text) == message


def test_an_error_of_the_model_section_names_the_line_of_its_key(refusal):
    message = refusal(model="model:\n  path: tiny\n  dtype: fp32\n")
    assert message.startswith("recipe.yaml:3: model.dtype is 'fp32'; expected one of auto,")


@pytest.mark.parametrize(
    ("model", "place"),
    [("prompt: {}\n", "recipe.yaml"), ("\nmodel: {}\n", "recipe.yaml:2")],
)
def test_a_recipe_without_a_model_path_is_refused(refusal, model, place):
    assert refusal(model=model) == f"{place}: model.path is missing; a recipe must give it"


def test_null_leaves_a_field_at_its_default(load):
    recipe = load(
        "prompt:\ncontinuous_batching_config: {page_size: null}\ngeneration_config: {top_k: null}\n"
    )
    assert recipe.prompt.chat == "auto"
    assert recipe.continuous_batching_config.page_size == 256
    assert recipe.generation_config == {}


def test_null_is_a_value_where_the_type_has_it(load):
    recipe = load("continuous_batching_config: {cpu_group_timeout: null}\n")
    assert recipe.continuous_batching_config.cpu_group_timeout is None


def test_the_class_names_are_spellings_of_the_section_names(load):
    recipe = load("GenerationConfig: {top_k: 3}\nContinuousBatchingConfig: {page_size: 8}\n")
    assert recipe.generation_config == {"top_k": 3}
    assert recipe.continuous_batching_config.page_size == 8
    assert recipe.origins["generation_config.top_k"] == "recipe.yaml:2"


def test_both_spellings_of_a_section_at_once_are_refused(refusal):
    message = refusal("generation_config: {}\nGenerationConfig: {}\n")
    assert message == (
        "recipe.yaml:3: GenerationConfig is another name of generation_config "
        "(given at recipe.yaml:2); keep one"
    )


def test_block_size_is_page_size_with_a_warning(load, caplog):
    with caplog.at_level(logging.WARNING):
        recipe = load("continuous_batching_config:\n  block_size: 32\n")
    assert recipe.continuous_batching_config.page_size == 32
    assert caplog.messages == [
        "recipe.yaml:3: continuous_batching_config.block_size is deprecated; use page_size"
    ]


def test_block_size_beside_the_same_page_size_is_accepted(load):
    recipe = load("continuous_batching_config: {block_size: 32, page_size: 32}\n")
    assert recipe.continuous_batching_config.page_size == 32


def test_block_size_beside_another_page_size_is_refused(refusal):
    message = refusal("continuous_batching_config:\n  page_size: 64\n  block_size: 32\n")
    assert message == (
        "recipe.yaml:4: continuous_batching_config.block_size is the old name of page_size "
        "and asks for 32, but page_size is 64; keep one"
    )


def test_max_cached_graphs_is_dropped_with_a_warning(load, caplog):
    with caplog.at_level(logging.WARNING):
        load("continuous_batching_config: {max_cached_graphs: 32}\n")
    assert "max_cached_graphs is deprecated and has no effect" in caplog.text


def test_use_default_compile_configs_becomes_the_compile_level(load, refusal, caplog):
    with caplog.at_level(logging.WARNING):
        load("continuous_batching_config: {use_default_compile_configs: false}\n")
    assert "use default_compile_level" in caplog.text
    message = refusal("continuous_batching_config: {use_default_compile_configs: true}\n")
    assert "default_compile_level = 3 is not supported yet" in message


def test_two_different_seeds_are_refused_with_both_places(refusal):
    message = refusal("generation_config: {seed: 1}\ncontinuous_batching_config: {seed: 2}\n")
    assert message == (
        "recipe.yaml:2: generation_config.seed = 1 contradicts "
        "continuous_batching_config.seed = 2 (recipe.yaml:3); give one of the two"
    )


@pytest.mark.parametrize(
    ("text", "seed"),
    [
        ("generation_config: {seed: 1}\ncontinuous_batching_config: {seed: 1}\n", 1),
        ("generation_config: {seed: 0}\n", 0),
        ("continuous_batching_config: {seed: 2}\n", 2),
        ("", None),
    ],
)
def test_the_seed_comes_from_either_place(load, text, seed):
    assert load(text).seed == seed


def test_fields_for_compatibility_are_accepted(load):
    recipe = load(
        "continuous_batching_config: {per_request_processors: true, "
        "drop_unsupported_processors: false}\n"
    )
    assert recipe.continuous_batching_config.per_request_processors


def test_a_missing_file_is_named(recipe_path):
    with pytest.raises(RecipeError, match=r"^absent\.yaml: cannot read the recipe: No such file"):
        load_recipe("absent.yaml")


def test_a_folder_is_named(recipe_path):
    with pytest.raises(RecipeError, match="Is a directory"):
        load_recipe(".")


def test_the_digest_depends_on_content_alone(load):
    first = load("prompt: {chat: true, system: s}\ngeneration_config: {temperature: 1}\n")
    second = load(
        "# a comment\nGenerationConfig:\n  temperature: 1.0\n  top_k: null\n"
        "prompt:\n  system: 's'\n  chat: true\n  truncation: error\n"
    )
    assert first.digest == second.digest


@pytest.mark.parametrize(
    "override",
    ["prompt.chat=true", "generation_config.top_k=1", "model.config_overrides.a=1"],
)
def test_the_digest_changes_with_the_content(load, override):
    assert load("", override).digest != load().digest


def test_the_digest_of_a_recipe_stays_the_same_between_versions(load):
    assert load("prompt: {chat: true}\n").digest == "c38f3d380dfd46cbcae677ba55c2443c"


def test_a_mapping_is_checked_like_a_file(load):
    recipe = recipe_from_mapping(
        {"model": {"path": "tiny"}, "output": {"columns": ("a", "b")}}, ["output.order=completion"]
    )
    from_file = load("output: {columns: [a, b], order: completion}\n")
    assert recipe.digest == from_file.digest
    assert recipe.origins["model.path"] == "recipe"


def test_a_mapping_is_not_changed():
    mapping = {"model": {"path": "tiny"}}
    recipe_from_mapping(mapping, ["model.config_overrides.a=1"])
    assert mapping == {"model": {"path": "tiny"}}


def test_an_error_in_a_mapping_has_no_place():
    with pytest.raises(RecipeError) as caught:
        recipe_from_mapping({"model": {"path": "tiny", "dtpye": "auto"}})
    assert str(caught.value) == (
        'model.dtpye is not a known key (value "auto"); did you mean dtype?'
    )


def test_what_is_not_a_mapping_is_refused():
    with pytest.raises(RecipeError, match=r"^expected a mapping of sections, got \[\]$"):
        recipe_from_mapping([])  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [{1: 2}, {1, 2}, Path("x")])
def test_an_object_that_is_not_plain_is_refused(value):
    with pytest.raises(RecipeError):
        recipe_from_mapping({"model": {"path": "tiny", "config_overrides": {"a": value}}})
