"""Copies by the copy engines: no SM is taken from decoding, but small pieces are slow."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch

from liveserve.kernels.base import CopyMethod, CopyRequest, Direction
from liveserve.kernels.cuda_driver import (
    MAX_PITCH_BYTES,
    SRC_ACCESS_ORDER_ANY,
    SRC_ACCESS_ORDER_STREAM,
    cuda_driver,
)
from liveserve.kernels.gpu import on_gpu, on_stream
from liveserve.kernels.layout import Int64Array, PagedCache

Pieces = tuple[Int64Array, Int64Array, Int64Array]


class CopyDriver(Protocol):
    """What is needed of ``CudaDriver``."""

    @property
    def has_batch(self) -> bool: ...

    def memcpy_batch(
        self,
        targets: Int64Array,
        sources: Int64Array,
        nbytes: Int64Array,
        stream: int,
        src_access_order: int = ...,
    ) -> None: ...

    def memcpy_2d(
        self,
        target: int,
        target_pitch: int,
        source: int,
        source_pitch: int,
        width_bytes: int,
        height: int,
        stream: int,
    ) -> None: ...


class BatchCopy(CopyMethod):
    """See ``CopyMethod``. One ``cuMemcpyBatchAsync`` for a copy, or (``batched=False``) a
    ``cuMemcpy2DAsync`` for each run of evenly spaced pieces.

    Sources are read in stream order (``srcAccessOrder`` STREAM). ANY lets the driver read a source
    before the stream's earlier work is done: it corrupted stored KV in vLLM #46278. It is never
    used for stores, and for loads only with ``settled_loads``.
    """

    needs = "the copy engine needs the cache on a GPU, the pool pinned or there"

    def __init__(
        self,
        batched: bool = True,
        settled_loads: bool = False,
        driver: CopyDriver | None = None,
    ) -> None:
        """
        Args:
            batched: False for the loop.
            settled_loads: the caller promises that before it calls ``copy`` for a load, the host
                has seen (by an event) the end of every store to those slots.
            driver: in place of the CUDA driver.
        """
        self.name = "batch" if batched else "memcpy"
        self._batched = batched
        self._settled_loads = settled_loads
        self._injected = driver is not None
        self._driver = driver

    def available(self) -> bool:
        driver = self._find_driver()
        if driver is None or (self._batched and not driver.has_batch):
            return False
        return self._injected or torch.cuda.is_available()

    def supports(self, cache: PagedCache, pool: torch.Tensor) -> bool:
        """The cache on a GPU; the pool there too, or pinned."""
        if self._injected:
            return True
        return on_gpu(cache, pool)

    def run(
        self,
        request: CopyRequest,
        cache: PagedCache,
        pool: torch.Tensor,
        layers: range | None,
        stream: torch.cuda.Stream | None,
    ) -> None:
        self.submit(pieces_of(request), request.direction, torch.device(cache.device), stream)

    def submit(
        self,
        pieces: Pieces,
        direction: Direction,
        device: torch.device,
        stream: torch.cuda.Stream | None,
    ) -> None:
        """Enqueues copies ``(sources, targets, nbytes)``.

        Raises:
            RuntimeError: the driver refused, or there is none.
        """
        driver = self._find_driver()
        if driver is None:
            raise RuntimeError("there is no CUDA driver on this machine")
        if len(pieces[0]) == 0:
            return
        with on_stream(device, stream):
            handle = torch.cuda.current_stream().cuda_stream if device.type == "cuda" else 0
            self._enqueue(driver, pieces, direction, handle)

    def _enqueue(
        self, driver: CopyDriver, pieces: Pieces, direction: Direction, handle: int
    ) -> None:
        # The batch call refuses the default stream, whose handle is 0.
        if self._batched and driver.has_batch and (handle or self._injected):
            sources, targets, nbytes = pieces
            settled = self._settled_loads and direction is Direction.LOAD
            order = SRC_ACCESS_ORDER_ANY if settled else SRC_ACCESS_ORDER_STREAM
            driver.memcpy_batch(targets, sources, nbytes, handle, order)
            return
        for source, source_pitch, target, target_pitch, width, height in runs_of(pieces):
            driver.memcpy_2d(target, target_pitch, source, source_pitch, width, height, handle)

    def _find_driver(self) -> CopyDriver | None:
        if self._driver is None:
            self._driver = cuda_driver()
        return self._driver


def pieces_of(request: CopyRequest) -> Pieces:
    """``(sources, targets, nbytes)`` with neighbours merged, ordered by piece, then by block, so
    that consecutive blocks stand side by side."""
    order = np.argsort(request.block_ids, kind="stable")
    shape = (len(request.block_ids), len(request.fragments))
    columns = (column.reshape(shape)[order].T.ravel() for column in request.addresses())
    return coalesce(*columns)


def coalesce(sources: Int64Array, targets: Int64Array, nbytes: Int64Array) -> Pieces:
    """Merges pieces whose successor continues them on both sides."""
    if len(nbytes) == 0:
        return sources, targets, nbytes
    goes_on = (sources[1:] == sources[:-1] + nbytes[:-1]) & (
        targets[1:] == targets[:-1] + nbytes[:-1]
    )
    first = np.flatnonzero(np.concatenate([[True], ~goes_on]))
    return sources[first], targets[first], np.add.reduceat(nbytes, first)


def runs_of(pieces: Pieces) -> list[tuple[int, int, int, int, int, int]]:
    """Pieces as ``(source, source pitch, target, target pitch, width, height)``: maximal runs of
    equal lengths at even distances that a 2-D copy can express."""
    sources, targets, nbytes = (column.tolist() for column in pieces)
    runs = []
    start = 0
    while start < len(nbytes):
        width = nbytes[start]
        end = start + 1
        source_pitch = target_pitch = width
        if end < len(nbytes):
            steps = sources[end] - sources[start], targets[end] - targets[start]
            if all(width <= step <= MAX_PITCH_BYTES for step in steps):
                source_pitch, target_pitch = steps
                while (
                    end < len(nbytes)
                    and nbytes[end] == width
                    and sources[end] - sources[end - 1] == source_pitch
                    and targets[end] - targets[end - 1] == target_pitch
                ):
                    end += 1
        if end == start + 1:
            source_pitch = target_pitch = width
        runs.append(
            (sources[start], source_pitch, targets[start], target_pitch, width, end - start)
        )
        start = end
    return runs
