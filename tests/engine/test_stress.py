"""Random schedules: every answer is that of `model.generate` or of the row alone; nothing leaks.

Arrivals, lengths, common beginnings, cancellations, sampling, pages, budgets, schedulers, cache and
host pool sizes come from a seed. The engine verifies its bookkeeping after every step.
"""

from __future__ import annotations

import random
from functools import cache

import pytest

from cbgen.engine.core import Engine
from cbgen.engine.events import StepStats
from cbgen.engine.request import GenerationOutput, Request, RequestStatus
from tests.helpers.engine import LetterTokenizer, make_request, run_engine, until_stop
from tests.helpers.models import VOCAB_SIZE, make_engine, tiny_reference

MODELS = ("llama", "mistral", "gemma2", "gemma3_hybrid", "llama4", "gpt2", "gemma4")
"""Full, sliding, hybrid in several orders, chunked; heads of one size and of several."""
MAX_NEW_TOKENS = 12
NUM_ROWS = 14
PENALTIES = (1.0, 1.0, 1.4)
STOP_STRINGS = (*[()] * 5, ("ab",), ("cde", "bb", "b" * 3), ("abcde",))
LENGTHS = (1, 1, 2, 3, 4, 5, 7, 8, 9, 12, 16, 17, 23, 31, 40)


def make_prompts() -> list[tuple[int, ...]]:
    """Return prompts of all lengths, the longer half with common beginnings."""
    choose = random.Random(11)
    texts = [[choose.randrange(1, VOCAB_SIZE) for _ in range(max(LENGTHS))] for _ in LENGTHS]
    common = texts[0]
    return [
        tuple((common[: length // 2] + text if length > 8 else text)[:length])
        for length, text in zip(LENGTHS, texts, strict=True)
    ]


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
            repetition_penalty=choose.choice(PENALTIES),
            stop_strings=choose.choice(STOP_STRINGS),
            tokenizer=LetterTokenizer(),
            **sampling,
        )

    def config(self) -> dict[str, object]:
        """Return random limits; the cache holds the longest row, and sometimes little more."""
        choose = self.choose
        page_size = choose.choice([4, 5, 8, 16])
        needed = -(-(max(LENGTHS) + MAX_NEW_TOKENS) // page_size)
        return {
            "page_size": page_size,
            "num_blocks": needed + choose.choice([0, 0, 1, 4]),
            "max_batch_tokens": choose.choice([8, 16, 64]),
            "max_requests_per_batch": choose.choice([3, 6, 8]),
            "safety_margin": choose.choice([None, 0.0, 0.0, 1.0]),
            "scheduler_type": choose.choice(["fifo", "prefill_first"]),
            "allow_block_sharing": choose.random() < 0.75,
            "cpu_offload_space": choose.choice([0.0, 0.0, 1e-4, 1e-2]),  # GiB
            "first_answer_share": choose.choice([0.0, 0.0, 1.0]),
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
            schedule.model,
            tuple(request.prompt_ids),
            MAX_NEW_TOKENS,
            request.params.repetition_penalty,
        )[: request.params.max_new_tokens]
        for request in schedule.requests
        if request.params.is_greedy
    }
    with make_engine(
        schedule.model,
        page_size=64,
        num_blocks=1,
        allow_block_sharing=False,
    ) as built:
        for request in sampled:
            copy = Request(
                request.request_id, request.prompt_ids, request.params, tokenizer=LetterTokenizer()
            )
            (output,) = run_engine(built.engine, [copy]).values()
            answers[output.request_id] = output.generated_tokens
    return answers


@cache
def run_schedule(seed: int) -> StepStats:
    """Run one schedule, compare every answer, and return the counts of the engine, once a seed."""
    schedule = Schedule(seed)
    wanted = expected_answers(schedule)
    with make_engine(schedule.model, schedule.attention, **schedule.config()) as built:
        outputs = schedule.run(built.engine)
        stats = built.engine.stats()
    assert stats.num_used_blocks == stats.num_running == stats.num_waiting == 0
    for request in schedule.requests:
        output = outputs[request.request_id]
        answer, stop_string = until_stop(wanted[request.request_id], request.params.stop_strings)
        if output.status is RequestStatus.CANCELLED:
            answer, stop_string = answer[: len(output.generated_tokens)], None
        assert output.generated_tokens == answer
        assert output.stop_string == stop_string
        assert len(output.logprobs) == (len(answer) if request.params.logprobs else 0)
    return stats


@pytest.mark.parametrize("first", range(0, 200, 20))
def test_random_schedules_answer_as_generate_does(first):
    for seed in range(first, first + 20):
        run_schedule(seed)


def test_random_schedules_cover_what_can_happen():
    stats = [run_schedule(seed) for seed in range(30)]
    assert sum(item.num_preemptions > 0 for item in stats) >= 5
    assert sum(item.num_cached_tokens > 0 for item in stats) >= 10
    assert sum(item.num_evictions > 0 for item in stats) >= 5
    assert sum(item.num_offloaded_blocks > 0 for item in stats) >= 2


@pytest.mark.slow
@pytest.mark.parametrize("first", range(1000, 3000, 50))
def test_many_random_schedules_answer_as_generate_does(first):
    for seed in range(first, first + 50):
        run_schedule(seed)
