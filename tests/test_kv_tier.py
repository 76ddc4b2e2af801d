"""Residency of blocks: every transition, and no slot lost or owned twice in any mix of events."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from liveserve.kvtier.next_use import NextUse
from liveserve.kvtier.policies import Lru, NextUsePolicy
from liveserve.kvtier.slots import SlotAllocator
from liveserve.kvtier.tier import TRANSITIONS, IllegalTransition, Outcome, State, Tier

DONE, FAILED, CORRUPT = Outcome.DONE, Outcome.FAILED, Outcome.CORRUPT


def tier_of(num_slots: int = 4, dropped: list | None = None) -> Tier[str]:
    on_dropped = dropped.append if dropped is not None else None
    return Tier(SlotAllocator(num_slots), Lru(num_slots), on_dropped)


def stored(tier: Tier[str], key: str, block: int, now_s: float = 0.0) -> None:
    tier.computed(key, block)
    (ticket,) = tier.store([(key, block)], now_s)
    assert tier.finish(ticket, DONE, now_s)


# How to bring "x" into each state, on GPU block 1 where it is on the GPU.
def make_gpu(tier):
    tier.computed("x", 1)


def make_storing(tier):
    tier.computed("x", 1)
    return tier.store([("x", 1)], 0.0)[0]


def make_saving(tier):
    ticket = make_storing(tier)
    tier.lost("x", 1)
    return ticket


def make_both(tier):
    stored(tier, "x", 1)


def make_dram(tier):
    make_both(tier)
    tier.lost("x", 1)


def make_loading(tier):
    make_dram(tier)
    return tier.load("x", 2)


MAKE = {
    State.ABSENT: lambda tier: None,
    State.GPU: make_gpu,
    State.STORING: make_storing,
    State.SAVING: make_saving,
    State.DRAM: make_dram,
    State.LOADING: make_loading,
    State.BOTH: make_both,
}
ACTIONS = {
    "computed": lambda tier, ticket: tier.computed("x", 7),
    "lost": lambda tier, ticket: tier.lost("x", 1),
    "store": lambda tier, ticket: tier.store([("x", 1)], 1.0)[0],
    "load": lambda tier, ticket: tier.load("x", 3),
    "evict": lambda tier, ticket: tier.evict(1, 1.0),
    "stored": lambda tier, ticket: tier.finish(ticket, DONE, 1.0),
    "store failed": lambda tier, ticket: tier.finish(ticket, FAILED, 1.0),
    "loaded": lambda tier, ticket: tier.finish(ticket, DONE, 1.0),
    "load failed": lambda tier, ticket: tier.finish(ticket, FAILED, 1.0),
    "corrupt": lambda tier, ticket: tier.finish(ticket, CORRUPT, 1.0),
}


@pytest.mark.parametrize("state", State)
@pytest.mark.parametrize("action", ["computed", "lost", "store", "load", "evict"])
def test_what_may_happen_in_a_state_and_what_is_refused(state, action):
    tier = tier_of()
    ticket = MAKE[state](tier)
    assert tier.state("x") is state
    after = TRANSITIONS.get((state, action))
    if after is not None and (state, action) != (State.LOADING, "lost"):
        ACTIONS[action](tier, ticket)
        assert tier.state("x") is after
    elif action == "evict":
        assert tier.evict(1, 1.0) == 0
        assert tier.state("x") is state
    elif action == "store" and state in (State.STORING, State.BOTH):
        assert tier.store([("x", 1)], 1.0) == []  # there already, or on its way
    else:
        with pytest.raises(IllegalTransition, match="x"):
            ACTIONS[action](tier, ticket)
        assert tier.state("x") is state
    tier.check()


@pytest.mark.parametrize(
    ("state", "outcome", "after"),
    [
        (State.STORING, DONE, State.BOTH),
        (State.STORING, FAILED, State.GPU),
        (State.SAVING, DONE, State.DRAM),
        (State.SAVING, FAILED, State.ABSENT),
        (State.LOADING, DONE, State.BOTH),
        (State.LOADING, FAILED, State.DRAM),
        (State.LOADING, CORRUPT, State.ABSENT),
    ],
)
def test_how_copies_end(state, outcome, after):
    dropped: list[str] = []
    tier = tier_of(dropped=dropped)
    ticket = MAKE[state](tier)
    assert tier.evict(4, 1.0) == 0  # what a copy reads or writes stays
    assert tier.finish(ticket, outcome, 1.0) is (outcome is DONE)
    assert tier.state("x") is after
    assert dropped == (["x"] if outcome is CORRUPT else [])
    with pytest.raises(IllegalTransition, match="finished before"):
        tier.finish(ticket, DONE, 2.0)
    tier.check()
    if state is State.LOADING and outcome is DONE:
        tier.lost("x", 2)
        assert tier.state("x") is State.DRAM


@pytest.mark.parametrize(("outcome", "after"), [(FAILED, State.BOTH), (CORRUPT, State.GPU)])
def test_a_block_computed_while_it_was_loading_is_kept(outcome, after):
    tier = tier_of()
    ticket = make_loading(tier)
    tier.computed("x", 5)
    tier.lost("x", 5)
    assert tier.state("x") is State.LOADING
    tier.computed("x", 6)
    assert not tier.finish(ticket, outcome, 1.0)
    assert tier.state("x") is after
    tier.check()


def test_a_block_is_lost_with_its_last_copy():
    tier = tier_of()
    tier.computed("a", 1)
    tier.computed("a", 2)
    tier.lost("a", 1)
    assert tier.state("a") is State.GPU
    tier.lost("a", 2)
    assert tier.state("a") is State.ABSENT


def test_a_store_is_never_corrupt():
    tier = tier_of()
    ticket = make_storing(tier)
    with pytest.raises(IllegalTransition, match="corrupt"):
        tier.finish(ticket, CORRUPT, 1.0)
    assert tier.finish(ticket, DONE, 1.0)


def test_stores_take_the_place_of_the_oldest_and_stop_where_nothing_may_go():
    dropped: list[str] = []
    tier = tier_of(3, dropped)
    for block, key in enumerate("abc"):
        stored(tier, key, block, now_s=float(block))
    lease = tier.pin(["b"])
    for block, key in enumerate("defg", 10):
        tier.computed(key, block)
    tickets = tier.store([("d", 10), ("e", 11), ("f", 12)], 5.0)
    assert [t.key for t in tickets] == ["d", "e"]
    assert dropped == ["a", "c"]
    assert tier.totals.refused == 1
    assert [tier.has(key) for key in "bd"] == [True, False]  # d is not there yet
    for ticket in tickets:
        tier.finish(ticket, DONE, 6.0)
    assert [tier.has(key) for key in "bdef"] == [True, True, True, False]
    tier.unpin(lease, 7.0)
    tier.unpin(lease, 7.0)
    assert [t.key for t in tier.store([("g", 13)], 8.0)] == ["g"]
    assert dropped == ["a", "c", "d"]
    tier.check()


def test_a_store_of_what_is_not_there_begins_nothing():
    tier = tier_of()
    tier.computed("a", 1)
    for wrong in (("a", 2), ("b", 1)):
        with pytest.raises(IllegalTransition, match="not on GPU block"):
            tier.store([("a", 1), wrong], 0.0)
    assert tier.state("a") is State.GPU
    assert tier.in_flight == 0
    assert len(tier.store([("a", 1), ("a", 1)], 0.0)) == 1


def test_pins_of_absent_blocks_pin_nothing():
    tier = tier_of()
    stored(tier, "a", 1)
    with pytest.raises(IllegalTransition, match="cannot pin 'b'"):
        tier.pin(["a", "b"])
    assert tier.evict(1, 1.0) == 1


def test_reset_drops_everything_and_lets_copies_run_out():
    dropped: list[str] = []
    tier = tier_of(6, dropped)
    for block, key in enumerate(["a", "b", "c", "d"]):
        stored(tier, key, block)
        tier.lost(key, block)
    load = tier.load("a", 7)
    tier.computed("s", 8)
    (store,) = tier.store([("s", 8)], 1.0)
    lease = tier.pin(["a", "b"])
    tier.reset(2.0)
    tier.check()
    assert len(tier) == 0
    assert sorted(dropped) == ["a", "b", "c", "d"]
    tier.computed("s", 8)
    (again,) = tier.store([("s", 8)], 3.0)
    assert again.slot not in (load.slot, store.slot)
    assert not tier.finish(store, DONE, 4.0)
    assert not tier.finish(load, DONE, 4.0)
    assert tier.state("a") is State.ABSENT
    assert tier.state("s") is State.STORING
    tier.check()
    tier.unpin(lease, 5.0)
    tier.finish(again, DONE, 5.0)
    tier.check()
    assert tier._slots.num_free == 5


def test_a_policy_that_is_too_small_is_refused():
    with pytest.raises(ValueError, match="3 slots, the pool has 4"):
        Tier(SlotAllocator(4), Lru(3))


def test_sessions_order_dram_by_next_use():
    estimator = NextUse()
    tier = Tier[bytes](SlotAllocator(8), NextUsePolicy(8, estimator))
    for session, ends_s in (("soon", 10.0), ("late", 90.0)):
        keys = [f"{session} {n}".encode() for n in range(3)]
        for block, key in enumerate(keys):
            stored(tier, key, block)
            tier.lost(key, block)
        estimator.waiting(session, ends_s, 1.0, now_s=0.0)
        tier.use(session, keys, 0.0)
    tier.evict(2, 1.0)
    there = [f"{name} {n}" for name in ("soon", "late") for n in range(3)]
    assert [tier.has(key.encode()) for key in there] == [True] * 4 + [False] * 2
    estimator.close("soon", 2.0)
    tier.evict(3, 3.0)
    assert [tier.state(k) for k in (b"soon 0", b"late 0")] == [State.ABSENT, State.DRAM]
    tier.check()


class TierMachine(RuleBasedStateMachine):
    """Any mix of events. What is legal by an independent account of GPU and DRAM copies works,
    and what is not is refused and changes nothing."""

    KEYS = st.integers(0, 4)
    BLOCKS = st.integers(0, 7)

    @initialize(by_session=st.booleans())
    def start(self, by_session: bool) -> None:
        estimator = NextUse()
        policy = NextUsePolicy(4, estimator) if by_session else Lru(4)
        self.estimator = estimator
        self.tier: Tier[int] = Tier(SlotAllocator(4), policy, self.dropped)
        self.gpu: dict[int, int] = {}  # block → key
        self.dram: set[int] = set()
        self.flying: list = []
        self.stale: set[int] = set()  # ids of tickets from before a reset
        self.leases: list = []
        self.now_s = 0.0

    def dropped(self, key: int) -> None:
        self.dram.remove(key)

    def busy(self, key: int, is_load: bool) -> bool:
        return any(
            t.key == key and t.is_load is is_load and id(t) not in self.stale for t in self.flying
        )

    def free_blocks(self) -> set[int]:
        return set(range(8)) - self.gpu.keys() - {t.gpu_block for t in self.flying}

    @rule(key=KEYS, block=BLOCKS)
    def computed(self, key: int, block: int) -> None:
        if block in self.free_blocks():
            self.tier.computed(key, block)
            self.gpu[block] = key
        elif self.gpu.get(block) == key:
            with pytest.raises(IllegalTransition):
                self.tier.computed(key, block)

    @rule(key=KEYS, block=BLOCKS, of_block=st.booleans())
    def lost(self, key: int, block: int, of_block: bool) -> None:
        key = self.gpu.get(block, key) if of_block else key
        if self.gpu.get(block) == key:
            self.tier.lost(key, block)
            del self.gpu[block]
        else:
            with pytest.raises(IllegalTransition):
                self.tier.lost(key, block)

    @rule(blocks=st.lists(BLOCKS, max_size=5))
    def store(self, blocks: list) -> None:
        self.now_s += 1.0
        pairs = [(self.gpu[b], b) for b in blocks if b in self.gpu]
        wanted = dict.fromkeys(
            k for k, _ in pairs if k not in self.dram and not self.busy(k, False)
        )
        tickets = self.tier.store(pairs, self.now_s)
        assert [t.key for t in tickets] == list(wanted)[: len(tickets)]
        if len(tickets) < len(wanted):
            assert self.tier.evict(1, self.now_s) == 0
        self.flying += tickets

    @rule(key=KEYS, block=BLOCKS)
    def load(self, key: int, block: int) -> None:
        if block not in self.free_blocks():
            return
        if key in self.dram and key not in self.gpu.values() and not self.busy(key, True):
            self.flying.append(self.tier.load(key, block))
        else:
            with pytest.raises(IllegalTransition):
                self.tier.load(key, block)

    @precondition(lambda self: self.flying)
    @rule(which=st.integers(0, 99), outcome=st.sampled_from(Outcome))
    def finish(self, which: int, outcome: Outcome) -> None:
        self.now_s += 1.0
        ticket = self.flying.pop(which % len(self.flying))
        if outcome is CORRUPT and not ticket.is_load:
            outcome = FAILED
        counts = self.tier.finish(ticket, outcome, self.now_s)
        fresh = id(ticket) not in self.stale
        assert counts == (fresh and outcome is DONE)
        if counts and ticket.is_load:
            self.gpu[ticket.gpu_block] = ticket.key
        elif counts:
            self.dram.add(ticket.key)

    @rule(keys=st.lists(KEYS, max_size=4, unique=True))
    def pin(self, keys: list) -> None:
        if self.dram.issuperset(keys):
            self.leases.append((self.tier.pin(keys), keys))
        else:
            with pytest.raises(IllegalTransition):
                self.tier.pin(keys)

    @precondition(lambda self: self.leases)
    @rule(which=st.integers(0, 99))
    def unpin(self, which: int) -> None:
        self.tier.unpin(self.leases.pop(which % len(self.leases))[0], self.now_s)

    @rule(session=st.integers(0, 2), keys=st.lists(KEYS, max_size=5, unique=True))
    def use(self, session: int, keys: list) -> None:
        self.estimator.waiting(session, self.now_s + 10.0 * session, 1.0, self.now_s)
        self.tier.use(session, keys, self.now_s)

    @rule(session=st.integers(0, 2))
    def close(self, session: int) -> None:
        self.estimator.close(session, self.now_s)

    @rule(count=st.integers(0, 5))
    def evict(self, count: int) -> None:
        before = set(self.dram)
        pinned = {k for _, keys in self.leases for k in keys}
        dropped = self.tier.evict(count, self.now_s)
        assert len(before - self.dram) == dropped
        loading = {t.key for t in self.flying if t.is_load}
        # A lease from before a reset may be of a slot that holds the same key again.
        if not self.stale:
            assert not (before - self.dram) & (pinned | loading)

    @rule()
    def reset(self) -> None:
        self.tier.reset(self.now_s)
        assert not self.dram
        self.gpu.clear()
        self.stale |= {id(t) for t in self.flying}

    @precondition(lambda self: hasattr(self, "tier"))
    @invariant()
    def nothing_leaks(self) -> None:
        self.tier.check()
        for key in range(5):
            on_gpu, in_dram = key in self.gpu.values(), key in self.dram
            state = self.tier.state(key)
            if self.busy(key, True):
                assert state is State.LOADING
            elif self.busy(key, False):
                assert state is (State.STORING if on_gpu else State.SAVING)
            else:
                expected = {
                    (False, False): State.ABSENT,
                    (True, False): State.GPU,
                    (False, True): State.DRAM,
                    (True, True): State.BOTH,
                }
                assert state is expected[on_gpu, in_dram]
        assert self.tier.in_flight == len(self.flying)
        assert self.tier.in_dram == len(self.dram)
        assert {key for key in range(5) if self.tier.has(key)} == set(self.dram)

    def teardown(self) -> None:
        if not hasattr(self, "tier"):
            return
        for ticket in self.flying:
            self.tier.finish(ticket, FAILED, self.now_s)
        for lease, _ in self.leases:
            self.tier.unpin(lease, self.now_s)
        self.tier.reset(self.now_s)
        self.tier.check()
        assert self.tier._slots.num_free == 4
        assert len(self.tier) == 0


TierMachine.TestCase.settings = settings(max_examples=120, stateful_step_count=50, deadline=None)
TestTier = TierMachine.TestCase
