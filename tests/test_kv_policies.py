"""Eviction order: against a naive model, against LRU without signals, and when the index fails."""

from __future__ import annotations

import itertools
import logging
import math
import random
from collections import OrderedDict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from liveserve.kvtier.baselines import Arc, Ttl
from liveserve.kvtier.next_use import LANES, NextUse
from liveserve.kvtier.optimal import Optimal
from liveserve.kvtier.policies import (
    POLICIES,
    EvictionPolicy,
    LogOnly,
    Lru,
    NextUsePolicy,
    TailLru,
    make_policy,
)

BLOCKS = 16
SESSIONS = st.integers(0, 3)


class Model:
    """The order by definition: looks at every block, at every decision."""

    def __init__(self) -> None:
        self.users: dict[int, set[int]] = {}  # of blocks with known readers, now or before
        self.shared: set[int] = set()
        self.free: set[int] = set()
        self.blank: set[int] = set()
        self.recency: OrderedDict[int, None] = OrderedDict()
        self.last_use_s = [0.0] * BLOCKS
        self.depth = [0] * BLOCKS

    def forget(self, block: int) -> None:
        self.users.pop(block, None)
        self.shared.discard(block)

    def to_recency(self, block: int) -> None:
        self.forget(block)
        if block in self.free:
            self.recency[block] = None

    def wait_s(self, block: int, now_s: float, estimator: NextUse) -> float:
        if block in self.blank:
            return math.inf
        if block in self.recency:
            return now_s - self.last_use_s[block]
        known = [estimator.get(user) for user in self.users[block]]
        if not known:
            return math.inf
        wait_s = min(k.next_use_s for k in known) - now_s
        if len(known) == 1 and wait_s > 0:
            wait_s /= estimator.chance[known[0].lane]
        return wait_s


