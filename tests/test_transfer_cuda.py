"""The CUDA link's logic, against a fake of the few torch.cuda calls that it makes.

No GPU takes part. The fake runs what was enqueued on a stream only when an event on it is waited
for, and in order, so a link that reports too early, skips an event or mixes streams is seen. What
it cannot show is that CUDA does what the fake does.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transfer_tools import LOAD, STORE, World

from liveserve.kernels.base import Direction
from liveserve.kernels.calibrate import Rate, Table
from liveserve.kernels.reference import ReferenceCopy
from liveserve.kvtier import links, transfer_cuda
from liveserve.kvtier.transfer import TransferEngine
from liveserve.kvtier.transfer_base import Kind, State, TransferError
from liveserve.kvtier.transfer_cuda import CudaLink

WAIT_S = 10


class FakeStream:
    def __init__(self, device: object) -> None:
        self.work: deque[Callable[[], None]] = deque()
        self.waits: list[FakeEvent] = []
        self.lock = threading.Lock()

    def wait_event(self, event: FakeEvent) -> None:
        self.waits.append(event)

    def run_until(self, event: FakeEvent | None) -> None:
        with self.lock:
            while self.work and (event is None or not event.passed):
                self.work.popleft()()


class FakeEvent:
    """Passes when its stream has run what was enqueued before it."""

    def __init__(self, *, blocking: bool = False) -> None:
        self.blocking = blocking
        self.passed = False
        self.stream: FakeStream | None = None

    def record(self, stream: FakeStream) -> None:
        self.stream = stream
        stream.work.append(lambda: setattr(self, "passed", True))

    def synchronize(self) -> None:
        assert self.blocking, "an event that spins would hold a core"
        assert self.stream is not None
        self.stream.run_until(self)
        if FAILURES:
            raise FAILURES.pop()


FAILURES: list[Exception] = []


@dataclass
class FakeCuda:
    """Stands for ``torch.cuda``."""

    streams: list[FakeStream] = field(default_factory=list)
    compute: FakeStream = field(default_factory=lambda: FakeStream(None))
    devices: list[tuple[str, object]] = field(default_factory=list)
    synchronized: int = 0
    Event = FakeEvent

    def Stream(self, device: object) -> FakeStream:
        self.streams.append(FakeStream(device))
        return self.streams[-1]

    def current_stream(self, device: object) -> FakeStream:
        return self.compute

    def set_device(self, device: object) -> None:
        self.devices.append((threading.current_thread().name, device))

    def synchronize(self, device: object) -> None:
        self.synchronized += 1
        for stream in self.streams:
            stream.run_until(None)


class EnqueuedCopy:
    """A copy method that enqueues, as a GPU's do."""

    name = "enqueued"

    def __init__(self) -> None:
        self.pieces: list[tuple[Direction, FakeStream]] = []
        self.fail_on: set[int] = set()
        self.gate = threading.Event()
        self.gate.set()

    def copy(self, direction, cache, pool, block_ids, slot_ids, layers, stream) -> None:
        self.gate.wait(WAIT_S)
        number = len(self.pieces)
        self.pieces.append((direction, stream))
        arguments = direction, cache, pool, block_ids, slot_ids, layers
        stream.work.append(lambda: ReferenceCopy().copy(*arguments))
        if number in self.fail_on:
            raise RuntimeError(f"launch {number} failed")


@dataclass
class Rig:
    engine: TransferEngine
    link: CudaLink
    world: World
    method: EnqueuedCopy
    cuda: FakeCuda


