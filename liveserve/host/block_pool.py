"""Seam: the GPU's free blocks are evicted in the order of a policy.

`LiveQueue` stands in for the host's `FreeKVCacheBlockQueue` (vllm/v1/core/kv_cache_utils.py). It
keeps the host's linked list exactly as the host would, and only takes the victims from wherever in
it the policy says. So whatever goes wrong, the list is whole and in the host's order, and that is
what counts from then on.

The list always is blocks that hold nothing, in front, and then those with content: the host puts
blocks without a hash at its head and all others at its end. What is in front is no policy's
business; the policy orders the rest, and nothing else.

`LiveBlockPool` makes the pool say when content goes away or comes back; `GpuKv` knows which session
reads which blocks, learnt from a request's blocks when it gives them up.
"""

from __future__ import annotations

import heapq
import inspect
import logging
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import FreeKVCacheBlockQueue, KVCacheBlock
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request

from liveserve.events import KvSnapshot
from liveserve.host.seam import expect, install
from liveserve.kv_signals import KvSignals, KvStage
from liveserve.kvtier.next_use import Estimate, NextUse
from liveserve.kvtier.policies import EvictionPolicy, LogOnly, NextUsePolicy, make_policy
from liveserve.kvtier.report import Regret
from liveserve.runtime import StageRuntime

logger = logging.getLogger("vllm.liveserve")

# Evicted and needed again within this: the wrong victim.
REGRET_S = 30.0
# Block ids that are remembered of all sessions together, per block of the pool: shared prefixes
# count once for each session that reads them.
_REMEMBERED = 4


class Disagreement(RuntimeError):
    """The policy names other blocks than are free."""


