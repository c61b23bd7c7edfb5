"""The page docs/recipe.md: every field of a recipe in tables, made from the docs of the fields.

`python -m cbgen.recipe.reference` writes the page to stdout.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable

from cbgen.generation.check import range_words
from cbgen.generation.fields import GENERATION_FIELDS, GenerationField, Support
from cbgen.recipe.fields import RecipeField, section_fields, switch_fields
from cbgen.recipe.schema import GENERATION_SECTION, SECTION_ORDER
from cbgen.values import describe, show_yaml

_INTRODUCTION = """\
<!-- Made by `python -m cbgen.recipe.reference > docs/recipe.md`; change the field docs instead. -->

# Recipe

A recipe is one YAML file: a mapping of the sections below. `cbgen init` writes one to start from,
`cbgen schema` prints a JSON Schema for editors. Only `model.path` must be given.

- A file is read as YAML 1.2: `yes`, `no`, `on` and `off` are text, `1e-4` is a number, tabs do not
  indent. Anchors, aliases and `<<` work.
- `null` means unset. To turn something off, give the value that the table names: `top_k: 0`.
- An unknown or repeated key, a value of a wrong type or out of range, and whatever this version
  does not support end the command with exit code 2 and a line such as
  `recipe.yaml:7: output.ordr is not a known key (value "input"); did you mean order?`
- `--set section.key=value` wins over the file and may be given often; the value is YAML, and the
  key may go into a mapping: `--set model.config_overrides.sliding_window=4096`.
- `GenerationConfig` and `ContinuousBatchingConfig` are other spellings of the two section names.
- `block_size` (now `page_size`), `use_default_compile_configs` (now `default_compile_level`) and
  `max_cached_graphs` (nothing) are accepted with a warning.
"""

_GENERATION = """\
The names and meanings are those of `transformers.GenerationConfig`, then come cbgen's own. A row's
`generation_config` may hold the same fields. Nothing is on that neither row, recipe nor model asked
for. `do_sample: false` beside a temperature other than 0 or 1 is refused.
"""

_NOT_SUPPORTED = """\
Not supported yet: each of these is refused by name, unless it is null or has a value given here.
"""

_NO_EFFECT = "Accepted and without effect: "


def recipe_reference() -> str:
    """Return the page as Markdown text."""
    parts = [_INTRODUCTION]
    for section in SECTION_ORDER:
        parts.append(f"## {section}\n")
        if section == GENERATION_SECTION:
            parts.extend(_generation())
        else:
            parts.append(_field_table(section_fields(section)))
    parts.append("## Outside of sections\n")
    parts.append(_field_table(switch_fields()))
    return "\n".join(parts)


def _field_table(fields: Iterable[RecipeField]) -> str:
    rows = [
        (
            item.name,
            describe(item.type),
            "(required)" if item.required else _code(item.default),
            item.doc,
        )
        for item in fields
    ]
    return _table(("field", "value", "default", "meaning"), rows)


def _generation() -> Iterable[str]:
    by_support: dict[Support, list[GenerationField]] = {support: [] for support in Support}
    for item in GENERATION_FIELDS.values():
        by_support[item.support].append(item)
    yield _GENERATION
    yield _table(
        ("field", "value", "meaning"),
        [(item.name, _value_words(item), item.doc) for item in by_support[Support.HONOURED]],
    )
    yield _NOT_SUPPORTED
    yield _table(
        ("field", "accepted", "what it would ask for"),
        [
            (item.name, ", ".join(_code(value) for value in item.neutral), item.doc)
            for item in GENERATION_FIELDS.values()
            if item.support in (Support.NEUTRAL, Support.REFUSED)
        ],
    )
    yield _NO_EFFECT + ", ".join(f"`{item.name}`" for item in by_support[Support.NO_EFFECT]) + ".\n"


def _value_words(item: GenerationField) -> str:
    limits = range_words(item)
    return f"{describe(item.type)}, {limits}" if limits else describe(item.type)


def _code(value: object) -> str:
    return f"`{show_yaml(value)}`"


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *((f"`{name}`", *cells) for name, *cells in rows)]
    return (
        "\n".join(
            "| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines
        )
        + "\n"
    )


if __name__ == "__main__":
    sys.stdout.write(recipe_reference())
