"""The tree of cached prefixes: how it is searched, and what may be in it."""

from __future__ import annotations

import random

import pytest

from cbgen.engine.cache.prefix import PrefixNode, common_run, pack_tokens
from tests.helpers.engine import make_cache, make_request, place


def make_parent(*children: list[int]) -> PrefixNode:
    """Return a node with a child for each list of tokens."""
    parent = PrefixNode(None, 1, None)
    for tokens in children:
        parent.insert(PrefixNode(parent, 1, None), pack_tokens(tokens))
    return parent


def closest(parent: PrefixNode, tokens: list[int]) -> tuple[bytes | None, int]:
    child, run = parent.closest(pack_tokens(tokens))
    return (None if child is None else child.tokens), run


def random_tokens(choose: random.Random) -> list[int]:
    """Return few tokens of few kinds, so that many lists begin alike."""
    kinds = (0, 1, 255, 256, 2**31, 2**32 - 1)
    return [choose.choice(kinds) for _ in range(choose.randrange(1, 6))]


def test_packed_tokens_compare_as_the_lists_do():
    choose = random.Random(1)
    for _ in range(300):
        first, second = random_tokens(choose), random_tokens(choose)
        assert (pack_tokens(first) < pack_tokens(second)) == (first < second)


@pytest.mark.parametrize(
    ("first", "second", "run"),
    [
        ([], [], 0),
        ([], [1], 0),
        ([1], [1], 1),
        ([1, 2, 3], [1, 2, 3, 4], 3),
        ([1, 2, 3, 4], [1, 2, 9, 4], 2),
        ([9, 2, 3], [1, 2, 3], 0),
        ([256], [1], 0),  # the same bytes at other places
        ([1, 2, 3, 4, 5, 6, 7], [1, 2, 3, 4, 5, 6, 8], 6),
    ],
)
def test_the_common_run_ends_at_the_first_difference(first, second, run):
    assert common_run(pack_tokens(first), pack_tokens(second)) == run
    assert common_run(pack_tokens(second), pack_tokens(first)) == run


def test_a_node_without_children_has_no_closest_one():
    assert closest(make_parent(), [1, 2]) == (None, 0)


def test_a_child_that_shares_no_token_is_not_close():
    assert closest(make_parent([5, 6], [9]), [7, 6]) == (None, 0)


def test_the_closest_child_has_the_longest_common_run():
    """Found by bisection, compared with a search of all."""
    choose = random.Random(2)
    for _ in range(300):
        lists = {tuple(random_tokens(choose)) for _ in range(choose.randrange(1, 9))}
        tokens = pack_tokens(random_tokens(choose))
        longest = max(common_run(pack_tokens(child), tokens) for child in lists)
        child, run = make_parent(*map(list, lists)).closest(tokens)
        assert run == longest
        assert child is None or common_run(child.tokens, tokens) == longest


def test_find_wants_all_tokens_and_no_more():
    parent = make_parent([1, 2], [1, 2, 3], [4])
    assert parent.find(pack_tokens([1, 2])) is parent.children[0]
    assert parent.find(pack_tokens([1])) is None
    assert parent.find(pack_tokens([1, 2, 3, 4])) is None


def test_two_children_with_the_same_tokens_are_refused():
    parent = make_parent([1, 2])
    with pytest.raises(ValueError, match="is there already"):
        parent.insert(PrefixNode(parent, 1, None), pack_tokens([1, 2]))


def test_a_removed_child_is_not_found_any_more():
    parent = make_parent([1], [2], [3])
    child = parent.children[1]
    parent.remove(child)
    assert not child.is_indexed
    assert parent.find(pack_tokens([2])) is None
    assert [node.tokens for node in parent.children] == [pack_tokens([1]), pack_tokens([3])]


def test_removing_another_node_s_child_is_refused():
    parent, other = make_parent([1], [2]), make_parent([1])
    with pytest.raises(ValueError, match="not a child of this one"):
        parent.remove(other.children[0])


def test_a_subtree_names_parents_before_children():
    root = make_parent([1], [2])
    child = root.children[0]
    child.insert(PrefixNode(child, 1, None), pack_tokens([3]))
    nodes = list(root.subtree())
    assert len(nodes) == 3
    assert nodes.index(child) < nodes.index(child.children[0])


@pytest.fixture
def cache():
    """A cache that knows two pages and a part of a third one, of a request that has ended."""
    cache = make_cache(num_blocks=8, page_size=4)
    request = make_request("a", 10)
    place(cache, request)
    request.num_computed_tokens = 10
    cache.free(request)
    cache.check([], [])
    return cache


def test_a_finished_prompt_leaves_a_node_for_each_page(cache):
    nodes = list(cache._tree.root.subtree())
    assert [len(node.tokens) // 4 for node in nodes] == [4, 4, 2]
    assert [node.index for node in nodes] == [0, 1, 2]


def test_check_finds_a_node_that_holds_nothing(cache):
    *_, last = cache._tree.root.subtree()
    last.blocks[0] = -1
    with pytest.raises(AssertionError, match="node 2 is of no use and still in the tree"):
        cache.check([], [])


def test_check_finds_an_owner_that_has_left(cache):
    *_, last = cache._tree.root.subtree()
    last.owner = make_request("gone")
    with pytest.raises(AssertionError, match="node 2 is of no use"):
        cache.check([], [])


def test_check_finds_a_node_under_other_tokens(cache):
    first, *_ = cache._tree.root.subtree()
    first.tokens = pack_tokens([7, 7, 7, 7])
    with pytest.raises(AssertionError, match="a node of 16 bytes is not where it belongs"):
        cache.check([], [])


def test_check_finds_a_block_that_belongs_to_another_node(cache):
    first, second, _ = cache._tree.root.subtree()
    cache._tree.node_of[second.blocks[0]] = first
    with pytest.raises(AssertionError, match="in a node that is not theirs"):
        cache.check([], [])


def test_check_finds_a_cached_block_without_a_node(cache):
    *_, last = cache._tree.root.subtree()
    last.parent.remove(last)
    with pytest.raises(AssertionError, match="are cached for nobody, or lost"):
        cache.check([], [])
