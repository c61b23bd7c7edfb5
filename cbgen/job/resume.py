"""Whether a run may go on with an output, and which of its rows it keeps.

Compares this run with what OUT.run says of the one before: recipe, options, and the input record by
record. Refuses with what has changed; with `resume_any`, finds the rows that must be redone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from cbgen.errors import UsageError
from cbgen.io.input_files import is_remote, is_stream
from cbgen.io.inputs import Inputs
from cbgen.io.output.finished_rows import FinishedRows, RowSet
from cbgen.io.output.output_file import run_path
from cbgen.io.output.run_file import RunFile, RunHeader, storable
from cbgen.io.records import Record
from cbgen.io.rows import FINISH_REASONS, RowOutcome
from cbgen.job.options import JobOptions
from cbgen.job.report.statistics import JobStatistics
from cbgen.recipe.digest import recipe_changes, recipe_values
from cbgen.recipe.schema import Recipe

_ANYWAY = "--resume-any goes on anyway, --overwrite starts anew"


def parse_retry(text: str) -> frozenset[str]:
    """Read the kinds of rows to redo, comma separated.

    Raises:
        UsageError: one is unknown.
    """
    kinds = [kind.strip() for kind in text.split(",")]
    for kind in kinds:
        if kind not in FINISH_REASONS:
            raise UsageError(
                f"--retry {text}: {kind!r} is no finish reason of a row; known are "
                f"{', '.join(FINISH_REASONS)}"
            )
    return frozenset(kinds)


def header_of(recipe: Recipe, options: JobOptions) -> RunHeader:
    """Return what OUT.run shall say of a run."""
    return RunHeader(
        recipe_digest=recipe.digest,
        recipe=recipe_values(recipe),
        inputs=list(options.inputs.names),
        shard=str(options.inputs.shard),
        input_format=options.input_format,
        cbgen=options.version,
    )


def finished_rows(
    recipe: Recipe, options: JobOptions, run: RunFile, statistics: JobStatistics
) -> FinishedRows:
    """Return the rows that an output keeps. Changes neither of its files.

    Args:
        recipe: of this run.
        options: of this run.
        run: OUT.run; gets a draft where it must be replaced.
        statistics: counts the rows that are kept.

    Raises:
        UsageError: this run is another one than the output's, and `resume_any` is not set.
    """
    header = header_of(recipe, options)
    _compare_runs(run.previous, header, options)
    changed = _compare_inputs(run, header, options)
    shard = options.inputs.shard

    def position(outcome: RowOutcome) -> int | None:
        place = shard.position(outcome.index)
        is_same = shard.takes(outcome.index) and place < run.num_known and place not in changed
        return place if is_same and options.retry.isdisjoint(outcome.finish_reasons) else None

    def count(outcome: RowOutcome) -> None:
        tokens = outcome.prompt_tokens, outcome.completion_tokens
        statistics.count_resumed(outcome.finish_reasons, outcome.error_code, tokens)

    return FinishedRows(options.output, order=recipe.output.order, position=position, on_kept=count)


def checked_records(
    records: Iterator[Record], run: RunFile, inputs: Inputs
) -> Iterator[tuple[int, Record]]:
    """Yield position and record of an input that must begin as OUT.run says, and note the others.

    Raises:
        UsageError: a record is another one than it was, or missing.
    """
    position = -1
    known = run.known()
    for position, record in enumerate(records):
        digest = next(known, None)
        if digest is None:
            run.note(record.digest)
        elif storable(record.digest) != digest:
            raise UsageError(
                f"{record.place}: the input has changed: this row is another one than the run "
                "before read here; --resume-any redoes the rows that have changed, --overwrite "
                "starts anew"
            )
        yield position, record
    if next(known, None) is not None:
        there = f"{inputs.names[-1]} ends after {position + 1}"
        if inputs.limit is not None:
            there = f"--limit {inputs.limit} takes {position + 1}"
        raise UsageError(
            f"the run before read {run.num_known} rows, and {there}; --resume-any drops the "
            "answers of the others, --overwrite starts anew"
        )


def can_be_read_twice(inputs: Inputs) -> bool:
    """Whether all inputs are files of this machine."""
    return not any(is_stream(name) or is_remote(name) for name in inputs.names)


def _compare_runs(previous: RunHeader | None, header: RunHeader, options: JobOptions) -> None:
    output = options.output
    if previous is None:
        if options.resume_any:
            return
        raise UsageError(
            f"{run_path(output)}: is missing or damaged, so nobody knows what the rows of {output} "
            "answer; if recipe and input are the same, --resume-any goes on with them; --overwrite "
            "starts anew"
        )
    if previous.shard != header.shard:
        raise UsageError(
            f"{output}: holds shard {previous.shard}, and this run is shard {header.shard}; each "
            "shard needs its own output"
        )
    if options.resume_any:
        return
    changes = recipe_changes(previous.recipe, header.recipe)
    if previous.recipe_digest != header.recipe_digest:
        said = "; ".join(changes) or f"its digest was {previous.recipe_digest}"
        raise UsageError(
            f"{output}: was made by another recipe: {said}. --resume-any keeps the rows that it "
            "holds and answers the others by this recipe (with --retry length, say, those that "
            "were cut off too); --overwrite starts anew"
        )
    if previous.input_format != header.input_format:
        raise UsageError(
            f"{output}: --format was {previous.input_format} and is {header.input_format}; "
            f"{_ANYWAY}"
        )


def _compare_inputs(run: RunFile, header: RunHeader, options: JobOptions) -> RowSet:
    """Return the positions of records that are others than they were.

    What can be read but once is compared later, by `checked_records`.
    """
    changed = RowSet()
    inputs = options.inputs
    if not can_be_read_twice(inputs):
        if run.previous is None:
            raise UsageError(
                f"{run_path(options.output)}: is missing or damaged, and an input that can be read "
                "but once cannot tell what it said; save the input to a file first"
            )
        if run.previous != header:
            run.draft(run.known())
    elif options.resume_any:
        run.draft(_digests_now(run, inputs, changed.add))
    elif run.num_known:
        compared = checked_records(inputs.records(), run, inputs)
        for position, _ in compared:
            if position + 1 == run.num_known:
                break
    return changed


def _digests_now(
    run: RunFile, inputs: Inputs, on_changed: Callable[[int], None]
) -> Iterator[bytes]:
    """Yield the digests of the records that OUT may hold rows of."""
    before = run.known()
    for position, record in enumerate(inputs.records()):
        old = next(before, None)
        if old is None and run.previous is not None:
            return
        if old is not None and old != storable(record.digest):
            on_changed(position)
        yield record.digest
