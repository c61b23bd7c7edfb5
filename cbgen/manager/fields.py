"""The fields of a generation config that are set, whether it is an object or a mapping."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import GenerationConfig

from cbgen.errors import UsageError

NOT_OF_REQUESTS = ("continuous_batching_config", "transformers_version")
"""What a generation config holds beside the settings of requests."""


def generation_fields(
    given: GenerationConfig | Mapping[str, Any] | None, place: str
) -> dict[str, Any]:
    """Return the fields that are set.

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
            f"{place} must be a GenerationConfig or a mapping of its fields, got {described(given)}"
        )
    return {
        name: value
        for name, value in vars(given).items()
        if value is not None and name not in NOT_OF_REQUESTS and not name.startswith("_")
    }


def described(value: object) -> str:
    """Return the words for a wrong argument: its type, with the value where that is short."""
    name = type(value).__name__
    return f"{name} {value!r}" if isinstance(value, str | int | float) else name
