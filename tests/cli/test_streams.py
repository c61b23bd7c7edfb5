"""What goes where while a run is under way, and how it ends when someone stops it."""

from __future__ import annotations

import re
import signal
import subprocess
import sys

import pytest

from tests.helpers.commands import SECONDS, Command, parse_rows

SHOW_CURSOR, HIDE_CURSOR = "\x1b[?25h", "\x1b[?25l"


def has_control_characters(text: str) -> bool:
    return re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f]", text) is not None


def cursor_is_shown(text: str) -> bool:
    return text.rfind(SHOW_CURSOR) > text.rfind(HIDE_CURSOR)


def test_the_first_row_leaves_before_the_input_is_read_to_its_end(recipe):
    command = Command("run", recipe)
    command.write({"id": "a", "prompt": "one"})
    command.out.wait_for("\n")
    command.write({"id": "b", "prompt": "two"})
    command.end_input()
    assert command.wait() == 0
    assert [row["id"] for row in parse_rows(command.out.text)] == ["a", "b"]


def test_stdout_has_rows_alone_and_a_log_has_no_control_characters(recipe):
    command = Command("run", recipe)
    command.write(
        {"prompt": "one", "text": "a column named like a field of the output"},
        b'{"prompt": "\x1b[31m\\u001b[2J", "id": ["\\u001b[2J"]}',
        b"\x1b[31mnot JSON\r",
    )
    command.end_input()
    assert command.wait() == 1
    assert [row["error"] is None for row in parse_rows(command.out.text)] == [True, False, False]
    assert "input_text" in command.err.text
    assert not has_control_characters(command.err.text)


def test_quiet_leaves_stderr_empty(recipe):
    command = Command("run", recipe, "--quiet")
    command.write({"prompt": "one", "text": "renamed"}, b"not JSON")
    command.end_input()
    assert command.wait() == 1
    assert command.err.text == ""


def test_a_reader_that_wants_no_more_ends_the_run_quietly(recipe, rows_file):
    source = rows_file(*({"prompt": f"row {number}"} for number in range(3000)))
    pipeline = f"{sys.executable} -m cbgen run {recipe} -i {source} --quiet | head -1"
    finished = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {pipeline}"], capture_output=True, text=True, check=False
    )
    assert (finished.returncode, finished.stderr) == (0, "")
    assert [row["id"] for row in parse_rows(finished.stdout)] == [0]


def test_a_stdout_without_reader_ends_the_run_while_input_is_still_open(recipe):
    command = Command("run", recipe, out="abandoned")
    command.write({"prompt": "one"})
    assert command.wait() == 0
    assert "error" not in command.err.text


def test_a_stderr_without_reader_changes_nothing(recipe):
    command = Command("run", recipe, err="abandoned")
    command.write({"prompt": "one"})
    command.end_input()
    assert command.wait() == 0
    assert len(parse_rows(command.out.text)) == 1


def test_a_closed_stderr_changes_nothing(recipe, tmp_path):
    target = tmp_path / "out.jsonl"
    command = Command("run", recipe, "-o", str(target), err="closed")
    command.write({"prompt": "one", "text": "a warning that nobody reads"})
    command.end_input()
    assert command.wait() == 0
    assert len(parse_rows(target.read_text())) == 1


def test_rows_for_a_closed_stdout_are_an_error(recipe):
    command = Command("run", recipe, out="closed")
    command.write({"prompt": "one"})
    command.end_input()
    assert command.wait() == 3
    assert "error: " in command.err.text


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)], ids=["SIGINT", "SIGTERM"]
)
def test_a_signal_ends_the_run_and_says_how_many_rows_are_written(recipe, number, code):
    command = Command("run", recipe)
    command.write({"id": "a", "prompt": "one"})
    command.out.wait_for('"id":"a"')
    command.write({"id": "b", "prompt": "two"})
    command.out.wait_for('"id":"b"')
    command.send(number)
    assert command.wait() == code
    # A row may have left and not be counted yet, never the other way round.
    said = command.err.text.splitlines()[-1]
    assert said in ("interrupted: 1 row is on stdout", "interrupted: 2 rows are on stdout")
    assert "Traceback" not in command.err.text


def test_the_interpreter_does_not_wait_for_a_thread_that_reads_an_open_pipe(recipe):
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-m", "cbgen", "run", recipe], **pipes) as process:
        process.stdin.write(b'{"prompt": "one"}\n')
        process.stdin.flush()
        process.stdout.readline()
        process.send_signal(signal.SIGTERM)
        assert process.wait(SECONDS) == 143
        assert b"interrupted: " in process.stderr.read().splitlines()[-1]


def test_a_signal_while_the_model_loads_ends_the_run(recipe, tmp_path):
    target = tmp_path / "out.jsonl"
    command = Command("run", recipe, "-o", str(target))
    command.err.wait_for("cbgen ")
    command.send(signal.SIGTERM)
    assert command.wait() == 143


def test_a_terminal_shows_the_live_view_and_is_left_as_it_was(recipe):
    command = Command("run", recipe, err="terminal")
    command.write({"prompt": "one"}, b"not JSON")
    command.err.wait_for("2 rows done")
    command.end_input()
    assert command.wait() == 1
    shown = command.err.text
    assert HIDE_CURSOR in shown
    assert "running" in shown
    assert cursor_is_shown(shown)
    assert "rows       2 read, 1 answered, 1 failed" in shown
    assert len(parse_rows(command.out.text)) == 2


def test_a_terminal_is_left_as_it_was_after_an_interrupt(recipe):
    command = Command("run", recipe, err="terminal")
    command.err.wait_for("running")
    command.send(signal.SIGINT)
    assert command.wait() == 130
    assert cursor_is_shown(command.err.text)
    assert "interrupted: no row was written" in command.err.text


def test_rows_on_the_terminal_are_not_torn_by_a_view(recipe):
    command = Command("run", recipe, out="terminal", err="terminal")
    command.write({"prompt": "one"})
    command.end_input()
    assert command.wait() == 0
    assert HIDE_CURSOR not in command.out.text
    rows = [line for line in command.out.text.splitlines() if line.startswith('{"id":')]
    assert len(parse_rows("".join(f"{row}\n" for row in rows))) == 1


def test_a_dumb_terminal_gets_plain_lines(recipe):
    command = Command("run", recipe, err="terminal", environment={"TERM": "dumb"})
    command.write({"prompt": "one"})
    command.end_input()
    assert command.wait() == 0
    assert "\x1b" not in command.err.text


def test_no_color_is_respected(recipe):
    command = Command("run", recipe, "-i", "missing", err="terminal", environment={"NO_COLOR": "1"})
    assert command.wait() == 2
    assert "error: " in command.err.text
    assert "\x1b[31m" not in command.err.text
    assert "\x1b[1;31m" not in command.err.text


def test_schema_into_a_closed_pipe_ends_quietly():
    read = "import sys; sys.stdin.readline()"
    pipeline = f"{sys.executable} -m cbgen schema | {sys.executable} -c '{read}'"
    finished = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {pipeline}"], capture_output=True, text=True, check=False
    )
    assert (finished.returncode, finished.stderr) == (0, "")
