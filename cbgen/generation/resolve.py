"""The settings that hold for a request: model < recipe < row, field by field.

The most specific level that gives a field decides. Whether a request samples follows from the first
level, row before recipe before model, that gives `do_sample` or, without it, a temperature.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from cbgen.engine.sampling.params import SamplingParams, derive_seed
from cbgen.errors import RowError, UsageError
from cbgen.generation.check import FieldError, check_generation_fields, greedy_samples_error
from cbgen.generation.fields import GENERATION_FIELDS, GENERATION_SECTION, Support
from cbgen.values import Plain

LogprobsMode = Literal["raw", "processed"]

_HONOURED = tuple(
    name for name, field in GENERATION_FIELDS.items() if field.support is Support.HONOURED
)
_PARAMETERS = {item.name for item in dataclasses.fields(SamplingParams)} & {*_HONOURED} - {"seed"}
"""Fields that the engine takes under the same name, and that all samples of a request share."""
_FILTERS = ("temperature", "top_k", "top_p", "min_p")
"""Fields without effect on a greedy request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestSettings:
    """How one request is answered."""

    samples: tuple[SamplingParams, ...]
    """The parameters of each of its samples; they differ in the seed alone."""
    eos_token_ids: frozenset[int]
    """The stop tokens that are ends of sequence; others are reported as the stop reason."""
    max_length: int | None
    """Most tokens of prompt and answer together; `for_prompt` makes it a bound of the answer."""

    def for_prompt(self, num_prompt_tokens: int) -> RequestSettings:
        """Return the settings for a prompt of this length, with `max_length` applied.

        Raises:
            RowError: the prompt leaves no token of `max_length` to the answer.
        """
        if self.max_length is None:
            return self
        left = self.max_length - num_prompt_tokens
        if left < 1:
            raise RowError(
                "prompt_too_long",
                f"the prompt has {num_prompt_tokens} tokens, and max_length is {self.max_length} "
                "for prompt and answer together; raise it or use max_new_tokens",
                type="invalid_request",
            )
        return replace(
            self, samples=tuple(replace(params, max_new_tokens=left) for params in self.samples)
        )


