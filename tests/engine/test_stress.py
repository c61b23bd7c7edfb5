"""Random schedules: every answer is that of `model.generate` or of the row alone; nothing leaks.

Arrivals, lengths, cancellations, sampling, pages, budgets and cache sizes come from a seed. The
engine verifies its bookkeeping after every step.
"""

from __future__ import annotations

import random

import pytest

from cbgen.engine.core import Engine
from cbgen.engine.request import GenerationOutput, Request, RequestStatus
from tests.helpers.engine import make_request, run_engine
from tests.helpers.models import VOCAB_SIZE, make_engine, tiny_reference

MODELS = ("llama", "gpt2", "qwen3", "mistral", "gemma2")
MAX_NEW_TOKENS = 16
NUM_ROWS = 20
LENGTHS = (1, 1, 2, 3, 4, 5, 7, 8, 9, 12, 16, 17, 23, 31, 40)


def make_prompts() -> list[tuple[int, ...]]:
    choose = random.Random(11)
    return [tuple(choose.randrange(1, VOCAB_SIZE) for _ in range(length)) for length in LENGTHS]


PROMPTS = make_prompts()


class Schedule:
    """What one random run does; the same for the same seed."""

    def __init__(self, seed: int) -> None:
        self.choose = random.Random(seed)
        self.model = MODELS[seed % len(MODELS)]
        self.attention = self.choose.choice(["auto", "eager"])
        self.requests = [self.request(str(number)) for number in range(NUM_ROWS)]

    def request(self, request_id: str) -> Request:
        """Return a random request, greedy in two of three cases."""
        choose = self.choose
        sampling = {}
        if choose.random() < 1 / 3:
            sampling = {
                "temperature": choose.choice([0.5, 1.0, 2.0]),
                "top_k": choose.choice([0, 3, 40]),
                "top_p": choose.choice([1.0, 0.7]),
                "min_p": choose.choice([0.0, 0.1]),
                "seed": choose.randrange(2**63),
            }
        return make_request(
            request_id,
            choose.choice(PROMPTS),
            max_new_tokens=choose.randrange(1, MAX_NEW_TOKENS + 1),
            logprobs=choose.choice([None, "raw", "processed"]),
            **sampling,
        )

    def config(self) -> dict[str, object]:
        """Return random limits; the cache holds the longest row, and sometimes little more."""
        choose = self.choose
        page_size = choose.choice([4, 5, 8, 16])
        return {
            "page_size": page_size,
            "num_blocks": -(-(max(LENGTHS) + MAX_NEW_TOKENS) // page_size) + choose.randrange(4),
            "max_batch_tokens": choose.choice([4, 8, 16, 64]),
            "max_requests_per_batch": choose.choice([1, 3, 6, 16]),
            "safety_margin": choose.choice([0.0, 0.0, 0.15, 1.0]),
        }

    def run(self, engine: Engine) -> dict[str, GenerationOutput]:
        """Let requests arrive between steps, cancel some, and return all outputs by id."""
        choose = self.choose
        to_come = list(reversed(self.requests))
        outputs: list[GenerationOutput] = []
        while to_come or engine.has_unfinished():
            for _ in range(choose.choice([0, 0, 1, 1, 2, 6])):
                if to_come:
                    engine.add(to_come.pop())
            unfinished = engine.unfinished()
            if unfinished and choose.random() < 0.05:
                engine.cancel(choose.choice(unfinished).request_id)
            outputs += engine.step()
        assert len(outputs) == len(self.requests)
        return {output.request_id: output for output in outputs}


def expected_answers(schedule: Schedule) -> dict[str, list[int]]:
    """Return the answers by id: of generate for greedy rows, of a roomy engine for rows alone."""
    sampled = [request for request in schedule.requests if not request.params.is_greedy]
    answers = {
        request.request_id: tiny_reference(
            schedule.model, tuple(request.prompt_ids), MAX_NEW_TOKENS
        )[: request.params.max_new_tokens]
        for request in schedule.requests
        if request.params.is_greedy
    }
    with make_engine(schedule.model, page_size=64, num_blocks=1) as built:
        for request in sampled:
            copy = Request(request.request_id, request.prompt_ids, request.params)
            (output,) = run_engine(built.engine, [copy]).values()
            answers[output.request_id] = output.generated_tokens
    return answers


def run_schedule(seed: int) -> int:
    """Run one schedule, compare every answer, and return how often a request was preempted."""
    schedule = Schedule(seed)
    wanted = expected_answers(schedule)
    with make_engine(schedule.model, schedule.attention, **schedule.config()) as built:
        outputs = schedule.run(built.engine)
        stats = built.engine.stats()
    assert stats.num_used_blocks == stats.num_running == stats.num_waiting == 0
    for request in schedule.requests:
        output, answer = outputs[request.request_id], wanted[request.request_id]
        if output.status is RequestStatus.CANCELLED:
            answer = answer[: len(output.generated_tokens)]
        assert output.generated_tokens == answer
        assert len(output.logprobs) == (len(answer) if request.params.logprobs else 0)
    return stats.num_preemptions


@pytest.mark.parametrize("seed", range(30))
def test_random_schedules_answer_as_generate_does(seed):
    run_schedule(seed)


def test_random_schedules_do_preempt():
    assert sum(run_schedule(seed) > 0 for seed in range(5)) >= 2


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1000, 1300))
def test_many_random_schedules_answer_as_generate_does(seed):
    run_schedule(seed)
