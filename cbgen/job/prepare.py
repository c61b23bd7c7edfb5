"""Records to requests: prompt, tokens, settings. What is wrong with a row becomes its error."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cbgen.engine.request import Request
from cbgen.errors import RowError
from cbgen.generation.resolve import GenerationSettings, RequestSettings
from cbgen.io.prompt_shapes import Prompt
from cbgen.io.prompts import parse_prompt
from cbgen.io.reader import Record
from cbgen.io.template import Template
from cbgen.job.rendering import Renderer
from cbgen.job.samples import in_prefix_order, request_ids


@dataclass(frozen=True, slots=True)
class PreparedRow:
    """A row on its way: requests for the engine, or the error that it ends with."""

    record: Record
    requests: tuple[Request, ...] = ()
    """One for each sample; they differ in id and seed alone."""
    settings: RequestSettings | None = None
    error: RowError | None = None


class Preparer:
    """Prepares groups of records.

    Args:
        renderer: turns prompts into tokens.
        settings: resolves each row's generation settings.
        template: the compiled `prompt.template`.
        max_context: tokens that prompt and answer may have together, by the model.
        cache_tokens: tokens that the cache holds; one more may be generated.
        max_prompt: the recipe's bound of a prompt, if it sets one.
        truncates: whether longer prompts are cut.
        shares_prefixes: whether requests with a common prefix shall run side by side.
    """

    def __init__(
        self,
        *,
        renderer: Renderer,
        settings: GenerationSettings,
        template: Template | None,
        max_context: int,
        cache_tokens: int,
        max_prompt: int | None,
        truncates: bool,
        shares_prefixes: bool,
    ) -> None:
        self._renderer = renderer
        self._settings = settings
        self._template = template
        self._max_context = max_context
        self._max_tokens = min(max_context, cache_tokens + 1)
        self._max_prompt = max_prompt
        self._truncates = truncates
        self._shares_prefixes = shares_prefixes

    def prepare(self, records: Sequence[Record]) -> list[PreparedRow]:
        """Return a prepared row for each record, in order."""
        parsed = [self._parse(record) for record in records]
        prompts = [item for item in parsed if isinstance(item, Prompt)]
        token_ids = iter(self._renderer.token_ids(prompts))
        return [
            PreparedRow(record, error=item)
            if isinstance(item, RowError)
            else self._finish(record, item, next(token_ids))
            for record, item in zip(records, parsed, strict=True)
        ]

    def submission(self, rows: Sequence[PreparedRow]) -> list[Request]:
        """Return the requests of prepared rows in the order in which they shall be submitted."""
        if self._shares_prefixes:
            return in_prefix_order(row.requests for row in rows if row.requests)
        return [request for row in rows for request in row.requests]

    def _parse(self, record: Record) -> Prompt | RowError:
        try:
            return parse_prompt(record, template=self._template)
        except RowError as error:
            return error

    def _finish(
        self, record: Record, prompt: Prompt, token_ids: list[int] | RowError
    ) -> PreparedRow:
        try:
            if isinstance(token_ids, RowError):
                raise token_ids
            row_id = str(record.id)
            settings = self._settings.resolve(
                row_id, prompt.generation_config, logprobs=prompt.logprobs
            )
            token_ids = self._cut(token_ids, prompt, settings)
            settings = settings.for_prompt(len(token_ids))
            ids = request_ids(row_id, len(settings.samples))
            requests = (
                Request(request_id, token_ids, params)
                for request_id, params in zip(ids, settings.samples, strict=True)
            )
            return PreparedRow(record, tuple(requests), settings)
        except RowError as error:
            return PreparedRow(record, error=error)

    def _cut(self, token_ids: list[int], prompt: Prompt, settings: RequestSettings) -> list[int]:
        rendering = prompt.rendering
        if rendering is None or rendering.truncate_to is None:
            limit = self._prompt_limit(settings, truncates=self._truncates)
            return self._renderer.truncate(token_ids, limit)
        limit = self._prompt_limit(settings, truncates=True)
        if rendering.truncate_to >= 0:
            limit = min(limit, rendering.truncate_to)
        return self._renderer.truncate(token_ids, limit, rendering.truncation)

    def _prompt_limit(self, settings: RequestSettings, *, truncates: bool) -> int:
        """Return the tokens that a prompt may have.

        A prompt that is cut anyway is cut so that the whole answer fits beside it; one that is not
        cut may leave the answer as little as one token, and then ends with `length`.
        """
        if not truncates:  # what the cache cannot hold is the engine's to refuse
            longest = self._max_context - 1
            return longest if self._max_prompt is None else min(self._max_prompt, longest)
        if self._max_prompt is not None:
            return min(self._max_prompt, self._max_tokens - 1)
        return max(1, self._max_tokens - (settings.samples[0].max_new_tokens or 1))
