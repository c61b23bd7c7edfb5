"""`--strict`: whatever validation alone can tell is told before anything is generated."""

from __future__ import annotations

from cbgen.errors import UsageError
from cbgen.io.opening import is_stream
from cbgen.io.row_source import RowSource
from cbgen.job.options import JobOptions
from cbgen.job.prepare import Preparer
from cbgen.job.survey import RowSurvey
from cbgen.recipe.schema import Recipe


def refuse_bad_rows(
    recipe: Recipe, options: JobOptions, preparer: Preparer, survey: RowSurvey
) -> None:
    """Prepare every row of the inputs, as the run will once more.

    Inputs that can be read only once, as pipes, are left to the run itself.

    Raises:
        UsageError: a row would end with an error; names the first ones.
    """
    if any(is_stream(name) for name in options.inputs.names):
        return
    source = RowSource.of_inputs(
        options.inputs,
        on_duplicate_id=recipe.output.on_duplicate_id,
        input_format=options.input_format,
    )
    survey.add(source.records(), preparer)
    if survey.examples:
        first = survey.examples[0]
        others = survey.errors.total() - 1
        more = f" (and {others} more bad rows)" if others else ""
        raise UsageError(f"{first['place']}: {first['message']}{more} (--strict)")
