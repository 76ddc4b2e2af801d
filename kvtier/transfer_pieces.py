"""How a transfer is cut into pieces, and the checksums of what it leaves in slots."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence

import torch

from liveserve.kernels.layout import PagedCache
from liveserve.kvtier.transfer_base import ChecksumError, Piece, Transfer


def bytes_of(cache: PagedCache, layers: range) -> int:
    """Bytes that one block's ``layers`` take in a slot."""
    offsets = cache.layer_offsets
    return offsets[layers.stop] - offsets[layers.start] if len(layers) else 0


def cut(
    cache: PagedCache, transfer: Transfer, max_bytes: int, *, layerwise: bool
) -> Iterator[Piece]:
    """Pieces of at most ``max_bytes``, but no smaller than one layer of one block.

    Block by block with all layers together, or, if ``layerwise``, the first layers of all blocks
    before the next.
    """
    count, layers = len(transfer.block_ids), transfer.layers
    if not count or not len(layers):
        return
    if layerwise:
        for part in _layer_groups(cache, layers, max_bytes // count):
            step = max(1, max_bytes // bytes_of(cache, part))
            for start in range(0, count, step):
                complete = part.stop if start + step >= count else part.start
                yield _piece(cache, transfer, slice(start, start + step), part, complete)
        return
    step = max(1, max_bytes // bytes_of(cache, layers))
    for start in range(0, count, step):
        for part in _layer_groups(cache, layers, max_bytes // step):
            last = start + step >= count and part.stop == layers.stop
            complete = layers.stop if last else layers.start
            yield _piece(cache, transfer, slice(start, start + step), part, complete)


def _layer_groups(cache: PagedCache, layers: range, max_bytes: int) -> Iterator[range]:
    """Neighbouring layers that take at most ``max_bytes`` of a slot; at least one layer each."""
    start = layers.start
    for layer in layers:
        if layer > start and bytes_of(cache, range(start, layer + 1)) > max_bytes:
            yield range(start, layer)
            start = layer
    yield range(start, layers.stop)


def _piece(
    cache: PagedCache, transfer: Transfer, which: slice, layers: range, complete: int
) -> Piece:
    slot_ids = transfer.slot_ids[which]
    return Piece(
        transfer=transfer,
        block_ids=transfer.block_ids[which],
        slot_ids=slot_ids,
        layers=layers,
        num_bytes=len(slot_ids) * bytes_of(cache, layers),
        layers_after=complete - transfer.layers.start,
        opens=layers.start == transfer.layers.start,
        closes=layers.stop == transfer.layers.stop,
    )


class SlotChecksums:
    """CRC-32 of the slots that were stored.

    Args:
        pool: uint8 ``[num_slots, slot_bytes]`` in host memory.
    """

    def __init__(self, pool: torch.Tensor) -> None:
        self._rows = pool.numpy()
        self._sums: dict[int, int] = {}

    def record(self, slot_ids: Sequence[int]) -> None:
        for slot in slot_ids:
            self._sums[slot] = zlib.crc32(self._rows[slot])

    def check(self, slot_ids: Sequence[int]) -> ChecksumError | None:
        """What is wrong, if anything. A slot that was never stored passes."""
        for slot in slot_ids:
            expected = self._sums.get(slot)
            if expected is not None and zlib.crc32(self._rows[slot]) != expected:
                return ChecksumError(slot)
        return None
