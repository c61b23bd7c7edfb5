"""Check the fields of a generation config, whether recipe, row, model or a caller gave them.

Messages name the field and the value, never the place: the caller knows it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

from cbgen.errors import UsageError
from cbgen.generation.fields import (
    GENERATION_FIELDS,
    INTERNAL_FIELDS,
    Field,
    Support,
    nearest_field,
)
from cbgen.values import Plain, convert, show


class FieldError(UsageError):
    """One field of a generation config is wrong; the text has its name and value.

    Attributes:
        field: its name.
        code: the kind of error in a word for scripts, as OpenAI's API has them.
    """

    def __init__(self, field: str, message: str, *, code: str = "invalid_value") -> None:
        super().__init__(message)
        self.field = field
        self.code = code


def check_generation_fields(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that are set (null is unset), each in its own type.

    Fields at a neutral value stay in the result, so that they can override those of a model.

    Raises:
        FieldError: a field is unknown, of a wrong type, out of range or not supported in this
            version, or contradicts another one.
    """
    checked = {}
    for name, value in values.items():
        if name in INTERNAL_FIELDS:
            continue
        field = GENERATION_FIELDS.get(name)
        if field is None:
            nearest = nearest_field(name)
            hint = "" if nearest is None else f"; did you mean {nearest}?"
            shown = name or "an empty name"
            raise FieldError(name, f"{shown} is not a known field (value {show(value)}){hint}")
        if value is not None:
            checked[name] = check_field(field, value)
    _check_agreement(checked)
    return checked


def greedy_samples_error(count: int) -> FieldError:
    """Return the error of several samples without sampling; transformers refuses them too."""
    return FieldError(
        "num_return_sequences",
        f"num_return_sequences = {count} asks for different answers, and greedy decoding has only "
        "one; set a temperature above 0 or do_sample: true, or num_return_sequences: 1",
    )


def run_seed(generation: int | None, batching: int | None, place: str = "") -> int | None:
    """Return the seed of a run, which may be given in two sections; None if neither has it.

    Args:
        generation: the seed of generation_config.
        batching: the seed of continuous_batching_config.
        place: where the latter was given, for the error.

    Raises:
        FieldError: the two differ.
    """
    if None not in (generation, batching) and generation != batching:
        where = f" ({place})" if place else ""
        raise FieldError(
            "seed",
            f"seed = {show(generation)} contradicts continuous_batching_config.seed = {batching}"
            f"{where}; give one of the two",
        )
    return batching if generation is None else generation


def check_field(field: Field, value: Plain) -> Plain:
    """Return a value that is not null in the type of its field.

    Raises:
        FieldError: the value is of a wrong type, out of range or not supported in this version.
    """
    if field.support is Support.REFUSED:
        message = f"{field.name} = {show(value)} is not supported; remove it"
        raise FieldError(field.name, message, code="unsupported_parameter")
    if field.support is Support.NEUTRAL:
        return _neutral_value(field, value)
    try:
        typed = convert(value, field.type)
    except ValueError as error:
        message = f"{field.name}: {error}"
        raise FieldError(field.name, message, code="invalid_type") from error
    for item in typed if isinstance(typed, list) else [typed]:
        if item == "" and field.takes_list:
            message = f"{field.name} must hold texts that are not empty, got {show(value)}"
            raise FieldError(field.name, message)
        if isinstance(item, int | float) and item not in field.range:
            raise FieldError(field.name, f"{field.name} must be {field.range}, got {show(value)}")
    return typed


def _neutral_value(field: Field, value: Plain) -> Plain:
    with contextlib.suppress(ValueError):
        typed = convert(value, field.type)
        if typed in field.neutral:
            return typed
    accepted = " or ".join(show(item) for item in (*field.neutral, None))
    raise FieldError(
        field.name,
        f"{field.name} = {show(value)} is not supported; remove it (accepted: {accepted})",
        code="unsupported_value",
    )


def _check_agreement(values: Mapping[str, Any]) -> None:
    temperature = values.get("temperature")
    if values.get("do_sample") is False and temperature not in (None, 0, 1):
        raise FieldError(
            "do_sample",
            f"do_sample = false contradicts temperature = {show(temperature)}; remove one",
        )
    count = values.get("num_return_sequences", 1)
    if count > 1 and (values.get("do_sample") is False or temperature == 0):
        raise greedy_samples_error(count)
