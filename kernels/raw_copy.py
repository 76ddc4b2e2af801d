"""Copies by Hopper's bulk copies (``cp.async.bulk``, sm_90) through shared memory, with CuPy.

Threads need registers and many instructions to keep bytes in flight; a bulk copy is one instruction
for kilobytes, so one thread of each of a few warps keeps a program's share of the link busy.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from liveserve.kernels.base import CopyMethod, CopyRequest, Direction
from liveserve.kernels.gpu import DeviceTables, ids_on_device, on_gpu, on_stream
from liveserve.kernels.layout import SLOT_ALIGN_BYTES, PagedCache

KERNEL = "bulk_copy"
# 227 KiB of an SM, less the barriers and the table of pieces.
MAX_SHARED_BYTES = 220 * 1024

# The operations of the hardware, apart from the loop that uses them: tests run that loop on a CPU.
PRIMITIVES = r"""
typedef unsigned int shared_t;  // an address in shared memory

__device__ __forceinline__ shared_t shared_address(const void* pointer) {
    return (shared_t)__cvta_generic_to_shared(pointer);
}

__device__ __forceinline__ void init_barriers(shared_t barriers, int count) {
    for (int i = 0; i < count; i++)
        asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" :: "r"(barriers + 8 * i) : "memory");
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// The barrier's phase completes when the bytes are in the buffer; at once if there are none.
__device__ __forceinline__ void start_load(shared_t buffer, u64 source, u32 nbytes,
                                           shared_t barrier) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;"
                 :: "r"(barrier), "r"(nbytes) : "memory");
    if (nbytes)
        asm volatile(
            "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes "
            "[%0], [%1], %2, [%3];"
            :: "r"(buffer), "l"(source), "r"(nbytes), "r"(barrier) : "memory");
}

