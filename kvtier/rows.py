"""Companion rows: what else than KV a block needs to be used again, kept by DRAM slot.

A stage that feeds another one has rows per token that are not KV (in Qwen3-Omni: hidden states of
the thinker that condition the talker). They lie in ordinary memory: they come from a mirror in host
memory and go back there, no GPU copies them.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import Protocol

import torch

from liveserve.kvtier import host_memory


class RowsError(RuntimeError):
    """Rows of a block cannot be saved or restored. The job that they belong to fails as a whole."""


class Companion(Protocol):
    """The rows of one stage's blocks. Slots are those of the block's KV in the DRAM pool.

    Whoever calls holds the blocks, so that nobody else gets them meanwhile.
    """

    def save(self, block_ids: Sequence[int], slot_ids: Sequence[int]) -> None:
        """Copy the rows of ``block_ids[i]`` to ``slot_ids[i]``.

        Every token of the blocks was computed in an earlier step.

        Raises:
            RowsError: some row is absent or not ready; the slots hold no rows then.
        """

    def restore(self, slot_ids: Sequence[int], block_ids: Sequence[int]) -> None:
        """Copy the rows of ``slot_ids[i]`` to ``block_ids[i]``; when it returns they can be read.

        Raises:
            RowsError: a slot holds no rows, or not those the stage needs; the blocks must not be
                published then.
        """


class RowStore:
    """Rows of up to ``num_slots`` blocks. One owner: not thread-safe.

    A key (the host's name of a tensor) is opened when rows of it are first put: how wide rows are
    is known only then. From then on every slot must have all keys.

    Args:
        num_slots: slots of the DRAM pool.
        block_size: tokens of a block, the rows of one key.
        max_bytes: rows of slots beyond it are refused. None: every slot may have rows.
        checksums: keep the CRC-32 of what is put and check it when it is taken.

    Raises:
        ValueError: a size that is not positive.
    """

    def __init__(
        self,
        num_slots: int,
        block_size: int,
        *,
        max_bytes: int | None = None,
        checksums: bool = False,
    ) -> None:
        for name, value in (("num_slots", num_slots), ("block_size", block_size)):
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{name} must be a positive integer, got {value!r}")
        if max_bytes is not None and max_bytes < 1:
            raise ValueError(f"max_bytes must be positive, got {max_bytes!r}")
        self.num_slots = num_slots
        self.block_size = block_size
        self.usable_slots = num_slots
        self._max_bytes = max_bytes
        self._data: dict[str, torch.Tensor] = {}
        self._filled = bytearray(num_slots)
        self._sums: dict[int, int] | None = {} if checksums else None

    @property
    def bytes_per_slot(self) -> int:
        """Bytes of one slot's rows; 0 before a key was opened."""
        return sum(data[0].numel() * data.element_size() for data in self._data.values())

    @property
    def num_bytes(self) -> int:
        """Bytes that the store may come to take (memory is touched as it is used)."""
        return self.bytes_per_slot * self.usable_slots

    def holds(self, slot: int) -> bool:
        return bool(self._filled[slot])

    @torch.inference_mode()
    def put(self, slots: Sequence[int], rows: Mapping[str, torch.Tensor]) -> None:
        """Keep rows.

        Args:
            slots: n different slots; what they held before is forgotten, on an error too.
            rows: per key ``[n * block_size, width]``, any dtype, in host memory, block by block.

        Raises:
            RowsError: keys, widths or dtypes are not those of the slots put before, the store would
                exceed ``max_bytes`` or the machine's memory, or there is no such slot.
        """
        self._check(slots)
        for slot in slots:
            self._filled[slot] = 0
        shapes = {key: (value.dtype, value.shape[-1]) for key, value in rows.items()}
        count = len(slots) * self.block_size
        if not rows or any(value.shape != (count, value.shape[-1]) for value in rows.values()):
            got = {key: tuple(value.shape) for key, value in rows.items()}
            raise RowsError(f"{len(slots)} blocks have {count} rows per key, got {got}")
        if not self._data:
            self._open(shapes)
        if shapes != self._shapes():
            raise RowsError(f"rows changed from {_named(self._shapes())} to {_named(shapes)}")
        for slot in slots:
            if slot >= self.usable_slots:
                raise RowsError(
                    f"slot {slot} is over the memory for rows: {self._max_bytes} bytes hold "
                    f"{self.usable_slots} blocks of {self.bytes_per_slot} bytes"
                )
        index = torch.tensor(slots, dtype=torch.int64)
        for key, value in rows.items():
            data = self._data[key]
            data.index_copy_(0, index, value.view(len(slots), *data.shape[1:]))
        for slot in slots:
            if self._sums is not None:
                self._sums[slot] = self._sum(slot)
            self._filled[slot] = 1

    @torch.inference_mode()
    def take(self, slots: Sequence[int]) -> dict[str, torch.Tensor]:
        """A copy of the rows of ``slots``, shaped as they were put.

        Raises:
            RowsError: a slot holds no rows, or what it holds was damaged.
        """
        self._check(slots)
        for slot in slots:
            if not self._filled[slot]:
                raise RowsError(f"slot {slot} holds no rows")
            if self._sums is not None and self._sums[slot] != self._sum(slot):
                self._filled[slot] = 0
                raise RowsError(f"the rows in slot {slot} are not what was stored there")
        index = torch.tensor(slots, dtype=torch.int64)
        return {key: data.index_select(0, index).flatten(0, 1) for key, data in self._data.items()}

    def _open(self, shapes: Mapping[str, tuple[torch.dtype, int]]) -> None:
        block_bytes = sum(
            self.block_size * width * dtype.itemsize for dtype, width in shapes.values()
        )
        if not block_bytes:
            raise RowsError(f"rows without width: {_named(shapes)}")
        slots = self.num_slots
        if self._max_bytes is not None:
            slots = min(slots, self._max_bytes // block_bytes)
        available = host_memory.available_bytes()
        if slots < 1 or slots * block_bytes > available:
            raise RowsError(
                f"no memory for rows of {block_bytes} bytes a block: {slots} blocks may have them, "
                f"{available} bytes are available"
            )
        self._data = {
            key: torch.empty((slots, self.block_size, width), dtype=dtype)
            for key, (dtype, width) in shapes.items()
        }
        self.usable_slots = slots

    def _shapes(self) -> dict[str, tuple[torch.dtype, int]]:
        return {key: (data.dtype, data.shape[-1]) for key, data in self._data.items()}

    def _sum(self, slot: int) -> int:
        total = 0
        for data in self._data.values():
            total = zlib.crc32(data[slot].view(torch.uint8).numpy(), total)
        return total

    def _check(self, slots: Sequence[int]) -> None:
        if not slots or len(set(slots)) != len(slots):
            raise RowsError(f"slots must be named once each, got {list(slots)[:8]}")
        for slot in slots:
            if not 0 <= slot < self.num_slots:
                raise RowsError(f"slot {slot} is not in 0..{self.num_slots - 1}")


def _named(shapes: Mapping[str, tuple[torch.dtype, int]]) -> str:
    return ", ".join(f"{key} {dtype} x {width}" for key, (dtype, width) in sorted(shapes.items()))