@pytest.fixture
def rig(monkeypatch):
    FAILURES.clear()
    cuda = FakeCuda()
    # The module's own name `torch`: the reference copy inside the fake needs the real one.
    fake_torch = SimpleNamespace(cuda=cuda, device=lambda name: name)
    monkeypatch.setattr(transfer_cuda, "torch", fake_torch)
    world = World.random(5, num_layers=4, num_blocks=64, num_slots=64)
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda self: True)
    method = EnqueuedCopy()
    # A piece is four blocks.
    gbps = 2 * 4 * world.cache.slot_bytes / 1e-3 / 1e9
    link = CudaLink(world.cache, world.pool, choose=lambda *_: method, gbps=gbps)
    engine = TransferEngine(world.cache, world.pool, link)
    yield Rig(engine, link, world, method, cuda)
    method.gate.set()
    engine.close()


def test_bytes_arrive_on_a_stream_per_direction(rig):
    expected, content = rig.world.slots_array()[:16], rig.world.blocks_array()[20:36]
    load = rig.engine.submit(Kind.PRELOAD, range(16), range(16))
    store = rig.engine.submit(Kind.STORE, range(20, 36), range(20, 36))
    assert rig.engine.wait(load, WAIT_S)
    assert rig.engine.wait(store, WAIT_S)
    assert load.ok
    assert store.ok
    assert np.array_equal(rig.world.blocks_array()[:16], expected)
    assert np.array_equal(rig.world.slots_array()[20:36], content)
    used = {d: {id(s) for way, s in rig.method.pieces if way is d} for d in (LOAD, STORE)}
    assert len(used[LOAD]) == len(used[STORE]) == 1
    assert used[LOAD] != used[STORE]
    assert len(rig.method.pieces) == 8
    assert rig.cuda.synchronized == 0
    assert {name for name, _ in rig.cuda.devices} == {"liveserve-load", "liveserve-store"}


def test_compute_waits_on_the_event_of_the_last_piece(rig):
    rig.method.gate.clear()
    load = rig.engine.submit(Kind.PRELOAD, range(16), range(16))
    threading.Timer(0.05, rig.method.gate.set).start()
    rig.engine.order_compute(load)
    if rig.cuda.compute.waits:  # else it was there already
        (event,) = rig.cuda.compute.waits
        event.synchronize()
        expected = rig.world.slots_array()[:16]
        assert np.array_equal(rig.world.blocks_array()[:16], expected)
    assert rig.engine.wait(load, WAIT_S)
    stream = FakeStream(None)
    rig.link.order("fence", stream)
    assert stream.waits == ["fence"]


def test_bytes_under_way_are_bounded(rig):
    seen = []

    def watch(*arguments: object) -> EnqueuedCopy:
        seen.append(rig.engine.stats.lanes[LOAD].in_flight_bytes)
        return rig.method

    rig.link._choose = watch
    load = rig.engine.submit(Kind.PRELOAD, range(64), range(64))
    assert rig.engine.wait(load, WAIT_S)
    assert len(seen) == 16
    assert max(seen) == rig.engine.max_in_flight_bytes  # two pieces: the link never runs dry
    assert load.ok


def test_a_failing_launch_ends_its_transfer_once_nothing_of_it_moves(rig):
    rig.method.gate.clear()
    rig.method.fail_on = {1}
    bad = rig.engine.submit(Kind.ON_PATH, range(12), range(12))
    good = rig.engine.submit(Kind.ON_PATH, range(20, 32), range(20, 32))
    rig.method.gate.set()
    assert rig.engine.wait(bad, WAIT_S)
    after = rig.world.blocks_array()[:12]
    assert rig.cuda.synchronized == 1
    assert rig.engine.wait(good, WAIT_S)
    assert bad.state is State.FAILED
    assert "launch 1 failed" in str(bad.error)
    assert good.ok
    assert np.array_equal(rig.world.blocks_array()[:12], after)
    # What was enqueued before the failure did run, before the report.
    assert np.array_equal(after[:8], rig.world.slots_array()[:8])
    with pytest.raises(TransferError, match="launch 1 failed"):
        rig.engine.order_compute(bad)


