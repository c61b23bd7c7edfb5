"""A refusal says file and line also where it is found after the recipe was read, or --set."""

from __future__ import annotations

import os

import pytest

import cbgen as library
from cbgen.errors import RecipeError

HEAD = "model:\n  path: {checkpoint}\n"
BATCHING = "continuous_batching_config:\n  "

FOUND_LATER: dict[str, tuple[str, int, str]] = {
    "prompt.template": ("prompt:\n  template: '{x'\n", 4, "prompt.template: lone"),
    "prompt.chat_template": (
        "prompt:\n  chat: true\n  chat_template: '{% if %}'\n",
        5,
        "prompt.chat_template, line 1",
    ),
    "a chat template that is no file": (
        "prompt:\n  chat_template: nowhere.jinja\n",
        4,
        "neither a template nor a readable file",
    ),
    "a chat template with a name that no file can have": (
        'prompt:\n  chat_template: "a\\0b"\n',
        4,
        "neither a template nor a readable file",
    ),
    "prompt.chat_template_kwargs": (
        "prompt:\n  chat_template_kwargs:\n    messages: 1\n",
        4,
        "messages is no variable",
    ),
    "num_return_sequences": (
        "generation_config:\n  do_sample: false\n  num_return_sequences: 2\n",
        5,
        "num_return_sequences = 2",
    ),
    "model.device": ("  device: cuda:7\n", 3, "model.device is 'cuda:7'"),
    "model.config_overrides": (
        "  config_overrides:\n    nothing: 1\n",
        3,
        "model.config_overrides.nothing",
    ),
    "a value of config_overrides": (
        "  config_overrides:\n    hidden_size: many\n",
        3,
        "model.config_overrides.hidden_size",
    ),
    "model.attn_implementation": (
        "  attn_implementation: flash_attention_2\n",
        3,
        "attn_implementation",
    ),
    "num_blocks": (f"{BATCHING}num_blocks: 99999999\n", 4, "num_blocks = 99999999 needs"),
    "max_batch_tokens": (f"{BATCHING}max_batch_tokens: 999999999\n", 4, "no memory for the KV"),
    "an integer beyond 64 bits": (
        f"{BATCHING}max_queue_size: {2**64}\n",
        4,
        "18446744073709551616 is beyond 64 bits",
    ),
    "a stop token beyond 64 bits": (
        f"generation_config:\n  stop_token_ids:\n  - 5\n  - {2**64}\n",
        6,
        "is beyond 64 bits",
    ),
    "half of a surrogate pair": (
        "prompt:\n  chat_template: \"{{ '\\ud800' }}\"\n",
        4,
        "half of a surrogate pair",
    ),
    "a key with half of a surrogate pair": (
        'prompt:\n  chat_template_kwargs: {"\\udc80": 1}\n',
        4,
        "half of a surrogate pair",
    ),
    "nested too deep": ("prompt: " + "[" * 3000 + "\n", 3, "nested too deep"),
}


@pytest.fixture
def write(checkpoint, tmp_path):
    def write(rest: str) -> str:
        path = tmp_path / "mine.yaml"
        path.write_text(HEAD.format(checkpoint=checkpoint) + rest)
        return str(path)

    return write


@pytest.mark.parametrize("name", FOUND_LATER)
@pytest.mark.parametrize("command", ["run", "plan"])
def test_file_and_line_are_named(cbgen, write, rows_file, name, command):
    rest, line, words = FOUND_LATER[name]
    path = write(rest)
    finished = cbgen(command, path, "-i", rows_file({"prompt": "a"}))
    assert finished.code == 2
    (error,) = [text for text in finished.err.splitlines() if text.startswith("error: ")]
    assert error.startswith(f"error: {path}:{line}: ")
    assert words in error


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("model.device=cuda:7", "--set model.device: model.device is"),
        ("prompt.template={x", "--set prompt.template: prompt.template: lone"),
        (f"prompt.chat_template_kwargs.x={10**20}", "is beyond 64 bits"),
        ("prompt.template=caf\udce9", "half of a surrogate pair"),
    ],
)
def test_an_override_is_named(cbgen, recipe, rows_file, setting, words):
    finished = cbgen("run", recipe, "-i", rows_file({"prompt": "a"}), "--set", setting)
    assert finished.code == 2
    assert "error: --set " in finished.err
    assert words in finished.err
    assert "Traceback" not in finished.err


def test_python_names_the_line_of_a_recipe_file(write):
    path = write("  device: cuda:7\n")
    with pytest.raises(RecipeError, match=r"mine\.yaml:3: model\.device"):
        library.Engine(path)
    with pytest.raises(RecipeError, match=r"mine\.yaml:3: model\.device"):
        next(library.run(path, [{"prompt": "a"}]))


def test_a_mapping_is_refused_without_a_place(checkpoint):
    mapping = {"model": {"path": str(checkpoint), "device": "cuda:7"}}
    with pytest.raises(library.UsageError, match=r"^model\.device is"):
        library.Engine(mapping)
    with pytest.raises(RecipeError, match="beyond 64 bits"):
        library.Engine({"model": {"path": str(checkpoint), "tp_size": 2**64}})


def test_names_that_are_no_text_are_carried(cbgen, recipe, tmp_path):
    """Such as a file name in Latin-1."""
    names = [os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9" + end) for end in (b".jsonl", b".out")]
    source, out = names
    with open(source, "w") as rows:
        rows.write('{"prompt": "a"}\n{"nothing": 1}\n')
    facts = ["--stats", f"{out}.stats", "--metrics", f"{out}.prom", "--trace", f"{out}.trace"]
    first = cbgen("run", recipe, "-i", source, "-o", out, *facts)
    assert first.code == 1
    again = cbgen("run", recipe, "-i", source, "-o", out, "--retry", "error")
    assert again.code == 1
    assert "Traceback" not in first.err + again.err
    with open(out, "rb") as rows:
        assert len(rows.read().splitlines()) == 2