class LiveQueue(FreeKVCacheBlockQueue):
    """The host's free list, with victims chosen by a policy. See the module.

    Args:
        queue: whose list this takes over; it must not be used any more.
        blocks: all blocks of the pool, by id.
        make: makes the policy; None from it: the host's order.
        on_evicted: told of the hash keys that are about to be evicted, and when.

    Attributes:
        decides: False: the host's order counts; the policy is kept informed.
        errors: failures of policies, after each of which the host's order took over.
    """

    def __init__(
        self,
        queue: FreeKVCacheBlockQueue,
        blocks: Sequence[KVCacheBlock],
        make: Callable[[], EvictionPolicy | None],
        clock: Callable[[], float],
        on_evicted: Callable[[list[bytes], float], None] = lambda *_: None,
    ) -> None:
        self.fake_free_list_head = queue.fake_free_list_head
        self.fake_free_list_tail = queue.fake_free_list_tail
        self.num_free_blocks = queue.num_free_blocks
        self.decides = True
        self.policy: EvictionPolicy | None = None
        self._blocks = blocks
        self._make = make
        self._clock = clock
        self._on_evicted = on_evicted
        self._errors = 0
        self._evicted: dict[str, int] = {}
        self.restart()

    # ---- the host's interface --------------------------------------------------------------

    def popleft(self) -> KVCacheBlock:
        if not self.num_free_blocks:
            return super().popleft()  # raises as the host does
        return self.popleft_n(1)[0]

    def popleft_n(self, n: int) -> list[KVCacheBlock]:
        policy = self.policy
        if policy is None:
            return self._host_order(n)
        blank = self.num_free_blocks - len(policy)
        if n <= blank:
            return super().popleft_n(n)
        if n > self.num_free_blocks:
            return super().popleft_n(n)  # raises as the host does
        if not self.decides:
            return self._host_order(n)
        try:
            now_s = self._clock()
            victims = self._choose(policy, n - blank, now_s)
        except Exception as error:
            self._fail(error)
            return self._host_order(n)
        remove = super().remove
        for block in victims:
            remove(block)
        self._on_evicted([key for block in victims if (key := block.block_hash)], now_s)
        return super().popleft_n(blank) + victims

    def remove(self, block: KVCacheBlock) -> None:
        super().remove(block)
        policy = self.policy
        if policy is not None and policy.table.evictable[block.block_id]:
            try:
                policy.remove((block.block_id,))
            except Exception as error:
                self._fail(error)

    def append(self, block: KVCacheBlock) -> None:
        self.append_n([block])

    def append_n(self, blocks: list[KVCacheBlock]) -> None:
        super().append_n(blocks)
        if self.policy is not None and blocks:
            try:
                self.policy.free([block.block_id for block in blocks], self._clock())
            except Exception as error:
                self._fail(error)

    def prepend_n(self, blocks: list[KVCacheBlock]) -> None:
        super().prepend_n(blocks)
        if self.policy is None:
            return
        group = self._indexed.table.group
        stale = [block.block_id for block in blocks if group[block.block_id] is not None]
        if stale:
            self.void(stale)

    # ---- what the engine knows -------------------------------------------------------------

    def use(self, session: str, blocks: Sequence[int]) -> None:
        """``session`` reads ``blocks``, first one first."""
        if self.policy is not None:
            try:
                self.policy.use(session, blocks, self._clock())
            except Exception as error:
                self._fail(error)

    def void(self, blocks: Iterable[int]) -> None:
        """``blocks`` hold nothing any more."""
        if self.policy is not None:
            try:
                self.policy.void(blocks)
            except Exception as error:
                self._fail(error)

    def fail_closed(self) -> None:
        """Nothing that was said of sessions can be trusted: LRU until they are used again."""
        if isinstance(self._indexed, NextUsePolicy):
            try:
                self._indexed.fail_closed()
            except Exception as error:
                self._fail(error)

    def restart(self) -> None:
        """A new policy, which learns the free blocks from the list in its order."""
        self._drop()
        try:
            policy = self._make()
            if policy is not None:
                free = self.get_all_free_blocks()
                first = next((i for i, b in enumerate(free) if b.block_hash), len(free))
                policy.free([block.block_id for block in free[first:]], self._clock())
            self.policy = policy
        except Exception as error:
            self._fail(error)

    # ---- for people ------------------------------------------------------------------------

    @property
    def in_force(self) -> str:
        """The policy that chooses now."""
        policy = self.policy
        if policy is None or not self.decides or bool(getattr(policy, "fallbacks", 0)):
            return "lru"
        return policy.name

    @property
    def errors(self) -> int:
        return self._errors + getattr(self._indexed, "fallbacks", 0)

    def evicted(self) -> dict[str, int]:
        """Blocks taken from their content, by ``policy/reason``."""
        counts = dict(self._evicted)
        for reason, count in getattr(self.policy, "by_reason", {}).items():
            if count:
                name = f"{self.policy.name}/{reason}" if self.policy else reason
                counts[name] = counts.get(name, 0) + count
        return counts

    @property
    def ranking(self) -> NextUsePolicy | None:
        """The policy, if it chooses by next use now."""
        return self.policy if self.decides and isinstance(self.policy, NextUsePolicy) else None

    # ---- inside ----------------------------------------------------------------------------

    @property
    def _indexed(self) -> Any:
        """The policy that knows sessions: that of log-only is in its shadow."""
        return getattr(self.policy, "shadow", self.policy)

    def _choose(self, policy: EvictionPolicy, count: int, now_s: float) -> list[KVCacheBlock]:
        """Victims. Nothing has been taken from the list yet.

        Raises:
            Disagreement: not ``count`` different blocks that are free.
        """
        ids = policy.evict(count, now_s)
        if len(ids) != count or len(set(ids)) != count:
            raise Disagreement(f"{len(set(ids))} victims of {count} that were wanted")
        victims = [self._blocks[block] for block in ids]
        for block in victims:
            if block.next_free_block is None or block.prev_free_block is None:
                raise Disagreement(f"block {block.block_id} is a victim and not free")
        if not hasattr(policy, "by_reason"):
            name = f"{policy.name}/recency"
            self._evicted[name] = self._evicted.get(name, 0) + count
        return victims

    def _host_order(self, n: int) -> list[KVCacheBlock]:
        taken = super().popleft_n(n)
        keys = [key for block in taken if (key := block.block_hash)]
        if keys:
            self._evicted["lru/recency"] = self._evicted.get("lru/recency", 0) + len(keys)
            self._on_evicted(keys, self._clock())
        if self.policy is not None:
            evictable = self.policy.table.evictable
            known = [block.block_id for block in taken if evictable[block.block_id]]
            try:
                self.policy.remove(known)
                self.policy.void(known)
            except Exception as error:
                self._fail(error)
        return taken

    def _drop(self) -> None:
        if self.policy is not None:
            self._errors += getattr(self._indexed, "fallbacks", 0)
            self._evicted = self.evicted()
            policy, self.policy = self.policy, None
            policy.close()

    def _fail(self, error: Exception) -> None:
        if not self._errors:
            logger.warning(
                "LiveServe: choosing KV blocks to evict failed (%s: %s); the host's order counts "
                "until kv_evict is switched off and on (counted, logged once)",
                type(error).__name__,
                error,
            )
        self._errors += 1
        self._drop()


