"""`cbgen bench` inside: what runs is the workload and nothing else, and the numbers agree."""

from __future__ import annotations

import pytest
from transformers import AutoModelForCausalLM

from cbgen.bench import measurement
from cbgen.bench.measurement import StepRecorder, run_bench
from cbgen.bench.roofline import MachineRates
from cbgen.bench.workloads import BenchRequest, Workload
from cbgen.engine.request import Request
from cbgen.engine.sampling.params import SamplingParams
from cbgen.errors import EngineError, UsageError
from cbgen.recipe.load import recipe_from_mapping
from tests.helpers.models import full_logits, make_engine, tiny_model
from tests.helpers.tiny_checkpoint import CONTEXT

PROMPT = tuple(range(20, 60))
WORKLOAD = Workload(
    "mine",
    (
        BenchRequest((*PROMPT, 61), 9),
        BenchRequest((7, 8, 9), 14),
        BenchRequest((*PROMPT, 62), 5),
    ),
)
PROMPT_TOKENS, OUTPUT_TOKENS = 85, 28


@pytest.fixture
def measured(monkeypatch):
    """Steps that the roofline was asked for; the machine is not really measured."""
    monkeypatch.setattr(
        measurement, "measure_machine", lambda device, dtype: MachineRates(1e9, 1e9)
    )
    seen = []
    real = measurement.roofline_seconds
    monkeypatch.setattr(
        measurement,
        "roofline_seconds",
        lambda steps, *rest: seen.extend(steps) or real(steps, *rest),
    )
    return seen


@pytest.fixture
def run(checkpoint, measured):
    def start(workload: Workload, **sections):
        sections.setdefault("continuous_batching_config", {"num_blocks": 64, "page_size": 16})
        recipe = recipe_from_mapping({"model": {"path": str(checkpoint)}, **sections})
        return run_bench(recipe, lambda vocab_size: workload)

    return start


def test_outputs_are_the_greedy_tokens_in_request_order_whatever_the_recipe_generates(
    run, checkpoint
):
    generation = {"max_new_tokens": 1, "do_sample": True, "temperature": 5.0, "stop_token_ids": [3]}
    outputs = run(WORKLOAD, generation_config=generation).outputs
    assert [len(tokens) for tokens in outputs] == [9, 14, 5]
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    for request, tokens in zip(WORKLOAD.requests, outputs, strict=True):
        logits = full_logits(model, [*request.prompt, *tokens])
        assert logits[len(request.prompt) - 1 : -1].argmax(-1).tolist() == tokens


def test_an_answer_goes_on_behind_an_end_of_sequence(run, checkpoint):
    first = run(WORKLOAD).outputs
    first_token = first[1][0]
    overrides = {"path": str(checkpoint), "config_overrides": {"eos_token_id": first_token}}
    assert run(WORKLOAD, model=overrides).outputs == first


def test_counts_and_rates_are_of_the_workload_alone(run):
    summary = run(WORKLOAD).summary
    assert (summary["workload"], summary["requests"]) == ("mine", 3)
    assert (summary["prompt_tokens"], summary["output_tokens"]) == (PROMPT_TOKENS, OUTPUT_TOKENS)
    seconds = summary["seconds"]
    assert summary["output_tokens_per_s"] == pytest.approx(OUTPUT_TOKENS / seconds, rel=0.01)
    both = PROMPT_TOKENS + OUTPUT_TOKENS
    assert summary["total_tokens_per_s"] == pytest.approx(both / seconds, rel=0.01)


def test_parts_add_up(run):
    summary = run(WORKLOAD).summary
    parts = summary["parts"]
    names = ("schedule", "execute", "update", "rest")
    assert all(parts[f"{name}_seconds"] >= 0 for name in names)
    total = sum(parts[f"{name}_seconds"] for name in names)
    assert total == pytest.approx(summary["seconds"], abs=0.001)
    assert parts["execute_seconds"] > parts["schedule_seconds"]


def test_what_a_request_shares_is_not_run_and_not_in_the_bound(run, measured):
    config = {"num_blocks": 64, "page_size": 16, "allow_block_sharing": True}
    parts = run(WORKLOAD, continuous_batching_config=config).summary["parts"]
    needed = PROMPT_TOKENS + OUTPUT_TOKENS - len(WORKLOAD.requests)
    assert parts["cached_tokens"] == len(PROMPT)
    assert parts["run_tokens"] == needed - len(PROMPT)
    assert sum(step.num_tokens for step in measured) == parts["run_tokens"]
    assert sum(step.num_logits for step in measured) == OUTPUT_TOKENS
    assert len(measured) == parts["steps"]


def test_nothing_of_the_warm_up_is_found_in_the_cache(run):
    warm_up = Workload("zeros", (BenchRequest((0,) * 40, 1),))
    assert run(warm_up).summary["parts"]["cached_tokens"] == 0


def test_a_preempted_request_is_recorded_each_time_it_runs():
    recorder = StepRecorder()
    model = tiny_model("llama")
    config = {"num_blocks": 6, "page_size": 4, "allow_block_sharing": False}
    requests = [
        Request(str(first), [first] * 4, SamplingParams(max_new_tokens=14)) for first in (3, 4)
    ]
    with make_engine(model, observer=recorder, **config) as built:
        recorder.watch(requests)
        for request in requests:
            built.engine.add(request)
        while built.engine.has_unfinished():
            built.engine.step()
        stats = built.engine.stats()
    assert stats.num_preemptions > 0
    assert sum(step.num_tokens for step in recorder.steps) == stats.num_computed_tokens
    assert sum(step.num_logits for step in recorder.steps) == 28


def test_a_request_that_the_engine_has_no_room_for_is_refused(run):
    workload = Workload("long", (BenchRequest((5,) * CONTEXT, 1),))
    with pytest.raises(UsageError, match=f"workload long .* {CONTEXT + 1} tokens.*for {CONTEXT}"):
        run(workload)


def test_a_failing_step_ends_the_run_with_its_cause(run, monkeypatch):
    def fail(*arguments):
        raise MemoryError("no more of it")

    monkeypatch.setattr("cbgen.engine.core.Engine.step", fail)
    with pytest.raises(EngineError, match="no more of it"):
        run(WORKLOAD)


def test_parts_of_the_forward_pass_are_less_than_the_whole(run):
    summary = run(WORKLOAD).summary
    assert "head_seconds" in summary["forward"]
    assert 0 < sum(summary["forward"].values()) < summary["parts"]["execute_seconds"]


def test_fused_layers_tell_what_took_their_time(run, monkeypatch):
    fused = {"products": 2.0, "attention": 1.0, "small": 0.5}
    monkeypatch.setattr(measurement, "take_part_seconds", lambda model: fused)
    forward = run(WORKLOAD).summary["forward"]
    assert forward | {"head_seconds": 0} == {
        "products_seconds": 2.0,
        "attention_seconds": 1.0,
        "small_seconds": 0.5,
        "head_seconds": 0,
    }
