"""From a ScheduledBatch to the packed tensors of a forward pass."""

from __future__ import annotations

import random

import pytest
import torch

from cbgen.engine.attention.metadata import AttentionMetadata
from cbgen.engine.batch import Rows
from cbgen.engine.cache.groups import AttentionSpan
from cbgen.engine.sampling.params import SamplingParams
from cbgen.engine.step import AdmittedRow, NewBlocks, ScheduledBatch, ScheduledRequest
from tests.helpers.engine import make_shape

CPU = torch.device("cpu")
FULL = AttentionSpan()
WINDOW = AttentionSpan(window=6)


def make_rows(
    *spans: AttentionSpan, num_rows: int = 4, page_size: int = 4, max_blocks: int = 8
) -> Rows:
    shape = make_shape(1000, page_size, spans=spans or (FULL,))
    return Rows(shape, num_rows, table_blocks=max_blocks, device=CPU)


def attention_of(rows: Rows, *requests: ScheduledRequest) -> AttentionMetadata:
    """Return what a step of these requests gives the one layer group."""
    (attention,) = rows.gather(batch_of(*requests)).attention
    return attention


def batch_of(*requests: ScheduledRequest) -> ScheduledBatch:
    return ScheduledBatch(
        step=1, requests=requests, num_tokens=sum(item.num_tokens for item in requests)
    )


def scheduled(row: int, start: int, num_tokens: int, num_samples: int = 0) -> ScheduledRequest:
    return ScheduledRequest(row, 1, f"request {row}", start, num_tokens, num_samples, num_samples)


def admit(rows: Rows, row: int, token_ids: list[int], blocks: tuple[int, ...]) -> None:
    rows.admit([AdmittedRow(row, token_ids, SamplingParams())])
    rows.extend_block_tables([NewBlocks(row, 0, 0, blocks)])


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
    attention = attention_of(rows, scheduled(1, 2, 4))
    assert attention.slot_mapping.tolist() == [22, 23, 12, 13]


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
    attention = attention_of(rows, scheduled(0, 3, 2), scheduled(1, 0, 2))
    assert attention.query_starts == [0, 2, 4]
    assert attention.key_lens == [5, 2]
    assert attention.key_blocks[0].tolist() == [7, 6]
    assert attention.key_blocks[1] == slice(0, 1)
    assert attention.first_keys == [0, 0]
    assert attention.num_requests == 2


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
    assert inputs.attention[0].slot_mapping.tolist() == [8, 9]


def test_new_blocks_are_appended_to_a_block_table():
    rows = make_rows()
    admit(rows, 0, [1, 2, 3, 4], (6,))
    rows.extend_block_tables([NewBlocks(0, 0, 1, (2,))])
    assert attention_of(rows, scheduled(0, 4, 1, 1)).slot_mapping.tolist() == [8]


def test_blocks_side_by_side_are_handed_over_as_a_slice_of_those_in_use():
    rows = make_rows()
    admit(rows, 0, list(range(1, 12)), (4, 5, 6))
    assert attention_of(rows, scheduled(0, 0, 7)).key_blocks == [slice(4, 6)]
    assert attention_of(rows, scheduled(0, 7, 4, 1)).key_blocks == [slice(4, 7)]


@pytest.mark.parametrize(("next_block", "is_slice"), [(6, True), (7, False), (3, False)])
def test_a_new_block_may_end_the_row_of_blocks(next_block, is_slice):
    rows = make_rows()
    admit(rows, 0, [1, 2, 3, 4, 5, 6, 7, 8], (4, 5))
    rows.extend_block_tables([NewBlocks(0, 0, 2, (next_block,))])
    (blocks,) = attention_of(rows, scheduled(0, 8, 1, 1)).key_blocks
    if is_slice:
        assert blocks == slice(4, 7)
    else:
        assert blocks.tolist() == [4, 5, next_block]


def test_a_row_taken_over_may_have_blocks_side_by_side_again():
    rows = make_rows()
    admit(rows, 0, [1, 2, 3, 4, 5], (7, 2))
    admit(rows, 0, [1, 2, 3, 4, 5], (2, 3))
    assert attention_of(rows, scheduled(0, 0, 5, 1)).key_blocks == [slice(2, 4)]


