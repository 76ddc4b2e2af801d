"""The GPU's block pool as the tier's scheduler half sees it, and the references it has there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, Protocol

from liveserve.kvtier.tier import Hash


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


class HeldBlocks:
    """References to blocks of ``gpu``, and a count of them that can be compared.

    Attributes:
        counts: references by block.
    """

    def __init__(self, gpu: GpuBlocks[Any]) -> None:
        self._gpu = gpu
        self.counts: Counter[int] = Counter()

    def take(self, count: int) -> list[int]:
        """`GpuBlocks.take`."""
        blocks = self._gpu.take(count)
        self.counts.update(blocks)
        return blocks

    def hold(self, blocks: Sequence[int]) -> None:
        """`GpuBlocks.hold`."""
        self._gpu.hold(blocks)
        self.counts.update(blocks)

    def release(self, blocks: Sequence[int], *, soonest: bool = False) -> None:
        """`GpuBlocks.release`."""
        counts = self.counts
        for block in blocks:
            counts[block] -= 1
            if not counts[block]:
                del counts[block]
        if blocks:
            self._gpu.release(blocks, soonest=soonest)
