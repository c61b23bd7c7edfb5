"""The logical blocks of one admitted request, and which of them it holds in each layer group."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from cbgen.engine.cache.prefix import PrefixNode, pack_tokens
from cbgen.engine.request import Request


class BlockSequence:
    """Logical blocks in order. In group g it holds those from `first[g]` up to `end[g]`.

    Attributes:
        num_final: leading nodes whose tokens are complete and in the tree.
        is_cacheable: whether later nodes can be put into the tree; not if one before is missing.
        is_stale: whether its keys are those of weights that have changed since.
    """

    __slots__ = ("end", "first", "is_cacheable", "is_stale", "nodes", "num_final")

    def __init__(self, num_groups: int) -> None:
        self.nodes: list[PrefixNode] = []
        self.first = [0] * num_groups
        self.end = [0] * num_groups
        self.num_final = 0
        self.is_cacheable = True
        self.is_stale = False

    def append(self, node: PrefixNode) -> None:
        """Add the next logical block."""
        node.num_users += 1
        self.nodes.append(node)

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

    def table(self, group: int) -> tuple[int, ...]:
        """Return the blocks that it holds in a group, in logical order."""
        nodes = self.nodes[self.first[group] : self.end[group]]
        return tuple(node.blocks[group] for node in nodes)


def packed_tokens(request: Request) -> bytes:
    """Return the known tokens of a waiting request, packed once while they do not change."""
    if request.packed_tokens is None:
        request.packed_tokens = pack_tokens([*request.prompt_ids, *request.generated_tokens])
    return request.packed_tokens


def packed_range(request: Request, begin: int, end: int) -> bytes:
    """Return the known tokens of a request from position `begin` up to `end`, packed."""
    num_prompt = len(request.prompt_ids)
    if begin >= num_prompt:
        return pack_tokens(request.generated_tokens[begin - num_prompt : end - num_prompt])
    generated = request.generated_tokens[: max(0, end - num_prompt)]
    return pack_tokens([*request.prompt_ids[begin:end], *generated])


def check_sequences(
    sequences: Mapping[str, BlockSequence], active: Sequence[Request], page_size: int
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
        if not -(-stored // page_size) <= count <= -(-known // page_size):
            raise AssertionError(
                f"{name} holds {count} blocks with {stored} tokens stored, {known} known"
            )
        if request.num_slots != min(sequence.end) * page_size or request.num_slots < stored:
            raise AssertionError(f"{name} has {stored} tokens stored and {request.num_slots} slots")
        for index, node in enumerate(sequence.nodes):
            if node.index != index or node.num_users < 1:
                raise AssertionError(f"logical block {index} of {name} is out of place")
            if any(block < 0 for _, block in sequence.held_of(node)):
                raise AssertionError(f"logical block {index} of {name} is held and not there")
