"""Attention of the C++ kernels: decode and prefill alike, over pages where they lie.

A token's output depends on its request alone, bit for bit: not on the batch, on how the prompt was
cut into chunks, on the page size or on the number of threads.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import ClassVar

import torch

from cbgen.engine.attention.base import AttentionBackend, LayerAttention, LayerCache
from cbgen.engine.attention.metadata import AttentionMetadata
from cbgen.engine.cpu import native
from cbgen.engine.sizing import AttentionSizes, PlanFacts, Refusal
from cbgen.errors import EngineError


class CpuBackend(AttentionBackend):
    """CPU only; any page size, head size and span, softcap and sinks."""

    serves_decoder: ClassVar[bool] = True

    @staticmethod
    def refusal(facts: PlanFacts) -> Refusal | None:
        """Refuse other devices, and machines where the kernels cannot be used."""
        missing = facts.missing_kernels
        if facts.device_type != "cpu":
            missing = f"the model is on {facts.device_type}"
        return None if missing is None else Refusal(missing, "; or use auto")

    @staticmethod
    def advantage(facts: PlanFacts) -> str | None:
        """Name the kernels."""
        return f"the kernels for this CPU, {facts.instruction_set}"

    @staticmethod
    def step_bytes(sizes: AttentionSizes) -> int:
        """Count queries and outputs in float32; pages are read in place."""
        return sizes.num_queries * sizes.layer.num_heads * sizes.head_dims * 4

    def __init__(self) -> None:
        kernels = native.kernels()
        if kernels is None:
            raise EngineError(f"attn_implementation is 'cpu', and {native.why_missing()}")
        self._kernels = kernels

    def forward(
        self,
        query: torch.Tensor,
        cache: LayerCache,
        metadata: AttentionMetadata,
        layer: LayerAttention,
    ) -> torch.Tensor:
        """Attend as `AttentionBackend.forward` says; scores and sums are float32."""
        num_tokens, num_heads, key_dim = query.shape
        keys, values = cache.keys, cache.values
        rows = query.float()
        if rows.stride(2) != 1:
            rows = rows.contiguous()
        sinks = None if layer.sinks is None else layer.sinks.detach().float().contiguous()
        output = torch.empty(num_tokens, num_heads, values.shape[3])
        # Tensors and arrays must live until the call: the arguments hold addresses alone.
        starts, lengths = _array(metadata.query_starts), _array(metadata.key_lens)
        arguments = native.Attention(
            query=rows.data_ptr(),
            query_token_stride=rows.stride(0),
            query_head_stride=rows.stride(1),
            pages=native.Pages.of(keys, values),
            block_tables=metadata.block_tables.data_ptr(),
            block_table_stride=metadata.block_tables.stride(0),
            query_starts=ctypes.addressof(starts),
            key_lens=ctypes.addressof(lengths),
            requests=metadata.num_requests,
            heads=num_heads,
            kv_heads=keys.shape[2],
            key_dim=key_dim,
            value_dim=values.shape[3],
            page_size=keys.shape[1],
            window=metadata.span.window or 0,
            chunk=metadata.span.chunk or 0,
            sinks=None if sinks is None else sinks.data_ptr(),
            output=output.data_ptr(),
            scaling=layer.scaling,
            softcap=layer.softcap or 0.0,
            format=native.FORMATS[keys.dtype],
        )
        self._kernels.attention(arguments)
        return output.to(query.dtype)


def _array(numbers: Sequence[int]) -> ctypes.Array[ctypes.c_int64]:
    return (ctypes.c_int64 * len(numbers))(*numbers)
