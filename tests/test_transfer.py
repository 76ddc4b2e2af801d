"""TransferEngine: order, priorities, cancellation, failures, on a link that the test drives."""

from __future__ import annotations

import random
import threading
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transfer_tools import LOAD, STORE, Happening, ManualLink, Oracle, World

from liveserve.kernels.base import Direction
from liveserve.kvtier.transfer import TransferEngine
from liveserve.kvtier.transfer_base import Kind, SourceLost, State, Transfer, TransferError

# Two blocks of all layers (3 x 16 bytes) per piece at the default 1 ms.
PIECE_BYTES = 2 * 3 * 16
GBPS = 2 * PIECE_BYTES / 1e-3 / 1e9


def make(
    *, layers: int = 3, blocks: int = 32, slots: int = 32, gbps: float = GBPS, **options: object
) -> tuple[TransferEngine, ManualLink, World]:
    world = World.random(7, num_layers=layers, num_blocks=blocks, num_slots=slots)
    link = ManualLink(world, gbps)
    return TransferEngine(world.cache, world.pool, link, **options), link, world


def ids(start: int, count: int) -> list[int]:
    return list(range(start, start + count))


# The laws, over random histories.

id_lists = st.lists(st.integers(0, 5), min_size=0, max_size=4, unique=True)
layer_ranges = st.sampled_from([None, None, range(0, 1), range(1, 3), range(0, 3), range(2, 2)])
submissions = st.tuples(
    st.just("submit"),
    st.sampled_from(list(Kind)),
    id_lists,
    st.permutations(range(6)),
    layer_ranges,
    st.booleans(),  # layerwise
    st.sampled_from([None, None, None, "after"]),
)
steps = st.one_of(
    submissions,
    submissions,
    st.tuples(st.just("take"), st.sampled_from(list(Direction)), st.booleans()),
    st.tuples(st.just("finish"), st.sampled_from(list(Direction))),
    st.tuples(st.just("fail"), st.sampled_from(list(Direction))),
    st.tuples(st.just("cancel"), st.integers(0, 30)),
    st.tuples(st.just("promote"), st.integers(0, 30)),
    st.tuples(st.just("poll")),
    st.tuples(st.just("happen")),
    st.tuples(st.just("write"), st.integers(0, 5)),
)


