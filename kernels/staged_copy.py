"""Copies through a staging buffer on the GPU: the copy engine moves whole slots over the link, in
pieces far above its cliff, and a kernel gathers or scatters inside the GPU's memory.

Slots are packed, so a slot, and a run of neighbouring slots, is one piece. The two halves of the
buffer are used in turn: while one crosses the link, the other is gathered or scattered.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from liveserve.kernels.base import CopyMethod, CopyRequest, Direction
from liveserve.kernels.batch_copy import BatchCopy, coalesce
from liveserve.kernels.gpu import on_gpu
from liveserve.kernels.layout import PagedCache
from liveserve.kernels.triton_copy import TritonCopy

DEFAULT_HALF_BYTES = 8 * 1024 * 1024


class StagedCopy(CopyMethod):
    """See ``CopyMethod``. Holds a staging buffer and a stream for each stream that it is given."""

    name = "staged"
    needs = (
        "staged copies need the cache on a GPU, the pool pinned, and fragments that are multiples "
        "of 16 bytes"
    )

    def __init__(
        self,
        half_bytes: int = DEFAULT_HALF_BYTES,
        kernel: TritonCopy | None = None,
        engine: BatchCopy | None = None,
        make_stream: Callable[[torch.device], Any] | None = None,
    ) -> None:
        """
        Args:
            half_bytes: size of a half of the buffer; it grows to hold a slot.
            kernel: gathers and scatters.
            engine: crosses the link.
            make_stream: makes the streams for the link.

        Raises:
            ValueError: ``half_bytes`` is not positive.
        """
        if half_bytes <= 0:
            raise ValueError(f"half_bytes must be positive, got {half_bytes}")
        self.half_bytes = half_bytes
        self._kernel = kernel or TritonCopy()
        self._engine = engine or BatchCopy()
        self._make_stream = make_stream or _new_stream
        self._stages: dict[tuple[str, int], tuple[Any, torch.Tensor]] = {}

    def available(self) -> bool:
        return self._kernel.available() and self._engine.available()

    def supports(self, cache: PagedCache, pool: torch.Tensor) -> bool:
        """The cache on a GPU, the pool pinned host memory; slots without padding, which would be
        overwritten with whatever the buffer holds there."""
        if cache.slot_bytes != cache.block_bytes:
            return False
        if cache.device == "cpu":
            return self._kernel.supports(cache, pool) and self._engine.supports(cache, pool)
        return on_gpu(cache, pool) and not pool.is_cuda

    def run(
        self,
        request: CopyRequest,
        cache: PagedCache,
        pool: torch.Tensor,
        layers: range | None,
        stream: torch.cuda.Stream | None,
    ) -> None:
        direction = request.direction
        chosen = cache.check_layers(layers)
        begin, end = cache.layer_offsets[chosen.start], cache.layer_offsets[chosen.stop]
        # By slot, so that neighbours in the pool are neighbours in the buffer.
        order = np.argsort(request.slot_ids, kind="stable")
        blocks, slots = request.block_ids[order], request.slot_ids[order]
        device = torch.device(cache.device)
        compute = stream or _current_stream(device)
        link, halves = self._stage(device, compute, cache.slot_bytes)
        first, second = (link, compute) if direction is Direction.LOAD else (compute, link)

        # What the stream did before comes before what happens on the link.
        link.wait_event(compute.record_event())
        drained: list[Any] = [None, None]
        rows_per_half = halves.shape[1]
        for turn, start in enumerate(range(0, len(blocks), rows_per_half)):
            some = slice(start, start + rows_per_half)
            half = halves[turn % 2]
            rows = np.arange(len(blocks[some]), dtype=np.int64)
            in_pool = request.pool_base + slots[some] * request.slot_stride + begin
            in_half = half.data_ptr() + rows * half.stride(0) + begin
            nbytes = np.full(len(rows), end - begin, dtype=np.int64)
            if turn >= 2:
                first.wait_event(drained[turn % 2])
            if direction is Direction.LOAD:
                self._engine.submit(coalesce(in_pool, in_half, nbytes), direction, device, link)
            else:
                self._kernel.copy(direction, cache, half, blocks[some], rows, layers, compute)
            second.wait_event(first.record_event())
            if direction is Direction.LOAD:
                self._kernel.copy(direction, cache, half, blocks[some], rows, layers, compute)
            else:
                self._engine.submit(coalesce(in_half, in_pool, nbytes), direction, device, link)
            drained[turn % 2] = second.record_event()
        # And both before what the stream does next.
        compute.wait_event(link.record_event())

    def _stage(
        self, device: torch.device, compute: Any, slot_bytes: int
    ) -> tuple[Any, torch.Tensor]:
        """The link's stream, and the buffer as uint8 ``[2, rows, slot_bytes]``."""
        key = str(device), getattr(compute, "cuda_stream", id(compute))
        half_bytes = max(self.half_bytes, slot_bytes)
        link, buffer = self._stages.get(key, (None, None))
        if link is None:
            link = self._make_stream(device)
        if buffer is None or buffer.shape[1] < half_bytes:
            if buffer is not None and device.type == "cuda":
                # Not handed to others before the copies under way are through with it.
                buffer.record_stream(compute)
                buffer.record_stream(link)
            buffer = torch.empty((2, half_bytes), dtype=torch.uint8, device=device)
            self._stages[key] = link, buffer
        rows = buffer.shape[1] // slot_bytes
        return link, buffer[:, : rows * slot_bytes].unflatten(1, (rows, slot_bytes))


class _Immediate:
    """A stream on a CPU: everything is done when a call returns."""

    def record_event(self) -> None:
        return None

    def wait_event(self, event: None) -> None:
        return None


_IMMEDIATE = _Immediate()


def _current_stream(device: torch.device) -> Any:
    return torch.cuda.current_stream(device) if device.type == "cuda" else _IMMEDIATE


def _new_stream(device: torch.device) -> Any:
    return torch.cuda.Stream(device) if device.type == "cuda" else _IMMEDIATE
