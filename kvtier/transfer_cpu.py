"""The link of a machine without a GPU: copies on a thread per direction, as slow as PCIe if asked.

Pacing is a schedule: a piece is due when the bytes before it, then its own, have passed at the
link's rate. It is kept in link time, not from one wake-up to the next, so ten transfers take
what one of their total size takes, however late a sleep returns.
"""

from __future__ import annotations

import time
from typing import Any

import torch

from liveserve.kernels.base import CopyMethod, Direction
from liveserve.kernels.layout import PagedCache
from liveserve.kernels.reference import ReferenceCopy
from liveserve.kvtier.transfer_base import Source, ThreadedLink

# What a core copies, about; only piece sizes and estimates follow it.
UNPACED_GBPS = 4.0


class CpuLink(ThreadedLink):
    """Host memory to host memory.

    Args:
        cache: the paged cache, in host memory.
        pool: uint8 ``[num_slots, >= cache.slot_bytes]``.
        link_gbps: let each direction take as long as a link of this rate, in 1e9 bytes/s; None:
            as fast as the machine copies.
        method: how to copy.

    Raises:
        ValueError: ``link_gbps`` is not positive, or the method cannot copy between the two.
    """

    def __init__(
        self,
        cache: PagedCache,
        pool: torch.Tensor,
        *,
        link_gbps: float | None = None,
        method: CopyMethod | None = None,
    ) -> None:
        super().__init__()
        if link_gbps is not None and not link_gbps > 0:
            raise ValueError(f"--link-gbps must be positive, got {link_gbps}")
        self.cache = cache
        self.pool = pool
        self.link_gbps = link_gbps
        self.method = method if method is not None else ReferenceCopy()
        if not self.method.supports(cache, pool):
            raise ValueError(f"{self.method.name} cannot copy between this cache and this pool")

    @property
    def gbps(self) -> float:
        return self.link_gbps if self.link_gbps is not None else UNPACED_GBPS

    def order(self, fence: Any, stream: Any) -> None:
        """Nothing to do: there are no fences, a piece has arrived when it is finished."""

    def lane(self, direction: Direction, source: Source) -> None:
        due_s = 0.0
        while (piece := source.take(direction, block=True)) is not None:
            error = None
            try:
                self.method.copy(
                    direction, self.cache, self.pool, piece.block_ids, piece.slot_ids, piece.layers
                )
            except Exception as exc:
                error = exc
            if self.link_gbps is not None:
                due_s = max(due_s, piece.transfer.eligible_s or 0.0)
                due_s += piece.num_bytes / (self.link_gbps * 1e9)
                left_s = due_s - time.monotonic()
                if left_s > 0:
                    time.sleep(left_s)
            source.finish(piece, error)