__device__ __forceinline__ void wait_load(shared_t barrier, u32 parity) {
    u32 done = 0;
    while (!done)
        asm volatile(
            "{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;"
            "  selp.u32 %0, 1, 0, p; }"
            : "=r"(done) : "r"(barrier), "r"(parity) : "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

__device__ __forceinline__ void start_store(u64 target, shared_t buffer, u32 nbytes) {
    if (nbytes)
        asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;"
                     :: "l"(target), "r"(buffer), "r"(nbytes) : "memory");
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

// All but the last LAG stores have read their buffers.
__device__ __forceinline__ void wait_buffers_read() {
    asm volatile("cp.async.bulk.wait_group.read %0;" :: "n"(LAG) : "memory");
}

__device__ __forceinline__ void wait_stores() {
    asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}
"""

TYPES = r"""
typedef long long i64;
typedef unsigned long long u64;
typedef unsigned int u32;
"""

# Each warp's first thread runs a ring of STAGES buffers of CHUNK bytes on its own: load into a
# buffer, wait, store out of it. A buffer is loaded again LAG stores after its own, so LAG stores
# and STAGES - LAG loads are under way at once.
BODY = r"""
struct Piece { u64 source; u64 target; u32 nbytes; };

extern "C" __global__ void __launch_bounds__(WARPS * 32, 1)
bulk_copy(const i64* table,      // [4, num_fragments]: base, block stride, bytes, slot offset
          const i64* block_ids,  // [num_rows / num_fragments]
          const i64* slot_ids,
          i64 num_rows,          // one for each piece of each block
          i64 num_fragments,
          i64 num_chunks,        // chunks of CHUNK bytes that the longest piece has
          i64 pool_base,
          i64 slot_stride,
          int load) {            // 1: pool -> cache, 0: cache -> pool
    extern __shared__ __align__(128) unsigned char buffers[];
    __shared__ __align__(8) u64 barriers[WARPS * STAGES];
    __shared__ Piece pieces[WARPS * STAGES];
    if (threadIdx.x % 32) return;

    const int warp = threadIdx.x / 32;
    const shared_t buffer = shared_address(buffers) + warp * STAGES * CHUNK;
    const shared_t barrier = shared_address(barriers + warp * STAGES);
    Piece* const ring = pieces + warp * STAGES;
    init_barriers(barrier, STAGES);

    const i64 first = (i64)blockIdx.x * WARPS + warp;
    const i64 step = (i64)gridDim.x * WARPS;
    const i64 total = num_rows * num_chunks;
    const i64 count = first < total ? (total - first + step - 1) / step : 0;
    i64 loaded = 0;

    auto load_next = [&]() {
        const i64 index = first + loaded * step;
        const i64 row = index / num_chunks;
        const i64 start = index % num_chunks * CHUNK;
        const i64 item = row / num_fragments;
        const i64* const entry = table + row % num_fragments;
        const i64 left = entry[2 * num_fragments] - start;
        const i64 here = left < 0 ? 0 : left < CHUNK ? left : CHUNK;
        const u64 cached = entry[0] + block_ids[item] * entry[num_fragments] + start;
        const u64 pooled = pool_base + slot_ids[item] * slot_stride + entry[3 * num_fragments]
                         + start;
        Piece piece;
        piece.source = load ? pooled : cached;
        piece.target = load ? cached : pooled;
        piece.nbytes = (u32)(here & ~(i64)15);
        for (i64 b = piece.nbytes; b < here; b++)
            ((volatile char*)piece.target)[b] = ((const volatile char*)piece.source)[b];
        const int stage = (int)(loaded % STAGES);
        ring[stage] = piece;
        start_load(buffer + stage * CHUNK, piece.source, piece.nbytes, barrier + 8 * stage);
        loaded++;
    };

    while (loaded < count && loaded < STAGES) load_next();
    for (i64 k = 0; k < count; k++) {
        const int stage = (int)(k % STAGES);
        wait_load(barrier + 8 * stage, (u32)(k / STAGES) & 1);
        start_store(ring[stage].target, buffer + stage * CHUNK, ring[stage].nbytes);
        wait_buffers_read();
        // Store k - LAG has read its buffer, which is the next in turn.
        if (k >= LAG && loaded < count) load_next();
    }
    wait_stores();
}
"""

SOURCE = TYPES + PRIMITIVES + BODY


class RawCopy(CopyMethod):
    """See ``CopyMethod``. For GPUs of compute capability 9.0, where CuPy is installed.

    The first copy compiles (a second): make one before serving.
    """

    name = "raw"
    needs = (
        "bulk copies need the cache on a GPU, the pool pinned or there, and addresses that are "
        "multiples of 16"
    )

    def __init__(
        self,
        programs: int = 12,
        warps: int = 4,
        stages: int = 4,
        chunk_bytes: int = 8192,
        lag: int = 1,
        launch: Callable[[int, tuple[Any, ...]], None] | None = None,
    ) -> None:
        """
        Args:
            programs: the grid: at most as many SMs are busy.
            warps: independent rings of a program.
            stages: buffers of a ring.
            chunk_bytes: size of a buffer, a multiple of 128.
            lag: stores of a ring that may still be reading their buffers.
            launch: in place of CuPy: takes the grid and the kernel's arguments.

        Raises:
            ValueError: a size is out of range, or the buffers exceed an SM's shared memory.
        """
        if not (programs > 0 and 1 <= warps <= 32 and 1 <= lag < stages):
            raise ValueError(
                "programs must be positive, warps in 1..32, lag in 1..stages-1; got "
                f"programs={programs}, warps={warps}, stages={stages}, lag={lag}"
            )
        if chunk_bytes <= 0 or chunk_bytes % 128:
            raise ValueError(f"chunk_bytes must be a multiple of 128, got {chunk_bytes}")
        self.shared_bytes = warps * stages * chunk_bytes
        if self.shared_bytes > MAX_SHARED_BYTES:
            raise ValueError(
                f"warps × stages × chunk_bytes is {self.shared_bytes}, more than the "
                f"{MAX_SHARED_BYTES} bytes of an SM"
            )
        self.programs = programs
        self.warps = warps
        self.chunk_bytes = chunk_bytes
        sizes = {"WARPS": warps, "STAGES": stages, "CHUNK": chunk_bytes, "LAG": lag}
        self.options = ("--std=c++17", *(f"-D{name}={value}" for name, value in sizes.items()))
        self._launch = launch
        self._kernel: Any = None
        self._tables = DeviceTables()

    def available(self) -> bool:
        return self._launch is not None or (
            torch.cuda.is_available()
            and torch.cuda.get_device_capability() == (9, 0)
            and importlib.util.find_spec("cupy") is not None
        )

    def supports(self, cache: PagedCache, pool: torch.Tensor) -> bool:
        """The cache on a GPU, the pool there too or pinned; addresses multiples of 16."""
        bits = cache.fragments().alignment_bytes | pool.data_ptr() | pool.stride(0)
        reached = self._launch is not None or on_gpu(cache, pool)
        return reached and bits % SLOT_ALIGN_BYTES == 0

    def run(
        self,
        request: CopyRequest,
        cache: PagedCache,
        pool: torch.Tensor,
        layers: range | None,
        stream: torch.cuda.Stream | None,
    ) -> None:
        device = torch.device(cache.device)
        num_chunks = -(-request.fragments.max_bytes // self.chunk_bytes)
        num_rows = len(request.block_ids) * len(request.fragments)
        with on_stream(device, stream):
            ids = ids_on_device(request, device)
            table = self._tables.fragments(cache, layers)
            arguments = (
                *(np.uint64(tensor.data_ptr()) for tensor in (table, ids[0], ids[1])),
                *(np.int64(n) for n in (num_rows, len(request.fragments), num_chunks)),
                np.int64(request.pool_base),
                np.int64(request.slot_stride),
                np.int32(request.direction is Direction.LOAD),
            )
            # The current stream keeps `ids` from being handed out again before it has run this.
            launch = self._launch or self._launch_cupy
            launch(min(self.programs, num_rows * num_chunks), arguments)

    def _launch_cupy(self, grid: int, arguments: tuple[Any, ...]) -> None:
        import cupy  # type: ignore[import-not-found]

        if self._kernel is None:
            kernel = cupy.RawKernel(SOURCE, KERNEL, options=self.options)
            kernel.max_dynamic_shared_size_bytes = self.shared_bytes
            self._kernel = kernel
        with cupy.cuda.ExternalStream(torch.cuda.current_stream().cuda_stream):
            block = (self.warps * 32,)
            self._kernel((grid,), block, arguments, shared_mem=self.shared_bytes)
