"""What every way of copying blocks has in common: the protocol, and the checks before a copy.

A copy moves whole blocks between a paged cache and slots of a pool. Block ``block_ids[i]`` pairs
with slot ``slot_ids[i]``. The pool is a uint8 tensor ``[num_slots, >= slot_bytes]`` whose rows are
contiguous: in host memory (pinned where the cache is on a GPU), or on the GPU as a staging buffer.
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from liveserve.kernels.layout import FragmentTable, Int64Array, PagedCache

if TYPE_CHECKING:
    import torch

Ids: TypeAlias = "Sequence[int] | Int64Array | torch.Tensor"


class Direction(enum.Enum):
    """LOAD: pool slot → cache block. STORE: cache block → pool slot."""

    LOAD = "load"
    STORE = "store"


class CopyMethod(ABC):
    """One way to copy. Stateless but for caches: one object serves many caches and streams.

    Attributes:
        name: short, as in tables and results.
        needs: what ``supports`` asks for, as the error says it.
    """

    name: str
    needs: str

    @abstractmethod
    def available(self) -> bool:
        """Whether this machine and its packages can run the method at all."""

    @abstractmethod
    def supports(self, cache: PagedCache, pool: torch.Tensor) -> bool:
        """Whether it can copy between these two (devices, alignment)."""

    @abstractmethod
    def run(
        self,
        request: CopyRequest,
        cache: PagedCache,
        pool: torch.Tensor,
        layers: range | None,
        stream: torch.cuda.Stream | None,
    ) -> None:
        """Copies at least one byte between a pair that ``supports`` accepts, on ``stream``."""

    def copy(
        self,
        direction: Direction,
        cache: PagedCache,
        pool: torch.Tensor,
        block_ids: Ids,
        slot_ids: Ids,
        layers: range | None = None,
        stream: torch.cuda.Stream | None = None,
    ) -> None:
        """Copies blocks, in the order of ``stream`` (None: the current one).

        On a GPU this only enqueues: cache and pool must live, and neither side may be touched
        from outside the stream's order, until an event recorded on it has passed. On a CPU the
        copy is done on return. The ids are free to change on return.

        Args:
            direction: which side is written.
            cache: the paged cache.
            pool: uint8 ``[num_slots, >= cache.slot_bytes]``.
            block_ids: int64 ``[n]`` on the host.
            slot_ids: int64 ``[n]`` on the host.
            layers: only these layers; all where None.
            stream: ignored on a CPU.

        Raises:
            ValueError: ids out of range, of different lengths, or (on the written side) given
                twice; a pool or layers that do not fit the cache; a pair that ``supports``
                refuses. Nothing has been copied then.
            RuntimeError: the driver refused the copy, or the method is not available.
        """
        request = check_copy(direction, cache, pool, block_ids, slot_ids, layers)
        if not self.supports(cache, pool):
            raise ValueError(self.needs)
        if request.nbytes:
            self.run(request, cache, pool, layers, stream)


@dataclass(frozen=True, slots=True)
class CopyRequest:
    """A checked copy, as numbers: everything an implementation needs to compute addresses."""

    direction: Direction
    fragments: FragmentTable
    block_ids: Int64Array
    slot_ids: Int64Array
    pool_base: int
    slot_stride: int

    @property
    def nbytes(self) -> int:
        return len(self.block_ids) * self.fragments.bytes_per_block

    @property
    def alignment_bytes(self) -> int:
        """The largest power of two up to 16 that divides every address of the copy."""
        bits = self.fragments.alignment_bytes | self.pool_base | self.slot_stride
        return bits & -bits

    def addresses(self) -> tuple[Int64Array, Int64Array, Int64Array]:
        """Source, destination and length in bytes of every piece, int64
        ``[n * num_fragments]``, block by block in slot order."""
        table = self.fragments
        cache = table.base + self.block_ids[:, None] * table.block_stride
        pool = self.pool_base + self.slot_ids[:, None] * self.slot_stride + table.slot_offset
        nbytes = np.broadcast_to(table.nbytes, cache.shape)
        source, target = (pool, cache) if self.direction is Direction.LOAD else (cache, pool)
        return source.ravel(), target.ravel(), nbytes.ravel()


def check_copy(
    direction: Direction,
    cache: PagedCache,
    pool: torch.Tensor,
    block_ids: Ids,
    slot_ids: Ids,
    layers: range | None = None,
) -> CopyRequest:
    """Checks the arguments of ``CopyMethod.copy``.

    Raises:
        ValueError: as ``CopyMethod.copy``.
    """
    check_pool(cache, pool)
    blocks = as_ids("block_ids", block_ids, cache.num_blocks)
    slots = as_ids("slot_ids", slot_ids, pool.shape[0])
    if len(blocks) != len(slots):
        raise ValueError(f"block_ids and slot_ids must pair up, got {len(blocks)} and {len(slots)}")
    name, written = ("block_ids", blocks) if direction is Direction.LOAD else ("slot_ids", slots)
    if len(np.unique(written)) != len(written):
        values, counts = np.unique(written, return_counts=True)
        twice = values[counts > 1][:3].tolist()
        raise ValueError(f"{name} must not repeat in a {direction.value}, but {twice} do")
    return CopyRequest(
        direction=direction,
        fragments=cache.fragments(layers),
        block_ids=blocks,
        slot_ids=slots,
        pool_base=pool.data_ptr(),
        slot_stride=pool.stride(0) if pool.shape[0] > 1 else pool.shape[1],
    )


def check_pool(cache: PagedCache, pool: torch.Tensor) -> None:
    """Raises ValueError unless ``pool`` can hold slots of ``cache``."""
    if pool.dim() != 2 or str(pool.dtype) != "torch.uint8":
        raise ValueError(
            f"pool must be a uint8 tensor [num_slots, slot_bytes], got {pool.dtype} "
            f"{tuple(pool.shape)}"
        )
    if pool.shape[1] < cache.slot_bytes:
        raise ValueError(
            f"pool has slots of {pool.shape[1]} bytes; a block of this cache needs "
            f"{cache.slot_bytes}"
        )
    if pool.stride(1) != 1 or (pool.shape[0] > 1 and pool.stride(0) < pool.shape[1]):
        raise ValueError(f"pool rows must be contiguous and apart, strides are {pool.stride()}")
    if pool.device.type != "cpu" and str(pool.device) != cache.device:
        raise ValueError(f"pool is on {pool.device}, the cache on {cache.device}")


def as_ids(name: str, ids: Ids, limit: int) -> Int64Array:
    """``ids`` as int64 ``[n]``, each in ``0 <= id < limit``.

    Raises:
        ValueError: not one-dimensional, not integers, on a device, or out of range.
    """
    if getattr(getattr(ids, "device", None), "type", "cpu") not in ("cpu",):
        raise ValueError(f"{name} must be on the host")
    array = np.asarray(ids)
    if array.size == 0:
        array = array.astype(np.int64).reshape(-1)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise ValueError(
            f"{name} must be one-dimensional integers, got {array.dtype} {array.ndim}-D"
        )
    array = array.astype(np.int64)
    if len(array) and not (array.min() >= 0 and array.max() < limit):
        bad = array[(array < 0) | (array >= limit)][:3].tolist()
        raise ValueError(f"{name} must lie in 0..{limit - 1}, got {bad}")
    return array
