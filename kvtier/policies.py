"""Which blocks to evict: LRU, T-LRU, next use, and next use as a mere observer, behind one face.

A policy knows block ids, not bytes: the same code orders the GPU's free blocks and the slots of a
DRAM pool. It only ever orders. What is evictable is said by its owner (`free`, `remove`), kept in a
`BlockTable`, and if the ordering fails in any way, LRU order is rebuilt from that table alone.
"""

from __future__ import annotations

import logging
import math
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Sequence

from liveserve.kvtier.index import SessionIndex
from liveserve.kvtier.next_use import Estimate, NextUse
from liveserve.kvtier.side_tables import BlockTable

logger = logging.getLogger("vllm.liveserve")


class EvictionPolicy(ABC):
    """Orders the evictable blocks among ids 0 … ``num_blocks`` - 1. Not thread-safe.

    Blocks start in use. `free` and `remove` raise ValueError on a block that is free already or
    is not: a caller that disagrees with the table has lost count, and nothing here can mend that.
    """

    name: str

    def __init__(self, num_blocks: int) -> None:
        self.table = BlockTable(num_blocks)

    @abstractmethod
    def __len__(self) -> int:
        """Evictable blocks."""

    @abstractmethod
    def free(self, blocks: Iterable[int], now_s: float, *, blank: bool = False) -> None:
        """``blocks`` became evictable, first victim first (the host frees a suffix before its
        prefix). ``blank``: they hold nothing, and go before all others."""

    @abstractmethod
    def remove(self, blocks: Iterable[int]) -> None:
        """``blocks`` are not evictable any more: read again, pinned, or taken by their owner."""

    @abstractmethod
    def evict(self, count: int, now_s: float) -> list[int]:
        """Choose at most ``count`` victims, in order, and remove them."""

    def spare(self, count: int, wait_s: float, now_s: float) -> int:
        """Of the next ``count`` victims, how many are not expected to be needed within ``wait_s``;
        one of which nothing is known is expected again after as long as it has lain unused. None
        where a policy cannot tell."""
        return 0

    def use(self, session: Hashable, blocks: Sequence[int], now_s: float) -> None:  # noqa: B027
        """``session``'s history now is ``blocks``, first one first, evictable or not."""

    def void(self, blocks: Iterable[int]) -> None:  # noqa: B027
        """The content of ``blocks`` is gone or will not be read again (an unheard suffix). Those
        that are evictable may go first."""

    def close(self) -> None:  # noqa: B027
        """It is not used any more: the estimator may forget it."""

    def _spare_in(self, order: Iterable[int], count: int, wait_s: float, now_s: float) -> int:
        last_use_s = self.table.last_use_s
        found = 0
        for block in order:
            if found >= count or now_s - last_use_s[block] <= wait_s:
                break
            found += 1
        return found

    def _unfree(self, block: int) -> None:
        if not self.table.evictable[block]:
            raise ValueError(f"block {block} is not evictable: it was removed already")
        self.table.evictable[block] = 0


