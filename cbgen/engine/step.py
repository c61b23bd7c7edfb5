"""All that crosses between scheduler and runner: a ScheduledBatch down, a StepResult back.

    Scheduler.schedule() -> ScheduledBatch -> Runner.launch() -> StepHandle
    StepHandle.result() -> StepResult -> Scheduler.update()

StepHandle is a protocol in core.py; the runner's is DrawnTokens. Batch and result are immutable
and hold no tensors, so a step can be logged, compared in a test, or sent to another rank. Rows are
places in the runner's persistent buffers: a request keeps its row from admission to finish, and a
step names rows instead of repeating what the runner already holds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from cbgen.engine.sampling.params import SamplingParams


class ScheduledRequest(NamedTuple):
    """The part of one request that runs now: tokens [start, start + num_tokens) and drafts."""

    row: int
    admission: int
    """Number of this admission; a result for an older admission of the request is dropped."""
    request_id: str
    start: int
    """Tokens already in the cache, that is the position of the first token of this step."""
    num_tokens: int
    """Known tokens to run, drafts not counted."""
    num_logits: int = 0
    """Positions at the end (drafts included) whose logits are wanted."""
    num_samples: int = 0
    """Positions at the end where a token is sampled: 0 inside a prompt, 1 + drafts at its end."""
    draft_tokens: tuple[int, ...] = ()
    """Guessed continuation to verify in the same forward pass."""


class AdmittedRow(NamedTuple):
    """A request that takes a row: everything that the runner must know of it."""

    row: int
    prompt_ids: Sequence[int]
    params: SamplingParams
    generated_tokens: Sequence[int] = ()
    """What was generated before a preemption."""


class NewBlocks(NamedTuple):
    """Blocks of one group for the block table of a row, from logical block `first` on.

    Groups with a window may begin behind 0 and never name the blocks before: nobody reads them.
    """

    row: int
    group: int
    first: int
    block_ids: tuple[int, ...]


class BlockCopy(NamedTuple):
    """Copy the first `num_tokens` slots of a block into another one, in every layer of its group.

    All copies of a step read before any of them writes.
    """

    source: int
    target: int
    num_tokens: int


class BlockSwap(NamedTuple):
    """Copy a whole block between the device and the host pool; its field says which way."""

    device_block: int
    host_block: int


@dataclass(frozen=True, slots=True)
class ScheduledBatch:
    """One step: what changes in the persistent rows, then what runs.

    The runner applies the fields in the order in which they stand here.
    """

    step: int
    admitted: tuple[AdmittedRow, ...] = ()
    swaps_out: tuple[BlockSwap, ...] = ()
    block_copies: tuple[BlockCopy, ...] = ()
    swaps_in: tuple[BlockSwap, ...] = ()
    state_resets: tuple[int, ...] = ()
    """Rows whose recurrent state starts anew (layers that keep a state instead of keys)."""
    new_blocks: tuple[NewBlocks, ...] = ()
    requests: tuple[ScheduledRequest, ...] = ()
    num_tokens: int = 0
    """Tokens of the forward pass, drafts included."""


class SampledTokens(NamedTuple):
    """What one request got: a token, or with drafts the accepted ones and one more."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...] = ()
    """One value a token, or nothing if the request did not ask."""
    is_finite: bool = True
    """False if the model gave logits that are not numbers; there is no token then."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """What came back: one entry for each scheduled request with `num_samples > 0`, in order."""

    samples: tuple[SampledTokens, ...] = ()