class GenerationSettings:
    """Resolves the settings of requests that share a model and a recipe.

    Args:
        model: fields of the model's generation_config.json; empty where they shall not count.
        recipe: checked fields of the recipe.
        eos_token_ids: the model's ends of sequence, used where no level sets `eos_token_id`.
        run_seed: seed of requests without one of their own; see `check.run_seed`.
        logprobs: which log-probabilities requests get that do not say whether they want any.
        logprobs_mode: which log-probabilities requests get that want some.

    Raises:
        UsageError: the model's own settings hold something that is not supported, or several
            samples are asked for and nothing is sampled.
    """

    def __init__(
        self,
        *,
        model: Mapping[str, Any],
        recipe: Mapping[str, Any],
        eos_token_ids: frozenset[int],
        run_seed: int,
        logprobs: LogprobsMode | None,
        logprobs_mode: LogprobsMode = "raw",
    ) -> None:
        self._recipe = recipe
        self._model = _check_model_fields(model, overridden=recipe)
        self._levels = ((self._recipe, "recipe"), (self._model, "model"))
        self._eos_token_ids = eos_token_ids
        self._run_seed = run_seed
        self._logprobs = logprobs
        self._logprobs_mode = logprobs_mode
        self._shared = self._combine({})
        try:
            self._settings("", {}, None)
        except FieldError as error:
            key = f"{GENERATION_SECTION}.{error.field}"
            raise UsageError(f"{GENERATION_SECTION}.{error}", key=key) from error

    def resolve(
        self, request_id: str, given: Mapping[str, Any] | None, *, logprobs: bool | None = None
    ) -> RequestSettings:
        """Return the settings of a request.

        Args:
            request_id: its id; its seeds are derived from it.
            given: its own fields.
            logprobs: whether it wants log-probabilities; None = as the recipe says.

        Raises:
            RowError: a field that the request gives is wrong, or contradicts the recipe.
        """
        mode = self._logprobs
        if logprobs is not None:
            mode = self._logprobs_mode if logprobs else None
        try:
            fields = check_generation_fields(given) if given else {}
            return self._settings(request_id, fields, mode)
        except (FieldError, ValueError) as error:
            message = f"{GENERATION_SECTION}: {error}"
            raise RowError("invalid_generation_config", message) from error

    def effective(self) -> dict[str, tuple[Any, str]]:
        """Return what a request without own fields gets: value and origin of each setting."""
        is_sampled, origin = self._is_sampled({})
        merged, *_ = self._shared
        shown: dict[str, tuple[Any, str]] = {"do_sample": (is_sampled, origin)}
        if is_sampled:
            off = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
            for name in _FILTERS:
                shown[name] = (merged.get(name, off[name]), self._origin(name))
        own_eos = "eos_token_id" in merged
        shown["eos_token_id"] = (
            sorted(self._eos(merged)),
            self._origin("eos_token_id") if own_eos else "model",
        )
        for name in _HONOURED:
            if name in merged and name not in (*shown, *_FILTERS, "seed"):
                shown[name] = (merged[name], self._origin(name))
        if is_sampled:
            shown["seed"] = (self._run_seed, self._origin("seed"))
        return shown

    def _merge(self, row: Mapping[str, Any]) -> dict[str, Any]:
        merged = {**self._model, **self._recipe, **row}
        # Two bounds of one length: the more specific level decides, max_new_tokens within a level.
        for level in (row, self._recipe, self._model):
            if "max_new_tokens" in level:
                merged.pop("max_length", None)
                break
            if "max_length" in level:
                merged.pop("max_new_tokens", None)
                break
        return merged

    def _is_sampled(self, row: Mapping[str, Any]) -> tuple[bool, str]:
        """Return whether a request samples, and the level that decides it."""
        for level, origin in ((row, "row"), *self._levels):
            if "do_sample" in level:
                return bool(level["do_sample"]), origin
            if "temperature" in level:
                return level["temperature"] > 0, origin
        return False, "default"

    def _settings(
        self, request_id: str, row: Mapping[str, Any], logprobs: LogprobsMode | None
    ) -> RequestSettings:
        merged, eos_token_ids, parameters = self._combine(row) if row else self._shared
        first = SamplingParams(**parameters, seed=self._seed(request_id, row, 0), logprobs=logprobs)
        count = merged.get("num_return_sequences", 1)
        if count > 1 and first.is_greedy:
            raise greedy_samples_error(count)
        others = [replace(first, seed=self._seed(request_id, row, i)) for i in range(1, count)]
        return RequestSettings(
            samples=(first, *others),
            eos_token_ids=eos_token_ids,
            max_length=merged.get("max_length"),
        )

    def _combine(
        self, row: Mapping[str, Any]
    ) -> tuple[dict[str, Any], frozenset[int], dict[str, Any]]:
        """Return the fields of all levels, the ends of sequence and the parameters they make.

        The parameters lack what differs by request or answer: seed and log-probabilities.
        """
        merged = self._merge(row)
        eos_token_ids = frozenset() if merged.get("ignore_eos") else self._eos(merged)
        parameters = {name: value for name, value in merged.items() if name in _PARAMETERS}
        is_sampled, _ = self._is_sampled(row)
        parameters["temperature"] = merged.get("temperature", 1.0) if is_sampled else 0.0
        parameters["stop_token_ids"] = eos_token_ids.union(merged.get("stop_token_ids", ()))
        if "stop_strings" in merged:
            parameters["stop_strings"] = _several(merged["stop_strings"])
        return merged, eos_token_ids, parameters

    def _eos(self, merged: Mapping[str, Any]) -> frozenset[int]:
        given = merged.get("eos_token_id")
        return self._eos_token_ids if given is None else frozenset(_several(given))

    def _seed(self, request_id: str, row: Mapping[str, Any], index: int) -> int:
        """Return the seed of an answer; that of the first does not depend on their number.

        Answers of a request with a seed of its own depend on that seed and not on the id.
        """
        own: int | None = row.get("seed")
        if own is None:
            return derive_seed(self._run_seed, request_id, index)
        return own if index == 0 else derive_seed(own, "", index)

    def _origin(self, name: str) -> str:
        return next((origin for level, origin in self._levels if name in level), "default")


def _several(value: Plain) -> tuple[Any, ...]:
    """Return the values of a field that may hold one or a list of them."""
    return tuple(value) if isinstance(value, list) else (value,)


def _check_model_fields(model: Mapping[str, Any], overridden: Mapping[str, Any]) -> dict[str, Any]:
    """Check the model's own fields one by one, those that the recipe sets anew left out.

    One by one, since the author of a model may give fields together that a recipe may not, such as
    a temperature beside `do_sample: false`.
    """
    checked: dict[str, Any] = {}
    for name, value in model.items():
        if name in overridden or name == "eos_token_id":
            continue
        try:
            checked.update(check_generation_fields({name: value}))
        except FieldError as error:
            raise UsageError(
                f"the model's generation_config.json: {error}; set {GENERATION_SECTION}.{name} in "
                "the recipe, or generation_defaults: none"
            ) from error
    return checked