class NextUseMachine(RuleBasedStateMachine):
    """`NextUsePolicy` and `Model` see the same things and must choose alike."""

    @initialize()
    def start(self) -> None:
        self.now_s = 0.0
        self.estimator = NextUse()
        self.policy = NextUsePolicy(BLOCKS, self.estimator)
        self.model = Model()
        self.chains: dict[int, list[int]] = {}
        self.estimator.subscribe(self.heard)

    def heard(self, session: int, known: object, over: bool) -> None:
        if known is not None:
            return
        for block, users in list(self.model.users.items()):
            if session in users:
                users.discard(session)
                if not users and (block in self.model.shared or not over):
                    self.left.append(block)

    @rule(passed_s=st.floats(0.0, 20.0))
    def time_passes(self, passed_s: float) -> None:
        self.now_s += passed_s

    @rule(session=SESSIONS)
    def speech(self, session: int) -> None:
        self.estimator.needed(session, self.now_s)

    @rule(session=SESSIONS, plays_s=st.floats(0.0, 60.0), gap_s=st.floats(0.0, 9.0))
    def answer(self, session: int, plays_s: float, gap_s: float) -> None:
        self.estimator.waiting(session, self.now_s + plays_s, gap_s, self.now_s)

    @rule(session=SESSIONS, over=st.booleans())
    def ends(self, session: int, over: bool) -> None:
        self.left: list[int] = []
        if over:
            self.estimator.close(session, self.now_s)
        else:
            self.estimator.lost(session)
        # The policy lets them go group by group, deepest first; only that order is its own.
        order = [b for b in self.policy._recency if b in self.left]
        assert set(order) == {b for b in self.left if b in self.model.free}
        for block in order + [b for b in self.left if b not in order]:
            self.model.to_recency(block)

    @rule(
        session=SESSIONS,
        prefix_of=SESSIONS,
        keep=st.integers(0, 8),
        fresh=st.lists(st.integers(0, BLOCKS - 1), max_size=6, unique=True),
        by_known=st.booleans(),
    )
    def use(self, session: int, prefix_of: int, keep: int, fresh: list, by_known: bool) -> None:
        """A history: a prefix of somebody's last one, and blocks that nobody reads."""
        model = self.model
        if by_known and self.estimator.get(session) is None:
            self.estimator.needed(session, self.now_s)
        prefix = list(
            itertools.takewhile(model.users.__contains__, self.chains.get(prefix_of, [])[:keep])
        )
        prefix = [b for d, b in enumerate(prefix) if model.depth[b] == d]
        chain = prefix + [b for b in fresh if b not in model.users and b not in prefix]
        self.policy.use(session, chain, self.now_s)
        known = self.estimator.get(session) is not None
        before = {b for b, users in model.users.items() if session in users}
        for depth, block in enumerate(chain):
            if not known:
                if block in model.users:
                    model.to_recency(block)
                continue
            model.blank.discard(block)
            model.depth[block] = depth
            model.recency.pop(block, None)
            users = model.users.setdefault(block, set())
            users.add(session)
            if len(users) > 1:
                model.shared.add(block)
        if known:
            self.chains[session] = chain
            for block in before - set(chain):
                model.users[block].discard(session)
            gone = [b for b in before - set(chain) if not model.users[b] and b in model.shared]
            in_use = [b for b in gone if b not in model.free]
            order = [b for b in self.policy._recency if b in gone]
            for block in order + in_use:
                model.to_recency(block)
            assert len(order) + len(in_use) == len(gone)

    @rule(blocks=st.lists(st.integers(0, BLOCKS - 1), max_size=8, unique=True), blank=st.booleans())
    def free(self, blocks: list, blank: bool) -> None:
        model = self.model
        blocks = [b for b in blocks if b not in model.free]
        self.policy.free(blocks, self.now_s, blank=blank)
        for block in blocks:
            model.free.add(block)
            model.last_use_s[block] = self.now_s
            if blank:
                model.forget(block)
                model.blank.add(block)
            elif block not in model.users:
                model.recency[block] = None

    @rule(blocks=st.lists(st.integers(0, BLOCKS - 1), max_size=6, unique=True))
    def touch(self, blocks: list) -> None:
        model = self.model
        blocks = [b for b in blocks if b in model.free]
        self.policy.remove(blocks)
        for block in blocks:
            model.free.discard(block)
            model.blank.discard(block)
            model.recency.pop(block, None)

    @rule(blocks=st.lists(st.integers(0, BLOCKS - 1), max_size=3, unique=True))
    def void(self, blocks: list) -> None:
        self.policy.void(blocks)
        for block in blocks:
            self.model.forget(block)
            if block in self.model.free:
                self.model.recency.pop(block, None)
                self.model.blank.add(block)

    @rule(count=st.integers(1, 6))
    def evict(self, count: int) -> None:
        model = self.model
        self.left = []
        self.estimator.advance(self.now_s)  # what `evict` does first
        victims = self.policy.evict(count, self.now_s)
        assert len(victims) == min(count, len(model.free))
        for victim in victims:
            waits = {b: model.wait_s(b, self.now_s, self.estimator) for b in model.free}
            assert waits[victim] == max(waits.values())
            if victim in model.recency:
                assert victim == next(iter(model.recency))
            if model.users.get(victim):
                # No block that lies deeper is kept when all its readers read this one too.
                readers = model.users[victim]
                for block in model.free & model.users.keys():
                    if model.users[block] and model.users[block] <= readers:
                        assert model.depth[block] <= model.depth[victim]
            model.free.discard(victim)
            model.blank.discard(victim)
            model.recency.pop(victim, None)
            model.forget(victim)

    @precondition(lambda self: hasattr(self, "policy"))
    @invariant()
    def books_agree(self) -> None:
        policy, model = self.policy, self.model
        table = policy.table
        assert policy.fallbacks == 0
        assert len(policy) == len(model.free)
        assert {b for b in range(BLOCKS) if table.evictable[b]} == model.free
        assert list(policy._recency) == list(model.recency)
        assert set(policy._blank) == model.blank
        groups = {id(g): g for g in table.group if g is not None}
        for group in groups.values():
            mine = [b for b in range(BLOCKS) if table.group[b] is group]
            assert group.size == len(mine)
            assert group.live == sum(table.evictable[b] for b in mine)
        for block, users in model.users.items():
            group = table.group[block]
            assert group is not None
            names = {s for s, u in policy._index._users.items() if u in group.users}
            assert names == users


NextUseMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=50, deadline=None)
TestNextUse = NextUseMachine.TestCase


operations = st.lists(
    st.tuples(
        st.sampled_from(["use", "free", "touch", "evict"]),
        st.lists(st.integers(0, 15), min_size=1, max_size=6, unique=True),
        st.floats(0.0, 5.0),
    ),
    max_size=60,
)


def drive(policy: EvictionPolicy, steps, now_s: float = 0.0) -> list[list[int]]:
    """Every eviction of ``policy`` under ``steps``, then all that is left."""
    evictions = []
    for what, blocks, passed_s in steps:
        now_s += passed_s
        evictable = policy.table.evictable
        if what == "use":
            policy.use(blocks[0] % 3, blocks, now_s)
        elif what == "free":
            policy.free([b for b in blocks if not evictable[b]], now_s)
        elif what == "touch":
            policy.remove([b for b in blocks if evictable[b]])
        else:
            evictions.append(policy.evict(len(blocks), now_s))
    evictions.append(policy.evict(99, now_s))
    assert len(policy) == 0
    return evictions


@given(operations)
def test_without_signals_next_use_is_lru(steps):
    assert drive(NextUsePolicy(16, NextUse()), steps) == drive(Lru(16), steps)


@given(operations)
def test_log_only_decides_as_lru_and_sees_no_difference_without_signals(steps):
    policy = LogOnly(16, NextUse())
    assert drive(policy, steps) == drive(Lru(16), steps)
    assert policy.disagreed == 0
    assert len(policy.shadow) == 0


@pytest.mark.parametrize("name", ["best", "take", "add", "discard", "use", "key", "drop"])
@given(steps=operations, fail_at=st.integers(1, 6))
@settings(max_examples=30)
def test_a_failing_index_changes_order_only(name, steps, fail_at):
    estimator = NextUse()
    policy = NextUsePolicy(16, estimator)
    for session in range(3):
        estimator.waiting(session, 10.0 * session, 2.0, now_s=0.0)
    calls, works = itertools.count(1), getattr(policy._index, name)

    def fails(*args):
        if next(calls) >= fail_at:
            raise ZeroDivisionError("sabotage")
        return works(*args)

    setattr(policy._index, name, fails)
    freed: list[int] = []
    free = policy.free
    policy.free = lambda blocks, now_s, blank=False: (freed.extend(blocks), free(blocks, now_s))[1]
    touched = policy.remove
    removed: list[int] = []
    policy.remove = lambda blocks: (removed.extend(blocks), touched(blocks))[1]
    evicted = list(itertools.chain(*drive(policy, steps)))
    assert sorted(evicted + removed) == sorted(freed)  # each came out once, none was lost
    assert policy.fallbacks == (next(calls) > fail_at)


def test_after_a_failure_the_order_is_lru_and_one_line_says_so(caplog):
    estimator = NextUse()
    policy = NextUsePolicy(8, estimator)
    for session in range(4):
        estimator.waiting(session, 100.0 - session, 1.0, now_s=0.0)
        policy.use(session, [2 * session, 2 * session + 1], 0.0)
    for session in (2, 0, 3, 1):
        policy.free([2 * session + 1, 2 * session], now_s=float(session))
    policy._index.take = None
    with caplog.at_level(logging.WARNING, logger="vllm.liveserve"):
        assert policy.evict(3, 5.0) == [5, 4, 1]
        assert policy.evict(9, 5.0) == [0, 7, 6, 3, 2]
    assert len(caplog.records) == 1
    policy.reset()
    assert policy.fallbacks == 1
    policy.use(0, [0, 1], 6.0)
    policy.use(1, [2, 3], 6.0)
    policy.free([3, 2, 1, 0], 6.0)
    assert policy.evict(2, 7.0) == [1, 0]  # session 0 is needed last: the index is back


