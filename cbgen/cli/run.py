"""`cbgen run`: the job, with its display around it."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import typer

from cbgen import __version__
from cbgen.cli import run_options as options
from cbgen.cli.display import job_display
from cbgen.cli.exits import ExitCode
from cbgen.cli.logs import take_over_library_logs
from cbgen.cli.progress import ProgressMeter
from cbgen.cli.report import describe_inputs, settings_lines, summary_lines, written_rows
from cbgen.cli.screen import Screen
from cbgen.cli.stopping import Stopper, StopRules, StopSignal, stop_rules
from cbgen.cli.watching import FactPaths, RunWatch, watched
from cbgen.errors import CbgenError, EngineError, StoppedEarly
from cbgen.io.inputs import open_inputs
from cbgen.io.shard import Shard
from cbgen.job.early_stop import EarlyStop
from cbgen.job.options import JobOptions
from cbgen.job.report.statistics import JobStatistics
from cbgen.job.resume import parse_retry
from cbgen.job.run import run_job
from cbgen.recipe.load import load_recipe
from cbgen.recipe.schema import Recipe

if TYPE_CHECKING:
    from cbgen.job.settings import Setting  # its module loads torch


def run_command(
    context: typer.Context,
    recipe: options.RecipePath,
    input_paths: options.InputPaths = None,
    output_path: options.OutputPath = "-",
    set_values: options.SetValues = None,
    limit: options.Limit = None,
    shard: options.ShardOption = None,
    input_format: options.FormatOption = options.Format.AUTO,
    overwrite: options.Overwrite = False,
    resume: options.Resume = False,
    resume_any: options.ResumeAny = False,
    retry: options.Retry = None,
    strict: options.Strict = False,
    order: options.OrderOption = None,
    time_limit: options.TimeLimit = None,
    requeue_signal: options.RequeueSignal = None,
    stats_path: options.StatsPath = None,
    metrics_path: options.MetricsPath = None,
    trace_path: options.TracePath = None,
    quiet: options.Quiet = False,
) -> None:
    """Answer every row of one or more files.

    Example: cbgen run recipe.yaml -i prompts.jsonl -o answers.jsonl
    """
    screen: Screen = context.obj
    screen.quiet = quiet
    overrides = list(set_values or ())
    if order is not None:
        overrides.append(f"output.order={order}")
    checked = load_recipe(recipe, overrides)
    inputs = open_inputs(
        input_paths or ["-"], limit=limit, shard=None if shard is None else Shard.parse(shard)
    )
    screen.line(f"cbgen {__version__}: {recipe}, {describe_inputs(inputs)} -> {output_path}")
    job_options = JobOptions(
        inputs=inputs,
        output=output_path,
        overwrite=overwrite,
        resume=resume or resume_any or retry is not None,
        resume_any=resume_any,
        version=__version__,
        retry=frozenset() if retry is None else parse_retry(retry),
        input_format=input_format.value,
        strict=strict,
    )
    rules = stop_rules(time_limit, requeue_signal)
    paths = FactPaths(stats=stats_path, metrics=metrics_path, trace=trace_path)
    statistics = JobStatistics()
    with watched(statistics, checked, job_options, paths) as watch:
        watch.code = _run(screen, checked, job_options, statistics, watch, rules)
    raise typer.Exit(watch.code)


def _run(
    screen: Screen,
    recipe: Recipe,
    options: JobOptions,
    statistics: JobStatistics,
    watch: RunWatch,
    rules: StopRules,
) -> ExitCode:
    meter = ProgressMeter(statistics, options.inputs.max_records)
    typed = "-" in options.inputs.names and os.isatty(0)
    if typed:
        screen.line("rows are read from this terminal: one JSON object a line, Ctrl-D to end")
    elif not screen.quiet:
        meter.count_rows(options.inputs)
    rows_on_terminal = typed or (options.output == "-" and os.isatty(1))
    early_stop = EarlyStop()
    stopper = Stopper(early_stop, rules, screen.line)
    try:
        with stopper, job_display(screen, meter, redraws=not rows_on_terminal):
            took_all = _run_job(screen, recipe, options, statistics, watch, early_stop)
    except (StopSignal, StoppedEarly):
        assert stopper.reason is not None, "who ends a run says why"
        screen.line(f"{stopper.reason.text}: {written_rows(statistics, options.output)}")
        return stopper.reason.code
    except BrokenPipeError as error:  # not stdout's, which run_job deals with
        raise EngineError(f"a connection was lost: {error}") from error
    except CbgenError:
        if statistics.rows_written:
            screen.line(written_rows(statistics, options.output))
        raise
    if not took_all:
        return ExitCode.OK
    for line in summary_lines(statistics, options.output):
        screen.line(line)
    return ExitCode.ROWS_FAILED if statistics.total().rows_failed else ExitCode.OK


def _run_job(
    screen: Screen,
    recipe: Recipe,
    options: JobOptions,
    statistics: JobStatistics,
    watch: RunWatch,
    early_stop: EarlyStop,
) -> bool:
    os.environ.setdefault("TQDM_DISABLE", "1")  # a library's bar would tear the view

    def show_settings(settings: list[Setting]) -> None:
        watch.monitor.take_settings(settings)
        for line in settings_lines(settings):
            screen.line(line, style="dim")

    return run_job(
        recipe,
        options,
        statistics,
        on_loading=take_over_library_logs,
        on_settings=show_settings,
        early_stop=early_stop,
        observer=watch.trace,
    )
