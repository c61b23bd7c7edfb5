"""How long answers are expected to be, and what admission makes of it."""

from __future__ import annotations

import pytest

from cbgen.engine.request import Request
from cbgen.engine.scheduler.admission import AnswerExpectation
from cbgen.engine.scheduler.scheduler import Scheduler
from tests.helpers.engine import make_request, make_scheduler, run_scheduler, take_step


def bounded(prompt: int = 10, max_new_tokens: int | None = 100, *, room: int = 1000) -> Request:
    """Return a request as a scheduler has taken it, in a context of `room` tokens."""
    request = make_request("a", prompt, max_new_tokens=max_new_tokens)
    request.max_tokens = min(room, prompt + (max_new_tokens or room))
    return request


def taught(*lengths: int, first_share: float = 1.0) -> AnswerExpectation:
    expectation = AnswerExpectation(first_share)
    for length in lengths:
        expectation.ended(length)
    return expectation


@pytest.mark.parametrize(("share", "expected"), [(1.0, 110), (0.5, 60), (0.25, 35)])
def test_at_first_a_share_of_the_longest_answer_is_expected(share, expected):
    assert taught(first_share=share).num_tokens(bounded()) == expected


def test_at_first_an_answer_without_bound_counts_as_one_of_512_tokens():
    assert taught().num_tokens(bounded(max_new_tokens=None, room=8000)) == 522


def test_one_more_token_than_is_known_is_expected_at_least():
    request = bounded()
    request.num_tokens = 70
    assert taught(first_share=0.0).num_tokens(bounded()) == 11
    assert taught(first_share=0.0).num_tokens(request) == 71


def test_no_more_than_the_request_may_have_is_expected():
    assert taught(*[90] * 20).num_tokens(bounded(max_new_tokens=30)) == 40
    assert taught(*[90] * 20).num_tokens(bounded(room=50)) == 50


def test_seven_answers_say_nothing_yet():
    assert taught(*[20] * 7).num_tokens(bounded()) == 110


def test_eight_answers_say_what_is_to_be_expected():
    assert taught(*[20] * 8).num_tokens(bounded()) == 30


def test_answers_of_different_length_are_expected_to_be_longer_than_their_mean():
    """By their standard deviation, that is by 10."""
    assert taught(*[20, 40] * 8).num_tokens(bounded()) == 10 + 30 + 10


def test_late_answers_change_what_is_expected():
    expectation = taught(*[20] * 50)
    before = expectation.num_tokens(bounded())
    for _ in range(300):
        expectation.ended(80)
    assert before == 30
    assert 85 <= expectation.num_tokens(bounded()) <= 100


def test_a_preemption_raises_what_is_expected_by_a_quarter():
    expectation = taught(*[20] * 8)
    expectation.preempted()
    assert expectation.num_tokens(bounded()) == 10 + 25


def test_many_preemptions_raise_it_four_times_at_most():
    expectation = taught(*[20] * 8)
    for _ in range(30):
        expectation.preempted()
    assert expectation.num_tokens(bounded()) == 10 + 80


def test_answers_that_end_lower_it_again():
    expectation = taught(*[20] * 8)
    expectation.preempted()
    for _ in range(100):
        expectation.ended(20)
    assert expectation.num_tokens(bounded()) == 30


def test_a_preemption_before_anything_is_learned_raises_the_first_share():
    expectation = taught(first_share=0.4)
    expectation.preempted()
    assert expectation.num_tokens(bounded()) == 10 + 50
    for _ in range(9):
        expectation.preempted()
    assert expectation.num_tokens(bounded()) == 10 + 100


def num_admitted(scheduler: Scheduler, count: int = 8, **params) -> int:
    """Add requests of 4 tokens, run one step, and return how many have been admitted."""
    for number in range(count):
        scheduler.add(make_request(f"new {number}", 4, **params))
    take_step(scheduler)
    return scheduler.stats().num_running


def test_requests_are_admitted_while_their_whole_answers_fit():
    # Each takes 4 + 12 tokens, the last one of which is never stored: 4 blocks.
    scheduler = make_scheduler(num_blocks=15, first_answer_share=1.0, max_batch_tokens=64)
    assert num_admitted(scheduler, max_new_tokens=12) == 3


def test_answers_that_were_admitted_whole_are_never_preempted():
    scheduler = make_scheduler(num_blocks=15, first_answer_share=1.0, max_batch_tokens=64)
    requests = [make_request(str(i), 4, max_new_tokens=12) for i in range(9)]
    run_scheduler(scheduler, requests)
    assert scheduler.stats().num_preemptions == 0


def test_a_share_of_the_answers_admits_more_of_them():
    scheduler = make_scheduler(num_blocks=15, first_answer_share=0.25, max_batch_tokens=64)
    assert num_admitted(scheduler, max_new_tokens=12) == 7


def test_a_request_alone_is_admitted_whatever_is_expected_of_it():
    scheduler = make_scheduler(num_blocks=4, first_answer_share=1.0)
    assert num_admitted(scheduler, 2, max_new_tokens=40) == 1


def test_what_ended_early_lets_more_requests_in():
    scheduler = make_scheduler(
        num_blocks=16, first_answer_share=1.0, max_batch_tokens=64, max_requests=16
    )
    stop = frozenset({7})
    learned = [make_request(str(i), 4, max_new_tokens=28, stop_token_ids=stop) for i in range(8)]
    assert num_admitted(scheduler, max_new_tokens=28) == 2
    for number in range(8):
        scheduler.cancel(f"new {number}")
    run_scheduler(scheduler, learned)
    assert num_admitted(scheduler, 20, max_new_tokens=28) == 16


def test_cancelled_requests_teach_nothing():
    scheduler = make_scheduler(num_blocks=16, first_answer_share=1.0, max_batch_tokens=64)
    for number in range(10):
        scheduler.add(make_request(str(number), 4, max_new_tokens=28))
        take_step(scheduler)
        scheduler.cancel(str(number))
    assert num_admitted(scheduler, max_new_tokens=28) == 2


def test_after_a_preemption_fewer_are_admitted():
    """Four answers of 20 tokens are expected to take 5 blocks each, and after a preemption 7."""
    num_running = []
    for num_preemptions in (0, 1):
        scheduler = make_scheduler(num_blocks=24, max_batch_tokens=64, max_requests=16)
        for _ in range(8):
            scheduler._admission.expectation.ended(17)
        for _ in range(num_preemptions):
            scheduler._admission.expectation.preempted()
        num_running.append(num_admitted(scheduler, max_new_tokens=40))
    assert num_running == [4, 3]


def test_a_preemption_tells_the_scheduler_that_it_expected_too_little():
    scheduler = make_scheduler(num_blocks=6, first_answer_share=0.2)
    for number in range(3):
        scheduler.add(make_request(str(number), 4, max_new_tokens=18))
    before = scheduler._admission.expectation.num_tokens(bounded())
    while not scheduler.stats().num_preemptions:
        take_step(scheduler)
    assert scheduler._admission.expectation.num_tokens(bounded()) > before


def test_a_shared_prefix_is_expected_once():
    options = {
        "num_blocks": 16,
        "first_answer_share": 1.0,
        "max_batch_tokens": 64,
        "max_context": 128,
    }
    counts = []
    for shares_prefixes in (False, True):
        scheduler = make_scheduler(shares_prefixes=shares_prefixes, **options)
        for number in range(4):
            prompt = [*range(1, 33), 100 + number]
            scheduler.add(make_request(str(number), prompt, max_new_tokens=8))
        take_step(scheduler)
        counts.append(scheduler.stats().num_running)
    assert counts == [1, 4]
