"""What the cache promises, on tiny models: other memory, other times, the same answers."""

from __future__ import annotations

import random
import subprocess
import sys
from functools import cache

import pytest
import torch
from transformers import PreTrainedModel

from cbgen.engine.core import Engine
from cbgen.engine.request import Request, RequestStatus
from tests.helpers.engine import make_request, run_engine, tokens_of
from tests.helpers.models import (
    VOCAB_SIZE,
    full_logits,
    greedy_reference,
    make_engine,
    random_model,
    tiny_config,
    tiny_model,
    tiny_reference,
)

SCHEDULERS = ("fifo", "prefill_first")


def make_prompt(seed: int, length: int) -> list[int]:
    choose = random.Random(seed)
    return [choose.randrange(1, VOCAB_SIZE) for _ in range(length)]


LONG_ANSWERS = [make_prompt(number, 3 + 2 * number) for number in range(10)]
"""Ten prompts whose requests take up to 70 tokens with answers of 48."""


def run_long_answers(engine: Engine, **params):
    requests = [
        make_request(str(number), prompt, max_new_tokens=48, **params)
        for number, prompt in enumerate(LONG_ANSWERS)
    ]
    return run_engine(engine, requests)


def expected_long_answers() -> dict[str, list[int]]:
    return {
        str(number): tiny_reference("llama", tuple(prompt), 48)
        for number, prompt in enumerate(LONG_ANSWERS)
    }


def assert_logprobs_of_full_forward(model: PreTrainedModel, output) -> None:
    token_ids = [*output.prompt_ids, *output.generated_tokens]
    wanted = torch.log_softmax(full_logits(model, token_ids), dim=-1)
    begin = len(output.prompt_ids) - 1
    for place, (token, logprob) in enumerate(
        zip(output.generated_tokens, output.logprobs, strict=True)
    ):
        assert logprob == pytest.approx(wanted[begin + place, token].item(), abs=1e-4)


@pytest.mark.parametrize("scheduler_type", SCHEDULERS)
@pytest.mark.parametrize("num_blocks", [9, 12, 20])
def test_requests_that_outgrow_the_cache_are_preempted_and_answer_as_generate(
    num_blocks, scheduler_type
):
    with make_engine(
        "llama",
        page_size=8,
        num_blocks=num_blocks,
        safety_margin=0.0,
        scheduler_type=scheduler_type,
    ) as built:
        outputs = run_long_answers(built.engine, logprobs="raw")
        assert built.engine.stats().num_preemptions > 0
    assert tokens_of(outputs) == expected_long_answers()
    for number, prompt in enumerate(LONG_ANSWERS):
        output = outputs[str(number)]
        assert output.prompt_ids == prompt
        assert_logprobs_of_full_forward(tiny_model("llama"), output)


@cache
def model_with_window(name: str) -> PreTrainedModel:
    """Return a tiny model whose window is 10 tokens, no multiple of the page size."""
    return random_model(type(tiny_model(name)), tiny_config(name, sliding_window=10))


@pytest.mark.parametrize("max_batch_tokens", [7, 64])
@pytest.mark.parametrize("name", ["mistral", "gemma2", "gemma3", "gpt_oss", "gemma3_hybrid"])
def test_sliding_windows_answer_as_generate(name, max_batch_tokens):
    model = model_with_window(name)
    prompts = {str(length): make_prompt(length, length) for length in (3, 9, 10, 11, 25, 40)}
    wanted = {key: greedy_reference(model, prompt, 14) for key, prompt in prompts.items()}
    with make_engine(model, page_size=4, num_blocks=60, max_batch_tokens=max_batch_tokens) as built:
        requests = [make_request(key, p, max_new_tokens=14) for key, p in prompts.items()]
        assert tokens_of(run_engine(built.engine, requests)) == wanted


@pytest.mark.parametrize("name", ["mistral", "llama4", "gemma3_hybrid"])
def test_a_prompt_far_longer_than_window_and_chunks_answers_as_generate(name):
    prompt = make_prompt(1, 120)
    with make_engine(name, page_size=4, num_blocks=36, max_batch_tokens=8) as built:
        (output,) = run_engine(
            built.engine, [make_request("a", prompt, max_new_tokens=20)]
        ).values()
    assert output.generated_tokens == tiny_reference(name, tuple(prompt), 20)


