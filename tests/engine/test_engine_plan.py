"""From what was asked and what is there to the sizes of an engine, each with its reason."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cbgen.engine.cache.groups import AttentionSpan, LayerFacts
from cbgen.engine.config import ContinuousBatchingConfig, WorkloadHints
from cbgen.engine.plan import EnginePlan, PlanFacts, memory_parts, resolve
from cbgen.engine.sizing import MOST_SCORES
from cbgen.errors import UsageError

GIB = 1024**3
BLOCK_BYTES = 256 * 2 * (16 + 16) * 4 * 2
"""Of the model below, with pages of 256 tokens."""


def make_layers(count: int = 2, **changes) -> tuple[LayerFacts, ...]:
    sizes = {"num_heads": 4, "num_kv_heads": 2, "key_dim": 16, "value_dim": 16} | changes
    return tuple(LayerFacts(index=index, **sizes) for index in range(count))


def make_facts(**changes) -> PlanFacts:
    defaults = {
        "device_type": "cpu",
        "free_bytes": 8 * GIB,
        "layers": make_layers(),
        "dtype": "float32",
        "vocab_size": 1000,
        "logits_size": 1000,
        "hidden_size": 64,
        "max_context": 2048,
    }
    return PlanFacts(**(defaults | changes))


def plan(
    attention: str = "auto",
    facts: PlanFacts | None = None,
    hints: WorkloadHints | None = None,
    **config,
) -> EnginePlan:
    return resolve(ContinuousBatchingConfig(**config), attention, facts or make_facts(), hints)


def windowed_layers(num_windowed: int, num_full: int, window: int = 512) -> tuple[LayerFacts, ...]:
    return (
        *make_layers(num_windowed, span=AttentionSpan(window)),
        *(replace(layer, index=num_windowed + layer.index) for layer in make_layers(num_full)),
    )


def device_bytes(decided: EnginePlan, facts: PlanFacts) -> int:
    parts = memory_parts(decided, facts)
    return sum(parts.values()) - parts["host_pool"]


def test_a_cpu_runs_1024_tokens_a_step_by_default():
    assert plan().max_batch_tokens == 1024
    assert plan().reasons["max_batch_tokens"] == "default on cpu"


def test_a_gpu_runs_8192_tokens_a_step_by_default():
    assert plan(facts=make_facts(device_type="cuda")).max_batch_tokens == 8192


def test_given_batch_tokens_are_taken():
    decided = plan(max_batch_tokens=77)
    assert (decided.max_batch_tokens, decided.reasons["max_batch_tokens"]) == (77, "given")


def test_little_memory_lowers_the_default_batch_tokens():
    facts = make_facts(free_bytes=GIB // 4, hidden_size=2048)
    decided = plan(facts=facts)
    assert 256 <= decided.max_batch_tokens < 1024
    assert decided.reasons["max_batch_tokens"] == "memory is too short for 1024"


def test_batch_tokens_are_never_lowered_below_256():
    facts = make_facts(free_bytes=GIB // 4, hidden_size=4096)
    assert plan(facts=facts).max_batch_tokens == 256


def test_given_batch_tokens_are_never_lowered():
    facts = make_facts(free_bytes=GIB // 4, hidden_size=1024)
    assert plan(facts=facts).max_batch_tokens < 1024
    assert plan(facts=facts, max_batch_tokens=1024).max_batch_tokens == 1024


def test_given_blocks_lower_the_default_batch_tokens_to_what_they_leave():
    facts = make_facts(device_type="cuda", free_bytes=GIB, hidden_size=2048)
    num_blocks = (GIB * 9 // 10 - GIB // 4) // BLOCK_BYTES
    assert plan(facts=facts).max_batch_tokens > 512
    assert plan(facts=facts, num_blocks=num_blocks).max_batch_tokens <= 512


def test_scores_of_a_long_context_take_no_more_than_their_bound():
    facts = make_facts(layers=make_layers(num_heads=32), max_context=8192, free_bytes=4 * GIB)
    plans = [plan(name, facts, num_blocks=64) for name in ("sdpa", "eager")]
    assert [decided.max_batch_tokens for decided in plans] == [1024, 1024]
    sdpa, eager = (memory_parts(decided, facts)["activations"] for decided in plans)
    assert sdpa < eager < sdpa + MOST_SCORES * 12 + 8192 * 32 * 32 * 4


@pytest.mark.parametrize(("scheduler", "margin"), [("fifo", 0.15), ("prefill_first", 0.0)])
def test_each_scheduler_has_its_margin(scheduler, margin):
    decided = plan(scheduler_type=scheduler)
    assert (decided.scheduler_type, decided.safety_margin) == (scheduler, margin)
    assert decided.reasons["safety_margin"] == f"default of {scheduler}"


def test_a_given_margin_is_taken():
    decided = plan(safety_margin=0.5, scheduler_type="prefill_first")
    assert (decided.safety_margin, decided.reasons["safety_margin"]) == (0.5, "given")


def test_1024_requests_run_at_once_by_default():
    assert plan().max_requests == 1024


def test_never_more_requests_than_batch_tokens():
    decided = plan(max_batch_tokens=8, max_requests_per_batch=64)
    assert decided.max_requests == 8
    assert decided.reasons["max_requests_per_batch"] == "no more than max_batch_tokens"


def test_never_more_requests_than_blocks():
    decided = plan(num_blocks=5)
    assert decided.max_requests == 5
    assert decided.reasons["max_requests_per_batch"] == "no more than num_blocks"


def test_never_more_requests_than_the_blocks_that_memory_has_room_for():
    facts = make_facts(free_bytes=GIB, layers=make_layers(64))
    decided = plan(facts=facts)
    assert decided.max_requests <= decided.cache.num_blocks < 1024
    assert decided.reasons["max_requests_per_batch"] == "no more than num_blocks"


def test_given_requests_are_taken_within_their_bounds():
    decided = plan(max_requests_per_batch=3)
    assert (decided.max_requests, decided.reasons["max_requests_per_batch"]) == (3, "given")


def test_little_memory_and_large_logits_bound_the_requests():
    facts = make_facts(free_bytes=GIB, logits_size=1_000_000)
    assert 1 <= plan(facts=facts).max_requests < 20


def test_the_context_is_that_of_the_model():
    assert plan().max_context == 2048


def test_a_model_without_bound_has_a_large_context():
    decided = plan(facts=make_facts(max_context=None))
    assert decided.max_context == 1 << 20
    assert decided.reasons["max_context"] == "the model's config sets no bound"


def test_the_cache_is_no_larger_than_every_request_at_full_length():
    decided = plan(page_size=256, max_requests_per_batch=4)
    assert decided.cache.num_blocks == 4 * 2048 // 256
    assert decided.cache.max_tokens == 4 * 2048
    assert "enough for every request at full length" in decided.reasons["num_blocks"]


def test_the_cache_is_no_larger_than_memory_allows():
    facts = make_facts(free_bytes=GIB // 4)
    decided = plan(facts=facts)
    assert decided.cache.num_blocks >= 1
    assert device_bytes(decided, facts) <= 0.6 * GIB / 4
    assert device_bytes(decided, facts) + BLOCK_BYTES > 0.59 * GIB / 4
    assert decided.reasons["num_blocks"].startswith("as many as memory allows")


def test_a_larger_share_of_memory_gives_more_blocks():
    facts = make_facts(free_bytes=GIB // 4)
    less = plan(facts=facts, max_memory_percent=0.3)
    more = plan(facts=facts, max_memory_percent=0.9)
    assert less.cache.num_blocks < more.cache.num_blocks
    assert "90% of 256.00 MiB free memory" in more.reasons["num_blocks"]


def test_given_blocks_are_taken():
    decided = plan(num_blocks=9, page_size=16)
    assert (decided.cache.num_blocks, decided.cache.page_size) == (9, 16)
    assert decided.reasons["num_blocks"].startswith("given")


def test_more_blocks_than_memory_are_refused_with_both_sizes():
    with pytest.raises(UsageError) as caught:
        plan(num_blocks=1_000_000)
    assert str(caught.value).startswith("num_blocks = 1000000 needs 122.07 GiB beside ")
    assert "4.80 GiB are available (60% of 8.00 GiB free memory); lower num_blocks" in str(
        caught.value
    )


def test_given_blocks_leave_room_for_the_buffers_of_a_step():
    facts = make_facts(free_bytes=GIB)
    just_the_budget = int(0.6 * GIB) // BLOCK_BYTES
    with pytest.raises(UsageError, match="for the buffers of a step"):
        plan(facts=facts, num_blocks=just_the_budget, max_batch_tokens=1024)


def test_no_memory_for_one_block_is_refused():
    with pytest.raises(UsageError, match="no memory for the KV cache"):
        plan(facts=make_facts(free_bytes=1))


def test_a_model_without_attention_layers_needs_no_memory_for_blocks():
    assert plan(facts=make_facts(layers=())).cache.num_blocks > 0


@pytest.mark.parametrize("name", ["auto", "sdpa"])
def test_sdpa_runs_plain_attention(name):
    assert plan(name).attn_implementation == "sdpa"


@pytest.mark.parametrize("name", ["eager", "paged|eager"])
def test_eager_is_taken_when_named(name):
    decided = plan(name)
    assert decided.attn_implementation == "eager"
    assert decided.reasons["attn_implementation"] == "given"


@pytest.mark.parametrize("need", ["softcap", "sinks"])
def test_auto_takes_eager_where_sdpa_lacks_what_the_model_needs(need):
    decided = plan("auto", make_facts(layers=make_layers(**{f"has_{need}": True})))
    assert decided.attn_implementation == "eager"
    assert decided.reasons["attn_implementation"] == f"the model's attention has {need}"


def test_sdpa_for_a_model_with_softcap_and_sinks_is_refused():
    facts = make_facts(layers=make_layers(has_softcap=True, has_sinks=True))
    with pytest.raises(UsageError, match="has softcap and sinks, which sdpa cannot compute"):
        plan("sdpa", facts)


def test_one_layer_with_softcap_among_others_is_enough():
    plain, capped = make_layers()[0], make_layers(has_softcap=True)[1]
    assert plan(facts=make_facts(layers=(plain, capped))).attn_implementation == "eager"


def test_every_decision_has_a_reason():
    assert plan().reasons.keys() == {
        "attn_implementation",
        "max_context",
        "max_batch_tokens",
        "max_requests_per_batch",
        "num_blocks",
        "safety_margin",
        "allow_block_sharing",
        "cpu_offload_space",
    }


def test_a_cache_of_one_group_stores_all_its_tokens_for_one_request():
    decided = plan(num_blocks=9, page_size=16)
    assert len(decided.cache.groups) == 1
    assert decided.cache.num_pool_blocks == 9
    assert decided.cache.max_tokens == 9 * 16
    assert decided.table_blocks == 9


def test_tables_are_no_wider_than_the_context():
    assert plan(num_blocks=1000, page_size=16).table_blocks == 2048 // 16


def test_every_group_has_as_many_blocks_in_the_pool():
    decided = plan(facts=make_facts(layers=windowed_layers(22, 4)), num_blocks=100)
    assert len(decided.cache.groups) == 7
    assert decided.cache.num_pool_blocks == 700
    assert decided.cache.block_bytes == 4 * BLOCK_BYTES // 2


def test_windows_make_room_for_longer_requests():
    layers = windowed_layers(22, 4)
    facts = make_facts(layers=layers, max_context=1 << 17)
    decided = plan(facts=facts, num_blocks=100, max_batch_tokens=256)
    # Each of six windows takes ceil((511 + 256) / 256) + 1 of 700 blocks, full layers the rest.
    assert decided.cache.max_tokens == (700 - 6 * 4) * 256
    assert decided.table_blocks == 512


def test_windows_alone_bound_no_request():
    decided = plan(facts=make_facts(layers=make_layers(4, span=AttentionSpan(512))), num_blocks=20)
    assert decided.cache.max_tokens > 1 << 40


def test_the_cache_needs_what_windows_need_and_not_the_context():
    facts = make_facts(layers=windowed_layers(22, 4), max_context=32 * 1024)
    decided = plan(facts=facts, max_requests_per_batch=8, max_batch_tokens=1024)
    in_windows = -(-(511 + 1024) // 256) + 1
    assert decided.cache.num_blocks == -(-8 * (128 + 6 * in_windows) // 7)
    assert "enough for every request at full length" in decided.reasons["num_blocks"]


def test_chunked_layers_need_their_chunk_alone():
    layers = make_layers(2, span=AttentionSpan(chunk=512))
    facts = make_facts(layers=layers, max_context=32 * 1024)
    decided = plan(facts=facts, max_requests_per_batch=8, max_batch_tokens=256)
    assert decided.cache.num_blocks == 8 * (-(-(511 + 256) // 256) + 1)


def test_prefixes_are_shared_unless_the_recipe_forbids_it():
    assert plan().shares_prefixes
    decided = plan(allow_block_sharing=False)
    assert (decided.shares_prefixes, decided.reasons["allow_block_sharing"]) == (False, "given")


def test_prefixes_are_shared_with_windows_too():
    decided = plan(facts=make_facts(layers=windowed_layers(1, 1)))
    assert decided.shares_prefixes
    assert "what the window still needs" in decided.reasons["allow_block_sharing"]


def test_no_more_requests_than_there_are():
    decided = plan(hints=WorkloadHints(num_requests=3))
    assert decided.max_requests == 3
    assert decided.reasons["max_requests_per_batch"] == "all that there are"


def test_more_than_1024_hinted_requests_change_nothing():
    facts = make_facts(device_type="cuda")
    assert plan(facts=facts, hints=WorkloadHints(num_requests=100_000)).max_requests == 1024


def test_given_requests_win_over_hinted_ones():
    hints = WorkloadHints(num_requests=3)
    assert plan(hints=hints, max_requests_per_batch=5).max_requests == 5


def test_hinted_lengths_bound_the_cache():
    hints = WorkloadHints(max_prompt_length=200, max_generated_length=100)
    decided = plan(hints=hints, max_requests_per_batch=64)
    assert decided.cache.num_blocks == 64 * 2
    assert decided.reasons["num_blocks"].startswith("enough for every request at 300 tokens")


def test_hints_leave_room_for_one_request_of_full_context():
    hints = WorkloadHints(max_prompt_length=5, max_generated_length=5, num_requests=1)
    assert plan(hints=hints).cache.max_tokens == 2048


@pytest.mark.parametrize("known", ["max_prompt_length", "max_generated_length"])
def test_one_hinted_length_alone_bounds_nothing(known):
    decided = plan(hints=WorkloadHints(**{known: 10}), max_requests_per_batch=4)
    assert decided.cache.num_blocks == 4 * 2048 // 256


def test_on_a_gpu_block_tables_are_counted():
    facts = make_facts(device_type="cuda")
    decided = plan(facts=facts, max_requests_per_batch=100)
    assert memory_parts(decided, facts)["block_tables"] == 100 * (2048 // 256) * 8
    assert memory_parts(plan(), make_facts())["block_tables"] == 0


def with_kernels(**changes) -> PlanFacts:
    return make_facts(missing_kernels=None, instruction_set="avx2", **changes)


@pytest.mark.parametrize("name", ["auto", "cpu"])
def test_the_kernels_are_used_on_a_cpu_where_they_are_there(name):
    layers = make_layers(2, has_softcap=True, has_sinks=True)
    decided = resolve(ContinuousBatchingConfig(), name, with_kernels(layers=layers))
    assert decided.attn_implementation == "cpu"
    assert decided.reasons["attn_implementation"].endswith("the kernels for this CPU, avx2")


def test_an_explicit_backend_stands_beside_the_kernels():
    assert resolve(ContinuousBatchingConfig(), "sdpa", with_kernels()).attn_implementation == "sdpa"


def test_missing_kernels_are_the_reason_for_another_backend():
    decided = resolve(ContinuousBatchingConfig(), "auto", make_facts(missing_kernels="not built"))
    assert decided.attn_implementation == "sdpa"
    assert decided.reasons["attn_implementation"] == "not built"


@pytest.mark.parametrize(
    ("facts", "reason"),
    [({"missing_kernels": "not built"}, "not built"), ({"device_type": "cuda"}, "on cuda")],
)
def test_kernels_that_cannot_be_had_are_refused_with_the_reason(facts, reason):
    with pytest.raises(UsageError, match=f"'cpu', and .*{reason}"):
        resolve(ContinuousBatchingConfig(), "cpu", make_facts(**facts))
