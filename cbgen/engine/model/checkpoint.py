"""Loads a checkpoint's 16-bit weights as they are into a model that computes in float32.

`from_pretrained` casts every weight to one dtype, as soon as it is read. Here the weights that will
be packed keep theirs: they stay in the pages of the file, and nothing holds them a second time.
Stacked experts become float32 one after the other, once they are stacked. All else is float32 from
the start, buffers included, so the model differs from a float32 one in nothing but the storage.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from transformers import PretrainedConfig, PreTrainedModel
from transformers.utils import cached_file

from cbgen.engine.cpu.linears import packable_weights
from cbgen.engine.cpu.packing import HALVES, widen

_WEIGHTS_FILE = "model.safetensors"
_INDEX_FILE = "model.safetensors.index.json"
_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
_LENGTH = struct.Struct("<Q")


def matrix_dtypes(name: str, options: Mapping[str, Any]) -> dict[str, torch.dtype | None]:
    """Return the dtype of every tensor of two dimensions or more in the files of a checkpoint.

    The headers of safetensors files have them.

    Args:
        name: hub id or folder.
        options: of `from_pretrained`; `revision` counts.

    Returns:
        By name in the files; None for a dtype that is no plain float. Empty where the weights are
        in files of another kind.
    """
    revision = options.get("revision")

    def find(file: str) -> str | None:
        path: str | None = cached_file(
            name, file, revision=revision, _raise_exceptions_for_missing_entries=False
        )
        return path

    files: Iterable[str] = (_WEIGHTS_FILE,)
    if find(_WEIGHTS_FILE) is None:
        index = find(_INDEX_FILE)
        if index is None:
            return {}
        with open(index, encoding="utf-8") as opened:
            files = set(json.load(opened)["weight_map"].values())
    dtypes: dict[str, torch.dtype | None] = {}
    for path in map(find, files):
        if path is None:
            return {}  # from_pretrained says what is missing
        dtypes |= _header_dtypes(path)
    return dtypes


def load_unwidened(
    model_class: type[PreTrainedModel],
    name: str,
    model_config: PretrainedConfig,
    dtypes: Mapping[str, torch.dtype | None],
    **options: Any,  # noqa: ANN401  what from_pretrained takes
) -> tuple[PreTrainedModel, dict[str, Any]]:
    """Load a model in float32, but for weights that can be packed and have 16 bits in the files.

    Args:
        model_class: of the model.
        name: hub id or folder.
        model_config: of the model.
        dtypes: what `matrix_dtypes` returned.
        options: of `from_pretrained`.

    Returns:
        The model, and what `from_pretrained` found out while loading.
    """

    def get_dtype_plan(self: PreTrainedModel, dtype: torch.dtype) -> dict[str, torch.dtype]:
        stacked = [weight for weight, value in self.named_parameters() if value.dim() > 2]
        kept = _kept([*packable_weights(self), *stacked], dtypes)
        plan = {f"^{re.escape(weight)}$": kept_dtype for weight, kept_dtype in kept.items()}
        usual: dict[str, torch.dtype] = model_class._get_dtype_plan(self, dtype)
        return plan | usual

    # Of the same name: transformers looks conversions of a checkpoint up by it.
    attributes = {"_get_dtype_plan": get_dtype_plan, "__module__": model_class.__module__}
    planned: Any = type(model_class.__name__, (model_class,), attributes)
    model: PreTrainedModel
    model, found = planned.from_pretrained(
        name, config=model_config, dtype=torch.float32, output_loading_info=True, **options
    )
    model.__class__ = model_class
    widen(model, but_packable=True)
    return model, found


def _kept(
    weights: Sequence[str], dtypes: Mapping[str, torch.dtype | None]
) -> dict[str, torch.dtype]:
    """Return the dtypes of weights that keep theirs.

    The files may have other names than the model, and experts one by one. If all matrices there
    have one dtype, it is that of all weights, whatever they are called; else names must be equal.
    """
    if len(set(dtypes.values())) == 1:
        dtypes = dict.fromkeys(weights, next(iter(dtypes.values())))
    found = ((weight, dtypes.get(weight)) for weight in weights)
    return {weight: dtype for weight, dtype in found if dtype in HALVES}


def _header_dtypes(path: str) -> dict[str, torch.dtype | None]:
    """Return the dtypes of a file's matrices: 8 bytes of length, then JSON by tensor name."""
    with open(path, "rb") as opened:
        (length,) = _LENGTH.unpack(opened.read(_LENGTH.size))
        header = json.loads(opened.read(length))
    header.pop("__metadata__", None)
    return {
        name: _DTYPES.get(entry["dtype"])
        for name, entry in header.items()
        if len(entry["shape"]) > 1
    }