def test_stale_signals_make_it_lru_until_sessions_are_used_again():
    estimator = NextUse()
    policy = NextUsePolicy(8, estimator)
    for session in range(3):
        estimator.waiting(session, 100.0 - session, 1.0, now_s=0.0)
        policy.use(session, [2 * session, 2 * session + 1], 0.0)
    policy.free([5, 4, 1, 0, 3, 2], 1.0)
    policy.fail_closed()
    assert policy.evict(3, 2.0) == [5, 4, 1]
    policy.remove([3, 2])
    policy.use(1, [2, 3], 3.0)
    policy.free([3, 2], 3.0)
    assert policy.evict(9, 4.0) == [3, 2, 0]  # known again, and expected in 97 s; 0 lay for 3 s


def test_after_a_barge_in_the_unheard_suffix_goes_first():
    estimator = NextUse()
    policy = NextUsePolicy(16, estimator)
    estimator.needed("a", 0.0)
    policy.use("a", [0, 1, 2, 3, 4], 0.0)
    estimator.waiting("b", 500.0, 2.0, now_s=0.0)
    policy.use("b", [8, 9], 0.0)
    policy.free([9, 8, 4, 3, 2, 1, 0], 1.0)
    estimator.needed("a", 5.0)
    policy.use("a", [0, 1, 2, 5], 5.0)  # 3 and 4 were never heard
    assert policy.evict(3, 6.0) == [4, 3, 9]
    policy.void([8])
    policy.free([5], 6.0)
    assert policy.evict(9, 7.0) == [8, 5, 2, 1, 0]


def test_a_shared_prefix_is_kept_for_its_earliest_reader():
    estimator = NextUse()
    policy = NextUsePolicy(16, estimator)
    for session, ends_s in (("far", 300.0), ("near", 20.0), ("middle", 100.0)):
        estimator.waiting(session, ends_s, 1.0, now_s=0.0)
    policy.use("far", [0, 1, 2, 3], 0.0)
    policy.use("near", [0, 1, 4, 5], 0.0)
    policy.use("middle", [0, 6], 0.0)
    policy.free([3, 2, 5, 4, 6, 1, 0], 1.0)
    assert policy.evict(3, 2.0) == [3, 2, 6]
    estimator.close("near", 3.0)  # its own go; 1 is read by "far" alone now, 0 by two
    assert policy.evict(4, 4.0) == [5, 4, 1, 0]


def test_a_shared_prefix_follows_its_readers_when_they_move():
    estimator = NextUse()
    policy = NextUsePolicy(8, estimator)
    for session, ends_s in (("a", 10.0), ("b", 60.0), ("c", 40.0)):
        estimator.waiting(session, ends_s, 1.0, now_s=0.0)
    policy.use("a", [0, 1], 0.0)
    policy.use("b", [0, 2], 0.0)
    policy.use("c", [3], 0.0)
    policy.free([0, 1, 2, 3], 0.0)
    estimator.needed("a", 11.0)
    estimator.waiting("a", 90.0, 1.0, now_s=12.0)  # now "b" reads the prefix first
    estimator.waiting("b", 80.0, 1.0, now_s=12.0)
    assert policy.evict(4, 13.0) == [1, 2, 0, 3]


def test_nested_prefixes_with_one_earliest_reader_go_deepest_first():
    for order in itertools.permutations((("a", [0, 1, 2]), ("b", [0, 1]), ("c", [0]))):
        estimator = NextUse()
        policy = NextUsePolicy(4, estimator)
        for session, ends_s in (("a", 10.0), ("b", 50.0), ("c", 90.0)):
            estimator.waiting(session, ends_s, 1.0, now_s=0.0)
        for session, chain in order:
            policy.use(session, chain, 0.0)
        policy.free([0, 1, 2], 0.0)
        assert policy.evict(3, 1.0) == [2, 1, 0]


def test_a_history_that_was_lost_and_read_again_is_its_sessions_own():
    """Found by the machine above: its end made it one that others may still ask for."""
    machine = NextUseMachine()
    machine.start()
    for over in (False, True):
        machine.use(session=0, prefix_of=0, keep=0, fresh=[0], by_known=True)
        machine.ends(session=0, over=over)
        machine.books_agree()
    machine.free(blocks=[0], blank=False)
    machine.books_agree()
    assert not machine.policy._recency


