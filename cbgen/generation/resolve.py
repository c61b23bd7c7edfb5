"""Which generation settings hold for a row: model < recipe < row, field by field.

The most specific level with an opinion decides. Whether a row samples follows from the first level,
row before recipe before model, that gives `do_sample` or, without it, a temperature.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from cbgen.engine.sampling.params import SamplingParams, derive_seed
from cbgen.errors import RowError, UsageError
from cbgen.generation.check import FieldError, check_generation_fields, greedy_samples
from cbgen.generation.fields import GENERATION_SECTION

_SHOWN_WHERE_GIVEN = (
    "stop_token_ids",
    "ignore_eos",
    "max_new_tokens",
    "max_length",
    "num_return_sequences",
)


@dataclass(frozen=True, slots=True)
class RowGeneration:
    """What one row asked for, resolved."""

    params: SamplingParams
    """Of its first answer; the others differ in the seed alone."""
    sample_seeds: tuple[int, ...]
    """A seed for each of its answers, beginning with that of `params`."""
    eos_token_ids: frozenset[int]
    """The stop tokens that are ends of sequence; others are reported as the stop reason."""
    skip_special_tokens: bool
    max_length: int | None
    """Most tokens of prompt and answer together, where the row is bounded so."""


class GenerationSettings:
    """The levels that all rows share.

    Args:
        model: fields of the model's generation_config.json; empty where they shall not count.
        recipe: checked fields of the recipe.
        eos_token_ids: the model's ends of sequence, used where no level sets `eos_token_id`.
        run_seed: seed of rows without one of their own.
        logprobs: which log-probabilities rows want that do not say it themselves.
        logprobs_mode: which those rows get that want some.

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
        logprobs: Literal["raw", "processed"] | None,
        logprobs_mode: Literal["raw", "processed"] = "raw",
    ) -> None:
        self._recipe = recipe
        self._model = _check_model_fields(model, overridden=recipe)
        self._eos_token_ids = eos_token_ids
        self._run_seed = run_seed
        self._logprobs = logprobs
        self._logprobs_mode = logprobs_mode
        self._shared = self._merge({})
        try:
            self._resolve(self._shared, "", {}, None)
        except FieldError as error:
            raise UsageError(f"{GENERATION_SECTION}.{error}") from error

    def for_row(
        self, row_id: str, given: Mapping[str, Any] | None, *, logprobs: bool | None = None
    ) -> RowGeneration:
        """Return the settings of a row.

        Args:
            row_id: its id, for the seed.
            given: its own fields.
            logprobs: whether it wants log-probabilities; None = as the recipe says.

        Raises:
            RowError: a field that the row gives is wrong, or contradicts the recipe.
        """
        mode = self._logprobs
        if logprobs is not None:
            mode = self._logprobs_mode if logprobs else None
        if not given:
            return self._resolve(self._shared, row_id, {}, mode)
        try:
            fields = check_generation_fields(given)
            return self._resolve(self._merge(fields), row_id, fields, mode)
        except (FieldError, ValueError) as error:
            raise RowError("invalid_generation_config", f"generation_config: {error}") from error

    def effective(self) -> dict[str, tuple[Any, str]]:
        """Return what a row without own fields gets: value and origin of each setting."""
        samples, origin = self._samples({})
        merged = self._shared
        shown: dict[str, tuple[Any, str]] = {"do_sample": (samples, origin)}
        for name in ("temperature", "top_k", "top_p", "min_p") if samples else ():
            shown[name] = self._with_origin(name, merged)
        eos = merged.get("eos_token_id")
        shown["eos_token_id"] = (
            sorted(self._eos_token_ids if eos is None else _as_set(eos)),
            "model" if eos is None else self._origin("eos_token_id"),
        )
        for name in _SHOWN_WHERE_GIVEN:
            if name in merged:
                shown[name] = self._with_origin(name, merged)
        if samples:
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

    def _samples(self, row: Mapping[str, Any]) -> tuple[bool, str]:
        for level, origin in ((row, "row"), (self._recipe, "recipe"), (self._model, "model")):
            if "do_sample" in level:
                return bool(level["do_sample"]), origin
            if "temperature" in level:
                return level["temperature"] > 0, origin
        return False, "default"

    def _resolve(
        self,
        merged: Mapping[str, Any],
        row_id: str,
        row: Mapping[str, Any],
        logprobs: Literal["raw", "processed"] | None,
    ) -> RowGeneration:
        samples, _ = self._samples(row)
        eos = merged.get("eos_token_id")
        eos_token_ids = self._eos_token_ids if eos is None else _as_set(eos)
        if merged.get("ignore_eos"):
            eos_token_ids = frozenset()
        count = merged.get("num_return_sequences", 1)
        seeds = self._sample_seeds(row_id, row.get("seed"), count)
        params = SamplingParams(
            temperature=merged.get("temperature", 1.0) if samples else 0.0,
            top_k=merged.get("top_k", 0),
            top_p=merged.get("top_p", 1.0),
            min_p=merged.get("min_p", 0.0),
            seed=seeds[0],
            max_new_tokens=merged.get("max_new_tokens"),
            stop_token_ids=eos_token_ids | frozenset(merged.get("stop_token_ids", ())),
            logprobs=logprobs,
        )
        if count > 1 and params.is_greedy:
            raise greedy_samples(count)
        return RowGeneration(
            params=params,
            sample_seeds=seeds,
            eos_token_ids=eos_token_ids,
            skip_special_tokens=merged.get("skip_special_tokens", True),
            max_length=merged.get("max_length"),
        )

    def _sample_seeds(self, row_id: str, own: int | None, count: int) -> tuple[int, ...]:
        """Return a seed for each answer of a row; the first does not depend on their number.

        Answers of a row with a seed of its own depend on that seed and not on the id.
        """
        if own is None:
            return tuple(derive_seed(self._run_seed, row_id, index) for index in range(count))
        return (own, *(derive_seed(own, "", index) for index in range(1, count)))

    def _origin(self, name: str) -> str:
        for level, origin in ((self._recipe, "recipe"), (self._model, "model")):
            if name in level:
                return origin
        return "default"

    def _with_origin(self, name: str, merged: Mapping[str, Any]) -> tuple[Any, str]:
        neutral = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
        return merged.get(name, neutral.get(name)), self._origin(name)


def _as_set(token_ids: int | list[int]) -> frozenset[int]:
    return frozenset((token_ids,) if isinstance(token_ids, int) else token_ids)


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
                f"the model's generation_config.json: {error}; set generation_config.{name} in the "
                "recipe, or generation_defaults: none"
            ) from error
    return checked
