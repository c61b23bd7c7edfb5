"""`cbgen plan`: what a run would be, told from config, tokenizer and rows, without weights."""

from __future__ import annotations

from typing import Any

from cbgen.engine.build import PlannedEngine, plan_engine, scheduler_limits
from cbgen.engine.cache.groups import AttentionSpan
from cbgen.engine.config import WorkloadHints
from cbgen.engine.plan import EnginePlan, memory_parts
from cbgen.io.inputs import Inputs
from cbgen.io.openai.requests import InputFormat
from cbgen.io.row_source import RowSource
from cbgen.io.template import compile_template
from cbgen.job.preparation import make_preparation
from cbgen.job.settings import Setting, effective_settings
from cbgen.job.survey import RowSurvey, length_statistics
from cbgen.recipe.schema import Recipe


class JobPlan:
    """A run that is not run.

    Attributes:
        settings: what would hold for it, each with its origin.
        summary: the plan as the JSON object that `cbgen plan` prints.
        num_bad_rows: rows that would end with an error.
    """

    def __init__(
        self, planned: PlannedEngine, settings: list[Setting], survey: RowSurvey | None
    ) -> None:
        self.settings = settings
        self.num_bad_rows = 0 if survey is None else survey.errors.total()
        self.summary: dict[str, Any] = {
            "model": _model(planned),
            **_rows(survey),
            "workload": None if survey is None else _workload(planned.plan, survey),
            "requests_at_once": _requests_at_once(planned.plan, survey),
            "cache": _cache(planned.plan),
            "groups": _groups(planned),
            "host_pool": _host_pool(planned.plan),
            "memory": _memory(planned),
            "warnings": list(planned.plan.warnings),
            "decisions": {
                item.name: {"value": item.value, "reason": item.origin} for item in settings
            },
            "estimate": None if survey is None else _estimate(planned, survey),
        }


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
    prepared = make_preparation(recipe, template, planned.loaded, plan)
    settings = effective_settings(recipe, facts, plan, prepared)
    if inputs is None:
        return JobPlan(planned, settings, None)
    survey = RowSurvey(scheduler_limits(plan, facts), plan.cache_tokens, plan.page_size)
    source = RowSource.of_inputs(
        inputs, on_duplicate_id=recipe.output.on_duplicate_id, input_format=input_format
    )
    survey.add(source.records(), prepared.preparer)
    survey.duplicate_ids = source.num_repeated_ids
    return JobPlan(planned, settings, survey)


def _model(planned: PlannedEngine) -> dict[str, Any]:
    facts = planned.facts
    return {
        "type": facts.model_type,
        "layers": len(facts.layers),
        "dtype": str(facts.dtype).removeprefix("torch."),
        "device": str(facts.device),
    }


def _rows(survey: RowSurvey | None) -> dict[str, Any]:
    if survey is None:
        names = ("rows", "bad_rows", "duplicate_ids", "may_outgrow_cache", "prompt_tokens")
        return dict.fromkeys(names)
    num_bad = survey.errors.total()
    return {
        "rows": survey.rows,
        "bad_rows": {
            "count": num_bad,
            "codes": dict(survey.errors.most_common()),
            "first": survey.examples,
        },
        "duplicate_ids": survey.duplicate_ids,
        "may_outgrow_cache": survey.may_outgrow_cache,
        "prompt_tokens": length_statistics(survey.prompt_lengths),
    }


def _workload(plan: EnginePlan, survey: RowSurvey) -> dict[str, int]:
    """Return what the rows ask for, and the blocks of the whole model that they can make use of."""
    hints = _hints(survey)
    longest = plan.cache_shape.blocks_for(max(0, survey.longest_tokens - 1))
    at_once = min(plan.max_requests, hints.num_requests)
    return {
        "max_prompt_length": hints.max_prompt_length,
        "max_generated_length": hints.max_generated_length,
        "num_requests": hints.num_requests,
        "useful_blocks": -(-at_once * longest // len(plan.groups)),
    }


def _hints(survey: RowSurvey) -> WorkloadHints:
    return WorkloadHints(
        max_prompt_length=max(survey.prompt_lengths, default=0),
        max_generated_length=survey.longest_answer,
        num_requests=survey.requests,
    )


def _requests_at_once(plan: EnginePlan, survey: RowSurvey | None) -> dict[str, int]:
    """Return how many requests the cache holds at their full length, for three lengths.

    Layers with a window need no more than its blocks; what requests share is not taken off.
    """
    shape = plan.cache_shape

    def fitting(num_pages: float) -> int:
        blocks = shape.blocks_for_pages(max(1.0, num_pages))
        return min(plan.max_requests, int(plan.num_pool_blocks / blocks))

    at_once = {"at_most": plan.max_requests, "of_full_context": fitting(plan.table_blocks)}
    if survey is not None and survey.good_rows:
        at_once["of_average_length"] = fitting(survey.blocks / survey.requests)
        at_once["of_longest"] = fitting(-(-(survey.longest_tokens - 1) // plan.page_size))
    return at_once


def _cache(plan: EnginePlan) -> dict[str, Any]:
    return {
        "blocks": plan.num_blocks,
        "page_size": plan.page_size,
        "tokens": plan.num_blocks * plan.page_size,
        "pool_blocks": plan.num_pool_blocks,
        "block_bytes": plan.block_bytes,
        "longest_request": min(plan.max_context, plan.cache_tokens),
        "shares_prefixes": plan.shares_prefixes,
    }


def _groups(planned: PlannedEngine) -> list[dict[str, Any]]:
    """Return the kinds of attention layers: each has one layer group or several."""
    plan = planned.plan
    itemsize = planned.plan_facts.cache_itemsize
    kinds: dict[AttentionSpan, dict[str, Any]] = {}
    for group, most in zip(plan.groups, plan.cache_shape.most_blocks, strict=True):
        if not group.layers:
            continue
        pages = [layer.page_bytes(plan.page_size, itemsize) for layer in group.layers]
        kind = kinds.setdefault(group.span, _kind(group.span, most))
        kind["groups"] += 1
        kind["layers"] += len(group.layers)
        kind["page_bytes"] = max(kind["page_bytes"], *pages)
    return list(kinds.values())


def _kind(span: AttentionSpan, most_blocks: int | None) -> dict[str, Any]:
    name = "full" if span.is_full else "sliding" if span.window is not None else "chunked"
    return {
        "attention": name,
        "window": span.window if span.window is not None else span.chunk,
        "layers": 0,
        "groups": 0,
        "page_bytes": 0,
        "most_blocks_per_request": most_blocks,
    }


def _host_pool(plan: EnginePlan) -> dict[str, int]:
    return {"blocks": plan.num_host_blocks, "bytes": plan.num_host_blocks * plan.block_bytes}


def _memory(planned: PlannedEngine) -> dict[str, int]:
    """Return bytes by part of the device's memory; on a CPU the host pool is one of them."""
    parts = {
        "weights": planned.facts.weight_bytes,
        **memory_parts(planned.plan, planned.plan_facts),
    }
    if planned.facts.device.type != "cpu":
        del parts["host_pool"]
    return {
        **parts,
        "left_free": planned.free_bytes - sum(parts.values()),
        "free_now": planned.free_bytes,
    }


def _estimate(planned: PlannedEngine, survey: RowSurvey) -> dict[str, int]:
    """Return tokens and steps, if every answer reaches its limit."""
    plan = planned.plan
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
