"""The exit codes, and the one that each error ends the process with."""

from __future__ import annotations

from enum import IntEnum

from cbgen.errors import UsageError


class ExitCode(IntEnum):
    """How a command ended; scripts rely on these numbers."""

    OK = 0
    """Every row is answered, or the reader of stdout wanted no more."""
    ROWS_FAILED = 1
    """Finished; some rows carry an error."""
    USAGE = 2
    """Recipe, command line, input or model are wrong."""
    FAILED = 3
    """The engine or the output failed; finished rows are on disk."""
    STOPPED = 4
    """Stopped by a time limit or the signal of a batch system, resumable."""
    INTERRUPTED = 130
    """Stopped by SIGINT (Ctrl-C)."""
    TERMINATED = 143
    """Stopped by SIGTERM."""


class Terminated(BaseException):
    """The process got SIGTERM while no job ran."""


def exit_code_of(error: BaseException) -> ExitCode:
    """Return the exit code of an error that ended a command."""
    if isinstance(error, UsageError):
        return ExitCode.USAGE
    if isinstance(error, KeyboardInterrupt):
        return ExitCode.INTERRUPTED
    if isinstance(error, Terminated):
        return ExitCode.TERMINATED
    return ExitCode.FAILED
