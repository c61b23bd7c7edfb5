"""The prefix cache: a tree over blocks, searched by token ids.

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

from cbgen.engine.request import Request

TOKEN_BYTES = 4
_TYPE_CODE = next(code for code in "IL" if array(code).itemsize == TOKEN_BYTES)


def pack_tokens(token_ids: Sequence[int]) -> bytes:
    """Return token ids, each in [0, 2**32), as bytes that compare as the sequences do."""
    packed = array(_TYPE_CODE, token_ids)
    if sys.byteorder == "little":
        packed.byteswap()
    return packed.tobytes()


class PrefixNode:
    """One logical block of one or more sequences.

    Attributes:
        index: logical block number: its tokens begin at `index * page_size`.
        tokens: packed ids, of tokens that are stored or will be; the owner decides how many are.
        blocks: block of each layer group; -1 where a window has passed it and it is gone.
        parent: the logical block before it; None for the root alone.
        owner: the admitted request that writes the block; None if nothing is added any more.
        num_users: admitted requests that have the node in their sequence.
        is_indexed: whether the node is in the tree.
        copied: (step, packed length, blocks) of the part that was there before the step in which
            the node was made; what a step copies must have been stored before it.
    """

    __slots__ = (
        "_children",
        "_keys",
        "blocks",
        "copied",
        "index",
        "is_indexed",
        "num_users",
        "owner",
        "parent",
        "tokens",
    )

    def __init__(self, parent: PrefixNode | None, num_groups: int, owner: Request | None) -> None:
        self.parent = parent
        self.index: int = -1 if parent is None else parent.index + 1
        self.owner = owner
        self.tokens = b""
        self.blocks = [-1] * num_groups
        self.num_users = 0
        self.is_indexed = parent is None
        self.copied: tuple[int, int, list[int]] = (-1, 0, [])
        self._children: list[PrefixNode] = []
        self._keys: list[bytes] = []

    @property
    def children(self) -> Sequence[PrefixNode]:
        """Nodes that continue this one, sorted by their tokens."""
        return self._children

    def closest(self, tokens: bytes) -> tuple[PrefixNode | None, int]:
        """Return the child with the longest common run with packed tokens, and its token count."""
        place = bisect_left(self._keys, tokens)
        best, longest = None, 0
        for index in (place, place - 1):
            if 0 <= index < len(self._keys):
                length = common_run(self._keys[index], tokens)
                if length > longest:
                    best, longest = self._children[index], length
        return best, longest

    def find(self, tokens: bytes) -> PrefixNode | None:
        """Return the child that holds exactly these packed tokens."""
        place = bisect_left(self._keys, tokens)
        if place < len(self._keys) and self._keys[place] == tokens:
            return self._children[place]
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
        self._children.insert(place, child)

    def remove(self, child: PrefixNode) -> None:
        """Take a child out of the tree."""
        place = bisect_left(self._keys, child.tokens)
        if self._children[place] is not child:
            raise ValueError("the node is not a child of this one")
        del self._keys[place], self._children[place]
        child.is_indexed = False

    def subtree(self) -> Iterator[PrefixNode]:
        """Yield all nodes below this one, parents first."""
        stack = list(self._children)
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node._children)


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
