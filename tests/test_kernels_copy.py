"""Every copy method against the oracle, on a CPU: the Triton kernel interpreted, the raw kernel's
loop compiled for the CPU, the driver and the streams replaced."""

from __future__ import annotations

import shutil
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_tools import (
    FakeDriver,
    FakeStream,
    World,
    emulated_raw_copy,
    interpreted_kernel,
    run_all,
    specs,
)

from liveserve.kernels.base import Direction
from liveserve.kernels.batch_copy import BatchCopy, runs_of
from liveserve.kernels.cuda_driver import SRC_ACCESS_ORDER_ANY, SRC_ACCESS_ORDER_STREAM
from liveserve.kernels.layout import PagedCache
from liveserve.kernels.methods import all_methods, available_methods
from liveserve.kernels.raw_copy import RawCopy
from liveserve.kernels.reference import ReferenceCopy
from liveserve.kernels.staged_copy import StagedCopy
from liveserve.kernels.triton_copy import TritonCopy


def same_as_reference(spec, method) -> bool:
    expected, world = World(spec), World(spec)
    expected.copy(ReferenceCopy())
    world.copy(method)
    return world == expected


@given(specs())
def test_reference_copies_byte_by_byte(spec):
    expected, world = World(spec), World(spec)
    for block, slot in zip(spec.block_ids, spec.slot_ids, strict=True):
        for layer in expected.cache.check_layers(spec.chosen):
            at = expected.cache.layer_offsets[layer]
            for plane in expected.cache.layers[layer]:
                held = expected.pool[slot, at : at + plane.fragment_bytes]
                pair = (plane.view[block], held)
                target, source = pair if spec.direction is Direction.LOAD else pair[::-1]
                target.copy_(source)
                at += -(-plane.fragment_bytes // 16) * 16
    world.copy(ReferenceCopy())
    assert world == expected


@pytest.fixture(scope="module")
def triton_kernel():
    pytest.importorskip("triton")
    return interpreted_kernel()


@given(spec=specs(), programs=st.integers(1, 5), tile_bytes=st.sampled_from([16, 64, 512]))
def test_triton_kernel(triton_kernel, spec, programs, tile_bytes):
    method = TritonCopy(programs, tile_bytes=tile_bytes, kernel=triton_kernel)
    assert same_as_reference(spec, method)


@given(spec=specs(aligned=True), programs=st.integers(1, 5))
@settings(max_examples=30)
def test_triton_kernel_with_16_byte_accesses(triton_kernel, spec, programs):
    assert same_as_reference(spec, TritonCopy(programs, tile_bytes=128, kernel=triton_kernel))


def test_programs_share_the_tiles(triton_kernel):
    """A tile is stored once, whatever the grid."""
    from triton.runtime.interpreter import InterpreterBuilder

    cache = PagedCache.from_layers([torch.zeros(7, 256, dtype=torch.uint8)])
    pool = torch.zeros(7, 256, dtype=torch.uint8)
    for programs in (1, 3, 100):
        store = InterpreterBuilder.create_masked_store
        with mock.patch.object(
            InterpreterBuilder, "create_masked_store", autospec=True, side_effect=store
        ) as stores:
            method = TritonCopy(programs, tile_bytes=64, kernel=triton_kernel)
            method.copy(Direction.STORE, cache, pool, range(7), range(7))
        assert stores.call_count == 7 * 256 // 64


@given(specs())
def test_batched_copy_engine(spec):
    driver = FakeDriver()
    assert same_as_reference(spec, BatchCopy(driver=driver))
    assert len(driver.calls) <= 1
    assert driver.orders <= {SRC_ACCESS_ORDER_STREAM}


@given(specs())
def test_looped_copy_engine(spec):
    assert same_as_reference(spec, BatchCopy(batched=False, driver=FakeDriver()))


@given(spec=specs(), half_bytes=st.sampled_from([1, 300, 10_000]), use_triton=st.booleans())
def test_staged_copy(triton_kernel, spec, half_bytes, use_triton):
    gather = TritonCopy(kernel=triton_kernel) if use_triton else ReferenceCopy()
    method = StagedCopy(half_bytes, gather, BatchCopy(driver=FakeDriver()))
    world = World(spec)
    if world.cache.block_bytes == world.cache.slot_bytes:
        assert same_as_reference(spec, method)
    else:
        with pytest.raises(ValueError, match="multiples of 16"):
            world.copy(method)
        assert world == World(spec)


class StreamReference(ReferenceCopy):
    def copy(self, *args, **kwargs):
        *rest, stream = args
        stream.enqueue(lambda: ReferenceCopy.copy(self, *rest))


class StreamEngine(BatchCopy):
    def submit(self, pieces, direction, device, stream):
        stream.enqueue(lambda: BatchCopy.submit(self, pieces, direction, device, None))


@given(
    spec=specs(aligned=True).filter(lambda s: s.kind != "padded"),
    half_bytes=st.sampled_from([1, 300]),
    order=st.integers(0, 10**6),
)
@settings(max_examples=300)
def test_staged_copy_is_ordered_by_events_alone(spec, half_bytes, order):
    """Any order that the streams allow gives the bytes of stream order: after what the stream did
    before, and before what it does next. Two copies share the buffer."""
    expected, world = World(spec), World(spec)
    compute, link = FakeStream(), FakeStream()
    engine = StreamEngine(driver=FakeDriver())
    method = StagedCopy(half_bytes, StreamReference(), engine, lambda device: link)

    def rewrite(target: World) -> None:
        for memory in target.memory:
            memory.bitwise_not_()

    snapshots = []
    for _ in range(2):
        compute.enqueue(lambda: rewrite(world))
        world.copy(method, stream=compute)
        compute.enqueue(lambda: snapshots.append([m.clone() for m in world.memory]))
    run_all([compute, link], order)
    for snapshot in snapshots:
        rewrite(expected)
        expected.copy(ReferenceCopy())
        assert all(map(torch.equal, snapshot, expected.memory))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    if shutil.which("g++") is None:
        pytest.skip("the raw kernel's loop needs g++ to run on a CPU")
    return tmp_path_factory.mktemp("raw")


@pytest.mark.parametrize("early", [True, False])
@pytest.mark.parametrize(
    "sizes",
    [
        {"warps": 2, "stages": 3, "chunk_bytes": 128, "lag": 1},
        {"warps": 1, "stages": 4, "chunk_bytes": 256, "lag": 3},
    ],
)
@given(spec=specs(aligned=True), programs=st.integers(1, 3))
@settings(max_examples=60)
def test_raw_kernel_loop(folder, sizes, early, spec, programs):
    assert same_as_reference(spec, emulated_raw_copy(folder, programs, early, **sizes))


@pytest.mark.parametrize("early", [True, False])
def test_raw_kernel_loop_reuses_its_buffers(folder, early):
    """Many turns of every ring, and lengths that are no multiples of 16."""
    sizes = {"warps": 2, "stages": 3, "chunk_bytes": 128, "lag": 1}
    memory = torch.randint(0, 256, (6, 5008), dtype=torch.uint8)
    cache = PagedCache.from_layers([memory[:, :5003]])
    pool = torch.zeros(6, cache.slot_bytes, dtype=torch.uint8)
    method = emulated_raw_copy(folder, 2, early, **sizes)
    method.copy(Direction.STORE, cache, pool, range(6), range(5, -1, -1))
    assert torch.equal(pool[:, :5003], memory[:, :5003].flip(0))
    assert not pool[:, 5003:].any()


@given(specs())
def test_raw_copy_refuses_odd_addresses(spec):
    world = World(spec)
    method = RawCopy(launch=lambda grid, arguments: None)
    if world.cache.fragments().alignment_bytes < 16 or world.pool.data_ptr() % 16:
        assert not method.supports(world.cache, world.pool)
        with pytest.raises(ValueError, match="multiples of 16"):
            world.copy(method)


def methods_here(triton_kernel):
    engine = BatchCopy(driver=FakeDriver())
    triton = TritonCopy(kernel=triton_kernel)
    return [
        ReferenceCopy(),
        triton,
        engine,
        BatchCopy(batched=False, driver=FakeDriver()),
        StagedCopy(kernel=triton, engine=engine),
        RawCopy(launch=lambda grid, arguments: None),
    ]


def test_duplicates_are_refused_by_every_method_and_nothing_is_copied(triton_kernel):
    memory = torch.arange(128, dtype=torch.uint8).view(4, 32)
    pool = torch.zeros(4, 32, dtype=torch.uint8)
    cache = PagedCache.from_layers([memory])
    for method in methods_here(triton_kernel):
        for direction, blocks, slots in (
            (Direction.STORE, [0, 1], [2, 2]),
            (Direction.LOAD, [1, 1], [0, 1]),
        ):
            with pytest.raises(ValueError, match="must not repeat"):
                method.copy(direction, cache, pool, blocks, slots)
    assert not pool.any()
    assert torch.equal(memory.flatten(), torch.arange(128, dtype=torch.uint8))


def test_ids_may_change_as_soon_as_copy_returns(triton_kernel):
    memory = torch.arange(128, dtype=torch.uint8).view(4, 32)
    cache = PagedCache.from_layers([memory])
    for method in methods_here(triton_kernel)[:5]:
        pool = torch.zeros(4, 32, dtype=torch.uint8)
        blocks, slots = torch.tensor([3]), torch.tensor([1])
        method.copy(Direction.STORE, cache, pool, blocks, slots)
        blocks[0], slots[0] = 0, 0
        assert torch.equal(pool[1], memory[3])
        assert not pool[0].any()


def test_contiguous_blocks_are_one_piece_of_the_batch():
    memory = torch.zeros(8, 3, 64, dtype=torch.uint8)
    cache = PagedCache.from_allocation(memory, layer_dim=1, block_dim=0)
    pool = torch.zeros(8, cache.slot_bytes, dtype=torch.uint8)
    driver = FakeDriver()
    BatchCopy(driver=driver).copy(Direction.STORE, cache, pool, [5, 2, 3, 4], [7, 4, 5, 6])
    assert driver.calls == [1]


def test_evenly_spaced_blocks_are_one_2d_copy_for_each_layer():
    cache = PagedCache.from_allocation(torch.zeros(3, 8, 64, dtype=torch.uint8))
    pool = torch.zeros(8, cache.slot_bytes, dtype=torch.uint8)
    driver = FakeDriver()
    method = BatchCopy(batched=False, driver=driver)
    method.copy(Direction.LOAD, cache, pool, [1, 2, 3, 5], [0, 1, 2, 4])
    assert driver.calls == [3, 1] * 3


def test_pitches_stay_below_what_a_2d_copy_takes():
    columns = (np.array(c) for c in ([1000, 2**32], [2000, 4000], [64, 64]))
    assert [run[-1] for run in runs_of(tuple(columns))] == [1, 1]


def test_runs_hold_pieces_of_one_length():
    columns = (np.array(c) for c in ([100, 200, 300, 400], [1000, 1200, 1400, 1600], [8, 8, 4, 4]))
    assert runs_of(tuple(columns)) == [(100, 100, 1000, 200, 8, 2), (300, 100, 1400, 200, 4, 2)]


def test_sources_are_read_out_of_order_only_in_settled_loads():
    for settled in (False, True):
        for direction in Direction:
            driver = FakeDriver()
            cache = PagedCache.from_layers([torch.zeros(4, 32, dtype=torch.uint8)])
            pool = torch.zeros(4, 32, dtype=torch.uint8)
            method = BatchCopy(settled_loads=settled, driver=driver)
            method.copy(direction, cache, pool, [0], [1])
            anyhow = settled and direction is Direction.LOAD
            assert driver.orders == {SRC_ACCESS_ORDER_ANY if anyhow else SRC_ACCESS_ORDER_STREAM}


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: TritonCopy(programs=0), "programs"),
        (lambda: TritonCopy(num_warps=3), "num_warps"),
        (lambda: TritonCopy(tile_bytes=0), "tile_bytes"),
        (lambda: StagedCopy(half_bytes=0), "half_bytes"),
        (lambda: RawCopy(lag=4), "lag in 1..stages-1"),
        (lambda: RawCopy(chunk_bytes=100), "chunk_bytes"),
        (lambda: RawCopy(stages=9), "shared|more than the"),
    ],
)
def test_sizes_that_cannot_be_are_refused(make, match):
    with pytest.raises(ValueError, match=match):
        make()


def test_names_and_what_a_machine_without_a_gpu_can_run():
    methods = all_methods()
    assert set(methods) == {"batch", "memcpy", "staged", "raw", "triton", "reference"}
    assert all(method.name == name for name, method in methods.items())
    if not torch.cuda.is_available():
        assert set(available_methods()) == {"reference"}
        cache = PagedCache.from_layers([torch.zeros(4, 32, dtype=torch.uint8)])
        pool = torch.zeros(4, 32, dtype=torch.uint8)
        for name in set(methods) - {"reference"}:
            assert not methods[name].supports(cache, pool)
            with pytest.raises(ValueError, match="GPU"):
                methods[name].copy(Direction.LOAD, cache, pool, [0], [0])
