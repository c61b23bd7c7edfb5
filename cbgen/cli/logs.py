"""Log records and Python warnings as single lines on the console, those of libraries too.

CBGEN_LOG=debug or info shows more records of cbgen; of libraries only warnings are shown.
"""

from __future__ import annotations

import logging
import os
import sys
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from cbgen.cli.console import Console, one_line
from cbgen.errors import UsageError

_LEVELS = ("debug", "info", "warning", "error")


class ConsoleHandler(logging.Handler):
    """Writes each record as `level: message`."""

    def __init__(self, console: Console) -> None:
        super().__init__()
        self._console = console

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record."""
        try:
            message = record.getMessage()
        except (TypeError, ValueError):  # arguments that do not fit the text
            message = str(record.msg)
        style = "yellow" if record.levelno >= logging.WARNING else "dim"
        self._console.line(one_line(f"{record.levelname.lower()}: {message}"), style)
        if record.exc_info and is_debug() and not self._console.quiet:
            self._console.raw("".join(traceback.format_exception(*record.exc_info)))


def is_debug() -> bool:
    """Whether tracebacks are wanted."""
    return os.environ.get("CBGEN_LOG", "").lower() == "debug"


@contextmanager
def logs_on_console(console: Console) -> Iterator[None]:
    """Send log records and warnings to the console.

    Raises:
        UsageError: CBGEN_LOG is no level.
    """
    level = os.environ.get("CBGEN_LOG", "").lower() or "warning"
    if level not in _LEVELS:
        raise UsageError(f"CBGEN_LOG is {level!r}; expected one of {', '.join(_LEVELS)}")
    root, own = logging.getLogger(), logging.getLogger("cbgen")
    handler = ConsoleHandler(console)
    show_warning, own_level = warnings.showwarning, own.level
    root.addHandler(handler)
    own.setLevel(level.upper())
    warnings.showwarning = _show_warning
    try:
        yield
    finally:
        warnings.showwarning = show_warning
        own.setLevel(own_level)
        root.removeHandler(handler)


def take_over_library_logs() -> None:
    """Send the records of libraries to the console that have handlers of their own for stderr."""
    for logger in logging.root.manager.loggerDict.values():
        if not isinstance(logger, logging.Logger):
            continue
        for handler in list(logger.handlers):
            if type(handler) is logging.StreamHandler and handler.stream in (None, sys.stderr):
                logger.removeHandler(handler)
                logger.propagate = True


def _show_warning(message: object, category: type[Warning], *_: object, **__: object) -> None:
    logging.getLogger("py.warnings").warning("%s: %s", category.__name__, message)
