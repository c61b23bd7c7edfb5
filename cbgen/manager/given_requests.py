"""What callers give for ids and prompts of requests; prompts come in many forms."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

from cbgen.values import show_argument

TokenInput: TypeAlias = Iterable[int] | Mapping[str, Any]
"""A list, tuple, array or tensor of token ids, or what a tokenizer returns for one text."""
TokenInputs: TypeAlias = Sequence[TokenInput] | Mapping[str, Any]
"""Several of them, an array or tensor of rows, or what a tokenizer returns for several texts."""

_IDS = "input_ids"
_MASK = "attention_mask"


def check_request_id(request_id: object) -> None:
    """Refuse what is no id of a request.

    Raises:
        TypeError: it is no text.
    """
    if not isinstance(request_id, str):
        raise TypeError(
            f"request ids are text, got {show_argument(request_id)}; give str(...) of it"
        )


def prompt_id_list(input_ids: TokenInput) -> list[int]:
    """Return the token ids of one prompt as Python integers.

    Args:
        input_ids: of one dimension, or of two with a single row. Of a tokenizer's mapping the
            tokens that its attention mask hides are left out.

    Raises:
        TypeError: it is something else, or several prompts.
    """
    given, mask = _ids_and_mask(input_ids)
    try:
        token_ids = [operator.index(value) for value in _single_row(given)]
    except TypeError as error:
        raise TypeError(
            f"input_ids must be a flat list of token ids, got {_kind(given)}: {error}; "
            'tokenizer(text)["input_ids"] is one'
        ) from error
    if mask is None:
        return token_ids
    seen = _single_row(mask)
    if len(seen) != len(token_ids):
        raise TypeError(
            f"{_IDS} has {len(token_ids)} tokens and {_MASK} {len(seen)}; they want the same length"
        )
    return [token_id for token_id, is_seen in zip(token_ids, seen, strict=True) if is_seen]


def prompt_id_lists(inputs: TokenInputs) -> list[list[int]]:
    """Return the token ids of several prompts.

    Raises:
        TypeError: it is something else, or a single prompt; the text names the place.
    """
    if isinstance(inputs, str | bytes) or not isinstance(inputs, Iterable):
        raise TypeError(
            f"inputs must be a list of prompts, each a list of token ids, got {_kind(inputs)}"
        )
    given, mask = _ids_and_mask(inputs)
    rows: list[Any] = list(given)
    if rows and (isinstance(rows[0], int) or getattr(rows[0], "ndim", None) == 0):
        if isinstance(inputs, Mapping):
            raise TypeError(
                "inputs is what a tokenizer returns for a single text; for one prompt give [inputs]"
            )
        raise TypeError(
            "inputs must be a list of prompts, each a list of token ids, got one flat "
            f"{_kind(inputs)}; for a single prompt give [input_ids]"
        )
    if mask is not None:
        if len(mask) != len(rows):
            raise TypeError(
                f"inputs has {len(rows)} rows of {_IDS} and {len(mask)} of {_MASK}; it wants one "
                "for each"
            )
        rows = [{_IDS: row, _MASK: seen} for row, seen in zip(rows, mask, strict=True)]
    prompts = []
    for place, row in enumerate(rows):
        try:
            prompts.append(prompt_id_list(row))
        except TypeError as error:
            raise TypeError(f"inputs[{place}]: {error}") from error
    return prompts


def _ids_and_mask(given: Any) -> tuple[Any, Any]:  # noqa: ANN401  whatever a caller gave
    """Return token ids and the attention mask, None without one."""
    if not isinstance(given, Mapping):
        return given, None
    if _IDS not in given:
        raise TypeError(
            f"a mapping must have {_IDS}, as those of tokenizers do; it has "
            f"{', '.join(map(str, given)) or 'nothing'}"
        )
    return given[_IDS], given.get(_MASK)


def _single_row(values: Any) -> Any:  # noqa: ANN401
    """Return plain values, and the row of what has one row alone."""
    values = values.tolist() if hasattr(values, "tolist") else values
    is_one = isinstance(values, list | tuple) and len(values) == 1
    return values[0] if is_one and isinstance(values[0], list | tuple) else values


def _kind(value: object) -> str:
    shape = getattr(value, "shape", None)
    name = type(value).__name__
    return name if shape is None else f"{name} of shape {list(shape)}"
