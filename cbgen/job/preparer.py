"""Records to requests: prompt, tokens, settings, samples.

What is wrong with a row becomes its error. No weights are needed.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from cbgen.engine.model.loader import LoadedModel
from cbgen.engine.plan import EnginePlan
from cbgen.engine.request import Request
from cbgen.errors import RowError
from cbgen.generation.resolve import GenerationSettings, RequestSettings
from cbgen.io.dialects import parse_prompt
from cbgen.io.prompts import Prompt
from cbgen.io.records import Record
from cbgen.io.template import Template
from cbgen.job.rendering import Renderer
from cbgen.job.tokenization import PromptLimit
from cbgen.recipe.schema import Recipe

_ENDS_LIKE_A_SAMPLE = re.compile(r"#[0-9]+\Z")


@dataclass(frozen=True, slots=True)
class PreparedRow:
    """A row on its way: requests for the engine, or the error that it ends with."""

    record: Record
    requests: tuple[Request, ...] = ()
    """One for each sample; they differ in id and seed alone."""
    settings: RequestSettings | None = None
    error: RowError | None = None

    def __post_init__(self) -> None:
        if self.error is not None:
            self.error.forget_frames()


class Preparer:
    """Prepares groups of records.

    Args:
        renderer: turns prompts into tokens.
        generation: resolves each row's generation settings.
        template: the compiled `prompt.template`.
        plan: bounds prompt and answer; says whether requests share prefixes.

    Attributes:
        renderer: as given.
        generation: as given.
    """

    def __init__(
        self,
        *,
        renderer: Renderer,
        generation: GenerationSettings,
        template: Template | None,
        plan: EnginePlan,
    ) -> None:
        self.renderer = renderer
        self.generation = generation
        self._template = template
        self._plan = plan

    def prepare(self, records: Sequence[Record]) -> list[PreparedRow]:
        """Return a prepared row for each record, in order."""
        parsed = [self._parse(record) for record in records]
        accepted = [item for item in parsed if not isinstance(item, RowError)]
        prompt_ids = iter(
            self.renderer.prompt_ids(
                [prompt for prompt, _ in accepted],
                [self._limit(prompt, settings) for prompt, settings in accepted],
            )
        )
        return [
            PreparedRow(record, error=item)
            if isinstance(item, RowError)
            else self._finish(record, item[1], next(prompt_ids))
            for record, item in zip(records, parsed, strict=True)
        ]

    def submission(self, rows: Sequence[PreparedRow]) -> list[Request]:
        """Return the requests of prepared rows in the order in which they shall be submitted.

        The cache shares a common prefix of prompts while a request holds it, or until it is
        evicted. Prompts that share one (a system prompt, the examples of a task) may stand far
        apart in the input. Sorted by their token ids they run one after the other: a prefix is
        computed once, and its blocks are free before those of the next one are needed. The samples
        of a row stay together.
        """
        ready = [row for row in rows if row.requests]
        if self._plan.shares_prefixes:
            ready.sort(key=lambda row: row.requests[0].prompt_ids)
        return [request for row in ready for request in row.requests]

    def _parse(self, record: Record) -> tuple[Prompt, RequestSettings] | RowError:
        """Return all of a row but the tokens of its prompt."""
        try:
            prompt = parse_prompt(record, template=self._template)
            settings = self.generation.resolve(
                str(record.id), prompt.generation_config, logprobs=prompt.logprobs
            )
        except RowError as error:
            return error
        return prompt, settings

    def _finish(
        self, record: Record, settings: RequestSettings, prompt_ids: list[int] | RowError
    ) -> PreparedRow:
        if isinstance(prompt_ids, RowError):
            return PreparedRow(record, error=prompt_ids)
        try:
            settings = settings.for_prompt(len(prompt_ids))
            ids = request_ids(str(record.id), len(settings.samples))
            requests = (
                Request(request_id, prompt_ids, params, tokenizer=self.renderer.tokenizer)
                for request_id, params in zip(ids, settings.samples, strict=True)
            )
            return PreparedRow(record, tuple(requests), settings)
        except RowError as error:
            return PreparedRow(record, error=error)

    def _limit(self, prompt: Prompt, settings: RequestSettings) -> PromptLimit:
        rendering = prompt.rendering
        if rendering is None or rendering.truncate_to is None:
            truncation = self.renderer.config.truncation
            max_tokens = self._max_prompt(settings, truncates=truncation != "error")
            return PromptLimit(max_tokens, truncation)
        max_tokens = self._max_prompt(settings, truncates=True)
        if rendering.truncate_to >= 0:
            max_tokens = min(max_tokens, rendering.truncate_to)
        return PromptLimit(max_tokens, rendering.truncation)

    def _max_prompt(self, settings: RequestSettings, truncates: bool) -> int:
        """Return the tokens that a prompt may have.

        A prompt that is cut anyway is cut so that the whole answer fits beside it; one that is not
        cut may leave the answer as little as one token, and then ends with `length`.
        """
        max_prompt = self.renderer.config.max_length
        if not truncates:  # what the cache cannot hold is the engine's to refuse
            longest = self._plan.max_context - 1
            return longest if max_prompt is None else min(max_prompt, longest)
        max_tokens = min(self._plan.max_context, self._plan.cache.max_tokens + 1)
        if max_prompt is not None:
            return min(max_prompt, max_tokens - 1)
        return max(1, max_tokens - (settings.samples[0].max_new_tokens or 1))


def make_preparer(
    recipe: Recipe, template: Template | None, loaded: LoadedModel, plan: EnginePlan
) -> Preparer:
    """Return what prepares the rows of a run.

    Raises:
        UsageError: recipe and model do not go together.
    """
    mode = recipe.output.logprobs_mode
    return Preparer(
        renderer=Renderer(loaded.tokenizer, recipe.prompt),
        generation=GenerationSettings(
            model=loaded.generation_defaults if recipe.generation_defaults == "model" else {},
            recipe=recipe.generation_config,
            eos_token_ids=loaded.eos_token_ids,
            run_seed=recipe.seed or 0,
            logprobs=mode if recipe.continuous_batching_config.return_logprobs else None,
            logprobs_mode=mode,
        ),
        template=template,
        plan=plan,
    )


def request_ids(row_id: str, num_samples: int) -> list[str]:
    """Return an id for each sample of a row; requests of different rows never share one.

    A single sample has the id of its row, sample i of several has `ID#i`. A row whose own id ends
    in `#` and digits gets a number in any case, so no id of a row is that of another row's sample.
    """
    if num_samples == 1 and _ENDS_LIKE_A_SAMPLE.search(row_id) is None:
        return [row_id]
    return [f"{row_id}#{index}" for index in range(num_samples)]