class LiveBlockPool(BlockPool):
    """The host's pool, which says when content goes away or comes back."""

    live: GpuKv

    def _insert_block_hash(self, key: Any, block: KVCacheBlock, *args: Any, **given: Any) -> None:
        super()._insert_block_hash(key, block, *args, **given)
        if self.live.regret:
            self.live.regret.needed(key, self.live.now_s())

    def evict_blocks(self, block_ids: set[int]) -> None:
        super().evict_blocks(block_ids)
        self.live.queue.void(block_ids)

    def reset_prefix_cache(self) -> bool:
        done = super().reset_prefix_cache()
        if done:
            self.live.was_reset()
        return done


class GpuKv:
    """Who reads which blocks of one engine's prefix cache, and what became of them.

    Mirrors `liveserve.kv_signals.GpuCache`.

    Args:
        pool: of the engine, with prefix caching.
        name: of the policy.
        next_use: what is known of sessions.
        max_sessions: sessions whose blocks are remembered.
        safe_blocks: for T-LRU.
    """

    def __init__(
        self,
        pool: BlockPool,
        name: str,
        next_use: NextUse,
        clock: Callable[[], float],
        *,
        max_sessions: int = 4096,
        safe_blocks: int = 32,
    ) -> None:
        def make() -> EvictionPolicy | None:
            # The host's list is in LRU order without a policy.
            return (
                None
                if name == "lru"
                else make_policy(name, pool.num_gpu_blocks, next_use, safe_blocks)
            )

        self.name = name
        self.now_s = clock
        self.regret = Regret(REGRET_S, max(1, pool.num_gpu_blocks))
        self.prompt_tokens = self.hit_tokens = 0
        self._pool = pool
        self._next_use = next_use
        self._max_sessions = max_sessions
        # Per session its history's blocks and their keys, and how many that are in all.
        self._histories: OrderedDict[str, tuple[list[int], list[bytes]]] = OrderedDict()
        self._remembered = 0
        # Of these, whose history the policy has not been told since it can be ranked.
        self._unranked: set[str] = set()
        self.queue = LiveQueue(pool.free_block_queue, pool.blocks, make, clock, self.regret.evicted)
        next_use.subscribe(self._heard)
        pool.__class__ = LiveBlockPool
        assert isinstance(pool, LiveBlockPool)
        pool.live = self
        pool.free_block_queue = self.queue

    # ---- who reads what --------------------------------------------------------------------

    def used(self, session: str, blocks: Sequence[int], *, remember: bool = True) -> None:
        """``session``'s history is ``blocks`` now, first one first; those with a hash count."""
        all_blocks = self._pool.blocks
        ids: list[int] = []
        keys: list[bytes] = []
        for block in blocks:
            key = all_blocks[block].block_hash
            if key is not None:
                ids.append(block)
                keys.append(key)
        self._forget(session)
        if remember:
            self._histories[session] = (ids, keys)
            self._remembered += len(ids)
            if self._next_use.get(session) is None:
                self._unranked.add(session)
            most = _REMEMBERED * self._pool.num_gpu_blocks
            while self._remembered > most or len(self._histories) > self._max_sessions:
                self._forget(next(iter(self._histories)))
        self.queue.use(session, ids)

    def was_reset(self) -> None:
        """No block holds anything any more."""
        self._histories.clear()
        self._unranked.clear()
        self._remembered = 0
        self.regret.clear()
        self.queue.restart()

    def switch(self, on: bool) -> None:
        """Whether the policy decides. After a failure, off and on starts it anew."""
        if on and not self.queue.decides and self.queue.policy is None:
            self.queue.restart()
            self._rank_all()
        self.queue.decides = on

    def fail_closed(self) -> None:
        """Signals are stale."""
        self.queue.fail_closed()
        self._unranked.update(self._histories)

    def _heard(self, session: Any, known: Estimate | None, over: bool) -> None:
        if known is not None:
            if session in self._unranked:
                self._unranked.discard(session)
                self.queue.use(session, self._present(session))
        elif over:
            self._forget(session)
        elif session in self._histories:
            self._unranked.add(session)

    def _rank_all(self) -> None:
        self._unranked.update(self._histories)
        for session in tuple(self._histories):
            if (known := self._next_use.get(session)) is not None:
                self._heard(session, known, False)

    def _present(self, session: str) -> list[int]:
        """Blocks of the session's history that still hold it."""
        blocks = self._pool.blocks
        history = self._histories.get(session, ((), ()))
        return [b for b, key in zip(*history, strict=True) if blocks[b].block_hash == key]

    def _forget(self, session: str) -> None:
        known = self._histories.pop(session, None)
        if known is not None:
            self._remembered -= len(known[0])
            self._unranked.discard(session)

    # ---- for the tier and for people -------------------------------------------------------

    def upcoming(self, count: int) -> list[int]:
        """About the next ``count`` blocks that lose their content, soonest first."""
        chosen: dict[int, None] = {}
        ranking, blocks = self.queue.ranking, self._pool.blocks
        if ranking is not None and count > 0:
            now_s, evictable = self.now_s(), ranking.table.evictable
            deepest = []
            for session, (ids, _) in self._histories.items():
                block = next((b for b in reversed(ids) if evictable[b]), None)
                if block is not None:
                    deepest.append((ranking.wait_s(block, now_s), session))
            for _, session in heapq.nlargest(count, deepest):
                for block in reversed(self._present(session)):
                    if evictable[block]:
                        chosen[block] = None
                if len(chosen) >= count:
                    break
        for free in self.queue.iter_blocks_after(None):
            if len(chosen) >= count:
                break
            if blocks[free.block_id].block_hash is not None:
                chosen[free.block_id] = None
        return list(chosen)[:count]

    def spare(self, count: int, wait_s: float) -> int:
        """See `liveserve.kv_signals.GpuCache`: blocks that hold nothing, and the policy's victims.
        Where the host's order counts, nothing tells when its victims are needed."""
        queue, policy = self.queue, self.queue.policy
        if policy is None:
            blank = 0
            for block in queue.iter_blocks_after(None):
                if blank >= count or block.block_hash is not None:
                    break
                blank += 1
            return blank
        blank = queue.num_free_blocks - len(policy)
        if count <= blank or not queue.decides:
            return min(count, blank)
        return blank + policy.spare(count - blank, wait_s, self.now_s())

    def fill(self, snapshot: KvSnapshot) -> None:
        queue, policy = self.queue, self.queue.policy
        snapshot.policy, snapshot.configured = queue.in_force, self.name
        snapshot.block_tokens = self._pool.hash_block_size
        snapshot.cached = len(self._pool.cached_block_hash_to_block)
        snapshot.free = queue.num_free_blocks
        snapshot.evicted = queue.evicted()
        snapshot.prompt_tokens, snapshot.hit_tokens = self.prompt_tokens, self.hit_tokens
        snapshot.regret, snapshot.regret_s = self.regret.count, self.regret.window_s
        if isinstance(policy, LogOnly):
            snapshot.watched, snapshot.disagreed = policy.considered, policy.disagreed
        snapshot.errors = queue.errors

    def blocks_of(self, session: str) -> int:
        return len(self._present(session))

    def sessions(self, limit: int) -> dict[str, int]:
        newest = list(self._histories)[-limit:]
        counts = {session: len(self._present(session)) for session in newest}
        return {session: count for session, count in counts.items() if count}


