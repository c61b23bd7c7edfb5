"""What waiting requests find in the prefix cache, kept until a page of it leaves the tree.

A request that waits is looked up again and again: when there was no room for it, or when it waited
for what another request computed. The pages that it found stay found until one of them leaves the
tree, and the search goes on behind them. A request that is looked up for the first time begins with
the pages that it has in common with the one that was looked up before it: rows that share a prefix
come one after the other, and comparing two prompts is one comparison of bytes, not a descent of a
hundred nodes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from cbgen.engine.cache.prefix import (
    TOKEN_BYTES,
    AwaitedPrefix,
    PrefixMatch,
    PrefixNode,
    PrefixTree,
    common_run,
    pack_tokens,
)
from cbgen.engine.cache.shape import CacheShape
from cbgen.engine.request import Request


@dataclass(slots=True)
class FoundPages:
    """The known tokens of a waiting request, and what has been found of them."""

    tokens: bytes = b""
    """Packed ids."""
    nodes: list[PrefixNode] = field(default_factory=list)
    """Full pages that are stored, from the first on. A stored page does not change while it is in
    the tree, and all before it are in the tree as well."""


class PrefixSearch:
    """Looks up waiting requests, and owns what it found of each.

    Args:
        tree: is searched.
        shape: pages, and which groups have a window.
    """

    def __init__(self, tree: PrefixTree, shape: CacheShape) -> None:
        self._tree = tree
        self._shape = shape
        self._page_size = shape.page_size
        self._windows = [(g, span) for g, span in enumerate(shape.spans) if not span.is_full]
        # Below this many tokens, copying the pages of every layer costs more than it saves.
        self._least_copy = max(1, shape.page_size // 16)
        self._found: dict[Request, FoundPages] = {}
        self._last = FoundPages()  # of the request that was looked up first most recently

    def match(self, request: Request, step: int, *, has_tail: bool = True) -> PrefixMatch:
        """Return the longest usable beginning of a request; it holds until the next call.

        At least one token is left to compute: its logits are wanted. What must have been stored
        when is explained at each step.

        Args:
            request: not admitted.
            step: number of the step that is being scheduled.
            has_tail: whether a part of a page is of use, too.
        """
        limit = request.num_tokens - 1
        found = self._found.get(request) or self._begin(request, limit)
        tokens, nodes = found.tokens, found.nodes
        while nodes and not nodes[-1].is_indexed:
            nodes.pop()
        parent = nodes[-1] if nodes else self._tree.root
        while True:
            child, run = self._closest(parent, tokens, limit)
            # A whole block may be shared in the very step that computes it: in each layer, keys
            # and values of all tokens are written before any of them attends.
            if child is None or run < self._page_size or self._stored(child) < self._page_size:
                break
            nodes.append(child)
            parent = child
        if child is None or not has_tail:
            match = PrefixMatch(nodes)
        else:
            match = self._with_tail(found, child, run, step, limit)
        return self._cut_to_windows(match) if self._windows else match

    def forget(self, request: Request) -> None:
        """Forget what was found of a request that does not wait any more."""
        self._found.pop(request, None)

    def check(self, waiting: Iterable[Request]) -> None:
        """Verify what is kept.

        Args:
            waiting: the requests that may be looked up.

        Raises:
            AssertionError: something is kept of a request that does not wait, a page that is kept
                has other tokens, or is not at its place in the tree.
        """
        strange = self._found.keys() - set(waiting)
        if strange:
            names = sorted(request.request_id for request in strange)
            raise AssertionError(f"pages are kept of requests that do not wait: {names[:8]}")
        page_bytes = self._page_size * TOKEN_BYTES
        for request, found in self._found.items():
            parent = self._tree.root
            for index, node in enumerate(found.nodes):
                if not node.is_indexed:
                    break
                page = found.tokens[index * page_bytes : (index + 1) * page_bytes]
                if parent.find(page) is not node or self._stored(node) < self._page_size:
                    raise AssertionError(f"page {index} of {request.request_id} is not found")
                parent = node
            if any(node.is_indexed for node in found.nodes[parent.index + 1 :]):
                raise AssertionError(f"pages of {request.request_id} continue one that is gone")

    def _begin(self, request: Request, limit: int) -> FoundPages:
        tokens = pack_tokens(request.prompt_ids) + pack_tokens(request.generated_tokens)
        num_common = min(common_run(self._last.tokens, tokens), limit)
        found = FoundPages(tokens, self._last.nodes[: num_common // self._page_size])
        self._found[request] = self._last = found
        return found

    def _closest(
        self, parent: PrefixNode, tokens: bytes, limit: int
    ) -> tuple[PrefixNode | None, int]:
        """Return the child that shares most with the tokens behind a node, and how many of them."""
        begin = (parent.index + 1) * self._page_size
        end = begin + self._page_size
        child, run = parent.closest(tokens[begin * TOKEN_BYTES : end * TOKEN_BYTES])
        run = min(run, limit - begin)
        return (child, run) if run > 0 else (None, 0)

    def _with_tail(
        self, found: FoundPages, child: PrefixNode, run: int, step: int, limit: int
    ) -> PrefixMatch:
        """Return the match with what can be copied of the next page, or may be soon."""
        nodes = found.nodes
        is_left = child.owner is None and child.num_users == 0
        if is_left and run == len(child.tokens) // TOKEN_BYTES < self._page_size:
            return PrefixMatch(nodes, child, run)
        if run < self._least_copy:
            return PrefixMatch(nodes)
        # Copies run before the step's tokens do, so the source must be from an earlier step.
        settled, blocks = self._settled(child, step)
        awaited = None
        if run - settled >= self._least_copy and child.owner is not None:
            awaited = self._awaited(found, child, run, max(0, settled), limit)
        run = min(run, settled)
        if run < self._least_copy:
            return PrefixMatch(nodes, awaited=awaited)
        return PrefixMatch(nodes, child, run, list(blocks), awaited)

    def _awaited(
        self, found: FoundPages, child: PrefixNode, run: int, settled: int, limit: int
    ) -> AwaitedPrefix:
        """Return what the owner of a node computes of a request's tokens, to the last of them."""
        owner = child.owner
        assert owner is not None, "nobody computes the node"
        begin = child.index * self._page_size
        end = begin + run
        node: PrefixNode | None = child
        while node is not None and run == self._page_size:
            node, run = self._closest(node, found.tokens, limit)
            end += run
        wanted, num_saved = end - self._least_copy + 1, end - begin - settled
        return AwaitedPrefix(owner, owner.admission, wanted, num_saved)

    def _cut_to_windows(self, match: PrefixMatch) -> PrefixMatch:
        """Shorten a match until windowed groups have all that its next token sees."""
        nodes = match.nodes
        num_found = num_tokens = match.num_tokens(self._shape)
        tail_blocks: Sequence[int] = ()
        if match.tail is not None:
            tail_blocks = match.source_blocks or match.tail.blocks
        while (gap := self._gap(nodes, tail_blocks, num_tokens)) is not None:
            # Every shorter match that reaches beyond the gap sees it too.
            num_tokens = gap * self._page_size
        if num_tokens == num_found:
            return match
        return PrefixMatch(nodes[: num_tokens // self._page_size])

    def _gap(
        self, nodes: Sequence[PrefixNode], tail_blocks: Sequence[int], num_tokens: int
    ) -> int | None:
        """Return the first logical block that the token after `num_tokens` misses."""
        end = self._shape.num_pages(num_tokens)
        for group, span in self._windows:
            for index in range(span.first_key(num_tokens) // self._page_size, end):
                blocks = nodes[index].blocks if index < len(nodes) else tail_blocks
                if blocks[group] < 0:
                    return index
        return None

    def _stored(self, node: PrefixNode) -> int:
        """Return how many tokens of a node are in the cache once the running step is over."""
        length = len(node.tokens) // TOKEN_BYTES
        if node.owner is None:
            return length
        return min(length, node.owner.num_computed_tokens - node.index * self._page_size)

    def _settled(self, node: PrefixNode, step: int) -> tuple[int, Sequence[int]]:
        """Return how many tokens of a node were stored before a step, and in which blocks."""
        copied_in, num_copied, blocks = node.copied
        if copied_in == step:
            return num_copied, blocks
        length = len(node.tokens) // TOKEN_BYTES
        if node.owner is None:
            return length, node.blocks
        settled = node.owner.settled_tokens(step) - node.index * self._page_size
        return min(length, settled), node.blocks
