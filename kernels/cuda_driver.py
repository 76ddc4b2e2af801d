"""Asynchronous copies of the CUDA driver, through ctypes: no package needed but the driver.

Entry points and structures are those of cuda.h; addresses are unified virtual addresses, so host
memory must be pinned.
"""

from __future__ import annotations

import ctypes
from functools import lru_cache
from typing import Any

from liveserve.kernels.layout import Int64Array

# cuMemcpyBatchAsync as of CUDA 12.8 (with failIdx), which later drivers still hand out.
BATCH_VERSION = 12080
MEMORYTYPE_UNIFIED = 4
SRC_ACCESS_ORDER_STREAM = 1
SRC_ACCESS_ORDER_ANY = 3
MAX_PITCH_BYTES = 2**31 - 1


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_uint), ("id", ctypes.c_int))


class _BatchAttributes(ctypes.Structure):
    _fields_ = (
        ("src_access_order", ctypes.c_uint),
        ("src_location", _Location),
        ("dst_location", _Location),
        ("flags", ctypes.c_uint),
    )


_SIDE = (
    ("x_bytes", ctypes.c_size_t),
    ("y", ctypes.c_size_t),
    ("memory_type", ctypes.c_uint),
    ("host", ctypes.c_void_p),
    ("device", ctypes.c_uint64),
    ("array", ctypes.c_void_p),
    ("pitch", ctypes.c_size_t),
)


class _Copy2D(ctypes.Structure):
    _fields_ = (
        *((f"src_{name}", kind) for name, kind in _SIDE),
        *((f"dst_{name}", kind) for name, kind in _SIDE),
        ("width_bytes", ctypes.c_size_t),
        ("height", ctypes.c_size_t),
    )


class CudaDriver:
    """The loaded driver.

    Raises:
        OSError: there is no CUDA driver.
    """

    def __init__(self) -> None:
        self._lib = ctypes.CDLL("libcuda.so.1")
        self._batch = self._find_batch()

    def _find_batch(self) -> Any:
        pointer = ctypes.c_void_p()
        status = ctypes.c_int()
        find = self._lib.cuGetProcAddress_v2
        found = find(
            b"cuMemcpyBatchAsync",
            ctypes.byref(pointer),
            ctypes.c_int(BATCH_VERSION),
            ctypes.c_uint64(0),
            ctypes.byref(status),
        )
        if found != 0 or not pointer.value:
            return None
        address, size = ctypes.c_void_p, ctypes.c_size_t
        kind = ctypes.CFUNCTYPE(
            ctypes.c_int, address, address, address, size, address, address, size, address, address
        )
        return kind(pointer.value)

    @property
    def has_batch(self) -> bool:
        """Whether the driver has ``cuMemcpyBatchAsync`` (CUDA 12.8 or later)."""
        return self._batch is not None

    def memcpy_batch(
        self,
        targets: Int64Array,
        sources: Int64Array,
        nbytes: Int64Array,
        stream: int,
        src_access_order: int = SRC_ACCESS_ORDER_STREAM,
    ) -> None:
        """Enqueues copies, contiguous int64 ``[n]`` addresses and lengths, on a stream's handle
        (not the default stream's 0).

        Raises:
            RuntimeError: the driver refused.
        """
        attributes = _BatchAttributes(src_access_order=src_access_order)
        first, failed = ctypes.c_size_t(0), ctypes.c_size_t(0)
        status = self._batch(
            targets.ctypes.data,
            sources.ctypes.data,
            nbytes.ctypes.data,
            len(targets),
            ctypes.addressof(attributes),
            ctypes.addressof(first),
            1,
            ctypes.addressof(failed),
            stream,
        )
        self._check(status, f"cuMemcpyBatchAsync of {len(targets)} pieces, at {failed.value}")

    def memcpy_2d(
        self,
        target: int,
        target_pitch: int,
        source: int,
        source_pitch: int,
        width_bytes: int,
        height: int,
        stream: int,
    ) -> None:
        """Enqueues ``height`` rows of ``width_bytes``, ``pitch`` bytes apart on either side.

        Raises:
            RuntimeError: the driver refused.
        """
        copy = _Copy2D(
            src_memory_type=MEMORYTYPE_UNIFIED,
            src_device=source,
            src_pitch=source_pitch,
            dst_memory_type=MEMORYTYPE_UNIFIED,
            dst_device=target,
            dst_pitch=target_pitch,
            width_bytes=width_bytes,
            height=height,
        )
        status = self._lib.cuMemcpy2DAsync_v2(ctypes.byref(copy), ctypes.c_void_p(stream))
        self._check(status, f"cuMemcpy2DAsync of {height} × {width_bytes} bytes")

    def _check(self, status: int, what: str) -> None:
        if status == 0:
            return
        text = ctypes.c_char_p()
        self._lib.cuGetErrorString(status, ctypes.byref(text))
        reason = (text.value or b"unknown error").decode()
        raise RuntimeError(f"{what} failed: {reason} ({status})")


@lru_cache(maxsize=1)
def cuda_driver() -> CudaDriver | None:
    """The driver of this machine, None where there is none."""
    try:
        return CudaDriver()
    except (OSError, AttributeError):
        return None