def test_layers_that_all_have_a_window_hold_no_more_than_it():
    with make_engine("mistral", page_size=4, num_blocks=16, max_batch_tokens=8) as built:
        run_engine(built.engine, [make_request("a", make_prompt(1, 200), max_new_tokens=30)])
        assert built.engine.stats().peak_used_blocks < 10  # of 58 without the window


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2", "gemma3_hybrid", "llama4"])
@pytest.mark.parametrize("page_size", [4, 16])
def test_answers_are_the_same_with_and_without_sharing(name, page_size):
    common = make_prompt(5, 37)
    prompts = [common[:end] + make_prompt(end, 4) for end in (37, 37, 20, 36, 5)]

    def answers(shares: bool) -> tuple[dict[str, list[int]], int]:
        with make_engine(
            name, page_size=page_size, num_blocks=40, allow_block_sharing=shares
        ) as built:
            requests = [
                make_request(str(number), prompt, max_new_tokens=10)
                for number, prompt in enumerate(prompts)
            ]
            outputs = run_engine(built.engine, requests[:2])
            outputs |= run_engine(built.engine, requests[2:])
            return tokens_of(outputs), built.engine.stats().num_cached_tokens

    shared, num_cached = answers(shares=True)
    alone, num_without = answers(shares=False)
    assert shared == alone
    assert shared == {
        str(number): tiny_reference(name, tuple(prompt), 10)
        for number, prompt in enumerate(prompts)
    }
    assert num_cached > 37
    assert num_without == 0


def num_computed(engine: Engine, requests: list[Request]) -> int:
    before = engine.stats().num_computed_tokens
    run_engine(engine, requests)
    return engine.stats().num_computed_tokens - before


def test_a_second_prompt_reuses_what_it_shares_to_the_token():
    common = make_prompt(3, 121)
    with make_engine("llama", page_size=16, num_blocks=40) as built:
        first = make_request("a", common + make_prompt(1, 9), max_new_tokens=1)
        assert num_computed(built.engine, [first]) == 130
        second = make_request("b", common + make_prompt(2, 9), max_new_tokens=1)
        assert num_computed(built.engine, [second]) == 9


def test_a_prompt_of_one_page_that_was_seen_before_computes_one_token():
    prompt = make_prompt(3, 16)
    with make_engine("llama", page_size=16, num_blocks=40) as built:
        run_engine(built.engine, [make_request("a", prompt, max_new_tokens=1)])
        assert num_computed(built.engine, [make_request("b", prompt, max_new_tokens=1)]) == 1


def test_prompts_that_arrive_together_compute_their_common_beginning_once():
    common = make_prompt(3, 64)
    with make_engine("llama", page_size=16, num_blocks=100) as built:
        requests = [
            make_request(str(n), [*common, *make_prompt(n, 5)], max_new_tokens=1) for n in range(16)
        ]
        assert num_computed(built.engine, requests) <= 64 + 16 * 5


_DIGEST = """
import hashlib, random
from tests.engine.test_cache_stress import Run
digest = hashlib.sha256()
for seed in range(12):
    run = Run(seed)
    launch = run.runner.launch
    run.runner.launch = lambda batch: (digest.update(repr(batch).encode()), launch(batch))[1]
    run.finish()
print(digest.hexdigest())
"""


