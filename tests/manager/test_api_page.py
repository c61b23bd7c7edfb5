"""The code blocks of docs/api.md run one after the other, as on the page."""

from __future__ import annotations

import re

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

import cbgen
from tests.helpers.sources import ROOT

PAGE = ROOT / "docs" / "api.md"


def blocks() -> list[tuple[str, str]]:
    """Return title and text of each code block of the page."""
    found, title = [], ""
    for part in re.split(
        r"(?m)^(## [^\n]*\n|```python\n.*?^```)", PAGE.read_text(), flags=re.DOTALL
    ):
        if part.startswith("## "):
            title = part[3:].strip()
        elif part.startswith("```python"):
            found.append((title, part.removeprefix("```python\n").removesuffix("```")))
    return found


@pytest.fixture(scope="module")
def names(checkpoint):
    """What the page takes for granted, and what its earlier blocks have made."""
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    model.generation_config.max_new_tokens = 12
    return {
        "cbgen": cbgen,
        "model": model,
        "tokenizer": tokenizer,
        "inputs": [tokenizer.encode(text) for text in ("one", "two and two", "three")],
        "recipe": {"model": {"path": str(checkpoint)}, "generation_config": {"max_new_tokens": 4}},
    }


def test_the_page_has_all_its_blocks():
    assert len(blocks()) >= 8


def test_every_block_of_the_page_runs(names, capsys):
    from transformers import GenerationConfig, LlamaForCausalLM

    names["GenerationConfig"] = GenerationConfig
    methods = ("generate_batch", "init_continuous_batching", "continuous_batching_context_manager")
    before = {name: vars(LlamaForCausalLM).get(name) for name in methods}
    try:
        for title, text in blocks():
            exec(compile(text, f"{PAGE.name}: {title}", "exec"), names)
    finally:
        for name, method in before.items():
            if method is None and name in vars(LlamaForCausalLM):
                delattr(LlamaForCausalLM, name)
    assert names["model"].config._attn_implementation == "sdpa"
    assert len(names["texts"]) == 3
