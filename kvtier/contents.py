"""What is in DRAM: at which depth of a sequence, who left it there, and who used what last.

`Tier` says where a block is; this adds what loads, stores and reports need to know of it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Generic

from liveserve.kvtier.gpu_blocks import GpuBlocks
from liveserve.kvtier.policies import EvictionPolicy
from liveserve.kvtier.report import Regret
from liveserve.kvtier.slots import SlotAllocator
from liveserve.kvtier.tier import Hash, State, Ticket, Tier

# Sessions that are counted in a report.
_MAX_SESSIONS = 512
# Keys of sessions' histories that are remembered, per slot: shared prefixes count for each session.
_REMEMBERED = 4


class Contents(Generic[Hash]):
    """The tier, and what else is known of its blocks.

    Args:
        regret_s: a block that is asked for within so long of its eviction should have stayed.

    Attributes:
        policy_on: False: the policy learns nothing more of who uses what.
        on_change: told of each block that is in DRAM now (True), or no longer (False).
        depth: place in its sequence of what is in DRAM.
        preloaded: what was loaded without a request and not asked for since.
        regret: of evictions from DRAM.
    """

    def __init__(
        self, num_slots: int, policy: EvictionPolicy, gpu: GpuBlocks[Hash], regret_s: float
    ) -> None:
        self.tier: Tier[Hash] = Tier(SlotAllocator(num_slots), policy, self._on_dropped)
        self.num_slots = num_slots
        self.policy_on = True
        self.on_change: Callable[[Hash, bool], None] = lambda *_: None
        self.depth: dict[Hash, int] = {}
        self.preloaded: OrderedDict[Hash, None] = OrderedDict()
        self.regret = Regret(regret_s, max(1, num_slots))
        self._gpu = gpu
        self._evicted: list[Hash] | None = None  # while a store makes room
        self._void: set[Hash] = set()  # before they were in DRAM
        # What sessions used last; their histories, from the start.
        self._histories: OrderedDict[Hashable, Sequence[Hash]] = OrderedDict()
        self._remembered = 0
        self._owner: dict[Hash, Hashable] = {}
        self._by_session: OrderedDict[Hashable, int] = OrderedDict()

    def is_absent(self, key: Hash) -> bool:
        """Neither in DRAM nor on its way there."""
        return self.tier.state(key) in (State.ABSENT, State.GPU)

    def history(self, session: Hashable) -> Sequence[Hash]:
        """What ``session`` used last, from the start."""
        return self._histories.get(session, ())

    def by_session(self) -> dict[str, int]:
        """Blocks in DRAM by session, of the newest sessions."""
        return {str(session): count for session, count in self._by_session.items() if count}

    # ---- use -------------------------------------------------------------------------------

    def used(self, session: Hashable, keys: Sequence[Hash], now_s: float) -> None:
        """``session``'s history is ``keys``, which it has used now."""
        self._remembered += len(keys) - len(self._histories.pop(session, ()))
        self._histories[session] = keys
        while self._remembered > _REMEMBERED * self.num_slots:
            self._remembered -= len(self._histories.popitem(last=False)[1])
        there = [key for key in keys if self.tier.has(key)]
        if there:
            self.tier.unpin(self.tier.pin(there), now_s)
            self.credit(session, keys, now_s)
        self._void.difference_update(keys)

    def credit(self, session: Hashable, keys: Sequence[Hash], now_s: float) -> None:
        """Tell the policy whose ``keys`` are, as far as they are in DRAM."""
        if self.policy_on:
            self.tier.use(session, keys, now_s)

    def void(self, keys: Iterable[Hash]) -> None:
        """Nobody will read ``keys`` again."""
        keys = list(keys)
        self.tier.void(keys)
        self._void.update(key for key in keys if not self.tier.has(key))
        if len(self._void) > 2 * self.num_slots:
            self._void.clear()

    def count_regret(self, keys: Sequence[Hash], depth: int, now_s: float) -> None:
        """``keys[depth:]`` are asked for and are nowhere."""
        if len(self.regret):
            for key in keys[depth:]:
                if not self.regret.needed(key, now_s):
                    break

    # ---- stores ----------------------------------------------------------------------------

    def store(self, blocks: Sequence[tuple[Hash, int]], now_s: float) -> list[Ticket[Hash]]:
        """`Tier.store` of what can be found on the GPU by its key."""
        for key, block in blocks:
            if block not in self.tier.gpu_blocks(key):
                self.tier.computed(key, block)
        evicted: list[Hash] = []
        self._evicted = evicted
        try:
            tickets = self.tier.store(blocks, now_s)
        finally:
            self._evicted = None
        self.regret.evicted(evicted, now_s)
        for key, _ in blocks[len(tickets) :]:
            self.forget_gpu_only(key)
        return tickets

    def stored(self, key: Hash, depth: int, session: Hashable) -> bool:
        """``key`` has come to DRAM. Returns whether it was void before."""
        self.depth[key] = depth
        self.on_change(key, True)
        if session is not None:
            self._owner[key] = session
            self._by_session[session] = self._by_session.pop(session, 0) + 1
            while len(self._by_session) > _MAX_SESSIONS:
                self._by_session.popitem(last=False)
        is_void = key in self._void
        self._void.discard(key)
        return is_void

    def reset(self, now_s: float) -> None:
        """Nothing computed so far is valid any more: DRAM is empty after this."""
        self._void.clear()
        self.preloaded.clear()
        self.regret.clear()
        self.tier.reset(now_s)

    # ---- the GPU, which changes without telling --------------------------------------------

    def forget_lost(self, key: Hash) -> None:
        """Tell the tier which of its GPU copies of ``key`` are not there any more."""
        for block in self.tier.gpu_blocks(key):
            if not self._gpu.holds(key, block):
                self.tier.lost(key, block)

    def forget_gpu_only(self, key: Hash) -> None:
        """The tier keeps nothing of what is on the GPU alone: the pool knows better."""
        if self.tier.state(key) is State.GPU:
            for block in self.tier.gpu_blocks(key):
                self.tier.lost(key, block)

    def _on_dropped(self, key: Hash) -> None:
        self.on_change(key, False)
        self.forget_gpu_only(key)
        self.preloaded.pop(key, None)
        self.depth.pop(key, None)
        if self._evicted is not None:
            self._evicted.append(key)
        session = self._owner.pop(key, None)
        if session in self._by_session:
            self._by_session[session] -= 1
