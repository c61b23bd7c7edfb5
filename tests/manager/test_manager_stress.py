"""A hundred threads at once: every request ends in exactly one final output, in time."""

from __future__ import annotations

import gc
import random
import threading
import time
from collections import Counter

import pytest
from transformers import GenerationConfig

import cbgen
from cbgen.engine.request import RequestStatus
from tests.helpers.managers import run_threads
from tests.helpers.models import VOCAB_SIZE, tiny_model

pytestmark = pytest.mark.serial

NUM_THREADS = 100
WAIT_SECONDS = 30.0
SLACK_SECONDS = 10.0
"""By how much a wait may exceed its timeout on a machine that has two cores for 100 threads."""


class Worker:
    """One caller: adds, cancels, streams and waits, and counts what it gets for its requests."""

    def __init__(self, manager: cbgen.ContinuousBatchingManager, number: int, end: float) -> None:
        self.manager = manager
        self.number = number
        self.end = end
        self.random = random.Random(number)
        self.finals: Counter[str] = Counter()
        self.added: list[str] = []

    def __call__(self) -> None:
        actions = (self.wait, self.stream, self.cancel, self.give_up_and_wait, self.wrong)
        while time.monotonic() < self.end:
            self.random.choice(actions)(f"{self.number}.{len(self.added)}")

    def add(self, name: str, **options) -> None:
        prompt = self.random.choices(range(VOCAB_SIZE), k=self.random.randint(1, 20))
        options = {"max_new_tokens": self.random.randint(1, 8)} | options
        self.manager.add_request(prompt, request_id=name, **options)
        self.added.append(name)

    def take(self, output: cbgen.GenerationOutput | None) -> None:
        assert output is not None, "a wait ended without its result"
        assert output.request_id == self.added[-1]
        self.finals[output.request_id] += output.is_finished()

    def wait(self, name: str) -> None:
        self.add(name)
        self.take(self.manager.get_result(name, timeout=WAIT_SECONDS))

    def stream(self, name: str) -> None:
        self.add(name, streaming=True)
        tokens: list[int] = []
        for chunk in self.manager.request_id_iter(name):
            tokens += chunk.new_tokens
            self.take(chunk)
        assert tokens == chunk.generated_tokens

    def cancel(self, name: str) -> None:
        self.add(name, max_new_tokens=40)
        self.manager.cancel_request(name)
        self.take(self.manager.get_result(name, timeout=WAIT_SECONDS))

    def give_up_and_wait(self, name: str) -> None:
        started = time.monotonic()
        assert self.manager.get_result(f"{name} nobody", timeout=0.001) is None
        assert time.monotonic() - started < SLACK_SECONDS
        self.wait(name)

    def wrong(self, name: str) -> None:
        self.add(name, temperature=-1.0)
        output = self.manager.get_result(name, timeout=WAIT_SECONDS)
        self.take(output)
        assert output.status is RequestStatus.FAILED


def resident_bytes() -> int:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * 4096


def run_workers(manager: cbgen.ContinuousBatchingManager, seconds: float, offset: int) -> int:
    """Let all workers work; return how many requests they added."""
    end = time.monotonic() + seconds
    workers = [Worker(manager, offset + number, end) for number in range(NUM_THREADS)]
    run_threads(workers, timeout=seconds + WAIT_SECONDS)
    for worker in workers:
        assert worker.finals == Counter(worker.added)
    assert manager.get_result(timeout=0.05) is None  # nothing is left over
    return sum(len(worker.added) for worker in workers)


def make_manager():
    batching = {"page_size": 8, "num_blocks": 64, "max_batch_tokens": 128}
    return cbgen.continuous_batching_context_manager(
        tiny_model("llama"),
        GenerationConfig(max_new_tokens=8),
        continuous_batching_config=batching | {"max_requests_per_batch": 32, "max_queue_size": 50},
    )


def test_a_hundred_threads_get_one_final_output_for_each_request():
    threads = threading.active_count()
    with make_manager() as manager:
        assert run_workers(manager, 4.0, 0) >= NUM_THREADS
        assert not manager._router._unanswered
        assert not manager._router._followers
        assert not manager._router._advancing
    assert threading.active_count() == threads


@pytest.mark.slow
def test_a_hundred_threads_for_two_minutes_leave_memory_as_it_was(monkeypatch):
    monkeypatch.delenv("CBGEN_CHECK")
    with make_manager() as manager:
        run_workers(manager, 20.0, 0)
        gc.collect()
        before = resident_bytes()
        num_added = run_workers(manager, 100.0, NUM_THREADS)
        gc.collect()
        assert resident_bytes() - before < 40 * 2**20, f"{num_added} requests left memory behind"
