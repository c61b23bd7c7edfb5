"""`cbgen plan`: what a run would be, before it costs anything."""

from __future__ import annotations

import sys
from contextlib import nullcontext

import typer

from cbgen.cli import run_options as options
from cbgen.cli.exits import ExitCode
from cbgen.cli.logs import take_over_library_logs
from cbgen.cli.plan_view import show_plan
from cbgen.cli.report import settings_lines
from cbgen.cli.screen import Screen
from cbgen.io.encode import encode_value
from cbgen.io.inputs import open_inputs
from cbgen.io.shard import Shard
from cbgen.recipe.load import load_recipe


def plan_command(
    context: typer.Context,
    recipe: options.RecipePath,
    input_paths: options.PlannedPaths = None,
    set_values: options.SetValues = None,
    limit: options.Limit = None,
    shard: options.ShardOption = None,
    input_format: options.FormatOption = options.Format.AUTO,
    quiet: options.Quiet = False,
) -> None:
    """Check rows and show what a run would do; no weights are loaded.

    A table for people on stderr, one JSON line on stdout. Exit code 1 if there are bad rows.

    Example: cbgen plan recipe.yaml -i prompts.jsonl
    """
    screen: Screen = context.obj
    screen.quiet = quiet
    checked = load_recipe(recipe, set_values or ())
    inputs = None
    if input_paths:
        part = None if shard is None else Shard.parse(shard)
        inputs = open_inputs(input_paths, limit=limit, shard=part)
    from cbgen.job.plan import plan_job  # loads torch, which takes seconds

    take_over_library_logs()
    waits = screen.can_redraw and not quiet
    with screen.console.status("reading config and rows") if waits else nullcontext():
        plan = plan_job(checked, inputs, input_format.value)
    for line in settings_lines(plan.settings):
        screen.line(line, style="dim")
    show_plan(screen, plan.summary)
    sys.stdout.write(encode_value({"recipe": recipe, **plan.summary}) + "\n")
    raise typer.Exit(ExitCode.ROWS_FAILED if plan.num_bad_rows else ExitCode.OK)
