"""Dictionaries to dictionaries: `cbgen.run` and `cbgen.Engine`."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal

from cbgen.engine.model.loader import LoadedModel, load_model
from cbgen.errors import UsageError
from cbgen.io.records import record_of
from cbgen.io.row_source import RowSource
from cbgen.io.template import compile_template
from cbgen.job.open_job import open_job
from cbgen.job.report.statistics import JobStatistics
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
    checked = _checked(recipe)
    return _generate(checked, rows, order or checked.output.order)


class Engine:
    """The model of a recipe, loaded once, to answer rows as often as wanted.

    A context manager; `close`, or leaving the context, lets the model go. Runs of one engine follow
    each other: a run ends before the next one begins.

    Args:
        recipe: path of a recipe, or its content as a mapping.

    Raises:
        UsageError: recipe or model are wrong.
    """

    def __init__(self, recipe: str | os.PathLike[str] | Mapping[str, Any]) -> None:
        self._recipe = _checked(recipe)
        with self._recipe.placing_errors():
            self._loaded: LoadedModel | None = load_model(self._recipe.model)

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()

    def run(
        self,
        rows: Iterable[Mapping[str, Any]],
        *,
        order: Literal["input", "completion"] | None = None,
    ) -> Iterator[dict[str, Any]]:
        """Yield one output row for each input row; arguments and errors are those of `run`.

        Raises:
            UsageError: the engine is closed.
        """
        if self._loaded is None:
            raise UsageError("the engine is closed; make a new one")
        return _generate(self._recipe, rows, order or self._recipe.output.order, self._loaded)

    def close(self) -> None:
        """Let the model go; a run that is under way keeps it until it ends."""
        self._loaded = None


def _checked(recipe: str | os.PathLike[str] | Mapping[str, Any]) -> Recipe:
    if isinstance(recipe, Mapping):
        return recipe_from_mapping(recipe)
    return load_recipe(os.fspath(recipe))


def _generate(
    recipe: Recipe,
    rows: Iterable[Mapping[str, Any]],
    order: str,
    loaded: LoadedModel | None = None,
) -> Iterator[dict[str, Any]]:
    with (
        recipe.placing_errors(),
        open_job(
            recipe, compile_template(recipe.prompt.template), JobStatistics(), loaded=loaded
        ) as opened,
    ):
        waiting: dict[int, dict[str, Any]] = {}
        next_index = 0
        records = (record_of(row, index=index, source="rows") for index, row in enumerate(rows))
        source = RowSource(records, on_duplicate_id=recipe.output.on_duplicate_id)
        for index, row in opened.job.rows(source.records()):
            if order == "completion":
                yield row
                continue
            waiting[index] = row
            while next_index in waiting:
                yield waiting.pop(next_index)
                next_index += 1
