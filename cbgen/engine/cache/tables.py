"""Fills the block tables of sequences: how many blocks in each layer group, and which ones.

Groups with a window hold blocks from the window on and give back those behind it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from cbgen.engine.cache.block_pool import BlockPool
from cbgen.engine.cache.prefix import PrefixNode
from cbgen.engine.cache.sequence import BlockSequence
from cbgen.engine.cache.shape import CacheShape
from cbgen.engine.cache.tree import PrefixTree
from cbgen.engine.request import Request


class Growth(NamedTuple):
    """Blocks of one group that a request got, from logical block `first` on."""

    group: int
    first: int
    block_ids: tuple[int, ...]


class BlockTables:
    """Hands blocks of a pool to sequences.

    A step that runs at most `shape.chunk_tokens` tokens of a request needs at most a certain number
    of blocks in a group with a window. That many are taken at admission and kept until the last
    token of the prompt, so that a prompt never has to wait for blocks in the middle.

    Args:
        pool: the blocks.
        tree: knows which node a block belongs to.
        shape: how many blocks a request takes.
    """

    def __init__(self, pool: BlockPool, tree: PrefixTree, shape: CacheShape) -> None:
        self._pool = pool
        self._tree = tree
        self._page_size = shape.page_size
        self._spans = shape.spans
        self._most = shape.most_blocks

    def can_begin(self, shared: Sequence[PrefixNode], start: int, num_tokens: int) -> bool:
        """Whether there are blocks for a new sequence.

        Args:
            shared: the nodes that it begins with.
            start: first token that it computes.
            num_tokens: tokens that it knows.
        """
        wanted = 0
        for group, span in enumerate(self._spans):
            first = span.first_key(start) // self._page_size
            end = self._horizon(group, first, num_tokens)
            wanted += end - first - self._num_in_use(shared[first:end], group)
        return wanted <= self._pool.num_free

    def extend(
        self, request: Request, sequence: BlockSequence, start: int
    ) -> tuple[list[Growth], set[int]] | None:
        """Move the windows of a sequence up to `start` and give it room for its known tokens.

        Args:
            request: its owner; gets its number of slots.
            sequence: its logical blocks; those that it shares are in it, and not held yet.
            start: first token of the next step.

        Returns:
            What it got, and those of the blocks that hold nothing yet. None if not enough are free.
        """
        wanted: list[tuple[int, int, int]] = []
        num_missing = 0
        for group, span in enumerate(self._spans):
            first = span.first_key(start) // self._page_size
            for node, block in sequence.pass_by(group, first):
                self.release(node, group, block)
            begin, end = sequence.end[group], self._horizon(group, first, request.num_tokens)
            if begin < end:
                wanted.append((group, begin, end))
                in_use = self._num_in_use(sequence.nodes[begin:end], group)
                num_missing += end - begin - in_use
        if num_missing > self._pool.num_free:
            return None
        while len(sequence.nodes) * self._page_size < request.num_tokens:
            parent = sequence.nodes[-1] if sequence.nodes else self._tree.root
            sequence.append(PrefixNode(parent, len(self._spans), request))
        for group, begin, end in wanted:  # all that is shared, before anything is evicted
            for node in sequence.nodes[begin:end]:
                if node.blocks[group] >= 0:
                    self._pool.acquire(node.blocks[group])
        growth: list[Growth] = []
        fresh: set[int] = set()
        for group, begin, end in wanted:
            nodes = sequence.nodes[begin:end]
            fresh.update(self._fill(nodes, group))
            sequence.end[group] = end
            growth.append(Growth(group, begin, tuple(node.blocks[group] for node in nodes)))
        request.num_slots = min(sequence.end) * self._page_size
        return growth, fresh

    def can_go_on(self, sequence: BlockSequence, start: int) -> bool:
        """Whether a sequence holds all blocks that the token at position `start` sees.

        Not if its windows have moved up to a token behind it, whose result is not known yet.
        """
        return all(
            sequence.first[group] <= span.first_key(start) // self._page_size
            for group, span in enumerate(self._spans)
        )

    def release(self, node: PrefixNode, group: int, block: int) -> None:
        """Give up one block of a sequence; it stays cached if it can be found again."""
        self._pool.release(block, keep=node.is_indexed)
        if not node.is_indexed and self._pool.is_free(block):
            node.blocks[group] = -1

    def _fill(self, nodes: Sequence[PrefixNode], group: int) -> list[int]:
        empty = [node for node in nodes if node.blocks[group] < 0]
        blocks = self._pool.allocate(len(empty))
        for node, block in zip(empty, blocks, strict=True):
            node.blocks[group] = block
            self._tree.node_of[block] = node
        return blocks

    def _num_in_use(self, nodes: Sequence[PrefixNode], group: int) -> int:
        blocks = (node.blocks[group] for node in nodes)
        return sum(block >= 0 and not self._pool.is_free(block) for block in blocks)

    def _horizon(self, group: int, first: int, num_tokens: int) -> int:
        """Return where the blocks that are held from logical block `first` on end."""
        count, most = -(-num_tokens // self._page_size), self._most[group]
        return count if most is None else min(first + most, count)
