"""What callers get of a request: its outputs, or an error where no engine is there to answer it.

Each output of a stream holds a length, not a copy: an answer of n tokens costs n small objects, and
its text is decoded on the thread of whoever reads it, once.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import fields

from cbgen.engine.request import GenerationOutput, Request
from cbgen.engine.sampling.params import SamplingParams
from cbgen.engine.text.detokenizer import TokenDecoder
from cbgen.engine.text.stop_checker import StopChecker
from cbgen.errors import EngineError, UsageError

_FIELDS = tuple(item.name for item in fields(GenerationOutput))
_COPIED_FIELDS = tuple(name for name in _FIELDS if name not in ("generated_tokens", "logprobs"))


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


class StreamText:
    """The text of one stream, cut where its outputs are cut and before a stop string. Thread-safe.

    Text in which a stop string may have begun comes with a later output.
    """

    def __init__(self, request: Request, tokenizer: TokenDecoder) -> None:
        self._token_ids = request.generated_tokens
        self._checker = StopChecker(
            tokenizer,
            request.params.stop_strings,
            skip_special_tokens=request.params.skip_special_tokens,
        )
        self._lock = threading.Lock()
        self._ends: list[int] = []
        self._pieces: list[str] = []
        self._is_complete = False

    def cut(self, end: int, *, is_last: bool) -> int:
        """Note that an output ends behind token `end`; return the number of its piece of text."""
        self._ends.append(end)
        self._is_complete = is_last
        return len(self._ends) - 1

    def piece(self, number: int) -> str:
        """Return the text of one output; the pieces before it are decoded too."""
        with self._lock:
            while len(self._pieces) <= number:
                place = len(self._pieces)
                start = self._ends[place - 1] if place else 0
                new = self._token_ids[start : self._ends[place]]
                is_last = self._is_complete and place == len(self._ends) - 1
                self._pieces.append(self._checker.push(new, is_last=is_last))
            return self._pieces[number]


class RequestOutput(GenerationOutput):
    """A request as it stood after one step: all tokens so far, and those that are new.

    `generated_tokens`, `logprobs` and `timestamps` are cut from the growing lists when they are
    read, so an output that nobody reads in full costs nothing.
    """

    __slots__ = ("_end", "_piece", "_start", "_text", "_tracked")

    def __init__(
        self, output: GenerationOutput, tracked: TrackedRequest, start: int, end: int
    ) -> None:
        for name in _COPIED_FIELDS:
            setattr(self, name, getattr(output, name))
        self._tracked = tracked
        self._start = start
        self._end = end
        self._text: str | None = None  # where it is known already
        self._piece = -1
        if tracked.text is not None:
            self._piece = tracked.text.cut(end, is_last=output.is_finished())

    def __reduce__(self) -> tuple[Callable[..., RequestOutput], tuple[object, ...]]:
        text = self._text if self._tracked.text is None else self.text_delta
        copied = GenerationOutput(**{name: getattr(self, name) for name in _FIELDS})
        return (_restore, (copied, self.timestamps, self._start, text))

    @property
    def generated_tokens(self) -> list[int]:  # type: ignore[override]  # a view in place of a field
        """All tokens so far."""
        return self._tracked.request.generated_tokens[: self._end]

    @property
    def logprobs(self) -> list[float]:  # type: ignore[override]
        """Their log-probabilities, if asked for."""
        return self._tracked.request.logprobs[: self._end]

    @property
    def timestamps(self) -> list[float] | None:
        """When each of them was there, in seconds of `time.perf_counter()`, if asked for."""
        times = self._tracked.timestamps
        return None if times is None else times[: self._end]

    @property
    def new_tokens(self) -> list[int]:
        """The tokens that the output before this one did not have."""
        return self._tracked.request.generated_tokens[self._start : self._end]

    @property
    def text_delta(self) -> str:
        """The text that the output before this one did not have; never half a character.

        Raises:
            UsageError: the manager has no tokenizer.
        """
        if self._text is not None:
            return self._text
        if self._tracked.text is None:
            raise UsageError(
                "text_delta needs a tokenizer; give it to the manager as tokenizer=..., or decode "
                "generated_tokens yourself"
            )
        return self._tracked.text.piece(self._piece)


class TrackedRequest:
    """A request, and how much of it its outputs have shown; the engine's thread makes them.

    Attributes:
        request: the request.
        timestamps: when each of its tokens was there; None if that is not noted.
        text: the text of its outputs, None without a tokenizer.
        is_cancelled: whether a caller has cancelled it.

    Args:
        request: the request.
        is_streaming: make an output after each step that gave tokens, not only at the end.
        has_timestamps: note when each token came.
        text: see above.
    """

    def __init__(
        self,
        request: Request,
        *,
        is_streaming: bool = False,
        has_timestamps: bool = False,
        text: StreamText | None = None,
    ) -> None:
        self.request = request
        self.timestamps: list[float] | None = [] if has_timestamps else None
        self.text = text
        self.is_cancelled = False
        self._is_streaming = is_streaming
        self._num_shown = 0

    @property
    def has_steps(self) -> bool:
        """Whether `advance` has to be called after each step."""
        return self._is_streaming or self.timestamps is not None

    def advance(self) -> RequestOutput | None:
        """Return what a step added, None if it added nothing or the request does not stream."""
        self._note_time()
        end = len(self.request.generated_tokens)
        if not self._is_streaming or end == self._num_shown or self.request.is_finished:
            return None
        return self._output(self.request.output(), end)

    def finish(self, output: GenerationOutput) -> RequestOutput:
        """Return the final output as callers get it."""
        self._note_time()
        return self._output(output, len(self.request.generated_tokens))

    def _output(self, output: GenerationOutput, end: int) -> RequestOutput:
        start, self._num_shown = self._num_shown, end
        return RequestOutput(output, self, start, end)

    def _note_time(self) -> None:
        if self.timestamps is not None:
            num_new = len(self.request.generated_tokens) - len(self.timestamps)
            if num_new:
                self.timestamps.extend([time.perf_counter()] * num_new)


def _restore(
    copied: GenerationOutput, timestamps: list[float] | None, start: int, text: str | None
) -> RequestOutput:
    """Make an output that stands on its own, out of a pickle or a copy."""
    request = Request(copied.request_id, copied.prompt_ids, SamplingParams())
    request.generated_tokens = copied.generated_tokens
    request.logprobs = copied.logprobs
    tracked = TrackedRequest(request)
    tracked.timestamps = timestamps
    restored = RequestOutput(copied, tracked, start, len(copied.generated_tokens))
    restored._text = text
    return restored
