"""Loads weights and tokenizer with transformers: hub, folder, GGUF file, or random weights."""

from __future__ import annotations

import contextlib
import logging
import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from cbgen.engine.config import ModelConfig
from cbgen.engine.model.packing import pack_for_cpu
from cbgen.errors import UsageError

logger = logging.getLogger(__name__)

# What from_pretrained raises for a missing or broken model: a hub that cannot be reached, a folder
# without config, an unknown architecture, a damaged file.
_LOAD_ERRORS = (
    OSError,
    ValueError,
    KeyError,
    ImportError,
    RuntimeError,
    SafetensorError,
    StrictDataclassError,
    struct.error,
)

_REASON_LINES = 3
"""Lines of a library's error that are shown; what matters is not always on the first."""

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model ready to be attached."""

    model: PreTrainedModel
    dtype: torch.dtype
    """Of the weights, once they are loaded."""
    device: torch.device
    """Where the weights are, once they are loaded."""
    tokenizer: PreTrainedTokenizerBase | None
    generation_defaults: dict[str, Any]
    """What the model's generation_config.json sets."""
    eos_token_ids: frozenset[int]
    """End-of-sequence ids of generation_config.json, config.json and tokenizer together."""


@dataclass(frozen=True, slots=True)
class _Source:
    """Where from_pretrained finds things."""

    name: str
    options: dict[str, Any]


def load_model(config: ModelConfig) -> LoadedModel:
    """Load weights, tokenizer and generation defaults.

    Raises:
        UsageError: the model cannot be found or loaded; the text says which and why.
    """
    return _load(config, with_weights=True)


def load_skeleton(config: ModelConfig) -> LoadedModel:
    """Load all but the weights: the model is on the meta device and has shapes alone.

    Whatever dtype it would be loaded in, it is bfloat16: mixture models run there in no other.

    Raises:
        UsageError: as `load_model`, as far as it does not need the weights to tell.
    """
    return _load(config, with_weights=False)


def _load(config: ModelConfig, *, with_weights: bool) -> LoadedModel:
    device = resolve_device(config.device)
    source = _source(config)
    transformers.utils.logging.disable_progress_bar()
    try:
        model_config = AutoConfig.from_pretrained(source.name, **source.options)
        _override(model_config, config.config_overrides)
        dtype = resolve_dtype(config.dtype, device, getattr(model_config, "dtype", None))
        if with_weights:
            model = _load_weights(config, source, model_config, dtype).to(device)
        else:
            model = _make_skeleton(config, source, model_config)
        tokenizer = _load_tokenizer(source)
    except _LOAD_ERRORS as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        reason = " ".join(lines[:_REASON_LINES]) or type(error).__name__
        raise UsageError(f"cannot load model {config.path!r}: {reason}") from error
    model.eval()
    if with_weights:
        pack_for_cpu(model)
    defaults = model.generation_config.to_diff_dict() if model.generation_config else {}
    defaults.pop("transformers_version", None)
    return LoadedModel(
        model=model,
        dtype=dtype,
        device=device,
        tokenizer=tokenizer,
        generation_defaults=defaults,
        eos_token_ids=_eos_token_ids(model, tokenizer),
    )


def resolve_device(name: str) -> torch.device:
    """Return the device of that name; `auto` is the first GPU, else the CPU.

    Raises:
        UsageError: the device is not there.
    """
    if name == "auto":
        return torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    device = torch.device(name)
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise UsageError(f"model.device is {name!r}, but torch {torch.__version__} sees no GPU")
        if device.index is None:
            return torch.device("cuda:0")
        if device.index >= torch.cuda.device_count():
            raise UsageError(
                f"model.device is {name!r}; GPUs 0 to {torch.cuda.device_count() - 1} exist"
            )
    return device


def resolve_dtype(name: str, device: torch.device, checkpoint: torch.dtype | None) -> torch.dtype:
    """Return the dtype of that name; `auto` is float32 on a CPU and the checkpoint's on a GPU."""
    if name != "auto":
        dtype: torch.dtype = getattr(torch, name)
        return dtype
    if device.type == "cpu" or checkpoint is None:
        return torch.float32
    return checkpoint


def _source(config: ModelConfig) -> _Source:
    path = os.path.expanduser(os.path.expandvars(config.path))
    options: dict[str, Any] = {"trust_remote_code": config.trust_remote_code}
    if config.revision is not None:
        options["revision"] = config.revision
    if path.endswith(".gguf"):
        if not Path(path).is_file():
            raise UsageError(f"model.path is {config.path!r}, and there is no such file")
        options["gguf_file"] = Path(path).name
        return _Source(str(Path(path).parent), options)
    looks_like_folder = path.startswith(("/", "./", "../", "~")) or path != config.path
    if looks_like_folder and not Path(path).is_dir():
        raise UsageError(f"model.path is {config.path!r}, and there is no such folder")
    return _Source(path, options)


def _make_skeleton(
    config: ModelConfig, source: _Source, model_config: PretrainedConfig
) -> PreTrainedModel:
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(
            model_config, dtype=torch.bfloat16, trust_remote_code=config.trust_remote_code
        )
    if not config.random_init:
        with contextlib.suppress(OSError):  # a model without a generation_config.json
            model.generation_config = GenerationConfig.from_pretrained(
                source.name, revision=config.revision
            )
    return model


def _load_weights(
    config: ModelConfig, source: _Source, model_config: PretrainedConfig, dtype: torch.dtype
) -> PreTrainedModel:
    if not config.random_init:
        options = dict(source.options)
        if "gguf_file" in options and hasattr(transformers, "GgufConfig"):
            options["quantization_config"] = transformers.GgufConfig(dequantize=True)
        loaded: PreTrainedModel
        loaded, found = AutoModelForCausalLM.from_pretrained(
            source.name, config=model_config, dtype=dtype, output_loading_info=True, **options
        )
        if found["missing_keys"]:
            raise ValueError(f"the checkpoint lacks weights: {sorted(found['missing_keys'])[:4]}")
        return loaded
    generator = torch.default_generator
    state = generator.get_state()
    generator.manual_seed(0)
    try:
        model: PreTrainedModel = AutoModelForCausalLM.from_config(
            model_config, dtype=dtype, trust_remote_code=config.trust_remote_code
        )
    finally:
        generator.set_state(state)  # the caller's generator is not ours to move
    return model


def _override(model_config: PretrainedConfig, overrides: dict[str, Any]) -> None:
    for name, value in overrides.items():
        if not hasattr(model_config, name):
            raise UsageError(
                f"model.config_overrides.{name}: the config of model type "
                f"{model_config.model_type!r} has no field of that name"
            )
        setattr(model_config, name, value)


def _load_tokenizer(source: _Source) -> PreTrainedTokenizerBase | None:
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            source.name, **source.options
        )
    except (OSError, ValueError) as error:
        if any(Path(source.name, name).exists() for name in _TOKENIZER_FILES):
            raise  # it is there and broken
        logger.warning("%s has no tokenizer: rows must hold prompt_token_ids", source.name)
        logger.debug("loading the tokenizer failed", exc_info=error)
        return None
    return tokenizer


def _eos_token_ids(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None
) -> frozenset[int]:
    values = [getattr(model.config.get_text_config(), "eos_token_id", None)]
    if model.generation_config is not None:
        values.append(model.generation_config.eos_token_id)
    if tokenizer is not None:
        values.append(tokenizer.eos_token_id)
    token_ids: set[int] = set()
    for value in values:
        if isinstance(value, int):
            token_ids.add(value)
        elif value is not None:
            token_ids.update(value)
    return frozenset(token_ids)