def test_the_tensors_of_a_step_are_its_own():
    rows = make_rows()
    admit(rows, 0, [1, 2], (0,))
    first = rows.gather(batch_of(scheduled(0, 0, 2, 1)))
    admit(rows, 0, [8, 9], (3,))
    assert first.token_ids.tolist() == [[1, 2]]
    assert first.attention[0].block_tables[0, 0] == 0
    assert first.attention[0].slot_mapping.tolist() == [0, 1]


def test_rows_that_sample_are_told_in_order():
    rows = make_rows()
    for row in range(3):
        admit(rows, row, [1, 2, 3, 4], (row,))
    inputs = rows.gather(batch_of(scheduled(2, 0, 4, 1), scheduled(0, 0, 2), scheduled(1, 0, 4, 1)))
    assert inputs.sampled_rows.tolist() == [2, 1]


def test_each_group_has_block_tables_of_its_own():
    rows = make_rows(FULL, WINDOW)
    admit(rows, 0, list(range(1, 8)), (5, 3))
    rows.extend_block_tables([NewBlocks(0, 1, 0, (2, 7))])
    full, window = rows.gather(batch_of(scheduled(0, 2, 4))).attention
    assert (full.span, window.span) == (FULL, WINDOW)
    assert full.slot_mapping.tolist() == [22, 23, 12, 13]
    assert window.slot_mapping.tolist() == [10, 11, 28, 29]
    assert full.block_tables.tolist() == [[5, 3]]
    assert window.block_tables.tolist() == [[2, 7]]


def test_a_window_hands_out_the_blocks_from_its_first_key_on():
    rows = make_rows(WINDOW)
    admit(rows, 0, list(range(1, 16)), (7, 2, 5, 1))
    # Position 10 sees keys from 5 on, and 5 is in the second block.
    attention = attention_of(rows, scheduled(0, 10, 5))
    assert attention.key_blocks[0].tolist() == [2, 5, 1]
    assert attention.first_keys == [5]


def test_the_first_query_of_a_step_decides_what_a_chunked_group_hands_out():
    rows = make_rows(AttentionSpan(chunk=8))
    admit(rows, 0, list(range(1, 30)), (7, 2, 5, 1, 6))
    assert attention_of(rows, scheduled(0, 14, 3)).key_blocks[0].tolist() == [5, 1, 6]
    assert attention_of(rows, scheduled(0, 16, 3)).key_blocks == [slice(6, 7)]


def test_blocks_before_a_window_need_not_be_named():
    rows = make_rows(WINDOW)
    rows.admit([AdmittedRow(0, list(range(1, 21)), SamplingParams())])
    rows.extend_block_tables([NewBlocks(0, 0, 3, (6, 2))])
    attention = attention_of(rows, scheduled(0, 17, 3))
    assert attention.first_keys[0] // 4 == 3
    assert attention.key_blocks[0].tolist() == [6, 2]
    assert attention.slot_mapping.tolist() == [9, 10, 11]


def test_blocks_side_by_side_behind_a_gap_are_a_slice():
    rows = make_rows(WINDOW)
    rows.admit([AdmittedRow(0, list(range(1, 21)), SamplingParams())])
    rows.extend_block_tables([NewBlocks(0, 0, 3, (6, 7))])
    assert attention_of(rows, scheduled(0, 17, 3)).key_blocks == [slice(6, 8)]


def test_a_window_that_has_left_a_stray_block_behind_reads_a_slice_again():
    rows = make_rows(WINDOW)
    admit(rows, 0, list(range(1, 21)), (3, 9, 6, 7, 8))
    assert attention_of(rows, scheduled(0, 10, 2)).key_blocks[0].tolist() == [9, 6]
    assert attention_of(rows, scheduled(0, 13, 4)).key_blocks == [slice(6, 9)]


