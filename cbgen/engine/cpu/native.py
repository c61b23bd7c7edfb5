"""Opens the library of C++ kernels and calls it; the only file that knows its binary interface.

The library is built when cbgen is installed, if there is a compiler. It has no threads of its own:
it uses those of the OpenMP runtime that torch uses. The instruction set is the best one of the
machine; `CBGEN_INSTRUCTION_SET` in the environment names another one, which is for tests.

The structures are those of csrc/kernels.h and csrc/decoder_tasks.h, which say what the fields mean.
They hold addresses alone; whoever fills them keeps the tensors alive.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch

from cbgen.errors import UsageError

LIBRARY = Path(__file__).with_name("_kernels.so")
PANEL = 32
"""Columns of a packed panel."""

FORMATS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""Formats of weights, keys and values, as the library numbers them."""
PACKED_FORMATS = FORMATS | {torch.int8: 3}
"""Formats of packed weights, by the dtype of their panels."""
_DTYPES = {number: dtype for dtype, number in FORMATS.items()}

MOST_PARTS = 3
"""Linear layers of one input that a product holds."""

PARTS = ("products", "attention", "small")
"""What the library measures the time of, in its order; "small" are norms, rotary embedding and
writes to the cache. Activations are part of the products whose results they take."""

_ROTATION = 64
"""Depths of an int8 weight that are rotated together."""

_TORCH_LIBRARY = "libtorch_cpu.so"
_INTERFACE = 5
"""Of the library that this file can call."""
_REMEDY = "install cbgen again where there is a C++ compiler"
_INSTRUCTION_SET_VARIABLE = "CBGEN_INSTRUCTION_SET"


def _pointers(*names: str) -> tuple[tuple[str, type], ...]:
    """Return the fields of a structure that are addresses."""
    return tuple((name, ctypes.c_void_p) for name in names)


def _numbers(*names: str) -> tuple[tuple[str, type], ...]:
    """Return the fields of a structure that are 64-bit integers."""
    return tuple((name, ctypes.c_int64) for name in names)


class Linear(ctypes.Structure):
    """`CbgenLinear`."""

    _fields_ = (
        *_pointers("input"),
        *_numbers("rows", "input_stride"),
        *_pointers("weights"),
        *_numbers("depth", "columns"),
        *_pointers("bias", "output"),
        *_numbers("output_stride"),
        ("format", ctypes.c_int32),
        *_pointers("next"),
    )


class Pages(ctypes.Structure):
    """The pages of a layer, as `CbgenAttention` and `CbgenCache` hold them."""

    _fields_ = (
        *_pointers("keys", "values"),
        *_numbers("key_block_stride", "key_token_stride", "key_head_stride"),
        *_numbers("value_block_stride", "value_token_stride", "value_head_stride"),
    )

    @classmethod
    def of(cls, keys: torch.Tensor, values: torch.Tensor) -> Pages:
        """Return pages [blocks, tokens of a page, heads, dim] as the library takes them."""
        strides = (*keys.stride()[:3], *values.stride()[:3])
        return cls(keys.data_ptr(), values.data_ptr(), *strides)


class Attention(ctypes.Structure):
    """`CbgenAttention`."""

    _fields_ = (
        *_pointers("query"),
        *_numbers("query_token_stride", "query_head_stride"),
        ("pages", Pages),
        *_pointers("block_tables"),
        *_numbers("block_table_stride"),
        *_pointers("query_starts", "key_lens"),
        *_numbers(
            "requests", "heads", "kv_heads", "key_dim", "value_dim", "page_size", "window", "chunk"
        ),
        *_pointers("sinks", "output"),
        ("scaling", ctypes.c_float),
        ("softcap", ctypes.c_float),
        ("format", ctypes.c_int32),
    )


class Product(ctypes.Structure):
    """`CbgenProduct`."""

    _fields_ = (
        *_numbers("count"),
        ("offsets", ctypes.c_int64 * MOST_PARTS),
        ("parts", Linear * MOST_PARTS),
    )


class Cache(ctypes.Structure):
    """`CbgenCache`."""

    _fields_ = (("pages", Pages), *_numbers("page_size"))


class DecoderLayer(ctypes.Structure):
    """`CbgenDecoderLayer`."""

    _fields_ = (
        *_pointers("attention_norm", "mlp_norm", "query_norm", "key_norm"),
        ("query_key_value", Product),
        ("output", Product),
        ("gate", Linear),
        ("up", Linear),
        ("down", Product),
        ("cache", Cache),
        *_numbers("group", "rotary_dim"),
        ("scaling", ctypes.c_float),
    )


class Decoder(ctypes.Structure):
    """`CbgenDecoder`."""

    _fields_ = (
        ("layers", ctypes.POINTER(DecoderLayer)),
        *_numbers("num_layers"),
        *_pointers("last_norm"),
        *_numbers(
            "hidden_size",
            "heads",
            "kv_heads",
            "head_dim",
            "query_offset",
            "key_offset",
            "value_offset",
            "heads_width",
            "intermediate_size",
        ),
        ("epsilon", ctypes.c_float),
    )


