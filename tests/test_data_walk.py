"""Through which modules the token ids of one prompt, and those of its answer, pass.

    python -m pytest -s tests/test_data_walk.py     # prints the walk

Every call of a function of cbgen is looked at while one row is answered. A module is on the walk if
one of its functions

- is given the ids themselves: a list, tuple, array or tensor of exactly them (the table names
  function and parameter), or
- is given an object from which it can read them by the attributes and keys that its code names (the
  table names the holder, such as `Request.prompt_ids`).

Modules that are given such an object and never name the attribute are listed below the table.
"""

from __future__ import annotations

import sys
import threading
from array import array
from collections import defaultdict, deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from itertools import islice
from types import CodeType, FrameType

import pytest
import torch

import cbgen
from tests.helpers.sources import ROOT
from tests.helpers.tiny_checkpoint import save_tiny_checkpoint

PROMPT = [51, 17, 94, 33, 76, 28, 65]
MAX_PROMPT_MODULES = 20
ANY_IDS = {"check_token_ids(value)", "pack_tokens(token_ids)", "unpack_rows(rows)"}
"""Functions for any ids, values or rows of a table, which name them so."""
MAX_DEPTH = 4
MAX_ITEMS = 8


@dataclass
class Walk:
    """Where some token ids were seen."""

    ids: list[int]
    parameters: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    """By module: functions with the parameters that were the ids."""
    holders: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    """By module: attributes and keys by which a function could read the ids."""
    carriers: set[str] = field(default_factory=set)
    """Modules that were given an object with the ids."""

    def look(self, module: str, code: CodeType, name: str, value: object) -> None:
        """Note an argument of a function if it is the ids, or leads to them."""
        if self.is_ids(value):
            self.parameters[module].add(f"{code.co_name}({name})")
            return
        held = set(self.found(value, words_of(code), MAX_DEPTH))
        self.holders[module] |= held
        if not held and any(self.found(value, attributes_of(value), 1)):
            self.carriers.add(module)

    def found(self, value: object, words: frozenset[str], depth: int) -> Iterator[str]:
        """Yield the holders of the ids that can be reached from a value."""
        if depth == 0:
            return
        if isinstance(value, list | tuple | set | deque) and not hasattr(value, "_fields"):
            for item in islice(value, MAX_ITEMS):
                yield from self.found(item, words, depth)
            return
        for name, item in members_of(value, words):
            if self.is_ids(item):
                yield f"[{name}]" if isinstance(value, dict) else f"{type(value).__name__}.{name}"
            else:
                yield from self.found(item, words, depth - 1)

    def is_ids(self, value: object) -> bool:
        """Whether a value is exactly the ids."""
        if isinstance(value, torch.Tensor):
            return value.shape == (len(self.ids),) and value.tolist() == self.ids
        if not isinstance(value, list | tuple | array) or len(value) != len(self.ids):
            return False
        return all(type(item) is int for item in value) and list(value) == self.ids

    @property
    def modules(self) -> list[str]:
        """The modules on the walk."""
        return sorted(
            self.parameters.keys() | {name for name, held in self.holders.items() if held}
        )

    @property
    def names(self) -> set[str]:
        """All names that the ids had, but for functions of any ids and keys of rows."""
        given = set().union(*self.parameters.values()) - ANY_IDS
        held = {name for name in set().union(*self.holders.values()) if not name.startswith("[")}
        return {name.removesuffix(")").rpartition("(")[2] for name in given} | {
            name.rpartition(".")[2] for name in held
        }

    def lines(self) -> list[str]:
        """Return the walk as rows of a table: module, parameters, holders."""
        return [
            f"| `{module}` | {', '.join(sorted(self.parameters.get(module, ())))} "
            f"| {', '.join(sorted(self.holders.get(module, ())))} |"
            for module in self.modules
        ] + [f"handed on, not read: {', '.join(sorted(self.carriers.difference(self.modules)))}"]


def members_of(value: object, words: frozenset[str]) -> Iterator[tuple[str, object]]:
    """Yield attributes that `words` name, and the values of dictionaries; runs no property."""
    if isinstance(value, dict):
        yield from islice(list(value.items()), MAX_ITEMS)
    for name in attributes_of(value) & words:
        yield name, getattr(value, name, None)


def attributes_of(value: object) -> frozenset[str]:
    """Return the names of what an object of cbgen holds, properties left out."""
    if not type(value).__module__.startswith("cbgen."):
        return frozenset()
    slots = (getattr(kind, "__slots__", ()) for kind in type(value).__mro__)
    return frozenset(getattr(value, "__dict__", ())).union(
        getattr(type(value), "_fields", ()), *slots
    )


@cache
def words_of(code: CodeType) -> frozenset[str]:
    """Return the names and strings that a function's code holds, its inner functions included."""
    inner = [words_of(item) for item in code.co_consts if isinstance(item, CodeType)]
    strings = (item for item in code.co_consts if isinstance(item, str))
    return frozenset(code.co_names).union(strings, *inner)


def module_of(code: CodeType) -> str | None:
    """Return the module of a function of cbgen, None for other code."""
    prefix = f"{ROOT}/cbgen/"
    if not code.co_filename.startswith(prefix):
        return None
    return code.co_filename.removeprefix(f"{ROOT}/").removesuffix(".py").replace("/", ".")


@contextmanager
def watched(*walks: Walk) -> Iterator[None]:
    """Let walks see the arguments of every call of cbgen, on this thread and on new ones."""

    def profile(frame: FrameType, event: str, _argument: object) -> None:
        if event != "call" or (module := module_of(frame.f_code)) is None:
            return
        code = frame.f_code
        count = code.co_argcount + code.co_kwonlyargcount
        for name in code.co_varnames[:count]:
            for walk in walks:
                walk.look(module, code, name, frame.f_locals.get(name))

    threading.setprofile(profile)
    sys.setprofile(profile)
    try:
        yield
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


@pytest.fixture(scope="module")
def walks(tmp_path_factory) -> tuple[Walk, Walk]:
    """The walks of the prompt's ids and of the answer's."""
    tiny_model = save_tiny_checkpoint(tmp_path_factory.mktemp("model"))
    recipe = {
        "model": {"path": str(tiny_model)},
        "generation_config": {"max_new_tokens": 5, "ignore_eos": True, "do_sample": False},
        "continuous_batching_config": {"page_size": 16, "num_blocks": 64},
        "output": {"token_ids": True},
    }
    with cbgen.Engine(recipe) as engine:
        (row,) = engine.run([{"prompt_token_ids": PROMPT}])
        prompt, generated = Walk(PROMPT), Walk(row["token_ids"])
        with watched(prompt, generated):
            assert list(engine.run([{"prompt_token_ids": PROMPT}])) == [row]
    for title, walk in (("prompt", prompt), ("answer", generated)):
        lines = [f"{title}: {len(walk.modules)} modules", *walk.lines()]
        sys.stderr.write("\n" + "\n".join(lines) + "\n")
    return prompt, generated


def test_the_ids_of_a_prompt_pass_few_modules(walks):
    assert len(walks[0].modules) <= MAX_PROMPT_MODULES


def test_the_ids_of_a_prompt_have_one_name(walks):
    assert walks[0].names == {"prompt_ids"}


def test_the_tokens_of_an_answer_have_one_name(walks):
    assert walks[1].names == {"generated_tokens"}
