"""What callers may give for configs and hints, cbgen's own objects or transformers', as cbgen's."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import fields
from typing import Any, TypeAlias

from transformers import GenerationConfig, PreTrainedModel
from transformers.generation import ContinuousBatchingConfig as TransformersBatchingConfig

from cbgen.engine.config import (
    ContinuousBatchingConfig,
    WorkloadHints,
    config_field_names,
)
from cbgen.engine.manager.setup import EngineSetup
from cbgen.errors import UsageError
from cbgen.recipe.names import nearest_name

BatchingConfig: TypeAlias = ContinuousBatchingConfig | Mapping[str, Any] | object
"""cbgen's class, the class of transformers with the same fields, or a mapping of them."""

_EAGER = ("eager", "paged|eager")


def engine_setup(
    model: PreTrainedModel,
    batching_config: BatchingConfig | None,
    generation_config: GenerationConfig | None,
    hints: object | None,
) -> EngineSetup:
    """Return how the engine of a model is to be built.

    Args:
        model: its attention implementation counts.
        batching_config: what was asked of the engine.
        generation_config: may hold the batching config instead, which is deprecated.
        hints: an object with the fields of `WorkloadHints`.

    Raises:
        UsageError: a field is unknown, out of range or not supported; the text names it.
    """
    if batching_config is None:
        batching_config = getattr(generation_config, "continuous_batching_config", None)
        if batching_config is not None:
            warnings.warn(
                "a continuous_batching_config inside of a GenerationConfig is deprecated; pass it "
                "as the argument continuous_batching_config",
                FutureWarning,
                stacklevel=4,
            )
    config = ContinuousBatchingConfig(**_batching_values(batching_config))
    return EngineSetup(
        config=config,
        attn_implementation=_attention(model, config),
        hints=_hints(hints),
    )


def _batching_values(given: BatchingConfig | None) -> dict[str, Any]:
    names = config_field_names(ContinuousBatchingConfig)
    if given is None:
        return {}
    if isinstance(given, ContinuousBatchingConfig | TransformersBatchingConfig):
        return {name: getattr(given, name) for name in names if hasattr(given, name)}
    if not isinstance(given, Mapping):
        raise UsageError(
            "continuous_batching_config must be a ContinuousBatchingConfig or a mapping, got "
            f"{type(given).__name__}"
        )
    values = dict(given)
    if "block_size" in values:
        block_size = values.pop("block_size")
        if values.setdefault("page_size", block_size) != block_size:
            raise UsageError(
                f"block_size is the old name of page_size and asks for {block_size}, but page_size "
                f"is {values['page_size']}; keep one"
            )
        warnings.warn("block_size is deprecated; use page_size", FutureWarning, stacklevel=4)
    for name in values:
        if name not in names:
            nearest = nearest_name(str(name), names)
            hint = "" if nearest is None else f"; did you mean {nearest}?"
            raise UsageError(f"continuous_batching_config has no field {name!r}{hint}")
    return values


def _attention(model: PreTrainedModel, config: ContinuousBatchingConfig) -> str:
    """Return the backend for a model that was loaded with some implementation.

    Whoever loads a model eagerly wants plain products; anything else is the library's choice as
    often as the caller's, and gets the best that is there.
    """
    implementation = model.config._attn_implementation
    if implementation in _EAGER:
        return "eager"
    if implementation == "sdpa" and not config.auto_switch_to_flash:
        return "sdpa"
    return "auto"


def _hints(given: object | None) -> WorkloadHints:
    if given is None:
        return WorkloadHints()
    return WorkloadHints(
        **{item.name: int(getattr(given, item.name)) for item in fields(WorkloadHints)}
    )
