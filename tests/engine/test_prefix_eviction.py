"""Which cached prefixes give way: the ones that were used longest ago, their ends first."""

from __future__ import annotations

import pytest

from tests.helpers.engine import make_request
from tests.helpers.shadow_run import ShadowRun, text

PAGE = 4


def forget_some(run: ShadowRun, num_blocks: int, kind: int = 99) -> None:
    """Let other prompts take `num_blocks` blocks of a full cache."""
    run.remember(text(kind, num_blocks * PAGE), f"cold {kind}")


@pytest.fixture
def full():
    """A run whose cache holds two prefixes of four blocks each, 1 before 2, and nothing else."""
    run = ShadowRun(num_blocks=8, page_size=PAGE)
    for kind in (1, 2):
        run.remember(text(kind, 4 * PAGE))
    assert run.cache.pool.num_cached == 8
    return run


def num_kept(run: ShadowRun, kind: int, num_blocks: int = 4) -> int:
    """Return how many tokens of a prefix are cached still; it is asked for, so use it once."""
    return run.num_reused(text(kind, num_blocks * PAGE) + text(77, 1))


def test_cached_blocks_are_kept_while_others_are_empty():
    run = ShadowRun(num_blocks=8, page_size=PAGE)
    run.remember(text(1, 4 * PAGE))
    run.remember(text(2, 4 * PAGE))
    assert run.stats.num_evictions == 0


def test_as_many_blocks_are_evicted_as_are_needed(full):
    forget_some(full, 1)
    assert full.stats.num_evictions == 1
    assert full.cache.pool.num_cached == 8


@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_prefix_loses_its_end_first(full, count):
    forget_some(full, count)
    assert num_kept(full, 1) == (4 - count) * PAGE


def test_the_prefix_used_longest_ago_gives_way(full):
    forget_some(full, 3)
    assert num_kept(full, 2) == 4 * PAGE


def test_a_prefix_that_was_used_again_stays(full):
    full.finish(make_request("again", text(1, 4 * PAGE), max_new_tokens=1))
    forget_some(full, 3)
    assert num_kept(full, 1) == 4 * PAGE


def test_a_block_that_is_copied_from_counts_as_used():
    run = ShadowRun(num_blocks=4, page_size=16)
    run.remember(text(1, 16))
    run.remember(text(2, 16))
    run.num_reused(text(1, 8) + text(3, 5))  # copies from 1
    run.remember(text(4, 16))  # the last empty block
    run.remember(text(5, 16))  # evicts 2
    assert run.num_reused(text(1, 16)) == 15


def test_two_hot_prefixes_stay_while_cold_ones_pass_by():
    run = ShadowRun(num_blocks=24, page_size=PAGE)
    hot = [text(kind, 8 * PAGE) for kind in (1, 2)]
    for prompt in hot:
        run.remember(prompt)
    for turn in range(12):
        run.remember(text(10 + turn, 2 * PAGE))  # a cold one, which nobody asks for again
        assert run.num_reused(hot[turn % 2] + text(30 + turn, 2)) == 8 * PAGE
    assert run.stats.num_evictions > 24


def test_blocks_in_use_are_never_evicted():
    run = ShadowRun(num_blocks=8, page_size=PAGE)
    run.add(make_request("long", text(1, 3 * PAGE), max_new_tokens=17))
    run.step()
    table = run.cache.block_table("long")
    for kind in range(2, 8):
        run.add(make_request(str(kind), text(kind, 2 * PAGE), max_new_tokens=1))
    for _ in range(6):
        run.step()
        assert run.cache.block_table("long")[:3] == table
    run.finish()
    assert run.stats.num_evictions > 0


def test_a_prefix_is_computed_again_after_its_eviction(full):
    forget_some(full, 8)
    assert num_kept(full, 1) == 0
    assert num_kept(full, 1) == 4 * PAGE
