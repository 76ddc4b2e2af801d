"""The scheduler's half of the KV tier: what is copied between GPU and DRAM, and who waits for it.

Everything goes through the GPU's prefix cache: loads publish what they bring there, stores copy
what can be found there. What is on the GPU is asked when it matters, not followed: the pool is the
host's, and changes without telling.

`loads.py` has the loads and who waits for them, `stores.py` the stores, `contents.py` what is known
of the blocks in DRAM, `gpu_blocks.py` the GPU's pool. The manager joins them for the host.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic

from liveserve.kvtier.contents import Contents
from liveserve.kvtier.gpu_blocks import GpuBlocks, HeldBlocks
from liveserve.kvtier.jobs import Ended, Orders
from liveserve.kvtier.loads import Load, Loads
from liveserve.kvtier.policies import EvictionPolicy
from liveserve.kvtier.report import TierReport
from liveserve.kvtier.stores import Stores
from liveserve.kvtier.tier import Hash, Tier


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
        errors: how often something here failed.
    """

    def __init__(
        self,
        num_slots: int,
        policy: EvictionPolicy,
        gpu: GpuBlocks[Hash],
        limits: Limits | None = None,
        block_bytes: int = 0,
    ) -> None:
        limits = limits or Limits()
        self.errors = 0
        self._block_bytes = block_bytes
        self._held = HeldBlocks(gpu)
        self._contents: Contents[Hash] = Contents(num_slots, policy, gpu, limits.regret_s)
        numbers = itertools.count(1)
        self._loads: Loads[Hash] = Loads(
            self._contents,
            gpu,
            self._held,
            numbers,
            min_blocks=limits.min_load_blocks,
            timeout_s=limits.load_timeout_s,
        )
        self._stores: Stores[Hash] = Stores(
            self._contents,
            gpu,
            self._held,
            numbers,
            max_moving=limits.store_blocks,
            max_held=limits.held_blocks,
            look_ahead=limits.ahead_blocks,
        )
        self._broken = False

    @property
    def tier(self) -> Tier[Hash]:
        return self._contents.tier

    # ---- switches and listeners ------------------------------------------------------------

    @property
    def broken(self) -> bool:
        """Something here failed; nothing new begins, whatever else is set."""
        return self._broken

    def fail(self) -> None:
        """Begin nothing new from now on; what is under way still ends."""
        self.errors += 1
        self._broken = True
        self._loads.on = self._stores.on = False

    def switch(self, *, loads: bool, stores: bool, policy: bool) -> None:
        """Whether new loads and stores begin, and whether the policy learns who uses what: what it
        knows is dropped when it may not."""
        self._loads.on = loads and not self._broken
        self._stores.on = stores and not self._broken
        if self._contents.policy_on != policy:
            self._contents.policy_on = policy
            fail_closed = getattr(self.tier.policy, "fail_closed", None)
            if fail_closed is not None and not policy:
                fail_closed()

    def follow(
        self,
        *,
        on_loaded: Callable[[Load[Hash], int, float], None] | None = None,
        on_change: Callable[[Hash, bool], None] | None = None,
    ) -> None:
        """Tell ``on_loaded`` of every load that ended, how many of its blocks are on the GPU, and
        when; ``on_change`` of each block that is in DRAM now (True), or no longer (False)."""
        self._loads.on_loaded = on_loaded or self._loads.on_loaded
        self._contents.on_change = on_change or self._contents.on_change

    # ---- loads -----------------------------------------------------------------------------

    def lookup(
        self, request_id: str, session: Hashable, keys: Sequence[Hash], have: int, now_s: float
    ) -> bool:
        """A request with the full blocks ``keys`` is about to be scheduled; the GPU has the first
        ``have``. Returns whether it should wait and be asked for again: more is on its way.
        """
        return self._loads.lookup(request_id, session, keys, have, now_s)

    def admitted(self, request_id: str) -> None:
        """The request has its blocks."""
        self._loads.gone(request_id)

    def waits(self, request_id: str) -> bool:
        """Whether a load keeps the request."""
        return self._loads.waits(request_id)

    @property
    def awaited(self) -> bool:
        """Whether a load keeps any request."""
        return self._loads.awaited

    def gone(self, request_id: str) -> None:
        """The request is over, or waits no more. What nobody else waits for is cancelled."""
        self._loads.gone(request_id)

    def preload(self, keys: Sequence[Hash], session: Hashable) -> Load[Hash] | None:
        """Begin to load what of ``keys``, prefix first, is in DRAM alone: see `offloaded`.

        Takes no more than the GPU has to spare.

        Returns:
            the load, for `cancel` and `promote`; None: there is nothing to do or no room.
        """
        return self._loads.preload(keys, session)

    def offloaded(self, session: Hashable, keys: Sequence[Hash] | None = None) -> list[Hash]:
        """What a load would bring back of ``keys``, prefix first: in DRAM, not on the GPU and not
        on its way there. Ends at a block that is nowhere.

        Args:
            keys: None: what ``session`` used last.
        """
        return self._loads.offloaded(session, keys)

    def history(self, session: Hashable) -> Sequence[Hash]:
        """What ``session`` used last, from the start."""
        return self._contents.history(session)

    def cancel(self, load: Load[Hash]) -> bool:
        """Stop a preload. Returns whether: not if it has ended or a request waits for it."""
        return self._loads.cancel(load)

    def promote(self, load: Load[Hash]) -> None:
        """Make a preload as urgent as a load that a request waits for."""
        self._loads.promote(load)

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
        self._contents.used(session, keys, now_s)
        self._stores.add(session, keys, blocks, hold=hold)

    def void(self, keys: Iterable[Hash]) -> None:
        """Nobody will read ``keys`` again."""
        self._contents.void(keys)

    # ---- rounds ----------------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        """Whether a worker has, or is about to have, something to do or to report."""
        return not self._broken and (self._stores.busy or self._loads.busy)

    def plan(self, now_s: float) -> Orders:
        """The scheduling round is over. Returns what the worker is to do."""
        loads, cancel, promote = self._loads.plan()
        return Orders((*loads, *self._stores.plan(now_s)), tuple(cancel), tuple(promote))

    def ended(self, outcomes: Iterable[Ended], now_s: float) -> None:
        """Jobs that are over."""
        for outcome in outcomes:
            if not self._loads.ended(outcome, now_s):
                self._stores.ended(outcome, now_s)

    def reset(self, now_s: float) -> None:
        """Nothing computed so far is valid any more: DRAM is empty after this. Copies under way go
        on, and what they bring is dropped.
        """
        self._stores.drop_turns(now_s)
        self._loads.reset()
        self._contents.reset(now_s)

    # ---- what there is to see --------------------------------------------------------------

    @property
    def held(self) -> dict[int, int]:
        """References that the manager has, by GPU block."""
        return dict(self._held.counts)

    @property
    def loading(self) -> int:
        """Blocks that loads under way bring."""
        return self._loads.blocks_moving

    def sessions(self) -> dict[str, int]:
        """Blocks in DRAM by session, of the newest sessions."""
        return self._contents.by_session()

    def report(self) -> TierReport:
        contents, loads, stores = self._contents, self._loads, self._stores
        totals, policy, waits = self.tier.totals, self.tier.policy, self._loads.reload_ms
        reasons = getattr(policy, "by_reason", None)
        return TierReport(
            policy=policy.name,
            slots=contents.num_slots,
            used=self.tier.in_dram,
            block_bytes=self._block_bytes,
            hits=loads.hits,
            preloaded=loads.preloaded,
            timeouts=loads.timeouts,
            no_room=loads.no_room,
            stored=totals.stored,
            store_failed=totals.store_failed,
            store_missed=stores.missed,
            refused=totals.refused,
            loaded=totals.loaded,
            load_failed=totals.load_failed,
            corrupt=totals.corrupt,
            evicted=dict(reasons) if reasons is not None else {policy.name: totals.evicted},
            regret=contents.regret.count,
            regret_s=contents.regret.window_s,
            loading=loads.blocks_moving,
            storing=stores.blocks_moving,
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
        tier = self.tier
        tier.check()
        held: Counter[int] = Counter()
        moving = self._loads.check(held) + self._stores.check(held)
        counts = self._held.counts
        assert held == counts, f"held blocks are miscounted: {held} is not {counts}"
        assert moving == tier.in_flight, "a copy under way belongs to nobody"
        assert len(tier) <= tier.in_dram + tier.in_flight, (
            "the tier remembers what is on the GPU alone"
        )
