"""From what a caller gives for one request to what the engine runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cbgen.engine.request import Request
from cbgen.engine.sampling.params import SamplingParams
from cbgen.engine.text.detokenizer import TokenDecoder
from cbgen.errors import RowError
from cbgen.generation.resolve import GenerationSettings
from cbgen.manager.configs import set_fields
from cbgen.manager.outputs import RequestOutput, TrackedRequest
from cbgen.values import show_argument


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenRequest:
    """A request as a caller gave it."""

    prompt_ids: list[int]
    request_id: str | None = None
    """None = one is made up."""
    streaming: bool = False
    record_timestamps: bool = False
    fields: Mapping[str, Any]
    """Fields of a generation config, by names that are known."""


def check_request_id(request_id: object) -> None:
    """Refuse what is no id of a request.

    Raises:
        TypeError: it is no text.
    """
    if not isinstance(request_id, str):
        raise TypeError(
            f"request ids are text, got {show_argument(request_id)}; give str(...) of it"
        )


def make_samples(
    given: GivenRequest,
    request_id: str,
    settings: GenerationSettings,
    tokenizer: TokenDecoder | None,
) -> list[TrackedRequest]:
    """Return what the engine runs for a request: itself and its further samples.

    Further samples have the ids `ID__child#0`, `ID__child#1`, ... A wrong value makes a single
    request that has failed already.

    Args:
        given: the request.
        request_id: its id, or the one that was made up for it.
        settings: the settings that requests share.
        tokenizer: for the text of streams and for stop strings.
    """
    try:
        own = settings.resolve(request_id, set_fields(given.fields))
        first, *others = own.for_prompt(len(given.prompt_ids)).samples
    except RowError as error:
        failed = Request(request_id, given.prompt_ids, SamplingParams())
        failed.fail(error.code, error.message)
        requests = [failed]
    else:
        requests = [Request(request_id, given.prompt_ids, first, tokenizer=tokenizer)]
        for index, params in enumerate(others):
            child_id = f"{request_id}__child#{index}"
            requests.append(
                Request(
                    child_id, given.prompt_ids, params, parent_id=request_id, tokenizer=tokenizer
                )
            )
    return [
        TrackedRequest(
            request,
            is_streaming=given.streaming,
            has_timestamps=given.record_timestamps,
            tokenizer=tokenizer,
        )
        for request in requests
    ]


def duplicate_output(request_id: str, prompt_ids: list[int]) -> RequestOutput:
    """Return the output of a request whose id belongs to another one that is unanswered."""
    request = Request(request_id, prompt_ids, SamplingParams())
    request.fail(
        "duplicate_id", f"a request with id {request_id!r} is still unanswered; choose another id"
    )
    return TrackedRequest(request).finish(request.output())
