"""What a run would be, without generating: what `cbgen plan` tells, and what `--strict` refuses.

Rows are prepared by the job's own preparer and checked by the engine's own rules. `cbgen plan`
needs config, tokenizer and rows, but no weights.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass, field
from itertools import accumulate, islice
from typing import Any

from cbgen.engine.build import PlannedEngine, plan_engine
from cbgen.engine.cache.groups import AttentionSpan
from cbgen.engine.cache.shape import CacheShape
from cbgen.engine.plan import EnginePlan, memory_parts
from cbgen.engine.request import Request
from cbgen.engine.scheduler.admission import refusal, token_limit
from cbgen.errors import RowError, UsageError
from cbgen.io.dialects import InputFormat
from cbgen.io.input_files import is_stream
from cbgen.io.inputs import Inputs
from cbgen.io.records import Record
from cbgen.io.row_source import RowSource
from cbgen.io.template import compile_template
from cbgen.job.options import JobOptions, row_source
from cbgen.job.preparer import Preparer, make_preparer
from cbgen.job.settings import Setting, effective_settings
from cbgen.recipe.schema import Recipe

_MAX_EXAMPLES = 10
"""Bad rows that are kept with place and message."""
_GROUP = 64
_WIDE_RANGE = 16
_MAX_BUCKETS = 10
_WIDTHS = [digit * 10**power for power in range(12) for digit in (1, 2, 5)]


@dataclass(slots=True)
class RowSurvey:
    """Counts of an input. `add` takes rows; memory does not grow with their number."""

    plan: EnginePlan
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

    def add(self, source: RowSource, preparer: Preparer) -> None:
        """Prepare and count the rows of a source, all of which are read."""
        records = source.records()
        while group := list(islice(records, _GROUP)):
            for row in preparer.prepare(group):
                self.rows += 1
                error = row.error
                if row.requests:
                    error = refusal(row.requests[0], self.plan, is_duplicate=False)
                if error is not None:
                    self._count_bad(row.record, error)
                else:
                    self._count_good(row.requests[0], len(row.requests))
        self.duplicate_ids = source.num_repeated_ids

    def _count_bad(self, record: Record, error: RowError) -> None:
        self.errors[error.code] += 1
        if len(self.examples) < _MAX_EXAMPLES:
            message = error.message.removeprefix(f"{record.place}: ")
            self.examples.append({"place": record.place, "code": error.code, "message": message})

    def _count_good(self, request: Request, num_samples: int) -> None:
        prompt = len(request.prompt_ids)
        longest = token_limit(request, self.plan)
        self.prompt_lengths[prompt] += 1
        self.requests += num_samples
        self.completion_tokens += num_samples * (longest - prompt)
        self.longest_answer = max(self.longest_answer, longest - prompt)
        self.longest_tokens = max(self.longest_tokens, longest)
        self.may_outgrow_cache += longest > self.plan.cache.max_tokens + 1
        # The last token is never stored.
        self.blocks += num_samples * self.plan.cache.num_pages(longest - 1)


def refuse_bad_rows(
    recipe: Recipe, options: JobOptions, preparer: Preparer, plan: EnginePlan
) -> None:
    """Prepare every row of the inputs, as the run will once more.

    Inputs that can be read only once, as pipes, are left to the run itself.

    Raises:
        UsageError: a row would end with an error; names the first ones.
    """
    if any(is_stream(name) for name in options.inputs.names):
        return
    survey = RowSurvey(plan)
    survey.add(row_source(recipe, options.inputs, options.input_format), preparer)
    if survey.examples:
        first = survey.examples[0]
        others = survey.errors.total() - 1
        more = f" (and {others} more bad rows)" if others else ""
        raise UsageError(f"{first['place']}: {first['message']}{more} (--strict)")


@dataclass(frozen=True, slots=True)
class JobPlan:
    """A run that is not run.

    Attributes:
        settings: what would hold for it, each with its origin.
        summary: the plan as the JSON object that `cbgen plan` prints.
        num_bad_rows: rows that would end with an error.
    """

    settings: list[Setting]
    summary: dict[str, Any]
    num_bad_rows: int


def plan_job(recipe: Recipe, inputs: Inputs | None, input_format: InputFormat = "auto") -> JobPlan:
    """Plan a run.

    Args:
        recipe: the checked recipe.
        inputs: the rows that it would answer, all of which are read; None plans without any.
        input_format: which rows are lines of a batch file.

    Raises:
        UsageError: what the run would be refused for: recipe, model, machine, an unreadable input.
    """
    template = compile_template(recipe.prompt.template)
    planned = plan_engine(recipe.model, recipe.continuous_batching_config)
    plan, facts = planned.plan, planned.facts
    preparer = make_preparer(recipe, template, planned.loaded, plan)
    survey = None
    if inputs is not None:
        survey = RowSurvey(plan)
        survey.add(row_source(recipe, inputs, input_format), preparer)
    settings = effective_settings(recipe, planned.loaded, facts, plan, preparer)
    summary = {
        "model": {
            "type": facts.model_type,
            "layers": len(facts.layers),
            "dtype": str(facts.dtype).removeprefix("torch."),
            "device": str(facts.device),
        },
        **_rows(survey),
        "workload": None if survey is None else _workload(plan, survey),
        "requests_at_once": _requests_at_once(plan, survey),
        "cache": {
            "blocks": plan.cache.num_blocks,
            "page_size": plan.cache.page_size,
            "tokens": plan.cache.num_blocks * plan.cache.page_size,
            "pool_blocks": plan.cache.num_pool_blocks,
            "block_bytes": plan.cache.block_bytes,
            "longest_request": plan.longest_request,
            "shares_prefixes": plan.shares_prefixes,
        },
        "groups": _groups(plan.cache),
        "host_pool": {
            "blocks": plan.cache.num_host_blocks,
            "bytes": plan.cache.num_host_blocks * plan.cache.block_bytes,
        },
        "memory": _memory(planned),
        "warnings": list(plan.warnings),
        "decisions": {item.name: {"value": item.value, "reason": item.origin} for item in settings},
        "estimate": None if survey is None else _estimate(plan, survey),
    }
    return JobPlan(settings, summary, 0 if survey is None else survey.errors.total())


def _rows(survey: RowSurvey | None) -> dict[str, Any]:
    if survey is None:
        names = ("rows", "bad_rows", "duplicate_ids", "may_outgrow_cache", "prompt_tokens")
        return dict.fromkeys(names)
    return {
        "rows": survey.rows,
        "bad_rows": {
            "count": survey.errors.total(),
            "codes": dict(survey.errors.most_common()),
            "first": survey.examples,
        },
        "duplicate_ids": survey.duplicate_ids,
        "may_outgrow_cache": survey.may_outgrow_cache,
        "prompt_tokens": length_statistics(survey.prompt_lengths),
    }


def _workload(plan: EnginePlan, survey: RowSurvey) -> dict[str, int]:
    """Return what the rows ask for, and the blocks of the whole model that they can make use of."""
    longest = plan.cache.blocks_for(max(0, survey.longest_tokens - 1))
    at_once = min(plan.max_requests, survey.requests)
    return {
        "max_prompt_length": max(survey.prompt_lengths, default=0),
        "max_generated_length": survey.longest_answer,
        "num_requests": survey.requests,
        "useful_blocks": -(-at_once * longest // len(plan.cache.groups)),
    }


def _requests_at_once(plan: EnginePlan, survey: RowSurvey | None) -> dict[str, int]:
    """Return how many requests the cache holds at their full length, for three lengths.

    Layers with a window need no more than its blocks; what requests share is not taken off.
    """

    def fitting(num_pages: float) -> int:
        blocks = plan.cache.blocks_for_pages(max(1.0, num_pages))
        return min(plan.max_requests, int(plan.cache.num_pool_blocks / blocks))

    at_once = {"at_most": plan.max_requests, "of_full_context": fitting(plan.table_blocks)}
    if survey is not None and survey.good_rows:
        at_once["of_average_length"] = fitting(survey.blocks / survey.requests)
        at_once["of_longest"] = fitting(plan.cache.num_pages(survey.longest_tokens - 1))
    return at_once


def _groups(cache: CacheShape) -> list[dict[str, Any]]:
    """Return the kinds of attention layers: each has one layer group or several."""
    kinds: dict[AttentionSpan, dict[str, Any]] = {}
    for group, most in zip(cache.groups, cache.most_blocks, strict=True):
        if not group.layers:
            continue
        span = group.span
        name = "full" if span.is_full else "sliding" if span.window is not None else "chunked"
        kind = kinds.setdefault(
            span,
            {
                "attention": name,
                "window": span.window if span.window is not None else span.chunk,
                "layers": 0,
                "groups": 0,
                "page_bytes": 0,
                "most_blocks_per_request": most,
            },
        )
        kind["groups"] += 1
        kind["layers"] += len(group.layers)
        kind["page_bytes"] = max(kind["page_bytes"], *map(cache.page_bytes, group.layers))
    return list(kinds.values())


def _memory(planned: PlannedEngine) -> dict[str, int]:
    """Return bytes by part of the device's memory; on a CPU the host pool is one of them."""
    parts = {
        "weights": planned.facts.weight_bytes,
        **memory_parts(planned.plan, planned.plan_facts),
    }
    if planned.facts.device.type != "cpu":
        del parts["host_pool"]
    free_now = planned.plan_facts.free_bytes + planned.facts.weight_bytes
    return {**parts, "left_free": free_now - sum(parts.values()), "free_now": free_now}


