"""Fragments of real and of imagined caches, and what is refused."""

from __future__ import annotations

import sys

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kernel_tools import World, specs

from liveserve.kernels.base import Direction, as_ids, check_copy
from liveserve.kernels.layout import PagedCache, Plane


def cache_at(*planes: Plane, num_blocks: int = 4) -> PagedCache:
    return PagedCache(tuple((plane,) for plane in planes), num_blocks)


def element_addresses(tensor: torch.Tensor, block_dim: int, block: int) -> set[int]:
    """Addresses of every byte of one block, by indexing alone."""
    view = tensor.select(block_dim, block)
    offsets = torch.zeros(view.shape, dtype=torch.int64)
    for dim, (size, stride) in enumerate(zip(view.shape, view.stride(), strict=True)):
        shape = [1] * view.dim()
        shape[dim] = size
        offsets += torch.arange(size).view(shape) * stride
    width = view.element_size()
    starts = view.data_ptr() + offsets.flatten() * width
    return {int(start) + byte for start in starts for byte in range(width)}


TENSORS = {
    "LBHNC": (torch.zeros(6, 2, 4, 8, dtype=torch.float16), 0, 1),
    "LBNHC": (torch.zeros(6, 4, 2, 8, dtype=torch.float16).transpose(1, 2), 0, 1),
    "BLHNC": (torch.zeros(6, 3, 2, 4, 8)[:, 1], 0, 1),
    "LHBNC": (torch.zeros(2, 6, 4, 8).transpose(0, 1), 0, 2),
    "kv0": (torch.zeros(2, 6, 4, 2, 8), 1, 2),
    "kv1": (torch.zeros(6, 2, 4, 2, 8), 0, 1),
    "one block": (torch.zeros(1, 2, 4, 8), 0, 1),
    "one element": (torch.zeros(6, 1, dtype=torch.int8), 0, 1),
}


@pytest.mark.parametrize("name", TENSORS)
def test_fragments_cover_exactly_the_bytes_of_a_block(name):
    tensor, block_dim, planes = TENSORS[name]
    cache = PagedCache.from_layers([tensor], block_dim=block_dim)
    assert len(cache.layers[0]) == planes
    for block in range(cache.num_blocks):
        covered: list[int] = []
        for plane in range(planes):
            start, length = cache.address(0, plane, block)
            covered += range(start, start + length)
        assert len(covered) == len(set(covered))
        assert set(covered) == element_addresses(tensor, block_dim, block)


def test_kernel_blocks_make_up_the_managers_block():
    tensor = torch.zeros(12, 2, 4, 8)
    cache = PagedCache.from_layers([tensor], kernel_blocks_per_block=3)
    assert cache.num_blocks == 4
    assert cache.address(0, 0, 2) == (tensor[6].data_ptr(), 3 * tensor[0].nbytes)
    apart = PagedCache.from_layers([torch.zeros(12, 2, 64)[:, 1]], kernel_blocks_per_block=3)
    assert len(apart.layers[0]) == 3


def test_a_block_across_layers_is_one_piece_where_it_is_contiguous():
    blhnc = PagedCache.from_allocation(torch.zeros(5, 3, 2, 4, 8), layer_dim=1, block_dim=0)
    assert len(blhnc.fragments()) == 1
    assert blhnc.fragments().max_bytes == blhnc.slot_bytes == 3 * 2 * 4 * 8 * 4
    lbhnc = PagedCache.from_allocation(torch.zeros(3, 5, 2, 4, 8), layer_dim=-5, block_dim=-4)
    assert len(lbhnc.fragments()) == 3
    assert len(lbhnc.fragments(range(1, 2))) == 1
    assert len(lbhnc.fragments(range(2, 2))) == 0
    assert lbhnc.fragments(range(0)).max_bytes == 0


def test_neighbours_with_different_strides_stay_apart():
    cache = cache_at(Plane(1024, 64, 32), Plane(1056, 128, 32), num_blocks=2)
    assert cache.fragments().nbytes.tolist() == [32, 32]


def test_slots_are_packed_layer_major_at_multiples_of_16_bytes():
    odd = [torch.zeros(4, 20, dtype=torch.uint8), torch.zeros(4, 33, dtype=torch.uint8)]
    cache = PagedCache.from_layers(odd)
    assert cache.layer_offsets == (0, 32, 80)
    assert cache.slot_bytes == 80
    assert cache.block_bytes == 53
    assert cache.fragments().slot_offset.tolist() == [0, 32]
    assert cache.fragments(range(1, 2)).slot_offset.tolist() == [32]


