"""The GPU's free queue over vLLM's real block pool: laws, and who is evicted."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

pytest.importorskip("vllm")

from vllm.distributed.kv_events import BlockRemoved, BlockStored
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import (
    BlockHash,
    FreeKVCacheBlockQueue,
    KVCacheBlock,
    make_block_hash_with_group_id,
    maybe_convert_block_hash,
)

from liveserve.events import KvSnapshot
from liveserve.host import block_pool
from liveserve.host.block_pool import GpuKv, LiveBlockPool, LiveQueue, _check
from liveserve.host.kv_events import tier_events
from liveserve.kv_signals import KvSignals
from liveserve.kvtier.next_use import NextUse
from liveserve.kvtier.policies import POLICIES
from liveserve.kvtier.report import Regret

TOKENS = 4  # per block
BLOCKS = 14
SESSIONS = ("a", "b", "c")


class Engine:
    """A pool with sessions whose turns take, hash and free blocks as a scheduler's requests do."""

    def __init__(self, policy: str | None, blocks: int = BLOCKS, *, safe_blocks: int = 2) -> None:
        self.pool = BlockPool(blocks, enable_caching=True, hash_block_size=TOKENS)
        self.now_s = 0.0
        self.signals = KvSignals(16)
        self.gpu: GpuKv | None = None
        if policy is not None:
            self.gpu = GpuKv(
                self.pool, policy, self.signals.next_use, lambda: self.now_s,
                safe_blocks=safe_blocks,
            )  # fmt: skip
            self.signals.follow(self.gpu.fail_closed)
        self.held: list[tuple[str, list[KVCacheBlock]]] = []
        self.taken: list[list[int]] = []  # every allocation

    @property
    def free(self) -> list[int]:
        return [block.block_id for block in self.pool.free_block_queue.get_all_free_blocks()]

    def hit(self, hashes: list[bytes]) -> list[KVCacheBlock]:
        found = []
        for one in hashes:
            blocks = self.pool.get_cached_block(one, [0])
            if blocks is None:
                break
            found += blocks
        return found

    def start(self, session: str, hashes: list[bytes], more: int = 0) -> bool:
        """A turn over ``hashes`` and ``more`` blocks without: hits, then new blocks."""
        self.now_s += 1.0
        hits = self.hit(hashes)
        count = len(hashes) + more - len(hits)
        if count + sum(b.ref_cnt == 0 for b in hits) > self.pool.get_num_free_blocks():
            return False
        self.pool.touch(hits)
        new = self.pool.get_new_blocks(count)
        self.taken.append([block.block_id for block in new])
        self.pool.cache_full_blocks(
            SimpleNamespace(block_hashes=hashes), hits + new, len(hits), len(hashes), TOKENS, 0
        )
        self.held.append((session, hits + new))
        return True

    def end(self, index: int = 0) -> None:
        self.now_s += 1.0
        session, blocks = self.held.pop(index)
        if self.gpu is not None:
            self.gpu.used(session, [block.block_id for block in blocks])
        self.pool.free_blocks(reversed(blocks))

    def turn(self, session: str, hashes: list[bytes], more: int = 0) -> None:
        assert self.start(session, hashes, more)
        self.end(len(self.held) - 1)


def history(session: str, length: int) -> list[bytes]:
    """The first block is the same for all: a system prompt."""
    return [b"shared"] + [f"{session}{depth}".encode() for depth in range(1, length)]


def check(pool: BlockPool) -> None:
    """No block is lost, none is there twice, and the list is whole in both directions."""
    queue = pool.free_block_queue
    free = queue.get_all_free_blocks()
    back, block = [], queue.fake_free_list_tail.prev_free_block
    while block is not None and block is not queue.fake_free_list_head:
        back.append(block)
        block = block.prev_free_block
    assert back[::-1] == free
    assert len(free) == queue.num_free_blocks == len({b.block_id for b in free})
    assert all(block.ref_cnt == 0 and not block.is_null for block in free)
    used = [block for block in pool.blocks if block.ref_cnt > 0]
    assert len(used) + len(free) == pool.num_gpu_blocks - 1
    assert all(b.prev_free_block is None and b.next_free_block is None for b in used)
    if isinstance(queue, LiveQueue) and queue.policy is not None:
        evictable = queue.policy.table.evictable
        known = [bool(evictable[block.block_id]) for block in free]
        assert sum(known) == len(queue.policy) == sum(evictable)
        assert known == sorted(known)  # what holds nothing is in front


