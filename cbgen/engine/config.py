"""What the user asked of the engine. `None` means "decide for me"; `plan.resolve` decides.

No torch, no transformers: a recipe is checked before either is imported.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any

from cbgen.engine.attention.backends import ALIASES, BACKENDS
from cbgen.engine.sampling.params import MAX_SEED
from cbgen.errors import UsageError

ATTENTION_BACKENDS = ("auto", *BACKENDS, *ALIASES)
"""Attention implementations that a recipe may name."""

DTYPES = ("auto", "float32", "bfloat16", "float16")
QUANTIZATIONS = ("int8",)
SCHEDULER_TYPES = ("fifo", "prefill_first")

_RANGES: tuple[tuple[str, Callable[[Any], bool], tuple[str, ...]], ...] = (
    ("be at least 4", lambda value: value >= 4, ("page_size",)),
    (
        "be at least 1",
        lambda value: value >= 1,
        ("num_blocks", "max_batch_tokens", "max_requests_per_batch"),
    ),
    ("be between 0 and 1", lambda value: 0 <= value <= 1, ("safety_margin",)),
    (
        "be above 0 and at most 1",
        lambda value: 0 < value <= 1,
        ("max_memory_percent", "cpu_offload_space_safety_threshold"),
    ),
    ("be 0 to 3", lambda value: 0 <= value <= 3, ("default_compile_level",)),
    (f"be at least 0 and at most {MAX_SEED}", lambda value: 0 <= value <= MAX_SEED, ("seed",)),
    (
        "not be negative",
        lambda value: value >= 0,
        ("max_queue_size", "cpu_offload_space", "max_blocks_per_request"),
    ),
)
"""What the fields of ContinuousBatchingConfig must be, where they are given."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Which model to load and how (section `model` of a recipe)."""

    path: str
    """Hub id, folder, or a .gguf file; `~` and environment variables are expanded."""
    revision: str | None = None
    """Branch, tag or commit of a hub model."""
    dtype: str = "auto"
    """auto | float32 | bfloat16 | float16."""
    device: str = "auto"
    """auto | cpu | cuda | cuda:N."""
    device_map: str | None = None
    """null | auto: spread a model over the GPUs of one process."""
    attn_implementation: str = "auto"
    """How attention is computed; auto = the best way that serves model and machine. cpu stands for
    the C++ kernels, and "paged|eager" is the same as eager."""
    tp_size: int | None = None
    """Ranks that share one copy of the weights; null = all ranks."""
    quantization: str | None = None
    """null | int8: on a CPU, linear layers round their weights and inputs to 8 bits; faster and
    smaller, and answers differ."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model."""
    adapter: str | None = None
    """Folder of a PEFT adapter."""
    config_overrides: dict[str, Any] = field(default_factory=dict)
    """Fields of the model's config to set, such as sliding_window."""
    random_init: bool = False
    """Random weights from the config alone, for benchmarks and tests."""

    def __post_init__(self) -> None:
        if not self.path.strip():
            raise UsageError("model.path is empty; give a hub id, a folder or a .gguf file")
        _check_choice("model.dtype", self.dtype, DTYPES)
        _check_choice("model.attn_implementation", self.attn_implementation, ATTENTION_BACKENDS)
        kind, _, number = self.device.partition(":")
        if kind not in ("auto", "cpu", "cuda") or (
            number and not (kind == "cuda" and number.isdecimal())
        ):
            raise UsageError(f"model.device is {self.device!r}; expected auto, cpu, cuda or cuda:N")
        if self.quantization is not None:
            _check_choice("model.quantization", self.quantization, QUANTIZATIONS)
        for name in ("device_map", "adapter"):
            if getattr(self, name) is not None:
                raise UsageError(
                    f"model.{name} = {getattr(self, name)!r} is not supported yet; remove it"
                )
        if self.tp_size not in (None, 1):
            raise UsageError(f"model.tp_size = {self.tp_size} is not supported yet; remove it")


