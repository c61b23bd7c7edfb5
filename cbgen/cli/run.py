"""`cbgen run`: the job, with its display around it."""

from __future__ import annotations

import os
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

from cbgen import __version__
from cbgen.cli.display import job_display
from cbgen.cli.exits import ExitCode, exit_code_of
from cbgen.cli.logs import take_over_library_logs
from cbgen.cli.progress import ProgressMeter
from cbgen.cli.report import settings_lines, summary_lines, written_rows
from cbgen.cli.screen import Screen
from cbgen.cli.signals import Terminated
from cbgen.errors import CbgenError
from cbgen.job.options import JobOptions
from cbgen.job.statistics import JobStatistics
from cbgen.recipe.load import load_recipe
from cbgen.recipe.schema import Recipe

if TYPE_CHECKING:
    from cbgen.job.settings import Setting  # its module loads torch


class Order(StrEnum):
    """Values of --order."""

    INPUT = "input"
    COMPLETION = "completion"


def run_command(
    context: typer.Context,
    recipe: Annotated[str, typer.Argument(metavar="RECIPE", help="Recipe, a YAML file.")],
    input_path: Annotated[
        str,
        typer.Option(
            "--input",
            "-i",
            show_default=False,
            metavar="FILE",
            help="Rows, JSONL; - is stdin (default).",
        ),
    ] = "-",
    output_path: Annotated[
        str,
        typer.Option(
            "--output",
            "-o",
            show_default=False,
            metavar="FILE",
            help="Answers, JSONL; - is stdout (default).",
        ),
    ] = "-",
    set_values: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="KEY=VALUE", help="Set section.key of the recipe; repeatable."
        ),
    ] = None,
    limit: Annotated[
        int | None, typer.Option("--limit", min=1, metavar="N", help="Take the first N rows.")
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace an existing output.")
    ] = False,
    strict: Annotated[bool, typer.Option("--strict", help="Stop at the first bad row.")] = False,
    order: Annotated[
        Order | None, typer.Option("--order", help="Answers in input order, or as they finish.")
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Show errors alone.")] = False,
) -> None:
    """Answer every row of a JSONL file.

    Example: cbgen run recipe.yaml -i prompts.jsonl -o answers.jsonl
    """
    screen: Screen = context.obj
    screen.quiet = quiet
    overrides = list(set_values or ())
    if order is not None:
        overrides.append(f"output.order={order}")
    checked = load_recipe(recipe, overrides)
    screen.line(f"cbgen {__version__}: {recipe}, {input_path} -> {output_path}")
    options = JobOptions(
        input=input_path, output=output_path, overwrite=overwrite, limit=limit, strict=strict
    )
    raise typer.Exit(_run(screen, checked, options))


def _run(screen: Screen, recipe: Recipe, options: JobOptions) -> ExitCode:
    statistics = JobStatistics()
    meter = ProgressMeter(statistics, options.limit)
    typed = options.input == "-" and os.isatty(0)
    if typed:
        screen.line("rows are read from this terminal: one JSON object a line, Ctrl-D to end")
    elif not screen.quiet:
        meter.count_rows(options.input)
    rows_on_terminal = typed or (options.output == "-" and os.isatty(1))
    try:
        with job_display(screen, meter, redraws=not rows_on_terminal):
            took_all = _run_job(screen, recipe, options, statistics)
    except (KeyboardInterrupt, Terminated) as stop:
        screen.line(f"interrupted: {written_rows(statistics, options.output)}")
        return exit_code_of(stop)
    except CbgenError:
        if statistics.rows_written:
            screen.line(written_rows(statistics, options.output))
        raise
    if not took_all:
        return ExitCode.OK
    for line in summary_lines(statistics, options.output):
        screen.line(line)
    return ExitCode.ROWS_FAILED if statistics.rows_failed else ExitCode.OK


def _run_job(
    screen: Screen, recipe: Recipe, options: JobOptions, statistics: JobStatistics
) -> bool:
    os.environ.setdefault("TQDM_DISABLE", "1")  # a library's bar would tear the view
    from cbgen.job.run import run_job  # loads torch, which takes seconds

    take_over_library_logs()

    def show_settings(settings: list[Setting]) -> None:
        for line in settings_lines(settings):
            screen.line(line, style="dim")

    return run_job(recipe, options, statistics, on_settings=show_settings)
