"""Lines on stderr: clean, one console, never in the way."""

from __future__ import annotations

import logging
import warnings

import pytest

from cbgen.cli.console import Console, one_line
from cbgen.cli.logs import ConsoleHandler, logs_on_console, take_over_library_logs
from cbgen.errors import UsageError


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("two\n  lines\r\n", "two lines"),
        ("\x1b[2Jgone", "\\x1b[2Jgone"),
        ("tab\there", "tab\\there"),
        ("lone \ud800", "lone \\ud800"),
        ("grüße 世界", "grüße 世界"),
    ],
)
def test_any_text_becomes_one_printable_line(text, shown):
    assert one_line(text) == shown


def test_a_long_line_is_not_wrapped(capfd):
    console = Console()
    console.line("word " * 100)
    assert capfd.readouterr().err.count("\n") == 1


def test_markup_is_text(capfd):
    console = Console()
    console.line("[red]x[/red] :smile:")
    assert capfd.readouterr().err == "[red]x[/red] :smile:\n"


def test_a_log_has_no_colour_even_if_colour_is_forced(capfd, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    Console().error("no")
    assert capfd.readouterr().err == "error: no\n"


def test_a_quiet_console_writes_errors_alone(capfd):
    console = Console()
    console.quiet = True
    console.line("hello")
    console.error("no")
    assert capfd.readouterr().err == "error: no\n"


def test_log_records_are_lines_with_their_level(capfd):
    console = Console()
    with logs_on_console(console):
        logging.getLogger("somewhere").warning("a %s\nb", "x")
        logging.getLogger("somewhere").info("not shown")
    assert capfd.readouterr().err == "warning: a x b\n"


def test_cbgen_log_shows_more_of_cbgen_and_not_of_libraries(capfd, monkeypatch):
    console = Console()
    monkeypatch.setenv("CBGEN_LOG", "info")
    with logs_on_console(console):
        logging.getLogger("cbgen.job").info("mine")
        logging.getLogger("somewhere").info("not shown")
    assert capfd.readouterr().err == "info: mine\n"


def test_a_record_whose_arguments_do_not_fit_is_shown_anyway(capfd):
    console = Console()
    record = logging.LogRecord("somewhere", logging.WARNING, "", 0, "%d rows", ("many",), None)
    ConsoleHandler(console).emit(record)
    assert capfd.readouterr().err == "warning: %d rows\n"


def test_everything_is_put_back_at_the_end():
    console = Console()
    handlers, show = list(logging.getLogger().handlers), warnings.showwarning
    with logs_on_console(console):
        assert logging.getLogger().handlers != handlers
    assert (logging.getLogger().handlers, warnings.showwarning) == (handlers, show)


def test_a_library_that_logs_to_stderr_itself_is_shown_once(capfd):
    console = Console()
    library = logging.getLogger("a_library")
    library.addHandler(logging.StreamHandler())
    library.propagate = False
    with logs_on_console(console):
        take_over_library_logs()
        library.warning("hello")
    assert capfd.readouterr().err == "warning: hello\n"


def test_an_unknown_level_is_refused(monkeypatch):
    monkeypatch.setenv("CBGEN_LOG", "3")
    with pytest.raises(UsageError, match="CBGEN_LOG is '3'"), logs_on_console(Console()):
        pass
