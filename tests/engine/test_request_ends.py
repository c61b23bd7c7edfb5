"""How requests end: refused, stopped, at a length, cancelled, failed."""

from __future__ import annotations

import pytest

from cbgen.engine.request import FinishReason, RequestStatus
from cbgen.engine.step import SampledTokens, StepResult
from tests.helpers.engine import (
    answer,
    make_request,
    make_scheduler,
    run_scheduler,
    scheduled_ids,
    take_step,
)


def refused(request, **limits):
    """Return a request that must have been refused at once."""
    scheduler = make_scheduler(**limits)
    scheduler.add(request)
    assert not scheduler.has_unfinished()
    assert scheduler.take_finished() == [request]
    assert request.status is RequestStatus.FAILED
    assert request.finish_reason is FinishReason.ERROR
    return request


def test_an_empty_prompt_is_refused():
    assert refused(make_request("a", [])).error_code == "empty_prompt"


@pytest.mark.parametrize("token_id", [-1, 50, 10**12])
def test_a_token_outside_the_vocabulary_is_refused_with_id_and_position(token_id):
    request = refused(make_request("a", [3, token_id, 4]), vocab_size=50)
    assert request.error_code == "token_out_of_vocabulary"
    assert request.error == (
        f"token id {token_id} at position 1 is outside the model's vocabulary of 50 tokens"
    )


def test_the_last_token_of_the_vocabulary_is_taken():
    scheduler = make_scheduler(vocab_size=50)
    (request,) = run_scheduler(scheduler, [make_request("a", [49], max_new_tokens=1)])
    assert request.status is RequestStatus.FINISHED


def test_a_prompt_as_long_as_the_context_is_refused():
    request = refused(make_request("a", 20), max_context=20)
    assert request.error_code == "prompt_too_long"
    assert "the prompt has 20 tokens, and the model's context of 20" in request.error


def test_a_prompt_one_shorter_than_the_context_gets_one_token():
    scheduler = make_scheduler(max_context=20)
    (request,) = run_scheduler(scheduler, [make_request("a", 19)])
    assert request.generated_tokens == [7]
    assert request.finish_reason is FinishReason.LENGTH


def test_a_prompt_larger_than_the_cache_is_refused():
    request = refused(make_request("a", 17), num_blocks=4, page_size=4)
    assert request.error_code == "prompt_exceeds_cache"
    assert "17 tokens, and the KV cache holds 16" in request.error


def test_a_second_request_with_an_unfinished_id_is_refused_and_the_first_goes_on():
    scheduler = make_scheduler()
    first = make_request("a", 3, max_new_tokens=2)
    second = make_request("a", 3, max_new_tokens=2)
    ended = run_scheduler(scheduler, [first, second])
    assert second.error_code == "duplicate_id"
    assert first.generated_tokens == [7, 7]
    assert ended == [second, first]


def test_an_id_may_be_used_again_once_its_request_has_ended():
    scheduler = make_scheduler()
    run_scheduler(scheduler, [make_request("a", 3, max_new_tokens=1)])
    (request,) = run_scheduler(scheduler, [make_request("a", 3, max_new_tokens=1)])
    assert request.status is RequestStatus.FINISHED


def test_refused_requests_touch_no_other_request():
    scheduler = make_scheduler(num_blocks=8, page_size=4, max_context=30)
    good = make_request("good", 5, max_new_tokens=3)
    bad = [make_request("x", []), make_request("y", [999]), make_request("z", 30)]
    ended = run_scheduler(scheduler, [bad[0], good, *bad[1:]])
    assert ended[-1] is good
    assert good.generated_tokens == [7, 7, 7]
    scheduler.check()


def test_one_new_token_takes_one_step():
    scheduler = make_scheduler()
    (request,) = run_scheduler(scheduler, [make_request("a", 3, max_new_tokens=1)])
    assert request.generated_tokens == [7]
    assert scheduler.stats().num_steps == 1


def test_the_answer_has_max_new_tokens_and_ends_with_length():
    (request,) = run_scheduler(make_scheduler(), [make_request("a", 3, max_new_tokens=6)])
    assert len(request.generated_tokens) == 6
    assert request.finish_reason is FinishReason.LENGTH


