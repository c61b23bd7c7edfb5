"""The runner against plain forward passes, with blocks that nobody holds full of NaN."""

from __future__ import annotations

import random

import pytest
import torch

from cbgen.engine.sampling.params import SamplingParams
from cbgen.engine.step import (
    AdmittedRow,
    BlockCopy,
    BlockSwap,
    NewBlocks,
    ScheduledBatch,
    ScheduledRequest,
)
from tests.helpers.models import HYBRID_MODELS, VOCAB_SIZE, full_logits, tiny_model
from tests.helpers.stepping import Stepper

SDPA_MODELS = ("llama", "mistral", "gemma3", *HYBRID_MODELS)


def sequences(*lengths: int, seed: int = 5) -> list[list[int]]:
    choose = random.Random(seed)
    return [[choose.randrange(1, VOCAB_SIZE) for _ in range(length)] for length in lengths]


def assert_plain(model_name: str, token_ids: list[int], logits: torch.Tensor) -> None:
    wanted = full_logits(tiny_model(model_name), token_ids)[-len(logits) :]
    torch.testing.assert_close(logits.double(), wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("page_size", [1, 4, 64])
@pytest.mark.parametrize(
    ("name", "attention"),
    [(name, "sdpa") for name in SDPA_MODELS]
    + [(name, "eager") for name in (*HYBRID_MODELS, "gemma2", "gpt_oss")],
)
def test_logits_equal_those_of_a_plain_pass_however_sequences_are_cut(name, attention, page_size):
    given = sequences(40, 27, 3, 18)
    stepper = Stepper(
        tiny_model(name),
        given,
        attention=attention,
        page_size=page_size,
        num_blocks=6 * (100 // page_size + 8),
    )
    answers = stepper.run(random.Random(page_size), most_tokens=20)
    for token_ids, logits in zip(given, answers, strict=True):
        assert_plain(name, token_ids, logits)


@pytest.mark.parametrize("name", ["llama", "gemma3_hybrid", "gemma4"])
def test_a_request_may_read_blocks_that_another_one_fills_in_the_same_step(name):
    (first,) = sequences(14)
    second = [*first[:8], *sequences(5, seed=6)[0]]
    stepper = Stepper(tiny_model(name), [first, second], page_size=4)
    stepper.runner.launch(ScheduledBatch(step=0, admitted=admissions(first, second)))
    for number in range(len(stepper.groups)):
        stepper.advance(stepper.tables[0][number], 0, 2)
        stepper.tables[1][number].update(stepper.tables[0][number])
    name_blocks(stepper)
    stepper.computed = [0, 8]
    # The reader comes first in the batch, so the order of the batch cannot be what helps.
    logits = stepper.step({1: 5, 0: 14})
    assert_plain(name, first, logits[0])
    assert_plain(name, second, logits[1])


def admissions(*token_ids: list[int]) -> tuple[AdmittedRow, ...]:
    return tuple(AdmittedRow(row, ids, SamplingParams()) for row, ids in enumerate(token_ids))


def name_blocks(stepper: Stepper) -> None:
    """Tell the runner all blocks that stand in the tables."""
    stepper.runner.launch(
        ScheduledBatch(
            step=0,
            new_blocks=tuple(
                NewBlocks(row, group, logical, (block,))
                for row, tables in enumerate(stepper.tables)
                for group, table in enumerate(tables)
                for logical, block in table.items()
            ),
        )
    )


@pytest.mark.parametrize("name", ["llama", "gemma3_hybrid", "gemma4"])
def test_a_request_goes_on_after_its_blocks_were_swapped_out_and_in(name):
    (token_ids,) = sequences(24)
    stepper = Stepper(tiny_model(name), [token_ids], page_size=4, num_host_blocks=40)
    stepper.step({0: 13})
    held = [block for table in stepper.tables[0] for block in table.values()]
    out = [BlockSwap(block, 39 - place) for place, block in enumerate(held)]
    stepper.runner.launch(ScheduledBatch(step=1, swaps_out=tuple(out)))
    stepper.poison(held)
    moved = dict(zip(held, stepper.free, strict=False))
    stepper.tables[0] = [{at: moved[b] for at, b in t.items()} for t in stepper.tables[0]]
    stepper.free = [block for block in stepper.free if block not in moved.values()]
    name_blocks(stepper)
    back = [BlockSwap(moved[swap.device_block], swap.host_block) for swap in out]
    logits = stepper.step({0: 11}, swaps_in=back)[0]
    assert_plain(name, token_ids, logits)


@pytest.mark.parametrize("name", ["llama", "gemma3_hybrid", "gemma4"])
def test_a_request_goes_on_from_a_copy_of_anothers_last_block(name):
    (first,) = sequences(14)
    second = [*first[:6], *sequences(7, seed=6)[0]]
    stepper = Stepper(tiny_model(name), [first, second], page_size=4)
    stepper.step({0: 6})
    copies = []
    for number in range(len(stepper.groups)):
        table = stepper.tables[0][number]
        own = stepper.free.pop()
        stepper.tables[1][number] = table | {1: own}
        copies.append(BlockCopy(table[1], own, 2))
    stepper.runner.launch(ScheduledBatch(step=1, admitted=admissions(first, second)))
    name_blocks(stepper)
    stepper.computed[1] = 6
    logits = stepper.step({1: 7, 0: 8}, block_copies=copies)
    assert_plain(name, first, logits[0])
    assert_plain(name, second, logits[1])


def test_swaps_out_come_before_copies_and_these_before_swaps_in():
    stepper = Stepper(tiny_model("llama"), [[1]], page_size=4, num_host_blocks=2)
    keys = stepper.storage.layers[0].keys
    keys[0], keys[1] = 5.0, 6.0
    stepper.runner.launch(
        ScheduledBatch(
            step=1,
            swaps_out=(BlockSwap(0, 1),),
            block_copies=(BlockCopy(1, 2, 4),),
            swaps_in=(BlockSwap(1, 1),),
        )
    )
    assert keys[1].unique().tolist() == [5.0]
    assert keys[2].unique().tolist() == [6.0]


def test_state_resets_have_no_owner():
    stepper = Stepper(tiny_model("llama"), [[1]])
    with pytest.raises(NotImplementedError, match="state resets"):
        stepper.runner.launch(ScheduledBatch(step=1, state_resets=(0,)))


class BestAlone:
    """Scores of one row that know its best token, and no logits."""

    def best(self) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.tensor([1.0]), torch.tensor([77])

    def logits(self) -> torch.Tensor:
        raise AssertionError("all logits were asked for")


@pytest.mark.parametrize(
    ("params", "needs_all"),
    [
        (SamplingParams(), False),
        (SamplingParams(logprobs="raw"), True),
        (SamplingParams(temperature=0.5), True),
    ],
)
def test_greedy_rows_need_no_more_than_the_best_token(params, needs_all):
    (token_ids,) = sequences(5)
    stepper = Stepper(tiny_model("llama"), [token_ids])
    stepper.runner._forward = lambda *inputs: BestAlone()
    stepper.runner.launch(ScheduledBatch(step=0, admitted=(AdmittedRow(0, token_ids, params),)))
    stepper.advance(stepper.tables[0][0], 0, 4)
    name_blocks(stepper)
    batch = ScheduledBatch(
        step=1,
        requests=(ScheduledRequest(0, 1, "0", 0, len(token_ids), num_logits=1, num_samples=1),),
        num_tokens=len(token_ids),
    )
    if needs_all:
        with pytest.raises(AssertionError, match="all logits"):
            stepper.runner.launch(batch).result()
    else:
        (sampled,) = stepper.runner.launch(batch).result().samples
        assert sampled.token_ids == (77,)
