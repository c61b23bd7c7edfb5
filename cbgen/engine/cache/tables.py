"""Block tables: the logical blocks of each request, and which blocks it holds in each group.

Groups with a window hold blocks from the window on and give back those behind it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from cbgen.engine.cache.block_pool import BlockPool
from cbgen.engine.cache.prefix import TOKEN_BYTES, PrefixNode, PrefixTree, pack_tokens
from cbgen.engine.cache.shape import CacheShape
from cbgen.engine.request import Request
from cbgen.engine.step import NewBlocks


@dataclass(slots=True)
class BlockSequence:
    """Logical blocks in order. In group g it holds those from `first[g]` up to `end[g]`."""

    first: list[int]
    end: list[int]
    is_cacheable: bool = True
    """Whether later nodes can be put into the tree; not if one before is missing."""
    is_stale: bool = False
    """Whether its keys are those of weights that have changed since."""
    nodes: list[PrefixNode] = field(default_factory=list)
    num_final: int = 0
    """Leading nodes whose tokens are complete and in the tree."""

    def extend(self, nodes: Sequence[PrefixNode]) -> None:
        """Add the next logical blocks."""
        for node in nodes:
            node.num_users += 1
        self.nodes += nodes

    def pass_by(self, group: int, first: int) -> list[tuple[PrefixNode, int]]:
        """Stop holding the blocks of a group before `first`; return them."""
        begin, end = self.first[group], min(first, self.end[group])
        if first > begin:
            self.first[group] = first
            self.end[group] = max(first, self.end[group])
        return [(node, node.blocks[group]) for node in self.nodes[begin:end]]

    def held(self) -> Iterator[tuple[tuple[int, int], int]]:
        """Yield ((logical block, group), block) of all that it holds."""
        for group, (first, end) in enumerate(zip(self.first, self.end, strict=True)):
            for node in self.nodes[first:end]:
                yield (node.index, group), node.blocks[group]

    def held_of(self, node: PrefixNode) -> list[tuple[int, int]]:
        """Return (group, block) of what it holds of one of its nodes."""
        return [
            (group, block)
            for group, block in enumerate(node.blocks)
            if self.first[group] <= node.index < self.end[group]
        ]


def packed_range(request: Request, begin: int, end: int) -> bytes:
    """Return the known tokens of a request from position `begin` up to `end`, packed."""
    num_prompt = len(request.prompt_ids)
    if begin >= num_prompt:
        return pack_tokens(request.generated_tokens[begin - num_prompt : end - num_prompt])
    generated = request.generated_tokens[: max(0, end - num_prompt)]
    return pack_tokens([*request.prompt_ids[begin:end], *generated])


def check_sequences(
    sequences: Mapping[str, BlockSequence], active: Sequence[Request], shape: CacheShape
) -> None:
    """Compare the sequences with the admitted requests.

    Raises:
        AssertionError: one is missing or left over, or has too few or too many blocks.
    """
    if sequences.keys() != {request.request_id for request in active}:
        strange = sorted(sequences.keys() ^ {request.request_id for request in active})
        raise AssertionError(f"block tables and admitted requests differ: {strange[:8]}")
    for request in active:
        sequence = sequences[request.request_id]
        stored, known = request.num_computed_tokens, request.num_tokens
        name, count = request.request_id, len(sequence.nodes)
        if not shape.num_pages(stored) <= count <= shape.num_pages(known):
            raise AssertionError(
                f"{name} holds {count} blocks with {stored} tokens stored, {known} known"
            )
        num_slots = min(sequence.end) * shape.page_size
        if request.num_slots != num_slots or num_slots < stored:
            raise AssertionError(f"{name} has {stored} tokens stored and {request.num_slots} slots")
        for index, node in enumerate(sequence.nodes):
            if node.index != index or node.num_users < 1:
                raise AssertionError(f"logical block {index} of {name} is out of place")
            if any(block < 0 for _, block in sequence.held_of(node)):
                raise AssertionError(f"logical block {index} of {name} is held and not there")


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
        self._most_blocks = shape.most_blocks

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
    ) -> tuple[list[NewBlocks], set[int]] | None:
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
            sequence.extend([PrefixNode(parent, len(self._spans), request)])
        for group, begin, end in wanted:  # all that is shared, before anything is evicted
            blocks = [node.blocks[group] for node in sequence.nodes[begin:end]]
            self._pool.acquire(*[block for block in blocks if block >= 0])
        growth: list[NewBlocks] = []
        fresh: set[int] = set()
        for group, begin, end in wanted:
            nodes = sequence.nodes[begin:end]
            fresh.update(self._fill(nodes, group))
            sequence.end[group] = end
            block_ids = tuple([node.blocks[group] for node in nodes])
            growth.append(NewBlocks(request.row, group, begin, block_ids))
        request.num_slots = min(sequence.end) * self._page_size
        return growth, fresh

    def index(self, request: Request, sequence: BlockSequence, num_tokens: int) -> None:
        """Put nodes of a sequence into the prefix tree, as far as their tokens are known.

        Args:
            request: whose tokens they are.
            sequence: its leading `num_final` nodes are in the tree for good.
            num_tokens: tokens of the request that may be found.
        """
        if not sequence.is_cacheable:
            return
        begin = sequence.num_final * self._page_size
        end = min(num_tokens, len(sequence.nodes) * self._page_size)
        tokens, page_bytes = packed_range(request, begin, end), self._page_size * TOKEN_BYTES
        for first in range(0, len(tokens), page_bytes):
            page = tokens[first : first + page_bytes]
            is_placed = self._tree.place(sequence.nodes[sequence.num_final], page)
            if len(page) < page_bytes:
                return  # it will be placed again when it is full
            # Where another node has these tokens, what follows this one could not be found.
            sequence.is_cacheable = is_placed
            if not is_placed:
                return
            sequence.num_final += 1

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
        """Return how many of some nodes in a row have a block that somebody holds."""

        def is_free(node: PrefixNode) -> bool:
            return node.blocks[group] < 0 or self._pool.is_free(node.blocks[group])

        if self._spans[group].is_full:  # who holds a block holds all before it
            return bisect_left(nodes, True, key=is_free)
        return sum(not is_free(node) for node in nodes)

    def _horizon(self, group: int, first: int, num_tokens: int) -> int:
        """Return where the blocks that are held from logical block `first` on end."""
        count, most = -(-num_tokens // self._page_size), self._most_blocks[group]
        return count if most is None else min(first + most, count)
