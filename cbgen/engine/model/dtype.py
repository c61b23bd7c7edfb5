"""Decides in which dtype a model computes where `model.dtype` is auto, and says why.

On a CPU the C++ kernels compute in float32 and hold 16-bit weights as they are, so bfloat16 saves
no memory there; it is taken where a short measurement finds torch's products clearly faster, which
takes matrix units for it (AMX). Without the kernels float32 doubles a 16-bit checkpoint, and memory
decides.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch.nn import functional
from transformers import PreTrainedModel

from cbgen.engine.cpu import native
from cbgen.engine.cpu.int8 import weight_bytes
from cbgen.engine.cpu.native import Kernels
from cbgen.engine.cpu.packed import PackedWeight
from cbgen.engine.cpu.packing import HALVES
from cbgen.engine.memory import free_ram

_MOST_MEMORY = 0.6
"""Share of the free memory that the weights may take in float32; the rest is for the cache."""
_SPEEDUP = 1.5
"""By which bfloat16 must be faster, so that no noise of the measurement decides."""
_ROWS = (8, 128)
"""Of the measured products: a step that decodes, and one with prompts."""
_SIDE = 1024
_SECONDS = 0.004
_LEAST_TIMES = 4
"""How long and how often a product is repeated; the fastest time counts."""


@dataclass(frozen=True, slots=True)
class DtypeChoice:
    """What a model computes in."""

    dtype: torch.dtype
    reason: str


def choose_dtype(
    name: str,
    device: torch.device,
    checkpoint: torch.dtype | None,
    make_skeleton: Callable[[], PreTrainedModel],
    *,
    is_random: bool = False,
) -> DtypeChoice:
    """Return the dtype of that name, or the one that suits device and checkpoint if it is `auto`.

    Args:
        name: `auto` or a dtype's name.
        device: where the model is to run.
        checkpoint: the dtype of its weights; None if it is not known.
        make_skeleton: returns the model without weights; called where sizes matter.
        is_random: whether the weights are made, and in that dtype, instead of read.
    """
    if name != "auto":
        return DtypeChoice(getattr(torch, name), "given")
    if checkpoint is None:
        return DtypeChoice(torch.float32, "the checkpoint names none, as no GGUF file does")
    if device.type != "cpu" or checkpoint not in HALVES:
        dtype = checkpoint if device.type != "cpu" else torch.float32
        return DtypeChoice(dtype, "the checkpoint's" if dtype == checkpoint else "for a CPU")
    kernels = native.kernels()
    packed_dtype = torch.float32 if kernels is None or is_random else checkpoint
    needed = weight_bytes(make_skeleton(), torch.float32, packed_dtype)
    room = _MOST_MEMORY * free_ram()
    if needed > room:
        return DtypeChoice(checkpoint, f"float32 would take {_gib(needed)} of {_gib(room)}")
    if kernels is None:
        return DtypeChoice(torch.float32, f"faster on a CPU, and its {_gib(needed)} fit")
    if checkpoint != torch.bfloat16:
        return DtypeChoice(torch.float32, "the kernels compute in it")
    speedups = measure_bfloat16(kernels)
    shown = " and ".join(f"{speedup:.2g}" for speedup in speedups)
    measured = f"bfloat16 was measured {shown} times as fast"
    if min(speedups) >= _SPEEDUP:
        return DtypeChoice(torch.bfloat16, measured)
    return DtypeChoice(torch.float32, measured)


@torch.inference_mode()
def measure_bfloat16(kernels: Kernels) -> list[float]:
    """Return how many times as fast torch's bfloat16 is as the kernels, with few rows and many.

    Both on one thread: several wait for each other where other processes run, whatever they do.
    """
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        weight = torch.ones(_SIDE, _SIDE, dtype=torch.bfloat16)
        packed = PackedWeight.pack(weight, kernels)
        speedups = []
        for num_rows in _ROWS:
            rows = torch.ones(num_rows, _SIDE)
            of_kernels = _seconds(partial(packed.multiply, rows))
            of_torch = _seconds(partial(functional.linear, rows.bfloat16(), weight))
            speedups.append(of_kernels / of_torch)
        return speedups
    finally:
        torch.set_num_threads(num_threads)


def _seconds(product: Callable[[], object]) -> float:
    """Return the shortest time that a product takes, after a first one."""
    product()
    times: list[float] = []
    while len(times) < _LEAST_TIMES or sum(times) < _SECONDS:
        started = time.perf_counter()
        product()
        times.append(time.perf_counter() - started)
    return min(times)


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / 2**30:.1f} GiB"
