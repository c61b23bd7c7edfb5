"""How many blocks of host memory a plan sets aside for preempted requests."""

from __future__ import annotations

import pytest

from cbgen.engine.config import ContinuousBatchingConfig
from cbgen.engine.plan import EnginePlan, PlanFacts, memory_parts, resolve
from tests.engine.test_engine_plan import BLOCK_BYTES, GIB, make_facts

FEW_BLOCKS = {"num_blocks": 8, "max_batch_tokens": 256}


def plan(facts: PlanFacts | None = None, **config) -> EnginePlan:
    return resolve(ContinuousBatchingConfig(**(FEW_BLOCKS | config)), "auto", facts or make_facts())


def gpu(**changes) -> PlanFacts:
    return make_facts(**({"device_type": "cuda", "host_free_bytes": GIB} | changes))


def test_without_offload_there_is_no_host_pool():
    decided = plan()
    assert decided.cache.num_host_blocks == 0
    assert decided.reasons["cpu_offload_space"] == "what is preempted is computed again"


@pytest.mark.parametrize("facts", [make_facts(), gpu()], ids=["cpu", "cuda"])
def test_a_given_space_is_taken_in_whole_blocks(facts):
    decided = plan(facts, cpu_offload_space=0.25)
    assert decided.cache.num_host_blocks == GIB // 4 // BLOCK_BYTES
    assert (decided.reasons["cpu_offload_space"], decided.warnings) == ("given", ())


def test_a_space_too_small_for_one_block_is_off_with_a_warning():
    decided = plan(cpu_offload_space=BLOCK_BYTES / GIB / 2)
    assert decided.cache.num_host_blocks == 0
    assert decided.reasons["cpu_offload_space"] == "too small for one block"
    (warning,) = decided.warnings
    assert warning == (
        "cpu_offload_space: 64.00 KiB are too small for one block of 128.00 KiB; nothing is "
        "offloaded: give it more"
    )


def test_a_space_above_the_threshold_is_cut_with_a_warning():
    decided = plan(gpu(), cpu_offload_space=4.0, cpu_offload_space_safety_threshold=0.5)
    assert decided.cache.num_host_blocks == GIB // 2 // BLOCK_BYTES
    (warning,) = decided.warnings
    assert warning == (
        "cpu_offload_space = 4.0 GiB is cut to 512.00 MiB, 50% of 1.00 GiB of host memory"
    )


def test_no_free_host_memory_turns_offload_off_with_both_warnings():
    decided = plan(gpu(host_free_bytes=0), cpu_offload_space=4.0)
    assert decided.cache.num_host_blocks == 0
    assert len(decided.warnings) == 2


def test_a_space_that_nobody_gave_is_the_threshold_s_share():
    facts = gpu(host_free_bytes=32 * BLOCK_BYTES)
    decided = plan(facts, cpu_offload_space=None, cpu_offload_space_safety_threshold=0.5)
    assert decided.cache.num_host_blocks == 16
    assert decided.reasons["cpu_offload_space"] == "50% of 4.00 MiB of host memory"


def test_a_space_that_nobody_gave_is_no_larger_than_all_requests_at_full_length():
    decided = plan(gpu(), cpu_offload_space=None)
    assert decided.cache.num_host_blocks == decided.max_requests * 2048 // 256
    assert decided.reasons["cpu_offload_space"] == "enough for every request at full length"


def test_a_cache_for_all_requests_needs_no_host_pool_that_nobody_gave():
    decided = plan(gpu(), cpu_offload_space=None, num_blocks=None)
    assert decided.cache.num_host_blocks == 0
    assert "the cache has room" in decided.reasons["cpu_offload_space"]


@pytest.mark.parametrize("space", [None, 100.0])
@pytest.mark.parametrize("num_blocks", [None, 8, 1500])
def test_on_a_cpu_cache_buffers_and_host_pool_fit_in_what_is_free(space, num_blocks):
    facts = make_facts(free_bytes=GIB // 2, max_context=1 << 16)
    decided = plan(facts, cpu_offload_space=space, num_blocks=num_blocks)
    parts = memory_parts(decided, facts)
    assert decided.cache.num_host_blocks > 0
    assert sum(parts.values()) <= facts.free_bytes


def test_on_a_cpu_the_host_pool_gets_a_share_of_what_the_rest_leaves():
    facts = make_facts(free_bytes=GIB // 2)
    decided = plan(facts, cpu_offload_space=100.0, cpu_offload_space_safety_threshold=0.5)
    parts = memory_parts(decided, facts)
    left = facts.free_bytes - sum(parts.values()) + parts["host_pool"]
    assert decided.cache.num_host_blocks == left // 2 // BLOCK_BYTES


def test_the_cache_is_the_same_with_and_without_a_host_pool():
    facts = make_facts(free_bytes=GIB // 2, max_context=1 << 16)
    without, with_pool = (
        plan(facts, num_blocks=None, cpu_offload_space=space) for space in (0.0, None)
    )
    assert without.cache.num_blocks == with_pool.cache.num_blocks


def test_a_model_without_cache_has_no_host_pool():
    decided = plan(make_facts(layers=()), cpu_offload_space=1.0)
    assert (decided.cache.num_host_blocks, decided.warnings) == (0, ())
