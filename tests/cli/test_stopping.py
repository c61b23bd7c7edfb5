"""How a run ends before its input does: the first wish, the second one, and time that runs out."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from cbgen.cli import stopping
from cbgen.cli.exits import ExitCode
from cbgen.cli.stopping import Stopper, StopSignal, parse_duration, parse_signal, process_age
from cbgen.errors import UsageError
from cbgen.job.run_job import EarlyStop
from tests.helpers.commands import Command, parse_rows

PATIENCE = 30.0
MINUTE, HOUR, DAY = 60, 3600, 86400
ends_a_thread = pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")


class Asked:
    """A job that notes what it is asked, and does not end."""

    def __init__(self) -> None:
        self.stop = EarlyStop()
        self.graces: list[float] = []
        self.count = threading.Semaphore(0)
        self.lines: list[str] = []

    def begin(self) -> None:
        self.stop.attach(self._obey)

    def wait(self) -> None:
        assert self.count.acquire(timeout=PATIENCE)

    def _obey(self, grace: float) -> None:
        self.graces.append(grace)
        self.count.release()


@pytest.fixture
def asked() -> Asked:
    return Asked()


@pytest.fixture
def exits(monkeypatch):
    """Note the code of a forced exit, and let the test wait for it."""
    forced = threading.Event()
    codes: list[int] = []

    def leave(code: int) -> None:
        codes.append(code)
        forced.set()
        raise SystemExit  # ends the thread as os._exit would

    monkeypatch.setattr(os, "_exit", leave)

    def wait() -> list[int]:
        assert forced.wait(PATIENCE)
        return codes

    return wait


def make_stopper(asked: Asked, **rules) -> Stopper:
    return Stopper(asked.stop, asked.lines.append, **rules)


@pytest.mark.parametrize(
    ("number", "code"),
    [
        (signal.SIGINT, ExitCode.INTERRUPTED),
        (signal.SIGTERM, ExitCode.TERMINATED),
        (signal.SIGUSR1, ExitCode.STOPPED),
    ],
)
def test_a_signal_asks_the_job_to_end_at_once(asked, number, code):
    asked.begin()
    with make_stopper(asked, requeue_signal=signal.SIGUSR1) as stopper:
        signal.raise_signal(number)
        asked.wait()
    assert asked.graces == [0.0]
    assert stopper.reason.code is code


def test_a_signal_without_a_job_interrupts_the_main_thread(asked):
    stopper = make_stopper(asked)
    with pytest.raises(StopSignal), stopper:
        signal.raise_signal(signal.SIGTERM)
    assert stopper.reason.code is ExitCode.TERMINATED


def test_a_signal_that_python_cannot_let_through_interrupts_behind_it(asked, capfd):
    class Dying:
        def __del__(self) -> None:
            signal.raise_signal(signal.SIGINT)

    stopper = make_stopper(asked)
    with pytest.raises(StopSignal), stopper:  # noqa: PT012
        Dying()
        time.sleep(PATIENCE)
    assert stopper.reason.code is ExitCode.INTERRUPTED
    assert capfd.readouterr().err == ""


@ends_a_thread
def test_a_watch_that_fails_ends_the_run(asked, exits, monkeypatch):
    def fail(*arguments):
        raise OverflowError("too large")

    monkeypatch.setattr(stopping, "FORCE_SECONDS", 0.1)
    monkeypatch.setattr(stopping.select, "select", fail)
    asked.begin()
    with make_stopper(asked) as stopper:
        asked.wait()
        assert exits() == [ExitCode.FAILED]
    assert stopper.reason.code is ExitCode.FAILED
    assert "too large" in stopper.reason.text


def test_the_first_reason_counts(asked):
    asked.begin()
    with make_stopper(asked, requeue_signal=signal.SIGUSR1) as stopper:
        signal.raise_signal(signal.SIGUSR1)
        asked.wait()
        signal.raise_signal(signal.SIGTERM)
        asked.wait()
    assert stopper.reason.code is ExitCode.STOPPED


def test_a_signal_that_comes_twice_at_once_is_one_wish(asked):
    asked.begin()
    with make_stopper(asked):
        signal.raise_signal(signal.SIGINT)
        asked.wait()
        signal.raise_signal(signal.SIGINT)
        asked.wait()  # and the process is still there


@ends_a_thread
def test_a_second_signal_later_ends_the_process(asked, exits, monkeypatch):
    monkeypatch.setattr(stopping, "REPEAT_SECONDS", 0.0)
    asked.begin()
    with make_stopper(asked):
        signal.raise_signal(signal.SIGTERM)
        asked.wait()
        signal.raise_signal(signal.SIGTERM)
        assert exits() == [143]


@ends_a_thread
def test_a_job_that_does_not_end_is_ended(asked, exits, monkeypatch):
    monkeypatch.setattr(stopping, "FORCE_SECONDS", 0.01)
    asked.begin()
    with make_stopper(asked):
        signal.raise_signal(signal.SIGINT)
        assert exits() == [130]


def test_an_interrupt_that_is_ignored_stays_ignored(asked):
    asked.begin()
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with make_stopper(asked) as stopper:
            signal.raise_signal(signal.SIGINT)
        assert stopper.reason is None
    finally:
        signal.signal(signal.SIGINT, before)


def test_signals_are_given_back(asked):
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    with make_stopper(asked):
        assert signal.getsignal(signal.SIGTERM) != before[1]
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


def test_a_time_limit_lets_what_runs_finish(asked, monkeypatch):
    monkeypatch.setattr(stopping, "process_age", lambda: 97.0)
    asked.begin()
    with make_stopper(asked, time_limit=100.0) as stopper:
        asked.wait()
    assert stopper.reason.code is ExitCode.STOPPED
    (grace,) = asked.graces
    # 3.3 of the 100 seconds are for the end, and 10 before that for what runs: that is over.
    assert grace == 0.0


def test_the_grace_of_a_time_limit_is_a_tenth_of_it(asked, monkeypatch):
    monkeypatch.setattr(stopping, "process_age", lambda: 86.7)
    asked.begin()
    with make_stopper(asked, time_limit=100.0):
        asked.wait()
    (grace,) = asked.graces
    assert 8 < grace <= 10
    (line,) = asked.lines
    assert line == f"time limit: running rows have {grace:.0f} s to finish, no more are begun"


@pytest.mark.parametrize("seconds", [10_000.0, parse_duration("999999d"), 1e17])
def test_a_time_limit_that_is_far_asks_nothing(asked, seconds):
    asked.begin()
    with make_stopper(asked, time_limit=seconds) as stopper:
        time.sleep(0.05)
        assert (asked.graces, stopper.reason) == ([], None)
        signal.raise_signal(signal.SIGTERM)
        asked.wait()
    assert stopper.reason.code is ExitCode.TERMINATED


def test_the_age_of_the_process_is_known():
    first = process_age()
    assert 0 < first <= process_age() < 3600


@pytest.mark.parametrize("text", ["USR1", "usr1", "SIGUSR1", str(int(signal.SIGUSR1))])
def test_signals_have_names_and_numbers(text):
    assert parse_signal(text) is signal.SIGUSR1


@pytest.mark.parametrize("text", ["", "USR9", "999", "KILL", "SIGTERM", "INT"])
def test_a_signal_that_cannot_be_used_is_refused(text):
    with pytest.raises(UsageError, match=r"--requeue-signal is .*USR1"):
        parse_signal(text)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90", 90),
        ("90s", 90),
        ("15m", 15 * MINUTE),
        ("3h50m", 3 * HOUR + 50 * MINUTE),
        ("2d", 2 * DAY),
        ("1d2h3m4s", DAY + 2 * HOUR + 3 * MINUTE + 4),
        ("02:03", 2 * MINUTE + 3),
        ("1:02:03", HOUR + 2 * MINUTE + 3),
        ("1-02:03:04", DAY + 2 * HOUR + 3 * MINUTE + 4),
        ("1-02:03", DAY + 2 * HOUR + 3 * MINUTE),
        ("1-2", DAY + 2 * HOUR),
    ],
)
def test_forms_of_people_and_batch_systems_are_read(text, seconds):
    assert parse_duration(text) == seconds


@pytest.mark.parametrize(
    "text",
    ["", "0", "0s", "-5", "5 m", "1h1x", "m", "1:2:3:4", "1.5h", "9" * 400, "1" * 5000 + "d"],
)
def test_anything_else_is_refused_with_examples(text):
    with pytest.raises(UsageError, match=r"--time-limit is .*3h50m"):
        parse_duration(text)


def test_the_requeue_signal_ends_a_run_with_4(recipe):
    command = Command("run", recipe, "--requeue-signal", "USR1")
    command.write({"prompt": "one"})
    command.out.wait_for("\n")
    command.send(signal.SIGUSR1)
    assert command.wait() == 4
    assert command.err.text.splitlines()[-1] == "stopped by SIGUSR1: 1 row is on stdout"
    assert len(parse_rows(command.out.text)) == 1


def test_a_time_limit_ends_a_run_with_4_while_its_input_waits(recipe):
    command = Command("run", recipe, "--time-limit", "4s")
    command.write({"prompt": "one"})
    assert command.wait() == 4
    assert command.err.text.splitlines()[-1].startswith("stopped by --time-limit: ")


def test_a_time_limit_that_passes_while_the_model_loads_writes_nothing(recipe, tmp_path):
    target = tmp_path / "out.jsonl"
    command = Command("run", recipe, "--time-limit", "1s", "-o", str(target))
    assert command.wait() == 4
    assert "stopped by --time-limit: no row was written" in command.err.text
    assert not target.exists()


def test_a_stopped_run_writes_whole_answers_alone(recipe, tmp_path):
    long = {"ignore_eos": True, "max_new_tokens": 200}
    command = Command("run", recipe, "--order", "completion")
    command.write({"prompt": "a"}, *({"prompt": "b", "generation_config": long},) * 100)
    command.out.wait_for("\n")
    command.send(signal.SIGTERM)
    assert command.wait() == 143
    rows = parse_rows(command.out.text)
    assert 1 <= len(rows) < 101
    assert {row["finish_reason"] for row in rows} <= {"stop", "length"}


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--time-limit", "soon"),
        ("--time-limit", "9" * 500 + "d"),
        ("--requeue-signal", "KILL"),
        ("--requeue-signal", "9" * 5000),
        ("--limit", "9" * 5000),
        ("--shard", "0/" + "9" * 500),
        ("--shard", "9" * 5000 + "/1"),
    ],
)
def test_wrong_values_are_usage_errors(cbgen, recipe, option, value):
    finished = cbgen("run", recipe, "-i", "missing.jsonl", option, value)
    assert finished.code == 2


@pytest.mark.slow
@pytest.mark.parametrize("delay", [0.6 + 0.2 * step for step in range(20)])
def test_a_stop_while_libraries_and_model_load_leaves_nothing_but_the_reason(recipe, delay):
    process = subprocess.Popen(
        [sys.executable, "-m", "cbgen", "run", recipe],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    time.sleep(delay)
    process.send_signal(signal.SIGINT)
    try:
        out, err = process.communicate(timeout=PATIENCE)
    finally:
        process.kill()
    assert process.returncode == ExitCode.INTERRUPTED
    assert out == ""
    for sign in ("Exception ignored", "Traceback", "Warning"):
        assert sign not in err
