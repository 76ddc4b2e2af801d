"""Which slots of a pool are free: every slot is free or owned, at any time."""

from __future__ import annotations

from collections.abc import Sequence


class SlotAllocator:
    """Free list of ``num_slots`` slots, numbered from 0. Not thread-safe: one owner.

    The slot freed last is handed out first. Fresh slots come in ascending order, so that blocks
    stored together lie together.

    Raises:
        ValueError: ``num_slots`` is not a positive integer.
    """

    def __init__(self, num_slots: int) -> None:
        if not isinstance(num_slots, int) or isinstance(num_slots, bool) or num_slots < 1:
            raise ValueError(f"num_slots must be a positive integer, got {num_slots!r}")
        self.num_slots = num_slots
        self._free = list(range(num_slots - 1, -1, -1))
        self._owned = bytearray(num_slots)

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_owned(self) -> int:
        return self.num_slots - len(self._free)

    def is_owned(self, slot: int) -> bool:
        """Whether ``slot`` was handed out and not freed. Raises ValueError: no such slot."""
        self._check(slot)
        return bool(self._owned[slot])

    def alloc(self, count: int) -> list[int] | None:
        """``count`` slots, or None (and nothing taken) if fewer are free.

        Raises:
            ValueError: ``count`` is negative.
        """
        if count < 0:
            raise ValueError(f"count must not be negative, got {count}")
        if count > len(self._free):
            return None
        if count == 0:
            return []
        taken = self._free[: -count - 1 : -1]
        del self._free[-count:]
        for slot in taken:
            self._owned[slot] = 1
        return taken

    def free(self, slots: Sequence[int]) -> None:
        """Give ``slots`` back. All of them or, on an error, none.

        Raises:
            ValueError: no such slot, a slot that is free already, or one named twice.
        """
        for slot in slots:
            self._check(slot)
            if not self._owned[slot]:
                raise ValueError(f"slot {slot} is free already: freed twice?")
        if len(set(slots)) != len(slots):
            raise ValueError(f"slots must not be named twice: {list(slots)[:8]}")
        for slot in slots:
            self._owned[slot] = 0
        self._free.extend(reversed(slots))

    def _check(self, slot: int) -> None:
        if not 0 <= slot < self.num_slots:
            raise ValueError(f"slot {slot} is not in 0..{self.num_slots - 1}")