class Machine(RuleBasedStateMachine):
    """Any mix of what the host, the connector and the sessions do, and of failures."""

    policy = "next-use"

    def __init__(self) -> None:
        super().__init__()
        self.engine = Engine(self.policy)
        self.told = self.emptied = False

    def follows_host(self) -> bool:
        """Whether the host's order must be what counts."""
        queue = self.engine.gpu.queue
        return queue.in_force == "lru" or self.engine.signals.stale or not self.told

    @rule(session=st.sampled_from(SESSIONS), length=st.integers(1, 5), more=st.integers(0, 2))
    def start(self, session: str, length: int, more: int) -> None:
        before, exact = self.engine.free, self.follows_host() and not self.emptied
        hits = {block.block_id for block in self.engine.hit(history(session, length))}
        if self.engine.start(session, history(session, length), more) and exact:
            left = [block for block in before if block not in hits]
            if self.policy != "t-lru" or self.engine.gpu.queue.in_force == "lru":
                assert self.engine.taken[-1] == left[: len(self.engine.taken[-1])]

    @precondition(lambda self: self.engine.held)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        self.engine.end(data.draw(st.integers(0, len(self.engine.held) - 1)))

    @rule(session=st.sampled_from(SESSIONS), length=st.integers(1, 4))
    def copy_and_free(self, session: str, length: int) -> None:
        """The connector holds what is there for a moment."""
        found = self.engine.hit(history(session, length))
        self.engine.pool.touch(found)
        self.engine.pool.free_blocks(reversed(found))

    @precondition(lambda self: self.engine.held)
    @rule()
    def unpin(self) -> None:
        _, blocks = self.engine.held.pop()
        self.engine.pool.unpin_blocks(blocks, lambda block: None)

    @rule(data=st.data())
    def empty(self, data: st.DataObject) -> None:
        blocks = data.draw(st.sets(st.integers(1, BLOCKS - 1), max_size=4))
        self.emptied = True
        self.engine.pool.evict_blocks(blocks)

    @rule(data=st.data())
    def unheard(self, data: st.DataObject) -> None:
        """As `liveserve.host.unheard`: they lose their hash and move to the front."""
        pool = self.engine.pool
        ids = data.draw(st.sets(st.sampled_from(self.engine.free or [0]), max_size=3))
        blocks = [pool.blocks[i] for i in sorted(ids) if i and pool.blocks[i].block_hash]
        pool.evict_blocks({block.block_id for block in blocks})
        for block in blocks:
            pool.free_block_queue.remove(block)
        pool.free_block_queue.prepend_n(blocks)

    @rule()
    def reset(self) -> None:
        if self.engine.pool.reset_prefix_cache():
            assert len(self.engine.gpu.queue.policy or ()) == 0
            self.emptied = False

    @rule(session=st.sampled_from(SESSIONS), what=st.integers(0, 3), wait_s=st.floats(0, 100))
    def hear(self, session: str, what: int, wait_s: float) -> None:
        now_s, next_use = self.engine.now_s, self.engine.signals.next_use
        if not self.engine.signals.stale:
            self.told = True
            (
                lambda: next_use.needed(session, now_s),
                lambda: next_use.waiting(session, now_s + wait_s, 2.0, now_s),
                lambda: next_use.close(session, now_s),
                lambda: next_use.lost(session),
            )[what]()

    @rule(stale=st.booleans())
    def stale(self, stale: bool) -> None:
        self.engine.signals.trust(not stale)
        if not stale:
            self.engine.signals.load([], self.engine.now_s)

    @rule(on=st.booleans())
    def switch(self, on: bool) -> None:
        self.engine.gpu.switch(on)

    @rule(
        how=st.sampled_from(("raises", "short", "used", "twice", "free", "remove", "use", "void"))
    )
    def fail(self, how: str) -> None:
        """The policy goes wrong from now on."""
        policy, engine = self.engine.gpu.queue.policy, self.engine
        if policy is None:
            return
        evict = policy.evict

        def broken(*args: object, **given: object) -> list[int]:
            raise RuntimeError(how)

        def lies(count: int, now_s: float) -> list[int]:
            victims = evict(count, now_s)
            if how == "short":
                return victims[1:]
            if how == "twice":
                return [victims[-1], *victims[1:-1], victims[-1]] if count > 1 else []
            used = [block.block_id for _, held in engine.held for block in held]
            return [*victims[1:], (used or [0])[0]]

        if how in ("short", "used", "twice"):
            policy.evict = lies
        else:
            setattr(policy, "evict" if how == "raises" else how, broken)

    @invariant()
    def whole(self) -> None:
        check(self.engine.pool)

    def teardown(self) -> None:
        while self.engine.held:
            self.engine.end()
        check(self.engine.pool)
        assert self.engine.pool.get_num_free_blocks() == BLOCKS - 1
        everything = self.engine.pool.get_new_blocks(BLOCKS - 1)
        assert {block.block_id for block in everything} == set(range(1, BLOCKS))


