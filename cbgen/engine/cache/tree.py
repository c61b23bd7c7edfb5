"""Owns the prefix tree: what goes into it, what leaves it, and the blocks that become useless."""

from __future__ import annotations

from collections.abc import Sequence

from cbgen.engine.cache.block_pool import BlockPool
from cbgen.engine.cache.groups import AttentionSpan
from cbgen.engine.cache.prefix import TOKEN_BYTES, PrefixNode
from cbgen.engine.cache.sequence import BlockSequence


class PrefixTree:
    """The tree and, for every block, the node that it belongs to.

    A request refers to all blocks of its path in groups without a window, and gives them back from
    the last one on. So a block is evicted before the one that it continues. In groups with a
    window, blocks go in any order: their node stays while it has children.

    Args:
        pool: the state of the blocks.
        spans: attention span of each group.
    """

    def __init__(self, pool: BlockPool, spans: Sequence[AttentionSpan]) -> None:
        self._pool = pool
        self._num_groups = len(spans)
        self._full_groups = [group for group, span in enumerate(spans) if span.is_full]
        self.root = PrefixNode(None, self._num_groups, None)
        self.node_of: list[PrefixNode] = [self.root] * pool.num_blocks

    def index(self, sequence: BlockSequence, tokens: bytes, page_size: int) -> None:
        """Put nodes of a sequence into the tree, as far as their tokens are known.

        Args:
            sequence: its leading `num_final` nodes are in the tree for good.
            tokens: packed, from the first token of the next node on.
            page_size: tokens of a full node.
        """
        page_bytes = page_size * TOKEN_BYTES
        for begin in range(0, len(tokens), page_bytes):
            if not sequence.is_cacheable:
                return
            page = tokens[begin : begin + page_bytes]
            is_placed = self._place(sequence.nodes[sequence.num_final], page)
            if len(page) < page_bytes:
                return  # it will be placed again when it is full
            # Where another node has these tokens, what follows this one could not be found.
            sequence.is_cacheable = is_placed
            sequence.num_final += is_placed

    def truncate(self, node: PrefixNode, num_tokens: int) -> None:
        """Cut a node to the tokens that were stored when its owner left."""
        if not node.is_indexed or num_tokens * TOKEN_BYTES >= len(node.tokens):
            return
        if num_tokens <= 0 or not self._place(node, node.tokens[: num_tokens * TOKEN_BYTES]):
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

    def _place(self, node: PrefixNode, tokens: bytes) -> bool:
        """Put a node into the tree under these tokens, or keep it as it is if that cannot be."""
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
