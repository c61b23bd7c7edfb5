"""The effective settings of a run, each with its origin: what a person wants to see once."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from cbgen.engine.model.facts import ModelFacts
from cbgen.engine.plan import EnginePlan
from cbgen.job.preparation import Preparation
from cbgen.recipe.schema import GENERATION_SECTION, Recipe


@dataclass(frozen=True, slots=True)
class Setting:
    """One value that holds for the run."""

    name: str
    """section.key as in a recipe, or the name of a planned value."""
    value: Any
    origin: str
    """Place in the recipe, `command line`, `model`, `default`, or the reason of a decision."""


def effective_settings(
    recipe: Recipe, facts: ModelFacts, plan: EnginePlan, prepared: Preparation
) -> list[Setting]:
    """Return every setting, in the order of a recipe."""
    settings = [
        Setting("model.path", recipe.model.path, recipe.origins.get("model.path", "recipe")),
        _dtype(recipe, facts, prepared.dtype_reason),
        _decided(recipe, "model.device", str(facts.device), recipe.model.device),
        _planned(recipe, plan, "model.attn_implementation", plan.attn_implementation),
        _decided(recipe, "prompt.chat", prepared.renderer.sends_chat, recipe.prompt.chat),
    ]
    for name, (value, level) in prepared.generation.effective().items():
        key = f"{GENERATION_SECTION}.{name}"
        settings.append(Setting(key, value, recipe.origins.get(key, level)))
    batching = "continuous_batching_config"
    settings += [
        _planned(recipe, plan, f"{batching}.page_size", plan.page_size),
        _planned(recipe, plan, f"{batching}.num_blocks", plan.num_blocks),
        _planned(recipe, plan, f"{batching}.max_batch_tokens", plan.max_batch_tokens),
        _planned(recipe, plan, f"{batching}.max_requests_per_batch", plan.max_requests),
        _planned(recipe, plan, f"{batching}.allow_block_sharing", plan.shares_prefixes),
        _planned(recipe, plan, f"{batching}.scheduler_type", plan.scheduler_type),
        _planned(recipe, plan, f"{batching}.safety_margin", plan.safety_margin),
        _planned(recipe, plan, f"{batching}.cpu_offload_space", _offload_gib(plan)),
        _planned(
            recipe,
            plan,
            f"{batching}.max_queue_size",
            recipe.continuous_batching_config.max_queue_size,
        ),
        Setting("max_context", plan.max_context, plan.reasons["max_context"]),
        _decided(recipe, "output.order", recipe.output.order, recipe.output.order),
    ]
    return settings


def _offload_gib(plan: EnginePlan) -> float:
    """Return the size of the host pool as a recipe has it, to three digits."""
    return float(f"{plan.num_host_blocks * plan.block_bytes / 2**30:.3g}")


def _dtype(recipe: Recipe, facts: ModelFacts, reason: str) -> Setting:
    value = str(facts.dtype).removeprefix("torch.")
    setting = _decided(recipe, "model.dtype", value, recipe.model.dtype)
    if recipe.model.dtype != "auto":
        return setting
    return replace(setting, origin=f"{setting.origin}, {reason}")


def _decided(recipe: Recipe, key: str, value: object, given: object) -> Setting:
    origin = recipe.origins.get(key, "default")
    return Setting(key, value, f"{origin}: auto" if given == "auto" else origin)


def _planned(recipe: Recipe, plan: EnginePlan, key: str, value: object) -> Setting:
    reason = plan.reasons.get(key.partition(".")[2], "default")
    origin = recipe.origins.get(key)
    if origin is not None:
        reason = origin if reason in ("given", "default") else f"{origin}, {reason}"
    return Setting(key, value, reason)
