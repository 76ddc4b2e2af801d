"""The DRAM tier's memory: fixed-size slots, prewarmed, pinned where there is a GPU.

Everything costly happens at construction: pages are touched and pinned then, never while serving
(a lazy pin can deadlock against a collective that spins on the GPU). One range of memory serves
all NUMA nodes: its pages prefer the GPU's node and spill to others only once that is full.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from liveserve.kvtier import host_memory
from liveserve.kvtier.slots import SlotAllocator

GIB = 1 << 30
SETTING = "--kv-dram-gb"
# Share of the available memory that a pool may take: the rest of the process grows too.
_USABLE_FRACTION = 0.95
_CUDA_SUCCESS = 0
_CUDA_OUT_OF_MEMORY = 2


class PoolError(RuntimeError):
    """The pool cannot be had; the message names the setting and what would fit."""


def slots_in(dram_gb: float, slot_bytes: int) -> int:
    """How many slots of ``slot_bytes`` bytes ``--kv-dram-gb`` GiB hold (GiB, as in the host's
    ``--cpu-offload-gb``).

    Raises:
        PoolError: not even one, or ``dram_gb`` is not a positive number.
    """
    if not (isinstance(dram_gb, int | float) and math.isfinite(dram_gb) and dram_gb > 0):
        raise PoolError(f"{SETTING} must be a positive number of GiB, got {dram_gb!r}")
    count = int(dram_gb * GIB) // slot_bytes
    if count < 1:
        least = math.ceil(slot_bytes / GIB * 1e4) / 1e4
        raise PoolError(
            f"{SETTING} {dram_gb:g} holds no block: one takes {slot_bytes} bytes; "
            f"give at least {least:g}"
        )
    return count


class HostPool:
    """``num_slots`` slots of ``slot_bytes`` bytes in host memory, and which of them are free.

    Args:
        num_slots: slots.
        slot_bytes: bytes of a slot.
        device: the device that copies to and from it. A CUDA device: the memory is pinned and near
            the GPU. A CPU: ordinary memory.

    Attributes:
        data: uint8 ``[num_slots, slot_bytes]``, zeros; starts at a page.
        slots: the free list. Where another process decides which slots are owned, it has a
            `SlotAllocator` of its own and this one is not used.
        pinned: whether the GPU copies to and from it directly.
        numa_node: the node that its pages prefer; None: wherever they are touched.
        huge_pages: whether the kernel took the advice to use them.

    Raises:
        ValueError: a size that is not a positive integer.
        PoolError: not enough memory, or it cannot be pinned.
    """

    def __init__(
        self, num_slots: int, slot_bytes: int, *, device: torch.device | str = "cpu"
    ) -> None:
        if not isinstance(slot_bytes, int) or isinstance(slot_bytes, bool) or slot_bytes < 1:
            raise ValueError(f"slot_bytes must be a positive integer, got {slot_bytes!r}")
        self.slots = SlotAllocator(num_slots)
        self.device = torch.device(device)
        self.pinned = False
        size = num_slots * slot_bytes
        usable = int(host_memory.available_bytes() * _USABLE_FRACTION)
        if size > usable:
            raise PoolError(
                f"the KV pool needs {_gib(size)} of host memory and {_gib(usable)} are available: "
                f"{SETTING} may be at most {_floor_gib(usable)}"
            )
        try:
            memory, offset = host_memory.map_anonymous(size)
        except OSError as exc:
            raise PoolError(
                f"the kernel refuses {_gib(size)} for the KV pool ({exc.strerror or exc}): "
                f"lower {SETTING}"
            ) from None
        self.huge_pages = host_memory.advise_huge_pages(memory)
        flat = torch.frombuffer(memory, dtype=torch.uint8, count=size, offset=offset)
        self.numa_node = None
        node = _node_of(self.device)
        if node is not None and host_memory.prefer_node(flat.data_ptr(), size, node):
            self.numa_node = node
        flat.zero_()
        self.data = flat.view(num_slots, slot_bytes)
        if self.device.type == "cuda":
            self._pin(flat)

    @property
    def num_bytes(self) -> int:
        return self.data.numel()

    def close(self) -> None:
        """Unpin. Nothing may copy any more. The memory goes with the last use of ``data``."""
        if self.pinned:
            self.pinned = False
            with torch.cuda.device(self.device):
                _cudart().cudaHostUnregister(self.data.data_ptr())

    def _pin(self, flat: torch.Tensor) -> None:
        address, size = flat.data_ptr(), flat.numel()
        with torch.cuda.device(self.device):
            code = int(_cudart().cudaHostRegister(address, size, 0))
            if code == _CUDA_SUCCESS:
                self.pinned = True
                return
            fits = _pinnable(address, size)
        limit = host_memory.memlock_bytes()
        raise PoolError(
            f"{_gib(size)} of host memory for the KV pool cannot be pinned "
            f"({'out of memory' if code == _CUDA_OUT_OF_MEMORY else f'CUDA error {code}'}; "
            f"RLIMIT_MEMLOCK is {'unlimited' if limit is None else _gib(limit)}): raise the limit "
            f"(ulimit -l unlimited; docker run --ulimit memlock=-1) or lower {SETTING}; "
            f"{_floor_gib(fits)} could be pinned"
        )


def _pinnable(address: int, size: int) -> int:
    """The largest part of a range, by halves, that can be pinned; bytes."""
    while size > host_memory.HUGE_PAGE_BYTES:
        size //= 2
        if int(_cudart().cudaHostRegister(address, size, 0)) == _CUDA_SUCCESS:
            _cudart().cudaHostUnregister(address)
            return size
    return 0


def _cudart() -> Any:
    return torch.cuda.cudart()


def _node_of(device: torch.device) -> int | None:
    if device.type != "cuda":
        return None
    found = torch.cuda.get_device_properties(device)
    try:
        address = f"{found.pci_domain_id:04x}:{found.pci_bus_id:02x}:{found.pci_device_id:02x}.0"
    except AttributeError:
        return None
    return host_memory.gpu_node(address)


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.3g} GiB"


def _floor_gib(num_bytes: int) -> str:
    """GiB rounded down to a figure that, given back to us, fits."""
    return f"{math.floor(num_bytes / GIB * 1e3) / 1e3:g}"
