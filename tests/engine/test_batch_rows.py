"""From a ScheduledBatch to the packed tensors of a forward pass."""

from __future__ import annotations

import pytest
import torch

from cbgen.engine.batch import Rows
from cbgen.engine.cache.groups import LayerFacts
from cbgen.engine.sampling.params import SamplingParams
from cbgen.engine.step import AdmittedRow, BlockCopy, NewBlocks, ScheduledBatch, ScheduledRequest
from cbgen.engine.storage import KVStorage

CPU = torch.device("cpu")


def make_rows(num_rows: int = 4, page_size: int = 4) -> Rows:
    return Rows(num_rows=num_rows, max_blocks=8, page_size=page_size, device=CPU)


def batch_of(*requests: ScheduledRequest) -> ScheduledBatch:
    return ScheduledBatch(
        step=1, requests=requests, num_tokens=sum(item.num_tokens for item in requests)
    )


def scheduled(row: int, start: int, num_tokens: int, num_samples: int = 0) -> ScheduledRequest:
    return ScheduledRequest(row, 1, f"request {row}", start, num_tokens, num_samples, num_samples)


def admit(rows: Rows, row: int, token_ids: list[int], blocks: tuple[int, ...]) -> None:
    rows.admit([AdmittedRow(row, token_ids, SamplingParams())])
    rows.extend_block_tables([NewBlocks(row, 0, blocks)])


def test_tokens_and_positions_of_all_requests_are_packed():
    rows = make_rows()
    admit(rows, 0, [10, 11, 12], (0,))
    admit(rows, 2, [20, 21, 22, 23, 24, 25], (1, 2))
    inputs = rows.gather(batch_of(scheduled(2, 3, 2), scheduled(0, 0, 3, 1)))
    assert inputs.token_ids.tolist() == [[23, 24, 10, 11, 12]]
    assert inputs.position_ids.tolist() == [[3, 4, 0, 1, 2]]


def test_slots_follow_the_block_table():
    rows = make_rows(page_size=4)
    admit(rows, 1, list(range(1, 9)), (5, 3))
    inputs = rows.gather(batch_of(scheduled(1, 2, 4)))
    assert inputs.attention.slot_mapping.tolist() == [22, 23, 12, 13]


def test_logits_are_wanted_at_the_end_of_requests_that_sample():
    rows = make_rows()
    for row in range(3):
        admit(rows, row, [1, 2, 3, 4], (row,))
    inputs = rows.gather(batch_of(scheduled(0, 0, 3), scheduled(1, 0, 4, 1), scheduled(2, 2, 2, 1)))
    assert inputs.logit_indices.tolist() == [6, 8]


def test_attention_learns_where_requests_begin_and_how_long_they_are():
    rows = make_rows()
    admit(rows, 0, [1, 2, 3, 4, 5], (7, 6))
    admit(rows, 1, [1, 2], (0,))
    attention = rows.gather(batch_of(scheduled(0, 3, 2), scheduled(1, 0, 2))).attention
    assert attention.query_starts == [0, 2, 4]
    assert attention.key_lens == [5, 2]
    assert attention.key_blocks[0].tolist() == [7, 6]
    assert attention.key_blocks[1] == slice(0, 1)
    assert (attention.num_requests, attention.query_len(0)) == (2, 2)


def test_a_decoding_request_runs_the_token_sampled_last():
    rows = make_rows()
    admit(rows, 0, [1, 2], (0,))
    admit(rows, 3, [1, 2, 3], (1,))
    rows.store_sampled(torch.tensor([3, 0]), torch.tensor([33, 44]))
    inputs = rows.gather(batch_of(scheduled(0, 2, 1, 1), scheduled(3, 3, 1, 1)))
    assert inputs.token_ids.tolist() == [[44, 33]]


def test_a_row_taken_over_forgets_what_was_there():
    rows = make_rows()
    admit(rows, 0, [1, 2, 3, 4, 5, 6], (4, 5))
    rows.store_sampled(torch.tensor([0]), torch.tensor([99]))
    admit(rows, 0, [7, 8], (2,))
    inputs = rows.gather(batch_of(scheduled(0, 0, 2, 1)))
    assert inputs.token_ids.tolist() == [[7, 8]]
    assert inputs.attention.slot_mapping.tolist() == [8, 9]


