"""The command line: its commands, and how what ends one is told."""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
import traceback
from collections.abc import Sequence
from typing import Annotated, NoReturn

import typer

from cbgen import __version__
from cbgen.cli.bench import bench_command
from cbgen.cli.console import Console, discard, fill_closed_descriptors
from cbgen.cli.exits import ExitCode, Terminated, exit_code_of
from cbgen.cli.logs import is_debug, logs_on_console
from cbgen.cli.merge import merge_command
from cbgen.cli.plan import plan_command
from cbgen.cli.recipe import init_command, schema_command
from cbgen.cli.run import run_command
from cbgen.cli.stopping import sigterm_raises
from cbgen.errors import CbgenError, UsageError

_OBJECTS_BETWEEN_COLLECTIONS = 50_000

app = typer.Typer(name="cbgen", add_completion=False)
app.command("run")(run_command)
app.command("merge")(merge_command)
app.command("plan")(plan_command)
app.command("bench")(bench_command)
app.command("init")(init_command)
app.command("schema")(schema_command)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"cbgen {__version__}")
        raise typer.Exit


@app.callback()
def cbgen_command(
    show_version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version."),
    ] = False,
) -> None:
    """A JSONL file of prompts in, a JSONL file of answers out.

    Example: cbgen run recipe.yaml -i prompts.jsonl -o answers.jsonl
    """


def main() -> NoReturn:
    """Run the command line of this process and end it."""
    # Imports and models make half a million objects that stay. By default Python searches them for
    # cycles so often that it takes a fifth of the import time.
    gc.set_threshold(_OBJECTS_BETWEEN_COLLECTIONS)
    fill_closed_descriptors()
    code = run_cli(sys.argv[1:])
    for number in (signal.SIGINT, signal.SIGTERM):  # the exit code is decided by now
        signal.signal(number, signal.SIG_IGN)
    if threading.active_count() > 1:
        # A thread is still in a model's step, or waits for rows of a pipe that nobody closes.
        # Python's normal exit would wait for the locks that the thread holds.
        os._exit(code)
    sys.exit(code)


def run_cli(arguments: Sequence[str]) -> int:
    """Run one command.

    Returns:
        The exit code; errors have been written to stderr.
    """
    console = Console()
    try:
        with sigterm_raises(), logs_on_console(console):
            code = app(list(arguments), prog_name="cbgen", standalone_mode=False, obj=console)
        sys.stdout.flush()
    except BaseException as error:  # noqa: BLE001  every error becomes an exit code
        return _end(console, error)
    return int(code or ExitCode.OK)


def _end(console: Console, error: BaseException) -> ExitCode:
    """Write what ended the command and return its exit code."""
    if isinstance(error, SystemExit) and error.__context__ is not None:
        error = error.__context__  # Typer turns a closed stdout into this
    if isinstance(error, BrokenPipeError):
        discard(1)
        return ExitCode.OK
    if isinstance(error, typer.TyperException):
        console.error(f"{error.format_message()} (cbgen --help)")
        return ExitCode.USAGE
    if isinstance(error, UsageError):
        console.error(str(error))
    elif not isinstance(error, KeyboardInterrupt | Terminated):
        _tell_failure(console, error)
    return exit_code_of(error)


def _tell_failure(console: Console, error: BaseException) -> None:
    expected = isinstance(error, CbgenError)
    if is_debug() or not expected:
        console.raw("".join(traceback.format_exception(error)))
    message = str(error) if expected else f"unexpected {type(error).__name__}: {error}"
    cause = error.__cause__
    while cause is not None:
        reason = cause.strerror if isinstance(cause, OSError) else str(cause)
        if not reason or reason not in message:
            message += f"; caused by {type(cause).__name__}: {cause}"
        cause = cause.__cause__
    console.error(message)
    if expected and not is_debug():
        console.line("CBGEN_LOG=debug shows the traceback", style="dim")
