"""Pages of all layers in shared tensors; copies and swaps of whole blocks."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from cbgen.engine import storage as storage_module
from cbgen.engine.attention.base import LayerCache
from cbgen.engine.cache.groups import AttentionSpan, LayerFacts, LayerGroup, group_layers
from cbgen.engine.cache.shape import CacheShape
from cbgen.engine.step import BlockCopy, BlockSwap
from cbgen.engine.storage import KVStorage

CPU = torch.device("cpu")
PAGE_SIZE = 4
NUM_BLOCKS = 6


def full(index: int, num_kv_heads: int = 1, key_dim: int = 3, value_dim: int = 2) -> LayerFacts:
    return LayerFacts(index, 4, num_kv_heads, key_dim, value_dim)


def sliding(index: int, num_kv_heads: int = 1, key_dim: int = 3, value_dim: int = 2) -> LayerFacts:
    return LayerFacts(index, 4, num_kv_heads, key_dim, value_dim, AttentionSpan(8))


ONE_GROUP = [full(0), full(1)]
TWO_GROUPS = [sliding(0), full(1), sliding(2), full(3)]
UNEQUAL_PAGES = [sliding(0), full(1, 2, 5, 4), sliding(2), full(3, 2, 5, 4)]
LAYOUTS = pytest.mark.parametrize(
    "layers", [ONE_GROUP, TWO_GROUPS, UNEQUAL_PAGES], ids=["one group", "two groups", "unequal"]
)


def make_storage(
    layers: Sequence[LayerFacts], *, num_blocks: int = NUM_BLOCKS, num_host_blocks: int = 0
) -> KVStorage:
    shape = CacheShape(PAGE_SIZE, group_layers(layers))
    return KVStorage(shape.sized(num_blocks, 64, num_host_blocks), CPU)


def caches(storage: KVStorage, group: LayerGroup) -> list[LayerCache]:
    return [storage.layers[layer.index] for layer in group.layers]


def fill(storage: KVStorage, group: LayerGroup, block: int, seed: int) -> None:
    """Write random tokens into a block, as a request of the group would."""
    generator = torch.Generator().manual_seed(seed)
    slots = torch.arange(block * PAGE_SIZE, (block + 1) * PAGE_SIZE)
    for cache in caches(storage, group):
        shapes = [(PAGE_SIZE, *pages.shape[2:]) for pages in (cache.keys, cache.values)]
        keys, values = (torch.randn(*shape, generator=generator) for shape in shapes)
        cache.write(keys, values, slots)


def contents(storage: KVStorage, group: LayerGroup, block: int) -> list[torch.Tensor]:
    return [
        pages[block].clone()
        for cache in caches(storage, group)
        for pages in (cache.keys, cache.values)
    ]


def same(first: list[torch.Tensor], second: list[torch.Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


@LAYOUTS
def test_pages_have_the_shapes_of_their_layer(layers):
    storage = make_storage(layers)
    for layer in layers:
        cache = storage.layers[layer.index]
        shape = (NUM_BLOCKS, PAGE_SIZE, layer.num_kv_heads)
        assert cache.keys.shape == (*shape, layer.key_dim)
        assert cache.values.shape == (*shape, layer.value_dim)


def test_layers_at_the_same_place_of_two_groups_share_memory():
    storage = make_storage(TWO_GROUPS)
    first, second, third, fourth = (storage.layers[index] for index in range(4))
    assert first.keys.data_ptr() == second.keys.data_ptr()
    assert third.values.data_ptr() == fourth.values.data_ptr()
    assert first.keys.data_ptr() != third.keys.data_ptr()


@pytest.mark.parametrize("layers", [ONE_GROUP, TWO_GROUPS])
def test_pages_of_one_shape_are_contiguous(layers):
    storage = make_storage(layers)
    for layer in layers:
        cache = storage.layers[layer.index]
        assert cache.keys.is_contiguous()
        assert cache.values.is_contiguous()


@LAYOUTS
def test_the_memory_is_what_the_plan_counts(layers):
    storage = make_storage(layers)
    memory = {
        pages.untyped_storage().data_ptr(): pages.untyped_storage().nbytes()
        for layer in layers
        for pages in (storage.layers[layer.index].keys, storage.layers[layer.index].values)
    }
    shape = CacheShape(PAGE_SIZE, group_layers(layers))
    assert sum(memory.values()) == NUM_BLOCKS * shape.block_bytes


@LAYOUTS
def test_blocks_of_different_groups_do_not_touch_each_other(layers):
    storage, groups = make_storage(layers), group_layers(layers)
    owners = [groups[block % len(groups)] for block in range(NUM_BLOCKS)]
    for block, group in enumerate(owners):
        fill(storage, group, block, seed=block)
    for block, group in enumerate(owners):
        alone = make_storage(layers)
        fill(alone, group, block, seed=block)
        assert same(contents(storage, group, block), contents(alone, group, block))


@LAYOUTS
def test_what_is_written_lands_in_its_slots(layers):
    storage = make_storage(layers)
    for layer in layers:
        cache = storage.layers[layer.index]
        for pages in (cache.keys, cache.values):
            pages[:] = 0.0
        keys, values = (
            torch.full_like(cache.keys[0, :2], 8.0),
            torch.full_like(cache.values[0, :2], 9.0),
        )
        cache.write(keys, values, torch.tensor([11, 2]))
        for pages, value in ((cache.keys, 8.0), (cache.values, 9.0)):
            assert pages[2, 3].unique().tolist() == pages[0, 2].unique().tolist() == [value]
            assert (pages != 0).sum() == 2 * pages[0, 0].numel()


@LAYOUTS
def test_a_copy_copies_the_first_slots_in_every_layer_of_the_group(layers):
    storage = make_storage(layers)
    for group in group_layers(layers):
        fill(storage, group, 1, seed=1)
        fill(storage, group, 2, seed=2)
        storage.copy_blocks([BlockCopy(source=1, target=2, num_tokens=3)])
        source = [pages[:3] for pages in contents(storage, group, 1)]
        assert same([pages[:3] for pages in contents(storage, group, 2)], source)


def test_a_copy_leaves_the_other_slots_and_blocks_alone():
    storage, (group,) = make_storage(ONE_GROUP), group_layers(ONE_GROUP)
    for block in range(NUM_BLOCKS):
        fill(storage, group, block, seed=block)
    before = [contents(storage, group, block) for block in range(NUM_BLOCKS)]
    storage.copy_blocks([BlockCopy(1, 2, 3), BlockCopy(1, 4, 1)])
    for block in (0, 1, 3, 5):
        assert same(contents(storage, group, block), before[block])
    assert same([p[3:] for p in contents(storage, group, 2)], [p[3:] for p in before[2]])


def test_copies_of_different_lengths_each_copy_what_they_must():
    storage, (group,) = make_storage(ONE_GROUP), group_layers(ONE_GROUP)
    for block in range(3):
        fill(storage, group, block, seed=block)
    storage.copy_blocks([BlockCopy(0, 1, 1), BlockCopy(0, 2, 4)])
    assert same(
        [p[:1] for p in contents(storage, group, 1)], [p[:1] for p in contents(storage, group, 0)]
    )
    assert same(contents(storage, group, 2), contents(storage, group, 0))


@LAYOUTS
def test_all_copies_read_before_any_of_them_writes(layers):
    storage = make_storage(layers)
    for group in group_layers(layers):
        for block in range(3):
            fill(storage, group, block, seed=block)
        before = [contents(storage, group, block) for block in range(3)]
        storage.copy_blocks([BlockCopy(0, 1, 4), BlockCopy(1, 2, 4), BlockCopy(2, 0, 4)])
        after = [contents(storage, group, block) for block in range(3)]
        assert same(after[1], before[0])
        assert same(after[2], before[1])
        assert same(after[0], before[2])


@LAYOUTS
@pytest.mark.parametrize("limit", [1, 300, 1 << 26])
def test_swapped_blocks_come_back_bit_for_bit(layers, limit, monkeypatch):
    """The limits cut staging and host pool into pieces of one block, a few blocks, and all."""
    monkeypatch.setattr(storage_module, "_STAGING_BYTES", limit)
    monkeypatch.setattr(storage_module, "_HOST_CHUNK_BYTES", limit)
    storage, groups = make_storage(layers, num_host_blocks=5), group_layers(layers)
    owners = {block: groups[block % len(groups)] for block in (0, 3, 4, 5)}
    for block, group in owners.items():
        fill(storage, group, block, seed=block)
    before = {block: contents(storage, group, block) for block, group in owners.items()}
    host = {0: 4, 3: 0, 4: 2, 5: 3}
    storage.swap_out([BlockSwap(block, host[block]) for block in owners])
    for block, group in owners.items():
        fill(storage, group, block, seed=99)
    storage.swap_in([BlockSwap((block + 1) % NUM_BLOCKS, host[block]) for block in owners])
    for block, group in owners.items():
        assert same(contents(storage, group, (block + 1) % NUM_BLOCKS), before[block])


def test_swaps_keep_numbers_that_are_none():
    storage = make_storage(ONE_GROUP, num_host_blocks=1)
    keys = storage.layers[0].keys
    bits = torch.tensor([0x7FC01234], dtype=torch.int32).view(torch.float32)
    keys[2] = bits
    storage.swap_out([BlockSwap(2, 0)])
    storage.swap_in([BlockSwap(3, 0)])
    assert torch.equal(keys[3].view(torch.int32), keys[2].view(torch.int32))


def test_a_host_block_may_be_read_twice():
    storage, (group,) = make_storage(ONE_GROUP, num_host_blocks=1), group_layers(ONE_GROUP)
    fill(storage, group, 0, seed=1)
    storage.swap_out([BlockSwap(0, 0)])
    storage.swap_in([BlockSwap(2, 0)])
    storage.swap_in([BlockSwap(4, 0)])
    for block in (2, 4):
        assert same(contents(storage, group, block), contents(storage, group, 0))


def test_no_swaps_and_no_copies_need_no_host_pool():
    storage = make_storage(ONE_GROUP)
    storage.swap_out([])
    storage.swap_in([])
    storage.copy_blocks([])


def test_a_model_without_attention_layers_has_nothing_to_copy():
    storage = KVStorage(CacheShape(PAGE_SIZE).sized(2, 64, 2), CPU)
    storage.copy_blocks([BlockCopy(0, 1, 2)])
    storage.swap_out([BlockSwap(0, 1)])
    storage.swap_in([BlockSwap(0, 1)])
