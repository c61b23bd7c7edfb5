"""Dictionaries to dictionaries: `cbgen.run`."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal

from cbgen.io.identity import IdIndex
from cbgen.io.openai_requests import identify
from cbgen.io.reader import Record, record_of
from cbgen.io.template import compile_template
from cbgen.job.session import open_session
from cbgen.job.statistics import JobStatistics
from cbgen.recipe.load import load_recipe, recipe_from_mapping
from cbgen.recipe.schema import Recipe


def run(
    recipe: str | os.PathLike[str] | Mapping[str, Any],
    rows: Iterable[Mapping[str, Any]],
    *,
    order: Literal["input", "completion"] | None = None,
) -> Iterator[dict[str, Any]]:
    """Yield one output row for each input row, as `cbgen run` would write it.

    The model is loaded when the first row is asked for, and let go when the iterator ends or is
    closed.

    Args:
        recipe: path of a recipe, or its content as a mapping.
        rows: input rows; taken lazily, a bounded number ahead.
        order: yield in the order of the input, or as rows finish; None = the recipe's
            `output.order`. In input order, rows that finish ahead of another wait in memory.

    Raises:
        UsageError: recipe or model are wrong.
        EngineError: the engine failed.
    """
    checked = (
        recipe_from_mapping(recipe)
        if isinstance(recipe, Mapping)
        else load_recipe(os.fspath(recipe))
    )
    return _generate(checked, rows, order or checked.output.order)


def _generate(
    recipe: Recipe, rows: Iterable[Mapping[str, Any]], order: str
) -> Iterator[dict[str, Any]]:
    with open_session(recipe, compile_template(recipe.prompt.template), JobStatistics()) as session:
        waiting: dict[int, dict[str, Any]] = {}
        next_index = 0
        for index, row in session.job.rows(_records(recipe, rows)):
            if order == "completion":
                yield row
                continue
            waiting[index] = row
            while next_index in waiting:
                yield waiting.pop(next_index)
                next_index += 1


def _records(recipe: Recipe, rows: Iterable[Mapping[str, Any]]) -> Iterator[Record]:
    ids = IdIndex(recipe.output.on_duplicate_id)
    for index, row in enumerate(rows):
        record = identify(record_of(row, index=index, source="rows"), "auto")
        yield ids.admit(record)