def test_new_blocks_are_appended_to_a_block_table():
    rows = make_rows()
    admit(rows, 0, [1, 2, 3, 4], (6,))
    rows.extend_block_tables([NewBlocks(0, 1, (2,))])
    rows.store_sampled(torch.tensor([0]), torch.tensor([9]))
    inputs = rows.gather(batch_of(scheduled(0, 4, 1, 1)))
    assert inputs.attention.slot_mapping.tolist() == [8]


def test_blocks_side_by_side_are_handed_over_as_a_slice_of_those_in_use():
    rows = make_rows()
    admit(rows, 0, list(range(1, 12)), (4, 5, 6))
    assert rows.gather(batch_of(scheduled(0, 0, 7))).attention.key_blocks == [slice(4, 6)]
    assert rows.gather(batch_of(scheduled(0, 7, 4, 1))).attention.key_blocks == [slice(4, 7)]


@pytest.mark.parametrize(("next_block", "is_slice"), [(6, True), (7, False), (3, False)])
def test_a_new_block_may_end_the_row_of_blocks(next_block, is_slice):
    rows = make_rows()
    admit(rows, 0, [1, 2, 3, 4, 5, 6, 7, 8], (4, 5))
    rows.extend_block_tables([NewBlocks(0, 2, (next_block,))])
    (blocks,) = rows.gather(batch_of(scheduled(0, 8, 1, 1))).attention.key_blocks
    if is_slice:
        assert blocks == slice(4, 7)
    else:
        assert blocks.tolist() == [4, 5, next_block]


def test_a_row_taken_over_may_have_blocks_side_by_side_again():
    rows = make_rows()
    admit(rows, 0, [1, 2, 3, 4, 5], (7, 2))
    admit(rows, 0, [1, 2, 3, 4, 5], (2, 3))
    assert rows.gather(batch_of(scheduled(0, 0, 5, 1))).attention.key_blocks == [slice(2, 4)]


def test_the_tensors_of_a_step_are_its_own():
    rows = make_rows()
    admit(rows, 0, [1, 2], (0,))
    first = rows.gather(batch_of(scheduled(0, 0, 2, 1)))
    admit(rows, 0, [8, 9], (3,))
    assert first.token_ids.tolist() == [[1, 2]]
    assert first.attention.block_tables[0, 0] == 0


@pytest.fixture
def storage() -> KVStorage:
    layers = [LayerFacts(index, 2, 1, 3, 2) for index in (0, 1)]
    storage = KVStorage(layers, num_blocks=3, page_size=4, dtype=torch.float32, device=CPU)
    for index in (0, 1):
        storage.layer(index).keys.fill_(0.0)[1] = 1.0 + index
        storage.layer(index).values.fill_(0.0)[1] = 5.0 + index
    return storage


def test_pages_have_the_shapes_of_their_layer(storage):
    assert storage.layer(0).keys.shape == (3, 4, 1, 3)
    assert storage.layer(1).values.shape == (3, 4, 1, 2)


def test_a_block_copy_copies_the_first_slots_in_every_layer(storage):
    storage.copy_blocks([BlockCopy(source=1, target=2, num_tokens=3)])
    for index in (0, 1):
        assert storage.layer(index).keys[2, :, 0, 0].tolist() == [1.0 + index] * 3 + [0.0]
        assert storage.layer(index).values[2, :, 0, 0].tolist() == [5.0 + index] * 3 + [0.0]


def test_what_is_written_lands_in_its_slots(storage):
    layer = storage.layer(0)
    layer.write(torch.full((2, 1, 3), 8.0), torch.full((2, 1, 2), 9.0), torch.tensor([11, 2]))
    assert layer.keys[2, 3, 0].tolist() == [8.0] * 3
    assert layer.values[0, 2, 0].tolist() == [9.0] * 2
