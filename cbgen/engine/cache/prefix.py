"""The prefix cache: a tree over blocks, ordered by token ids. `search` finds requests in it.

    root -- [tokens of the first page] -- [second page] -- ...
                                       `- [second page of another prompt]

A node is one logical block: up to `page_size` tokens, and the block that holds them in each layer
group. Only a full page has children. The children of a node are sorted by their tokens, packed as
big-endian 32-bit numbers, so that bytes compare as the token sequences do: among sorted sequences,
the longest common run with a given one is that of a neighbour, found by bisection. Token ids are
compared themselves, not hashes of them, so two prompts are never taken for one another.

A node is in the tree from the moment when its request is admitted, before its tokens are computed:
requests that arrive together find each other.
"""

from __future__ import annotations

import sys
from array import array
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import InitVar, dataclass, field
from typing import NamedTuple

from cbgen.engine.cache.block_pool import BlockPool
from cbgen.engine.cache.shape import CacheShape
from cbgen.engine.request import Request

TOKEN_BYTES = 4
_TYPE_CODE = next(code for code in "IL" if array(code).itemsize == TOKEN_BYTES)


def pack_tokens(token_ids: Sequence[int]) -> bytes:
    """Return token ids, each in [0, 2**32), as bytes that compare as the sequences do."""
    packed = array(_TYPE_CODE, token_ids)
    if sys.byteorder == "little":
        packed.byteswap()
    return packed.tobytes()


@dataclass(slots=True, eq=False, repr=False)
class PrefixNode:
    """One logical block of one or more sequences."""

    parent: PrefixNode | None
    """The logical block before it; None for the root alone."""
    num_groups: InitVar[int]
    owner: Request | None
    """The admitted request that writes the block; None if nothing is added any more."""
    index: int = field(init=False)
    """Logical block number: its tokens begin at `index * page_size`."""
    blocks: list[int] = field(init=False)
    """Block of each layer group; -1 where a window has passed it and it is gone."""
    tokens: bytes = b""
    """Packed ids, of tokens that are stored or will be; the owner decides how many are."""
    num_users: int = 0
    """Admitted requests that have the node in their sequence."""
    is_indexed: bool = field(init=False)
    """Whether the node is in the tree."""
    copied: tuple[int, int, Sequence[int]] = (-1, 0, ())
    """(step, packed length, blocks) of the part that was there before the step in which the node
    was made; what a step copies must have been stored before it."""
    children: list[PrefixNode] = field(default_factory=list)
    """Nodes that continue this one, sorted by their tokens."""
    _keys: list[bytes] = field(default_factory=list)

    def __post_init__(self, num_groups: int) -> None:
        self.index = -1 if self.parent is None else self.parent.index + 1
        self.blocks = [-1] * num_groups
        self.is_indexed = self.parent is None

    def closest(self, tokens: bytes) -> tuple[PrefixNode | None, int]:
        """Return the child with the longest common run with packed tokens, and its token count."""
        keys = self._keys
        place = bisect_left(keys, tokens)
        if place < len(keys) and keys[place] == tokens:  # most pages of a long prefix
            return self.children[place], len(tokens) // TOKEN_BYTES
        best, longest = None, 0
        for index in (place, place - 1):
            if 0 <= index < len(keys):
                length = common_run(keys[index], tokens)
                if length > longest:
                    best, longest = self.children[index], length
        return best, longest

    def find(self, tokens: bytes) -> PrefixNode | None:
        """Return the child that holds exactly these packed tokens."""
        place = bisect_left(self._keys, tokens)
        if place < len(self._keys) and self._keys[place] == tokens:
            return self.children[place]
        return None

    def insert(self, child: PrefixNode, tokens: bytes) -> None:
        """Put a child into the tree.

        Raises:
            ValueError: another child holds these tokens; ask `find` first.
        """
        place = bisect_left(self._keys, tokens)
        if place < len(self._keys) and self._keys[place] == tokens:
            raise ValueError("a node with these tokens is there already")
        child.tokens = tokens
        child.is_indexed = True
        self._keys.insert(place, tokens)
        self.children.insert(place, child)

    def remove(self, child: PrefixNode) -> None:
        """Take a child out of the tree."""
        place = bisect_left(self._keys, child.tokens)
        if self.children[place] is not child:
            raise ValueError("the node is not a child of this one")
        del self._keys[place], self.children[place]
        child.is_indexed = False

    def subtree(self) -> Iterator[PrefixNode]:
        """Yield all nodes below this one, parents first."""
        stack = list(self.children)
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children)


def common_run(first: bytes, second: bytes) -> int:
    """Return how many packed tokens two sequences share from their beginning on."""
    low, high = 0, min(len(first), len(second)) // TOKEN_BYTES
    if first[: high * TOKEN_BYTES] == second[: high * TOKEN_BYTES]:
        return high
    while high - low > 1:  # the first `low` tokens are equal, the first `high` are not
        middle = (low + high) // 2
        begin, end = low * TOKEN_BYTES, middle * TOKEN_BYTES
        if first[begin:end] == second[begin:end]:
            low = middle
        else:
            high = middle
    return low


