"""What a policy knows of every block, beside the host's own block objects: arrays by block id."""

from __future__ import annotations

from typing import Any


class BlockTable:
    """Policy metadata of block ids 0 … ``num_blocks`` - 1 (GPU block ids, or slots of a pool).

    Attributes:
        evictable: 1 where nobody uses the block, so that it may be chosen.
        group: who will read the block again (`index.Group`), or None: nothing is known of it.
        depth: place of the block in its session's history, 0 first.
        last_use_s: when it last became evictable.
        order: counts up each time a block becomes evictable: LRU order, whatever else is known.
    """

    __slots__ = ("_count", "depth", "evictable", "group", "last_use_s", "num_blocks", "order")

    def __init__(self, num_blocks: int) -> None:
        if isinstance(num_blocks, bool) or not isinstance(num_blocks, int) or num_blocks < 1:
            raise ValueError(f"num_blocks must be a positive integer, got {num_blocks!r}")
        self.num_blocks = num_blocks
        self.evictable = bytearray(num_blocks)
        self.group: list[Any] = [None] * num_blocks
        self.depth = [0] * num_blocks
        self.last_use_s = [0.0] * num_blocks
        self.order = [0] * num_blocks
        self._count = 0

    def freed(self, block: int, now_s: float) -> None:
        """``block`` becomes evictable.

        Raises:
            ValueError: it is evictable already, or no block of this table.
        """
        if not 0 <= block < self.num_blocks:
            raise ValueError(f"block {block} is not one of 0 … {self.num_blocks - 1}")
        if self.evictable[block]:
            raise ValueError(f"block {block} is freed twice")
        self._count += 1
        self.evictable[block] = 1
        self.last_use_s[block] = now_s
        self.order[block] = self._count

    def by_recency(self) -> list[int]:
        """All evictable blocks, least recently used first. O(n log n): for falling back."""
        blocks = [block for block, is_free in enumerate(self.evictable) if is_free]
        blocks.sort(key=self.order.__getitem__)
        return blocks
