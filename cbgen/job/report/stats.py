"""The object that `--stats` writes: what a run did, in numbers, and under which settings.

Loads no torch: a run that ends before its model is loaded has statistics too.
"""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from dataclasses import fields
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from cbgen.job.report.statistics import JobStatistics
from cbgen.recipe.schema import GENERATION_SECTION, SECTIONS, SWITCHES, Recipe

if TYPE_CHECKING:
    from cbgen.job.settings import Setting  # its module loads torch

_PACKAGES = ("torch", "transformers", "tokenizers")


def stats_object(
    statistics: JobStatistics,
    *,
    exit_code: int | None,
    series: Sequence[Mapping[str, Any]],
    settings: Mapping[str, Any],
    versions: Mapping[str, str],
) -> dict[str, Any]:
    """Return everything about a run, to be written as JSON; `exit_code` None while it runs."""
    engine = statistics.engine
    return {
        "exit_code": exit_code,
        "rows": {
            "read": statistics.rows_read,
            "answered": statistics.rows_answered,
            "failed": statistics.rows_failed,
            "resumed": statistics.rows_resumed,
        },
        "finish_reasons": dict(statistics.finish_reasons),
        "errors": dict(statistics.errors),
        "tokens": {
            "prompt": statistics.prompt_tokens,
            "cached": engine.num_cached_tokens,
            "completion": statistics.completion_tokens,
            "recomputed": engine.num_recomputed_tokens,
        },
        "seconds": {
            "load": round(statistics.load_seconds, 3),
            "run": round(statistics.run_seconds, 3),
        },
        "rates": _rates(statistics),
        "cache": {
            "blocks": engine.num_blocks,
            "peak_used": engine.peak_used_blocks,
            "evictions": engine.num_evictions,
            "preemptions": engine.num_preemptions,
            "offloaded": engine.num_offloaded_blocks,
        },
        "series": list(series),
        "settings": dict(settings),
        "versions": dict(versions),
    }


def every_setting(recipe: Recipe, effective: Sequence[Setting]) -> dict[str, dict[str, Any]]:
    """Return name -> value and origin of all settings.

    Args:
        recipe: gives every field, most of them at their defaults.
        effective: what was decided once the model was there; wins over the recipe.
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


def package_versions(own: str) -> dict[str, str]:
    """Return the versions of cbgen, of Python, and of the packages that make the answers."""
    versions = {"cbgen": own, "python": platform.python_version()}
    for package in _PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return versions


def _rates(statistics: JobStatistics) -> dict[str, float]:
    """Return rows and tokens a second since the model was ready."""
    seconds = statistics.run_seconds
    counts = {
        "rows_per_s": statistics.rows_done,
        "prompt_tokens_per_s": statistics.prompt_tokens,
        "completion_tokens_per_s": statistics.completion_tokens,
    }
    return {
        name: round(number / seconds, 3) if seconds > 0 else 0.0 for name, number in counts.items()
    }
