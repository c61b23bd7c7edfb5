"""Engine outputs to output rows: text, reasons, log-probabilities."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from cbgen.engine.request import FinishReason, GenerationOutput, RequestStatus
from cbgen.engine.text import cut_text
from cbgen.errors import RowError
from cbgen.generation.resolve import RequestSettings
from cbgen.io.openai.responses import CANCELLED, BatchLines
from cbgen.io.records import Record
from cbgen.io.rows import Answer, OutputRows, Sample, logprobs_object


class AnswerBuilder:
    """Builds the output row of a record from what the engine gave.

    Args:
        tokenizer: None for a model without one; rows then have token ids and no text.
        rows: lays out the rows of records without a dialect.
        lines: lays out those of lines of batch files.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase | None, *, rows: OutputRows, lines: BatchLines
    ) -> None:
        self._tokenizer = tokenizer
        self._rows = rows
        self._lines = lines

    def failure(self, record: Record, error: RowError) -> dict[str, Any]:
        """Return the row of a record that could not be answered."""
        return self._layout(record).failure(record, error)

    def answer(
        self, record: Record, outputs: Sequence[GenerationOutput], settings: RequestSettings
    ) -> dict[str, Any]:
        """Return the row of an answered record.

        Args:
            record: the record.
            outputs: one for each sample, in their order.
            settings: how it was to be answered.

        Raises:
            RowError: a request failed in the engine; of several the first sample's error counts.
        """
        for output in outputs:
            if output.status is RequestStatus.FAILED:
                raise _failure_of(output)
        is_cut_short = any(output.status is RequestStatus.CANCELLED for output in outputs)
        if is_cut_short and record.dialect is not None:
            raise RowError(CANCELLED, "the run ended before the answer did", type="engine_error")
        samples = [self._sample(output, settings) for output in outputs]
        return self._layout(record).answer(record, Answer(outputs[0].prompt_ids, samples))

    def _layout(self, record: Record) -> OutputRows | BatchLines:
        return self._rows if record.dialect is None else self._lines

    def _sample(self, output: GenerationOutput, settings: RequestSettings) -> Sample:
        assert output.finish_reason is not None, "an answered request has ended"
        return Sample(
            text=self._text(output, settings),
            finish_reason=output.finish_reason.value,
            stop_reason=_stop_reason(output, settings),
            logprobs=self._logprobs(output) if settings.samples[0].logprobs is not None else None,
            generated_tokens=output.generated_tokens,
        )

    def _text(self, output: GenerationOutput, settings: RequestSettings) -> str | None:
        if self._tokenizer is None:
            return None
        text = self._tokenizer.decode(
            output.generated_tokens,
            skip_special_tokens=settings.samples[0].skip_special_tokens,
        )
        assert isinstance(text, str), "one list of ids decodes to one string"
        return cut_text(text, output.stop_string)

    def _logprobs(self, output: GenerationOutput) -> dict[str, Any]:
        tokens = [""] * len(output.generated_tokens)
        if self._tokenizer is not None:
            tokens = self._tokenizer.batch_decode([[token] for token in output.generated_tokens])
        return logprobs_object(
            tokens=tokens, token_ids=output.generated_tokens, logprobs=output.logprobs
        )


def _failure_of(output: GenerationOutput) -> RowError:
    assert output.error is not None, "a failed request says why"
    code = output.error_code or "engine_error"
    is_engines = code in ("engine_error", "non_finite_logits")  # no fault of the request
    return RowError(code, output.error, type="engine_error" if is_engines else "invalid_request")


def _stop_reason(output: GenerationOutput, settings: RequestSettings) -> int | str | None:
    """Return the stop string or token that ended an answer, None for an end of sequence."""
    if output.finish_reason is not FinishReason.STOP or output.stop_string is not None:
        return output.stop_string
    last = output.generated_tokens[-1]
    return None if last in settings.eos_token_ids else last
