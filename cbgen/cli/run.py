"""`cbgen run`: the job, with its display and the files about it around it."""

from __future__ import annotations

import os
from collections.abc import Mapping

import typer

from cbgen import __version__
from cbgen.cli import arguments
from cbgen.cli.console import Console
from cbgen.cli.exits import ExitCode, exit_code_of
from cbgen.cli.logs import take_over_library_logs
from cbgen.cli.progress import ProgressMeter, job_display
from cbgen.cli.stopping import Stopper, StopSignal
from cbgen.cli.summary import describe_inputs, settings_lines, summary_lines, written_rows
from cbgen.errors import CbgenError, EngineError, StoppedEarly
from cbgen.io.input_files import is_remote
from cbgen.io.inputs import Inputs
from cbgen.io.output.output_file import note_output
from cbgen.io.used_files import real_output
from cbgen.job.options import JobOptions, files_of_recipe
from cbgen.job.report.report_writer import ReportWriter
from cbgen.job.report.statistics import JobStatistics
from cbgen.job.report.trace import TraceFile
from cbgen.job.resume import parse_retry
from cbgen.job.run_job import EarlyStop, run_job
from cbgen.job.settings import Setting
from cbgen.recipe.load import load_recipe
from cbgen.recipe.schema import Recipe


def run_command(
    context: typer.Context,
    recipe: arguments.RecipePath,
    input_paths: arguments.InputPaths = None,
    output_path: arguments.OutputPath = "-",
    set_values: arguments.SetValues = None,
    limit: arguments.Limit = None,
    shard: arguments.ShardOption = None,
    input_format: arguments.FormatOption = "auto",
    overwrite: arguments.Overwrite = False,
    resume: arguments.Resume = False,
    resume_any: arguments.ResumeAny = False,
    retry: arguments.Retry = None,
    strict: arguments.Strict = False,
    order: arguments.OrderOption = None,
    time_limit: arguments.TimeLimit = None,
    requeue_signal: arguments.RequeueSignal = None,
    stats_path: arguments.StatsPath = None,
    metrics_path: arguments.MetricsPath = None,
    trace_path: arguments.TracePath = None,
    quiet: arguments.Quiet = False,
) -> None:
    """Answer every row of one or more files.

    Example: cbgen run recipe.yaml -i prompts.jsonl -o answers.jsonl
    """
    console: Console = context.obj
    console.quiet = quiet
    overrides = list(set_values or ())
    if order is not None:
        overrides.append(f"output.order={order}")
    checked = load_recipe(recipe, overrides)
    inputs = Inputs(input_paths or ["-"], limit=limit, shard=shard)
    console.line(f"cbgen {__version__}: {recipe}, {describe_inputs(inputs)} -> {output_path}")
    options = JobOptions(
        inputs=inputs,
        output=real_output(output_path),
        overwrite=overwrite,
        resume=resume or resume_any or retry is not None,
        resume_any=resume_any,
        version=__version__,
        retry=frozenset() if retry is None else parse_retry(retry),
        input_format=input_format,
        strict=strict,
    )
    paths = {"--stats": stats_path, "--metrics": metrics_path, "--trace": trace_path}
    _refuse_shared_files(checked, recipe, options, paths)
    stopper = Stopper(
        EarlyStop(),
        console.line,
        time_limit=time_limit,
        requeue_signal=requeue_signal,
    )
    raise typer.Exit(_run_with_reports(console, checked, options, stopper, paths))


def _run_with_reports(
    console: Console,
    recipe: Recipe,
    options: JobOptions,
    stopper: Stopper,
    report_paths: Mapping[str, str | None],
) -> ExitCode:
    """Run the job, and complete the files about it (by option) however it ends."""
    statistics = JobStatistics()
    report_writer = ReportWriter(
        statistics,
        recipe,
        output=options.output,
        version=options.version,
        stats_path=report_paths["--stats"],
        metrics_path=report_paths["--metrics"],
    )
    trace_path = report_paths["--trace"]
    trace = None if trace_path is None else TraceFile(trace_path)
    report_writer.start()
    code = ExitCode.FAILED
    try:
        code = _run(console, recipe, options, statistics, stopper, report_writer, trace)
    except BaseException as error:
        code = exit_code_of(error)
        raise
    finally:
        if trace is not None:
            trace.close()
        report_writer.finish(code)
    return code


def _refuse_shared_files(
    recipe: Recipe, recipe_path: str, options: JobOptions, report_paths: Mapping[str, str | None]
) -> None:
    """Refuse to write over what the run reads, or two things into one file."""
    files = files_of_recipe(recipe, recipe_path)
    for name in options.inputs.names:
        if not is_remote(name):
            files.note_read(name, f"the input file {name}")
    note_output(files, options.output)
    for option, path in report_paths.items():
        if path is not None:
            files.note_written(path, f"the file of {option}", given_as=f"{option} {path}")


def _run(
    console: Console,
    recipe: Recipe,
    options: JobOptions,
    statistics: JobStatistics,
    stopper: Stopper,
    report_writer: ReportWriter,
    trace: TraceFile | None,
) -> ExitCode:
    """Run the job and show how it goes and how it ended."""
    meter = ProgressMeter(statistics, options.inputs.max_records)
    typed = "-" in options.inputs.names and os.isatty(0)
    if typed:
        console.line("rows are read from this terminal: one JSON object a line, Ctrl-D to end")
    elif not console.quiet:
        meter.count_rows(options.inputs)
    rows_on_terminal = typed or (options.output == "-" and os.isatty(1))
    os.environ.setdefault("TQDM_DISABLE", "1")  # a library's bar would tear the view

    def show_settings(settings: list[Setting]) -> None:
        report_writer.take_settings(settings)
        for line in settings_lines(settings):
            console.line(line, style="dim")

    try:
        with (
            stopper,
            recipe.placing_errors(),
            job_display(console, meter, redraws=not rows_on_terminal),
        ):
            took_all = run_job(
                recipe,
                options,
                statistics,
                on_loading=take_over_library_logs,
                on_settings=show_settings,
                early_stop=stopper.early_stop,
                observer=trace,
            )
    except (StopSignal, Exception) as error:
        asked = isinstance(error, StopSignal | StoppedEarly)
        # While the model loads, a library may make another error of a StopSignal.
        if asked or (stopper.reason is not None and not stopper.early_stop.has_job):
            assert stopper.reason is not None, "what ends a run early gives a reason"
            console.line(f"{stopper.reason.text}: {written_rows(statistics, options.output)}")
            return stopper.reason.code
        if isinstance(error, BrokenPipeError):  # not stdout's, which run_job deals with
            raise EngineError(f"a connection was lost: {error}") from error
        if isinstance(error, CbgenError) and statistics.rows_written:
            console.line(written_rows(statistics, options.output))
        raise
    if not took_all:
        return ExitCode.OK
    for line in summary_lines(statistics, options.output):
        console.line(line)
    return ExitCode.ROWS_FAILED if statistics.total().rows_failed else ExitCode.OK
