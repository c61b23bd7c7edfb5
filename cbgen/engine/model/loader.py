"""Loads weights and tokenizer with transformers: hub, folder, GGUF file, or random weights."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
import transformers
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
from cbgen.engine.cpu.int8 import check_quantization, quantize_for_cpu
from cbgen.engine.cpu.packing import HALVES, can_pack, pack_for_cpu
from cbgen.engine.model.checkpoint import load_unwidened, matrix_dtypes
from cbgen.engine.model.dtype import DtypeChoice, choose_dtype
from cbgen.engine.model.gguf import reading_once
from cbgen.engine.model.probe import end_of_sequence_ids
from cbgen.errors import CbgenError, UsageError
from cbgen.values import show

logger = logging.getLogger(__name__)

_REASON_LINES = 3
"""Lines of a library's error that are shown; what matters is not always on the first."""

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model ready to be attached."""

    model: PreTrainedModel
    dtype: torch.dtype
    """That it computes in, once the weights are loaded."""
    dtype_reason: str
    """Why it is that one."""
    packed_dtype: torch.dtype
    """That weights of linear layers and of the embedding keep, as far as the config tells."""
    device: torch.device
    """Where the weights are, once they are loaded."""
    tokenizer: PreTrainedTokenizerBase | None
    generation_defaults: dict[str, Any]
    """What the model's generation_config.json sets."""
    eos_token_ids: frozenset[int]
    """End-of-sequence ids of generation_config.json, config.json and tokenizer together."""


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
    name, options = _source(config)
    transformers.utils.logging.disable_progress_bar()
    reading = reading_once() if "gguf_file" in options else contextlib.nullcontext()
    with reading, ThreadPoolExecutor(1) as helper:
        with _refusing(config.path):
            model_config = AutoConfig.from_pretrained(name, **options)
            _override(model_config, config.config_overrides)
            make_skeleton = cache(partial(_make_skeleton, config, name, model_config))
            checkpoint = getattr(model_config, "dtype", None)  # before a skeleton changes it
            choice = _choose_dtype(config, device, checkpoint, make_skeleton)
            # Most of its time goes into a library that lets other threads run.
            tokenizing = helper.submit(_load_tokenizer, name, options)
            if with_weights:
                model = _load_weights(
                    config, name, options, model_config, choice.dtype, make_skeleton
                )
            else:
                model = make_skeleton()
        model.eval()
        if with_weights and config.quantization is not None:
            quantize_for_cpu(model)
        elif with_weights:
            model.to(device)
            pack_for_cpu(model, choice.dtype)
        with _refusing(config.path):
            tokenizer = tokenizing.result()
    defaults = model.generation_config.to_diff_dict() if model.generation_config else {}
    defaults.pop("transformers_version", None)
    keeps_dtype = can_pack(device, choice.dtype) and not config.random_init
    return LoadedModel(
        model=model,
        dtype=choice.dtype,
        dtype_reason=choice.reason,
        packed_dtype=checkpoint if keeps_dtype and checkpoint in HALVES else choice.dtype,
        device=device,
        tokenizer=tokenizer,
        generation_defaults=defaults,
        eos_token_ids=end_of_sequence_ids(model, tokenizer),
    )


@contextlib.contextmanager
def _refusing(path: str) -> Iterator[None]:
    """Turn what the libraries raise into one line that says what cannot be loaded, and why.

    It can be anything: a hub that cannot be reached, an unknown architecture, a value of the config
    that a model's code cannot take, a plain Exception of the tokenizers over a damaged file.
    """
    try:
        yield
    except CbgenError:
        raise
    except Exception as error:  # of whatever kind
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        reason = " ".join(lines[:_REASON_LINES]) or type(error).__name__
        raise UsageError(f"cannot load model {path!r}: {reason}", key="model.path") from error


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
            raise UsageError(
                f"model.device is {name!r}, but torch {torch.__version__} sees no GPU",
                key="model.device",
            )
        if device.index is None:
            return torch.device("cuda:0")
        if device.index >= torch.cuda.device_count():
            raise UsageError(
                f"model.device is {name!r}; GPUs 0 to {torch.cuda.device_count() - 1} exist",
                key="model.device",
            )
    return device


