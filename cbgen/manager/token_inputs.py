"""Prompts in the forms in which callers have them, as lists of token ids."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

TokenInput: TypeAlias = Iterable[int] | Mapping[str, Any]
"""A list, tuple, array or tensor of token ids, or what a tokenizer returns for one text."""
TokenInputs: TypeAlias = Sequence[TokenInput] | Mapping[str, Any]
"""Several of them, an array or tensor of rows, or what a tokenizer returns for several texts."""

_IDS = "input_ids"
_MASK = "attention_mask"


def prompt_id_list(input_ids: TokenInput) -> list[int]:
    """Return the token ids of one prompt as Python integers.

    Args:
        input_ids: of one dimension, or of two with a single row. Of a tokenizer's mapping the
            tokens that its attention mask hides are left out.

    Raises:
        TypeError: it is something else, or several prompts.
    """
    mask = None
    given = input_ids
    if isinstance(given, Mapping):
        given, mask = _of_tokenizer(given)
    try:
        token_ids = [operator.index(value) for value in _single_row(_plain(given))]
    except TypeError as error:
        raise TypeError(
            f"input_ids must be a flat list of token ids, got {_kind(given)}: {error}; "
            'tokenizer(text)["input_ids"] is one'
        ) from error
    if mask is None:
        return token_ids
    seen = _single_row(_plain(mask))
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
    if isinstance(inputs, Mapping) and _is_flat(list(_of_tokenizer(inputs)[0])):
        raise TypeError(
            "inputs is what a tokenizer returns for a single text; for one prompt give [inputs]"
        )
    rows = _rows(inputs)
    if _is_flat(rows):
        raise TypeError(
            "inputs must be a list of prompts, each a list of token ids, got one flat "
            f"{_kind(inputs)}; for a single prompt give [input_ids]"
        )
    prompts = []
    for place, row in enumerate(rows):
        try:
            prompts.append(prompt_id_list(row))
        except TypeError as error:
            raise TypeError(f"inputs[{place}]: {error}") from error
    return prompts


def _is_flat(rows: Sequence[Any]) -> bool:
    return bool(rows) and (isinstance(rows[0], int) or getattr(rows[0], "ndim", None) == 0)


def _rows(inputs: TokenInputs) -> list[Any]:
    if isinstance(inputs, Mapping):
        token_ids, mask = _of_tokenizer(inputs)
        if mask is None:
            return list(token_ids)
        if len(mask) != len(token_ids):
            raise TypeError(
                f"inputs has {len(token_ids)} rows of {_IDS} and {len(mask)} of {_MASK}; it wants "
                "one for each"
            )
        return [{_IDS: row, _MASK: seen} for row, seen in zip(token_ids, mask, strict=True)]
    if isinstance(inputs, str | bytes) or not isinstance(inputs, Iterable):
        raise TypeError(
            f"inputs must be a list of prompts, each a list of token ids, got {_kind(inputs)}"
        )
    return list(inputs)


def _of_tokenizer(encoding: Mapping[str, Any]) -> tuple[Any, Any]:
    if _IDS not in encoding:
        raise TypeError(
            f"a mapping must have {_IDS}, as those of tokenizers do; it has "
            f"{', '.join(map(str, encoding)) or 'nothing'}"
        )
    return encoding[_IDS], encoding.get(_MASK)


def _plain(values: Any) -> Any:  # noqa: ANN401  whatever a caller gave
    tolist = getattr(values, "tolist", None)
    return values if tolist is None else tolist()


def _single_row(values: Any) -> Any:  # noqa: ANN401
    """Return the row of what has one row alone."""
    if (
        isinstance(values, list | tuple)
        and len(values) == 1
        and isinstance(values[0], list | tuple)
    ):
        return values[0]
    return values


def _kind(value: object) -> str:
    shape = getattr(value, "shape", None)
    name = type(value).__name__
    return name if shape is None else f"{name} of shape {list(shape)}"
