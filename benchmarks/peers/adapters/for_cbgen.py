"""cbgen: the engine that `cbgen run` and `cbgen bench` build for a recipe.

Options are the sections `model` (without its path) and `continuous_batching_config` of a recipe.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from itertools import count

from job import Job, Request, perform

from cbgen.engine.build import build_engine
from cbgen.engine.loop import EngineLoop
from cbgen.engine.model.attach import attached
from cbgen.engine.model.loader import load_model
from cbgen.engine.request import FinishReason, GenerationOutput
from cbgen.engine.request import Request as EngineRequest
from cbgen.engine.sampling.params import SamplingParams
from cbgen.job.channel import Channel
from cbgen.job.gc_pauses import gc_ignores_existing_objects
from cbgen.recipe.load import recipe_from_mapping


class Running:
    """A loaded model with its engine's thread."""

    def __init__(self, job: Job, resources: ExitStack) -> None:
        recipe = recipe_from_mapping(
            {
                "model": {**job.options["model"], "path": job.model},
                "continuous_batching_config": job.options["continuous_batching_config"],
            }
        )
        loaded = load_model(recipe.model)
        resources.enter_context(attached(loaded.model))
        built = build_engine(
            loaded.model, recipe.continuous_batching_config, recipe.model.attn_implementation
        )
        self._answers: Channel[GenerationOutput] = Channel()
        self._loop = EngineLoop(built.engine, self._answers)
        self._loop.start()
        resources.callback(self._loop.stop, hard_stop=True)
        resources.enter_context(gc_ignores_existing_objects())
        self._ids = map(str, count())

    def generate(self, requests: Sequence[Request]) -> list[list[int]]:
        submitted = [
            EngineRequest(
                next(self._ids),
                request.prompt,
                SamplingParams(max_new_tokens=request.max_new_tokens),
            )
            for request in requests
        ]
        self._loop.submit(submitted)
        outputs: dict[str, GenerationOutput] = {}
        while len(outputs) < len(submitted):
            outputs.update((output.request_id, output) for output in self._answers.take())
        for output in outputs.values():
            if output.finish_reason is not FinishReason.LENGTH:
                raise RuntimeError(f"a request ended with {output.finish_reason}: {output.error}")
        return [outputs[request.request_id].generated_tokens for request in submitted]


if __name__ == "__main__":
    with ExitStack() as resources:
        perform(
            {"model": {}, "continuous_batching_config": {}},
            lambda job: Running(job, resources),
            Running.generate,
        )