def _estimate(plan: EnginePlan, survey: RowSurvey) -> dict[str, int]:
    """Return tokens and steps, if every answer reaches its limit."""
    steps = 0
    if survey.good_rows:
        at_once = _requests_at_once(plan, survey)["of_average_length"]
        running = max(1, min(survey.requests, at_once))
        prefill = -(-survey.prompt_tokens // plan.max_batch_tokens)
        steps = prefill + max(survey.longest_answer, -(-survey.completion_tokens // running))
    return {
        "prompt_tokens": survey.prompt_tokens,
        "completion_tokens": survey.completion_tokens,
        "steps": steps,
    }


def length_statistics(lengths: Counter[int]) -> dict[str, Any] | None:
    """Return total, min, median, p90, max and a histogram of lengths; None if there are none."""
    ordered = sorted(lengths)
    rows_up_to = list(accumulate(lengths[length] for length in ordered))
    if not ordered:
        return None

    def percentile(share: float) -> int:
        """Return the smallest length that at least this share of the rows does not exceed."""
        return ordered[bisect_left(rows_up_to, share * rows_up_to[-1])]

    ends = _bucket_ends(ordered[0], ordered[-1])
    begins = [2 * ends[0] - ends[1] if len(ends) > 1 else ordered[0] - 1, *ends]
    rows = [0] * len(ends)
    for length, count in lengths.items():
        rows[bisect_left(ends, length)] += count
    return {
        "total": sum(length * count for length, count in lengths.items()),
        "min": ordered[0],
        "median": percentile(0.5),
        "p90": percentile(0.9),
        "max": ordered[-1],
        "histogram": [
            {"from": begin + 1, "to": end, "rows": count}
            for begin, end, count in zip(begins, ends, rows, strict=False)
        ],
    }


def _bucket_ends(shortest: int, longest: int) -> list[int]:
    """Return the last length of each bucket: round numbers, or powers of two for wide ranges."""
    if longest >= _WIDE_RANGE * shortest:
        powers = range((shortest - 1).bit_length(), (longest - 1).bit_length() + 1)
        return [2**power for power in powers]
    width = next(width for width in _WIDTHS if (longest - shortest) // width < _MAX_BUCKETS)
    return list(range(-(-shortest // width) * width, longest + width, width))
