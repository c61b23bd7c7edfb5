"""From what was asked and what is there to the sizes of an engine, each with its reason."""

from __future__ import annotations

import pytest

from cbgen.engine.cache.groups import LayerFacts, group_layers
from cbgen.engine.config import ContinuousBatchingConfig
from cbgen.engine.plan import EnginePlan, PlanFacts, resolve
from cbgen.errors import UsageError

GIB = 1024**3


def make_layers(count: int = 2, **changes) -> tuple[LayerFacts, ...]:
    sizes = {"num_heads": 4, "num_kv_heads": 2, "key_dim": 16, "value_dim": 16} | changes
    return tuple(LayerFacts(index=index, **sizes) for index in range(count))


def make_facts(**changes) -> PlanFacts:
    defaults = {
        "device_type": "cpu",
        "free_bytes": 8 * GIB,
        "layers": make_layers(),
        "cache_itemsize": 4,
        "logits_size": 1000,
        "hidden_size": 64,
        "max_context": 2048,
    }
    return PlanFacts(**(defaults | changes))


def plan(attention: str = "auto", facts: PlanFacts | None = None, **config) -> EnginePlan:
    return resolve(ContinuousBatchingConfig(**config), attention, facts or make_facts())


def test_a_cpu_runs_1024_tokens_a_step_by_default():
    assert plan().max_batch_tokens == 1024
    assert plan().reasons["max_batch_tokens"] == "default on cpu"


def test_a_gpu_runs_8192_tokens_a_step_by_default():
    assert plan(facts=make_facts(device_type="cuda")).max_batch_tokens == 8192


def test_given_batch_tokens_are_taken():
    decided = plan(max_batch_tokens=77)
    assert (decided.max_batch_tokens, decided.reasons["max_batch_tokens"]) == (77, "given")


def test_the_margin_is_15_percent_by_default_and_else_what_was_given():
    assert plan().safety_margin == 0.15
    assert plan(safety_margin=0.0).safety_margin == 0.0


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
    assert decided.num_blocks == 4 * 2048 // 256
    assert decided.cache_tokens == 4 * 2048
    assert "enough for every request at full length" in decided.reasons["num_blocks"]


def test_the_cache_is_no_larger_than_memory_allows():
    facts = make_facts(free_bytes=GIB // 4)
    decided = plan(facts=facts)
    block_bytes = 256 * 2 * (16 + 16) * 4 * 2
    assert 1 <= decided.num_blocks * block_bytes <= 0.6 * GIB // 4
    assert decided.reasons["num_blocks"].startswith("as many as memory allows")


def test_a_larger_share_of_memory_gives_more_blocks():
    facts = make_facts(free_bytes=GIB // 4)
    less = plan(facts=facts, max_memory_percent=0.3)
    more = plan(facts=facts, max_memory_percent=0.9)
    assert less.num_blocks < more.num_blocks
    assert "90% of 0.2 GiB free memory" in more.reasons["num_blocks"]


def test_given_blocks_are_taken():
    decided = plan(num_blocks=9, page_size=16)
    assert (decided.num_blocks, decided.page_size) == (9, 16)
    assert decided.reasons["num_blocks"].startswith("given")


def test_more_blocks_than_memory_are_refused_with_both_sizes():
    with pytest.raises(UsageError, match=r"num_blocks = 1000000 needs .* GiB, and 4\.\d+ GiB are"):
        plan(num_blocks=1_000_000)


def test_no_memory_for_one_block_is_refused():
    with pytest.raises(UsageError, match="no memory for the KV cache"):
        plan(facts=make_facts(free_bytes=1))


def test_a_model_without_attention_layers_needs_no_memory_for_blocks():
    assert plan(facts=make_facts(layers=())).num_blocks > 0


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
    }


def test_a_block_is_one_page_in_every_layer():
    (group,) = group_layers([*make_layers(2), *make_layers(1, key_dim=24, value_dim=12)])
    assert group.block_bytes(page_size=4, itemsize=2) == 4 * 2 * 2 * (32 + 32 + 36)
