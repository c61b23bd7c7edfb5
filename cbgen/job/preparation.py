"""What turns records into requests, put together for a recipe and a model; weights play no part."""

from __future__ import annotations

from dataclasses import dataclass

from cbgen.engine.model.load import LoadedModel
from cbgen.engine.plan import EnginePlan
from cbgen.generation.resolve import GenerationSettings
from cbgen.io.template import Template
from cbgen.job.prepare import Preparer
from cbgen.job.rendering import Renderer
from cbgen.recipe.schema import Recipe


@dataclass(frozen=True, slots=True)
class Preparation:
    """A preparer and its parts."""

    preparer: Preparer
    renderer: Renderer
    generation: GenerationSettings
    dtype_reason: str
    """Why the model computes in its dtype."""


def make_preparation(
    recipe: Recipe, template: Template | None, loaded: LoadedModel, plan: EnginePlan
) -> Preparation:
    """Return what prepares the rows of a run.

    Raises:
        UsageError: recipe and model do not go together.
    """
    mode = recipe.output.logprobs_mode
    renderer = Renderer(loaded.tokenizer, recipe.prompt)
    generation = GenerationSettings(
        model=loaded.generation_defaults if recipe.generation_defaults == "model" else {},
        recipe=recipe.generation_config,
        eos_token_ids=loaded.eos_token_ids,
        run_seed=recipe.continuous_batching_config.seed or 0,
        logprobs=mode if recipe.continuous_batching_config.return_logprobs else None,
        logprobs_mode=mode,
    )
    preparer = Preparer(
        renderer=renderer,
        settings=generation,
        template=template,
        max_context=plan.max_context,
        cache_tokens=plan.cache_tokens,
        max_prompt=recipe.prompt.max_length,
        truncates=recipe.prompt.truncation != "error",
        shares_prefixes=recipe.continuous_batching_config.allow_block_sharing,
    )
    return Preparation(preparer, renderer, generation, loaded.dtype_reason)