@dataclass(frozen=True, slots=True, kw_only=True)
class ContinuousBatchingConfig:
    """Cache, batch and schedule settings; names and defaults are those of transformers' class.

    Raises:
        UsageError: a value is out of range, or asks for something that this version does not do.
    """

    page_size: int = 256
    """Tokens in one page of the KV cache; at least 4."""
    num_blocks: int | None = None
    """Capacity of the KV cache in blocks of page_size tokens in all layers; null = from memory."""
    max_batch_tokens: int | None = None
    """Tokens that one forward pass may run; null = 8192 on a GPU, 1024 on a CPU, less (but at least
    256) where memory is short."""
    max_memory_percent: float | None = None
    """Share of the free memory for cache and buffers; null = 0.6 on a CPU, 0.9 on a GPU."""
    max_requests_per_batch: int | None = None
    """Requests that one forward pass may run; null = up to 1024, as memory allows."""
    max_blocks_per_request: int | None = None
    """Width of the block table of the GPU decode path; null = decided, 0 = off."""
    allow_block_sharing: bool = True
    """Let requests whose tokens begin alike share cache blocks, finished requests included."""
    use_async_batching: bool | None = None
    """Prepare the next batch while the device runs; null = decided."""
    use_cuda_graph: bool | tuple[bool, bool] | None = None
    """Record and replay CUDA graphs; null = decided."""
    q_padding_interval_size: int = 0
    """Query padding of CUDA graphs in tokens; 0 = default."""
    kv_padding_interval_size: int = 0
    """Key padding of CUDA graphs in tokens; 0 = default."""
    varlen_compile_config: dict[str, Any] | None = None
    """torch.compile settings of the general path."""
    decode_compile_config: dict[str, Any] | None = None
    """torch.compile settings of the decode path."""
    default_compile_level: int = 0
    """0 to 3: how much torch.compile may optimize; 0 = off."""
    scheduler_type: str = "fifo"
    """fifo: decoding requests first, then prompts in order of arrival; prefill_first: admitted
    prompts before decoding requests."""
    safety_margin: float | None = None
    """Share of the cache, 0 to 1, kept free of new admissions; null = 0.15 for fifo, 0 for
    prefill_first."""
    return_logprobs: bool = False
    """Give the log-probability of each generated token."""
    seed: int | None = None
    """Run seed; the same as generation_config.seed."""
    auto_switch_to_flash: bool = True
    """Let `attn_implementation: auto` take flash attention where it is installed."""
    cpu_offload_space: float | None = 0.0
    """GiB of host memory for the blocks of preempted requests; 0 = off, null = as much as
    cpu_offload_space_safety_threshold allows."""
    cpu_offload_space_safety_threshold: float = 0.8
    """Share of the available host memory that this pool may take; on a CPU, of what cache and
    buffers leave."""
    max_queue_size: int = 0
    """Requests that may wait for admission before submitting one more blocks; 0 = no limit."""
    per_request_processors: bool = False
    """Accepted for compatibility: every request may always set its own sampling."""
    drop_unsupported_processors: bool = True
    """Accepted for compatibility: nothing is ever dropped silently."""
    disable_nccl_graph_mixing: bool = True
    """NCCL setting of multi-GPU runs."""
    cpu_group_timeout: float | None = 300.0
    """Seconds that ranks wait for one another; null = the library's default."""

    def __post_init__(self) -> None:
        for expected, is_valid, names in _RANGES:
            for name in names:
                value = getattr(self, name)
                if value is not None and not is_valid(value):
                    raise UsageError(f"{name} must {expected}, got {value}")
        _check_choice("scheduler_type", self.scheduler_type, SCHEDULER_TYPES)
        self._refuse_unsupported()

    def _refuse_unsupported(self) -> None:
        accepted: dict[str, tuple[Any, ...]] = {
            "max_blocks_per_request": (None, 0),
            "use_async_batching": (None, False),
            "use_cuda_graph": (None, False, (False, False)),
            "q_padding_interval_size": (0,),
            "kv_padding_interval_size": (0,),
            "varlen_compile_config": (None,),
            "decode_compile_config": (None,),
            "default_compile_level": (0,),
        }
        for name, values in accepted.items():
            value = getattr(self, name)
            if value not in values:
                raise UsageError(f"{name} = {value!r} is not supported yet; remove it")


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadHints:
    """What is known of the requests to come, for sizes that depend on it; 0 = not known.

    Requests that go beyond the hints are served all the same.

    Raises:
        UsageError: a hint is negative.
    """

    max_prompt_length: int = 0
    """Tokens of the longest prompt."""
    max_generated_length: int = 0
    """Tokens of the longest answer."""
    num_requests: int = 0
    """Requests in all."""

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            if value < 0:
                raise UsageError(f"{item.name} must not be negative, got {value}")


def _check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise UsageError(f"{name} is {value!r}; expected one of {', '.join(choices)}")