def test_without_max_new_tokens_the_answer_ends_at_the_context():
    scheduler = make_scheduler(max_context=20)
    (request,) = run_scheduler(scheduler, [make_request("a", 3)])
    assert len(request.generated_tokens) == 17
    assert request.finish_reason is FinishReason.LENGTH


def test_more_new_tokens_than_the_context_leaves_end_with_length_at_the_context():
    scheduler = make_scheduler(max_context=20)
    (request,) = run_scheduler(scheduler, [make_request("a", 12, max_new_tokens=100)])
    assert len(request.generated_tokens) == 8
    assert request.finish_reason is FinishReason.LENGTH


def test_without_a_bound_the_answer_ends_where_the_cache_does():
    scheduler = make_scheduler(num_blocks=4, page_size=4)
    (request,) = run_scheduler(scheduler, [make_request("a", 10)])
    assert len(request.generated_tokens) == 7  # the last token is not stored
    assert request.finish_reason is FinishReason.LENGTH


def test_an_answer_with_a_bound_of_its_own_is_never_cut_short_by_the_cache():
    scheduler = make_scheduler(num_blocks=4, page_size=4)
    requests = [make_request("a", 10, max_new_tokens=8), make_request("b", 10, max_new_tokens=7)]
    outgrown, fitting = sorted(run_scheduler(scheduler, requests), key=lambda r: r.request_id)
    assert outgrown.error_code == "answer_exceeds_cache"
    assert "16 tokens" in outgrown.error
    assert fitting.finish_reason is FinishReason.LENGTH
    assert len(fitting.generated_tokens) == 7


def test_a_prompt_that_fills_the_cache_gets_one_token():
    scheduler = make_scheduler(num_blocks=4, page_size=4)
    (request,) = run_scheduler(scheduler, [make_request("a", 16)])
    assert len(request.generated_tokens) == 1


def test_a_stop_token_ends_the_answer_and_is_part_of_it():
    request = make_request("a", 3, stop_token_ids=frozenset({5, 9}))
    run_scheduler(make_scheduler(), [request], lambda item: item.start + item.num_tokens)
    assert request.generated_tokens == [3, 4, 5]
    assert request.finish_reason is FinishReason.STOP


def test_a_stop_token_at_the_last_allowed_place_counts_as_stop():
    request = make_request("a", 3, max_new_tokens=2, stop_token_ids=frozenset({4}))
    run_scheduler(make_scheduler(), [request], lambda item: item.start + item.num_tokens)
    assert request.finish_reason is FinishReason.STOP


def test_a_stop_token_in_the_prompt_stops_nothing():
    request = make_request("a", [5, 5], max_new_tokens=2, stop_token_ids=frozenset({5}))
    run_scheduler(make_scheduler(), [request])
    assert request.generated_tokens == [7, 7]


def test_tokens_after_the_stop_token_of_a_step_are_dropped():
    scheduler = make_scheduler()
    request = make_request("a", 3, stop_token_ids=frozenset({9}))
    scheduler.add(request)
    batch = scheduler.schedule()
    scheduler.update(batch, StepResult((SampledTokens((8, 9, 10)),)))
    assert request.generated_tokens == [8, 9]
    assert scheduler.stats().num_generated_tokens == 2


def test_a_finished_request_gives_everything_back():
    scheduler = make_scheduler(num_blocks=4)
    run_scheduler(scheduler, [make_request("a", 9, max_new_tokens=2)])
    assert scheduler.stats().num_used_blocks == 0
    assert scheduler.stats().num_running == 0


def test_requests_leave_in_the_order_in_which_they_end():
    requests = [
        make_request(name, 2, max_new_tokens=n) for name, n in (("a", 5), ("b", 1), ("c", 3))
    ]
    ended = run_scheduler(make_scheduler(), requests)
    assert [request.request_id for request in ended] == ["b", "c", "a"]


def test_ended_requests_are_taken_once():
    scheduler = make_scheduler()
    scheduler.add(make_request("a", []))
    assert len(scheduler.take_finished()) == 1
    assert scheduler.take_finished() == []


