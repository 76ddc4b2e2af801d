"""The scheduler's half of the KV tier, over a block pool and a worker made of numbers."""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Sequence

import pytest

from liveserve.kvtier.jobs import Ended, Job, Orders
from liveserve.kvtier.manager import KvManager, Limits
from liveserve.kvtier.next_use import NextUse
from liveserve.kvtier.policies import POLICIES, make_policy
from liveserve.kvtier.transfer_base import Kind


class Pool:
    """A GPU's block pool like the host's: free blocks in LRU order, blank ones in front.

    ``content[block]`` is the key whose KV really is there, whatever it can be found by.
    """

    def __init__(self, num_blocks: int) -> None:
        self.refs = [0] * num_blocks
        self.free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self.key_of: dict[int, str] = {}
        self.blocks_of: dict[str, list[int]] = {}
        self.content: list[str | None] = [None] * num_blocks
        self.reserved = 0
        self.depths: dict[int, int] = {}

    def find(self, key: str) -> int | None:
        return next(iter(self.blocks_of.get(key, ())), None)

    def holds(self, key: str, block: int) -> bool:
        return block in self.blocks_of.get(key, ())

    def is_free(self, block: int) -> bool:
        return self.refs[block] == 0

    def spare(self) -> int:
        return max(0, len(self.free) - self.reserved)

    def take(self, count: int) -> list[int]:
        assert count <= len(self.free)
        taken = [self.free.popitem(last=False)[0] for _ in range(count)]
        for block in taken:
            self.unhash(block)
            self.content[block] = None
            self.refs[block] = 1
        return taken

    def hold(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            if not self.refs[block]:
                del self.free[block]
            self.refs[block] += 1

    def release(self, blocks: Sequence[int], *, soonest: bool = False) -> None:
        for block in blocks:
            assert self.refs[block] > 0
            self.refs[block] -= 1
            if not self.refs[block]:
                self.free[block] = None
                if soonest or block not in self.key_of:
                    self.free.move_to_end(block, last=False)

    def publish(self, key: str, block: int, depth: int) -> None:
        assert self.content[block] == key, "published something else"
        self.depths[block] = depth
        self.hash(key, block)

    def upcoming(self, limit: int) -> list[tuple[str, int, int]]:
        first = list(self.free)[:limit]
        return [(self.key_of[b], b, int(self.key_of[b][1:])) for b in first if b in self.key_of]

    # What the host does by itself.

    def hash(self, key: str, block: int) -> None:
        self.key_of[block] = key
        self.blocks_of.setdefault(key, []).append(block)

    def unhash(self, block: int) -> None:
        key = self.key_of.pop(block, None)
        if key is not None:
            self.blocks_of[key].remove(block)

    def compute(self, keys: Sequence[str]) -> list[int] | None:
        """A request gets the blocks of ``keys``, with hits and computed ones; None: no room."""
        hits: list[int] = []
        for key in keys:
            found = self.find(key)
            if found is None:
                break
            hits.append(found)
        need = len(keys) - len(hits)
        if need + sum(map(self.is_free, hits)) > len(self.free):
            return None
        self.hold(hits)
        for block in hits:
            assert self.content[block] == self.key_of[block], "a hit on something else"
        new = self.take(need)
        for key, block in zip(keys[len(hits) :], new, strict=True):
            self.content[block] = key
            self.hash(key, block)
        return hits + new

    def have(self, keys: Sequence[str]) -> int:
        return next((i for i, key in enumerate(keys) if self.find(key) is None), len(keys))

    def evict(self, keys: Sequence[str]) -> None:
        """Others take the blocks of ``keys``."""
        for key in keys:
            for block in list(self.blocks_of.get(key, ())):
                assert not self.refs[block]
                self.unhash(block)
                self.content[block] = None
                self.free.move_to_end(block, last=False)


class World:
    """A manager, its pool, and a worker that copies when it is told to."""

    def __init__(
        self, blocks: int = 16, slots: int = 16, policy: str = "lru", **limits: float
    ) -> None:
        self.pool = Pool(blocks)
        self.next_use = NextUse()
        limits = {"store_blocks": 64, "held_blocks": 64} | limits
        self.manager: KvManager[str] = KvManager(
            slots, make_policy(policy, slots, self.next_use), self.pool, Limits(**limits)
        )
        self.dram: list[str | None] = [None] * slots
        self.moving: dict[int, Job] = {}
        self.now_s = 0.0

    def plan(self) -> Orders:
        orders = self.manager.plan(self.now_s)
        self.moving.update((job.number, job) for job in orders.begin)
        for number in orders.cancel:
            if number in self.moving:
                self.end(number, ok=False)
        return orders

    def end(self, number: int, *, ok: bool = True, corrupt: Sequence[int] = ()) -> None:
        job = self.moving.pop(number)
        for block, slot in zip(job.block_ids, job.slot_ids, strict=True):
            if job.kind is Kind.STORE:
                self.dram[slot] = self.pool.content[block] if ok else "?"
            else:
                self.pool.content[block] = self.dram[slot] if ok else "?"
        self.manager.ended([Ended(number, ok, tuple(corrupt))], self.now_s)
        self.manager.check()

    def settle(self) -> None:
        """Copy until nothing is under way."""
        for _ in range(100):
            self.plan()
            for number in list(self.moving):
                self.end(number)
            if not self.manager.busy:
                return
        raise AssertionError("the manager is never done")

    def turn(self, session: str, keys: Sequence[str]) -> None:
        """A turn that needs nothing from DRAM."""
        blocks = self.pool.compute(keys)
        assert blocks is not None
        self.manager.store(session, keys, blocks, self.now_s)
        self.pool.release(blocks[::-1])

    def in_dram(self, keys: Sequence[str]) -> None:
        """``keys`` are in DRAM, and not on the GPU."""
        self.turn("before", keys)
        self.settle()
        self.pool.evict(keys)

    def asks(self, name: str, keys: Sequence[str]) -> bool:
        return self.manager.lookup(name, name, keys, self.pool.have(keys), self.now_s)

    def gets(self, name: str, keys: Sequence[str]) -> list[int]:
        blocks = self.pool.compute(keys)
        assert blocks is not None
        self.manager.admitted(name)
        self.manager.check()
        return blocks

    def idle(self) -> bool:
        """Nothing is referred to, or under way."""
        self.manager.check()
        assert self.manager.held == {}
        return not any(self.pool.refs) and not self.manager.busy


def keys(name: str, count: int, start: int = 0) -> list[str]:
    return [f"{name}{depth}" for depth in range(start, start + count)]


def test_a_turn_is_stored_and_loaded_again_through_the_prefix_cache():
    world, history = World(), keys("a", 4)
    world.turn("a", history)
    assert world.manager.busy
    assert sum(world.pool.refs) == 4  # held until they are copied
    world.settle()
    assert world.idle()
    world.pool.evict(history)
    assert world.asks("r", history)
    (job,) = world.plan().begin
    assert job.kind is Kind.ON_PATH
    assert world.asks("r", history)  # still
    world.end(job.number)
    assert world.pool.have(history) == 4
    assert [world.pool.depths[b] for b in job.block_ids] == [0, 1, 2, 3]
    assert not world.asks("r", history)
    blocks = world.gets("r", history)
    assert sorted(blocks) == sorted(job.block_ids)
    world.pool.release(blocks)
    assert world.idle()
    report = world.manager.report()
    assert (report.stored, report.loaded, report.hits, report.reloads) == (4, 4, 4, 1)


def test_only_what_is_missing_is_loaded_and_the_prefix_stays_meanwhile():
    world, history = World(blocks=8), keys("a", 6)
    world.in_dram(history)
    blocks = world.gets("x", history[:2])  # computes them again
    world.pool.release(blocks)
    assert world.asks("r", history)
    (job,) = world.plan().begin
    assert len(job.block_ids) == 4
    assert world.pool.compute(keys("z", 3)) is None  # the two of the prefix cannot be taken
    world.end(job.number)
    assert world.pool.have(history) == 6


def test_blocks_behind_a_gap_are_kept_and_not_loaded():
    world, history = World(blocks=10), keys("a", 5)
    world.in_dram(history[:3])
    blocks = world.pool.compute(history)
    world.pool.release(blocks)
    world.pool.evict(history[:2])
    assert world.asks("r", history)
    (job,) = world.plan().begin
    assert len(job.block_ids) == 2
    # Of the three behind it the last two come last: nothing after them has to be loaded.
    assert not world.pool.is_free(blocks[2]) or world.pool.find(history[2]) == blocks[2]
    world.end(job.number)
    assert world.pool.have(history) == 5


def test_many_with_one_prefix_wait_for_one_load():
    world, history = World(blocks=64), keys("a", 8)
    world.in_dram(history)
    own = {f"r{i}": history + keys(f"own{i}-", 1) for i in range(6)}
    for name, wanted in own.items():
        assert world.asks(name, wanted)
    (job,) = world.plan().begin
    assert len(job.block_ids) == 8
    world.end(job.number)
    taken = []
    for name, wanted in own.items():
        assert not world.asks(name, wanted)
        taken += world.gets(name, wanted)
    assert world.manager.report().reloads == 6
    assert world.manager.report().loaded == 8
    world.pool.release(taken)
    assert world.idle()


def test_a_request_that_shares_a_part_loads_only_its_own():
    world = World(blocks=32, slots=32)
    a, b = keys("a", 6), keys("a", 3) + keys("b", 3)
    world.in_dram(a)
    world.in_dram(b)
    world.pool.evict(a)
    assert world.asks("ra", a)
    assert world.asks("rb", b)
    first, second = world.plan().begin
    assert (len(first.block_ids), len(second.block_ids)) == (6, 3)
    world.end(second.number)
    assert world.asks("rb", b)  # the shared part is still on its way
    world.end(first.number)
    assert not world.asks("rb", b)
    assert world.pool.have(b) == 6


@pytest.mark.parametrize("corrupt", [False, True])
def test_a_failed_load_is_recomputed_and_leaks_nothing(corrupt):
    world, history = World(), keys("a", 4)
    world.in_dram(history)
    assert world.asks("r", history)
    (job,) = world.plan().begin
    world.end(job.number, ok=False, corrupt=job.slot_ids[1:2] if corrupt else ())
    assert world.pool.have(history) == 0
    assert not world.asks("r", history)  # and does not try again
    world.pool.release(world.gets("r", history))
    assert world.idle()
    report = world.manager.report()
    assert report.corrupt == corrupt
    assert report.used == (3 if corrupt else 4)  # only what was corrupt is gone from DRAM
    # Somebody else may try what is left.
    world.pool.evict(history)
    assert world.asks("s", history)
    (job,) = world.plan().begin
    assert len(job.block_ids) == (1 if corrupt else 4)


def test_a_failed_store_leaves_nothing_in_dram():
    world, history = World(), keys("a", 4)
    world.turn("a", history)
    (job,) = world.plan().begin
    world.end(job.number, ok=False)
    assert world.manager.report().used == 0
    assert world.idle()


def test_abort_while_a_load_is_under_way_cancels_it():
    world, history = World(), keys("a", 4)
    world.in_dram(history)
    assert world.asks("r", history)
    (job,) = world.plan().begin
    world.manager.gone("r")
    world.manager.check()
    assert world.pool.refs[job.block_ids[0]]  # it may still be written
    assert world.plan().cancel == (job.number,)
    assert world.idle()
    assert world.manager.report().used == 4


def test_abort_of_one_of_two_lets_the_load_go_on():
    world, history = World(), keys("a", 4)
    world.in_dram(history)
    assert world.asks("r", history)
    assert world.asks("s", history)
    (job,) = world.plan().begin
    world.manager.gone("r")
    assert not world.plan().cancel
    world.end(job.number)
    world.pool.release(world.gets("s", history))
    assert world.idle()


def test_an_interrupted_turn_stores_only_what_is_still_in_the_cache():
    world, history = World(), keys("a", 4)
    blocks = world.pool.compute(history)
    world.manager.store("a", history, blocks, 0.0, hold=False)
    assert sum(world.pool.refs) == 4  # the request's own
    world.pool.release(blocks)
    world.pool.unhash(blocks[3])  # unheard
    world.settle()
    assert world.idle()
    assert world.manager.report().used == 3


def test_no_more_is_held_than_for_one_round():
    """Two requests whose loads came and who do not fit must not keep each other out."""
    world, history = World(), keys("a", 4)
    world.in_dram(history)
    assert world.asks("r", history)
    (job,) = world.plan().begin
    world.end(job.number)
    world.plan()  # not even asked in this round
    assert world.manager.held
    world.plan()
    assert not world.manager.held
    assert world.pool.have(history) == 4  # there, but anybody's
    assert not world.asks("r", history)
    assert world.idle()


def test_a_load_that_takes_too_long_is_given_up():
    world, history = World(load_timeout_s=5.0), keys("a", 4)
    world.in_dram(history)
    assert world.asks("r", history)
    (job,) = world.plan().begin
    world.now_s = 4.0
    assert world.asks("r", history)
    world.now_s = 5.1
    assert not world.asks("r", history)
    assert world.plan().cancel == (job.number,)
    assert world.manager.report().timeouts == 1
    world.pool.release(world.gets("r", history))
    assert world.idle()


def test_a_load_leaves_what_others_count_on():
    world, history = World(blocks=8), keys("a", 4)
    world.in_dram(history)
    world.pool.reserved = 5
    assert not world.asks("r", history)
    assert world.manager.report().no_room == 1
    world.pool.reserved = 4
    assert world.asks("r", history)


def test_a_short_hit_is_not_worth_it():
    world, history = World(min_load_blocks=3), keys("a", 2)
    world.in_dram(history)
    assert not world.asks("r", history)
    assert world.idle()


def test_dram_evicts_the_least_recently_used_and_counts_regret():
    world = World(blocks=32, slots=8)
    for name in "abc":
        world.now_s += 1.0
        world.turn(name, keys(name, 4))
        world.settle()
    world.pool.evict([*keys("a", 4), *keys("b", 4)])
    assert not world.asks("r", keys("a", 4))
    assert world.manager.report().regret == 4
    assert world.asks("s", keys("b", 4))


def test_use_of_what_is_in_dram_and_on_the_gpu_keeps_it_in_dram():
    world = World(blocks=32, slots=8)
    for name in ("a", "b", "a", "c"):  # a's second turn is a hit on the GPU
        world.now_s += 1.0
        world.turn(name, keys(name, 4))
        world.settle()
    world.pool.evict(keys("a", 4))
    assert world.asks("r", keys("a", 4))


def test_a_full_pool_of_blocks_under_load_stores_nothing_more():
    world, history = World(blocks=32, slots=4), keys("a", 4)
    world.in_dram(history)
    assert world.asks("r", history)
    (job,) = world.plan().begin
    world.turn("b", keys("b", 4))
    world.plan()
    assert world.manager.report().refused == 4
    world.end(job.number)
    world.pool.release(world.gets("r", history))
    assert world.idle()
    assert world.manager.report().used == 4


def test_stores_are_bounded_and_go_prefix_first():
    world = World(blocks=32, slots=32, store_blocks=3, held_blocks=5)
    world.turn("a", keys("a", 8))
    assert sum(world.manager.held.values()) == 5
    (job,) = world.plan().begin
    assert [world.pool.content[b] for b in job.block_ids] == keys("a", 3)
    assert not world.plan().begin
    world.end(job.number)
    world.settle()
    assert world.idle()
    assert world.manager.report().used == 5
    assert world.manager.report().store_missed == 3


def test_the_prefix_of_a_stored_turn_is_evicted_from_the_gpu_last():
    world = World(store_blocks=2)
    world.turn("a", keys("a", 6))
    world.settle()
    order = [world.pool.key_of[b] for b in world.pool.free if b in world.pool.key_of]
    assert order == keys("a", 6)[::-1]


def test_what_is_evicted_next_is_stored_ahead_and_still_goes_first():
    world = World(blocks=8, ahead_blocks=8)
    world.pool.release(world.pool.compute(keys("a", 6)))
    world.settle()
    assert world.manager.report().used == 6
    world.pool.release(world.pool.compute(keys("b", 6))[::-1])
    assert world.pool.have(keys("b", 6)) == 6
    assert world.asks("r", keys("a", 6))


def test_a_look_ahead_that_finds_nothing_is_not_repeated_at_once():
    world, looks = World(blocks=8, ahead_blocks=8), []
    upcoming = world.pool.upcoming
    world.pool.upcoming = lambda limit: looks.append(limit) or upcoming(limit)
    for at_s, so_far in ((1.0, 1), (1.01, 1), (1.049, 1), (1.051, 2)):
        assert not world.manager.plan(at_s)
        assert len(looks) == so_far, at_s
    world.pool.release(world.pool.compute(keys("a", 6)))
    assert not world.manager.plan(1.06)
    assert [job.kind for job in world.manager.plan(1.2).begin] == [Kind.STORE]


def test_preload_brings_back_a_history_and_a_request_then_hits():
    world, history = World(), keys("a", 6)
    world.in_dram(history)
    assert world.manager.offloaded("before") == history
    load = world.manager.preload(history[:4], "a")
    (job,) = world.plan().begin
    assert (job.kind, len(job.block_ids)) == (Kind.PRELOAD, 4)
    assert world.manager.offloaded("before") == history[4:]
    world.end(job.number)
    assert load.ended
    assert world.idle()  # held by nobody
    assert world.asks("r", history)  # for the rest
    assert world.manager.report().preloaded == 4
    (job,) = world.plan().begin
    assert len(job.block_ids) == 2
    world.end(job.number)
    assert world.manager.report().hits == 6


def test_a_request_that_meets_a_preload_promotes_it():
    world, history = World(), keys("a", 4)
    world.in_dram(history)
    load = world.manager.preload(history, "a")
    (job,) = world.plan().begin
    assert world.asks("r", history)
    orders = world.plan()
    assert not orders.begin
    assert orders.promote == (job.number,)
    assert not world.manager.cancel(load)
    world.end(job.number)
    world.pool.release(world.gets("r", history))
    assert world.idle()


def test_a_cancelled_preload_leaves_all_in_dram():
    world, history = World(), keys("a", 4)
    world.in_dram(history)
    load = world.manager.preload(history, "a")
    world.plan()
    assert world.manager.cancel(load)
    assert not world.asks("r", history)  # nothing to wait for while it ends
    world.plan()
    assert world.idle()
    assert world.manager.offloaded("a", history) == history


def test_preload_without_room_or_anything_to_load_is_none():
    world, history = World(blocks=8), keys("a", 4)
    assert world.manager.preload(history, "a") is None
    world.in_dram(history)
    world.pool.reserved = 8
    assert world.manager.preload(history, "a") is None
    assert world.idle()


def test_reset_drops_what_is_there_and_what_is_coming():
    world, a, b = World(blocks=32), keys("a", 4), keys("b", 4)
    world.in_dram(a)
    world.turn("b", b)
    world.plan()
    assert world.asks("r", a)
    world.turn("c", keys("c", 2))  # not begun
    world.plan()
    world.manager.reset(0.0)
    world.manager.check()
    for number in list(world.moving):
        world.end(number)
    assert world.pool.have(a) == 0
    assert not world.asks("r", a)
    world.settle()
    assert world.manager.report().used == 0
    world.manager.gone("r")
    assert world.idle()


def test_switched_off_nothing_begins_and_what_is_under_way_ends():
    world, history = World(blocks=32), keys("a", 4)
    world.in_dram(history)
    world.turn("b", keys("b", 4))
    world.manager.switch(loads=False, stores=False, policy=True)
    world.turn("c", keys("c", 4))
    assert not world.asks("r", history)
    assert world.manager.preload(history, "a") is None
    assert not world.plan().begin
    assert world.idle()


def test_unheard_blocks_leave_dram_first():
    world = World(blocks=32, slots=8, policy="next-use")
    world.next_use.needed("a", 0.0)
    world.turn("a", keys("a", 4))
    world.settle()
    world.turn("b", keys("b", 4))
    world.settle()
    world.manager.void(keys("a", 4)[2:])
    world.turn("c", keys("c", 2))
    world.settle()
    world.pool.evict([*keys("a", 4), *keys("b", 4)])
    assert world.manager.offloaded("a") == keys("a", 2)
    assert world.manager.offloaded("b") == keys("b", 4)


def test_the_report_counts_sessions():
    world = World(blocks=32, slots=8)
    world.turn("a", keys("a", 4))
    world.turn("b", keys("b", 3))
    world.settle()
    assert world.manager.sessions() == {"a": 4, "b": 3}
    world.turn("c", keys("c", 4))
    world.settle()
    assert sum(world.manager.sessions().values()) == 8


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("seed", range(6))
def test_whatever_happens_content_is_right_and_nothing_leaks(policy, seed):
    """Requests, failures, aborts, resets and preloads in random order. `Pool` asserts that only
    the right content is found under a key."""
    draw = random.Random(seed)
    world = World(
        blocks=18, slots=30, policy=policy, store_blocks=5, held_blocks=10, ahead_blocks=4
    )
    manager, pool = world.manager, world.pool
    sessions = {name: keys("x", 2) + keys(name, 2, 2) for name in "abcdef"}
    waiting: dict[str, str] = {}
    running: dict[str, tuple[str, list[int]]] = {}
    done = 0
    for step in range(1500):
        world.now_s += draw.random()
        name = draw.choice(list(sessions))
        action = draw.random()
        if action < 0.25 and len(waiting) < 4:
            waiting[f"r{step}"] = name
            if draw.random() < 0.5:
                world.next_use.needed(name, world.now_s)
        elif action < 0.35 and running:
            request = draw.choice(list(running))
            name, blocks = running.pop(request)
            manager.gone(request)
            hold = draw.random() < 0.7
            manager.store(name, sessions[name], blocks, world.now_s, hold=hold)
            pool.release(blocks[::-1])
            world.next_use.waiting(name, world.now_s, 1.0 + draw.random(), world.now_s)
            history = sessions[name]
            sessions[name] = (
                keys("x", 2)
                if len(history) > 9
                else history + keys(name, draw.randint(0, 2), len(history))
            )
            done += 1
        elif action < 0.40 and waiting:
            request = draw.choice(list(waiting))
            del waiting[request]
            manager.gone(request)
        elif action < 0.43:
            some = manager.offloaded(name, sessions[name])[: draw.randint(1, 6)]
            load = manager.preload(some, name)
            if load is not None and draw.random() < 0.3:
                manager.cancel(load)
        elif action < 0.432:
            manager.reset(world.now_s)
        elif action < 0.46:
            manager.void(sessions[name][-1:])
        elif action < 0.60 and world.moving:
            number = draw.choice(list(world.moving))
            job = world.moving[number]
            ok = draw.random() < 0.8
            corrupt = [] if ok or job.kind is Kind.STORE else job.slot_ids[:1]
            world.end(number, ok=ok, corrupt=corrupt)
        else:
            for request, name in list(waiting.items()):
                if world.asks(request, sessions[name]):
                    continue
                if len(running) >= 2 or (blocks := pool.compute(sessions[name])) is None:
                    break
                manager.admitted(request)
                running[request] = name, blocks
                del waiting[request]
            world.plan()
        manager.check()
    for request in waiting:
        manager.gone(request)
    for name, blocks in running.values():
        manager.store(name, sessions[name], blocks, world.now_s)
        pool.release(blocks)
    world.settle()
    assert world.idle()
    assert len(pool.free) == 18
    report = manager.report()
    assert done > 50
    assert min(report.stored, report.loaded, report.hits, report.load_failed) > 10
    assert manager.errors == 0
