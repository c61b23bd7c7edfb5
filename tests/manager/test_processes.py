"""Processes that end with a manager running, or fork: nothing hangs, everybody learns why."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

import cbgen
from cbgen.manager.background_engine import EXIT_SECONDS, running_engines
from tests.helpers.managers import PATIENCE
from tests.helpers.sources import ROOT

pytestmark = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")

HEAD = """
import threading
import cbgen
from tests.helpers.models import tiny_model

manager = cbgen.init_continuous_batching(tiny_model("llama"), {"max_new_tokens": 200})
manager.start()
"""


def run(program: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", HEAD + program],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


READING = """
def read():
    while (output := manager.get_result()) is not None:
        print(output.request_id, output.status.name, len(output.generated_tokens))
    try:
        manager.add_request([1])
    except cbgen.ManagerStopped as error:
        print(error)

threading.Thread(target=read).start()
manager.add_request([1, 2, 3], request_id="a")
"""
EXECUTOR = """
from concurrent.futures import ThreadPoolExecutor

executor = ThreadPoolExecutor()
waiting = executor.submit(manager.get_result, "never added")
"""


def test_threads_that_wait_end_with_the_main_thread_once_all_is_answered():
    ran = run(READING + EXECUTOR)
    assert (ran.returncode, ran.stderr) == (0, "")
    answered, refusal = ran.stdout.splitlines()
    assert answered == "a FINISHED 200"
    assert refusal.startswith("the main thread has ended, and with it the manager takes no more")


def test_a_main_thread_that_fails_ends_what_is_unfinished():
    ran = run(READING + "raise ValueError('no more')")
    assert ran.returncode == 1
    assert ran.stdout.splitlines()[0].startswith("a FAILED ")
    assert ran.stderr.endswith("ValueError: no more\n")


def test_an_exit_does_not_wait_for_a_manager_that_a_pause_holds(scripted):
    manager = scripted()
    with manager.pause():
        started = time.monotonic()
        running_engines.stop_all()
        assert time.monotonic() - started < EXIT_SECONDS / 2
    assert manager.is_running()


def in_a_fork(work) -> str:
    """Return what a function returns in a forked process."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(writing, str(work()).encode())
        finally:
            os._exit(0)
    os.close(writing)
    deadline = time.monotonic() + PATIENCE
    while os.waitpid(child, os.WNOHANG)[0] == 0:
        if time.monotonic() > deadline:
            os.kill(child, 9)
        time.sleep(0.005)
    with os.fdopen(reading) as pipe:
        return pipe.read()


CALLS = {
    "add": lambda manager: manager.add_request([1]),
    "get": lambda manager: manager.get_result(),
    "follow": lambda manager: list(manager.request_id_iter("a")),
    "start": lambda manager: manager.start(),
    "pause": lambda manager: manager.pause().__enter__(),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_forked_process_learns_that_it_has_no_engine(scripted, name):
    manager = scripted()

    def work() -> str:
        try:
            CALLS[name](manager)
        except RuntimeError as error:
            return str(error)
        return "no error"

    assert "the process was forked" in in_a_fork(work)
    assert manager.is_running()


def test_a_manager_does_not_run_in_a_forked_process(scripted):
    manager = scripted()

    def work() -> list[object]:
        states = [manager.is_running(), manager.warmed_up]
        manager.stop()
        manager.destroy()
        return [*states, manager.is_destroyed]

    assert in_a_fork(work) == "[False, False, True]"
    manager.add_request([1], request_id="a", max_new_tokens=1)
    assert manager.get_result("a", timeout=PATIENCE).generated_tokens == [2]


def test_outputs_that_were_there_can_be_fetched_in_a_forked_process(scripted):
    manager = scripted()
    manager.add_request([1], request_id="a", max_new_tokens=1)
    while manager.stats().num_running or "a" in manager._router._unanswered:
        time.sleep(0.001)
    assert in_a_fork(lambda: manager.get_result("a").generated_tokens) == "[2]"
    assert isinstance(manager.get_result("a"), cbgen.RequestOutput)