@given(specs())
def test_addresses_agree_with_the_tables(spec):
    world = World(spec)
    request = check_copy(
        spec.direction, world.cache, world.pool, spec.block_ids, spec.slot_ids, spec.chosen
    )
    sources, targets, nbytes = request.addresses()
    expected = []
    for block, slot in zip(spec.block_ids, spec.slot_ids, strict=True):
        for layer in world.cache.check_layers(spec.chosen):
            at = world.cache.layer_offsets[layer]
            for plane in range(len(world.cache.layers[layer])):
                start, length = world.cache.address(layer, plane, block)
                held = world.pool[slot].data_ptr() + at
                pair = (held, start) if spec.direction is Direction.LOAD else (start, held)
                expected += [(pair[0] + i, pair[1] + i) for i in range(length)]
                at += -(-length // 16) * 16
    found = [
        (source + i, target + i)
        for source, target, length in zip(
            sources.tolist(), targets.tolist(), nbytes.tolist(), strict=True
        )
        for i in range(length)
    ]
    assert found == expected
    assert request.nbytes == len(expected)
    every = np.concatenate([sources, targets])
    assert not (every % request.alignment_bytes).any()


@given(st.integers(0, 200_000), st.integers(0, 40))
def test_offsets_beyond_two_gib(block, slot):
    """A 96 GB cache whose addresses do not exist: arithmetic only."""
    base, fragment, layers, blocks = 0x7F00_0000_0000, 32768, 48, 200_001
    planes = (Plane(base + i * blocks * fragment, fragment, fragment) for i in range(layers))
    cache = cache_at(*planes, num_blocks=blocks)
    pool = torch.empty(41, cache.slot_bytes, dtype=torch.uint8)
    request = check_copy(Direction.STORE, cache, pool, [block], [slot])
    sources, targets, _ = request.addresses()
    assert sources.tolist() == [
        base + (layer * blocks + block) * fragment for layer in range(layers)
    ]
    assert targets.tolist() == [
        pool.data_ptr() + slot * cache.slot_bytes + layer * fragment for layer in range(layers)
    ]


def test_overlapping_planes_are_named():
    with pytest.raises(ValueError, match="plane 0 of layer 0 and plane 0 of layer 1 overlap"):
        cache_at(Plane(1000, 64, 32), Plane(1031, 64, 32))
    with pytest.raises(ValueError, match="overlap"):
        cache_at(Plane(1000, 64, 32), Plane(1000 + 64 + 33, 64, 32))  # reaches the next block
    with pytest.raises(ValueError, match="overlap"):
        cache_at(Plane(1000, 64, 32), Plane(1040, 100, 16))
    same = torch.zeros(4, 8)
    with pytest.raises(ValueError, match="layer 0 and plane 0 of layer 1 overlap"):
        PagedCache.from_layers([same, same])
    with pytest.raises(ValueError, match="blocks overlap"):
        Plane(1000, 31, 32)
    with pytest.raises(ValueError, match="overlap"):
        PagedCache.from_layers([torch.zeros(100).as_strided((5, 8), (4, 1))])


@given(
    st.integers(1, 5),
    st.integers(40, 150),
    st.sampled_from([0, 0, 1, 40]),
    *(st.integers(1, 40),) * 2,
    st.integers(0, 300),
)
def test_overlap_is_found_if_and_only_if_bytes_are_shared(n, stride, more, len_a, len_b, by):
    first = Plane(1000, stride, len_a)
    second = Plane(1000 + by, stride + more, len_b)

    def taken(plane):
        starts = (plane.base + block * plane.block_stride for block in range(n))
        return {start + i for start in starts for i in range(plane.fragment_bytes)}

    if taken(first) & taken(second):
        with pytest.raises(ValueError, match="overlap"):
            cache_at(first, second, num_blocks=n)
    else:
        cache_at(first, second, num_blocks=n)


def test_planes_interleaved_without_overlap_are_fine():
    cache_at(Plane(1000, 64, 32), Plane(1032, 64, 32))
    cache_at(Plane(1000, 64, 32), Plane(1000 + 64 + 32, 64, 32))


@pytest.mark.parametrize(
    ("layers", "options", "error", "match"),
    [
        ([], {}, ValueError, "at least one tensor"),
        ([[]], {}, ValueError, "at least one"),
        ([np.zeros((2, 2))], {}, TypeError, "layer 0 must be a tensor"),
        ([torch.zeros(2, 0)], {}, ValueError, "layer 0 is empty"),
        ([torch.zeros(4)], {"block_dim": 1}, ValueError, "block_dim 1"),
        ([torch.zeros(4, 512, 3)[..., 0]], {}, ValueError, "layer 0: a block is not contiguous"),
        ([torch.zeros(4, 1).expand(4, 2)], {}, ValueError, "overlap"),
        ([torch.zeros(4, 2), torch.zeros(5, 2)], {}, ValueError, r"number of blocks: \[4, 5\]"),
        ([torch.zeros(4, 2, device="meta")], {}, ValueError, "memory of its own"),
        ([torch.zeros(4, 2).to_sparse()], {}, ValueError, "dense"),
        ([torch.zeros(4, 2)], {"kernel_blocks_per_block": 3}, ValueError, "multiple of"),
        ([torch.zeros(4, 2)], {"kernel_blocks_per_block": 0}, ValueError, "kernel_blocks_per_b"),
    ],
)
def test_what_cannot_be_described_is_refused(layers, options, error, match):
    with pytest.raises(error, match=match):
        PagedCache.from_layers(layers, **options)


@pytest.mark.parametrize("dims", [(0, 0), (-2, 0), (0, 2), (5, 1)])
def test_layer_and_block_dimensions_are_checked(dims):
    with pytest.raises(ValueError, match="layer_dim and block_dim must"):
        PagedCache.from_allocation(torch.zeros(2, 3), layer_dim=dims[0], block_dim=dims[1])


@pytest.fixture
def cache() -> PagedCache:
    return PagedCache.from_layers([torch.zeros(4, 32, dtype=torch.uint8) for _ in range(3)])


@pytest.mark.parametrize(
    ("pool", "match"),
    [
        (torch.zeros(5, 95, dtype=torch.uint8), "slots of 95 bytes.*needs 96"),
        (torch.zeros(5, 96, dtype=torch.int8), "uint8"),
        (torch.zeros(480, dtype=torch.uint8), "uint8 tensor"),
        (torch.zeros(96, 5, dtype=torch.uint8).T, "contiguous"),
        (torch.zeros(96, dtype=torch.uint8).expand(5, 96), "apart"),
        (torch.zeros(5, 96, dtype=torch.uint8, device="meta"), "pool is on meta"),
    ],
)
def test_pools_that_do_not_fit_are_refused(cache, pool, match):
    with pytest.raises(ValueError, match=match):
        check_copy(Direction.LOAD, cache, pool, [0], [0])


@pytest.mark.parametrize(
    ("direction", "blocks", "slots", "layers", "match"),
    [
        (Direction.LOAD, [1, 2, 1], [0, 1, 2], None, r"block_ids must not repeat in a load.*\[1\]"),
        (Direction.STORE, [0, 1], [3, 3], None, r"slot_ids must not repeat in a store.*\[3\]"),
        (Direction.LOAD, [4], [0], None, r"block_ids must lie in 0..3, got \[4\]"),
        (Direction.LOAD, [-1], [0], None, "block_ids must lie in"),
        (Direction.LOAD, [0], [5], None, "slot_ids must lie in 0..4"),
        (Direction.LOAD, [0, 1], [0], None, "pair up, got 2 and 1"),
        (Direction.LOAD, [0.5], [0], None, "block_ids must be one-dimensional integers"),
        (Direction.LOAD, [[0]], [0], None, "block_ids must be one-dimensional integers"),
        (Direction.LOAD, [True], [0], None, "block_ids must be one-dimensional integers"),
        (Direction.LOAD, [0], [0], range(4), "must lie in 0..3"),
        (Direction.LOAD, [0], [0], range(-1, 2), "must lie in 0..3"),
        (Direction.LOAD, [0], [0], range(0, 3, 2), "step 1"),
    ],
)
def test_copies_that_make_no_sense_are_refused(cache, direction, blocks, slots, layers, match):
    pool = torch.zeros(5, 96, dtype=torch.uint8)
    with pytest.raises(ValueError, match=match):
        check_copy(direction, cache, pool, blocks, slots, layers)


def test_ids_come_as_lists_arrays_or_tensors():
    for ids in ([3, 1], (3, 1), range(3, 0, -2), np.array([3, 1], np.int32), torch.tensor([3, 1])):
        assert as_ids("ids", ids, 4).tolist() == [3, 1]
    assert as_ids("ids", [], 4).tolist() == as_ids("ids", torch.tensor([]), 4).tolist() == []
    with pytest.raises(ValueError, match="ids must be on the host"):
        as_ids("ids", torch.zeros(1, dtype=torch.int64, device="meta"), 4)
    with pytest.raises(ValueError, match="must lie in"):
        as_ids("ids", np.array([sys.maxsize * 2 + 1], np.uint64), 4)