class AwaitedPrefix(NamedTuple):
    """More of a request's tokens, which another request is computing."""

    owner: Request
    """The request that computes them."""
    admission: int
    """Number of the owner's admission; preempted, it computes them no more."""
    num_tokens: int
    """Tokens of the owner that must have been stored before the step that uses them."""
    num_saved: int
    """Tokens that need not be computed by a request that waits."""


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """The longest usable beginning of a request; empty if there is none."""

    nodes: list[PrefixNode] = field(default_factory=list)
    """Full pages to share, from the first on."""
    tail: PrefixNode | None = None
    """A node that holds the beginning of the next page."""
    tail_tokens: int = 0
    """How many tokens of it are wanted."""
    source_blocks: list[int] = field(default_factory=list)
    """Blocks of each group to copy them from; empty if the request goes on in the tail itself."""
    awaited: AwaitedPrefix | None = None
    """More that is being computed right now and can be used in a later step."""

    @property
    def must_wait(self) -> bool:
        """Whether a later step finds more."""
        return self.awaited is not None

    @property
    def shared(self) -> list[PrefixNode]:
        """Nodes that the request uses itself: full pages, and a tail that it goes on in."""
        if self.tail is None or self.source_blocks:
            return self.nodes
        return [*self.nodes, self.tail]

    def num_tokens(self, shape: CacheShape) -> int:
        """Return the tokens that need not be computed."""
        return len(self.nodes) * shape.page_size + self.tail_tokens


class PrefixTree:
    """The tree and, for every block, the node that it belongs to.

    A request refers to all blocks of its path in groups without a window, and gives them back from
    the last one on. So a block is evicted before the one that it continues. In groups with a
    window, blocks go in any order: their node stays while it has children.

    Args:
        pool: the state of the blocks.
        shape: pages, and which groups have a window.

    Attributes:
        root: the node before all first pages.
        node_of: the node of each block.
    """

    def __init__(self, pool: BlockPool, shape: CacheShape) -> None:
        self._pool = pool
        self._full_groups = [group for group, span in enumerate(shape.spans) if span.is_full]
        self.root = PrefixNode(None, len(shape.spans), None)
        self.node_of: list[PrefixNode] = [self.root] * pool.num_blocks

    def place(self, node: PrefixNode, tokens: bytes) -> bool:
        """Put a node into the tree under these tokens, or keep it as it is if that cannot be.

        Returns:
            Whether it is in the tree under these tokens.
        """
        parent = node.parent
        assert parent is not None, "the root is not placed"
        if node.is_indexed and node.tokens == tokens:
            return True
        if not parent.is_indexed:
            return False
        other = parent.find(tokens)
        if other is not None:
            if other.num_users > 0 or all(block >= 0 for block in other.blocks):
                return False
            # Windows have passed it, so it was of no use to this request: the new one is better.
            self._take_out_all(other)
        if node.is_indexed:
            parent.remove(node)
        parent.insert(node, tokens)
        return True

    def truncate(self, node: PrefixNode, num_tokens: int) -> None:
        """Cut a node to the tokens that were stored when its owner left."""
        if not node.is_indexed or num_tokens * TOKEN_BYTES >= len(node.tokens):
            return
        if num_tokens <= 0 or not self.place(node, node.tokens[: num_tokens * TOKEN_BYTES]):
            self._take_out_all(node)

    def evicted(self, block_id: int) -> None:
        """Learn that the pool has given up a cached block."""
        node = self.node_of[block_id]
        node.blocks[node.blocks.index(block_id)] = -1
        self.drop_if_useless(node)

    def drop_if_useless(self, node: PrefixNode) -> None:
        """Take a node out of the tree, and then its parents, if nothing can be found through it."""
        while node.parent is not None and node.num_users == 0 and not node.children:
            if not self._is_useless(node):
                return
            parent = node.parent
            if node.is_indexed:
                self._take_out(node)
            node = parent

    def clear(self) -> None:
        """Empty the tree; blocks in use stay with their users."""
        for node in reversed(list(self.root.subtree())):
            self._take_out(node)

    def check(self) -> list[int]:
        """Verify the tree and return all blocks that can be found in it.

        Raises:
            AssertionError: a node is out of order, useless, or in nobody's list of children.
        """
        found: list[int] = []
        for node in self.root.subtree():
            parent = node.parent
            assert parent is not None, "only the root has no parent"
            if not node.is_indexed or parent.find(node.tokens) is not node:
                raise AssertionError(f"a node of {len(node.tokens)} bytes is not where it belongs")
            is_left = node.num_users == 0 and not node.children
            if is_left and (node.owner is not None or self._is_useless(node)):
                raise AssertionError(f"node {node.index} is of no use and still in the tree")
            blocks = [block for block in node.blocks if block >= 0]
            if any(self.node_of[block] is not node for block in blocks):
                raise AssertionError(f"blocks {blocks} are in a node that is not theirs")
            found += blocks
        return found

    def _is_useless(self, node: PrefixNode) -> bool:
        blocks = node.blocks
        return all(block < 0 for block in blocks) or any(blocks[g] < 0 for g in self._full_groups)

    def _take_out_all(self, node: PrefixNode) -> None:
        """Take a node out of the tree with all that continues it, which others may be using."""
        for useless in reversed([node, *node.subtree()]):
            self._take_out(useless)

    def _take_out(self, node: PrefixNode) -> None:
        assert node.parent is not None, "the root stays"
        node.parent.remove(node)
        for group, block in enumerate(node.blocks):
            if block >= 0 and self._pool.is_free(block):
                self._pool.discard(block)
                node.blocks[group] = -1
