"""What scheduling costs where prompts share much: the time of `schedule` beside that of the run.

    python -m pytest -m bench -s benchmarks/bench_prefixes.py

The engine runs small random models on one thread: four layers of 256 for the prompts that extend
one another, two of 32 for the questions about a document, whose attention is long enough. The
prompts come as a job brings them: sorted by their tokens, and no more at a time than it holds in
flight.
"""

from __future__ import annotations

import gc
import random
import sys
import time
from collections.abc import Iterator
from itertools import islice

import pytest
import torch
from transformers import LlamaForCausalLM

from cbgen.engine.core import Engine
from cbgen.engine.events import StepTimes
from tests.helpers.engine import make_request
from tests.helpers.models import VOCAB_SIZE, make_engine, random_model, tiny_config

MOST_SHARE = 0.05
"""Of the time of a run, for `schedule`."""
DOCUMENT_TOKENS = 100_000


class ScheduleTimes:
    """An observer that sums what `schedule` took, in seconds."""

    def __init__(self) -> None:
        self.num_steps = 0
        self.scheduling = 0.0

    def admitted(self, row: int, request_id: str, num_tokens: int) -> None:
        pass

    def decoding(self, row: int) -> None:
        pass

    def preempted(self, row: int, num_computed_tokens: int) -> None:
        pass

    def ended(self, row: int, reason: str, num_generated_tokens: int) -> None:
        pass

    def stepped(self, times: StepTimes) -> None:
        self.num_steps += 1
        self.scheduling += times.scheduled - times.started


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def text(choose: random.Random, count: int) -> list[int]:
    return [choose.randrange(1, VOCAB_SIZE) for _ in range(count)]


def extending_prompts(count: int, num_tokens: int) -> Iterator[list[int]]:
    """Yield prompts of which each is the one before it and so many tokens more."""
    whole = text(random.Random(1), count * num_tokens)
    return (whole[: (number + 1) * num_tokens] for number in range(count))


def prompts_about_a_document(count: int) -> Iterator[list[int]]:
    """Yield prompts that begin with one document and end with a question each."""
    choose = random.Random(2)
    document = text(choose, DOCUMENT_TOKENS)
    questions = sorted(text(choose, 12) for _ in range(count))
    return (document + question for question in questions)


def run_all(
    engine: Engine, prompts: Iterator[list[int]], in_flight: int, max_new_tokens: int
) -> int:
    """Answer all prompts and return how many there were."""
    numbered = enumerate(prompts)
    num_ended = num_added = 0
    while True:
        for number, prompt in islice(numbered, in_flight - (num_added - num_ended)):
            engine.add(make_request(str(number), prompt, max_new_tokens=max_new_tokens))
            num_added += 1
        if not engine.has_unfinished():
            return num_ended
        num_ended += len(engine.step())


def report_share(
    name: str,
    prompts: Iterator[list[int]],
    *,
    sizes: dict[str, int],
    in_flight: int = 2048,
    max_new_tokens: int = 32,
    **config,
) -> float:
    """Run prompts, print what they took, and return the share of `schedule`."""
    model = random_model(LlamaForCausalLM, tiny_config("llama", **sizes))
    observer = ScheduleTimes()
    with make_engine(model, observer=observer, **config) as built:
        gc.collect()
        started = time.perf_counter()
        count = run_all(built.engine, prompts, in_flight, max_new_tokens)
        seconds = time.perf_counter() - started
        stats = built.engine.stats()
    share = observer.scheduling / seconds
    sys.stderr.write(
        f"\n{name}: {count} rows in {seconds:.2f} s and {observer.num_steps} steps, "
        f"schedule {observer.scheduling:.3f} s ({share:.1%}); "
        f"{stats.num_computed_tokens} tokens computed, {stats.num_cached_tokens} found\n"
    )
    return share


@pytest.mark.bench
@pytest.mark.parametrize("page_size", [16, 256])
@pytest.mark.parametrize(("count", "num_tokens"), [(1500, 2), (600, 1)])
def test_prompts_that_extend_one_another(count, num_tokens, page_size):
    name = f"prompts that grow by {num_tokens}, pages of {page_size}"
    prompts = extending_prompts(count, num_tokens)
    sizes = {
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 4,
        "max_position_embeddings": 4096,
    }
    num_blocks = 2**20 // page_size
    share = report_share(name, prompts, sizes=sizes, page_size=page_size, num_blocks=num_blocks)
    assert share < MOST_SHARE


@pytest.mark.bench
def test_questions_about_a_document():
    prompts = prompts_about_a_document(1500)
    share = report_share(
        f"a document of {DOCUMENT_TOKENS} tokens, pages of 256",
        prompts,
        sizes={"max_position_embeddings": 2 * DOCUMENT_TOKENS},
        in_flight=256,
        max_new_tokens=4,
        page_size=256,
        num_blocks=2048,
        max_requests_per_batch=128,
    )
    assert share < MOST_SHARE
