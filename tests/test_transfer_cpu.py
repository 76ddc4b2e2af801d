"""The CPU link: real threads, pacing, checksums, ten thousand transfers."""

from __future__ import annotations

import random
import threading
import time

import numpy as np
import pytest
from transfer_tools import LOAD, Happening, Oracle, World, conflict

from liveserve.kernels.reference import ReferenceCopy
from liveserve.kvtier.pool import HostPool
from liveserve.kvtier.slots import SlotAllocator
from liveserve.kvtier.transfer import TransferEngine
from liveserve.kvtier.transfer_base import ChecksumError, Kind, State, Transfer, TransferError
from liveserve.kvtier.transfer_cpu import CpuLink


class SometimesFails(ReferenceCopy):
    """Fails a share of the copies, halfway."""

    def __init__(self, seed: int, share: float) -> None:
        self.rng = random.Random(seed)
        self.share = share

    def copy(self, direction, cache, pool, block_ids, slot_ids, layers=None, stream=None) -> None:
        if self.rng.random() < self.share:
            half = len(block_ids) // 2
            super().copy(direction, cache, pool, block_ids[:half], slot_ids[:half], layers)
            raise OSError("injected")
        super().copy(direction, cache, pool, block_ids, slot_ids, layers)


@pytest.mark.parametrize("seed", [1])
def test_ten_thousand_random_transfers(seed):
    """Slots are freed as soon as the last transfer that uses them is submitted: the engine, not the
    owner, keeps their bytes until they were read."""
    rng = random.Random(seed)
    world = World.random(seed, num_layers=3, num_blocks=48, num_slots=40)
    slots = SlotAllocator(40)
    link = CpuLink(world.cache, world.pool, method=SometimesFails(seed, 0.01))
    oracle = Oracle(world)
    submitted: list[Transfer] = []
    told: dict[Transfer, int] = {}
    open_transfers: list[Transfer] = []
    stored: list[list[int]] = []  # slots of stores that succeeded or still may
    exhausted = overtaken = 0
    with TransferEngine(world.cache, world.pool, link, checksums=True) as engine:
        # A few blocks per piece, so that transfers are under way in parts.
        engine.piece_bytes, engine.max_in_flight_bytes = 96, 192

        def poll() -> None:
            for transfer in engine.poll():
                assert transfer not in told
                told[transfer] = len(submitted)
            open_transfers[:] = [t for t in open_transfers if t not in told]

        def submit(kind: Kind, blocks: list[int], ids: list[int]) -> Transfer:
            nonlocal overtaken
            event = Happening() if rng.random() < 0.1 else None
            layers = rng.choice([None] * 8 + [range(1, 3)]) if kind is not Kind.STORE else None
            transfer = engine.submit(
                kind, blocks, ids, layers=layers, layerwise=rng.random() < 0.2, after=event
            )
            overtaken += any(conflict(t, transfer) for t in open_transfers)
            submitted.append(transfer)
            open_transfers.append(transfer)
            oracle.submitted(transfer)
            if event is not None:
                threading.Timer(0.0, setattr, (event, "happened", True)).start()
            return transfer

        while len(submitted) < 10_000:
            action = rng.random()
            count = rng.randint(1, 6)
            if action < 0.45:
                taken = slots.alloc(count)
                if taken is None:
                    exhausted += 1
                    slots.free(stored.pop(rng.randrange(len(stored))))
                else:
                    submit(Kind.STORE, rng.sample(range(48), count), taken)
                    stored.append(taken)
            elif action < 0.85 and stored:
                which = rng.randrange(len(stored))
                used = stored[which]
                kind = rng.choice([Kind.ON_PATH, Kind.PRELOAD])
                submit(kind, rng.sample(range(48), len(used)), used)
                if rng.random() < 0.3:
                    slots.free(stored.pop(which))
            elif action < 0.89 and open_transfers:
                engine.cancel(rng.choice(open_transfers))
            elif action < 0.93 and open_transfers:
                transfer = rng.choice(open_transfers)
                if transfer.kind is not Kind.STORE:
                    engine.promote(transfer)
            elif action < 0.94 and open_transfers:
                engine.wait(rng.choice(open_transfers))
            else:
                poll()
                block = rng.randrange(48)
                if not any(block in t.block_ids for t in open_transfers):
                    value = rng.randrange(256)
                    world.write(block, value)
                    oracle.wrote(block, value)
            if len(open_transfers) > 64:
                poll()
    poll()
    assert len(told) == len(submitted) == 10_000
    assert engine.num_unfinished == 0
    oracle.check(world, told)
    for ids in stored:
        slots.free(ids)
    assert slots.num_free == 40
    states = {state: sum(t.state is state for t in submitted) for state in State}
    # It did happen: failures, cancellations, a full pool, and transfers that had to wait.
    # A third or two thirds, by the speed of the worker: failures spread to what waits behind them.
    assert states[State.DONE] > 1000
    assert states[State.FAILED] > 50
    assert states[State.CANCELLED] > 20
    assert exhausted > 100
    assert overtaken > 1000
    assert not any(isinstance(t.error, ChecksumError) for t in submitted)