def test_a_prefix_that_was_shared_outlives_its_readers_as_recency_has_it():
    estimator = NextUse()
    policy = NextUsePolicy(16, estimator)
    estimator.waiting("c", 400.0, 1.0, now_s=0.0)
    policy.use("c", [8], 0.0)
    for session in ("a", "b"):
        estimator.waiting(session, 10.0, 1.0, now_s=0.0)
        policy.use(session, [0, 1 + (session == "b")], 0.0)
    policy.free([8, 1, 2, 0], 0.0)
    estimator.close("a", 5.0)
    estimator.close("b", 6.0)
    assert policy.evict(2, 7.0) == [1, 2]
    assert policy.evict(2, 7.0) == [8, 0]


def test_what_is_left_of_a_shared_prefix_stays_shared_in_part():
    estimator = NextUse()
    policy = NextUsePolicy(8, estimator)
    for session in ("a", "b"):
        estimator.waiting(session, 10.0, 1.0, now_s=0.0)
        policy.use(session, [0, 1], 0.0)
    policy.free([1, 0], 0.0)
    estimator.close("b", 1.0)
    policy.use("a", [0], 2.0)
    estimator.close("a", 3.0)
    assert policy.evict(2, 4.0) == [1, 0]
    assert policy.by_reason["recency"] == 2  # neither is an orphan: others may ask for them


def test_a_block_that_is_touched_often_leaves_no_trail():
    estimator = NextUse()
    policy = NextUsePolicy(4, estimator)
    estimator.waiting("a", 10.0, 1.0, now_s=0.0)
    policy.use("a", [0, 1, 2], 0.0)
    policy.free([2, 1, 0], 0.0)
    for n in range(1000):
        policy.remove([1])
        policy.free([1], float(n))
    assert len(policy.table.group[1].stack) < 80
    assert policy.evict(3, 2000.0) == [2, 1, 0]


def test_log_only_counts_where_next_use_would_differ():
    estimator = NextUse()
    policy = LogOnly(8, estimator)
    estimator.waiting("soon", 10.0, 1.0, now_s=0.0)
    estimator.waiting("late", 90.0, 1.0, now_s=0.0)
    policy.use("soon", [0, 1], 0.0)
    policy.use("late", [2, 3], 0.0)
    policy.free([1, 0, 3, 2], 0.0)
    assert policy.evict(2, 1.0) == [1, 0]
    assert (policy.considered, policy.disagreed) == (2, 2)
    assert policy.evict(2, 1.0) == [3, 2]
    assert (policy.considered, policy.disagreed) == (4, 2)


