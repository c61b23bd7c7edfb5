"""Output rows: which input columns they carry, under which names, and their fields in order.

Takes plain values, so that it knows no engine. Numbers that are not finite are made null.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from cbgen.errors import RowError
from cbgen.io.reader import Record

OUTPUT_FIELDS = frozenset({
    "id", "index", "text", "finish_reason", "stop_reason", "usage", "logprobs", "error", "choices",
    "token_ids", "prompt_token_ids", "prompt_logprobs", "reasoning", "valid", "continuation",
})  # fmt: skip
"""Every field that an output row may have; columns of these names are renamed in every run."""

_NOT_CARRIED = frozenset({"id", "generation_config", "prompt_token_ids", "input_ids"})
_MASKED_LOGPROB = -1e30  # what engines put in place of minus infinity lies below


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One sample of an answer."""

    text: str | None
    finish_reason: str
    stop_reason: str | int | None = None
    completion_tokens: int
    logprobs: dict[str, Any] | None = None
    """As `logprobs_object` builds it."""
    token_ids: Sequence[int] | None = None
    """Written only where it is not None."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What was generated for one row."""

    choices: Sequence[Choice]
    """The samples in their order, at least one."""
    prompt_tokens: int
    prompt_token_ids: Sequence[int] | None = None
    """Written only where it is not None."""

    @property
    def completion_tokens(self) -> int:
        """Tokens of all samples."""
        return sum(choice.completion_tokens for choice in self.choices)


class OutputRows:
    """Build output rows from records.

    Args:
        columns: input columns to carry: `all` (but ids of tokens and generation_config), `none`, or
            names.
        on_renamed: called once for each column that is renamed, with the old and the new name.
    """

    def __init__(
        self,
        columns: Literal["all", "none"] | Sequence[str] = "all",
        on_renamed: Callable[[str, str], None] | None = None,
    ) -> None:
        self._columns = columns
        self._on_renamed = on_renamed
        self._renamed: set[tuple[str, str]] = set()
        self._plan_keys: tuple[str, ...] = ()
        self._plan: list[tuple[str, str]] = []

    def answer(self, record: Record, answer: Answer) -> dict[str, Any]:
        """Return the row of a record that was answered.

        A single sample's fields stand in the row itself, those of several in its `choices`.
        """
        row = self._begin(record)
        usage = {
            "prompt_tokens": answer.prompt_tokens,
            "completion_tokens": answer.completion_tokens,
        }
        token_ids: dict[str, Any] = {}
        if answer.prompt_token_ids is not None:
            token_ids["prompt_token_ids"] = list(answer.prompt_token_ids)
        if len(answer.choices) > 1:
            row["choices"] = [_choice_fields(choice) for choice in answer.choices]
            row["usage"] = usage
        else:
            choice = _choice_fields(answer.choices[0])
            for name in ("text", "finish_reason", "stop_reason"):
                row[name] = choice.pop(name)
            row["usage"] = usage
            row["logprobs"] = choice.pop("logprobs")
            token_ids |= choice
        return {**row, **token_ids, "error": None}

    def failure(self, record: Record, error: RowError) -> dict[str, Any]:
        """Return the row of a record that could not be answered; it carries the same columns."""
        row = self._begin(record)
        row["text"] = None
        row["finish_reason"] = "error"
        row["stop_reason"] = None
        row["usage"] = None
        row["logprobs"] = None
        row["error"] = error.as_dict()
        return row

    def _begin(self, record: Record) -> dict[str, Any]:
        row: dict[str, Any] = {"id": record.id, "index": record.index}
        if record.columns:
            keys = tuple(record.columns)
            if keys != self._plan_keys:  # rows of one file nearly always have the same columns
                self._plan = self._make_plan(record.columns)
                self._plan_keys = keys
            for name, output_name in self._plan:
                row[output_name] = record.columns[name]
        return row

    def _make_plan(self, columns: dict[str, Any]) -> list[tuple[str, str]]:
        plan = [(name, _output_name(name, columns)) for name in self._carried(columns)]
        for name, output_name in plan:
            if name != output_name and (name, output_name) not in self._renamed:
                self._renamed.add((name, output_name))
                if self._on_renamed is not None:
                    self._on_renamed(name, output_name)
        return plan

    def _carried(self, columns: dict[str, Any]) -> list[str]:
        if self._columns == "none":
            return []
        if self._columns == "all":
            return [name for name in columns if name not in _NOT_CARRIED]
        return [name for name in dict.fromkeys(self._columns) if name in columns and name != "id"]


def _choice_fields(choice: Choice) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "text": choice.text,
        "finish_reason": choice.finish_reason,
        "stop_reason": choice.stop_reason,
        "logprobs": choice.logprobs,
    }
    if choice.token_ids is not None:
        fields["token_ids"] = list(choice.token_ids)
    return fields


def _output_name(name: str, columns: dict[str, Any]) -> str:
    output_name = name
    if name in OUTPUT_FIELDS:
        output_name = "input_" + name
        while output_name in columns:
            output_name = "input_" + output_name
    return output_name


def row_error(row: Mapping[str, Any]) -> str | None:
    """Return the message of the error that an output row of any dialect carries, else None."""
    error, response = row["error"], row.get("response")
    if error is None and "index" not in row and isinstance(response, dict):  # an OpenAI line
        error = response["body"].get("error")
    while isinstance(error, dict):
        error = error.get("error", error.get("message"))
    return None if error is None else str(error)


def logprobs_object(
    *,
    tokens: Sequence[str],
    token_ids: Sequence[int],
    logprobs: Sequence[float | None],
    top: Sequence[Iterable[tuple[str, int, float | None]]] = (),
) -> dict[str, Any]:
    """Return the `logprobs` field of a row.

    Args:
        tokens: the generated tokens as text.
        token_ids: their ids, as many.
        logprobs: their log-probabilities, as many.
        top: for each token its alternatives as (token, token id, log-probability); may be empty.
    """
    alternatives = [
        [
            {"token": token, "token_id": token_id, "logprob": finite_logprob(logprob)}
            for token, token_id, logprob in position
        ]
        for position in top
    ]
    return {
        "tokens": list(tokens),
        "token_ids": list(token_ids),
        "logprobs": [finite_logprob(logprob) for logprob in logprobs],
        "top": alternatives,
    }


def finite_logprob(logprob: float | None) -> float | None:
    """Return a log-probability; None if it is missing, not finite, or a masked token's."""
    if logprob is None or not math.isfinite(logprob) or logprob < _MASKED_LOGPROB:
        return None
    return logprob
