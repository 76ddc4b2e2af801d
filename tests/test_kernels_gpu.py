"""Every method on the GPU itself: bytes, the order of streams, big offsets. Skipped without one."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from kernel_tools import KINDS, Spec, World

from liveserve.kernels.base import Direction
from liveserve.kernels.layout import PagedCache
from liveserve.kernels.methods import all_methods
from liveserve.kernels.reference import ReferenceCopy

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")

NAMES = tuple(all_methods())
BASE = Spec(
    kind="LBHNC",
    layers=3,
    blocks=40,
    heads=2,
    tokens=16,
    content=64,
    slots=50,
    shift=0,
    gap=0,
    pool_gap=0,
    direction=Direction.LOAD,
    block_ids=(39, 0, 7, 8, 9, 20),
    slot_ids=(1, 49, 4, 5, 6, 30),
    chosen=None,
    seed=1,
)
VARIANTS = {
    "all layers": {},
    "one layer": {"chosen": range(1, 2)},
    "no layers": {"chosen": range(1, 1)},
    "no blocks": {"block_ids": (), "slot_ids": ()},
    "last block": {"block_ids": (39,), "slot_ids": (49,)},
    "odd lengths": {"content": 67, "tokens": 5, "pool_gap": 4},
    "ragged": {"kind": "padded", "content": 67, "tokens": 5, "pool_gap": 16},
    "odd addresses": {"kind": "padded", "shift": 4, "gap": 4},
    "big pieces": {"tokens": 128, "content": 512},
}


@pytest.fixture(scope="module")
def methods():
    return {name: method for name, method in all_methods().items() if method.available()}


@pytest.mark.parametrize("direction", Direction)
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("name", NAMES)
def test_bytes_are_those_of_the_reference(methods, name, variant, direction):
    if name not in methods:
        pytest.skip(f"{name} is not available on this machine")
    kinds = KINDS if "kind" not in VARIANTS[variant] else (VARIANTS[variant]["kind"],)
    for kind in kinds:
        changes = {"kind": kind, **VARIANTS[variant]}
        spec = dataclasses.replace(BASE, direction=direction, **changes)
        world, expected = World(spec, "cuda"), World(spec)
        if not methods[name].supports(world.cache, world.pool):
            assert variant.startswith(("odd", "ragged")), (name, kind)
            continue
        world.copy(methods[name])
        torch.cuda.synchronize()
        expected.copy(ReferenceCopy())
        for found, wanted in zip(world.memory, expected.memory, strict=True):
            assert torch.equal(found.cpu(), wanted), (name, kind)


@pytest.mark.parametrize("name", NAMES)
def test_copies_keep_the_order_of_their_stream(methods, name):
    """Compute writes, then the copy reads; the copy writes, then compute reads. No host wait."""
    if name not in methods:
        pytest.skip(f"{name} is not available on this machine")
    memory = torch.zeros(24, 64, 64 * 1024, dtype=torch.uint8, device="cuda")
    cache = PagedCache.from_allocation(memory)
    pool = torch.zeros(16, cache.slot_bytes, dtype=torch.uint8, pin_memory=True)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    ids = list(range(16))
    results = []
    with torch.cuda.stream(stream):
        for value in (1, 2, 3):
            torch.cuda._sleep(20_000_000)  # about 10 ms in which nothing has been written yet
            memory[:, :16] = value
            methods[name].copy(Direction.STORE, cache, pool, ids, ids, stream=stream)
            memory[:, :16] = 0
            methods[name].copy(Direction.LOAD, cache, pool, ids, ids[::-1], stream=stream)
            results.append(memory[:, :16].clone())
    stream.synchronize()
    for value, result in zip((1, 2, 3), results, strict=True):
        assert (result == value).all(), (name, value)


@pytest.mark.parametrize("name", NAMES)
def test_offsets_beyond_two_gib(methods, name):
    if name not in methods:
        pytest.skip(f"{name} is not available on this machine")
    memory = torch.empty(2, 40_000, 64 * 1024, dtype=torch.uint8, device="cuda")
    cache = PagedCache.from_allocation(memory)
    last = cache.num_blocks - 1
    memory[:, last] = torch.arange(2, device="cuda", dtype=torch.uint8)[:, None] + 5
    pool = torch.zeros(2, cache.slot_bytes, dtype=torch.uint8, pin_memory=True)
    methods[name].copy(Direction.STORE, cache, pool, [last], [1])
    torch.cuda.synchronize()
    assert pool[1].view(2, -1).unique(dim=1).flatten().tolist() == [5, 6]
    memory[:, last] = 0
    methods[name].copy(Direction.LOAD, cache, pool, [last], [1])
    torch.cuda.synchronize()
    assert memory[:, last].unique(dim=1).flatten().tolist() == [5, 6]


def test_kernels_reach_a_staging_buffer_on_the_gpu(methods):
    for name in ("triton", "raw", "batch", "memcpy"):
        if name in methods:
            spec = dataclasses.replace(BASE, direction=Direction.STORE)
            world, expected = World(spec, "cuda"), World(spec)
            pool = world.pool.to("cuda")
            methods[name].copy(spec.direction, world.cache, pool, spec.block_ids, spec.slot_ids)
            torch.cuda.synchronize()
            expected.copy(ReferenceCopy())
            assert torch.equal(pool.cpu(), expected.pool), name
