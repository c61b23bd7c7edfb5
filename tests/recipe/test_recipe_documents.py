from __future__ import annotations

import json
import re
from pathlib import Path

import jsonschema
import pytest
import yaml

from cbgen.cli.recipe import init_command, schema_command
from cbgen.errors import UsageError
from cbgen.recipe.describe import recipe_json_schema, recipe_reference, starter_recipe
from cbgen.recipe.load import load_recipe
from cbgen.recipe.schema import SECTIONS, field_docs

REPOSITORY = Path(__file__).parents[2]
RECIPES = sorted((REPOSITORY / "recipes").glob("*.yaml"))


@pytest.fixture(scope="module")
def validator() -> jsonschema.Draft202012Validator:
    schema = recipe_json_schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema)


def with_model(text: str) -> object:
    return yaml.safe_load("model: {path: tiny}\n" + text)


def test_there_are_recipes():
    assert REPOSITORY / "recipes" / "smollm2.yaml" in RECIPES


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.name)
def test_a_recipe_of_the_repository_loads_and_fits_the_schema(path, validator):
    load_recipe(str(path))
    validator.validate(yaml.safe_load(path.read_text(encoding="utf-8")))


def test_the_small_recipe_is_greedy_chat():
    recipe = load_recipe(str(REPOSITORY / "recipes" / "smollm2.yaml"))
    assert recipe.model.path == "~/.cache/cbgen/models/SmolLM2-135M-Instruct.Q4_1.gguf"
    assert recipe.prompt.chat is True
    assert recipe.generation_config == {"do_sample": False, "max_new_tokens": 64}


@pytest.mark.parametrize(
    "text",
    [
        "prompt:\n",
        "GenerationConfig: {temperature: 1, top_k: null, eos_token_id: [1, 2]}\n",
        "continuous_batching_config: {block_size: 16, use_cuda_graph: [false, false]}\n",
        "output: {columns: [a, b]}\n",
        "prompt: {chat: true, chat_template_kwargs: {a: {b: 1}}}\n",
        "generation_config: {num_beams: 1, sequence_bias: {}}\n",
        "deterministic: auto\n",
    ],
)
def test_the_schema_accepts_what_loads(validator, load, text):
    load(text)
    validator.validate(with_model(text))


@pytest.mark.parametrize(
    "text",
    [
        "promt: {}\n",
        "prompt: {truncation: up}\n",
        "prompt: {max_length: x}\n",
        "output: {columns: some}\n",
        "generation_config: {top_p: 0}\n",
        "generation_config: {eos_token_id: [-1]}\n",
        "generation_config: {num_beams: 2}\n",
        "generation_config: {regex: x}\n",
        "continuous_batching_config: {scheduler_type: best}\n",
        "continuous_batching_config: {use_cuda_graph: [true]}\n",
        "deterministic: false\n",
    ],
)
def test_the_schema_refuses_what_does_not_load(validator, refusal, text):
    refusal(text)
    assert not validator.is_valid(with_model(text))


def test_the_schema_needs_a_model_path(validator):
    assert not validator.is_valid({})
    assert not validator.is_valid({"model": {}})


def test_every_property_of_the_schema_has_a_description():
    for section in recipe_json_schema()["$defs"].values():
        assert section["description"]
        assert all(field["description"] for field in section["properties"].values())


@pytest.mark.parametrize("name", SECTIONS)
def test_every_field_of_a_section_has_documentation(name):
    assert list(field_docs(SECTIONS[name])) == list(SECTIONS[name].__dataclass_fields__)


def test_schema_command_prints_the_schema(capsys):
    schema_command()
    assert json.loads(capsys.readouterr().out) == recipe_json_schema()


def test_the_reference_page_is_fresh():
    page = (REPOSITORY / "docs" / "recipe.md").read_text(encoding="utf-8")
    assert page == recipe_reference(), "run python -m cbgen.recipe.describe > docs/recipe.md"


def test_the_starter_recipe_loads_as_it_is(recipe_path):
    recipe_path.write_text(starter_recipe(), encoding="utf-8")
    recipe = load_recipe("recipe.yaml")
    assert recipe.generation_config == {"max_new_tokens": 256}


def test_the_commented_lines_of_the_starter_recipe_are_the_defaults(recipe_path):
    recipe_path.write_text(starter_recipe(), encoding="utf-8")
    plain = load_recipe("recipe.yaml")
    uncommented = re.sub(r"^( *)# (\w+: )", r"\1\2", starter_recipe(), flags=re.MULTILINE)
    recipe_path.write_text(uncommented, encoding="utf-8")
    full = load_recipe("recipe.yaml")
    assert full.digest == plain.digest
    assert len(full.origins) > len(plain.origins) + 40


def test_init_writes_the_starter_recipe(recipe_path, capsys):
    init_command("recipe.yaml", force=False)
    assert recipe_path.read_text(encoding="utf-8") == starter_recipe()
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == "wrote recipe.yaml\n"


def test_init_leaves_a_file_alone_without_force(recipe_path):
    recipe_path.write_text("mine", encoding="utf-8")
    with pytest.raises(UsageError, match=r"^recipe\.yaml exists; give another name, or --force$"):
        init_command("recipe.yaml", force=False)
    assert recipe_path.read_text(encoding="utf-8") == "mine"


def test_init_writes_over_a_file_with_force(recipe_path):
    recipe_path.write_text("mine", encoding="utf-8")
    init_command("recipe.yaml", force=True)
    assert recipe_path.read_text(encoding="utf-8") == starter_recipe()


def test_init_writes_to_stdout(capsys):
    init_command("-", force=False)
    assert capsys.readouterr().out == starter_recipe()


def test_init_names_a_folder_that_is_not_there(recipe_path):
    with pytest.raises(UsageError, match=r"^cannot write absent/recipe\.yaml: No such file"):
        init_command("absent/recipe.yaml", force=False)
