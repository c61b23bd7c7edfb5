"""What the rows of an input would be as requests: counted, nothing generated.

Rows are prepared by the job's own preparer and checked by the engine's own rules.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from cbgen.engine.request import Request
from cbgen.engine.scheduler.admission import refusal, token_limit
from cbgen.engine.scheduler.base import SchedulerLimits
from cbgen.errors import RowError
from cbgen.io.reader import Record
from cbgen.job.prepare import Preparer

MOST_EXAMPLES = 10
"""Bad rows that are kept with place and message."""
_GROUP = 64
_WIDE_RANGE = 16
_MOST_BUCKETS = 10
_WIDTHS = [digit * 10**power for power in range(12) for digit in (1, 2, 5)]


@dataclass(slots=True)
class RowSurvey:
    """Counts of an input. `add` takes rows; memory does not grow with their number."""

    limits: SchedulerLimits
    cache_tokens: int
    page_size: int
    rows: int = 0
    requests: int = 0
    """Requests of good rows, one for each sample."""
    errors: Counter[str] = field(default_factory=Counter)
    """Bad rows by error code."""
    examples: list[dict[str, str]] = field(default_factory=list)
    """The first bad rows: place, code, message."""
    duplicate_ids: int = 0
    """Rows whose id an earlier one has, whether that makes them bad or changes their id."""
    prompt_lengths: Counter[int] = field(default_factory=Counter)
    """Good rows by the tokens of their prompt."""
    completion_tokens: int = 0
    """Tokens of all answers, if each of them reaches its limit."""
    longest_answer: int = 0
    longest_tokens: int = 0
    """Most tokens of prompt and answer together."""
    may_outgrow_cache: int = 0
    """Good rows that fail if their answer reaches its limit: the whole cache is too small."""
    blocks: int = 0
    """Cache blocks of all requests at their full length, none of them shared."""

    @property
    def good_rows(self) -> int:
        """Rows that would be answered."""
        return self.rows - self.errors.total()

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all prompts of good rows."""
        return sum(length * rows for length, rows in self.prompt_lengths.items())

    def add(self, records: Iterable[Record], preparer: Preparer) -> None:
        """Prepare and count records."""
        for group in _groups(iter(records)):
            for row in preparer.prepare(group):
                self.rows += 1
                error = row.error
                if row.requests:
                    first = row.requests[0]
                    error = refusal(first, self.limits, self.cache_tokens, is_duplicate=False)
                if error is not None:
                    self._count_bad(row.record, error)
                else:
                    self._count_good(row.requests[0], len(row.requests))

    def _count_bad(self, record: Record, error: RowError) -> None:
        self.errors[error.code] += 1
        if len(self.examples) < MOST_EXAMPLES:
            message = error.message.removeprefix(f"{record.place}: ")
            self.examples.append({"place": record.place, "code": error.code, "message": message})

    def _count_good(self, request: Request, num_samples: int) -> None:
        prompt = len(request.prompt_ids)
        longest = token_limit(request, self.limits, self.cache_tokens)
        self.prompt_lengths[prompt] += 1
        self.requests += num_samples
        self.completion_tokens += num_samples * (longest - prompt)
        self.longest_answer = max(self.longest_answer, longest - prompt)
        self.longest_tokens = max(self.longest_tokens, longest)
        self.may_outgrow_cache += longest > self.cache_tokens + 1
        # The last token is never stored.
        self.blocks += num_samples * -(-(longest - 1) // self.page_size)


def length_statistics(lengths: Counter[int]) -> dict[str, Any] | None:
    """Return total, min, median, p90, max and a histogram of lengths; None if there are none."""
    rows = lengths.total()
    if rows == 0:
        return None
    ordered = sorted(lengths)
    return {
        "total": sum(length * count for length, count in lengths.items()),
        "min": ordered[0],
        "median": _percentile(lengths, ordered, 0.5),
        "p90": _percentile(lengths, ordered, 0.9),
        "max": ordered[-1],
        "histogram": _histogram(lengths, ordered),
    }


def _percentile(lengths: Counter[int], ordered: list[int], share: float) -> int:
    """Return the smallest length that at least this share of the rows does not exceed."""
    wanted = share * lengths.total()
    seen = 0
    for length in ordered:
        seen += lengths[length]
        if seen >= wanted:
            return length
    return ordered[-1]


def _histogram(lengths: Counter[int], ordered: list[int]) -> list[dict[str, int]]:
    """Return buckets from the shortest to the longest, those between them that are empty too."""
    ends = _bucket_ends(ordered[0], ordered[-1])
    rows = [0] * len(ends)
    for length, count in lengths.items():
        rows[bisect_left(ends, length)] += count
    begins = [2 * ends[0] - ends[1] if len(ends) > 1 else ordered[0] - 1, *ends]
    return [
        {"from": begin + 1, "to": end, "rows": count}
        for begin, end, count in zip(begins, ends, rows, strict=False)
    ]


def _bucket_ends(shortest: int, longest: int) -> list[int]:
    """Return the last length of each bucket: round numbers, or powers of two for wide ranges."""
    if longest >= _WIDE_RANGE * shortest:
        powers = range((shortest - 1).bit_length(), (longest - 1).bit_length() + 1)
        return [2**power for power in powers]
    width = next(width for width in _WIDTHS if (longest - shortest) // width < _MOST_BUCKETS)
    return list(range(-(-shortest // width) * width, longest + width, width))


def _groups(records: Iterator[Record]) -> Iterator[list[Record]]:
    while group := list(islice(records, _GROUP)):
        yield group