@dataclass
class History:
    """Runs random steps and checks what must hold at each."""

    gbps: float
    transfers: list[Transfer] = field(default_factory=list)
    told: dict[Transfer, int] = field(default_factory=dict)
    events: list[tuple[Transfer, Happening]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.engine, self.link, self.world = make(blocks=6, slots=6, gbps=self.gbps)
        self.oracle = Oracle(self.world)
        self.writes = 0

    def step(self, name: str, *args: object) -> None:
        getattr(self, name)(*args)
        for transfer, event in self.events:
            assert event.happened or transfer.started_s is None

    def submit(self, kind, block_ids, slot_order, layers, layerwise, after) -> None:
        event = Happening() if after else None
        transfer = self.engine.submit(
            kind,
            block_ids,
            slot_order[: len(block_ids)],
            layers=layers,
            layerwise=layerwise,
            after=event,
        )
        self.transfers.append(transfer)
        self.oracle.submitted(transfer)
        if event is not None:
            self.events.append((transfer, event))

    def take(self, direction: Direction, early: bool) -> None:
        self.link.take(direction, early=early)
        under_way = sum(p.num_bytes for p, _ in self.link.under_way[direction])
        alone = len(self.link.under_way[direction]) == 1
        assert alone or under_way <= self.engine.max_in_flight_bytes
        assert under_way == self.engine.stats.lanes[direction].in_flight_bytes

    def finish(self, direction: Direction) -> None:
        self.link.finish(direction)

    def fail(self, direction: Direction) -> None:
        piece = self.link.finish(direction, OSError("broken copy"))
        if piece is not None:
            assert isinstance(piece.transfer.error, OSError)

    def cancel(self, which: int) -> None:
        if which < len(self.transfers):
            transfer = self.transfers[which]
            under_way = [p for q in self.link.under_way.values() for p, _ in q]
            will = self.engine.cancel(transfer)
            if will and all(p.transfer is not transfer for p in under_way):
                assert transfer.ended

    def promote(self, which: int) -> None:
        if which < len(self.transfers) and self.transfers[which].kind is not Kind.STORE:
            self.engine.promote(self.transfers[which])

    def poll(self) -> None:
        for transfer in self.engine.poll():
            assert transfer.ended
            assert transfer not in self.told
            under_way = [p for q in self.link.under_way.values() for p, _ in q]
            assert all(p.transfer is not transfer for p in under_way)
            self.told[transfer] = len(self.transfers)

    def happen(self) -> None:
        for _, event in self.events:
            event.happened = True

    def write(self, block: int) -> None:
        """A forward pass writes a block that no transfer needs."""
        if all(t.ended or block not in t.block_ids for t in self.transfers):
            self.writes += 1
            self.world.write(block, self.writes % 256)
            self.oracle.wrote(block, self.writes % 256)

    def end(self) -> None:
        self.happen()
        self.link.drain()
        assert self.engine.num_unfinished == 0
        self.poll()
        assert len(self.told) == len(self.transfers)
        self.engine.close()
        self.oracle.check(self.world, self.told)
        self.check_nothing_left()
        for transfer in self.transfers:
            if transfer.ok:
                assert transfer.bytes_done == transfer.num_bytes
                assert transfer.layers_done == len(transfer.layers)
            else:
                assert (transfer.error is None) == (transfer.state is State.CANCELLED)

    def check_nothing_left(self) -> None:
        engine, stats = self.engine, self.engine.stats
        assert not engine._blocks
        assert not engine._slots
        assert set(engine._queued.values()) == {0}
        for direction in Direction:
            assert stats.lanes[direction].queued_bytes == 0
            assert stats.lanes[direction].in_flight_bytes == 0
        for kind in Kind:
            counts = stats.kinds[kind]
            assert counts.submitted == counts.done + counts.failed + counts.cancelled
            assert counts.submitted == sum(t.kind is kind for t in self.transfers)
        moved = sum(t.bytes_done for t in self.transfers)
        assert moved == sum(s.bytes for s in stats.kinds.values())
        assert moved == sum(s.bytes for s in stats.lanes.values())


@settings(max_examples=200)
@given(st.lists(steps, max_size=50), st.sampled_from([GBPS / 100, GBPS / 2, GBPS, GBPS * 10]))
def test_any_history_equals_running_in_order_of_submission(history, gbps):
    run = History(gbps)
    for step in history:
        run.step(*step)
    run.end()


@pytest.mark.parametrize("gbps", [GBPS / 100, GBPS / 2, GBPS, GBPS * 10])
def test_long_random_histories(gbps):
    """What hypothesis shrinks well it seldom finds: transfers in each other's way, many at once."""
    rng = random.Random(gbps)
    for _ in range(100):
        run = History(gbps)
        for _ in range(80):
            directions = rng.choice(list(Direction))
            choices: list[tuple[int, tuple]] = [
                (6, ("submit", *random_submission(rng))),
                (5, ("take", directions, rng.random() < 0.5)),
                (5, ("finish", directions)),
                (1, ("fail", directions)),
                (2, ("cancel", rng.randrange(len(run.transfers) + 1))),
                (1, ("promote", rng.randrange(len(run.transfers) + 1))),
                (1, ("poll",)),
                (1, ("happen",)),
                (1, ("write", rng.randrange(6))),
            ]
            weights, actions = zip(*choices, strict=True)
            run.step(*rng.choices(actions, weights)[0])
        run.end()


def random_submission(rng: random.Random) -> tuple:
    count = rng.randint(1, 3)
    return (
        rng.choice(list(Kind)),
        rng.sample(range(6), count),
        rng.sample(range(6), count),
        rng.choice([None, None, range(0, 1), range(1, 3)]),
        rng.random() < 0.3,
        rng.choice([None, None, None, "after"]),
    )


# Pieces.


@pytest.mark.parametrize("layerwise", [False, True])
@pytest.mark.parametrize("gbps", [GBPS / 100, GBPS / 2, GBPS, GBPS * 5, GBPS * 100])
@pytest.mark.parametrize("layers", [None, range(1, 3), range(2, 3)])
def test_pieces_cover_every_layer_of_every_block_once_within_their_size(layerwise, gbps, layers):
    engine, link, world = make(gbps=gbps)
    before = world.slots_array()
    transfer = engine.submit(Kind.PRELOAD, ids(0, 7), ids(3, 7), layers=layers, layerwise=layerwise)
    link.drain()
    cells = [(b, i) for p in link.taken for b in p.block_ids for i in p.layers]
    wanted = layers if layers is not None else range(3)
    assert sorted(cells) == [(b, i) for b in ids(0, 7) for i in wanted]
    for piece in link.taken:
        smallest = len(piece.block_ids) == len(piece.layers) == 1
        assert smallest or piece.num_bytes <= engine.piece_bytes
    assert transfer.ok
    assert sum(p.num_bytes for p in link.taken) == transfer.num_bytes == len(cells) * 16
    part = slice(wanted.start, wanted.stop)
    assert (world.blocks_array()[:7, part] == before[3:10, part]).all()


def test_layers_are_reported_as_they_arrive():
    engine, link, _ = make(layers=4, gbps=GBPS / 4)
    transfer = engine.submit(Kind.ON_PATH, ids(0, 2), ids(0, 2), layerwise=True)
    seen = []
    while link.step(LOAD):
        seen.append(transfer.layers_done)
    # A piece is one layer of one block.
    assert seen == [0, 1, 1, 2, 2, 3, 3, 4]


def test_without_layerwise_no_layer_counts_before_the_end():
    engine, link, _ = make(gbps=GBPS / 100)
    transfer = engine.submit(Kind.ON_PATH, ids(0, 2), ids(0, 2))
    seen = []
    while link.step(LOAD):
        seen.append(transfer.layers_done)
    assert seen == [0] * 5 + [3]


def test_contiguous_runs_are_cut_as_seldom_as_can_be():
    engine, link, _ = make()
    engine.submit(Kind.STORE, [9, 1, 8, 0], [11, 21, 10, 20])
    link.drain()
    assert [(p.block_ids, p.slot_ids) for p in link.taken] == [
        ((0, 1), (20, 21)),
        ((8, 9), (10, 11)),
    ] or [(p.block_ids, p.slot_ids) for p in link.taken] == [
        ((8, 9), (10, 11)),
        ((0, 1), (20, 21)),
    ]


# Priorities.


def test_an_on_path_load_waits_only_for_what_the_link_already_has():
    engine, link, _ = make()
    preload = engine.submit(Kind.PRELOAD, ids(0, 20), ids(0, 20))
    for _ in range(3):
        link.step(LOAD)
    while link.take(LOAD):  # as much as the engine hands out
        pass
    ahead = sum(p.num_bytes for p, _ in link.under_way[LOAD])
    assert len(link.under_way[LOAD]) == 2
    assert ahead / (link.gbps * 1e9) <= 0.001 * (1 + 1e-9)
    urgent = engine.submit(Kind.ON_PATH, [30], [30])
    before = len(link.taken)
    link.finish(LOAD)
    while not urgent.ended:
        link.take(LOAD)
        link.finish(LOAD)
    assert link.taken[before].transfer is urgent
    assert not preload.ended
    link.drain()
    assert preload.ok


def test_loads_do_not_wait_for_stores():
    engine, link, _ = make()
    engine.submit(Kind.STORE, ids(0, 20), ids(0, 20))
    while link.take(STORE):
        pass
    load = engine.submit(Kind.PRELOAD, [30], [30])
    assert link.step(LOAD).transfer is load


def test_within_a_kind_the_oldest_goes_first_and_kinds_are_strict():
    engine, link, _ = make()
    order = [
        engine.submit(kind, [i], [i])
        for i, kind in enumerate([Kind.PRELOAD, Kind.ON_PATH, Kind.PRELOAD, Kind.ON_PATH])
    ]
    link.drain()
    assert [p.transfer.number for p in link.taken] == [1, 3, 0, 2]
    assert [t.number for t in engine.poll()] == [1, 3, 0, 2]
    assert all(t.ok for t in order)


def test_a_promoted_preload_overtakes_older_ones_even_midway():
    engine, link, _ = make()
    older = engine.submit(Kind.PRELOAD, ids(0, 6), ids(0, 6))
    wanted = engine.submit(Kind.PRELOAD, ids(10, 6), ids(10, 6))
    link.step(LOAD)
    engine.promote(wanted)
    assert wanted.kind is Kind.ON_PATH
    assert [link.step(LOAD).transfer for _ in range(3)] == [wanted] * 3
    assert link.step(LOAD).transfer is older
    engine.promote(wanted)  # ended: nothing happens
    stats = engine.stats.kinds
    assert (stats[Kind.PRELOAD].submitted, stats[Kind.ON_PATH].submitted) == (1, 1)
    store = engine.submit(Kind.STORE, [31], [31])
    with pytest.raises(ValueError, match="is a store"):
        engine.promote(store)


def test_what_an_urgent_load_waits_for_becomes_as_urgent():
    engine, link, _ = make()
    load = engine.submit(Kind.PRELOAD, [0], [0])
    other_load = engine.submit(Kind.PRELOAD, [29], [29])
    others = [engine.submit(Kind.STORE, [i], [i]) for i in ids(10, 5)]
    needed = engine.submit(Kind.STORE, [0], [1])  # reads block 0 once it is loaded
    urgent = engine.submit(Kind.ON_PATH, [2], [1])  # reads slot 1 once it is stored
    chain = [link.step(d).transfer for d in (LOAD, STORE, LOAD)]
    assert chain == [load, needed, urgent]
    assert urgent.ok
    assert not any(t.ended for t in [*others, other_load])


def test_promotion_reaches_what_the_preload_waits_for():
    engine, link, _ = make()
    others = [engine.submit(Kind.STORE, [i], [i]) for i in ids(10, 5)]
    needed = engine.submit(Kind.STORE, [0], [1])
    preload = engine.submit(Kind.PRELOAD, [2], [1])
    engine.promote(preload)
    assert link.step(STORE).transfer is needed
    assert not others[0].ended


# Order between transfers.


@pytest.mark.parametrize("first", list(Kind))
@pytest.mark.parametrize("second", list(Kind))
@pytest.mark.parametrize("shared", ["block", "slot"])
def test_conflicting_transfers_run_one_after_the_other(first, second, shared):
    engine, link, _ = make()
    a = engine.submit(first, [0], [0])
    link.take(first.direction)
    b = engine.submit(second, [0] if shared == "block" else [1], [0] if shared == "slot" else [1])
    reads = second is not Kind.STORE if shared == "slot" else second is Kind.STORE
    both_read = reads and (first is Kind.STORE) == (second is Kind.STORE)
    taken = link.take(second.direction)
    assert (taken is not None and taken.transfer is b) == both_read
    link.drain()
    assert a.ok
    assert b.ok


def test_a_block_may_be_handed_on_while_its_store_still_reads_it():
    engine, link, world = make()
    content = world.blocks_array()[4].copy()
    other = world.slots_array()[9].copy()
    store = engine.submit(Kind.STORE, [4], [0])
    link.take(STORE, early=False)  # reads as late as it can
    load = engine.submit(Kind.ON_PATH, [4], [9])
    assert link.take(LOAD) is None
    link.finish(STORE)
    link.drain()
    assert store.ok
    assert load.ok
    assert (world.slots_array()[0] == content).all()
    assert (world.blocks_array()[4] == other).all()


def test_a_writer_waits_for_readers_behind_a_cancelled_writer():
    engine, link, _ = make()
    reader = engine.submit(Kind.STORE, [4], [0])
    link.take(STORE, early=False)
    middle = engine.submit(Kind.PRELOAD, [4], [8])
    last = engine.submit(Kind.PRELOAD, [4], [9])
    assert engine.cancel(middle)
    assert middle.ended
    assert link.take(LOAD) is None  # `reader` still reads block 4
    link.drain()
    assert reader.ok
    assert last.ok


# Failures.


def test_a_failure_ends_one_transfer_only():
    engine, link, _ = make()
    bad = engine.submit(Kind.ON_PATH, ids(0, 8), ids(0, 8))
    good = engine.submit(Kind.ON_PATH, ids(10, 4), ids(10, 4))
    link.take(LOAD)
    link.take(LOAD)
    link.finish(LOAD, OSError("no"))
    assert not bad.ended  # its second piece is still under way
    assert engine.poll() == []
    link.finish(LOAD)
    assert bad.state is State.FAILED
    assert str(bad.error) == "no"
    link.drain()
    assert good.ok
    assert [p.transfer for p in link.taken].count(bad) == 2
    assert engine.poll() == [bad, good]


@pytest.mark.parametrize("how", ["fails", "cancelled unstarted", "cancelled midway"])
def test_nobody_reads_what_was_not_written(how):
    engine, link, _ = make()
    store = engine.submit(Kind.STORE, ids(0, 4), ids(0, 4))
    load = engine.submit(Kind.ON_PATH, [20], [2])  # waits for the store
    again = engine.submit(Kind.STORE, [20], [30])  # waits for the load
    unrelated = engine.submit(Kind.ON_PATH, [21], [9])
    if how == "fails":
        link.take(STORE)
        link.finish(STORE, OSError("no"))
    elif how == "cancelled midway":
        link.step(STORE)
        engine.cancel(store)
    else:
        engine.cancel(store)
    later = engine.submit(Kind.ON_PATH, [22], [1])  # before anybody was told
    link.drain()
    for lost in (load, again, later):
        assert lost.state is State.FAILED
        assert isinstance(lost.error, SourceLost)
        assert lost.started_s is None
    assert unrelated.ok
    # A slot is good again once a store into it succeeded, and only then.
    assert not engine.submit(Kind.ON_PATH, [23], [3]).ok
    part = engine.submit(Kind.STORE, [0], [3], layers=range(1))
    link.drain()
    assert part.ok
    assert engine.submit(Kind.ON_PATH, [23], [3]).state is State.FAILED
    engine.submit(Kind.STORE, [0], [3])
    good = engine.submit(Kind.ON_PATH, [23], [3])
    link.drain()
    assert good.ok


def test_a_block_whose_load_failed_is_not_stored_until_the_owner_was_told():
    engine, link, _ = make()
    load = engine.submit(Kind.PRELOAD, [3], [3])
    link.take(LOAD)
    link.finish(LOAD, OSError("no"))
    early = engine.submit(Kind.STORE, [3], [8])
    assert isinstance(early.error, SourceLost)
    assert engine.poll() == [load, early]
    late = engine.submit(Kind.STORE, [3], [8])
    link.drain()
    assert late.ok


def test_an_earlier_store_does_not_make_up_for_a_cancelled_one():
    engine, link, _ = make()
    earlier = engine.submit(Kind.STORE, [0], [5])
    link.take(STORE)
    later = engine.submit(Kind.STORE, [1], [5])
    assert engine.cancel(later)
    link.drain()
    assert earlier.ok  # slot 5 holds block 0, and was to hold block 1
    assert isinstance(engine.submit(Kind.ON_PATH, [2], [5]).error, SourceLost)


def test_who_reads_before_a_cancelled_store_is_not_lost_with_it():
    engine, link, world = make()
    event = Happening()
    before = world.slots_array()[5].copy()
    reader = engine.submit(Kind.PRELOAD, [0], [5], after=event)
    store = engine.submit(Kind.STORE, [1], [5])
    assert engine.cancel(store)
    event.happened = True
    link.drain()
    assert reader.ok
    assert (world.blocks_array()[0] == before).all()


def test_a_store_on_its_way_makes_up_for_a_lost_one():
    engine, link, _ = make()
    engine.cancel(engine.submit(Kind.STORE, [1], [5]))
    engine.submit(Kind.STORE, [2], [5])
    load = engine.submit(Kind.ON_PATH, [3], [5])
    link.drain()
    assert load.ok


def test_layers_that_arrived_later_do_not_make_a_block_whole():
    engine, link, _ = make()
    load = engine.submit(Kind.PRELOAD, [3], [3])
    part = engine.submit(Kind.PRELOAD, [3], [4], layers=range(1, 3))
    waiting = engine.submit(Kind.STORE, [3], [8])
    link.take(LOAD)
    link.finish(LOAD, OSError("no"))
    assert engine.poll() == [load]
    link.drain()
    assert part.ok
    assert isinstance(waiting.error, SourceLost)  # it was submitted before anybody was told
    blocked = engine.submit(Kind.PRELOAD, [3], [3])
    link.take(LOAD)
    engine.cancel(engine.submit(Kind.PRELOAD, [3], [4]))
    waiting = engine.submit(Kind.STORE, [3], [9])
    engine.poll()
    link.drain()
    assert blocked.ok
    assert isinstance(waiting.error, SourceLost)  # likewise
    engine.poll()
    load = engine.submit(Kind.PRELOAD, [3], [3])
    link.take(LOAD)
    link.finish(LOAD, OSError("no"))
    part = engine.submit(Kind.PRELOAD, [3], [4], layers=range(1, 3))
    link.drain()
    assert isinstance(engine.submit(Kind.STORE, [3], [8]).error, SourceLost)
    engine.submit(Kind.PRELOAD, [3], [4])
    link.drain()
    whole = engine.submit(Kind.STORE, [3], [8])
    link.drain()
    assert whole.ok


def test_a_broken_lane_fails_everything_and_refuses_more():
    engine, link, _ = make()
    load = engine.submit(Kind.ON_PATH, ids(0, 9), ids(0, 9))
    store = engine.submit(Kind.STORE, ids(10, 9), ids(10, 9))
    link.take(LOAD)
    link.take(STORE)
    engine.broken(LOAD, RuntimeError("device lost"))
    assert load.state is State.FAILED
    assert not store.ended  # the other lane's piece is under way
    link.finish(STORE)
    assert store.state is State.FAILED
    assert {str(t.error) for t in engine.poll()} == {"device lost"}
    with pytest.raises(TransferError, match="device lost"):
        engine.submit(Kind.ON_PATH, [0], [0])
    engine.close()


# Cancellation.


@pytest.mark.parametrize("kind", list(Kind))
@pytest.mark.parametrize("finished", range(5))
@pytest.mark.parametrize("under_way", range(3))
def test_cancelling_at_every_point(kind, finished, under_way):
    engine, link, world = make()
    before = world.blocks_array(), world.slots_array()
    transfer = engine.submit(kind, ids(0, 8), ids(8, 8))  # four pieces of two blocks
    for _ in range(finished):
        link.step(kind.direction)
    for _ in range(under_way):
        link.take(kind.direction, early=False)
    left = 4 - finished - len(link.under_way[kind.direction])
    will = engine.cancel(transfer)
    assert will == (left > 0)
    while link.under_way[kind.direction]:
        assert transfer not in engine.poll()
        link.finish(kind.direction)
    assert link.step(kind.direction) is None
    assert engine.poll() == [transfer]
    assert transfer.state is (State.CANCELLED if will else State.DONE)
    assert not engine.cancel(transfer)
    moved = 2 * (4 - left)
    assert transfer.bytes_done == moved * 48
    stores = kind is Kind.STORE
    now = world.slots_array()[8:16] if stores else world.blocks_array()[:8]
    old_source = before[0][:8] if stores else before[1][8:16]
    old_target = before[1][8:16] if stores else before[0][:8]
    assert (now[:moved] == old_source[:moved]).all()
    assert (now[moved:] == old_target[moved:]).all()


def test_cancelling_what_waits_for_an_event_or_another_transfer():
    engine, link, _ = make()
    event = Happening()
    waiting = engine.submit(Kind.STORE, [0], [0], after=event)
    blocked = engine.submit(Kind.STORE, [1], [0])
    assert engine.cancel(blocked)
    assert engine.poll() == [blocked]
    assert engine.cancel(waiting)
    assert engine.poll() == [waiting]
    event.happened = True
    link.drain()
    assert link.taken == []


# Compute.


@pytest.mark.parametrize("form", ["event", "callable"])
def test_nothing_moves_before_its_event(form):
    engine, link, _ = make()
    event = Happening()
    after = event if form == "event" else event.query
    store = engine.submit(Kind.STORE, [0], [0], after=after)
    other = engine.submit(Kind.STORE, [1], [1])
    assert link.step(STORE).transfer is other  # does not stand in the way
    assert link.step(STORE) is None
    event.happened = True
    assert link.step(STORE).transfer is store


def test_an_event_that_raises_fails_its_transfer():
    def after() -> bool:
        raise OSError("event lost")

    engine, link, _ = make()
    bad = engine.submit(Kind.STORE, [0], [0], after=after)
    good = engine.submit(Kind.STORE, [1], [1])
    link.drain()
    assert str(bad.error) == "event lost"
    assert good.ok


def test_compute_is_ordered_after_the_layers_it_reads():
    engine, link, _ = make(gbps=GBPS / 6)  # a piece is one layer of one block
    transfer = engine.submit(Kind.PRELOAD, [0], [0], layerwise=True)
    link.take(LOAD)
    engine.order_compute(transfer, 1, stream="s")
    assert transfer.kind is Kind.ON_PATH
    # Compute waits for it: the bound on bytes under way no longer applies.
    link.take(LOAD)
    link.take(LOAD)
    engine.order_compute(transfer, 2, stream="s")
    engine.order_compute(transfer)
    assert link.ordered == [("fence 1", "s"), ("fence 2", "s"), ("fence 3", None)]
    link.drain()
    engine.order_compute(transfer)  # there: nothing to wait for
    assert len(link.ordered) == 3
    with pytest.raises(ValueError, match=r"0\.\.3"):
        engine.order_compute(transfer, 4)


def test_compute_waits_until_the_piece_is_enqueued():
    engine, link, _ = make()
    transfer = engine.submit(Kind.PRELOAD, ids(0, 8), ids(0, 8))
    thread = threading.Thread(target=engine.order_compute, args=(transfer,), daemon=True)
    thread.start()
    try:
        while not transfer.work.rush:
            pass
        taken = [link.take(LOAD) for _ in range(3)]
        assert all(taken)
        assert thread.is_alive()
        assert link.ordered == []
    finally:
        link.take(LOAD)
        thread.join(10)
    assert link.ordered == [("fence 4", None)]


def test_compute_that_overwrites_is_ordered_after_the_store():
    engine, link, _ = make()
    others = engine.submit(Kind.STORE, ids(10, 4), ids(10, 4))
    store = engine.submit(Kind.STORE, [0], [0])
    thread = threading.Thread(target=engine.order_compute, args=(store,), daemon=True)
    thread.start()
    while not store.work.rush:
        pass
    assert link.take(STORE).transfer is store
    thread.join(10)
    assert link.ordered == [("fence 1", None)]
    assert not others.ended


@pytest.mark.parametrize("how", ["failed", "cancelled"])
def test_compute_is_told_that_a_load_did_not_happen(how):
    engine, link, _ = make()
    transfer = engine.submit(Kind.ON_PATH, ids(0, 8), ids(0, 8))
    if how == "failed":
        link.take(LOAD)
        link.finish(LOAD, OSError("bad cable"))
    else:
        engine.cancel(transfer)
    with pytest.raises(TransferError, match="bad cable" if how == "failed" else "was cancelled"):
        engine.order_compute(transfer)


# The rest of the interface.


def test_empty_transfers_end_at_once():
    engine, _, _ = make()
    nothing = engine.submit(Kind.ON_PATH, [], [])
    no_layers = engine.submit(Kind.STORE, [1], [1], layers=range(1, 1))
    assert nothing.ok
    assert no_layers.ok
    assert engine.poll() == [nothing, no_layers]
    assert engine.wait(nothing, 0)


@pytest.mark.parametrize(
    ("kind", "blocks", "slots", "options", "message"),
    [
        (Kind.STORE, [32], [0], {}, "block_ids must lie in 0..31"),
        (Kind.STORE, [0], [-1], {}, "slot_ids must lie in 0..31"),
        (Kind.STORE, [0, 1], [0], {}, "must pair up, got 2 and 1"),
        (Kind.STORE, [0, 1], [3, 3], {}, "slot_ids must not repeat in a store"),
        (Kind.PRELOAD, [3, 3], [0, 1], {}, "block_ids must not repeat in a load"),
        (Kind.PRELOAD, [0], [0], {"layers": range(2, 5)}, "layers"),
        (Kind.PRELOAD, [0.5], [0], {}, "block_ids must be one-dimensional integers"),
    ],
)
def test_bad_transfers_are_refused(kind, blocks, slots, options, message):
    engine, _, _ = make()
    with pytest.raises(ValueError, match=message):
        engine.submit(kind, blocks, slots, **options)
    assert engine.num_unfinished == 0
    assert engine.stats.kinds[kind].submitted == 0


def test_one_source_may_feed_several_targets():
    engine, link, world = make()
    transfer = engine.submit(Kind.ON_PATH, [0, 1], [5, 5])
    link.drain()
    assert transfer.ok
    assert (world.blocks_array()[:2] == world.slots_array()[5]).all()


def test_a_pool_that_does_not_fit_is_refused():
    world = World.random(1, num_layers=3, num_blocks=4, num_slots=4)
    link = ManualLink(world, 1.0)
    with pytest.raises(ValueError, match="needs 48"):
        TransferEngine(world.cache, torch.zeros(4, 40, dtype=torch.uint8), link)
    with pytest.raises(ValueError, match="max_wait_s"):
        TransferEngine(world.cache, world.pool, link, max_wait_s=0.0)


def test_wait_gives_up_in_time():
    engine, link, _ = make()
    transfer = engine.submit(Kind.ON_PATH, [0], [0])
    assert not engine.wait(transfer, 0.01)
    link.drain()
    assert engine.wait(transfer, 0.01)


def test_estimates_count_what_goes_first():
    engine, link, _ = make()
    rate = link.gbps * 1e9
    engine.submit(Kind.PRELOAD, ids(0, 10), ids(0, 10))
    engine.submit(Kind.ON_PATH, ids(10, 4), ids(10, 4))
    engine.submit(Kind.STORE, ids(20, 8), ids(20, 8))
    assert engine.estimate_s(Kind.ON_PATH, 48) == pytest.approx(5 * 48 / rate)
    assert engine.estimate_s(Kind.PRELOAD, 48) == pytest.approx(15 * 48 / rate)
    assert engine.estimate_s(Kind.STORE, 0) == pytest.approx(8 * 48 / rate)
    link.take(LOAD)  # under way counts as ahead
    assert engine.estimate_s(Kind.ON_PATH, 48) == pytest.approx(5 * 48 / rate)
    link.drain()
    assert engine.estimate_s(Kind.PRELOAD, 48) == pytest.approx(48 / rate)


def test_times_are_kept_by_kind():
    engine, link, _ = make()
    transfer = engine.submit(Kind.PRELOAD, ids(0, 8), ids(0, 8))
    link.drain()
    stats = engine.stats.kinds[Kind.PRELOAD]
    assert stats.queue_s == transfer.started_s - transfer.submitted_s >= 0
    assert stats.move_s == transfer.finished_s - transfer.started_s > 0
    assert stats.bytes == transfer.num_bytes
    lane = engine.stats.lanes[LOAD]
    assert lane.pieces == 4
    assert 0 < lane.busy_s <= stats.move_s + stats.queue_s
    assert lane.gbps == pytest.approx(lane.bytes / lane.busy_s / 1e9)


def test_close_cancels_what_cannot_finish_in_time():
    engine, link, _ = make()
    never = engine.submit(Kind.STORE, [0], [0], after=Happening())
    engine.close(timeout_s=0.02)
    assert never.state is State.CANCELLED
    assert engine.poll() == [never]
    assert link.joined
    engine.close()
    with pytest.raises(TransferError, match="closed"):
        engine.submit(Kind.STORE, [0], [0])
