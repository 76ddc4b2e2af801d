"""What the methods for GPUs share: devices, streams, and the descriptors that kernels read."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from weakref import WeakKeyDictionary

import numpy as np
import torch

from liveserve.kernels.base import CopyRequest
from liveserve.kernels.layout import PagedCache


class DeviceTables:
    """Fragment tables, uploaded once for each cache and range of layers."""

    def __init__(self) -> None:
        self._tables: WeakKeyDictionary[PagedCache, dict[range, torch.Tensor]] = WeakKeyDictionary()

    def fragments(self, cache: PagedCache, layers: range | None) -> torch.Tensor:
        """int64 ``[4, num_fragments]``: base, block stride, bytes, offset in the slot."""
        chosen = cache.check_layers(layers)
        tables = self._tables.setdefault(cache, {})
        if chosen not in tables:
            pieces = cache.fragments(chosen)
            rows = [pieces.base, pieces.block_stride, pieces.nbytes, pieces.slot_offset]
            # Blocking, so that the table is there for whatever stream comes first.
            tables[chosen] = torch.from_numpy(np.stack(rows)).to(cache.device)
        return tables[chosen]


def ids_on_device(request: CopyRequest, device: torch.device) -> torch.Tensor:
    """Block and slot ids, int64 ``[2, n]``, there in the order of the current stream."""
    ids = torch.from_numpy(np.stack([request.block_ids, request.slot_ids]))
    if device.type == "cpu":
        return ids
    # Pinned, so the host does not wait; torch keeps the buffer until the stream has read it.
    return ids.pin_memory().to(device, non_blocking=True)


def on_gpu(cache: PagedCache, pool: torch.Tensor) -> bool:
    """Whether a GPU reaches both: the cache is its memory, the pool too or pinned."""
    return cache.device.startswith("cuda") and (pool.is_cuda or pool.is_pinned())


@contextmanager
def on_stream(device: torch.device, stream: torch.cuda.Stream | None) -> Iterator[None]:
    """Makes device and stream current (None: the device's current stream); nothing on a CPU."""
    if device.type != "cuda":
        yield
        return
    with torch.cuda.device(device), torch.cuda.stream(stream):
        yield