class Lru(EvictionPolicy):
    """Least recently freed first: the host's order."""

    name = "lru"

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks)
        self._order: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._order)

    def free(self, blocks: Iterable[int], now_s: float, *, blank: bool = False) -> None:
        for block in blocks:
            self.table.freed(block, now_s)
            self._order[block] = None
            if blank:
                self._order.move_to_end(block, last=False)

    def remove(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            self._unfree(block)
            del self._order[block]

    def evict(self, count: int, now_s: float) -> list[int]:
        order, evictable = self._order, self.table.evictable
        victims = [order.popitem(last=False)[0] for _ in range(min(count, len(order)))]
        for block in victims:
            evictable[block] = 0
        return victims

    def spare(self, count: int, wait_s: float, now_s: float) -> int:
        return self._spare_in(self._order, count, wait_s, now_s)


class TailLru(Lru):
    """T-LRU (tail-optimised LRU, arXiv 2510.15152): LRU among the blocks whose loss cannot make
    the next turn slow, then LRU among the rest.

    A session's last ``safe_blocks`` are safe to lose: recomputing them stays within the latency
    that one may wait for.
    """

    name = "t-lru"

    def __init__(self, num_blocks: int, safe_blocks: int) -> None:
        super().__init__(num_blocks)
        self._safe_blocks = safe_blocks
        self._is_safe = bytearray(num_blocks)
        self._safe: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._order) + len(self._safe)

    def use(self, session: Hashable, blocks: Sequence[int], now_s: float) -> None:
        first_safe = len(blocks) - self._safe_blocks
        evictable = self.table.evictable
        for depth in range(len(blocks) - 1, -1, -1):
            block, is_safe = blocks[depth], depth >= first_safe
            if evictable[block] and is_safe != self._is_safe[block]:
                old, new = self._order, self._safe
                old, new = (old, new) if is_safe else (new, old)
                del old[block]
                new[block] = None
            self._is_safe[block] = is_safe

    def free(self, blocks: Iterable[int], now_s: float, *, blank: bool = False) -> None:
        for block in blocks:
            self.table.freed(block, now_s)
            if blank:
                self._is_safe[block] = 1
            order = self._safe if self._is_safe[block] else self._order
            order[block] = None
            if blank:
                order.move_to_end(block, last=False)

    def remove(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            self._unfree(block)
            del (self._safe if self._is_safe[block] else self._order)[block]

    def evict(self, count: int, now_s: float) -> list[int]:
        safe, evictable = self._safe, self.table.evictable
        victims = [safe.popitem(last=False)[0] for _ in range(min(count, len(safe)))]
        for block in victims:
            evictable[block] = 0
        return victims + super().evict(count - len(victims), now_s)

    def spare(self, count: int, wait_s: float, now_s: float) -> int:
        found = min(count, len(self._safe))
        return found + super().spare(count - found, wait_s, now_s)


class NextUsePolicy(EvictionPolicy):
    """Latest expected next use first, among sessions that the estimator knows; LRU for the rest.

    A block of which nothing is known is expected to be used again after as long as it has lain
    unused: at the head of the LRU order it is compared with the index's victim by that. So with no
    interaction signals at all this is LRU, and with all of them it is next use alone. Blank blocks
    go first, then what nobody will read (closed sessions, unheard suffixes).

    Attributes:
        fallbacks: how often the index failed and LRU took over for good (0 or 1), until `reset`.
        by_reason: victims so far, by "blank", "orphan", "next-use" and "recency".
    """

    name = "next-use"

    def __init__(self, num_blocks: int, estimator: NextUse) -> None:
        super().__init__(num_blocks)
        self._estimator = estimator
        self._recency: OrderedDict[int, None] = OrderedDict()
        self._blank: OrderedDict[int, None] = OrderedDict()
        self._free = 0
        self._index: SessionIndex | None = SessionIndex(self.table)
        self.fallbacks = 0
        self.by_reason = {"blank": 0, "orphan": 0, "next-use": 0, "recency": 0}
        estimator.subscribe(self._heard)

    def __len__(self) -> int:
        return self._free

    # ---- what the owner says ---------------------------------------------------------------

    def use(self, session: Hashable, blocks: Sequence[int], now_s: float) -> None:
        """As in the base class. Of a session that the estimator does not know, only recency
        counts: its blocks leave the index, even those that known sessions share."""
        index = self._index
        if index is None:
            return
        group, evictable = self.table.group, self.table.evictable
        try:
            known = self._estimator.get(session)
            if known is None:
                self._recency.update(dict.fromkeys(index.leave(session)))
                for block in blocks:
                    if group[block] is not None:
                        index.drop(block)
                        if evictable[block]:
                            self._recency[block] = None
                return
            if session not in index:
                index.key(session, known.next_use_s, known.lane)
            for block in blocks:
                if evictable[block] and group[block] is None:
                    self._recency.pop(block, None)
                    self._blank.pop(block, None)
            self._recency.update(dict.fromkeys(index.use(session, blocks)))
        except Exception as error:
            self._fall_back(error)

    def void(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            if self.table.group[block]:
                try:
                    assert self._index is not None
                    self._index.drop(block)
                except Exception as error:
                    self._fall_back(error)
            if self.table.evictable[block]:
                self._recency.pop(block, None)
                self._blank[block] = None

    def free(self, blocks: Iterable[int], now_s: float, *, blank: bool = False) -> None:
        table, index = self.table, self._index
        freed = table.freed
        for block in blocks:
            freed(block, now_s)
            self._free += 1
            group = table.group[block]
            if group:
                try:
                    assert index is not None
                    index.add(block)
                    if not (blank or group.released):
                        continue
                    index.drop(block)
                except Exception as error:
                    self._fall_back(error)
                    index = None
            if blank:
                self._recency.pop(block, None)
                self._blank[block] = None
            else:
                self._recency[block] = None

    def remove(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            self._unfree(block)
            self._free -= 1
            if self.table.group[block]:
                try:
                    assert self._index is not None
                    self._index.discard(block)
                except Exception as error:
                    self._fall_back(error)
            elif block in self._recency:
                del self._recency[block]
            else:
                del self._blank[block]

    def evict(self, count: int, now_s: float) -> list[int]:
        count = min(count, self._free)
        victims = self._pop(self._blank, count, "blank")
        if self._index is not None:
            try:
                self._choose(victims, count, now_s)
            except Exception as error:
                self._fall_back(error)
        victims += self._pop(self._recency, count - len(victims), "recency")
        self._free -= len(victims)
        return victims

    def spare(self, count: int, wait_s: float, now_s: float) -> int:
        found = min(count, len(self._blank))
        try:
            self._estimator.advance(now_s)
            if self._index is not None:
                found += self._index.later(wait_s, now_s, self._estimator.chance)
        except Exception as error:
            self._fall_back(error)
            found = min(count, len(self._blank))
        found = min(found, count)
        return found + self._spare_in(self._recency, count - found, wait_s, now_s)

    # ---- when to trust the index -----------------------------------------------------------

    def fail_closed(self) -> None:
        """The interaction signals cannot be trusted: LRU from here on, until sessions are used
        again that the estimator knows."""
        if self._index is not None:
            self._rebuild()
            self._index = SessionIndex(self.table)

    def reset(self) -> None:
        """After a failure: try the index again."""
        self._rebuild()
        self._index = SessionIndex(self.table)

    def close(self) -> None:
        self._estimator.unsubscribe(self._heard)

    def wait_s(self, block: int, now_s: float) -> float:
        """Expected seconds per use of ``block``, which is evictable: the most goes first."""
        group = self.table.group[block]
        if group and self._index:
            return self._index.score(group, now_s, self._estimator.chance)
        return math.inf if block in self._blank else now_s - self.table.last_use_s[block]

    def longest_wait_s(self, now_s: float) -> float:
        """`wait_s` of the block that `evict` would choose first; -inf if nothing is evictable."""
        if self._blank:
            return math.inf
        longest_s = -math.inf
        if self._index:
            longest_s, _ = self._index.best(now_s, self._estimator.chance)
        if self._recency:
            longest_s = max(longest_s, self.wait_s(next(iter(self._recency)), now_s))
        return longest_s

    # ---- inside ----------------------------------------------------------------------------

    def _choose(self, victims: list[int], count: int, now_s: float) -> None:
        self._estimator.advance(now_s)
        index, recency = self._index, self._recency
        if index is None:
            return
        chance, last_use_s = self._estimator.chance, self.table.last_use_s
        evictable = self.table.evictable
        while len(victims) < count:
            score, group = index.best(now_s, chance)
            while recency and len(victims) < count:
                block = next(iter(recency))
                if now_s - last_use_s[block] < score:
                    break
                victims.append(block)
                evictable[block] = 0
                del recency[block]
                self.by_reason["recency"] += 1
            if group is None or len(victims) >= count:
                return
            reason = "next-use" if group.users else "orphan"
            taken = index.take(group, count - len(victims), victims)
            self.by_reason[reason] += taken
            if not taken:
                raise RuntimeError("the index offers a group with nothing to evict")

    def _pop(self, order: OrderedDict[int, None], count: int, reason: str) -> list[int]:
        victims = [order.popitem(last=False)[0] for _ in range(min(count, len(order)))]
        for block in victims:
            self.table.evictable[block] = 0
        self.by_reason[reason] += len(victims)
        return victims

    def _heard(self, session: Hashable, known: Estimate | None, over: bool) -> None:
        index = self._index
        if index is None or session not in index:
            return
        try:
            if known is not None:
                index.key(session, known.next_use_s, known.lane)
                return
            for block in index.leave(session) if over else index.forget(session):
                self._recency[block] = None
        except Exception as error:
            self._fall_back(error)

    def _rebuild(self) -> None:
        """Recency of everything, from the table alone."""
        blank = self._blank
        self._recency = OrderedDict.fromkeys(
            block for block in self.table.by_recency() if block not in blank
        )
        self.table.group = [None] * self.table.num_blocks

    def _fall_back(self, error: Exception) -> None:
        logger.warning("next-use eviction failed, LRU takes over: %r", error, exc_info=error)
        self.fallbacks += 1
        self._index = None
        self._rebuild()


class LogOnly(Lru):
    """LRU decides; what next use would have done is recorded, for comparing before switching.

    Attributes:
        shadow: the next-use policy that watches; its `evict` is never called.
        considered, disagreed: LRU's victims, and those that next use would not have chosen at that
            moment because another block is expected to be needed later.
    """

    name = "log-only"

    def __init__(self, num_blocks: int, estimator: NextUse) -> None:
        super().__init__(num_blocks)
        self.shadow = NextUsePolicy(num_blocks, estimator)
        self._estimator = estimator
        self.considered = self.disagreed = 0

    def use(self, session: Hashable, blocks: Sequence[int], now_s: float) -> None:
        self.shadow.use(session, blocks, now_s)

    def void(self, blocks: Iterable[int]) -> None:
        self.shadow.void(blocks)

    def free(self, blocks: Iterable[int], now_s: float, *, blank: bool = False) -> None:
        blocks = list(blocks)
        super().free(blocks, now_s, blank=blank)
        self.shadow.free(blocks, now_s, blank=blank)

    def remove(self, blocks: Iterable[int]) -> None:
        blocks = list(blocks)
        super().remove(blocks)
        self.shadow.remove(blocks)

    def close(self) -> None:
        self.shadow.close()

    def evict(self, count: int, now_s: float) -> list[int]:
        victims = super().evict(count, now_s)
        self._estimator.advance(now_s)
        for block in victims:
            self.considered += 1
            if self.shadow.wait_s(block, now_s) < self.shadow.longest_wait_s(now_s):
                self.disagreed += 1
            self.shadow.remove((block,))
            self.shadow.void((block,))
        return victims


POLICIES = ("lru", "t-lru", "next-use", "log-only")


def make_policy(
    name: str, num_blocks: int, estimator: NextUse, safe_blocks: int = 32
) -> EvictionPolicy:
    """The policy called ``name``. ``safe_blocks``: for T-LRU.

    Raises:
        ValueError: no such policy, or ``num_blocks`` is no positive integer.
    """
    if name == "lru":
        return Lru(num_blocks)
    if name == "t-lru":
        return TailLru(num_blocks, safe_blocks)
    if name == "next-use":
        return NextUsePolicy(num_blocks, estimator)
    if name == "log-only":
        return LogOnly(num_blocks, estimator)
    raise ValueError(f"eviction policy {name!r} is not one of {', '.join(POLICIES)}")
