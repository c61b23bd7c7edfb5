"""`cbgen plan`: what a run would be, told from config, tokenizer and rows, without weights."""

from __future__ import annotations

from typing import Any

from cbgen.engine.build import PlannedEngine, plan_engine, scheduler_limits
from cbgen.engine.plan import cache_bytes, working_bytes
from cbgen.io.identity import IdIndex
from cbgen.io.inputs import Inputs
from cbgen.io.openai_requests import InputFormat, identify
from cbgen.io.reader import Record
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
            "requests_at_once": _requests_at_once(planned, survey),
            "cache": {
                "blocks": planned.plan.num_blocks,
                "page_size": planned.plan.page_size,
                "tokens": planned.plan.cache_tokens,
            },
            "memory": _memory(planned),
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
    planned = plan_engine(recipe.model, recipe.continuous_batching)
    plan, facts = planned.plan, planned.facts
    prepared = make_preparation(recipe, template, planned.loaded, plan)
    settings = effective_settings(recipe, facts, plan, prepared)
    if inputs is None:
        return JobPlan(planned, settings, None)
    survey = RowSurvey(scheduler_limits(plan, facts), plan.cache_tokens, plan.page_size)
    ids = IdIndex(recipe.output.on_duplicate_id)

    def admit(record: Record) -> Record:
        identified = identify(record, input_format)
        return survey.admit(identified, ids.admit(identified))

    survey.add(inputs.records(admit), prepared.preparer)
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


def _requests_at_once(planned: PlannedEngine, survey: RowSurvey | None) -> dict[str, int]:
    """Return how many requests the cache holds at their full length, for three lengths."""
    plan = planned.plan

    def fitting(blocks: float) -> int:
        return min(plan.max_requests, int(plan.num_blocks / max(1.0, blocks)))

    longest = min(plan.max_context, plan.cache_tokens)
    at_once = {"at_most": plan.max_requests, "of_full_context": fitting(longest / plan.page_size)}
    if survey is not None and survey.good_rows:
        at_once["of_average_length"] = fitting(survey.blocks / survey.good_rows)
        at_once["of_longest"] = fitting(-(-(survey.longest_tokens - 1) // plan.page_size))
    return at_once


def _memory(planned: PlannedEngine) -> dict[str, int]:
    """Return bytes by part."""
    plan, numbers = planned.plan, planned.plan_facts
    parts = {
        "weights": planned.facts.weight_bytes,
        "cache": cache_bytes(plan, numbers),
        "logits_and_activations": working_bytes(plan.max_requests, plan.max_batch_tokens, numbers),
    }
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
        at_once = _requests_at_once(planned, survey)["of_average_length"]
        running = max(1, min(survey.good_rows, at_once))
        prefill = -(-survey.prompt_tokens // plan.max_batch_tokens)
        steps = prefill + max(survey.longest_answer, -(-survey.completion_tokens // running))
    return {
        "prompt_tokens": survey.prompt_tokens,
        "completion_tokens": survey.completion_tokens,
        "steps": steps,
    }