class Requests:
    """Tells a `GpuKv` what a scheduler's requests read.

    Args:
        scheduler: with prefix caching.
        session_of: the session of a request id.
    """

    def __init__(
        self, scheduler: Scheduler, gpu: GpuKv, session_of: Callable[[str], str], live: StageRuntime
    ) -> None:
        manager = scheduler.kv_cache_manager
        self._gpu = gpu
        self._session_of = session_of
        self._live = live
        self._tables = [group.req_to_blocks for group in manager.coordinator.single_type_managers]
        self._record = manager.record_prefix_cache_stats
        manager.record_prefix_cache_stats = self._admitted

    def ending(self, request: Request) -> None:
        """``request`` gives its blocks up: it has finished, or is preempted."""
        try:
            self._ending(request.request_id)
        except Exception:
            self._live._failed("KV of a request")

    def _ending(self, request_id: str) -> None:
        blocks = [
            block
            for table in self._tables
            for block in table.get(request_id, ())
            if block.block_hash is not None and not block.is_null
        ]
        if not blocks:
            return
        if len(self._tables) > 1:
            blocks.sort(key=lambda block: block.block_hash_num_tokens or 0)
        session = self._session_of(request_id)
        known = session != request_id or self._gpu._next_use.get(session) is not None
        self._gpu.used(session, [block.block_id for block in blocks], remember=known)

    def _admitted(self, request: Request, num_hits: int) -> None:
        """`KVCacheManager.record_prefix_cache_stats`: called once per admission."""
        if not request.num_preemptions:
            self._gpu.prompt_tokens += request.num_tokens
            self._gpu.hit_tokens += num_hits
        self._record(request, num_hits)


