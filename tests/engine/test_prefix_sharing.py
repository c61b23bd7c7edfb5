"""What is computed once when prompts begin alike: one by one, together, and with answers."""

from __future__ import annotations

import pytest

from cbgen.engine.request import RequestStatus
from cbgen.engine.scheduler.scheduler import Scheduler
from cbgen.engine.step import SampledTokens, StepResult
from tests.helpers.engine import (
    make_request,
    make_scheduler,
    run_scheduler,
    scheduled_ids,
    token_counts,
)
from tests.helpers.shadow_run import ShadowRun, text


def sharing_scheduler(max_batch_tokens: int) -> Scheduler:
    """Return one with room for 64 rows and pages as they are by default."""
    return make_scheduler(
        num_blocks=512,
        page_size=256,
        shares_prefixes=True,
        max_batch_tokens=max_batch_tokens,
        max_requests=64,
        max_context=4096,
    )


def unique_parts(count: int) -> list[list[int]]:
    """Return beginnings of questions: different from their first token on, of 1 to 64 tokens."""
    return [text(1 + number, 1 + number * 7 % 64) for number in range(count)]


def test_reuse_goes_to_the_token():
    run = ShadowRun(page_size=16)
    prompt = text(1, 130)
    run.remember(prompt)
    assert run.num_reused(prompt[:121] + text(2, 9)) == 121


def test_a_prompt_of_one_page_that_was_seen_before_computes_one_token():
    run = ShadowRun(page_size=16)
    run.remember(text(1, 16))
    run.add(make_request("again", text(1, 16)))
    assert token_counts(run.step()) == {"again": 1}


def test_a_prefix_shorter_than_a_page_is_copied():
    run = ShadowRun(page_size=256, num_blocks=4)
    run.remember(text(1, 40) + text(2, 20))
    run.add(make_request("later", text(1, 40) + text(3, 20)))
    (copy,) = run.step().block_copies
    assert copy.num_tokens == 40


def test_a_few_tokens_of_a_page_are_computed_again_at_once():
    run = ShadowRun(page_size=256, num_blocks=4)
    run.add(make_request("a", text(1, 15) + text(2, 20)), make_request("b", [*text(1, 15), 3]))
    batch = run.step()
    assert token_counts(batch) == {"a": 35, "b": 16}
    assert batch.block_copies == ()


def test_without_sharing_everything_is_computed():
    run = ShadowRun(shares_prefixes=False)
    prompts = [make_request(name, text(1, 30), max_new_tokens=9) for name in "abc"]
    run.finish(*prompts)
    assert run.num_reused(text(1, 30)) == 0
    assert run.stats.num_computed_tokens == 3 * 38 + 30
    assert run.cache.pool.num_cached == 0


@pytest.mark.parametrize("max_batch_tokens", [1024, 8192])
@pytest.mark.parametrize("count", [16, 64])
@pytest.mark.parametrize("num_shared", [512, 40])
def test_a_prefix_of_prompts_that_come_together_is_computed_once(
    max_batch_tokens, count, num_shared
):
    scheduler = sharing_scheduler(max_batch_tokens)
    parts = unique_parts(count)
    prompts = [text(100, num_shared) + part for part in parts]
    requests = [
        make_request(str(number), prompt, max_new_tokens=1) for number, prompt in enumerate(prompts)
    ]
    assert len(run_scheduler(scheduler, requests)) == count
    num_unique = sum(map(len, parts))
    assert scheduler.stats().num_computed_tokens <= num_shared + num_unique + 256


def test_prompts_that_come_together_are_prefilled_in_few_steps():
    scheduler = sharing_scheduler(8192)
    for number, part in enumerate(unique_parts(64)):
        scheduler.add(make_request(str(number), text(100, 552) + part, max_new_tokens=1))
    steps = [scheduler.schedule() for _ in range(2)]
    assert [len(batch.requests) for batch in steps] == [1, 63]


def test_whole_pages_are_shared_in_the_step_that_computes_them():
    run = ShadowRun(page_size=16)
    for name, kind in (("a", 2), ("b", 3)):
        run.add(make_request(name, text(1, 32) + text(kind, 5)))
    assert token_counts(run.step()) == {"a": 37, "b": 5}
    assert run.cache.block_table("a")[:2] == run.cache.block_table("b")[:2]


def test_a_part_of_a_page_is_never_copied_in_the_step_that_computes_it():
    run = ShadowRun(page_size=16)
    for name, kind in (("a", 2), ("b", 3)):
        run.add(make_request(name, text(1, 10) + text(kind, 5)))
    first, second = run.step(), run.step()
    assert (scheduled_ids(first), first.block_copies) == (["a"], ())
    assert (token_counts(second), len(second.block_copies)) == ({"a": 1, "b": 5}, 1)


def test_a_long_prefix_is_shared_page_by_page_while_it_runs_in_chunks():
    run = ShadowRun(page_size=16, max_batch_tokens=20)
    for name, kind in (("a", 2), ("b", 3), ("c", 4)):
        run.add(make_request(name, text(1, 100) + text(kind, 5), max_new_tokens=1))
    run.finish()
    assert run.stats.num_computed_tokens == 100 + 3 * 5


