"""The link of a GPU: a stream per direction, and a thread that feeds it and waits for its events.

The threads sleep in ``Event.synchronize`` of events that do not spin, which gives up the GIL; a
device is synchronized only after a failure and at the end. When a copy is enqueued all that it
depends on has happened (see transfer.py), so the driver may read its source in any order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeAlias

import torch
from torch.cuda import nvtx

from liveserve.kernels.base import CopyMethod, Direction
from liveserve.kernels.layout import PagedCache
from liveserve.kvtier.transfer_base import Piece, Source, ThreadedLink

_HAS_NVTX = torch.version.cuda is not None
# The method for a copy of so many blocks, these layers. Called from both lanes' threads.
Choose: TypeAlias = Callable[[Direction, int, range], CopyMethod]


class CudaLink(ThreadedLink):
    """Between a GPU's paged cache and pinned host memory.

    Args:
        cache: the paged cache, on one GPU.
        pool: uint8 ``[num_slots, >= cache.slot_bytes]``, pinned.
        choose: picks the method for every piece.
        gbps: calibrated rate of one direction, 1e9 bytes/s.

    Raises:
        ValueError: the pool is not pinned, or ``gbps`` is not positive.
    """

    def __init__(
        self,
        cache: PagedCache,
        pool: torch.Tensor,
        *,
        choose: Choose,
        gbps: float,
    ) -> None:
        super().__init__()
        if not gbps > 0:
            raise ValueError(f"gbps must be positive, got {gbps}")
        if not pool.is_pinned():
            raise ValueError("pool must be pinned: make it with HostPool(..., device=cache.device)")
        self.cache = cache
        self.pool = pool
        self.gbps = gbps
        self._choose = choose
        self._device = torch.device(cache.device)
        self._streams = {d: torch.cuda.Stream(self._device) for d in Direction}

    def order(self, fence: torch.cuda.Event, stream: torch.cuda.Stream | None) -> None:
        (stream or torch.cuda.current_stream(self._device)).wait_event(fence)

    def lane(self, direction: Direction, source: Source) -> None:
        torch.cuda.set_device(self._device)
        stream = self._streams[direction]
        under_way: deque[tuple[Piece, torch.cuda.Event]] = deque()
        try:
            while True:
                piece = source.take(direction, block=not under_way)
                if piece is not None:
                    self._issue(direction, source, piece, stream, under_way)
                elif under_way:
                    piece, event = under_way.popleft()
                    source.finish(piece, _error_of(event.synchronize))
                else:
                    return
        finally:
            _error_of(self._synchronize)

    def _synchronize(self) -> None:
        torch.cuda.synchronize(self._device)

    def _issue(
        self,
        direction: Direction,
        source: Source,
        piece: Piece,
        stream: torch.cuda.Stream,
        under_way: deque[tuple[Piece, Any]],
    ) -> None:
        ids = piece.block_ids, piece.slot_ids
        try:
            method = self._choose(direction, len(piece.block_ids), piece.layers)
            with _nvtx(f"liveserve {piece.transfer.kind.name.lower()}"):
                method.copy(direction, self.cache, self.pool, *ids, piece.layers, stream)
            event = torch.cuda.Event(blocking=True)
            event.record(stream)
        except Exception as exc:
            # Part of it may be enqueued, on streams of the method's own too. This once the device
            # is waited for: whoever is told of the failure may use the blocks for something else.
            while under_way:
                earlier, event = under_way.popleft()
                source.finish(earlier, _error_of(event.synchronize))
            _error_of(self._synchronize)
            source.finish(piece, exc)
            return
        under_way.append((piece, event))
        source.issued(piece, event)


def _error_of(call: Callable[[], None]) -> Exception | None:
    try:
        call()
    except Exception as exc:
        return exc
    return None


def _nvtx(name: str) -> AbstractContextManager[object]:
    """A range for profilers; costs a microsecond where none listens."""
    return nvtx.range(name) if _HAS_NVTX else nullcontext()
