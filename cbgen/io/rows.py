"""Output rows: the one table of their fields, how a row is laid out, and how one is read back.

A new field is an entry of `FIELDS`: rows, `choices`, the columns of parquet files and the names
that input columns may not keep follow from it. Takes plain values, so that it knows no engine.
Numbers that are not finite are made null.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from cbgen.errors import RowError
from cbgen.io.records import Record

logger = logging.getLogger(__name__)

ColumnType: TypeAlias = "str | list[ColumnType] | dict[str, ColumnType]"
"""Type of a column of a parquet file, or of a part of it.

`null`, `bool`, `int`, `long` (beyond what a float holds), `float`, `text`, `json` (as text); a list
of one type, that of the items of lists; types by key, those of objects with these keys.
"""

FINISH_REASONS = ("stop", "length", "cancelled", "error")
"""How a row can have ended."""

_NOT_CARRIED = frozenset({"id", "generation_config", "prompt_token_ids", "input_ids"})
_MASKED_LOGPROB = -1e30  # what engines put in place of minus infinity lies below


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One sample of an answer."""

    text: str | None
    """None for a model without a tokenizer."""
    finish_reason: str
    stop_reason: str | int | None = None
    generated_tokens: Sequence[int]
    logprobs: dict[str, Any] | None = None
    """As `logprobs_object` builds it."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What was generated for one row."""

    prompt_ids: Sequence[int]
    samples: Sequence[Sample]
    """In their order, at least one."""

    @property
    def completion_tokens(self) -> int:
        """Tokens of all samples."""
        return sum(len(sample.generated_tokens) for sample in self.samples)


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputField:
    """A field of an output row, or of each of its `choices`."""

    name: str
    type: ColumnType
    """Of its column in a parquet file."""
    value: Callable[[Answer, Sample], Any]
    is_of_sample: bool = True
    """Whether each of several samples has its own."""
    option: str | None = None
    """The setting of section `output` that asks for it; None = every row has it. No failed row has
    a field that was asked for."""
    when_failed: Any = None
    """Its value in the row of a record that could not be answered."""


_TOP: ColumnType = {"token": "text", "token_id": "int", "logprob": "float"}
_LOGPROBS: ColumnType = {
    "tokens": ["text"],
    "token_ids": ["int"],
    "logprobs": ["float"],
    "top": [[_TOP]],
}

FIELDS = (
    OutputField(name="text", type="text", value=lambda _, sample: sample.text),
    OutputField(
        name="finish_reason",
        type="text",
        value=lambda _, sample: sample.finish_reason,
        when_failed="error",
    ),
    OutputField(name="stop_reason", type="text", value=lambda _, sample: sample.stop_reason),
    OutputField(
        name="usage",
        type={"prompt_tokens": "int", "completion_tokens": "int"},
        value=lambda answer, _: {
            "prompt_tokens": len(answer.prompt_ids),
            "completion_tokens": answer.completion_tokens,
        },
        is_of_sample=False,
    ),
    OutputField(name="logprobs", type=_LOGPROBS, value=lambda _, sample: sample.logprobs),
    OutputField(
        name="prompt_token_ids",
        type=["int"],
        value=lambda answer, _: list(answer.prompt_ids),
        is_of_sample=False,
        option="token_ids",
    ),
    OutputField(
        name="token_ids",
        type=["int"],
        value=lambda _, sample: list(sample.generated_tokens),
        option="token_ids",
    ),
)
"""The fields that say what was generated, in the order of a row.

A row begins with `id`, `index` and the carried columns, and ends with `error`. One of several
samples has `choices` in place of the fields of a sample.
"""

ROW_OPTIONS = frozenset(field.option for field in FIELDS if field.option is not None)
"""The settings of section `output` that ask for fields."""

_RESERVED = ("prompt_logprobs", "reasoning", "valid", "continuation")  # no row has them yet

OUTPUT_FIELDS = frozenset(
    {"id", "index", "choices", "error", *(field.name for field in FIELDS), *_RESERVED}
)
"""Every field that an output row may have; columns of these names are renamed in every run."""

ALWAYS_PRESENT = ("index", *(field.name for field in FIELDS if field.option is None), "error")
"""The fields that every parquet file has a column for; `id` too, whose type depends on the rows."""

_OF_SAMPLES: ColumnType = {field.name: field.type for field in FIELDS if field.is_of_sample}

OWN_COLUMNS: dict[str, ColumnType] = {
    "index": "int",
    **{field.name: field.type for field in FIELDS if field.option is None},
    "choices": [_OF_SAMPLES],
    **{field.name: field.type for field in FIELDS if field.option and field.is_of_sample},
    **{field.name: field.type for field in FIELDS if field.option and not field.is_of_sample},
    "error": {"type": "text", "code": "text", "message": "text"},
}
"""The types of all fields but `id`, in the order of a parquet file's columns.

Input columns come right after `index`.
"""


class OutputRows:
    """Build output rows from records.

    Args:
        columns: input columns to carry: `all` (but ids of tokens and generation_config), `none`, or
            names.
        options: settings that are on, of ROW_OPTIONS.
    """

    def __init__(
        self,
        columns: Literal["all", "none"] | Sequence[str] = "all",
        *,
        options: Collection[str] = (),
    ) -> None:
        self._columns = columns
        self._renamed: set[tuple[str, str]] = set()
        self._plan_keys: tuple[str, ...] = ()
        self._plan: list[tuple[str, str]] = []
        self._fields = [f for f in FIELDS if f.option is None or f.option in options]
        self._sample_fields = [field for field in self._fields if field.is_of_sample]
        self._row_fields = [field for field in self._fields if not field.is_of_sample]

    def answer(self, record: Record, answer: Answer) -> dict[str, Any]:
        """Return the row of a record that was answered.

        A single sample's fields stand in the row itself, those of several in its `choices`.
        """
        row = self._begin(record)
        fields = self._fields
        if len(answer.samples) > 1:
            row["choices"] = [
                {field.name: field.value(answer, sample) for field in self._sample_fields}
                for sample in answer.samples
            ]
            fields = self._row_fields
        first = answer.samples[0]
        for field in fields:
            row[field.name] = field.value(answer, first)
        row["error"] = None
        return row

    def failure(self, record: Record, error: RowError) -> dict[str, Any]:
        """Return the row of a record that could not be answered; it carries the same columns."""
        row = self._begin(record)
        for field in FIELDS:
            if field.option is None:
                row[field.name] = field.when_failed
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
                logger.warning(
                    "input column %r is written as %r: output rows have a field of that name",
                    name,
                    output_name,
                )
        return plan

    def _carried(self, columns: dict[str, Any]) -> list[str]:
        if self._columns == "none":
            return []
        if self._columns == "all":
            return [name for name in columns if name not in _NOT_CARRIED]
        return [name for name in dict.fromkeys(self._columns) if name in columns and name != "id"]


def _output_name(name: str, columns: dict[str, Any]) -> str:
    output_name = name
    if name in OUTPUT_FIELDS:
        output_name = "input_" + name
        while output_name in columns:
            output_name = "input_" + output_name
    return output_name


@dataclass(frozen=True, slots=True)
class RowOutcome:
    """What an output row says of its record: which it is, and how it ended."""

    index: int
    finish_reasons: tuple[str, ...]
    """How each of its samples ended: of FINISH_REASONS, or what another version wrote."""
    error_code: str | None = None
    """Set where the row failed."""
    prompt_tokens: int = 0
    completion_tokens: int = 0


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
