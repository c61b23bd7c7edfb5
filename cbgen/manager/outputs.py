"""What callers get of a request: its outputs, or an error where no engine is there to answer it.

Each output of a stream holds a length, not a copy: an answer of n tokens costs n small objects, and
its text is decoded on the thread of whoever reads it, once.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields

from cbgen.engine.request import GenerationOutput, Request
from cbgen.engine.sampling.params import SamplingParams
from cbgen.engine.text import StopChecker, TokenDecoder
from cbgen.errors import EngineError, UsageError

_FIELDS = tuple(item.name for item in fields(GenerationOutput))


class ManagerStopped(EngineError, RuntimeError):
    """The manager takes no requests: it was stopped, or has been destroyed."""


class EngineDied(EngineError, RuntimeError):
    """The engine failed while requests were waiting for it; the cause is attached.

    Attributes:
        outputs: requests that had been answered and not been fetched before, by id.
    """

    def __init__(self, message: str, outputs: Mapping[str, RequestOutput] | None = None) -> None:
        super().__init__(message)
        self.outputs: dict[str, RequestOutput] = dict(outputs or {})


class RequestOutput(GenerationOutput):
    """A request as it stood after one step: all tokens so far, and those that are new.

    `generated_tokens`, `logprobs` and `timestamps` are cut from the growing lists when they are
    read, so an output that nobody reads in full costs nothing.
    """

    __slots__ = ("_number", "_tracked")

    def __init__(self, output: GenerationOutput, tracked: TrackedRequest, number: int) -> None:
        self.request_id = output.request_id
        self.prompt_ids = output.prompt_ids
        self.status = output.status
        self.finish_reason = output.finish_reason
        self.stop_string = output.stop_string
        self.error = output.error
        self.error_code = output.error_code
        self.created_time = output.created_time
        self.lifespan = output.lifespan
        self._tracked = tracked
        self._number = number

    def __reduce__(self) -> tuple[Callable[..., RequestOutput], tuple[object, ...]]:
        copied = GenerationOutput(**{name: getattr(self, name) for name in _FIELDS})
        text = self.text_delta if self._tracked.has_text else None
        return (_restore, (copied, self.timestamps, len(self.new_tokens), text))

    @property
    def generated_tokens(self) -> list[int]:  # type: ignore[override]  # a view in place of a field
        """All tokens so far."""
        return self._tracked.generated_tokens[: self._tracked.ends[self._number]]

    @property
    def logprobs(self) -> list[float]:  # type: ignore[override]
        """Their log-probabilities, if asked for."""
        return self._tracked.logprobs[: self._tracked.ends[self._number]]

    @property
    def timestamps(self) -> list[float] | None:
        """When each of them was there, in seconds of `time.perf_counter()`, if asked for."""
        times = self._tracked.timestamps
        return None if times is None else times[: self._tracked.ends[self._number]]

    @property
    def new_tokens(self) -> list[int]:
        """The tokens that the output before this one did not have."""
        return self._tracked.new_tokens(self._number)

    @property
    def text_delta(self) -> str:
        """The text that the output before this one did not have; never half a character.

        Raises:
            UsageError: the manager has no tokenizer.
        """
        if not self._tracked.has_text:
            raise UsageError(
                "text_delta needs a tokenizer; give it to the manager as tokenizer=..., or decode "
                "generated_tokens yourself"
            )
        return self._tracked.piece(self._number, is_last=self.is_finished())


class TrackedRequest(Request):
    """A request, and how much of it its outputs have shown; the engine's thread makes them.

    Attributes:
        timestamps: when each of its tokens was there; None if that is not noted.
        ends: for each output the number of tokens before its end.
        is_cancelled: whether a caller has cancelled it.

    Args:
        request_id: as of any request; so are the arguments not named here.
        prompt_ids: see there.
        params: see there.
        parent_id: see there.
        tokenizer: decodes the text of its outputs too.
        is_streaming: make an output after each step that gave tokens, not only at the end.
        has_timestamps: note when each token came.
    """

    def __init__(
        self,
        request_id: str,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        *,
        parent_id: str | None = None,
        tokenizer: TokenDecoder | None = None,
        is_streaming: bool = False,
        has_timestamps: bool = False,
    ) -> None:
        super().__init__(
            request_id, list(prompt_ids), params, parent_id=parent_id, tokenizer=tokenizer
        )
        self.timestamps: list[float] | None = [] if has_timestamps else None
        self.ends: list[int] = []
        self.is_cancelled = False
        self._is_streaming = is_streaming
        self._tokenizer = tokenizer
        self._text_lock = threading.Lock()
        self._checker: StopChecker | None = None
        self._pieces: list[str] = []  # the text of the first outputs

    @property
    def has_steps(self) -> bool:
        """Whether `advance` has to be called after each step."""
        return self._is_streaming or self.timestamps is not None

    @property
    def has_text(self) -> bool:
        """Whether the text of its outputs can be known."""
        return self._tokenizer is not None or bool(self._pieces)

    def advance(self) -> RequestOutput | None:
        """Return what a step added, None if it added nothing or the request does not stream."""
        self._note_time()
        num_shown = self.ends[-1] if self.ends else 0
        is_new = len(self.generated_tokens) > num_shown
        if not self._is_streaming or not is_new or self.is_finished:
            return None
        return self._next_output()

    def final_output(self) -> RequestOutput:
        """Return the final output, once the request has ended."""
        self._note_time()
        return self._next_output()

    def new_tokens(self, number: int) -> list[int]:
        """Return the tokens of one output that those before it did not have."""
        start = self.ends[number - 1] if number else 0
        return self.generated_tokens[start : self.ends[number]]

    def piece(self, number: int, *, is_last: bool) -> str:
        """Return the text of one output, before a stop string; the pieces before it are decoded.

        Text in which a stop string may have begun comes with a later output. Thread-safe.
        """
        with self._text_lock:
            while len(self._pieces) <= number:
                place = len(self._pieces)
                ends = is_last and place == number
                self._pieces.append(self._stop_checker().push(self.new_tokens(place), is_last=ends))
            return self._pieces[number]

    def _next_output(self) -> RequestOutput:
        self.ends.append(len(self.generated_tokens))
        return RequestOutput(self.output(), self, len(self.ends) - 1)

    def _note_time(self) -> None:
        if self.timestamps is not None:
            num_new = len(self.generated_tokens) - len(self.timestamps)
            self.timestamps.extend([time.perf_counter()] * num_new)

    def _stop_checker(self) -> StopChecker:
        if self._checker is None:
            assert self._tokenizer is not None, "has_text was asked"
            self._checker = StopChecker(
                self._tokenizer,
                self.params.stop_strings,
                skip_special_tokens=self.params.skip_special_tokens,
            )
        return self._checker


def _restore(
    copied: GenerationOutput, timestamps: list[float] | None, num_new: int, text: str | None
) -> RequestOutput:
    """Make an output that stands on its own, out of a pickle or a copy."""
    tracked = TrackedRequest(copied.request_id, copied.prompt_ids, SamplingParams())
    tracked.generated_tokens = copied.generated_tokens
    tracked.logprobs = copied.logprobs
    tracked.timestamps = timestamps
    num_tokens = len(copied.generated_tokens)
    tracked.ends = [num_tokens - num_new, num_tokens]
    if text is not None:
        tracked._pieces = ["", text]
    return RequestOutput(copied, tracked, 1)
