"""Policies from the field that are only replayed against ours: ARC and TTL."""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Sequence

from liveserve.kvtier.policies import EvictionPolicy


class Arc(EvictionPolicy):
    """Adaptive replacement cache (Megiddo and Modha, FAST'03), as vLLM offers for offloading.

    Block ids are contents here: the ghost lists remember evicted ids.

    Args:
        capacity: blocks that are resident at most, evictable or not.
    """

    name = "arc"

    def __init__(self, num_blocks: int, capacity: int) -> None:
        super().__init__(num_blocks)
        self._capacity = capacity
        self._target = 0.0  # of ``_recent``, in blocks
        self._recent: OrderedDict[int, None] = OrderedDict()  # T1: used once
        self._frequent: OrderedDict[int, None] = OrderedDict()  # T2: used more than once
        self._recent_ghosts: OrderedDict[int, None] = OrderedDict()
        self._frequent_ghosts: OrderedDict[int, None] = OrderedDict()
        self._often = bytearray(num_blocks)  # where a block belongs when it is freed

    def __len__(self) -> int:
        return len(self._recent) + len(self._frequent)

    def use(self, session: Hashable, blocks: Sequence[int], now_s: float) -> None:
        for block in blocks:
            if block in self._recent_ghosts:
                grow = max(1.0, len(self._frequent_ghosts) / len(self._recent_ghosts))
                self._target = min(self._capacity, self._target + grow)
                del self._recent_ghosts[block]
                self._often[block] = 1
            elif block in self._frequent_ghosts:
                grow = max(1.0, len(self._recent_ghosts) / len(self._frequent_ghosts))
                self._target = max(0.0, self._target - grow)
                del self._frequent_ghosts[block]
                self._often[block] = 1
            else:
                self._often[block] = block in self._recent or block in self._frequent

    def free(self, blocks: Iterable[int], now_s: float, *, blank: bool = False) -> None:
        for block in blocks:
            self.table.freed(block, now_s)
            (self._frequent if self._often[block] else self._recent)[block] = None

    def remove(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            self._unfree(block)
            (self._recent if block in self._recent else self._frequent).pop(block)

    def evict(self, count: int, now_s: float) -> list[int]:
        victims = []
        for _ in range(min(count, len(self))):
            from_recent = self._recent and (len(self._recent) > self._target or not self._frequent)
            blocks, ghosts = (
                (self._recent, self._recent_ghosts)
                if from_recent
                else (self._frequent, self._frequent_ghosts)
            )
            block, _ = blocks.popitem(last=False)
            ghosts[block] = None
            if len(ghosts) > self._capacity:
                ghosts.popitem(last=False)
            self.table.evictable[block] = 0
            victims.append(block)
        return victims


class Ttl(EvictionPolicy):
    """Time to live (after Continuum): a history is kept for longer the more it costs to have
    again; what expires first goes first.

    Args:
        ttl_s: seconds after its last use that a history of so many blocks is worth keeping.
    """

    name = "ttl"

    def __init__(self, num_blocks: int, ttl_s: Callable[[int], float]) -> None:
        super().__init__(num_blocks)
        self._ttl_s = ttl_s
        self._ttls = [0.0] * num_blocks
        self._heap: list[tuple[float, int, int]] = []
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def use(self, session: Hashable, blocks: Sequence[int], now_s: float) -> None:
        ttl_s = self._ttl_s(len(blocks))
        for block in blocks:
            self._ttls[block] = ttl_s

    def free(self, blocks: Iterable[int], now_s: float, *, blank: bool = False) -> None:
        table = self.table
        for block in blocks:
            table.freed(block, now_s)
            self._size += 1
            expires_s = now_s + self._ttls[block]
            heapq.heappush(self._heap, (expires_s, table.order[block], block))

    def remove(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            self._unfree(block)
            self._size -= 1

    def evict(self, count: int, now_s: float) -> list[int]:
        table = self.table
        victims: list[int] = []
        while self._heap and len(victims) < count:
            _, order, block = heapq.heappop(self._heap)
            if table.evictable[block] and table.order[block] == order:
                table.evictable[block] = 0
                victims.append(block)
        self._size -= len(victims)
        return victims