class StepGroup(ctypes.Structure):
    """`CbgenStepGroup`."""

    _fields_ = (
        *_pointers("block_tables"),
        *_numbers("block_table_stride"),
        *_pointers("slots"),
        *_numbers("window", "chunk"),
    )


class BestColumns(ctypes.Structure):
    """`CbgenBestColumns`."""

    _fields_ = (
        ("linear", Linear),
        *_pointers("rounded", "errors", "places", "values"),
    )


class Step(ctypes.Structure):
    """`CbgenStep`."""

    _fields_ = (
        *_pointers("hidden"),
        *_numbers("tokens"),
        *_pointers("cos", "sin", "query_starts", "key_lens"),
        *_numbers("requests"),
        ("groups", ctypes.POINTER(StepGroup)),
        *_pointers("wanted"),
        *_numbers("num_wanted"),
        *_pointers("output", "seconds"),
    )


_NUMBER, _POINTER, _FORMAT, _NAME = ctypes.c_int64, ctypes.c_void_p, ctypes.c_int32, ctypes.c_char_p
_MATRIX = (_POINTER, _FORMAT, _NUMBER, _NUMBER, _NUMBER, _NUMBER)
"""What `_matrix` returns."""

_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "instruction_sets": (_NAME,),
    "selected": (_NAME,),
    "select": (ctypes.c_int32, _NAME),
    "exact_format": (_FORMAT, *_MATRIX, _NUMBER),
    "pack": (None, *_MATRIX, _FORMAT, _POINTER, _NUMBER),
    "pack_int8": (None, *_MATRIX, _POINTER, _NUMBER),
    "unpack_rows": (None, _POINTER, _FORMAT, _NUMBER, _POINTER, _NUMBER, _POINTER, _NUMBER),
    "linear": (None, _POINTER, _NUMBER),
    "attention": (None, _POINTER, _NUMBER),
    "multiply_add": (_NUMBER, _NUMBER, _NUMBER),
    "largest": (None, _POINTER, _NUMBER, _NUMBER, _NUMBER, _POINTER, _NUMBER),
    "best_columns": (None, _POINTER, _NUMBER),
    "decode": (None, _POINTER, _POINTER, _NUMBER),
}
"""Functions of the library, whose names begin with `cbgen_`: what they return, what they take. From
`exact_format` on, the last argument is the number of threads."""


