"""Ranges of the engine's settings, and what this version refuses."""

from __future__ import annotations

import pytest

from cbgen.engine.config import (
    ContinuousBatchingConfig,
    ModelConfig,
    WorkloadHints,
)
from cbgen.errors import UsageError


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("page_size", 3, "page_size must be at least 4, got 3"),
        ("num_blocks", 0, "num_blocks must be at least 1, got 0"),
        ("max_batch_tokens", 0, "max_batch_tokens must be at least 1, got 0"),
        ("max_requests_per_batch", 0, "max_requests_per_batch must be at least 1, got 0"),
        ("safety_margin", 1.5, "safety_margin must be between 0 and 1, got 1.5"),
        ("safety_margin", float("nan"), "safety_margin must be between 0 and 1, got nan"),
        ("max_memory_percent", 0, "max_memory_percent must be above 0 and at most 1, got 0"),
        ("max_memory_percent", 90, "max_memory_percent must be above 0 and at most 1, got 90"),
        ("default_compile_level", 4, "default_compile_level must be 0 to 3, got 4"),
        ("cpu_offload_space_safety_threshold", 0, "above 0 and at most 1, got 0"),
        ("max_queue_size", -1, "max_queue_size must not be negative, got -1"),
        ("cpu_offload_space", -1.0, "cpu_offload_space must not be negative, got -1.0"),
        ("cpu_offload_space", float("nan"), "cpu_offload_space must not be negative, got nan"),
        ("max_blocks_per_request", -2, "max_blocks_per_request must not be negative, got -2"),
        ("scheduler_type", "best", "scheduler_type is 'best'; expected one of fifo, prefill_first"),
    ],
)
def test_a_value_out_of_range_is_refused_with_name_and_value(name, value, message):
    with pytest.raises(UsageError) as caught:
        ContinuousBatchingConfig(**{name: value})
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("page_size", 4),
        ("num_blocks", 1),
        ("max_batch_tokens", 1),
        ("max_requests_per_batch", 1),
        ("safety_margin", 0),
        ("safety_margin", 1),
        ("max_memory_percent", 1),
        ("max_memory_percent", 0.01),
        ("scheduler_type", "prefill_first"),
        ("cpu_offload_space", 0),
        ("cpu_offload_space", 4.5),
        ("cpu_offload_space", None),
        ("cpu_offload_space_safety_threshold", 1),
        ("max_queue_size", 10),
    ],
)
def test_values_within_the_range_are_taken(name, value):
    assert getattr(ContinuousBatchingConfig(**{name: value}), name) == value


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_blocks_per_request", 32),
        ("use_async_batching", True),
        ("use_cuda_graph", True),
        ("use_cuda_graph", (True, False)),
        ("q_padding_interval_size", 64),
        ("kv_padding_interval_size", 64),
        ("varlen_compile_config", {"mode": "default"}),
        ("decode_compile_config", {}),
        ("default_compile_level", 1),
    ],
)
def test_what_is_not_there_yet_is_refused_by_name_and_value(name, value):
    with pytest.raises(UsageError) as caught:
        ContinuousBatchingConfig(**{name: value})
    assert str(caught.value) == f"{name} = {value!r} is not supported yet; remove it"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("use_async_batching", False),
        ("use_cuda_graph", False),
        ("use_cuda_graph", (False, False)),
        ("max_blocks_per_request", 0),
    ],
)
def test_switching_off_what_is_not_there_is_accepted(name, value):
    assert getattr(ContinuousBatchingConfig(**{name: value}), name) == value


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("path", " ", "model.path is empty"),
        ("dtype", "int4", "model.dtype is 'int4'; expected one of auto, float32"),
        ("attn_implementation", "flash", "model.attn_implementation is 'flash'"),
        ("device", "tpu", "model.device is 'tpu'; expected auto, cpu, cuda or cuda:N"),
        ("device", "cpu:1", "model.device is 'cpu:1'"),
        ("device", "cuda:x", "model.device is 'cuda:x'"),
        ("device_map", "auto", "model.device_map = 'auto' is not supported yet"),
        ("quantization", "int4", "model.quantization is 'int4'; expected one of int8"),
        ("adapter", "a", "model.adapter = 'a' is not supported yet"),
        ("tp_size", 2, "model.tp_size = 2 is not supported yet"),
    ],
)
def test_a_wrong_model_setting_is_refused_with_its_value(field, value, message):
    with pytest.raises(UsageError) as caught:
        ModelConfig(**({"path": "model"} | {field: value}))
    assert message in str(caught.value)


@pytest.mark.parametrize("device", ["auto", "cpu", "cuda", "cuda:0", "cuda:11"])
def test_devices_are_taken_by_name(device):
    assert ModelConfig(path="model", device=device).device == device


def test_hints_are_unknown_by_default():
    assert WorkloadHints() == WorkloadHints(
        max_prompt_length=0, max_generated_length=0, num_requests=0
    )


def test_a_negative_hint_is_refused_by_name():
    with pytest.raises(UsageError, match="num_requests must not be negative, got -1"):
        WorkloadHints(num_requests=-1)
