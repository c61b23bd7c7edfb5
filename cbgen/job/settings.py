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
    settings: list[Setting] = []

    def add(name: str, value: object, *, given: object = None, default: str = "default") -> None:
        """Add a setting; `given` is what the recipe has, where that may leave it to the model."""
        origin, reason = recipe.origins.get(name), plan.reasons.get(name.rpartition(".")[2])
        if reason in (None, "given", "default"):
            shown = origin or reason or default
        else:
            shown = f"{origin}, {reason}" if origin else str(reason)
        settings.append(Setting(name, value, f"{shown}: auto" if given == "auto" else shown))

    add("model.path", recipe.model.path, default="recipe")
    add("model.dtype", str(facts.dtype).removeprefix("torch."), given=recipe.model.dtype)
    if recipe.model.dtype == "auto":
        settings[-1] = replace(settings[-1], origin=f"{settings[-1].origin}, {loaded.dtype_reason}")
    add("model.device", str(facts.device), given=recipe.model.device)
    add("model.attn_implementation", plan.attn_implementation)
    add("prompt.chat", preparer.renderer.sends_chat, given=recipe.prompt.chat)
    for name, (value, level) in preparer.generation.effective().items():
        add(f"{GENERATION_SECTION}.{name}", value, default=level)
    host_bytes = plan.cache.num_host_blocks * plan.cache.block_bytes
    for name, value in {
        "page_size": plan.cache.page_size,
        "num_blocks": plan.cache.num_blocks,
        "max_batch_tokens": plan.max_batch_tokens,
        "max_requests_per_batch": plan.max_requests,
        "allow_block_sharing": plan.shares_prefixes,
        "scheduler_type": plan.scheduler_type,
        "safety_margin": plan.safety_margin,
        "cpu_offload_space": float(f"{host_bytes / 2**30:.3g}"),  # GiB, as a recipe has it
        "max_queue_size": recipe.continuous_batching_config.max_queue_size,
    }.items():
        add(f"continuous_batching_config.{name}", value)
    add("max_context", plan.max_context)
    add("output.order", recipe.output.order)
    return settings


def every_setting(recipe: Recipe, effective: Sequence[Setting]) -> dict[str, dict[str, Any]]:
    """Return name -> value and origin of all settings.

    Args:
        recipe: has a value for every field, most of them defaults.
        effective: what was decided once the model was loaded; takes precedence.
    """
    values = {name: getattr(recipe, name) for name in SWITCHES}
    for section, kind in SECTIONS.items():
        for field in fields(kind):
            values[f"{section}.{field.name}"] = getattr(getattr(recipe, section), field.name)
    settings = {
        name: {"value": value, "origin": recipe.origins.get(name, "default")}
        for name, value in values.items()
    }
    for key, value in recipe.generation_config.items():
        name = f"{GENERATION_SECTION}.{key}"
        settings[name] = {"value": value, "origin": recipe.origins.get(name, "recipe")}
    settings |= {item.name: {"value": item.value, "origin": item.origin} for item in effective}
    return dict(sorted(settings.items()))
