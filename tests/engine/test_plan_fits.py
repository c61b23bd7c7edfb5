"""Whatever is asked of whatever machine: a plan fits, or it is refused."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from cbgen.engine.cache.groups import AttentionSpan, LayerFacts
from cbgen.engine.config import ContinuousBatchingConfig, WorkloadHints
from cbgen.engine.plan import PlanFacts, memory_parts, resolve
from cbgen.errors import UsageError

MIB = 2**20

sizes = st.one_of(st.none(), st.integers(1, 5000))
layers = st.builds(
    LayerFacts,
    index=st.just(0),
    num_heads=st.sampled_from([8, 64]),
    num_kv_heads=st.sampled_from([1, 8]),
    key_dim=st.sampled_from([64, 256]),
    value_dim=st.sampled_from([64, 256]),
    span=st.sampled_from([AttentionSpan(), AttentionSpan(128), AttentionSpan(4096)]),
    has_sinks=st.booleans(),
)
facts = st.builds(
    PlanFacts,
    device_type=st.sampled_from(["cpu", "cuda"]),
    free_bytes=st.integers(0, 200_000).map(lambda mib: mib * MIB),
    host_free_bytes=st.integers(0, 1000).map(lambda mib: mib * MIB),
    layers=st.lists(layers, max_size=6).map(tuple),
    dtype=st.sampled_from(["bfloat16", "float32"]),
    vocab_size=st.just(100),
    logits_size=st.sampled_from([100, 250_000]),
    hidden_size=st.sampled_from([64, 8192]),
    max_context=st.one_of(st.none(), st.integers(2, 200_000)),
)
configs = st.builds(
    ContinuousBatchingConfig,
    page_size=st.sampled_from([4, 16, 256]),
    num_blocks=sizes,
    max_batch_tokens=sizes,
    max_requests_per_batch=sizes,
    max_memory_percent=st.one_of(st.none(), st.floats(0.01, 1)),
    cpu_offload_space=st.one_of(st.none(), st.floats(0, 1000)),
    cpu_offload_space_safety_threshold=st.floats(0.01, 1),
)
hints = st.builds(
    WorkloadHints,
    max_prompt_length=st.integers(0, 1000),
    max_generated_length=st.integers(0, 1000),
    num_requests=st.integers(0, 5000),
)


@given(configs, facts, hints)
def test_a_plan_fits_or_is_refused(config, facts, hints):
    try:
        plan = resolve(config, "auto", facts, hints)
    except UsageError:
        return
    share = config.max_memory_percent or (0.6 if facts.device_type == "cpu" else 0.9)
    parts = memory_parts(plan, facts)
    host_pool = parts.pop("host_pool")
    assert sum(parts.values()) <= share * facts.free_bytes
    if facts.device_type == "cpu":
        assert host_pool <= facts.free_bytes - sum(parts.values())
    else:
        assert host_pool <= config.cpu_offload_space_safety_threshold * facts.host_free_bytes
    assert 1 <= plan.max_requests <= min(plan.max_batch_tokens, plan.cache.num_blocks)
    assert plan.max_batch_tokens == config.max_batch_tokens or plan.max_batch_tokens >= 256
    assert config.num_blocks in (None, plan.cache.num_blocks)
    assert plan.cache.max_tokens >= plan.cache.page_size