def test_every_process_schedules_the_same():
    digests = {
        subprocess.run(
            [sys.executable, "-c", _DIGEST],
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": "."},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(digests) == 1


def samples(parent: str, prompt: list[int], count: int, **params) -> list[Request]:
    """Return `count` samples of one prompt, the first one their parent."""
    return [
        Request(
            parent if number == 0 else f"{parent}/{number}",
            prompt,
            make_request("", prompt, seed=number, temperature=1.0, **params).params,
            parent_id=None if number == 0 else parent,
        )
        for number in range(count)
    ]


def test_samples_of_one_prompt_share_its_blocks():
    prompt = make_prompt(3, 50)
    with make_engine("llama", page_size=16, num_blocks=100) as built:
        requests = samples("a", prompt, 3, max_new_tokens=5)
        assert num_computed(built.engine, requests) == 50 + 2 * 1 + 3 * 4


def test_samples_all_finish_when_the_cache_holds_hardly_one():
    prompt = make_prompt(3, 30)
    with make_engine("llama", page_size=8, num_blocks=7, safety_margin=0.0) as built:
        outputs = run_engine(built.engine, samples("a", prompt, 5, max_new_tokens=20))
    with make_engine("llama", page_size=64, num_blocks=1) as built:
        wanted = [run_engine(built.engine, [r]) for r in samples("a", prompt, 5, max_new_tokens=20)]
    assert tokens_of(outputs) == tokens_of({k: v for one in wanted for k, v in one.items()})


def test_samples_are_cancelled_with_their_parent():
    with make_engine("llama", page_size=8, num_blocks=100) as built:
        engine = built.engine
        for request in [*samples("a", make_prompt(3, 30), 4, max_new_tokens=90), make_request("b")]:
            engine.add(request)
        engine.step()
        engine.cancel("a")
        ended = engine.step()
        assert sorted(output.request_id for output in ended) == ["a", "a/1", "a/2", "a/3"]
        assert {output.status for output in ended} == {RequestStatus.CANCELLED}
        assert [request.request_id for request in engine.unfinished()] == ["b"]


@pytest.mark.parametrize("gibibytes", [1e-2, 3e-5])
@pytest.mark.parametrize("name", ["llama", "gemma3_hybrid"])
def test_requests_kept_in_host_memory_answer_as_generate(name, gibibytes):
    """3e-5 GiB are a few blocks: some requests are offloaded, others computed again."""
    with make_engine(
        name,
        page_size=8,
        num_blocks=10,
        safety_margin=0.0,
        cpu_offload_space=gibibytes,
        allow_block_sharing=False,
    ) as built:
        outputs = run_long_answers(built.engine, logprobs="raw")
        stats = built.engine.stats()
    wanted = {
        str(number): tiny_reference(name, tuple(prompt), 48)
        for number, prompt in enumerate(LONG_ANSWERS)
    }
    assert tokens_of(outputs) == wanted
    assert stats.num_preemptions > 0
    assert stats.num_offloaded_blocks > 0
    for output in outputs.values():
        assert_logprobs_of_full_forward(tiny_model(name), output)
    if gibibytes == 1e-2:
        assert stats.num_recomputed_tokens == 0
    else:
        assert stats.num_recomputed_tokens > 0


def test_requests_that_wait_run_when_all_active_ones_are_cancelled_after_an_offload():
    with make_engine(
        "llama",
        page_size=8,
        num_blocks=9,
        safety_margin=0.0,
        cpu_offload_space=1e-2,
        allow_block_sharing=False,
    ) as built:
        engine = built.engine
        for number, prompt in enumerate(LONG_ANSWERS):
            engine.add(make_request(str(number), prompt, max_new_tokens=48))
        while engine.stats().num_offloaded_blocks == 0:
            engine.step()
        active = [r.request_id for r in engine.unfinished() if r.row >= 0]
        for request_id in active:
            engine.cancel(request_id)
        outputs = {output.request_id: output for output in engine.step()}
        assert {outputs[request_id].status for request_id in active} == {RequestStatus.CANCELLED}
        while engine.has_unfinished():
            outputs |= {output.request_id: output for output in engine.step()}
    wanted = expected_long_answers()
    finished = {
        key: output.generated_tokens
        for key, output in outputs.items()
        if output.status is RequestStatus.FINISHED
    }
    assert len(finished) + len(active) >= 10
    assert all(tokens == wanted[key] for key, tokens in finished.items())


def test_bad_requests_fail_alone():
    with make_engine("llama", page_size=8, num_blocks=9) as built:
        good = make_request("good", LONG_ANSWERS[4], max_new_tokens=48)
        bad = [
            make_request("empty", []),
            make_request("unknown", [1, VOCAB_SIZE + 5]),
            make_request("large", make_prompt(1, 80)),
            make_request("good", [1, 2]),
        ]
        outputs = []
        for request in [bad[0], good, *bad[1:]]:
            built.engine.add(request)
        while built.engine.has_unfinished():
            outputs += built.engine.step()
    codes = sorted(str(output.error_code) for output in outputs if output.error)
    assert codes == [
        "duplicate_id",
        "empty_prompt",
        "prompt_exceeds_cache",
        "token_out_of_vocabulary",
    ]
    (answered,) = [output for output in outputs if not output.error]
    assert answered.generated_tokens == expected_long_answers()["4"]


def test_two_requests_that_fit_alone_and_not_together_both_finish():
    with make_engine("llama", page_size=8, num_blocks=9, safety_margin=0.0) as built:
        requests = [make_request(n, LONG_ANSWERS[int(n)], max_new_tokens=48) for n in ("8", "9")]
        outputs = run_engine(built.engine, requests)
        assert built.engine.stats().num_preemptions > 0
    wanted = expected_long_answers()
    assert tokens_of(outputs) == {"8": wanted["8"], "9": wanted["9"]}