@pytest.fixture(autouse=True)
def _quiet():
    logging.getLogger("vllm.liveserve").setLevel(logging.ERROR)
    logging.getLogger("vllm.v1.core.block_pool").setLevel(logging.ERROR)
    yield
    logging.getLogger("vllm.liveserve").setLevel(logging.NOTSET)
    logging.getLogger("vllm.v1.core.block_pool").setLevel(logging.NOTSET)


def laws(policy: str) -> type:
    machine = type(f"Machine{policy.title().replace('-', '')}", (Machine,), {"policy": policy})
    machine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
    return machine.TestCase


TestNextUse = laws("next-use")
TestTailLru = laws("t-lru")
TestLogOnly = laws("log-only")
TestLru = laws("lru")

STEPS = st.lists(
    st.tuples(st.sampled_from(SESSIONS), st.integers(1, 6), st.integers(0, 2), st.integers(0, 3)),
    max_size=40,
)


@pytest.mark.parametrize("policy", ["next-use", "log-only", "lru"])
@given(steps=STEPS, stale=st.booleans())
def test_without_signals_every_allocation_is_the_hosts(policy, steps, stale):
    ours, stock = Engine(policy), Engine(None)
    ours.signals.trust(not stale)
    for session, length, more, end in steps:
        for engine in (ours, stock):
            engine.start(session, history(session, length), more)
            if engine.held and end:
                engine.end(min(end, len(engine.held)) - 1)
        assert ours.taken == stock.taken
        assert ours.free == stock.free
    assert ours.gpu.queue.errors == 0


def speak_and_wait(engine: Engine) -> None:
    """Session a was read first, and is needed now; b's answer plays for a minute."""
    engine.turn("a", [b"a0", b"a1", b"a2"])
    engine.turn("b", [b"b0", b"b1", b"b2"])
    now_s, next_use = engine.now_s, engine.signals.next_use
    next_use.needed("a", now_s)
    next_use.waiting("b", now_s + 60.0, 2.0, now_s)


@pytest.mark.parametrize(
    ("policy", "lost"), [("next-use", b"b"), ("lru", b"a"), ("log-only", b"a")]
)
def test_next_use_evicts_the_right_session_and_lru_the_wrong_one(policy, lost):
    engine = Engine(policy, blocks=8)  # 7: one is the null block
    speak_and_wait(engine)
    assert engine.start("c", [b"c0", b"c1", b"c2"])
    kept = b"a" if lost == b"b" else b"b"
    names = {key[:1] for key in engine.pool.cached_block_hash_to_block._cache}
    assert names == {kept, b"c", lost}  # the suffix goes first: its first block is still there
    assert len(engine.hit([lost + b"0", lost + b"1"])) == 1
    assert len(engine.hit([kept + b"0", kept + b"1", kept + b"2"])) == 3
    snapshot = KvSnapshot()
    engine.gpu.fill(snapshot)
    reason = "next-use" if policy == "next-use" else "recency"
    assert snapshot.evicted == {f"{policy}/{reason}": 2}
    assert snapshot.disagreed == (2 if policy == "log-only" else 0)
    assert (snapshot.policy, snapshot.errors) == (policy, 0)