def test_identical_prompts_that_come_together_compute_one_token_each():
    run = ShadowRun(page_size=16)
    run.finish(*(make_request(str(i), text(1, 50), max_new_tokens=1) for i in range(6)))
    assert run.stats.num_computed_tokens == 50 + 5


def test_generated_tokens_are_found_by_a_later_prompt():
    run = ShadowRun(page_size=16)
    request = make_request("a", text(1, 21), max_new_tokens=30)
    run.finish(request)
    # The last token that was drawn has never been run.
    prompt = text(1, 21) + request.generated_tokens
    assert run.num_reused(prompt + text(2, 5)) == len(prompt) - 1


def test_the_answer_of_a_request_that_still_runs_is_shared_page_by_page():
    run = ShadowRun(page_size=16)
    request = make_request("a", text(1, 16), max_new_tokens=60)
    run.add(request)
    while len(request.generated_tokens) < 34:
        run.step()
    run.add(make_request("b", text(1, 16) + request.generated_tokens[:32] + text(2, 5)))
    assert token_counts(run.step())["b"] == 5


def test_answers_that_come_out_the_same_keep_one_block_in_the_cache():
    run = ShadowRun(page_size=16)
    run.finish(*(make_request(str(i), text(1, 20), max_new_tokens=30) for i in range(4)))
    assert run.cache.pool.num_cached == 4  # of the 49 tokens that were run


def test_a_cancelled_request_leaves_what_was_stored():
    run = ShadowRun(page_size=16, max_batch_tokens=24)
    run.add(make_request("a", text(1, 90)))
    run.step()
    run.scheduler.cancel("a")
    run.scheduler.check()
    assert run.num_reused(text(1, 90)) == 24


def fail(run: ShadowRun, request_id: str) -> None:
    """Run a step in which the logits of one request are not numbers."""
    batch = run.scheduler.schedule()
    samples = run.runner.launch(batch).result().samples
    drawn = [item.request_id for item in batch.requests if item.num_samples]
    broken = SampledTokens((), is_finite=False)
    pairs = zip(drawn, samples, strict=True)
    result = StepResult(tuple(broken if name == request_id else one for name, one in pairs))
    run.scheduler.update(batch, result)
    run.scheduler.check()


def test_a_request_without_finite_logits_leaves_nothing():
    run = ShadowRun(page_size=16)
    run.add(make_request("a", text(1, 40)))
    fail(run, "a")
    assert run.cache.pool.num_cached == 0
    assert run.num_reused(text(1, 40)) == 0


def test_a_request_without_finite_logits_leaves_what_was_there_before():
    run = ShadowRun(page_size=16)
    run.remember(text(1, 40))
    run.add(make_request("a", text(1, 40) + text(2, 40)))
    fail(run, "a")
    assert run.num_reused(text(1, 40) + text(2, 40)) == 32  # it had gone on in the third page


def test_what_continues_blocks_of_a_failed_request_is_not_found_either():
    run = ShadowRun(page_size=16)
    other = make_request("b", text(1, 32) + text(2, 20), max_new_tokens=9)
    run.add(make_request("a", text(1, 32)), other)
    fail(run, "a")
    run.finish()
    assert other.status is RequestStatus.FINISHED
    assert run.num_reused(text(1, 32) + text(2, 20)) == 0


def test_what_a_finished_request_added_to_blocks_of_a_failed_one_is_not_found_either():
    run = ShadowRun(page_size=16)
    run.add(
        make_request("a", text(1, 32)),
        make_request("b", text(1, 32) + text(2, 20), max_new_tokens=1),
    )
    run.step()
    fail(run, "a")
    assert run.cache.pool.num_cached == 0


def test_after_a_reset_nothing_is_found():
    run = ShadowRun()
    run.remember(text(1, 30))
    run.scheduler.reset_prefix_cache()
    run.scheduler.check()
    assert run.cache.pool.num_cached == 0
    assert run.num_reused(text(1, 30)) == 0


@pytest.mark.parametrize("page_size", [4, 64])
def test_what_runs_during_a_reset_goes_on_and_is_not_shared_any_more(page_size):
    run = ShadowRun(page_size=page_size)
    request = make_request("a", text(1, 30), max_new_tokens=20)
    run.add(request)
    run.step()
    run.scheduler.reset_prefix_cache()
    run.finish()
    assert request.status is RequestStatus.FINISHED
    assert run.num_reused(text(1, 30)) == 0


def test_what_arrives_after_a_reset_is_shared_again():
    run = ShadowRun()
    run.remember(text(1, 30))
    run.scheduler.reset_prefix_cache()
    run.remember(text(1, 30))
    assert run.num_reused(text(1, 30)) == 29


def test_cached_tokens_of_a_preempted_request_count_once():
    run = ShadowRun(num_blocks=6, page_size=4)
    run.finish(*(make_request(name, text(1, 8), max_new_tokens=14) for name in "ab"))
    assert run.stats.num_preemptions > 0
    assert run.stats.num_cached_tokens == 7
