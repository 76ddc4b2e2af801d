"""Belady's bound: what the best possible policy would evict, which needs to see the future."""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Iterable, Sequence

from liveserve.kvtier.policies import EvictionPolicy


class Optimal(EvictionPolicy):
    """Evicts what is used again the latest; of equals the deepest, so prefixes outlive suffixes.

    With blocks of one size and every request's blocks held while it runs, no policy has more hits.

    Args:
        num_blocks: block ids are contents here: one id always holds the same.
        future: the blocks of every `use` that will be called, in order.
    """

    name = "optimal"

    def __init__(self, num_blocks: int, future: Iterable[Sequence[int]]) -> None:
        super().__init__(num_blocks)
        self._uses: list[list[int]] = [[] for _ in range(num_blocks)]
        for when, blocks in enumerate(future):
            for block in blocks:
                self._uses[block].append(when)
        for uses in self._uses:
            uses.reverse()  # the next one last
        self._now = -1
        self._heap: list[tuple[int, int, int]] = []
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def use(self, session: Hashable, blocks: Sequence[int], now_s: float) -> None:
        self._now += 1
        for depth, block in enumerate(blocks):
            self.table.depth[block] = depth

    def free(self, blocks: Iterable[int], now_s: float, *, blank: bool = False) -> None:
        for block in blocks:
            self.table.freed(block, now_s)
            self._size += 1
            heapq.heappush(self._heap, (-self._next_use(block), -self.table.depth[block], block))

    def remove(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            self._unfree(block)
            self._size -= 1

    def evict(self, count: int, now_s: float) -> list[int]:
        victims: list[int] = []
        evictable = self.table.evictable
        while self._heap and len(victims) < count:
            next_use, _, block = heapq.heappop(self._heap)
            if evictable[block] and -next_use == self._next_use(block):  # else an old entry
                evictable[block] = 0
                victims.append(block)
        self._size -= len(victims)
        return victims

    def _next_use(self, block: int) -> int:
        uses = self._uses[block]
        while uses and uses[-1] <= self._now:
            uses.pop()
        return uses[-1] if uses else 1 << 60
