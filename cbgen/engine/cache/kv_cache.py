"""The cache as the scheduler sees it: who holds which blocks, what can be shared, what moves.

A request's tokens are a sequence of logical blocks (`PrefixNode`), each with one block in every
layer group.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from cbgen.engine.cache.block_pool import BlockPool
from cbgen.engine.cache.host_pool import HostCopy, HostPool
from cbgen.engine.cache.prefix import PrefixMatch, PrefixNode, PrefixTree
from cbgen.engine.cache.search import PrefixSearch
from cbgen.engine.cache.shape import CacheShape
from cbgen.engine.cache.tables import BlockSequence, BlockTables, check_sequences
from cbgen.engine.request import Request
from cbgen.engine.step import BlockCopy, BlockSwap, NewBlocks


class Placement(NamedTuple):
    """What a request got when it was admitted."""

    blocks: list[NewBlocks]
    copies: list[BlockCopy]
    swaps_in: list[BlockSwap]


class KVCache:
    """Owns the blocks of every admitted request, the prefix cache and the host pool.

    Args:
        shape: blocks of the pool and of host memory, and how many a request takes.
        shares_prefixes: whether requests may use one another's blocks.

    Attributes:
        pool: the state of every block; cached ones hold the beginning of some prompt.
    """

    def __init__(self, shape: CacheShape, *, shares_prefixes: bool = True) -> None:
        self.shape = shape
        self._shares_prefixes = shares_prefixes
        self.pool = BlockPool(
            shape.num_pool_blocks, on_evict=lambda block: self._tree.evicted(block)
        )
        self._tree = PrefixTree(self.pool, shape)
        self._search = PrefixSearch(self._tree, shape)
        self._tables = BlockTables(self.pool, self._tree, shape)
        self._host = HostPool(shape.num_host_blocks)
        self._sequences: dict[str, BlockSequence] = {}

    def match(self, request: Request, step: int) -> PrefixMatch:
        """Return what the prefix cache has of a waiting request's tokens; what it found is kept.

        Args:
            request: not admitted.
            step: number of the step that is being scheduled.
        """
        if not self._shares_prefixes:
            return PrefixMatch()
        # Beyond whole pages, the host pool has what a preempted request needs.
        has_tail = self._host.find(request.request_id) is None
        return self._search.match(request, step, has_tail=has_tail)

    def can_admit(self, request: Request, match: PrefixMatch) -> bool:
        """Whether `admit` would succeed."""
        _, start = self._start(request, match)
        return self._tables.can_begin(match.shared, start, request.num_tokens)

    def admit(self, request: Request, match: PrefixMatch, step: int) -> Placement:
        """Give a request blocks for all its known tokens; windowed groups get what they need first.

        Sets what the request has computed and how much room it has.

        Raises:
            ValueError: not enough blocks are free; ask `can_admit` first.
        """
        host_copy, start = self._start(request, match)
        num_groups = len(self.shape.spans)
        sequence = BlockSequence([0] * num_groups, [0] * num_groups, self._shares_prefixes)
        sequence.extend(match.shared)
        extended = self._tables.extend(request, sequence, start)
        if extended is None:
            raise ValueError(f"not enough blocks are free for {request.request_id}")
        blocks, fresh = extended
        self._sequences[request.request_id] = sequence
        sequence.num_final = len(match.nodes)
        request.num_computed_tokens = start
        request.num_settled_tokens, request.settled_step = 0, step
        copies: list[BlockCopy] = []
        if match.tail is not None:
            target = sequence.nodes[len(match.nodes)]
            target.owner = request
            target.copied = (step, match.tail_tokens, match.source_blocks or list(target.blocks))
            copies = self._copies(target, match)
        swaps = [] if host_copy is None else _swaps_in(sequence, host_copy, fresh)
        self.forget(request)
        self._tables.index(request, sequence, request.num_known_tokens)
        return Placement(blocks, copies, swaps)

    def grow(self, request: Request, start: int) -> list[NewBlocks] | None:
        """Give an admitted request room for its known tokens, as far as a step at `start` needs.

        Returns:
            The new blocks, or None if not enough are free; nothing is taken then.
        """
        sequence = self._sequences[request.request_id]
        self._tables.index(request, sequence, request.num_known_tokens)
        extended = self._tables.extend(request, sequence, start)
        return None if extended is None else extended[0]

    def offload(self, request: Request) -> tuple[BlockSwap, ...] | None:
        """Keep an admitted request's blocks in the host pool; to be followed by `free`.

        Returns:
            The copies to make, or None if the pool has no room, or they would be of no use.
        """
        sequence = self._sequences[request.request_id]
        # One token is left to compute, even if its result is lost.
        num_tokens = min(request.num_computed_tokens, request.num_known_tokens - 1)
        is_usable = num_tokens > 0 and not sequence.is_stale
        if not (is_usable and self._tables.can_go_on(sequence, num_tokens)):
            return None
        end = self.shape.num_pages(num_tokens)
        held = (place for place in sequence.held() if place[0][0] < end)
        return self._host.store(request.request_id, num_tokens, held)

    def free(self, request: Request, *, keep: bool = True) -> None:
        """Take all blocks of a request back; without effect if it holds none.

        Args:
            request: its tokens so far, which the prefix cache will know, are read here.
            keep: False if what it computed must not be used by others.
        """
        sequence = self._sequences.pop(request.request_id, None)
        if sequence is None:
            return
        num_tokens = min(request.num_computed_tokens, request.num_known_tokens) if keep else 0
        if keep:
            self._tables.index(request, sequence, num_tokens)
        request.num_slots = 0
        held = [*enumerate(zip(sequence.first, sequence.end, strict=True))]
        for node in reversed(sequence.nodes):
            if node.owner is request:
                node.owner = None
                self._tree.truncate(node, num_tokens - node.index * self.shape.page_size)
            for group, (first, end) in held:
                if first <= node.index < end:
                    self._tables.release(node, group, node.blocks[group])
            node.num_users -= 1
            if node.num_users == 0:
                self._tree.drop_if_useless(node)

    def forget(self, request: Request) -> None:
        """Give up what a request that waited has in the host pool, and what was found of it."""
        self._host.free(request.request_id)
        self._search.forget(request)

    def reset_prefixes(self) -> None:
        """Forget all prefixes, for instance because the weights have changed.

        Admitted requests keep their blocks; what they compute is not shared any more. Preempted
        ones lose their copies in the host pool: they are computed again, and shared.
        """
        self._tree.clear()
        self._host.clear()
        for sequence in self._sequences.values():
            sequence.is_cacheable = False
            sequence.is_stale = True

    def block_table(self, request_id: str, group: int = 0) -> tuple[int, ...]:
        """Return the blocks that a request holds in a group, in logical order."""
        sequence = self._sequences.get(request_id)
        held = () if sequence is None else sequence.held()
        return tuple(block for (_, holder), block in held if holder == group)

    def check(self, active: Iterable[Request], waiting: Sequence[Request]) -> None:
        """Recompute everything from scratch and compare.

        Args:
            active: the admitted requests.
            waiting: the requests that wait for admission.

        Raises:
            AssertionError: a count, a table, the tree or a free list is wrong.
        """
        check_sequences(self._sequences, list(active), self.shape)
        held = ([block for _, block in seq.held()] for seq in self._sequences.values())
        self.pool.check(held, self._tree.check())
        self._host.check(request.request_id for request in waiting)
        self._search.check(waiting)

    def _start(self, request: Request, match: PrefixMatch) -> tuple[HostCopy | None, int]:
        """Return the host copy that a request goes on from, if any, and its computed tokens."""
        found = match.num_tokens(self.shape)
        host_copy = self._host.find(request.request_id)
        if host_copy is None:
            return None, found
        return host_copy, max(found, host_copy.num_tokens)

    def _copies(self, target: PrefixNode, match: PrefixMatch) -> list[BlockCopy]:
        for source in match.source_blocks:
            self.pool.touch(source)
        return [
            BlockCopy(source, block, match.tail_tokens)
            for source, block in zip(match.source_blocks, target.blocks, strict=False)
            if source >= 0 and block >= 0
        ]


def _swaps_in(sequence: BlockSequence, host_copy: HostCopy, fresh: set[int]) -> list[BlockSwap]:
    """Return what brings a host copy back; blocks that are not fresh hold the same already."""
    swaps = []
    for (index, group), host_block in host_copy.blocks.items():
        block = sequence.nodes[index].blocks[group]
        if block in fresh:
            swaps.append(BlockSwap(block, host_block))
    return swaps
