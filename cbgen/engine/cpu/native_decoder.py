"""The decoder layers of a model as the C++ library takes them: csrc/decoder_tasks.h in ctypes.

The structures hold addresses alone; whoever fills them keeps the tensors alive.
"""

from __future__ import annotations

import ctypes

from cbgen.engine.cpu.native import Linear

MOST_PARTS = 3
"""Linear layers of one input that a product holds."""

PARTS = ("products", "attention", "small")
"""What the library measures the time of, in its order; "small" are norms, rotary embedding and
writes to the cache. Activations are part of the products whose results they take."""


class Product(ctypes.Structure):
    """`CbgenProduct`."""

    _fields_ = (
        ("count", ctypes.c_int64),
        ("offsets", ctypes.c_int64 * MOST_PARTS),
        ("parts", Linear * MOST_PARTS),
    )


class Cache(ctypes.Structure):
    """`CbgenCache`."""

    _fields_ = (
        ("keys", ctypes.c_void_p),
        ("values", ctypes.c_void_p),
        ("key_block_stride", ctypes.c_int64),
        ("key_token_stride", ctypes.c_int64),
        ("key_head_stride", ctypes.c_int64),
        ("value_block_stride", ctypes.c_int64),
        ("value_token_stride", ctypes.c_int64),
        ("value_head_stride", ctypes.c_int64),
        ("page_size", ctypes.c_int64),
    )


class DecoderLayer(ctypes.Structure):
    """`CbgenDecoderLayer`."""

    _fields_ = (
        ("attention_norm", ctypes.c_void_p),
        ("mlp_norm", ctypes.c_void_p),
        ("query_norm", ctypes.c_void_p),
        ("key_norm", ctypes.c_void_p),
        ("query_key_value", Product),
        ("output", Product),
        ("gate", Linear),
        ("up", Linear),
        ("down", Product),
        ("cache", Cache),
        ("group", ctypes.c_int64),
        ("rotary_dim", ctypes.c_int64),
        ("scaling", ctypes.c_float),
    )


class Decoder(ctypes.Structure):
    """`CbgenDecoder`."""

    _fields_ = (
        ("layers", ctypes.POINTER(DecoderLayer)),
        ("num_layers", ctypes.c_int64),
        ("last_norm", ctypes.c_void_p),
        ("hidden_size", ctypes.c_int64),
        ("heads", ctypes.c_int64),
        ("kv_heads", ctypes.c_int64),
        ("head_dim", ctypes.c_int64),
        ("query_offset", ctypes.c_int64),
        ("key_offset", ctypes.c_int64),
        ("value_offset", ctypes.c_int64),
        ("heads_width", ctypes.c_int64),
        ("intermediate_size", ctypes.c_int64),
        ("epsilon", ctypes.c_float),
    )


class StepGroup(ctypes.Structure):
    """`CbgenStepGroup`."""

    _fields_ = (
        ("block_tables", ctypes.c_void_p),
        ("block_table_stride", ctypes.c_int64),
        ("slots", ctypes.c_void_p),
        ("window", ctypes.c_int64),
        ("chunk", ctypes.c_int64),
    )


class BestColumns(ctypes.Structure):
    """`CbgenBestColumns` of csrc/kernels.h, which says what the fields mean."""

    _fields_ = (
        ("linear", Linear),
        ("rounded", ctypes.c_void_p),
        ("errors", ctypes.c_void_p),
        ("places", ctypes.c_void_p),
        ("values", ctypes.c_void_p),
    )


class Step(ctypes.Structure):
    """`CbgenStep`."""

    _fields_ = (
        ("hidden", ctypes.c_void_p),
        ("tokens", ctypes.c_int64),
        ("cos", ctypes.c_void_p),
        ("sin", ctypes.c_void_p),
        ("query_starts", ctypes.c_void_p),
        ("key_lens", ctypes.c_void_p),
        ("requests", ctypes.c_int64),
        ("groups", ctypes.POINTER(StepGroup)),
        ("wanted", ctypes.c_void_p),
        ("num_wanted", ctypes.c_int64),
        ("output", ctypes.c_void_p),
        ("seconds", ctypes.c_void_p),
    )
