"""Makes transformers read a GGUF file once and fast, for the time of a load.

It parses the file three times (config, tokenizer, weights), with a call for every string of the
vocabulary, builds the map of tensor names anew for every module, and dequantizes some rows at a
time. While `reading_once` holds, the functions that it looks up for that are replaced by ones that
return the same, and no progress bar is drawn. A version of the libraries that looks up others is
as slow as ever, and right.
"""

from __future__ import annotations

import functools
import importlib
import math
import struct
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np

_TRANSFORMERS_MODULE = "transformers.modeling_gguf_pytorch_utils"

_UINT32, _STRING, _ARRAY = 4, 8, 9
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q"} | {
    12: "d"
}
"""Codes of `struct` for the types of metadata values, by their numbers in the format."""
_LENGTH = struct.Struct("<Q")
_ARRAY_HEAD = struct.Struct("<IQ")

_MERGED_BYTES = 4096
"""Quantized rows are dequantized as one up to this length; gguf takes 16 such at a time."""

_lock = threading.Lock()


@contextmanager
def reading_once() -> Iterator[None]:
    """Replace what transformers uses to read GGUF files, and put it back; one load at a time."""
    try:
        gguf = importlib.import_module("gguf")
    except ImportError:  # transformers says what to install
        yield
        return
    loader = importlib.import_module(_TRANSFORMERS_MODULE)
    with _lock, ExitStack() as stack:
        for owner, name, make in (
            (gguf, "GGUFReader", _cached_reader),
            (gguf, "get_tensor_name_map", functools.cache),
            (gguf, "dequantize", _merging_rows),
            (loader, "_gguf_parse_value", _passing_values),
            (loader, "tqdm", _without_bar),
        ):
            if hasattr(owner, name):
                stack.callback(setattr, owner, name, getattr(owner, name))
                setattr(owner, name, make(getattr(owner, name)))
        yield


def _cached_reader(reader_class: type) -> Callable[[str], Any]:
    """Return what opens a file once, and reads the arrays of its metadata in one go."""

    class Reader(reader_class):  # type: ignore[misc]  # a class that is known when it is installed
        def _get_field_parts(self, orig_offs: int, raw_type: int) -> tuple[int, Any, Any, Any]:
            if int(raw_type) == _ARRAY and self.byte_order == "I":
                item_type, count = _ARRAY_HEAD.unpack_from(self.data, orig_offs)
                first = orig_offs + _ARRAY_HEAD.size
                if item_type in _SCALARS or item_type == _STRING:
                    values, end = _array(memoryview(self.data), first, item_type, count)
                    types = [type(raw_type)(_ARRAY), type(raw_type)(item_type)]
                    return end - orig_offs, values, range(count), types
            parts: tuple[int, Any, Any, Any] = super()._get_field_parts(orig_offs, raw_type)
            return parts

    return functools.cache(Reader)


def _array(memory: memoryview, first: int, item_type: int, count: int) -> tuple[list[Any], int]:
    """Return the values of an array, strings or tuples of one number, and where it ends."""
    if item_type != _STRING:
        numbers = struct.Struct("<" + _SCALARS[item_type])
        end = first + count * numbers.size
        return list(numbers.iter_unpack(memory[first:end])), end
    strings = []
    for _ in range(count):
        (length,) = _LENGTH.unpack_from(memory, first)
        first += _LENGTH.size
        strings.append(str(memory[first : first + length], "utf-8"))
        first += length
    return strings, first


def _passing_values(parse: Callable[..., Any]) -> Callable[..., Any]:
    """Return the parser of values, which hands on those that `_array` has parsed."""

    def parse_value(value: Any, types: Any) -> Any:  # noqa: ANN401
        if type(value) is str:
            return value
        return value[0] if type(value) is tuple else parse(value, types)

    return parse_value


def _merging_rows(dequantize: Callable[..., Any]) -> Callable[..., Any]:
    """Return `gguf.dequantize`, called with fewer and longer rows of the same blocks."""

    def dequantize_merged(data: np.ndarray, quantization: Any) -> np.ndarray:  # noqa: ANN401
        rows = math.prod(data.shape[:-1])
        most = 1
        while rows % (2 * most) == 0 and 2 * most * data.shape[-1] <= _MERGED_BYTES:
            most *= 2
        if data.dtype != np.uint8 or most == 1:
            plain: np.ndarray = dequantize(data, quantization)
            return plain
        merged: np.ndarray = dequantize(data.reshape(rows // most, -1), quantization)
        return merged.reshape(*data.shape[:-1], -1)

    return dequantize_merged


def _without_bar(bar: Callable[..., Any]) -> Callable[..., Any]:
    def iterate(items: Iterable[Any], **_options: object) -> Iterable[Any]:
        return items

    return iterate
