"""Speed of the C++ kernels beside the machine's peak and torch: GFLOP/s and GB/s.

    .venv/bin/python -m pytest -m bench -s benchmarks/bench_kernels.py

Nothing else may run: with another program on the same cores threads wait for each other. The best
of several runs is shown. Weights and keys are larger than the caches together, as in a model.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch
from torch.nn.functional import linear

from cbgen.engine.attention.base import LayerAttention, LayerCache
from cbgen.engine.attention.cpu import CpuBackend
from cbgen.engine.attention.metadata import AttentionMetadata
from cbgen.engine.cache.groups import AttentionSpan
from cbgen.engine.cpu import native
from cbgen.engine.cpu.packed import PackedWeight, WeightMemory

pytestmark = [
    pytest.mark.bench,
    pytest.mark.skipif(native.kernels() is None, reason=str(native.why_missing())),
]

SHAPES = ((576, 3072), (1536, 576), (1024, 6144), (576, 49152))
"""(depth, columns) of SmolLM2-135M, Qwen3-0.6B and a head."""
ROWS = (1, 4, 8, 16, 32, 64, 128, 512, 1024)
COLD_BYTES = 100 * 2**20


def best_seconds(run: Callable[[int], object], seconds: float = 0.3) -> float:
    """Return the time of the fastest run; runs are numbered."""
    run(0)
    best, number, end = float("inf"), 1, time.perf_counter() + seconds
    while time.perf_counter() < end or number < 4:
        begin = time.perf_counter()
        run(number)
        best = min(best, time.perf_counter() - begin)
        number += 1
    return best


def kernels() -> native.Kernels:
    found = native.kernels()
    assert found is not None
    return found


def peak() -> float:
    """Return GFLOP/s of a product whose operands stay in the caches, nearly the machine's."""
    packed = PackedWeight.pack(torch.randn(576, 576).bfloat16(), kernels())
    rows = torch.randn(60, 576)
    return 2 * 60 * 576 * 576 / best_seconds(lambda _: packed.multiply(rows)) / 1e9


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_products(shape):
    depth, columns = shape
    weight = torch.randn(columns, depth).bfloat16()
    count = max(1, COLD_BYTES // (weight.numel() * 2))
    memory = WeightMemory()
    copies = [PackedWeight.pack(weight, kernels(), memory=memory) for _ in range(count)]
    plain = [weight.float() for _ in range(max(1, count // 2))]
    print(
        f"\n{depth} x {columns}; in the caches {peak():.0f} GFLOP/s; "
        "kernels / torch float32 in GFLOP/s:"
    )
    for num_rows in ROWS:
        rows = torch.randn(num_rows, depth)
        flops = 2 * num_rows * depth * columns / 1e9
        ours = best_seconds(lambda i, rows=rows: copies[i % len(copies)].multiply(rows))
        torchs = best_seconds(lambda i, rows=rows: linear(rows, plain[i % len(plain)]))
        gigabytes = copies[0].num_bytes / ours / 1e9
        print(
            f"  {num_rows:5d} rows: {flops / ours:6.0f} / {flops / torchs:6.0f}, "
            f"weights at {gigabytes:5.1f} GB/s"
        )


@pytest.mark.parametrize("name", ["avx512vnni", "avx512", "avx2", "portable"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_int8_products(shape, name):
    """Speed counts as that of float32: two operations for each weight and row."""
    if name not in kernels().instruction_sets():
        pytest.skip(f"this machine lacks {name}")
    depth, columns = shape
    weight = torch.randn(columns, depth).bfloat16()
    count = max(1, COLD_BYTES // weight.numel())
    memory = WeightMemory()
    copies = {
        dtype: [PackedWeight.pack(weight, kernels(), dtype, memory) for _ in range(count)]
        for dtype in (torch.int8, torch.bfloat16)
    }
    print(f"\n{depth} x {columns}, {name}; int8 / bfloat16 weights in GFLOP/s:")
    with kernels().using(name):
        for num_rows in ROWS:
            rows = torch.randn(num_rows, depth)
            flops = 2 * num_rows * depth * columns / 1e9
            rates = [
                flops / best_seconds(lambda i, rows=rows, of=of: of[i % count].multiply(rows), 0.1)
                for of in copies.values()
            ]
            print(f"  {num_rows:5d} rows: {rates[0]:6.0f} / {rates[1]:6.0f}")


ATTENTION = (
    # requests x (cached, of these shared by all, new) tokens, heads, key heads, head size
    (32, 160, 0, 1, 9, 3, 64),
    (16, 2000, 0, 1, 9, 3, 64),
    (1, 2000, 0, 1, 9, 3, 64),
    (32, 300, 0, 1, 16, 8, 128),
    (32, 580, 0, 1, 9, 3, 64),
    (32, 580, 512, 1, 9, 3, 64),
    (1, 0, 0, 1024, 9, 3, 64),
    (1, 1024, 0, 1024, 9, 3, 64),
    (1, 1024, 0, 1024, 16, 8, 128),
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", ATTENTION, ids=str)
def test_attention(case, dtype):
    requests, past, shared, new, heads, kv_heads, dim = case
    page_size = 256
    blocks = -(-(past + new) // page_size)
    shape = (requests * blocks, page_size, kv_heads, dim)
    read_bytes = requests * (past + new) * kv_heads * dim * 2 * dtype.itemsize
    count = max(1, min(16, COLD_BYTES // read_bytes))
    memory = WeightMemory()
    caches = []
    for _ in range(count):
        keys, values = memory.empty(shape, dtype), memory.empty(shape, dtype)
        caches.append(LayerCache(keys.copy_(torch.randn(shape)), values.copy_(torch.randn(shape))))
    tables = torch.randperm(requests * blocks).view(requests, blocks)
    tables[:, : shared // page_size] = tables[0, : shared // page_size]
    metadata = AttentionMetadata(
        span=AttentionSpan(),
        query_starts=list(range(0, requests * new + 1, new)),
        key_lens=[past + new] * requests,
        block_tables=tables,
        slot_mapping=torch.empty(0, dtype=torch.int64),
        first_keys=[0] * requests,
        key_blocks=[],
    )
    query, layer, backend = (
        torch.randn(requests * new, heads, dim),
        LayerAttention(dim**-0.5),
        CpuBackend(),
    )
    seconds = best_seconds(
        lambda i: backend.forward(query, caches[i % count], metadata, layer), 0.5
    )
    seen = sum(past + offset + 1 for offset in range(new))
    flops = 4 * heads * dim * seen * requests / seconds / 1e9
    print(
        f"\n{requests} x {past}+{new}, {shared} shared, {heads}/{kv_heads} heads of {dim}, "
        f"{dtype}: {seconds * 1e6:.0f} us, {flops:.0f} GFLOP/s, "
        f"{read_bytes / seconds / 1e9:.1f} GB/s"
    )
