"""What callers may give for configs and hints, cbgen's own objects or transformers', as cbgen's.

A generation config that was given stands alone: the model's own counts where none was given, and
for the ends of sequence where the given one has none. Nothing is written into either.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from dataclasses import asdict, astuple, dataclass, field, fields
from typing import Any, TypeAlias, get_type_hints

import torch
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation import ContinuousBatchingConfig as TransformersBatchingConfig

from cbgen.engine.config import (
    ContinuousBatchingConfig,
    WorkloadHints,
)
from cbgen.engine.model.probe import end_of_sequence_ids
from cbgen.errors import UsageError
from cbgen.generation.check import FieldError, check_generation_fields
from cbgen.generation.fields import GENERATION_FIELDS, nearest_field
from cbgen.generation.resolve import GenerationSettings, LogprobsMode
from cbgen.values import convert, nearest_name, show_argument

BatchingConfig: TypeAlias = ContinuousBatchingConfig | Mapping[str, Any] | object
"""cbgen's class, the class of transformers with the same fields, or a mapping of them."""

GivenGeneration: TypeAlias = GenerationConfig | Mapping[str, Any]
"""The class of transformers, or a mapping of its fields."""

_NOT_OF_REQUESTS = ("continuous_batching_config", "transformers_version")
"""What a generation config holds beside the settings of requests."""

_EAGER = ("eager", "paged|eager")

_FIELDS_OF_REQUESTS = ("seed", "return_logprobs", "max_queue_size")
"""Fields that concern requests; the engine is the same without them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSetup:
    """How the engine is to be built."""

    config: ContinuousBatchingConfig
    attn_implementation: str = "auto"
    hints: WorkloadHints = field(default_factory=WorkloadHints)

    def differences(self, other: EngineSetup) -> list[str]:
        """Return the names of the settings for which `other` needs another engine than this."""
        mine, others = asdict(self.config), asdict(other.config)
        names = [
            name for name in mine if name not in _FIELDS_OF_REQUESTS and mine[name] != others[name]
        ]
        if self.attn_implementation != other.attn_implementation:
            names.append("attn_implementation")
        # An engine that was sized for a hint is large enough for a smaller one; 0 = unknown.
        hints = zip(astuple(self.hints), astuple(other.hints), strict=True)
        if any(built_for and not 0 < wanted <= built_for for built_for, wanted in hints):
            names.append("workload_hints")
        return names


def engine_setup(
    model: PreTrainedModel,
    batching_config: BatchingConfig | None,
    generation_config: GivenGeneration | None,
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
        batching_config = setting(generation_config, "continuous_batching_config")
        if batching_config is not None:
            warnings.warn(
                "a continuous_batching_config inside of a GenerationConfig is deprecated; pass it "
                "as the argument continuous_batching_config",
                FutureWarning,
                stacklevel=4,
            )
    config = _batching_config(batching_config)
    return EngineSetup(
        config=config, attn_implementation=_attention(model, config), hints=_hints(hints)
    )


def _batching_config(given: BatchingConfig | None) -> ContinuousBatchingConfig:
    types = get_type_hints(ContinuousBatchingConfig)
    if given is None:
        values = {}
    elif isinstance(given, Mapping):
        values = dict(given)
    elif isinstance(given, ContinuousBatchingConfig | TransformersBatchingConfig):
        values = {name: getattr(given, name) for name in types if hasattr(given, name)}
    else:
        raise UsageError(
            "continuous_batching_config must be a ContinuousBatchingConfig or a mapping, got "
            f"{show_argument(given)}"
        )
    if "block_size" in values:
        block_size = values.pop("block_size")
        if values.setdefault("page_size", block_size) != block_size:
            raise UsageError(
                f"block_size is the old name of page_size and asks for {block_size}, but page_size "
                f"is {values['page_size']}; keep one"
            )
        warnings.warn("block_size is deprecated; use page_size", FutureWarning, stacklevel=4)
    for name, value in values.items():
        if name not in types:
            nearest = nearest_name(str(name), types)
            hint = "" if nearest is None else f"; did you mean {nearest}?"
            raise UsageError(f"continuous_batching_config has no field {name!r}{hint}")
        try:
            values[name] = convert(value, types[name])
        except ValueError as error:
            raise UsageError(f"continuous_batching_config.{name}: {error}") from error
    return ContinuousBatchingConfig(**values)


def _attention(model: PreTrainedModel, config: ContinuousBatchingConfig) -> str:
    """Return the attention backend for a model.

    A model that was loaded with eager attention keeps it: somebody has chosen it. Any other
    implementation may only be the default of transformers, and gets the best backend there is.
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
    try:
        return WorkloadHints(
            **{item.name: int(getattr(given, item.name)) for item in fields(WorkloadHints)}
        )
    except (AttributeError, TypeError) as error:
        raise UsageError(
            f"workload_hints must be a WorkloadHints, got {show_argument(given)}: {error}"
        ) from error