def test_sessions_come_and_go_in_bounded_memory():
    estimator = NextUse(max_sessions=8)
    policy = NextUsePolicy(32, estimator)
    draw = random.Random(3)
    for n in range(4000):
        policy.remove([b for b in range(32) if policy.table.evictable[b] and b // 4 == n % 8])
        estimator.needed(n, float(n))
        policy.use(n, [0, 1, 2, *range(4 * (n % 8) + 1, 4 * (n % 8) + 4)][n % 2 :], float(n))
        policy.free([b for b in range(32) if not policy.table.evictable[b]], float(n))
        for _ in range(3):
            estimator.waiting(n, n + draw.random(), 1.0, float(n))
        policy.evict(2, n + 0.5)
    assert policy.fallbacks == 0
    index = policy._index
    assert len(index._users) <= 8
    assert sum(map(len, index._lanes)) < (LANES + 2) * 64 + 2 * 32
    groups = {id(g): g for g in policy.table.group if g is not None}.values()
    assert all(len(g.stack) <= 2 * g.live + 65 for g in groups)
    assert all(len(g.readers) <= 4 * len(g.users) + 17 for g in groups)


def test_t_lru_gives_up_what_is_quick_to_recompute():
    policy = TailLru(16, safe_blocks=2)
    policy.use("long", [0, 1, 2, 3, 4], 0.0)
    policy.free([4, 3, 2, 1, 0], 0.0)
    policy.use("short", [8, 9], 1.0)
    policy.free([9, 8], 1.0)
    assert policy.evict(5, 2.0) == [4, 3, 9, 8, 2]
    policy.use("long", [0, 1], 3.0)  # what is left of it is safe now
    assert len(policy) == 2
    assert policy.evict(9, 4.0) == [1, 0]


@pytest.mark.parametrize("name", POLICIES)
def test_miscounting_callers_are_told(name):
    policy = make_policy(name, 4, NextUse())
    policy.free([1], 0.0)
    with pytest.raises(ValueError, match="block 1 is freed twice"):
        policy.free([1], 0.0)
    with pytest.raises(ValueError, match="block 4"):
        policy.free([4], 0.0)
    with pytest.raises(ValueError, match="block 2 is not evictable"):
        policy.remove([2])
    assert policy.evict(3, 1.0) == [1]


def test_wrong_names_and_sizes_are_told():
    with pytest.raises(ValueError, match="'mru' is not one of lru"):
        make_policy("mru", 4, NextUse())
    for size in (0, -1, 1.5, True):
        with pytest.raises(ValueError, match="num_blocks"):
            make_policy("lru", size, NextUse())


# ---- policies for replays ------------------------------------------------------------------


def hits(policy: EvictionPolicy, requests: list[list[int]], capacity: int) -> int:
    """Block hits of ``requests`` (chains) on a pool of ``capacity``; ids are contents."""
    resident: set[int] = set()
    count = 0
    for now_s, blocks in enumerate(requests):
        policy.use(0, blocks, float(now_s))
        present = [b for b in blocks if b in resident]
        count += len(list(itertools.takewhile(resident.__contains__, blocks)))  # a prefix
        policy.remove(present)
        excess = len(resident | set(blocks)) - capacity
        if excess > 0:
            resident -= set(policy.evict(excess, float(now_s)))
        resident |= set(blocks)
        assert len(resident) <= capacity
        policy.free(reversed(blocks), float(now_s))
    return count


def best_possible(requests: list[list[int]], capacity: int) -> int:
    """By trying everything."""
    reachable = {frozenset(): 0}
    for blocks in requests:
        after: dict[frozenset[int], int] = {}
        for resident, count in reachable.items():
            count += len(resident & set(blocks))
            others = resident - set(blocks)
            room = capacity - len(blocks)
            for kept in itertools.combinations(sorted(others), min(room, len(others))):
                state = frozenset(kept) | set(blocks)
                after[state] = max(after.get(state, 0), count)
        reachable = after
    return max(reachable.values())


chains = st.lists(
    st.sampled_from([[0, 1, 2], [0, 1, 3], [0, 4], [5, 6], [5, 7], [8], [0, 1]]), max_size=8
)


@given(chains)
@settings(max_examples=60)
def test_no_policy_beats_the_optimum(requests):
    best = best_possible(requests, 4)
    assert hits(Optimal(9, requests), requests, 4) == best
    for policy in (Lru(9), TailLru(9, 1), Arc(9, 4), Ttl(9, float)):
        assert hits(policy, requests, 4) <= best


def test_arc_keeps_what_is_used_often_through_a_scan():
    requests = [[0], [1], [0], [1], *([n] for n in range(2, 10)), [0], [1]]
    assert hits(Arc(16, 4), requests, 4) == 4
    assert hits(Lru(16), requests, 4) == 2


def test_arc_learns_from_its_ghosts_that_recent_blocks_need_room():
    policy = Arc(64, 4)
    requests = [[0], [1], [0], [1]]
    for n in range(2, 40, 3):
        requests += [[n], [n + 1], [n + 2], [n], [n + 1], [n + 2]]
    assert hits(policy, requests, 4) > 2 + 2 * 13


def test_ttl_keeps_costly_histories_for_longer():
    policy = Ttl(16, lambda blocks: 10.0 * blocks)
    policy.use("long", [0, 1, 2], 0.0)
    policy.free([2, 1, 0], 0.0)
    policy.use("short", [8], 5.0)
    policy.free([8], 5.0)
    assert policy.evict(2, 6.0) == [8, 2]
    policy.remove([0])
    policy.free([0], 50.0)
    assert policy.evict(3, 60.0) == [1, 0]