@pytest.fixture
def engine_of():
    """Makes engines over a world of 8 layers, and closes them."""
    made: list[TransferEngine] = []

    def make(link_gbps=None, **options) -> tuple[TransferEngine, World]:
        world = World.random(3, num_layers=8, num_blocks=64, num_slots=64)
        link = CpuLink(world.cache, world.pool, link_gbps=link_gbps)
        made.append(TransferEngine(world.cache, world.pool, link, **options))
        return made[-1], world

    yield make
    for engine in made:
        engine.close(drain=False)


BLOCK = 8 * 16  # bytes


def test_a_store_and_a_load_bring_the_bytes_back(engine_of):
    engine, world = engine_of()
    content = world.blocks_array()[:20].copy()
    store = engine.submit(Kind.STORE, range(20), range(30, 50), tag="there")
    load = engine.submit(Kind.ON_PATH, range(40, 60), range(30, 50), tag="back")
    assert engine.wait(load, 10)
    assert [t.tag for t in engine.poll()] == ["there", "back"]
    assert store.ok
    assert load.ok
    assert (world.blocks_array()[40:60] == content).all()


@pytest.mark.parametrize("parts", [1, 10])
def test_transfers_take_what_the_link_takes_for_their_total_size(engine_of, parts):
    total_s = 0.2
    engine, _ = engine_of(link_gbps=60 * BLOCK / total_s / 1e9, max_wait_s=0.004)
    begin_s = time.monotonic()
    each = 60 // parts
    transfers = [
        engine.submit(Kind.PRELOAD, range(i, i + each), range(i, i + each))
        for i in range(0, 60, each)
    ]
    for transfer in transfers:
        engine.wait(transfer, 10)
    took_s = transfers[-1].finished_s - begin_s
    assert total_s * 0.999 <= took_s < total_s + 0.05
    assert 0 < engine.stats.lanes[LOAD].gbps <= engine.link.gbps * 1.02


def test_directions_do_not_slow_each_other(engine_of):
    total_s = 0.1
    engine, _ = engine_of(link_gbps=30 * BLOCK / total_s / 1e9, max_wait_s=0.004)
    begin_s = time.monotonic()
    both = [
        engine.submit(Kind.STORE, range(30), range(30)),
        engine.submit(Kind.PRELOAD, range(30, 60), range(30, 60)),
    ]
    for transfer in both:
        engine.wait(transfer, 10)
        assert total_s * 0.999 <= transfer.finished_s - begin_s < total_s * 1.6


def test_an_idle_link_saves_up_nothing(engine_of):
    engine, _ = engine_of(link_gbps=BLOCK / 0.05 / 1e9)
    for _ in range(2):
        begin_s = time.monotonic()
        transfer = engine.submit(Kind.PRELOAD, [0], [0])
        engine.wait(transfer, 10)
        assert transfer.finished_s - begin_s >= 0.05 * 0.999
        time.sleep(0.06)


def test_an_on_path_load_overtakes_on_a_slow_link(engine_of):
    engine, _ = engine_of(link_gbps=60 * BLOCK / 0.6 / 1e9, max_wait_s=0.02)
    preload = engine.submit(Kind.PRELOAD, range(60), range(60))
    time.sleep(0.03)
    urgent = engine.submit(Kind.ON_PATH, [62], [62])
    assert engine.wait(urgent, 10)
    assert not preload.ended
    assert urgent.started_s - urgent.submitted_s < 0.1  # alone it is 0.02


def test_compute_finds_the_layers_it_waited_for(engine_of):
    engine, world = engine_of(link_gbps=8 * BLOCK / 0.1 / 1e9)
    expected = world.slots_array()[:8]
    transfer = engine.submit(Kind.PRELOAD, range(8), range(8), layerwise=True)
    for layer in range(8):
        engine.order_compute(transfer, layer + 1)
        assert transfer.layers_done > layer
        assert (world.layers[layer][:8].numpy() == expected[:, layer]).all()
    assert transfer.kind is Kind.ON_PATH