def test_a_session_that_becomes_known_after_its_turn_is_ranked():
    engine = Engine("next-use", blocks=8)
    speak_and_wait(engine)  # both turns ended before anything was known of the sessions
    assert (
        engine.gpu.upcoming(2)
        == [block.block_id for block in engine.hit([b"b0", b"b1", b"b2"])][:0:-1]
    )
    assert engine.gpu.sessions(8) == {"a": 3, "b": 3}


def test_signals_that_were_stale_count_again_after_all_views_came():
    engine = Engine("next-use", blocks=8)
    speak_and_wait(engine)
    engine.signals.trust(False)
    oldest = engine.hit([b"a0", b"a1", b"a2"])[-1].block_id
    assert engine.gpu.upcoming(1) == [oldest]  # LRU, suffix first
    engine.signals.load([], engine.now_s)
    engine.signals.next_use.needed("a", engine.now_s)
    engine.signals.next_use.waiting("b", engine.now_s + 60, 2.0, engine.now_s)
    assert engine.start("c", [b"c0", b"c1", b"c2"])
    assert len(engine.hit([b"a0", b"a1", b"a2"])) == 3


def test_a_shared_prefix_stays_for_its_earliest_reader():
    engine = Engine("next-use", blocks=8)
    for session in ("far", "near"):
        engine.turn(session, [b"shared", f"{session}1".encode(), f"{session}2".encode()])
    now_s, next_use = engine.now_s, engine.signals.next_use
    next_use.waiting("far", now_s + 100, 1.0, now_s)
    next_use.waiting("near", now_s + 1, 1.0, now_s)
    assert engine.start("c", [b"c0", b"c1", b"c2", b"c3"])
    assert len(engine.hit([b"shared", b"near1", b"near2"])) == 3
    assert len(engine.hit([b"shared", b"far1"])) == 1


def test_blocks_without_content_go_before_any_other():
    engine = Engine("next-use", blocks=8)
    engine.turn("a", [b"a0", b"a1"], more=1)
    engine.signals.next_use.close("a", engine.now_s)
    part = engine.free[0]
    assert engine.start("b", [], more=1)
    assert engine.taken[-1] == [part]
    engine.end()
    assert engine.start("b", [], more=5)  # all that never held anything
    assert len(engine.hit([b"a0", b"a1"])) == 2


def test_a_failing_policy_is_logged_once_counted_and_can_be_started_again(monkeypatch):
    engine = Engine("next-use", blocks=8)
    speak_and_wait(engine)

    def broken(count: int, now_s: float) -> list[int]:
        raise RuntimeError("no")

    engine.gpu.queue.policy.evict = broken
    logged: list[tuple] = []
    monkeypatch.setattr(block_pool.logger, "warning", lambda *args: logged.append(args))
    assert engine.start("c", [b"c0", b"c1", b"c2"])
    engine.end()
    assert len(engine.hit([b"b0", b"b1", b"b2"])) == 3  # the host's order: a lost its suffix
    assert [(args[1], str(args[2])) for args in logged] == [("RuntimeError", "no")]
    assert (engine.gpu.queue.in_force, engine.gpu.queue.errors) == ("lru", 1)
    engine.gpu.switch(False)
    engine.gpu.switch(True)
    assert (engine.gpu.queue.in_force, engine.gpu.queue.errors) == ("next-use", 1)
    assert engine.gpu.upcoming(1) == [engine.hit([b"b0", b"b1", b"b2"])[-1].block_id]
    assert len(engine.signals.next_use._listeners) == 2  # the old policy hears nothing any more


