"""The least time that a machine could need for the steps that an engine ran.

A step reads every weight once and every visible key and value once, and multiplies; it takes no
less than the longer of both. What a machine can do is measured, not looked up, with the threads in
use: the rate of a large matrix product in torch, or on a CPU of multiply-adds that touch no memory,
whichever is more; and that of reading a large tensor. The model of Williams, Waterman and
Patterson, "Roofline" (2009).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from time import perf_counter

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from cbgen.engine.cache.groups import AttentionSpan
from cbgen.engine.cpu import native
from cbgen.engine.cpu.decoder import held_screen_bytes
from cbgen.engine.model.probe import ModelFacts

_TURNS = 10
"""Measurements, of which the best counts."""
_SIDE = {"cpu": 2048, "cuda": 8192}
"""Rows and columns of the matrices that are multiplied."""
_ROUNDS = 1_000_000
"""Of multiply-adds in registers: some tens of milliseconds."""
_READ_BYTES = {"cpu": 2**29, "cuda": 2**31}
"""Beyond every cache."""
_INT8_SPEED = 4
"""Multiply-adds of int8 in the time of one in float32, by the instructions that do most at once."""
_EXPERT_DIMS = 3
"""Dimensions of the weights of all experts of a layer together."""


@dataclass(frozen=True, slots=True)
class MachineRates:
    """What the machine reached."""

    flop_per_s: float
    bytes_per_s: float


@dataclass(frozen=True, slots=True)
class LinearSizes:
    """Weights of a model's linear layers."""

    body: int
    """Run for every token."""
    head: int
    """Run for those whose logits are wanted."""
    total: int
    """All weights of the model, each once."""
    screen_bytes: int = 0
    """Of the head in int8, which greedy requests run in place of the head; 0 = there is none."""


@dataclass(frozen=True, slots=True)
class StepWork:
    """What one step ran."""

    spans: tuple[tuple[int, int], ...]
    """First position and the one behind the last, of every request in the step."""
    num_logits: int

    @property
    def num_tokens(self) -> int:
        """Tokens of the forward pass."""
        return sum(end - start for start, end in self.spans)


def measure_machine(device: torch.device, dtype: torch.dtype) -> MachineRates:
    """Measure the device with the threads that torch uses now; takes about a second.

    Args:
        device: where the model is.
        dtype: of its activations.
    """
    side = _SIDE[device.type]
    left, right = (torch.rand(side, side, device=device, dtype=dtype) for _ in range(2))
    product = torch.empty_like(left)
    multiply_s = _best_seconds(lambda: torch.mm(left, right, out=product), device)
    flop_per_s = max(2 * side**3 / multiply_s, _register_rate(device, dtype))
    memory = torch.ones(_READ_BYTES[device.type] // 4, device=device, dtype=torch.float32)
    read_s = _best_seconds(lambda: memory.sum(), device)
    return MachineRates(flop_per_s, memory.numel() * 4 / read_s)


def _register_rate(device: torch.device, dtype: torch.dtype) -> float:
    """Return float32 operations a second without memory; 0 where the kernels are not in use."""
    kernels = native.kernels()
    if kernels is None or device.type != "cpu" or dtype != torch.float32:
        return 0.0
    operations = kernels.multiply_add(_ROUNDS)
    return operations / _best_seconds(lambda: kernels.multiply_add(_ROUNDS), device)


def _best_seconds(run: Callable[[], object], device: torch.device) -> float:
    times = []
    for _ in range(_TURNS + 1):  # the first one may be warming up; it cannot be the best then
        started = perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(perf_counter() - started)
    return min(times)


def linear_sizes(model: PreTrainedModel) -> LinearSizes | None:
    """Count the weights of a model's linear layers; None for mixtures of experts.

    They are counted in a model of the same config without weights, because the layers of a loaded
    one may stand in another form.

    Args:
        model: not attached to an engine.
    """
    with torch.device("meta"):
        skeleton = type(model)(model.config)
    weights = list(skeleton.parameters())  # tied ones once
    if any(weight.dim() >= _EXPERT_DIMS for weight in weights):
        return None
    linears = [m.weight for m in skeleton.modules() if isinstance(m, nn.Linear | Conv1D)]
    output = skeleton.get_output_embeddings()
    head = output.weight.numel() if isinstance(output, nn.Linear) else 0
    return LinearSizes(
        body=sum(weight.numel() for weight in linears) - head,
        head=head,
        total=sum(weight.numel() for weight in weights),
        screen_bytes=held_screen_bytes(model),
    )


def roofline_seconds(
    steps: Sequence[StepWork], sizes: LinearSizes, facts: ModelFacts, rates: MachineRates
) -> float:
    """Return the least seconds for these steps, one after the other.

    Args:
        steps: what was run, of greedy requests.
        sizes: the linear layers; of other weights (norms, embeddings) nothing is counted.
        facts: of the model, whose weights take as many bytes as they do in memory.
        rates: of the machine.
    """
    weight_bytes = (facts.weight_bytes - sizes.screen_bytes) / sizes.total
    head_bytes = sizes.screen_bytes or sizes.head * weight_bytes
    head_work = sizes.head / (_INT8_SPEED if sizes.screen_bytes else 1)
    layers = Counter(replace(layer, index=0) for layer in facts.layers)  # one of each kind
    itemsize = torch.finfo(facts.dtype).bits // 8
    seconds = 0.0
    for step in steps:
        flop = 2.0 * (sizes.body * step.num_tokens + head_work * step.num_logits)
        num_bytes = sizes.body * weight_bytes + (head_bytes if step.num_logits else 0)
        for layer, count in layers.items():
            keys_seen, keys_read = attention_work(layer.span, step.spans)
            flop += 2.0 * count * layer.num_heads * (layer.key_dim + layer.value_dim) * keys_seen
            num_bytes += count * layer.token_bytes(itemsize) * keys_read
        seconds += max(flop / rates.flop_per_s, num_bytes / rates.bytes_per_s)
    return seconds


def attention_work(span: AttentionSpan, spans: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """Return pairs of query and key, and keys that are read, each once a request.

    Args:
        span: which keys a query sees.
        spans: positions of each request's queries: the first, and the one behind the last.
    """
    pairs = keys = 0
    for start, end in spans:
        keys += end - span.first_key(start)
        if span.is_full:
            pairs += (end * (end + 1) - start * (start + 1)) // 2
        else:
            pairs += sum(position - span.first_key(position) + 1 for position in range(start, end))
    return pairs, keys