def test_compute_is_told_of_a_failing_load(engine_of):
    engine, _ = engine_of()
    engine.link.method = SometimesFails(0, 1.0)
    transfer = engine.submit(Kind.ON_PATH, [0], [0])
    with pytest.raises(TransferError, match="injected"):
        engine.order_compute(transfer)


@pytest.mark.parametrize("layerwise", [False, True])
@pytest.mark.parametrize("max_wait_s", [1e-3, 1e-8])  # all at once; a layer of a block at a time
def test_a_corrupted_slot_is_found_before_it_is_loaded(engine_of, layerwise, max_wait_s):
    engine, world = engine_of(checksums=True, max_wait_s=max_wait_s)
    store = engine.submit(Kind.STORE, range(8), range(8), layerwise=layerwise)
    assert engine.wait(store, 10)
    world.pool[5, 77] ^= 4
    before = world.blocks_array()
    bad = engine.submit(Kind.PRELOAD, [20, 21], [5, 5], layerwise=layerwise)
    good = engine.submit(Kind.PRELOAD, [22, 23], [4, 6], layerwise=layerwise)
    assert engine.wait(bad, 10)
    assert engine.wait(good, 10)
    assert isinstance(bad.error, ChecksumError)
    assert "slot 5" in str(bad.error)
    assert good.ok
    assert np.array_equal(world.blocks_array()[20:22], before[20:22])
    again = engine.submit(Kind.STORE, [5], [5])
    load = engine.submit(Kind.ON_PATH, [20], [5])
    assert engine.wait(load, 10)
    assert again.ok
    assert load.ok


@pytest.mark.parametrize("drain", [True, False])
def test_closing_with_work_under_way(drain):
    world = World.random(3, num_layers=8, num_blocks=64, num_slots=64)
    before = world.slots_array()
    link = CpuLink(world.cache, world.pool, link_gbps=64 * BLOCK / 0.2 / 1e9)
    engine = TransferEngine(world.cache, world.pool, link)
    transfers = [engine.submit(Kind.ON_PATH, range(i, i + 16), range(i, i + 16)) for i in (0, 16)]
    transfers.append(engine.submit(Kind.STORE, range(40, 56), range(40, 56)))
    while transfers[0].started_s is None:
        time.sleep(0.001)
    engine.close(drain=drain)
    assert set(engine.poll()) == set(transfers)
    now = world.blocks_array().copy()
    time.sleep(0.02)
    assert np.array_equal(world.blocks_array(), now)  # nothing moves any more
    assert not [t for t in threading.enumerate() if t.name.startswith("liveserve-")]
    if drain:
        assert all(t.ok for t in transfers)
        assert np.array_equal(now[:32], before[:32])
    else:
        assert all(t.state is State.CANCELLED for t in transfers)


def test_an_error_in_a_lane_itself_is_no_silent_stop(engine_of, monkeypatch):
    engine, _ = engine_of()

    def broken_sleep(_seconds: float) -> None:
        raise MemoryError("no")

    engine.link.link_gbps = 1e-6
    monkeypatch.setattr("liveserve.kvtier.transfer_cpu.time.sleep", broken_sleep)
    transfer = engine.submit(Kind.ON_PATH, [0], [0])
    assert engine.wait(transfer, 10)
    assert transfer.state is State.FAILED
    with pytest.raises(TransferError, match="the link broke"):
        engine.submit(Kind.ON_PATH, [0], [0])


def test_it_works_on_a_host_pool():
    world = World.random(3, num_layers=2, num_blocks=8, num_slots=1)
    pool = HostPool(8, world.cache.slot_bytes)
    with TransferEngine(world.cache, pool.data, CpuLink(world.cache, pool.data)) as engine:
        taken = pool.slots.alloc(8)
        content = world.blocks_array()
        engine.submit(Kind.STORE, range(8), taken)
        load = engine.submit(Kind.ON_PATH, range(8), taken[::-1])
        assert engine.wait(load, 10)
    assert (world.blocks_array() == content[::-1]).all()
    pool.close()


def test_bad_links_are_refused():
    world = World.random(3, num_layers=2, num_blocks=8, num_slots=8)
    with pytest.raises(ValueError, match="--link-gbps must be positive"):
        CpuLink(world.cache, world.pool, link_gbps=0.0)
