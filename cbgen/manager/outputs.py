"""What callers get of a request: all of it so far as a view, and what is new.

Each output of a stream holds a length, not a copy: an answer of n tokens costs n small objects, and
its text is decoded on the thread of whoever reads it, once.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping

from cbgen.engine.request import GenerationOutput, Request
from cbgen.engine.sampling.params import SamplingParams
from cbgen.engine.text.detokenizer import Decoder, IncrementalDetokenizer
from cbgen.errors import EngineError, UsageError


class StreamText:
    """The text of one stream, cut where its outputs are cut. Thread-safe."""

    def __init__(self, request: Request, tokenizer: Decoder, *, skip_special_tokens: bool) -> None:
        self._token_ids = request.generated_tokens
        self._detokenizer = IncrementalDetokenizer(
            tokenizer, skip_special_tokens=skip_special_tokens
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
                text = self._detokenizer.push(self._token_ids[start : self._ends[place]])
                if self._is_complete and place == len(self._ends) - 1:
                    text += self._detokenizer.finish()
                self._pieces.append(text)
            return self._pieces[number]


class FixedText:
    """The text of one output on its own, as it is after a pickle or a copy."""

    def __init__(self, text: str) -> None:
        self._text = text

    def cut(self, end: int, *, is_last: bool) -> int:
        """Return the number of the only piece."""
        return 0

    def piece(self, number: int) -> str:
        """Return the text."""
        return self._text


class RequestOutput(GenerationOutput):
    """A request as it stood after one step: all tokens so far, and those that are new.

    `generated_tokens`, `logprobs` and `timestamps` are cut from the growing lists when they are
    read, so an output that nobody reads in full costs nothing.
    """

    __slots__ = ("_end", "_piece", "_progress", "_start")

    def __init__(self, output: GenerationOutput, progress: Progress, start: int, end: int) -> None:
        self._progress = progress
        self._start = start
        self._end = end
        self._piece = -1
        if progress.text is not None:
            self._piece = progress.text.cut(end, is_last=output.is_finished())
        self.request_id = output.request_id
        self.prompt_ids = output.prompt_ids
        self.status = output.status
        self.finish_reason = output.finish_reason
        self.error = output.error
        self.error_code = output.error_code
        self.created_time = output.created_time
        self.lifespan = output.lifespan

    def __reduce__(self) -> tuple[Callable[..., RequestOutput], tuple[object, ...]]:
        text = None if self._progress.text is None else self.text_delta
        own = GenerationOutput(
            request_id=self.request_id,
            prompt_ids=self.prompt_ids,
            generated_tokens=self.generated_tokens,
            logprobs=self.logprobs,
            status=self.status,
            finish_reason=self.finish_reason,
            error=self.error,
            error_code=self.error_code,
            created_time=self.created_time,
            lifespan=self.lifespan,
        )
        return (_restore, (own, self.timestamps, self._start, text))

    @property
    def generated_tokens(self) -> list[int]:  # type: ignore[override]  # a view in place of a field
        """All tokens so far."""
        return self._progress.request.generated_tokens[: self._end]

    @property
    def logprobs(self) -> list[float]:  # type: ignore[override]
        """Their log-probabilities, if asked for."""
        return self._progress.request.logprobs[: self._end]

    @property
    def timestamps(self) -> list[float] | None:
        """When each of them was there, in seconds of `time.perf_counter()`, if asked for."""
        times = self._progress.timestamps
        return None if times is None else times[: self._end]

    @property
    def new_tokens(self) -> list[int]:
        """The tokens that the output before this one did not have."""
        return self._progress.request.generated_tokens[self._start : self._end]

    @property
    def text_delta(self) -> str:
        """The text that the output before this one did not have; never half a character.

        Raises:
            UsageError: the manager has no tokenizer.
        """
        if self._progress.text is None:
            raise UsageError(
                "text_delta needs a tokenizer; give it to the manager as tokenizer=..., or decode "
                "generated_tokens yourself"
            )
        return self._progress.text.piece(self._piece)


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


class Progress:
    """Follows one request and makes its outputs, on the engine's thread once it runs.

    Args:
        request: the request.
        is_streaming: make an output after each step that gave tokens, not only at the end.
        has_timestamps: note when each token came.
        text: the text of the stream, None without a tokenizer.
    """

    def __init__(
        self,
        request: Request,
        *,
        is_streaming: bool,
        has_timestamps: bool,
        text: StreamText | FixedText | None = None,
    ) -> None:
        self.request = request
        self.timestamps: list[float] | None = [] if has_timestamps else None
        self.text = text
        self._is_streaming = is_streaming
        self._num_sent = 0

    @property
    def has_steps(self) -> bool:
        """Whether `advance` has to be called after each step."""
        return self._is_streaming or self.timestamps is not None

    def advance(self) -> RequestOutput | None:
        """Return what a step added, None if it added nothing or the request streams nothing."""
        self._note_time()
        end = len(self.request.generated_tokens)
        if not self._is_streaming or end == self._num_sent or self.request.is_finished:
            return None
        return self._output(self.request.output(), end)

    def finish(self, output: GenerationOutput | None = None) -> RequestOutput:
        """Return the final output: that of the engine, None for a request that it did not have."""
        output = self.request.output() if output is None else output
        self._note_time()
        return self._output(output, len(self.request.generated_tokens))

    def _output(self, output: GenerationOutput, end: int) -> RequestOutput:
        start, self._num_sent = self._num_sent, end
        return RequestOutput(output, self, start, end)

    def _note_time(self) -> None:
        if self.timestamps is not None:
            num_new = len(self.request.generated_tokens) - len(self.timestamps)
            if num_new:
                self.timestamps.extend([time.perf_counter()] * num_new)


def _restore(
    output: GenerationOutput, timestamps: list[float] | None, start: int, text: str | None
) -> RequestOutput:
    """Make an output that stands on its own."""
    request = Request(output.request_id, output.prompt_ids, SamplingParams())
    request.generated_tokens = output.generated_tokens
    request.logprobs = output.logprobs
    progress = Progress(
        request,
        is_streaming=False,
        has_timestamps=False,
        text=None if text is None else FixedText(text),
    )
    progress.timestamps = timestamps
    return RequestOutput(output, progress, start, len(output.generated_tokens))