def test_what_is_remembered_of_sessions_is_bounded():
    engine = Engine("next-use", blocks=8)
    for index in range(200):
        engine.turn(f"s{index}", [b"x0", b"x1", b"x2", b"x3"])
    assert engine.gpu._remembered <= 4 * 8
    assert len(engine.gpu._histories) == 8
    assert len(engine.gpu._unranked) <= 8
    assert engine.gpu._remembered == sum(len(ids) for ids, _ in engine.gpu._histories.values())


def test_regret_counts_what_was_needed_again_soon():
    engine = Engine("lru", blocks=4)
    engine.turn("a", [b"a0", b"a1", b"a2"])
    engine.turn("b", [b"b0", b"b1", b"b2"])
    engine.turn("a", [b"a0", b"a1"])
    assert engine.gpu.regret.count == 2
    engine.now_s += 31.0
    engine.turn("b", [b"b0", b"b1", b"b2"])
    assert engine.gpu.regret.count == 2


@given(keys=st.lists(st.integers(0, 30), max_size=60), capacity=st.integers(1, 8))
def test_regret_is_bounded(keys, capacity):
    regret = Regret(5.0, capacity)
    for now_s, key in enumerate(keys):
        regret.evicted([key], float(now_s))
        assert len(regret) <= min(capacity, 6)
        assert regret.needed(key, float(now_s))


def test_a_host_that_is_not_as_expected_stays_stock():
    class Other(FreeKVCacheBlockQueue):
        pass

    pool = BlockPool(4, enable_caching=True, hash_block_size=TOKENS)
    groups = [SimpleNamespace(block_pool=pool)]
    manager = SimpleNamespace(
        block_pool=pool,
        record_prefix_cache_stats=None,
        coordinator=SimpleNamespace(single_type_managers=groups),
    )
    _check(manager)
    groups.append(SimpleNamespace(block_pool=None))
    with pytest.raises(RuntimeError, match="pools of their own"):
        _check(manager)
    groups.pop()
    pool.free_block_queue.__class__ = Other
    with pytest.raises(RuntimeError, match="free queue is a Other"):
        _check(manager)


def test_events_of_the_dram_tier():
    key = make_block_hash_with_group_id(BlockHash(b"h" * 32), 1)
    stored, removed = tier_events([(key, True), (key, False)], {1: 16})
    assert isinstance(stored, BlockStored)
    assert isinstance(removed, BlockRemoved)
    for event in (stored, removed):
        assert event.block_hashes == [maybe_convert_block_hash(BlockHash(b"h" * 32))]
        assert (event.medium, event.group_idx) == ("CPU", 1)
    assert stored.block_size == 16


def test_the_hosts_own_events_say_what_was_evicted():
    pool = BlockPool(8, enable_caching=True, hash_block_size=TOKENS, enable_kv_cache_events=True)
    next_use = NextUse(8)
    gpu = GpuKv(pool, "next-use", next_use, lambda: 0.0)
    blocks = pool.get_new_blocks(6)
    for index, block in enumerate(blocks):
        key = make_block_hash_with_group_id(BlockHash(b"%d" % index), 0)
        pool._insert_block_hash(key, block, num_tokens=(index + 1) * TOKENS)
    gpu.used("a", [block.block_id for block in blocks[:3]])
    gpu.used("b", [block.block_id for block in blocks[3:]])
    pool.free_blocks(blocks[2::-1])
    pool.free_blocks(blocks[:2:-1])
    next_use.needed("a", 0.0)
    next_use.waiting("b", 50.0, 1.0, 0.0)
    pool.get_new_blocks(3)  # one was never used
    removed = [event.block_hashes for event in pool.take_events()]
    assert removed == [[maybe_convert_block_hash(BlockHash(name))] for name in (b"5", b"4")]


def test_every_policy_has_a_name_that_the_queue_takes():
    for name in POLICIES:
        engine = Engine(name)
        assert isinstance(engine.pool, LiveBlockPool)
        assert engine.gpu.queue.in_force == name
    engine = Engine("fifo")  # no such policy: the host's order
    assert (engine.gpu.queue.in_force, engine.gpu.queue.errors) == ("lru", 1)
    assert isinstance(engine.signals.next_use, NextUse)