def attach(
    scheduler: Scheduler, runtime: StageRuntime, session_of: Callable[[str], str]
) -> Requests | None:
    """Order evictions of ``scheduler``'s prefix cache, and set `StageRuntime.kv`; None where it has
    none, or is not as expected.
    """
    manager = scheduler.kv_cache_manager
    if not manager.enable_caching or not install("eviction", lambda: _check(manager)):
        return None
    config = runtime.config
    signals = KvSignals(config.max_sessions)
    gpu = GpuKv(
        manager.block_pool,
        config.kv.gpu_policy or config.kv.policy,
        signals.next_use,
        runtime.now_s,
        max_sessions=config.max_sessions,
        safe_blocks=config.kv.safe_blocks,
    )
    gpu.switch(runtime.switches.kv_evict)
    signals.follow(gpu.fail_closed)
    runtime.kv = KvStage(signals, gpu, runtime.now_s)
    return Requests(scheduler, gpu, session_of, runtime)


def _check(manager: Any) -> None:
    pool = manager.block_pool
    expect(type(pool) is BlockPool, f"the block pool is a {type(pool).__name__}")
    queue = pool.free_block_queue
    expect(type(queue) is FreeKVCacheBlockQueue, f"the free queue is a {type(queue).__name__}")
    ours = {name for name, _ in inspect.getmembers(LiveQueue, inspect.isfunction)}
    theirs = {name for name, _ in inspect.getmembers(FreeKVCacheBlockQueue, inspect.isfunction)}
    names = {"popleft", "popleft_n", "remove", "append", "append_n", "prepend_n"}
    reads = {"get_all_free_blocks", "iter_blocks_after", "__init__"}
    expect(names <= theirs & ours, f"FreeKVCacheBlockQueue lost {sorted(names - theirs)}")
    more = {name for name in theirs if name not in names | reads and not name.startswith("_")}
    expect(not more, f"FreeKVCacheBlockQueue has {sorted(more)}")
    for owner, name in (
        (pool, "_insert_block_hash"),
        (pool, "evict_blocks"),
        (pool, "reset_prefix_cache"),
        (manager, "record_prefix_cache_stats"),
    ):
        expect(hasattr(owner, name), f"{type(owner).__name__}.{name} is gone")
    groups = manager.coordinator.single_type_managers
    expect(all(g.block_pool is pool for g in groups), "the groups have pools of their own")