def test_a_block_replaced_in_the_middle_is_handed_out():
    rows = make_rows()
    admit(rows, 0, list(range(1, 17)), (3, 4, 5, 6))
    rows.extend_block_tables([NewBlocks(0, 0, 1, (9,))])
    assert attention_of(rows, scheduled(0, 12, 4)).key_blocks[0].tolist() == [3, 9, 5, 6]


def test_blocks_behind_one_that_was_replaced_are_still_a_slice():
    rows = make_rows(WINDOW)
    admit(rows, 0, list(range(1, 17)), (3, 4, 5, 6))
    rows.extend_block_tables([NewBlocks(0, 0, 1, (9,))])
    assert attention_of(rows, scheduled(0, 13, 3)).key_blocks == [slice(5, 7)]


def test_a_row_taken_over_by_a_shorter_sequence_may_have_blocks_side_by_side():
    rows = make_rows()
    admit(rows, 0, list(range(1, 17)), (3, 4, 5, 6))
    admit(rows, 0, list(range(1, 9)), (1, 2))
    assert attention_of(rows, scheduled(0, 0, 8)).key_blocks == [slice(1, 3)]


def test_a_last_block_replaced_is_handed_out():
    rows = make_rows()
    admit(rows, 0, list(range(1, 9)), (3, 4))
    rows.extend_block_tables([NewBlocks(0, 0, 1, (7,))])
    assert attention_of(rows, scheduled(0, 4, 4)).key_blocks[0].tolist() == [3, 7]


def test_of_two_blocks_for_one_place_the_last_counts():
    rows = make_rows()
    admit(rows, 0, [1, 2, 3], (3,))
    rows.extend_block_tables([NewBlocks(0, 0, 0, (5,)), NewBlocks(0, 0, 0, (6,))])
    assert attention_of(rows, scheduled(0, 0, 3)).slot_mapping.tolist() == [24, 25, 26]


def test_no_blocks_change_nothing():
    rows = make_rows()
    admit(rows, 0, [1, 2, 3], (3,))
    rows.extend_block_tables([NewBlocks(0, 0, 1, ())])
    assert attention_of(rows, scheduled(0, 0, 3)).key_blocks == [slice(3, 4)]


def test_a_row_taken_over_in_the_middle_of_a_sequence_forgets_the_old_blocks():
    """The new blocks would go on where the old ones ended."""
    rows = make_rows(WINDOW)
    admit(rows, 0, list(range(1, 9)), (3, 4))
    rows.admit([AdmittedRow(0, list(range(1, 21)), SamplingParams())])
    rows.extend_block_tables([NewBlocks(0, 0, 2, (5, 9))])
    assert attention_of(rows, scheduled(0, 13, 3)).key_blocks[0].tolist() == [5, 9]


@pytest.mark.parametrize("span", [FULL, WINDOW, AttentionSpan(chunk=8)])
@pytest.mark.parametrize("seed", range(4))
def test_slices_and_tables_name_the_blocks_that_were_given(span, seed):
    choose = random.Random(seed)
    rows = make_rows(span, num_rows=3, max_blocks=32, page_size=2)
    tables: list[dict[int, int]] = [{}, {}, {}]
    lengths = [0, 0, 0]
    for _ in range(60):
        row = choose.randrange(3)
        count = choose.randint(1, 5)
        if lengths[row] == 0 or lengths[row] + count > 60:
            lengths[row], tables[row] = choose.randrange(20), {}
            rows.admit([AdmittedRow(row, [1] * 64, SamplingParams())])
        start, lengths[row] = lengths[row], lengths[row] + count
        wanted = range(span.first_key(start) // 2, -(-lengths[row] // 2))
        missing = [logical for logical in wanted if logical not in tables[row]]
        if missing:
            offset = choose.choice([0, 5])
            blocks = {logical: logical + offset for logical in missing}
            tables[row] |= blocks
            rows.extend_block_tables([NewBlocks(row, 0, missing[0], tuple(blocks.values()))])
        attention = attention_of(rows, scheduled(row, start, count))
        found = torch.arange(99)[attention.key_blocks[0]]
        assert found.tolist() == [tables[row][logical] for logical in wanted]
        assert attention.first_keys[0] // 2 == wanted.start
