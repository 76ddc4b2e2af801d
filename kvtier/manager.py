"""The scheduler's half of the KV tier: what is copied between GPU and DRAM, and who waits for it.

Everything goes through the GPU's prefix cache. A load copies into blocks taken from the GPU's pool,
and when it is done each block is published under its hash: the request that waited for it, and
everybody else with the same prefix, then gets an ordinary hit. So a prefix that many ask for is
loaded once, and a load that fails leaves nothing but a prefix to compute. A store holds blocks that
the GPU has under their hashes until they are copied.

What is on the GPU is asked when it matters, not followed: the pool is the host's, and changes
without telling.

The manager holds references to GPU blocks: of loads and stores under way, and of loaded prefixes
until the request that waited has its allocation, for one scheduling round at most. Waiting longer
could stop two requests that each hold what the other needs.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from liveserve.kvtier.jobs import Ended, Job, Orders
from liveserve.kvtier.policies import EvictionPolicy
from liveserve.kvtier.report import Latencies, Regret, TierReport
from liveserve.kvtier.slots import SlotAllocator
from liveserve.kvtier.tier import Hash, Outcome, State, Ticket, Tier
from liveserve.kvtier.transfer_base import Kind

# Loads that one request waits for before it recomputes what is missing.
_MAX_LOADS = 3
# Sessions that are counted in a report.
_MAX_SESSIONS = 512
# A look ahead that found nothing to store is not repeated for so long: it walks over the pool.
_LOOK_AGAIN_S = 0.05
# Keys of sessions' histories that are remembered, per slot: shared prefixes count for each session.
_REMEMBERED = 4

Key = TypeVar("Key", bound=Hashable, contravariant=True)


class GpuBlocks(Protocol[Hash]):
    """The GPU's block pool. A block is free while nobody refers to it, cached content or not."""

    def find(self, key: Hash) -> int | None:
        """A block that can be found by ``key``."""
        ...

    def holds(self, key: Hash, block: int) -> bool:
        """Whether ``block`` can be found by ``key``."""
        ...

    def is_free(self, block: int) -> bool: ...

    def spare(self) -> int:
        """Free blocks that a load may take, or hold, now: those that nobody else counts on."""
        ...

    def take(self, count: int) -> list[int]:
        """``count`` free blocks, without content and referred to once."""
        ...

    def hold(self, blocks: Sequence[int]) -> None:
        """Refer to ``blocks`` once more each."""
        ...

    def release(self, blocks: Sequence[int], *, soonest: bool = False) -> None:
        """End a reference to each; the first one is evicted first. ``soonest``: and before others,
        where the order of releases decides."""
        ...

    def publish(self, key: Hash, block: int, depth: int) -> None:
        """Let ``block`` be found by ``key``, the ``depth``-th of its sequence, from 0 on."""
        ...

    def upcoming(self, limit: int) -> list[tuple[Hash, int, int]]:
        """Key, block and depth of at most ``limit`` blocks that would lose their content next."""
        ...


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of one tier.

    Attributes:
        min_load_blocks: fewer blocks are recomputed instead.
        load_timeout_s: a request waits for its blocks at most so long.
        store_blocks: blocks of stores under way at once.
        held_blocks: blocks that stores may keep from being evicted.
        ahead_blocks: how far to look for blocks that are evicted next, when stores are idle; 0:
            never.
        regret_s: a block that is asked for within so long of its eviction should have stayed.
    """

    min_load_blocks: int = 1
    load_timeout_s: float = 10.0
    store_blocks: int = 256
    held_blocks: int = 1024
    ahead_blocks: int = 0
    regret_s: float = 60.0


@dataclass(eq=False, slots=True)
class Load(Generic[Hash]):
    """Blocks on their way to the GPU, or there and held for who waited.

    Attributes:
        waiters: requests that wait for it or, once it has ended, have yet to be admitted.
        ended: nothing moves any more.
    """

    number: int
    kind: Kind
    session: Hashable
    tickets: list[Ticket[Hash]]
    waiters: set[str] = field(default_factory=set)
    landed: list[int] = field(default_factory=list)
    cancelled: bool = False
    ended: bool = False


@dataclass(eq=False, slots=True)
class _Wait(Generic[Hash]):
    """A request that waits for loads, or whose loads have ended and that is not admitted yet."""

    since_s: float
    loads: set[Load[Hash]] = field(default_factory=set)
    kept: list[int] = field(default_factory=list)  # held: its prefix that was on the GPU before
    tries: int = 0
    failed: bool = False
    asked: bool = False  # since its loads ended
    rounds: int = 0  # likewise, rounds that were planned

    @property
    def waits(self) -> bool:
        return any(not load.ended for load in self.loads)


@dataclass(eq=False, slots=True)
class _Turn(Generic[Hash]):
    """Blocks to store, prefix first. Held from the beginning to the end, and released together, so
    that the host goes on to evict the suffix first.
    """

    session: Hashable
    keys: Sequence[Hash]
    todo: deque[tuple[Hash, int, int]]  # key, block, depth
    held: list[int]
    jobs: int = 0
    ahead: bool = False  # of its eviction, which is due soon


@dataclass(eq=False, slots=True)
class _Store(Generic[Hash]):
    number: int
    tickets: list[Ticket[Hash]]
    depths: dict[Hash, int]
    turn: _Turn[Hash]


@dataclass(slots=True)
class Totals:
    """Beside the tier's own, since the start; in blocks where nothing else is said.

    Attributes:
        hits: of requests, found in DRAM.
        preloaded: loaded without a request.
        waits, joined: requests that waited; those for whom others' loads sufficed.
        timeouts: requests that waited too long.
        no_room: loads (requests) for which the GPU had no room.
        store_missed: left the GPU, or were taken back, before they were stored.
    """

    hits: int = 0
    preloaded: int = 0
    waits: int = 0
    joined: int = 0
    timeouts: int = 0
    no_room: int = 0
    store_missed: int = 0


class KvManager(Generic[Hash]):
    """See the module. One thread owns it; times on one monotonic clock.

    Call `lookup` when a request is about to be scheduled, `admitted` when it has its blocks, `gone`
    when it is over, `store` for what a turn leaves; `plan` at the end of each scheduling round, and
    `ended` with what the worker reports.

    Args:
        num_slots: slots of every worker's pool.
        policy: who leaves DRAM first; made for at least as many blocks.
        gpu: the GPU's block pool.
        block_bytes: bytes of a block in DRAM, for reports.

    Attributes:
        loads_on, stores_on: whether new ones begin.
        policy_on: False: the policy learns nothing more of who uses what.
        broken: something here failed; nothing new begins, whatever else is set.
        on_loaded: told of every load that ended, and how many of its blocks are on the GPU.
        errors: how often.
        on_change: told of each block that is in DRAM now (True), or no longer (False).
    """

    def __init__(
        self,
        num_slots: int,
        policy: EvictionPolicy,
        gpu: GpuBlocks[Hash],
        limits: Limits | None = None,
        block_bytes: int = 0,
    ) -> None:
        self.limits = limits or Limits()
        self.tier: Tier[Hash] = Tier(SlotAllocator(num_slots), policy, self._on_dropped)
        self.totals = Totals()
        self.loads_on = self.stores_on = self.policy_on = True
        self.broken = False
        self.errors = 0
        self.on_loaded: Callable[[Load[Hash], int, float], None] = lambda *_: None
        self.on_change: Callable[[Hash, bool], None] = lambda *_: None
        self._gpu = gpu
        self._num_slots = num_slots
        self._block_bytes = block_bytes
        self._numbers = 0
        self._loads: dict[int, Load[Hash]] = {}
        self._loading: dict[Hash, Load[Hash]] = {}
        self._stores: dict[int, _Store[Hash]] = {}
        self._turns: deque[_Turn[Hash]] = deque()
        self._waits: dict[str, _Wait[Hash]] = {}
        self._held: Counter[int] = Counter()
        self._for_stores = 0  # references among those
        self._storing = 0
        self._look_at_s = -math.inf
        self._begin: list[Job] = []
        self._cancel: list[int] = []
        self._promote: list[int] = []
        self._void: set[Hash] = set()
        # Of what is in DRAM: its place in its sequence.
        self._depth: dict[Hash, int] = {}
        # What sessions used last; their histories, from the start.
        self._histories: OrderedDict[Hashable, Sequence[Hash]] = OrderedDict()
        self._remembered = 0
        self._preloaded: OrderedDict[Hash, None] = OrderedDict()
        self._evicting = False
        self._evicted: list[Hash] = []
        self._regret = Regret(self.limits.regret_s, max(1, num_slots))
        self._reload_ms = Latencies()
        self._owner: dict[Hash, Hashable] = {}
        self._by_session: OrderedDict[Hashable, int] = OrderedDict()

    # ---- loads -----------------------------------------------------------------------------

    def lookup(
        self, request_id: str, session: Hashable, keys: Sequence[Hash], have: int, now_s: float
    ) -> bool:
        """A request with the full blocks ``keys`` is about to be scheduled; the GPU has the first
        ``have``. Returns whether it should wait and be asked for again: more is on its way.
        """
        wait = self._waits.get(request_id)
        if wait is None:
            self._count_preloaded(keys[:have])
        elif wait.waits:
            if now_s - wait.since_s <= self.limits.load_timeout_s:
                return True
            self.totals.timeouts += 1
            wait.failed = True
            self._leave(request_id, wait)
        if wait is not None:
            wait.asked = True
            if wait.failed or wait.tries >= _MAX_LOADS:
                return False
        if not self.loads_on or self.broken:
            return False
        missing, joined, kept = self._missing(keys, have)
        self._count_regret(keys, have + len(missing) + sum(joined.values()) + len(kept), now_s)
        if not missing and not joined:
            return False
        return self._wait_for(request_id, session, keys[:have], missing, joined, kept, now_s)

    def admitted(self, request_id: str) -> None:
        """The request has its blocks."""
        self.gone(request_id)

    def waits(self, request_id: str) -> bool:
        """Whether a load keeps the request."""
        wait = self._waits.get(request_id)
        return wait is not None and wait.waits

    def gone(self, request_id: str) -> None:
        """The request is over, or waits no more. What nobody else waits for is cancelled."""
        wait = self._waits.pop(request_id, None)
        if wait is not None:
            self._leave(request_id, wait)

    def preload(self, keys: Sequence[Hash], session: Hashable) -> Load[Hash] | None:
        """Begin to load what of ``keys``, prefix first, is in DRAM alone: see `offloaded`.

        Takes no more than the GPU has to spare.

        Returns:
            the load, for `cancel` and `promote`; None: there is nothing to do or no room.
        """
        if not self.loads_on or self.broken:
            return None
        missing = self.offloaded(session, keys)[: self._gpu.spare()]
        return self._load(Kind.PRELOAD, session, missing) if missing else None

    def offloaded(self, session: Hashable, keys: Sequence[Hash] | None = None) -> list[Hash]:
        """What a load would bring back of ``keys``, prefix first: in DRAM, not on the GPU and not
        on its way there. Ends at a block that is nowhere.

        Args:
            keys: None: what ``session`` used last.
        """
        keys = self.history(session) if keys is None else keys
        return self._missing(keys, 0)[0]

    def history(self, session: Hashable) -> Sequence[Hash]:
        """What ``session`` used last, from the start."""
        return self._histories.get(session, ())

    def cancel(self, load: Load[Hash]) -> bool:
        """Stop a preload. Returns whether: not if it has ended or a request waits for it."""
        if load.ended or load.waiters:
            return False
        if not load.cancelled:
            load.cancelled = True
            self._cancel.append(load.number)
        return True

    def promote(self, load: Load[Hash]) -> None:
        """Make a preload as urgent as a load that a request waits for."""
        if load.kind is Kind.PRELOAD and not load.ended:
            load.kind = Kind.ON_PATH
            self._promote.append(load.number)

    # ---- stores ----------------------------------------------------------------------------

    def store(
        self,
        session: Hashable,
        keys: Sequence[Hash],
        blocks: Sequence[int],
        now_s: float,
        *,
        hold: bool = True,
    ) -> None:
        """``session``'s history is ``keys``, on the GPU's ``blocks``: copy to DRAM what it lacks.

        Args:
            hold: keep the blocks until they are copied. False: only from the next `plan` on, and
                only those that can still be found by their keys then.
        """
        self._refresh(session, keys, now_s)
        if not self.stores_on or self.broken:
            return
        # What is under way is not in DRAM yet, and not to be stored again: the tier passes it over.
        todo = [
            (key, block, depth)
            for depth, (key, block) in enumerate(zip(keys, blocks, strict=False))
            if self._is_absent(key)
        ]
        room = max(0, self.limits.held_blocks - self._for_stores)
        self.totals.store_missed += max(0, len(todo) - room)
        todo = todo[:room]
        if not todo:
            return
        held = [block for _, block, _ in todo] if hold else []
        turn = _Turn(session, keys, deque(todo), held)
        self._hold_for_store(turn.held)
        self._turns.append(turn)

    def void(self, keys: Iterable[Hash]) -> None:
        """Nobody will read ``keys`` again."""
        keys = list(keys)
        self.tier.void(keys)
        self._void.update(key for key in keys if not self.tier.has(key))
        if len(self._void) > 2 * self._num_slots:
            self._void.clear()

    # ---- rounds ----------------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        """Whether a worker has, or is about to have, something to do or to report."""
        return not self.broken and bool(
            self._stores
            or self._turns
            or self._begin
            or self._cancel
            or any(not load.ended for load in self._loads.values())
        )

    def plan(self, now_s: float) -> Orders:
        """The scheduling round is over. Returns what the worker is to do."""
        for request_id, wait in list(self._waits.items()):
            if not wait.waits:
                wait.rounds += 1
                if wait.asked or wait.rounds > 1:
                    self._leave(request_id, wait)
        self._plan_stores(now_s)
        orders = Orders(tuple(self._begin), tuple(self._cancel), tuple(self._promote))
        self._begin, self._cancel, self._promote = [], [], []
        return orders

    def ended(self, outcomes: Iterable[Ended], now_s: float) -> None:
        """Jobs that are over."""
        for outcome in outcomes:
            load = self._loads.get(outcome.number)
            if load is not None and not load.ended:
                self._load_ended(load, outcome, now_s)
            elif outcome.number in self._stores:
                self._store_ended(self._stores.pop(outcome.number), outcome, now_s)

    def reset(self, now_s: float) -> None:
        """Nothing computed so far is valid any more: DRAM is empty after this. Copies under way go
        on, and what they bring is dropped.
        """
        self._drop_turns(now_s)
        for wait in self._waits.values():
            wait.failed = True
        self._loading.clear()
        self._void.clear()
        self._preloaded.clear()
        self._regret.clear()
        self.tier.reset(now_s)

    # ---- what there is to see --------------------------------------------------------------

    @property
    def held(self) -> dict[int, int]:
        """References that the manager has, by GPU block."""
        return dict(self._held)

    @property
    def loading(self) -> int:
        """Blocks that loads under way bring."""
        return sum(len(load.tickets) for load in self._loads.values() if not load.ended)

    def sessions(self) -> dict[str, int]:
        """Blocks in DRAM by session, of the newest sessions."""
        return {str(session): count for session, count in self._by_session.items() if count}

    def report(self) -> TierReport:
        totals, policy = self.tier.totals, self.tier.policy
        reasons = getattr(policy, "by_reason", None)
        waits = self._reload_ms
        return TierReport(
            policy=policy.name,
            slots=self._num_slots,
            used=self.tier.in_dram,
            block_bytes=self._block_bytes,
            hits=self.totals.hits,
            preloaded=self.totals.preloaded,
            stored=totals.stored,
            store_failed=totals.store_failed,
            refused=totals.refused,
            loaded=totals.loaded,
            load_failed=totals.load_failed,
            corrupt=totals.corrupt,
            evicted=dict(reasons) if reasons is not None else {policy.name: totals.evicted},
            regret=self._regret.count,
            regret_s=self._regret.window_s,
            loading=self.loading,
            storing=self._storing,
            reloads=waits.count,
            reload_p50_ms=waits.percentile_ms(0.5),
            reload_p90_ms=waits.percentile_ms(0.9),
            reload_max_ms=waits.percentile_ms(1.0),
            errors=self.errors,
        )

    def check(self) -> None:
        """Compare the books with each other. For tests, and for a debug endpoint.

        Raises:
            AssertionError: a slot or a reference to a GPU block is leaked.
        """
        self.tier.check()
        held: Counter[int] = Counter()
        flying = 0
        for load in self._loads.values():
            assert not load.ended or load.waiters, "a load is kept for nobody"
            blocks = load.landed if load.ended else [t.gpu_block for t in load.tickets]
            held.update(blocks)
            flying += 0 if load.ended else len(load.tickets)
            assert all(name in self._waits for name in load.waiters), "a waiter is unknown"
        for request_id, wait in self._waits.items():
            held.update(wait.kept)
            assert all(request_id in load.waiters for load in wait.loads), "a wait is one-sided"
        turns = {id(turn): turn for turn in self._turns}
        turns |= {id(store.turn): store.turn for store in self._stores.values()}
        for turn in turns.values():
            held.update(turn.held)
        assert held == self._held, f"held blocks are miscounted: {held} is not {self._held}"
        assert self._for_stores == sum(len(turn.held) for turn in turns.values())
        storing = sum(len(store.tickets) for store in self._stores.values())
        assert storing == self._storing, "stores under way are miscounted"
        assert flying + storing == self.tier.in_flight, "a copy under way belongs to nobody"
        known = self.tier.in_dram + self.tier.in_flight
        assert len(self.tier) <= known, "the tier remembers what is on the GPU alone"

    # ---- inside: loads ---------------------------------------------------------------------

    def _missing(
        self, keys: Sequence[Hash], have: int
    ) -> tuple[list[Hash], dict[Load[Hash], int], list[int]]:
        """What of ``keys[have:]`` could be had without computing it, without a gap.

        Returns:
            keys in DRAM alone; loads under way, with how many blocks they bring;
            blocks behind them that the GPU has.
        """
        missing: list[Hash] = []
        joined: dict[Load[Hash], int] = {}
        kept: list[int] = []
        behind: list[int] = []  # of use only if something before it has to come
        for key in itertools.islice(keys, have, None):
            found = self._gpu.find(key)
            load = self._loading.get(key)
            if found is not None:
                behind.append(found)
                continue
            if load is not None and not load.cancelled:
                joined[load] = joined.get(load, 0) + 1
            elif self.tier.has(key):
                self._forget_lost(key)
                if self.tier.state(key) is not State.DRAM:
                    break  # a load of it is being cancelled
                missing.append(key)
            else:
                break
            kept += behind
            behind = []
        return missing, joined, kept

    def _wait_for(
        self,
        request_id: str,
        session: Hashable,
        prefix: Sequence[Hash],
        missing: list[Hash],
        joined: dict[Load[Hash], int],
        kept: list[int],
        now_s: float,
    ) -> bool:
        """Let a request wait, if it is worth it and there is room."""
        coming = len(missing) + sum(joined.values())
        if coming < self.limits.min_load_blocks:
            return False
        gpu = self._gpu
        # What the request has already must still be there when the rest has come.
        found = [gpu.find(key) for key in prefix]
        kept = [block for block in found if block is not None] + kept
        wait = self._waits.get(request_id)
        old = wait.kept if wait is not None else []
        taken = len(missing) + sum(map(gpu.is_free, kept))
        if taken > gpu.spare():
            self.totals.no_room += 1
            return False
        if wait is None:
            wait = self._waits[request_id] = _Wait(now_s)
        self._hold(kept)
        self._release(old)
        wait.kept = kept
        loads = set(joined)
        if missing:
            loads.add(self._load(Kind.ON_PATH, session, missing))
        for load in loads:
            load.waiters.add(request_id)
            self.promote(load)
        wait.loads |= loads
        wait.since_s = now_s
        wait.tries += 1
        wait.asked, wait.rounds = False, 0
        self.totals.waits += 1
        self.totals.joined += not missing
        self.totals.hits += coming
        return True

    def _load(self, kind: Kind, session: Hashable, keys: Sequence[Hash]) -> Load[Hash]:
        blocks = self._gpu.take(len(keys))
        self._held.update(blocks)
        tickets = [self.tier.load(key, block) for key, block in zip(keys, blocks, strict=True)]
        load = Load(self._next_number(), kind, session, tickets)
        self._loads[load.number] = load
        self._loading.update(dict.fromkeys(keys, load))
        self._begin.append(_job(load.number, kind, tickets))
        return load

    def _load_ended(self, load: Load[Hash], outcome: Ended, now_s: float) -> None:
        load.ended = True
        dropped = []
        for ticket in load.tickets:
            if ticket.slot in outcome.corrupt:
                result = Outcome.CORRUPT
            else:
                result = Outcome.DONE if outcome.ok else Outcome.FAILED
            if self._loading.get(ticket.key) is load:
                del self._loading[ticket.key]
            if self.tier.finish(ticket, result, now_s):
                self._gpu.publish(ticket.key, ticket.gpu_block, self._depth[ticket.key])
                load.landed.append(ticket.gpu_block)
                if not load.waiters:
                    self._preloaded[ticket.key] = None
                    self.totals.preloaded += 1
            else:
                dropped.append(ticket.gpu_block)
                self._forget_gpu_only(ticket.key)
        while len(self._preloaded) > self._num_slots:
            self._preloaded.popitem(last=False)
        self._release(dropped)
        for name in load.waiters:
            wait = self._waits[name]
            wait.failed = wait.failed or bool(dropped)
            if not wait.waits:
                self._reload_ms.add(1e3 * (now_s - wait.since_s))
        if not load.waiters:
            self._drop_load(load)
        self.on_loaded(load, len(load.landed), now_s)

    def _leave(self, request_id: str, wait: _Wait[Hash]) -> None:
        """Let go of all that ``wait`` holds."""
        for load in wait.loads:
            load.waiters.discard(request_id)
            if load.waiters:
                continue
            if load.ended:
                self._drop_load(load)
            else:
                self.cancel(load)
        wait.loads.clear()
        self._release(wait.kept[::-1])
        wait.kept = []

    def _drop_load(self, load: Load[Hash]) -> None:
        self._loads.pop(load.number, None)
        self._release(load.landed[::-1])

    # ---- inside: stores --------------------------------------------------------------------

    def _plan_stores(self, now_s: float) -> None:
        if not self.stores_on or self.broken:
            self._drop_turns(now_s)
        elif (
            self.limits.ahead_blocks
            and not self._turns
            and not self._stores
            and now_s >= self._look_at_s
        ):
            upcoming = self._gpu.upcoming(self.limits.ahead_blocks)
            todo = [entry for entry in upcoming if self._is_absent(entry[0])]
            todo = todo[: self.limits.held_blocks]
            if todo:
                held = [block for _, block, _ in todo]
                turn = _Turn(None, (), deque(todo), held, ahead=True)
                self._hold_for_store(turn.held)
                self._turns.append(turn)
            else:
                self._look_at_s = now_s + _LOOK_AGAIN_S
        while self._turns:
            turn = self._turns[0]
            room = self.limits.store_blocks - self._storing
            if turn.todo and room < 1:
                return
            batch = [turn.todo.popleft() for _ in range(min(room, len(turn.todo)))]
            if batch:
                self._begin_store(turn, batch, now_s)
            if not turn.todo:
                self._turns.popleft()
                if not turn.jobs:
                    self._end_turn(turn, now_s)

    def _drop_turns(self, now_s: float) -> None:
        """Store nothing of what has not begun."""
        turns, self._turns = self._turns, deque()
        for turn in turns:
            self.totals.store_missed += len(turn.todo)
            turn.todo.clear()
            if not turn.jobs:
                self._end_turn(turn, now_s)

    def _begin_store(
        self, turn: _Turn[Hash], batch: list[tuple[Hash, int, int]], now_s: float
    ) -> None:
        there = [
            (key, block)
            for key, block, _ in batch
            if self._gpu.holds(key, block) and self._is_absent(key)
        ]
        self.totals.store_missed += len(batch) - len(there)
        held = set(turn.held)
        late = [block for _, block in there if block not in held]
        self._hold_for_store(late)
        turn.held += late
        for key, block in there:
            if block not in self.tier.gpu_blocks(key):
                self.tier.computed(key, block)
        self._evicting = True
        try:
            tickets = self.tier.store(there, now_s)
        finally:
            self._evicting = False
        self._regret.evicted(self._evicted, now_s)
        self._evicted.clear()
        for key, _ in there[len(tickets) :]:
            self._forget_gpu_only(key)
        if not tickets:
            return
        depths = {key: depth for key, _, depth in batch}
        store = _Store(self._next_number(), tickets, depths, turn)
        self._stores[store.number] = store
        self._storing += len(tickets)
        turn.jobs += 1
        self._begin.append(_job(store.number, Kind.STORE, tickets))

    def _store_ended(self, store: _Store[Hash], outcome: Ended, now_s: float) -> None:
        self._storing -= len(store.tickets)
        turn, result = store.turn, Outcome.DONE if outcome.ok else Outcome.FAILED
        voided = []
        for ticket in store.tickets:
            if self.tier.finish(ticket, result, now_s):
                self._depth[ticket.key] = store.depths[ticket.key]
                self.on_change(ticket.key, True)
                self._own(ticket.key, turn.session)
                if ticket.key in self._void:
                    self._void.discard(ticket.key)
                    voided.append(ticket.key)
            else:
                self._forget_gpu_only(ticket.key)
        turn.jobs -= 1
        if not turn.jobs and not turn.todo:
            self._end_turn(turn, now_s)
        self.tier.void(voided)

    def _end_turn(self, turn: _Turn[Hash], now_s: float) -> None:
        held, turn.held = turn.held, []
        self._for_stores -= len(held)
        self._release(held if turn.ahead else held[::-1], soonest=turn.ahead)
        if turn.keys and self.policy_on:
            self.tier.use(turn.session, turn.keys, now_s)

    def _refresh(self, session: Hashable, keys: Sequence[Hash], now_s: float) -> None:
        """``session`` has used ``keys`` now."""
        self._remembered += len(keys) - len(self._histories.pop(session, ()))
        self._histories[session] = keys
        while self._remembered > _REMEMBERED * self._num_slots:
            self._remembered -= len(self._histories.popitem(last=False)[1])
        there = [key for key in keys if self.tier.has(key)]
        if there:
            self.tier.unpin(self.tier.pin(there), now_s)
            if self.policy_on:
                self.tier.use(session, keys, now_s)
        self._void.difference_update(keys)

    def _is_absent(self, key: Hash) -> bool:
        """Neither in DRAM nor on its way there."""
        return self.tier.state(key) in (State.ABSENT, State.GPU)

    # ---- inside: books ---------------------------------------------------------------------

    def _next_number(self) -> int:
        self._numbers += 1
        return self._numbers

    def _hold(self, blocks: Sequence[int]) -> None:
        self._gpu.hold(blocks)
        self._held.update(blocks)

    def _hold_for_store(self, blocks: Sequence[int]) -> None:
        self._hold(blocks)
        self._for_stores += len(blocks)

    def _release(self, blocks: Sequence[int], *, soonest: bool = False) -> None:
        held = self._held
        for block in blocks:
            held[block] -= 1
            if not held[block]:
                del held[block]
        if blocks:
            self._gpu.release(blocks, soonest=soonest)

    def _forget_lost(self, key: Hash) -> None:
        """Tell the tier which of its GPU copies of ``key`` are not there any more."""
        for block in self.tier.gpu_blocks(key):
            if not self._gpu.holds(key, block):
                self.tier.lost(key, block)

    def _forget_gpu_only(self, key: Hash) -> None:
        """The tier keeps nothing of what is on the GPU alone: the pool knows better."""
        if self.tier.state(key) is State.GPU:
            for block in self.tier.gpu_blocks(key):
                self.tier.lost(key, block)

    def _on_dropped(self, key: Hash) -> None:
        self.on_change(key, False)
        self._forget_gpu_only(key)
        self._preloaded.pop(key, None)
        self._depth.pop(key, None)
        if self._evicting:
            self._evicted.append(key)
        session = self._owner.pop(key, None)
        if session in self._by_session:
            self._by_session[session] -= 1

    def _own(self, key: Hash, session: Hashable) -> None:
        """Count ``key`` for the session that stored it."""
        if session is None:
            return
        self._owner[key] = session
        self._by_session[session] = self._by_session.pop(session, 0) + 1
        while len(self._by_session) > _MAX_SESSIONS:
            self._by_session.popitem(last=False)

    def _count_preloaded(self, keys: Sequence[Hash]) -> None:
        if self._preloaded:
            for key in keys:
                if key in self._preloaded:
                    del self._preloaded[key]
                    self.totals.hits += 1

    def _count_regret(self, keys: Sequence[Hash], depth: int, now_s: float) -> None:
        if len(self._regret):
            for key in keys[depth:]:
                if not self._regret.needed(key, now_s):
                    break


def _job(number: int, kind: Kind, tickets: Sequence[Ticket[Hash]]) -> Job:
    return Job(number, kind, tuple(t.gpu_block for t in tickets), tuple(t.slot for t in tickets))
