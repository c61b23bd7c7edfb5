"""The settings of a run, each with its origin. Loads no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

from cbgen.generation.fields import GENERATION_SECTION
from cbgen.recipe.schema import SECTIONS, SWITCHES, Recipe

if TYPE_CHECKING:
    from cbgen.engine.model.loader import LoadedModel
    from cbgen.engine.model.probe import ModelFacts
    from cbgen.engine.plan import EnginePlan
    from cbgen.job.preparer import Preparer


@dataclass(frozen=True, slots=True)
class Setting:
    """One value that holds for the run."""

    name: str
    """section.key as in a recipe, or the name of a planned value."""
    value: Any
    origin: str
    """Place in the recipe, `command line`, `model`, `default`, or the reason of a decision."""


def effective_settings(
    recipe: Recipe, loaded: LoadedModel, facts: ModelFacts, plan: EnginePlan, preparer: Preparer
) -> list[Setting]:
    """Return the settings that a person wants to see, in the order of a recipe."""
    settings = [
        Setting("model.path", recipe.model.path, recipe.origins.get("model.path", "recipe")),
        _dtype(recipe, facts, loaded.dtype_reason),
        _decided(recipe, "model.device", str(facts.device), recipe.model.device),
        _planned(recipe, plan, "model.attn_implementation", plan.attn_implementation),
        _decided(recipe, "prompt.chat", preparer.renderer.sends_chat, recipe.prompt.chat),
    ]
    for name, (value, level) in preparer.generation.effective().items():
        key = f"{GENERATION_SECTION}.{name}"
        settings.append(Setting(key, value, recipe.origins.get(key, level)))
    batching = "continuous_batching_config"
    settings += [
        _planned(recipe, plan, f"{batching}.page_size", plan.cache.page_size),
        _planned(recipe, plan, f"{batching}.num_blocks", plan.cache.num_blocks),
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


def every_setting(recipe: Recipe, effective: Sequence[Setting]) -> dict[str, dict[str, Any]]:
    """Return name -> value and origin of all settings.

    Args:
        recipe: has a value for every field, most of them defaults.
        effective: what was decided once the model was loaded; takes precedence.
    """
    settings = {}
    for section in SECTIONS:
        for field in fields(SECTIONS[section]):
            name = f"{section}.{field.name}"
            value = getattr(getattr(recipe, section), field.name)
            settings[name] = (value, recipe.origins.get(name, "default"))
    for key, value in recipe.generation_config.items():
        name = f"{GENERATION_SECTION}.{key}"
        settings[name] = (value, recipe.origins.get(name, "recipe"))
    for name in SWITCHES:
        settings[name] = (getattr(recipe, name), recipe.origins.get(name, "default"))
    settings.update((item.name, (item.value, item.origin)) for item in effective)
    return {
        name: {"value": value, "origin": origin}
        for name, (value, origin) in sorted(settings.items())
    }


def _offload_gib(plan: EnginePlan) -> float:
    """Return the size of the host pool as a recipe has it, to three digits."""
    return float(f"{plan.cache.num_host_blocks * plan.cache.block_bytes / 2**30:.3g}")


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