def test_a_waiting_request_is_cancelled_without_tokens():
    scheduler = make_scheduler()
    request = make_request("a", 3)
    scheduler.add(request)
    scheduler.cancel("a")
    assert request.status is RequestStatus.CANCELLED
    assert request.finish_reason is FinishReason.CANCELLED
    assert request.generated_tokens == []
    assert not scheduler.has_unfinished()


def test_a_running_request_is_cancelled_with_the_tokens_it_has():
    scheduler = make_scheduler()
    request = make_request("a", 3)
    scheduler.add(request)
    for _ in range(3):
        take_step(scheduler)
    scheduler.cancel("a")
    scheduler.check()
    assert request.generated_tokens == [7, 7, 7]
    assert scheduler.take_finished() == [request]


def test_cancelling_all_that_run_lets_those_that_wait_go_on():
    scheduler = make_scheduler(num_blocks=2, page_size=4)
    for name in "abc":
        scheduler.add(make_request(name, 4, max_new_tokens=2))
    take_step(scheduler)
    take_step(scheduler)
    for name in ("a", "b"):
        scheduler.cancel(name)
    assert scheduled_ids(take_step(scheduler)) == ["c"]


def test_cancelling_unknown_and_finished_ids_does_nothing():
    scheduler = make_scheduler()
    (request,) = run_scheduler(scheduler, [make_request("a", 3, max_new_tokens=1)])
    scheduler.cancel("a")
    scheduler.cancel("nobody")
    assert scheduler.take_finished() == []
    assert request.status is RequestStatus.FINISHED


def test_a_result_that_comes_after_a_cancellation_is_dropped():
    scheduler = make_scheduler()
    kept, gone = make_request("kept", 3), make_request("gone", 3)
    scheduler.add(kept)
    scheduler.add(gone)
    batch = scheduler.schedule()
    scheduler.cancel("gone")
    scheduler.update(batch, answer(batch))
    scheduler.check()
    assert (kept.generated_tokens, gone.generated_tokens) == ([7], [])


def test_a_result_for_a_cancelled_request_is_not_given_to_another_of_its_id():
    scheduler = make_scheduler()
    scheduler.add(make_request("a", 3))
    batch = scheduler.schedule()
    scheduler.cancel("a")
    second = make_request("a", 3)
    scheduler.add(second)
    scheduler.schedule()
    scheduler.update(batch, answer(batch))
    assert second.generated_tokens == []


def test_logits_that_are_not_numbers_fail_their_request_alone():
    scheduler = make_scheduler()
    good, bad = make_request("good", 3), make_request("bad", 3)
    scheduler.add(good)
    scheduler.add(bad)
    batch = scheduler.schedule()
    scheduler.update(batch, StepResult((SampledTokens((7,)), SampledTokens((), is_finite=False))))
    scheduler.check()
    assert bad.error_code == "non_finite_logits"
    assert "bfloat16" in bad.error
    assert good.generated_tokens == [7]


def test_a_result_with_too_few_samples_is_an_error():
    scheduler = make_scheduler()
    scheduler.add(make_request("a", 3))
    batch = scheduler.schedule()
    with pytest.raises(ValueError, match="zip"):
        scheduler.update(batch, StepResult())


def test_the_output_tells_prompt_tokens_times_and_status():
    request = make_request("a", 3, max_new_tokens=2)
    run_scheduler(make_scheduler(), [request])
    output = request.output()
    assert output.is_finished()
    assert (output.request_id, output.prompt_ids) == ("a", [1, 2, 3])
    assert output.generated_tokens == [7, 7]
    assert output.created_time <= output.lifespan[0] <= output.lifespan[1]
    assert (output.error, output.error_code) == (None, None)


def test_a_refused_request_was_never_admitted():
    assert refused(make_request("a", [])).output().lifespan[0] == -1


def test_log_probabilities_are_kept_only_where_asked_for():
    asked = make_request("a", 3, max_new_tokens=2, logprobs="raw")
    silent = make_request("b", 3, max_new_tokens=2)
    run_scheduler(make_scheduler(), [asked, silent])
    assert asked.output().logprobs == [-0.5, -0.5]
    assert silent.output().logprobs == []
