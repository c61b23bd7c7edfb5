"""From what a caller gives for one request to what the engine runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cbgen.engine.request import Request
from cbgen.engine.sampling.params import SamplingParams
from cbgen.engine.text.detokenizer import Decoder
from cbgen.errors import RowError
from cbgen.generation.resolve import GenerationSettings
from cbgen.manager.outputs import Progress, RequestOutput, StreamText
from cbgen.manager.settings import set_fields
from cbgen.values import show_argument


@dataclass(frozen=True, slots=True)
class PreparedRequest:
    """A request and its samples, ready for the engine, or failed already."""

    samples: tuple[Progress, ...]
    """The request itself first."""

    @property
    def is_over(self) -> bool:
        """Whether it has ended without the engine."""
        return self.samples[0].request.is_finished

    @property
    def ids(self) -> tuple[str, ...]:
        """The ids of its samples."""
        return tuple(sample.request.request_id for sample in self.samples)

    def outputs(self) -> list[RequestOutput]:
        """Return the outputs of a request that ended without the engine."""
        return [sample.finish() for sample in self.samples]


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestForm:
    """What a caller says of a request beside prompt and id."""

    streaming: bool = False
    record_timestamps: bool = False
    fields: Mapping[str, Any]


def sample_ids(request_id: str, num_samples: int) -> list[str]:
    """Return the ids of a request's samples: its own, then `ID__child#0` and so on."""
    return [request_id, *(f"{request_id}__child#{index}" for index in range(num_samples - 1))]


def check_request_id(request_id: object) -> None:
    """Refuse what is no id of a request.

    Raises:
        TypeError: it is no text.
    """
    if not isinstance(request_id, str):
        raise TypeError(
            f"request ids are text, got {show_argument(request_id)}; give str(...) of it"
        )


def prepare(
    request_id: str,
    prompt_ids: list[int],
    form: RequestForm,
    settings: GenerationSettings,
    tokenizer: Decoder | None,
) -> PreparedRequest:
    """Return the engine's requests for one request of a caller.

    A wrong value makes a single request that has failed already.
    """
    skips_special_tokens = True
    try:
        resolved = settings.resolve(request_id, set_fields(form.fields))
        resolved = resolved.for_prompt(len(prompt_ids))
    except RowError as error:
        failed = Request(request_id, prompt_ids, SamplingParams())
        failed.fail(error.code, error.message)
        requests: tuple[Request, ...] = (failed,)
    else:
        skips_special_tokens = resolved.skip_special_tokens
        ids = sample_ids(request_id, len(resolved.samples))
        requests = tuple(
            Request(
                sample_id,
                prompt_ids,
                params,
                parent_id=None if sample_id == request_id else request_id,
            )
            for sample_id, params in zip(ids, resolved.samples, strict=True)
        )
    samples = (_progress(item, form, tokenizer, skips_special_tokens) for item in requests)
    return PreparedRequest(tuple(samples))


def _progress(
    request: Request, form: RequestForm, tokenizer: Decoder | None, skips_special_tokens: bool
) -> Progress:
    text = None
    if tokenizer is not None:
        text = StreamText(request, tokenizer, skip_special_tokens=skips_special_tokens)
    return Progress(
        request,
        is_streaming=form.streaming,
        has_timestamps=form.record_timestamps,
        text=text,
    )


def duplicate_output(request_id: str, prompt_ids: list[int]) -> RequestOutput:
    """Return the output of a request whose id belongs to another one that is unanswered."""
    request = Request(request_id, prompt_ids, SamplingParams())
    request.fail(
        "duplicate_id", f"a request with id {request_id!r} is still unanswered; choose another id"
    )
    return Progress(request, is_streaming=False, has_timestamps=False).finish()