def _choose_dtype(
    config: ModelConfig,
    device: torch.device,
    checkpoint: torch.dtype | None,
    make_skeleton: Callable[[], PreTrainedModel],
) -> DtypeChoice:
    if config.quantization is None:
        choice = choose_dtype(
            config.dtype, device, checkpoint, make_skeleton, is_random=config.random_init
        )
    else:
        name = "float32" if config.dtype == "auto" else config.dtype
        choice = DtypeChoice(getattr(torch, name), f"all but what is {config.quantization}")
        check_quantization(device, choice.dtype)
    if config.dtype == "auto":
        name = str(choice.dtype).removeprefix("torch.")
        logger.info("model.dtype auto is %s: %s", name, choice.reason)
    return choice


def _source(config: ModelConfig) -> tuple[str, dict[str, Any]]:
    """Return where from_pretrained finds things, and its options."""
    path = os.path.expanduser(os.path.expandvars(config.path))
    options: dict[str, Any] = {"trust_remote_code": config.trust_remote_code}
    if config.revision is not None:
        options["revision"] = config.revision
    if path.endswith(".gguf"):
        if not Path(path).is_file():
            raise UsageError(
                f"model.path is {config.path!r}, and there is no such file", key="model.path"
            )
        options["gguf_file"] = Path(path).name
        return str(Path(path).parent), options
    looks_like_folder = path.startswith(("/", "./", "../", "~")) or path != config.path
    if looks_like_folder and not Path(path).is_dir():
        raise UsageError(
            f"model.path is {config.path!r}, and there is no such folder", key="model.path"
        )
    return path, options


def _make_skeleton(
    config: ModelConfig, name: str, model_config: PretrainedConfig
) -> PreTrainedModel:
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(
            model_config, dtype=torch.bfloat16, trust_remote_code=config.trust_remote_code
        )
    if not config.random_init:
        with contextlib.suppress(OSError):  # a model without a generation_config.json
            model.generation_config = GenerationConfig.from_pretrained(
                name, revision=config.revision
            )
    return model


def _load_weights(
    config: ModelConfig,
    name: str,
    options: Mapping[str, Any],
    model_config: PretrainedConfig,
    dtype: torch.dtype,
    make_skeleton: Callable[[], PreTrainedModel],
) -> PreTrainedModel:
    if config.random_init:
        return _random_weights(config, model_config, dtype)
    options, dtypes = dict(options), {}
    if "gguf_file" in options:
        if hasattr(transformers, "GgufConfig"):
            options["quantization_config"] = transformers.GgufConfig(dequantize=True)
    elif can_pack(resolve_device(config.device), dtype):
        dtypes = matrix_dtypes(name, options)
    model: PreTrainedModel
    if any(stored in HALVES for stored in dtypes.values()):
        model_class = type(make_skeleton())
        model, found = load_unwidened(model_class, name, model_config, dtypes, **options)
    else:
        model, found = AutoModelForCausalLM.from_pretrained(
            name, config=model_config, dtype=dtype, output_loading_info=True, **options
        )
    if found["missing_keys"]:
        raise ValueError(f"the checkpoint lacks weights: {sorted(found['missing_keys'])[:4]}")
    return model


def _random_weights(
    config: ModelConfig, model_config: PretrainedConfig, dtype: torch.dtype
) -> PreTrainedModel:
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
                f"{model_config.model_type!r} has no field of that name",
                key="model.config_overrides",
            )
        try:
            setattr(model_config, name, value)
        except Exception as error:  # of whatever kind
            raise UsageError(
                f"model.config_overrides.{name} = {show(value)}: {' '.join(str(error).split())}",
                key="model.config_overrides",
            ) from error


def _load_tokenizer(name: str, options: Mapping[str, Any]) -> PreTrainedTokenizerBase | None:
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(name, **options)
    except (OSError, ValueError) as error:
        if any(Path(name, file).exists() for file in _TOKENIZER_FILES):
            raise  # it is there and broken
        logger.warning("%s has no tokenizer: rows must hold prompt_token_ids", name)
        logger.debug("loading the tokenizer failed", exc_info=error)
        return None
    return tokenizer