def test_an_error_that_an_event_brings_fails_the_transfer(rig):
    FAILURES.append(RuntimeError("an illegal memory access was encountered"))
    bad = rig.engine.submit(Kind.ON_PATH, [0], [0])
    assert rig.engine.wait(bad, WAIT_S)
    assert "illegal memory access" in str(bad.error)
    good = rig.engine.submit(Kind.ON_PATH, [1], [1])
    assert rig.engine.wait(good, WAIT_S)
    assert good.ok


def test_cancelling_waits_for_what_is_enqueued(rig):
    rig.method.gate.clear()
    load = rig.engine.submit(Kind.PRELOAD, range(32), range(32))
    while not load.work.in_flight:
        pass
    assert rig.engine.cancel(load)
    assert not load.ended
    rig.method.gate.set()
    assert rig.engine.wait(load, WAIT_S)
    assert load.state is State.CANCELLED
    assert load.bytes_done == 16 * len(rig.method.pieces) * 4 * 4 < load.num_bytes
    assert all(not stream.work for stream in rig.cuda.streams)


def test_closing_drains(rig):
    load = rig.engine.submit(Kind.PRELOAD, range(32), range(32))
    rig.engine.close()
    assert load.ok
    assert rig.cuda.synchronized == 2  # each lane at its end
    assert not [t for t in threading.enumerate() if t.name.startswith("liveserve-")]


def test_a_pool_that_is_not_pinned_is_refused():
    world = World.random(5, num_layers=2, num_blocks=4, num_slots=4)
    with pytest.raises(ValueError, match="must be pinned"):
        CudaLink(world.cache, world.pool, choose=lambda *_: EnqueuedCopy(), gbps=50.0)
    with pytest.raises(ValueError, match="gbps must be positive"):
        CudaLink(world.cache, world.pool, choose=lambda *_: EnqueuedCopy(), gbps=0.0)


def test_the_link_follows_where_the_cache_is():
    world = World.random(5, num_layers=2, num_blocks=4, num_slots=4)
    link = links.open_link(world.cache, world.pool, link_gbps=2.0)
    assert (type(link).__name__, link.gbps) == ("CpuLink", 2.0)
    on_gpu = type(world.cache)(world.cache.layers, world.cache.num_blocks, "cuda:0")
    with pytest.raises(ValueError, match="--link-gbps imitates a link on a CPU"):
        links.open_link(on_gpu, world.pool, link_gbps=2.0)


def test_methods_are_chosen_by_the_table_and_are_each_lane_s_own(monkeypatch):
    def method(name: str, supported: bool = True) -> SimpleNamespace:
        return SimpleNamespace(name=name, supports=lambda cache, pool: supported)

    def available() -> dict[str, SimpleNamespace]:
        names = {"batch": True, "triton": True, "reference": True, "raw": False}
        return {name: method(name, supported) for name, supported in names.items()}

    monkeypatch.setattr(links, "available_methods", available)
    world = World.random(5, num_layers=4, num_blocks=4, num_slots=4)
    rate = Rate
    table = Table(
        [
            rate("batch", LOAD, 16, 1, 5.0),
            rate("triton", LOAD, 16, 100, 40.0),
            rate("raw", LOAD, 16, 1, 90.0),
            rate("batch", STORE, 16, 1, 30.0),
        ]
    )
    choose = links.method_chooser(world.cache, world.pool, table)
    assert choose(LOAD, 1, range(4)).name == "batch"
    assert choose(LOAD, 30, range(4)).name == "triton"
    assert choose(LOAD, 30, range(1)).name == "batch"
    assert choose(STORE, 30, range(4)).name == "batch"
    assert choose(STORE, 30, range(4)) is not choose(LOAD, 1, range(4))
    assert links.calibrated_gbps(world.cache, table) == 30.0
    with pytest.raises(ValueError, match="no rate for a store"):
        links.calibrated_gbps(world.cache, Table([rate("batch", LOAD, 16, 1, 5.0)]))
