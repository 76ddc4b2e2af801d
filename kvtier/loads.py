"""Loads from DRAM to the GPU: what a request waits for, and what is brought before anybody asks.

A load takes blocks from the GPU's pool, and when it is done each is published under its hash: the
request that waited for it, and everybody else with the same prefix, then gets an ordinary hit. So a
prefix that many ask for is loaded once, and a load that fails leaves nothing but a prefix to
compute.

Loaded blocks are held until the requests that waited have their allocation, for one scheduling
round at most. Waiting longer could stop two requests that each hold what the other needs.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Generic

from liveserve.kvtier.contents import Contents
from liveserve.kvtier.gpu_blocks import GpuBlocks, HeldBlocks
from liveserve.kvtier.jobs import Ended, Job, job_of
from liveserve.kvtier.report import Latencies
from liveserve.kvtier.tier import Hash, Outcome, State, Ticket
from liveserve.kvtier.transfer_base import Kind

# Loads that one request waits for before it recomputes what is missing.
_MAX_LOADS = 3


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


class Loads(Generic[Hash]):
    """Loads under way, and the requests that wait for them.

    Args:
        numbers: of jobs, shared with the stores.
        min_blocks: fewer blocks are recomputed instead.
        timeout_s: a request waits for its blocks at most so long.

    Attributes:
        on: whether new ones begin.
        on_loaded: told of every load that ended, how many of its blocks are on the GPU, and when.
        hits: blocks found in DRAM by requests, whether they waited or had them preloaded.
        preloaded: blocks loaded without a request.
        timeouts, no_room: requests that waited too long, or for which the GPU had no room.
        reload_ms: how long requests waited.
    """

    def __init__(
        self,
        contents: Contents[Hash],
        gpu: GpuBlocks[Hash],
        held: HeldBlocks,
        numbers: Iterator[int],
        *,
        min_blocks: int,
        timeout_s: float,
    ) -> None:
        self.on = True
        self.on_loaded: Callable[[Load[Hash], int, float], None] = lambda *_: None
        self.hits = self.preloaded = self.timeouts = self.no_room = 0
        self.reload_ms = Latencies()
        self._contents = contents
        self._gpu = gpu
        self._held = held
        self._numbers = numbers
        self._min_blocks = min_blocks
        self._timeout_s = timeout_s
        self._loads: dict[int, Load[Hash]] = {}
        self._loading: dict[Hash, Load[Hash]] = {}
        self._waits: dict[str, _Wait[Hash]] = {}
        self._begin: list[Job] = []
        self._cancel: list[int] = []
        self._promote: list[int] = []

    @property
    def blocks_moving(self) -> int:
        """Blocks that loads under way bring."""
        return sum(len(load.tickets) for load in self._loads.values() if not load.ended)

    @property
    def awaited(self) -> bool:
        """Whether a request waits for a load."""
        return any(load.waiters and not load.ended for load in self._loads.values())

    @property
    def busy(self) -> bool:
        """Whether a worker has, or is about to have, something to do or to report."""
        return bool(
            self._begin or self._cancel or any(not load.ended for load in self._loads.values())
        )

    # ---- requests --------------------------------------------------------------------------

    def lookup(
        self, request_id: str, session: Hashable, keys: Sequence[Hash], have: int, now_s: float
    ) -> bool:
        """See `KvManager.lookup`."""
        wait = self._waits.get(request_id)
        if wait is None:
            self._count_preloaded(keys[:have])
        elif wait.waits:
            if now_s - wait.since_s <= self._timeout_s:
                return True
            self.timeouts += 1
            wait.failed = True
            self._leave(request_id, wait)
        if wait is not None:
            wait.asked = True
            if wait.failed or wait.tries >= _MAX_LOADS:
                return False
        if not self.on:
            return False
        missing, joined, kept = self._missing(keys, have)
        depth = have + len(missing) + sum(joined.values()) + len(kept)
        self._contents.count_regret(keys, depth, now_s)
        if not missing and not joined:
            return False
        return self._wait_for(request_id, session, keys[:have], missing, joined, kept, now_s)

    def waits(self, request_id: str) -> bool:
        """Whether a load keeps the request."""
        wait = self._waits.get(request_id)
        return wait is not None and wait.waits

    def gone(self, request_id: str) -> None:
        """The request waits no more. What nobody else waits for is cancelled."""
        wait = self._waits.pop(request_id, None)
        if wait is not None:
            self._leave(request_id, wait)

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
        if coming < self._min_blocks:
            return False
        gpu = self._gpu
        # What the request has already must still be there when the rest has come.
        found = [gpu.find(key) for key in prefix]
        kept = [block for block in found if block is not None] + kept
        wait = self._waits.get(request_id)
        old = wait.kept if wait is not None else []
        taken = len(missing) + sum(map(gpu.is_free, kept))
        if taken > gpu.spare():
            self.no_room += 1
            return False
        if wait is None:
            wait = self._waits[request_id] = _Wait(now_s)
        self._held.hold(kept)
        self._held.release(old)
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
        self.hits += coming
        return True

    def _leave(self, request_id: str, wait: _Wait[Hash]) -> None:
        """Let go of all that ``wait`` holds."""
        for load in wait.loads:
            load.waiters.discard(request_id)
            if load.waiters:
                continue
            if load.ended:
                self._drop(load)
            else:
                self.cancel(load)
        wait.loads.clear()
        self._held.release(wait.kept[::-1])
        wait.kept = []

    def _count_preloaded(self, keys: Sequence[Hash]) -> None:
        preloaded = self._contents.preloaded
        if preloaded:
            for key in keys:
                if key in preloaded:
                    del preloaded[key]
                    self.hits += 1

    # ---- ahead of requests -----------------------------------------------------------------

    def preload(self, keys: Sequence[Hash], session: Hashable) -> Load[Hash] | None:
        """See `KvManager.preload`."""
        if not self.on:
            return None
        missing = self.offloaded(session, keys)[: self._gpu.spare()]
        return self._load(Kind.PRELOAD, session, missing) if missing else None

    def offloaded(self, session: Hashable, keys: Sequence[Hash] | None = None) -> list[Hash]:
        """See `KvManager.offloaded`."""
        keys = self._contents.history(session) if keys is None else keys
        return self._missing(keys, 0)[0]

    def cancel(self, load: Load[Hash]) -> bool:
        """See `KvManager.cancel`."""
        if load.ended or load.waiters:
            return False
        if not load.cancelled:
            load.cancelled = True
            self._cancel.append(load.number)
        return True

    def promote(self, load: Load[Hash]) -> None:
        """See `KvManager.promote`."""
        if load.kind is Kind.PRELOAD and not load.ended:
            load.kind = Kind.ON_PATH
            self._promote.append(load.number)

    # ---- rounds ----------------------------------------------------------------------------

    def plan(self) -> tuple[list[Job], list[int], list[int]]:
        """The scheduling round is over. Returns jobs to begin, and numbers of those to cancel and
        to promote."""
        for request_id, wait in list(self._waits.items()):
            if not wait.waits:
                wait.rounds += 1
                if wait.asked or wait.rounds > 1:
                    self._leave(request_id, wait)
        orders = self._begin, self._cancel, self._promote
        self._begin, self._cancel, self._promote = [], [], []
        return orders

    def ended(self, outcome: Ended, now_s: float) -> bool:
        """A job is over. Returns whether it was a load."""
        load = self._loads.get(outcome.number)
        if load is None or load.ended:
            return load is not None
        load.ended = True
        dropped = []
        contents = self._contents
        for ticket in load.tickets:
            if ticket.slot in outcome.corrupt:
                result = Outcome.CORRUPT
            else:
                result = Outcome.DONE if outcome.ok else Outcome.FAILED
            if self._loading.get(ticket.key) is load:
                del self._loading[ticket.key]
            if contents.tier.finish(ticket, result, now_s):
                self._gpu.publish(ticket.key, ticket.gpu_block, contents.depth[ticket.key])
                load.landed.append(ticket.gpu_block)
                if not load.waiters:
                    contents.preloaded[ticket.key] = None
                    self.preloaded += 1
            else:
                dropped.append(ticket.gpu_block)
                contents.forget_gpu_only(ticket.key)
        while len(contents.preloaded) > contents.num_slots:
            contents.preloaded.popitem(last=False)
        self._held.release(dropped)
        for name in load.waiters:
            wait = self._waits[name]
            wait.failed = wait.failed or bool(dropped)
            if not wait.waits:
                self.reload_ms.add(1e3 * (now_s - wait.since_s))
        if not load.waiters:
            self._drop(load)
        self.on_loaded(load, len(load.landed), now_s)
        return True

    def reset(self) -> None:
        """What is under way goes on, and is worth nothing."""
        for wait in self._waits.values():
            wait.failed = True
        self._loading.clear()

    def check(self, held: Counter[int]) -> int:
        """Add to ``held`` what loads and waits hold. Returns blocks under way.

        Raises:
            AssertionError: a load is kept for nobody, or a wait is not known at both ends.
        """
        moving = 0
        for load in self._loads.values():
            assert not load.ended or load.waiters, "a load is kept for nobody"
            held.update(load.landed if load.ended else [t.gpu_block for t in load.tickets])
            moving += 0 if load.ended else len(load.tickets)
            assert all(name in self._waits for name in load.waiters), "a waiter is unknown"
        for request_id, wait in self._waits.items():
            held.update(wait.kept)
            assert all(request_id in load.waiters for load in wait.loads), "a wait is one-sided"
        return moving

    # ---- inside ----------------------------------------------------------------------------

    def _missing(
        self, keys: Sequence[Hash], have: int
    ) -> tuple[list[Hash], dict[Load[Hash], int], list[int]]:
        """What of ``keys[have:]`` could be had without computing it, without a gap.

        Returns:
            keys in DRAM alone; loads under way, with how many blocks they bring;
            blocks behind them that the GPU has.
        """
        tier = self._contents.tier
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
            elif tier.has(key):
                self._contents.forget_lost(key)
                if tier.state(key) is not State.DRAM:
                    break  # a load of it is being cancelled
                missing.append(key)
            else:
                break
            kept += behind
            behind = []
        return missing, joined, kept

    def _load(self, kind: Kind, session: Hashable, keys: Sequence[Hash]) -> Load[Hash]:
        tier, blocks = self._contents.tier, self._held.take(len(keys))
        tickets = [tier.load(key, block) for key, block in zip(keys, blocks, strict=True)]
        load = Load(next(self._numbers), kind, session, tickets)
        self._loads[load.number] = load
        self._loading.update(dict.fromkeys(keys, load))
        self._begin.append(job_of(load.number, kind, tickets))
        return load

    def _drop(self, load: Load[Hash]) -> None:
        self._loads.pop(load.number, None)
        self._held.release(load.landed[::-1])
