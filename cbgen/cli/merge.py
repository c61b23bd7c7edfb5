"""`cbgen merge`: the outputs of all shards of a run to one output."""

from __future__ import annotations

from typing import Annotated

import typer

from cbgen.cli.console import Console, count
from cbgen.cli.exits import ExitCode
from cbgen.io.output.merge import MergeReport, merge_shards
from cbgen.io.output.output_file import ClosedOutput

_MOST_NAMED = 5


def merge_command(
    context: typer.Context,
    output: Annotated[
        str, typer.Argument(metavar="OUT", help="File to write; - is stdout.", show_default=False)
    ],
    shards: Annotated[
        list[str],
        typer.Argument(
            metavar="SHARD",
            help="Outputs of cbgen run --shard, with wildcards if quoted.",
            show_default=False,
        ),
    ],
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace an existing output.")
    ] = False,
) -> None:
    """Join the outputs of shards in input order; no row may be missing or repeated.

    Example: cbgen merge answers.jsonl 'shard-*.jsonl'
    """
    console: Console = context.obj
    try:
        report = merge_shards(output, shards, overwrite=overwrite)
    except ClosedOutput:
        raise typer.Exit(ExitCode.OK) from None
    for problem in _problems(report):
        console.error(problem)
    if not report.is_whole:
        kept = "stdout has the rows before that" if output == "-" else f"{output} is not written"
        console.line(f"{kept}; run the shards that lack rows again with --resume, then merge again")
        raise typer.Exit(ExitCode.ROWS_FAILED)
    console.line(_summary(report, "stdout" if output == "-" else output))
    raise typer.Exit(ExitCode.ROWS_FAILED if report.num_failed else ExitCode.OK)


def _problems(report: MergeReport) -> list[str]:
    found = []
    if report.absent_shards:
        listed = ", ".join(report.absent_shards[:_MOST_NAMED])
        more = ", ..." if len(report.absent_shards) > _MOST_NAMED else ""
        found.append(f"not among the files: shard {listed}{more}")
    if report.missing.count:
        found.append(f"{count(report.missing.count, 'rows')} missing: index {report.missing}")
    if report.repeated.count:
        found.append(f"{count(report.repeated.count, 'rows')} repeated: index {report.repeated}")
    return found


def _summary(report: MergeReport, output: str) -> str:
    failed = f", {count(report.num_failed)} of them failed" if report.num_failed else ""
    shards = count(report.num_shards, "shards")
    return f"{output}: {count(report.num_rows, 'rows')}{failed}, from {shards}"
