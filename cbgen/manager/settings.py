"""How requests are answered: the generation config of the manager, and what each request changes.

A generation config that was given stands alone: the model's own counts where none was given, and
for the ends of sequence where the given one has none. Nothing is written into either.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, Literal

from transformers import GenerationConfig, PreTrainedModel

from cbgen.errors import RowError, UsageError
from cbgen.generation.check import FieldError, check_generation_fields
from cbgen.generation.fields import GENERATION_FIELDS
from cbgen.generation.resolve import GenerationSettings
from cbgen.manager.fields import NOT_OF_REQUESTS, generation_fields
from cbgen.manager.requests import ResolvedSettings
from cbgen.values import nearest_name

LogprobsMode = Literal["raw", "processed"]


class SharedSettings:
    """The settings that all requests of a manager share; see `RequestSettings`.

    Args:
        model: its own generation config and ends of sequence count.
        generation_config: what the caller gave, an object or a mapping; None = the model's.
        run_seed: seed of requests without their own.
        logprobs: which log-probabilities to give, None = none.
        tokenizer: its end of sequence counts too; None = there is none.

    Raises:
        UsageError: a field is unknown, out of range or not supported; the text names it.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        generation_config: GenerationConfig | Mapping[str, Any] | None,
        *,
        run_seed: int,
        logprobs: LogprobsMode | None,
        tokenizer: object | None = None,
    ) -> None:
        given: dict[str, Any] = {}
        own: dict[str, Any] = {}
        if generation_config is None:
            own = _fields(model.generation_config, "the model's generation_config")
        else:
            given = _checked(_fields(generation_config, "generation_config"), "generation_config")
        eos_token_ids = _eos_token_ids(
            getattr(model.config.get_text_config(), "eos_token_id", None),
            getattr(model.generation_config, "eos_token_id", None),
            getattr(tokenizer, "eos_token_id", None),
        )
        try:
            self._settings = GenerationSettings(
                model=own,
                recipe=given,
                eos_token_ids=eos_token_ids,
                run_seed=given.get("seed", run_seed),
                logprobs=logprobs,
            )
        except UsageError as error:
            if not isinstance(error.__cause__, FieldError):
                raise
            whose = "the model's generation_config" if own else "generation_config"
            raise UsageError(f"{whose}: {error.__cause__}") from error

    def check(self, fields: Mapping[str, Any], place: str) -> None:
        """Check fields that hold for many requests before any of them is added.

        Args:
            fields: by name.
            place: what the caller calls them, for the error.

        Raises:
            TypeError: a name is unknown.
            UsageError: a value is wrong, or contradicts the generation config.
        """
        _check_names(fields)
        try:
            self._settings.for_row("", _without_unset(fields))
        except RowError as error:
            raise UsageError(f"{place}: {error.__cause__ or error}") from error

    def check_names(self, fields: Mapping[str, Any]) -> None:
        """Refuse names that no setting has.

        Raises:
            TypeError: a name is unknown.
        """
        _check_names(fields)

    def resolve(
        self, request_id: str, num_prompt_tokens: int, fields: Mapping[str, Any]
    ) -> ResolvedSettings:
        """Return the settings of a request.

        Raises:
            RowError: a value is wrong.
        """
        generation = self._settings.for_row(request_id, _without_unset(fields))
        params = generation.params
        if generation.max_length is not None:
            left = generation.max_length - num_prompt_tokens
            if left < 1:
                raise RowError(
                    "prompt_too_long",
                    f"the prompt has {num_prompt_tokens} tokens, and max_length is "
                    f"{generation.max_length} for prompt and answer together; raise it or use "
                    "max_new_tokens",
                    type="invalid_request",
                )
            params = replace(params, max_new_tokens=left)
        return ResolvedSettings(
            params=tuple(replace(params, seed=seed) for seed in generation.sample_seeds),
            skip_special_tokens=generation.skip_special_tokens,
        )


def _check_names(fields: Mapping[str, Any]) -> None:
    for name in fields:
        if name not in GENERATION_FIELDS or name in NOT_OF_REQUESTS:
            nearest = nearest_name(name, GENERATION_FIELDS)
            hint = "" if nearest is None else f"; did you mean {nearest}?"
            raise TypeError(f"{name!r} is not a field of a generation config{hint}")


def _fields(config: GenerationConfig | Mapping[str, Any] | None, place: str) -> dict[str, Any]:
    fields = generation_fields(config, place)
    return _without_unset(
        {name: value for name, value in fields.items() if name not in NOT_OF_REQUESTS}
    )


def _without_unset(fields: Mapping[str, Any]) -> dict[str, Any]:
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


def _checked(values: Mapping[str, Any], place: str) -> dict[str, Any]:
    try:
        return check_generation_fields(values)
    except FieldError as error:
        raise UsageError(f"{place}: {error}") from error


def _eos_token_ids(*values: int | list[int] | None) -> frozenset[int]:
    found: set[int] = set()
    for value in values:
        if value is not None:
            found.update((value,) if isinstance(value, int) else value)
    return frozenset(token_id for token_id in found if token_id >= 0)