class Kernels:
    """The opened library. Tensors are the caller's: on the CPU, of the stated dtypes, alive."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._functions = {}
        for name, (result, *arguments) in _SIGNATURES.items():
            function = library[f"cbgen_{name}"]
            function.restype, function.argtypes = result, arguments
            self._functions[name] = function

    def _run(self, name: str, *arguments: object) -> Any:  # noqa: ANN401  as the table says
        """Call a function on as many threads as torch uses."""
        return self._functions[name](*arguments, torch.get_num_threads())

    def instruction_sets(self) -> tuple[str, ...]:
        """Return the names that this machine and build have, best first."""
        return tuple(self._functions["instruction_sets"]().decode().split())

    def selected(self) -> str:
        """Return the name of the instruction set in use."""
        name: str = self._functions["selected"]().decode()
        return name

    def select(self, name: str) -> None:
        """Use the instruction set of that name from now on, in all threads.

        Raises:
            UsageError: this machine or build lacks it.
        """
        if self._functions["select"](name.encode()) != 0:
            raise UsageError(
                f"the instruction set {name!r} is not among those of this machine and build: "
                f"{', '.join(self.instruction_sets())}"
            )

    @contextmanager
    def using(self, name: str) -> Iterator[None]:
        """Use an instruction set, then the one before again."""
        previous = self.selected()
        self.select(name)
        try:
            yield
        finally:
            self.select(previous)

    def exact_dtype(self, weight: torch.Tensor) -> torch.dtype:
        """Return the smallest of bfloat16, float16 and float32 that holds every value exactly.

        Args:
            weight: [rows, columns] of one of those dtypes, strided in any way.
        """
        return _DTYPES[self._run("exact_format", *_matrix(weight))]

    def pack(self, weight: torch.Tensor, packed: torch.Tensor) -> None:
        """Write the packed form of a weight.

        Args:
            weight: [columns, depth] float32, bfloat16 or float16, strided in any way.
            packed: of `panel_shape`, contiguous; of a dtype that holds the values, or int8, to
                which they are rounded.
        """
        if packed.dtype == torch.int8:
            self._run("pack_int8", *_matrix(weight), packed.data_ptr())
        else:
            self._run("pack", *_matrix(weight), FORMATS[packed.dtype], packed.data_ptr())

    def unpack_rows(self, packed: torch.Tensor, rows: torch.Tensor, output: torch.Tensor) -> None:
        """Read rows of a weight back from its packed form.

        Args:
            packed: as `pack` wrote it.
            rows: [n] int64 contiguous, within the weight's rows.
            output: [n, depth] float32 contiguous.
        """
        self._run(
            "unpack_rows",
            packed.data_ptr(),
            PACKED_FORMATS[packed.dtype],
            output.shape[1],
            rows.data_ptr(),
            rows.numel(),
            output.data_ptr(),
        )

    def linear(
        self,
        rows: torch.Tensor,
        packed: torch.Tensor,
        *,
        bias: torch.Tensor | None,
        output: torch.Tensor,
    ) -> None:
        """Multiply rows with packed weights; a row's result depends on that row alone.

        Args:
            rows: [m, depth] float32, each row contiguous.
            packed: as `pack` wrote it. With an int8 weight the rows are rounded to int8, too, and a
                row that holds what is not finite becomes NaN.
            bias: [columns] float32 contiguous, added last.
            output: [m, columns] float32, each row contiguous.
        """
        num_rows, columns = output.shape
        arguments = Linear(
            rows.data_ptr(),
            num_rows,
            rows.stride(0),
            packed.data_ptr(),
            rows.shape[1],
            columns,
            None if bias is None else bias.data_ptr(),
            output.data_ptr(),
            output.stride(0),
            PACKED_FORMATS[packed.dtype],
        )
        self._run("linear", ctypes.addressof(arguments))

    def attention(self, arguments: Attention) -> None:
        """Run the attention that the arguments describe."""
        self._run("attention", ctypes.addressof(arguments))

    def largest(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the place of each row's largest number, as `rows.argmax(-1)`, but the first one.

        Args:
            rows: [n, m] float32, each row contiguous; m > 0.

        Returns:
            [n] int64; where a row has what is not a number, the place of the first such.
        """
        places = torch.empty(len(rows), dtype=torch.long)
        self._run("largest", rows.data_ptr(), rows.stride(0), *rows.shape, places.data_ptr())
        return places

    def multiply_add(self, rounds: int) -> int:
        """Multiply and add in registers alone, on all threads, to see what the machine can do.

        Returns:
            The floating-point operations that were run.
        """
        operations: int = self._run("multiply_add", rounds)
        return operations

    def decode(self, decoder: ctypes.Structure, step: ctypes.Structure) -> None:
        """Run decoder layers over the tokens of a step."""
        self._run("decode", ctypes.addressof(decoder), ctypes.addressof(step))

    def best_columns(self, arguments: ctypes.Structure) -> None:
        """Find the largest column of each row of a product; see `BestColumns`."""
        self._run("best_columns", ctypes.addressof(arguments))


def panel_shape(columns: int, depth: int, dtype: torch.dtype) -> tuple[int, int, int]:
    """Return the shape of the packed form of a weight; what lies where is in csrc/kernels.h."""
    if dtype == torch.int8:
        depth = -(-depth // _ROTATION) * _ROTATION + ctypes.sizeof(ctypes.c_float)
    return (-(-columns // PANEL), depth, PANEL)


def _matrix(weight: torch.Tensor) -> tuple[int, ...]:
    return (weight.data_ptr(), FORMATS[weight.dtype], *weight.shape, *weight.stride())


@cache
def _open() -> Kernels | str:
    """Return the kernels, or why there are none."""
    if not LIBRARY.exists():
        return f"the C++ kernels were not built ({LIBRARY} is missing): {_REMEDY}"
    try:
        library = ctypes.CDLL(str(LIBRARY))
        if library.cbgen_interface() != _INTERFACE:
            return f"the C++ kernels are of another version than cbgen's Python: {_REMEDY}"
        kernels = Kernels(library)
        # Other packages bring OpenMP runtimes of their own, so torch's is found through torch: a
        # symbol is looked up in its library and in those that it needs.
        torch_library = ctypes.CDLL(str(Path(torch.__file__).with_name("lib") / _TORCH_LIBRARY))
        library.cbgen_use_threads(ctypes.cast(torch_library.GOMP_parallel, ctypes.c_void_p))
    except (OSError, AttributeError) as error:
        return f"the C++ kernels cannot be loaded: {error}"
    name = os.environ.get(_INSTRUCTION_SET_VARIABLE)
    if name:
        kernels.select(name)
    return kernels


def kernels() -> Kernels | None:
    """Return the library of kernels; None if it was not built or cannot be loaded."""
    found = _open()
    return found if isinstance(found, Kernels) else None


def why_unfit(dtype: torch.dtype) -> str | None:
    """Return why the kernels cannot serve a cache of a dtype; None if they can."""
    if dtype not in FORMATS:
        return f"the C++ kernels do not know {dtype}"
    return why_missing()


def why_missing() -> str | None:
    """Return why there are no kernels; None if there are."""
    found = _open()
    return found if isinstance(found, str) else None
