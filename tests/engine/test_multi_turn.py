"""Conversations in one file: each prompt is the last one, its answer, and a further turn."""

from __future__ import annotations

import pytest

from cbgen.engine.request import Request
from cbgen.engine.scheduler.scheduler import Scheduler
from cbgen.engine.step import ScheduledRequest
from tests.helpers.engine import VOCAB_SIZE, make_request, make_scheduler, run_scheduler
from tests.helpers.shadow_run import text

NUM_TURNS, NUM_CONVERSATIONS = 8, 6
FIRST_TURN, TURN, ANSWER = 90, 25, 30


def answered(num_tokens: int) -> int:
    """Return the token that is generated behind so many others."""
    return 1 + num_tokens * 5 % (VOCAB_SIZE - 1)


def drawn(item: ScheduledRequest) -> int:
    return answered(item.start + item.num_tokens)


def conversation(number: int, *, is_generated: bool) -> list[Request]:
    """Return the requests of a conversation.

    Args:
        number: makes it different from others from the first token on.
        is_generated: whether the answers in the prompts are those that are generated.
    """
    requests: list[Request] = []
    prompt = text(number, FIRST_TURN)
    for turn in range(NUM_TURNS):
        requests.append(make_request(f"{number}.{turn}", prompt, max_new_tokens=ANSWER))
        generated = [answered(len(prompt) + place) for place in range(ANSWER)]
        written = generated if is_generated else text(20 + turn, ANSWER)
        prompt = [*prompt, *written, *text(40 + turn, TURN)]
    return requests


def make_conversations(*, is_generated: bool) -> list[list[Request]]:
    return [conversation(1 + i, is_generated=is_generated) for i in range(NUM_CONVERSATIONS)]


def sharing_scheduler(page_size: int) -> Scheduler:
    return make_scheduler(
        num_blocks=16384 // page_size,
        page_size=page_size,
        shares_prefixes=True,
        max_batch_tokens=256,
        max_context=1024,
        max_requests=48,
    )


def repeated_tokens(conversations: list[list[Request]], *, with_answers: bool) -> int:
    """Return the prompt tokens that were in the request before; the first turns repeat nothing."""
    earlier = [request for requests in conversations for request in requests[:-1]]
    return sum(len(request.prompt_ids) + with_answers * ANSWER for request in earlier)


@pytest.mark.parametrize("page_size", [16, 256])
@pytest.mark.parametrize("is_generated", [True, False])
def test_turns_that_come_together_compute_once_what_they_repeat(page_size, is_generated):
    scheduler = sharing_scheduler(page_size)
    conversations = make_conversations(is_generated=is_generated)
    requests = [request for requests in conversations for request in requests]
    assert len(run_scheduler(scheduler, requests, drawn)) == len(requests)
    repeated = repeated_tokens(conversations, with_answers=False)
    assert scheduler.stats().num_cached_tokens >= 0.95 * repeated


@pytest.mark.parametrize("page_size", [16, 256])
@pytest.mark.parametrize("is_generated", [True, False])
def test_turns_that_come_one_by_one_compute_nothing_that_was_there(page_size, is_generated):
    """If it is what was generated, that goes for the answers too."""
    scheduler = sharing_scheduler(page_size)
    conversations = make_conversations(is_generated=is_generated)
    for turn in zip(*conversations, strict=True):
        run_scheduler(scheduler, turn, drawn)
    repeated = repeated_tokens(conversations, with_answers=is_generated)
    assert scheduler.stats().num_cached_tokens >= 0.95 * repeated