def generation_settings(
    model: PreTrainedModel,
    generation_config: GivenGeneration | None,
    *,
    run_seed: int = 0,
    logprobs: LogprobsMode | None = None,
    tokenizer: object | None = None,
) -> GenerationSettings:
    """Return the settings that all requests of a manager share.

    Args:
        model: its own generation config and ends of sequence count.
        generation_config: what the caller gave, an object or a mapping; None = the model's.
        run_seed: seed of a run whose generation config gives none.
        logprobs: which log-probabilities to give, None = none.
        tokenizer: its end of sequence counts too; None = there is none.

    Raises:
        UsageError: a field is unknown, out of range or not supported; the text names it.
    """
    is_models = generation_config is None
    place = "the model's generation_config" if is_models else "generation_config"
    given = model.generation_config if is_models else generation_config
    fields = set_fields(generation_fields(given, place))
    for name in _NOT_OF_REQUESTS:
        fields.pop(name, None)
    try:
        return GenerationSettings(
            model=fields if is_models else {},
            recipe={} if is_models else check_generation_fields(fields),
            eos_token_ids=end_of_sequence_ids(model, tokenizer),
            run_seed=run_seed,
            logprobs=logprobs,
        )
    except UsageError as error:
        problem = error.__cause__ if isinstance(error.__cause__, FieldError) else error
        raise UsageError(f"{place}: {problem}") from error


def check_names(fields: Mapping[str, Any]) -> None:
    """Refuse names that no setting of a request has.

    Raises:
        TypeError: a name is unknown.
    """
    for name in fields:
        if name not in GENERATION_FIELDS or name in _NOT_OF_REQUESTS:
            nearest = nearest_field(name)
            hint = "" if nearest is None else f"; did you mean {nearest}?"
            raise TypeError(f"{name!r} is not a field of a generation config{hint}")


def generation_fields(given: GivenGeneration | None, place: str) -> dict[str, Any]:
    """Return the fields of a generation config, those of an object where they are set.

    Args:
        given: a mapping is returned as it is; None has no fields.
        place: what the caller calls it, for the error.

    Raises:
        UsageError: it is something else.
    """
    if given is None:
        return {}
    if isinstance(given, Mapping):
        return dict(given)
    if not isinstance(given, GenerationConfig):
        raise UsageError(
            f"{place} must be a GenerationConfig or a mapping of its fields, "
            f"got {show_argument(given)}"
        )
    return {
        name: value
        for name, value in vars(given).items()
        if value is not None and name not in _NOT_OF_REQUESTS and not name.startswith("_")
    }


def set_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that are set; ends of sequence below 0, which mean none, are left out."""
    values = {name: value for name, value in fields.items() if value is not None}
    eos = values.get("eos_token_id")
    if eos is not None:
        eos = eos.tolist() if hasattr(eos, "tolist") else eos
        if isinstance(eos, int):
            values["eos_token_id"] = [] if eos < 0 else eos
        elif isinstance(eos, Iterable):
            values["eos_token_id"] = [t for t in eos if not (isinstance(t, int) and t < 0)]
    return values


def setting(config: GivenGeneration | None, name: str) -> Any:  # noqa: ANN401  of any type
    """Return a field of a generation config; None if it is not set."""
    return config.get(name) if isinstance(config, Mapping) else getattr(config, name, None)


def check_model(model: object) -> None:
    """Refuse everything but a loaded model of transformers with a language model head.

    Raises:
        UsageError: it is something else; the text says what is missing.
    """
    if not isinstance(model, torch.nn.Module):
        hint = "the model comes first"
        if isinstance(model, str):
            hint = f"load it with AutoModelForCausalLM.from_pretrained({model!r})"
        raise UsageError(f"the model must be a loaded one, got {show_argument(model)}; {hint}")
    kind = type(model).__name__
    if not all(hasattr(model, name) for name in ("config", "device", "dtype")):
        raise UsageError(f"the model must be one of transformers, got {kind}")
    if not hasattr(model, "generation_config"):
        raise UsageError(
            f"the model must have a language model head, and {kind} has none; load it with "
            "AutoModelForCausalLM"
        )
