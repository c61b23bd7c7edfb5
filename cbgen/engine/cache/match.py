"""What of a request's tokens the prefix cache has: whole blocks to share, and a part to copy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from cbgen.engine.cache.groups import AttentionSpan
from cbgen.engine.cache.prefix import TOKEN_BYTES, PrefixNode
from cbgen.engine.request import Request


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
    must_wait: bool = False
    """More is being computed right now by another request, and can be used in a later step."""

    @property
    def shared(self) -> list[PrefixNode]:
        """Nodes that the request uses itself: full pages, and a tail that it goes on in."""
        if self.tail is None or self.source_blocks:
            return self.nodes
        return [*self.nodes, self.tail]

    def num_tokens(self, page_size: int) -> int:
        """Return the tokens that need not be computed."""
        return len(self.nodes) * page_size + self.tail_tokens


class PrefixMatcher:
    """Finds matches. What must have been stored when is explained at each step.

    Args:
        root: root of the tree.
        page_size: tokens of a block.
        spans: attention span of each group.
    """

    def __init__(self, root: PrefixNode, page_size: int, spans: Sequence[AttentionSpan]) -> None:
        self._root = root
        self._page_size = page_size
        self._windows = [(g, span) for g, span in enumerate(spans) if not span.is_full]
        # Below this many tokens, copying the pages of every layer costs more than it saves.
        self._least_copy = max(1, page_size // 16)

    def match(
        self, request: Request, tokens: bytes, step: int, *, has_tail: bool = True
    ) -> PrefixMatch:
        """Return the longest usable beginning of a request's packed tokens.

        At least one token is left to compute: its logits are wanted.

        Args:
            request: not admitted.
            tokens: its known tokens, packed.
            step: number of the step that is being scheduled.
            has_tail: whether a part of a page is of use, too.
        """
        page_size, limit = self._page_size, request.num_tokens - 1
        nodes: list[PrefixNode] = []
        parent = self._root
        while True:
            begin = len(nodes) * page_size
            query = tokens[begin * TOKEN_BYTES : (begin + page_size) * TOKEN_BYTES]
            child, run = parent.closest(query)
            run = min(run, limit - begin)
            # A whole block may be shared in the very step that computes it: in each layer, keys
            # and values of all tokens are written before any of them attends.
            if child is None or run < page_size or self._stored(child) < page_size:
                break
            nodes.append(child)
            parent = child
        found = self._with_tail(nodes, child, run, step) if has_tail else PrefixMatch(nodes)
        return self._cut_to_windows(found) if self._windows else found

    def _with_tail(
        self, nodes: list[PrefixNode], child: PrefixNode | None, run: int, step: int
    ) -> PrefixMatch:
        if child is None or run <= 0:
            return PrefixMatch(nodes)
        length = len(child.tokens) // TOKEN_BYTES
        is_left = child.owner is None and child.num_users == 0
        if is_left and run == length < self._page_size:
            return PrefixMatch(nodes, child, run)
        if run < self._least_copy:
            return PrefixMatch(nodes)
        # Copies run before the step's tokens do, so the source must be from an earlier step.
        settled, blocks = self._settled(child, step)
        if run - settled >= self._least_copy:
            return PrefixMatch(nodes, must_wait=True)
        run = min(run, settled)  # a step is not worth a few tokens more
        if run < self._least_copy:
            return PrefixMatch(nodes)
        return PrefixMatch(nodes, child, run, list(blocks))

    def _cut_to_windows(self, found: PrefixMatch) -> PrefixMatch:
        """Shorten a match until windowed groups have all that its next token sees."""
        nodes, tail = found.nodes, found.tail
        tables = [node.blocks for node in nodes]
        if tail is not None:
            tables.append(found.source_blocks or tail.blocks)
        num_tokens = found.num_tokens(self._page_size)
        while (gap := self._gap(tables, num_tokens)) is not None:
            # Every shorter match that reaches beyond the gap sees it too.
            num_tokens = gap * self._page_size
        kept = num_tokens // self._page_size
        if kept >= len(nodes) and num_tokens == found.num_tokens(self._page_size):
            return found
        return PrefixMatch(nodes[:kept])

    def _gap(self, tables: list[list[int]], num_tokens: int) -> int | None:
        """Return the first logical block that the token after `num_tokens` misses."""
        end = -(-num_tokens // self._page_size)
        for group, span in self._windows:
            for index in range(span.first_key(num_tokens) // self._page_size, end):
                if tables[index][group] < 0:
                    return index
        return None

    def _stored(self, node: PrefixNode) -> int:
        """Return how many tokens of a node are in the cache once the running step is over."""
        length = len(node.tokens) // TOKEN_BYTES
        if node.owner is None:
            return length
        return min(length, node.owner.num_computed_tokens - node.index * self._page_size)

    def _settled(self, node: PrefixNode, step: int) -> tuple[int, list[int]]:
        """Return how many tokens of a node were stored before a step, and in which blocks."""
        copied_in, num_copied, blocks = node.copied
        if copied_in == step:
            return num_copied, blocks
        length = len(node.tokens) // TOKEN_BYTES
        if node.owner is None:
            return length, node.blocks
        settled = node.owner.settled_tokens(step) - node.index * self._page_size
        return min(length, settled), node.blocks
