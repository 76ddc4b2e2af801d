"""KV of one engine: block pools on the GPU, the DRAM tier behind one, and the link between them.

What is evicted, stored and where each block is decide `liveserve.kvtier` alone; this says only what
the engine would tell it, and how long copies take.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, Any, cast

from liveserve.bench.simulator.model import LinkCost, StageCost, System
from liveserve.events import Event
from liveserve.kv_preload import KvPreload, TierLoads
from liveserve.kvtier.next_use import NextUse
from liveserve.kvtier.policies import NextUsePolicy, make_policy
from liveserve.kvtier.preload import PreloadLimits
from liveserve.kvtier.slots import SlotAllocator
from liveserve.kvtier.tier import Outcome, State, Ticket, Tier
from liveserve.scheduler.views import SessionView

if TYPE_CHECKING:
    from liveserve.bench.simulator.engines import Request

ON_PATH, PRELOAD, STORE = 0, 1, 2
# Between two rounds in which the preloader looks again at who is wanted.
_LOOK_S = 0.1


class Link:
    """One direction: jobs one after another, the more urgent first, none interrupted.

    Attributes:
        bytes_queued, bytes_moved: since the start.
        busy_s: time spent moving.
    """

    def __init__(self, cost: LinkCost, at: Callable[..., None]) -> None:
        self._bytes_per_s = cost.gbps * 1e9
        self._latency_s = cost.latency_s
        self._at = at
        self._queue: list[tuple[int, int, int, Callable[[float], None]]] = []
        self._count = 0
        self._free_s = 0.0
        self._busy = False
        self.bytes_queued = self.bytes_moved = self.waiting_bytes = 0
        self.busy_s = 0.0

    def put(self, urgency: int, size: int, now_s: float, done: Callable[[float], None]) -> None:
        """Move ``size`` bytes; then call ``done`` with the time."""
        self._count += 1
        self.bytes_queued += size
        self.waiting_bytes += size
        heapq.heappush(self._queue, (urgency, self._count, size, done))
        if not self._busy:
            self._next(now_s)

    def wait_s(self, size: int, now_s: float) -> float:
        """Seconds until ``size`` bytes that are queued now, behind all others, are there."""
        ahead_s = max(0.0, self._free_s - now_s) if self._busy else 0.0
        return ahead_s + self._takes_s(self.waiting_bytes) + self._takes_s(size)

    def _takes_s(self, size: int) -> float:
        return self._latency_s + size / self._bytes_per_s if size else 0.0

    def _next(self, now_s: float) -> None:
        self._busy = bool(self._queue)
        if self._busy:
            _, _, size, done = heapq.heappop(self._queue)
            self.waiting_bytes -= size
            takes_s = self._takes_s(size)
            self.busy_s += takes_s
            self._free_s = now_s + takes_s
            self._at(self._free_s, self._moved, (size, done))

    def _moved(self, now_s: float, job: tuple[int, Callable[[float], None]]) -> None:
        self.bytes_moved += job[0]
        self._next(now_s)
        job[1](now_s)


class Pool:
    """Blocks that live as long as their request: counts are all there is."""

    def __init__(self, cost: StageCost, min_block_tokens: int) -> None:
        self.block_tokens = max(cost.block_tokens, min_block_tokens)
        self.total = cost.kv_blocks * cost.block_tokens // self.block_tokens
        self.free = self.total
        self.blocks_taken = self.blocks_given = 0

    @property
    def used(self) -> int:
        return self.total - self.free

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_tokens)

    def enter(self, request: Request, now_s: float) -> bool | None:
        """Give ``request`` the blocks of its prompt. False: there are not enough. None: it has to
        wait for a load, whose end wakes it."""
        wanted = self.blocks_for(request.prompt + 1)
        if wanted > self.free:
            return False
        self.free -= wanted
        self.blocks_taken += wanted
        request.capacity = wanted * self.block_tokens
        return True

    def grow(self, request: Request, now_s: float) -> bool:
        """One more block."""
        if not self.free:
            return False
        self.free -= 1
        self.blocks_taken += 1
        request.capacity += self.block_tokens
        return True

    def computed(self, request: Request) -> None:
        """The prompt is computed."""

    def release(self, request: Request, kept: int, now_s: float) -> None:
        """``request`` has ended, or is preempted; of its tokens ``kept`` will be asked for again
        (those before them as well)."""
        blocks = request.capacity // self.block_tokens
        self.free += blocks
        self.blocks_given += blocks
        request.capacity = 0


class History:
    """KV of one session: keys of its full blocks, in order, shared prefix first.

    Attributes:
        tokens: of the conversation so far, as the next prompt will hold it.
        used: the policies know of it.
    """

    __slots__ = ("keys", "prefix", "prefix_tokens", "session_id", "tokens")

    def __init__(self, session_id: str, prefix: str, prefix_tokens: int) -> None:
        self.session_id = session_id
        self.prefix, self.prefix_tokens = prefix, prefix_tokens
        self.tokens = prefix_tokens
        self.keys: list[int] = []


class _Load:
    """A copy to the GPU: blocks by key, and who waits for it."""

    __slots__ = ("tickets", "waiters")

    def __init__(self, tickets: list[Ticket[int]]) -> None:
        self.tickets = tickets
        self.waiters: list[Request] = []


class CachingPool:
    """A thinker's pool: content outlives its request, on the GPU and in DRAM.

    Attributes:
        hit_tokens, loaded_tokens, recomputed_tokens: of histories, by where they came from.
    """

    def __init__(
        self,
        cost: StageCost,
        min_block_tokens: int,
        dram_bytes: int,
        link: LinkCost,
        system: System,
        estimator: NextUse,
        caching: bool,
        at: Callable[..., None],
        wake: Callable[[Request, float], None],
        freed: Callable[[float], None],
    ) -> None:
        self.block_tokens = max(cost.block_tokens, min_block_tokens)
        self.block_bytes = self.block_tokens * cost.kv_bytes_per_token
        self.total = cost.kv_blocks * cost.block_tokens // self.block_tokens
        self.policy = make_policy(system.eviction, self.total, estimator)
        self.policy.free(range(self.total), 0.0, blank=True)
        slots = dram_bytes // self.block_bytes if system.offload else 0
        self._offload = slots > 0 and caching
        dram_policy = make_policy(system.eviction, max(1, slots), estimator)
        self.tier: Tier[int] = Tier(SlotAllocator(max(1, slots)), dram_policy)
        self.to_gpu, self.to_dram = Link(link, at), Link(link, at)
        self._unheard = system.live and system.switches.unheard
        self._caching = caching
        self._wake, self._freed = wake, freed
        self._key_at: list[int | None] = [None] * self.total
        self._block_of: dict[int, int] = {}
        self._users = [0] * self.total
        self._loading: dict[int, _Load] = {}
        self._prefixes: dict[str, list[int]] = {}
        self._next_key = 0
        self.evicted = 0
        self.hit_tokens = self.loaded_tokens = self.recomputed_tokens = 0
        self.preloaded_blocks = 0
        self.histories: dict[Hashable, History] = {}
        self._at, self._now_s, self._looking = at, 0.0, False
        self.kv_preload: KvPreload | None = None
        if system.preload and self._offload:
            loads = cast("TierLoads", self)
            self.kv_preload = KvPreload(loads, PreloadLimits(), lambda: True, lambda ids: ())
        self.preloader = None if self.kv_preload is None else self.kv_preload.preloader

    @property
    def used(self) -> int:
        return self.total - len(self.policy)

    @property
    def free(self) -> int:
        return len(self.policy)

    @property
    def cached(self) -> int:
        """Keys that are on the GPU."""
        return len(self._block_of)

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_tokens)

    # ---- requests --------------------------------------------------------------------------

    def enter(self, request: Request, now_s: float) -> bool | None:
        history: History = request.history
        if self.preloader is not None and not request.asked:
            request.asked = True
            self._now_s = now_s
            self.preloader.arrived(history.session_id, now_s)
        on_gpu: list[int] = []
        in_dram: list[int] = []
        if self._caching:
            keys = history.keys or self._prefixes.get(history.prefix, [])
            # The last token of a prompt is always computed.
            keys = keys[: (request.prompt - 1) // self.block_tokens]
            for key in keys:
                block = self._block_of.get(key)
                if block is not None:
                    on_gpu.append(block)
                elif key in self._loading:
                    self._loading[key].waiters.append(request)
                    return None
                elif self._offload and self.tier.has(key):
                    in_dram.append(key)
                else:
                    break
        found = len(on_gpu) + len(in_dram)
        wanted = self.blocks_for(request.prompt + 1) - len(on_gpu)
        spare = len(self.policy) - sum(not self._users[block] for block in on_gpu)
        if wanted > spare:
            return False
        self._take(on_gpu)
        fresh = self._alloc(wanted, now_s)
        hits = [self._block_of.get(key, -1) for key in keys[:found]] if in_dram else on_gpu
        if in_dram:
            targets = iter(fresh)
            hits = [next(targets) if block < 0 else block for block in hits]
            fresh = fresh[len(in_dram) :]
        request.blocks = hits + fresh
        request.capacity = len(request.blocks) * self.block_tokens
        request.cached = found * self.block_tokens
        past = min(history.tokens, request.prompt)
        self.hit_tokens += len(on_gpu) * self.block_tokens
        self.loaded_tokens += len(in_dram) * self.block_tokens
        lost = max(0, past - request.cached)
        self.recomputed_tokens += lost
        request.recomputed += lost
        if not in_dram:
            return True
        request.loaded_blocks += len(in_dram)
        places = zip(keys[:found], request.blocks[:found], strict=True)
        pairs = [(key, block) for key, block in places if key not in self._block_of]
        self._take([block for _, block in pairs])
        self._load(history, pairs, ON_PATH, now_s).waiters.append(request)
        return None

    def grow(self, request: Request, now_s: float) -> bool:
        if not len(self.policy):
            return False
        request.blocks += self._alloc(1, now_s)
        request.capacity += self.block_tokens
        return True

    def computed(self, request: Request) -> None:
        self._name(request, request.blocks, request.prompt)

    def release(self, request: Request, kept: int, now_s: float) -> None:
        history, blocks = request.history, request.blocks
        request.blocks, request.capacity = [], 0
        if not blocks:
            return
        computed = request.context
        if computed:
            self._name(request, blocks, kept if self._unheard else computed)
        keep = min(kept, computed) // self.block_tokens
        dead = [key for key in history.keys[keep:] if computed]
        if computed and self._caching:
            del history.keys[keep:]
            self.policy.use(history.session_id, self._on_gpu(history), now_s)
            self._use_dram(history, now_s)
            self._store(history, now_s)
        if dead and self._unheard:
            self._void(dead)
        self._give(blocks, now_s)

    def forget_after(self, history: History, tokens: int, now_s: float) -> None:
        """The conversation is cut: nothing after ``tokens`` tokens will be asked for again."""
        keep = tokens // self.block_tokens
        dead = history.keys[keep:]
        history.tokens = tokens
        del history.keys[keep:]
        if dead and self._unheard:
            self._void(dead)

    # ---- `liveserve.kvtier.preload.Loads` --------------------------------------------------

    def offloaded(self, session: Hashable, keys: Sequence[Hashable] | None) -> Sequence[int]:
        history = self.histories.get(session)
        wanted: list[int] = []
        for key in history.keys if history is not None and self._offload else ():
            if key in self._block_of or key in self._loading:
                continue
            if not self.tier.has(key):
                break
            wanted.append(key)
        return wanted

    def spare(self, count: int, wait_s: float, now_s: float) -> int:
        policy = self.policy
        if isinstance(policy, NextUsePolicy) and policy.longest_wait_s(now_s) <= wait_s:
            return 0
        return min(count, len(policy))

    def estimate_s(self, num_bytes: int) -> float:
        return self.to_gpu.wait_s(num_bytes, self._now_s)

    def preload(self, keys: Sequence[Hashable], session: Hashable) -> Hashable | None:
        history, now_s = self.histories[session], self._now_s
        here = self._on_gpu(history)
        if len(keys) > len(self.policy) - sum(not self._users[block] for block in here):
            return None
        self.preloaded_blocks += len(keys)
        self._take(here)  # not to be evicted for its own suffix
        blocks = self._alloc(len(keys), now_s)
        load = self._load(
            history, list(zip(cast("Sequence[int]", keys), blocks, strict=True)), PRELOAD, now_s
        )
        self._give(here, now_s)
        return load

    def cancel(self, job: Hashable) -> None:
        """A job on the link is not interrupted."""

    def promote(self, job: Hashable) -> None:
        """Jobs are short: one that is queued keeps its place."""

    def look(self, now_s: float, _: None = None) -> None:
        """A round of the preloader, and others while somebody is wanted."""
        self._looking = False
        preloader = self.preloader
        if preloader is None:
            return
        self._now_s = now_s
        preloader.step(now_s)
        if preloader.num_wanted and not self._looking:
            self._looking = True
            self._at(now_s + _LOOK_S, self.look, None)

    def happened(self, event: Event, view: SessionView | None) -> None:
        """An event of the interaction plane, which may make somebody wanted."""
        if self.kv_preload is None or self.preloader is None:
            return
        self._now_s = event.at_s
        self.kv_preload.happened(event, view)
        if self.preloader.num_wanted and not self._looking:
            self._looking = True
            self._at(event.at_s, self.look, None)

    # ---- inside ----------------------------------------------------------------------------

    def _on_gpu(self, history: History) -> list[int]:
        found = map(self._block_of.get, history.keys)
        return [block for block in found if block is not None]

    def _load(
        self, history: History, pairs: Sequence[tuple[int, int]], urgency: int, now_s: float
    ) -> _Load:
        """Begin to load ``(key, GPU block)``; the blocks are the load's until it is done."""
        load = _Load([self.tier.load(key, block) for key, block in pairs])
        for key, _ in pairs:
            self._loading[key] = load

        def done(at_s: float) -> None:
            blocks = []
            for ticket in load.tickets:
                del self._loading[ticket.key]
                if self.tier.finish(ticket, Outcome.DONE, at_s):
                    self._block_of[ticket.key] = ticket.gpu_block
                    self._key_at[ticket.gpu_block] = ticket.key
                blocks.append(ticket.gpu_block)
            self._give(blocks, at_s)
            self.policy.use(history.session_id, self._on_gpu(history), at_s)
            for request in load.waiters:
                self._wake(request, at_s)
            if urgency == PRELOAD and self.preloader is not None:
                self.preloader.ended(load, len(blocks), at_s)
            self._freed(at_s)

        self.to_gpu.put(urgency, len(pairs) * self.block_bytes, now_s, done)
        return load

    def _store(self, history: History, now_s: float) -> None:
        if not self._offload:
            return
        pairs = [(k, b) for k in history.keys if (b := self._block_of.get(k)) is not None]
        pairs = [(k, b) for k, b in pairs if self.tier.state(k) is State.GPU]
        tickets = self.tier.store(pairs, now_s) if pairs else []
        if not tickets:
            return
        blocks = [ticket.gpu_block for ticket in tickets]
        self._take(blocks)

        def done(at_s: float) -> None:
            for ticket in tickets:
                self.tier.finish(ticket, Outcome.DONE, at_s)
            self._use_dram(history, at_s)
            self._give(blocks, at_s)
            self._freed(at_s)

        self.to_dram.put(STORE, len(blocks) * self.block_bytes, now_s, done)

    def _use_dram(self, history: History, now_s: float) -> None:
        if self._offload:
            self.tier.use(history.session_id, history.keys, now_s)

    def _name(self, request: Request, blocks: Sequence[int], tokens: int) -> None:
        """The full blocks among the first ``tokens`` tokens of ``request`` can be found."""
        if not self._caching:
            return
        history, full = request.history, tokens // self.block_tokens
        keys = history.keys
        if not keys and history.prefix:
            shared = history.prefix_tokens // self.block_tokens
            named = self._prefixes.setdefault(history.prefix, [])
            while len(named) < shared:
                named.append(self._new_key())
            keys += named[:full]
        while len(keys) < full:
            keys.append(self._new_key())
        for key, block in zip(keys[:full], blocks, strict=False):
            if key not in self._block_of and self._key_at[block] is None:
                if key in self._loading:
                    continue
                self._block_of[key] = block
                self._key_at[block] = key
                self.tier.computed(key, block)

    def _new_key(self) -> int:
        self._next_key += 1
        return self._next_key

    def _void(self, keys: Sequence[int]) -> None:
        """Nobody will ask for ``keys`` again."""
        for key in keys:
            block = self._block_of.pop(key, None)
            if block is not None:
                self._key_at[block] = None
                self.tier.lost(key, block)
                self.policy.void((block,))
        if self._offload:
            self.tier.void(keys)

    def _alloc(self, count: int, now_s: float) -> list[int]:
        blocks = self.policy.evict(count, now_s)
        assert len(blocks) == count, "the caller asks for no more than there is"
        for block in blocks:
            key = self._key_at[block]
            if key is not None:
                self.evicted += 1
                self._key_at[block] = None
                del self._block_of[key]
                self.tier.lost(key, block)
            self._users[block] = 1
        return blocks

    def _take(self, blocks: Sequence[int]) -> None:
        users = self._users
        self.policy.remove([block for block in blocks if not users[block]])
        for block in blocks:
            users[block] += 1

    def _give(self, blocks: Sequence[int], now_s: float) -> None:
        """Suffix first, as the host frees."""
        users, key_at = self._users, self._key_at
        named: list[int] = []
        blank: list[int] = []
        for block in reversed(blocks):
            users[block] -= 1
            if not users[block]:
                (blank if key_at[block] is None else named).append(block)
        if blank:
            self.policy.free(blank, now_s, blank=True)
        if named:
            self.policy.free(named, now_s)

    def check(self) -> None:
        """Compare the books with each other.

        Raises:
            AssertionError: a block is leaked, or a tier disagrees.
        """
        self.tier.check()
        evictable = self.policy.table.evictable
        for block in range(self.total):
            assert bool(evictable[block]) == (self._users[block] == 0), f"block {block}"
            key = self._key_at[block]
            assert key is None or self._block_of[key] == block, f"block {block} and its key"
        for key in self._block_of:
            state: Any = self.tier.state(key)
            assert state in (State.GPU, State.STORING, State.BOTH), (key, state)
        assert len(self.policy) == sum(evictable)
