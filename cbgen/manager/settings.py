"""From generation configs of callers to the settings of requests, by `cbgen.generation`.

A generation config that was given stands alone: the model's own counts where none was given, and
for the ends of sequence where the given one has none. Nothing is written into either.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from transformers import GenerationConfig, PreTrainedModel

from cbgen.engine.model.facts import end_of_sequence_ids
from cbgen.errors import RowError, UsageError
from cbgen.generation.check import FieldError, check_generation_fields
from cbgen.generation.fields import GENERATION_FIELDS, nearest_field
from cbgen.generation.resolve import GenerationSettings, LogprobsMode
from cbgen.values import show_argument

NOT_OF_REQUESTS = ("continuous_batching_config", "transformers_version")
"""What a generation config holds beside the settings of requests."""


def generation_settings(
    model: PreTrainedModel,
    generation_config: GenerationConfig | Mapping[str, Any] | None,
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
    fields = {
        name: value
        for name, value in generation_fields(
            model.generation_config if is_models else generation_config, place
        ).items()
        if name not in NOT_OF_REQUESTS
    }
    try:
        return GenerationSettings(
            model=set_fields(fields) if is_models else {},
            recipe={} if is_models else check_generation_fields(set_fields(fields)),
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
        if name not in GENERATION_FIELDS or name in NOT_OF_REQUESTS:
            nearest = nearest_field(name)
            hint = "" if nearest is None else f"; did you mean {nearest}?"
            raise TypeError(f"{name!r} is not a field of a generation config{hint}")


def check_fields(settings: GenerationSettings, fields: Mapping[str, Any], place: str) -> None:
    """Check fields that hold for many requests before any of them is added.

    Args:
        settings: what the requests share.
        fields: by name.
        place: what the caller calls them, for the error.

    Raises:
        TypeError: a name is unknown.
        UsageError: a value is wrong, or contradicts the generation config.
    """
    check_names(fields)
    try:
        settings.resolve("", set_fields(fields))
    except RowError as error:
        raise UsageError(f"{place}: {error.__cause__ or error}") from error


def generation_fields(
    given: GenerationConfig | Mapping[str, Any] | None, place: str
) -> dict[str, Any]:
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
        if value is not None and name not in NOT_OF_REQUESTS and not name.startswith("_")
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
