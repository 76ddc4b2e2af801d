"""Copies by a Triton kernel: threads read and write pinned host memory over the link, or gather
into and scatter out of a staging buffer on the GPU."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from typing import Any

import torch

from liveserve.kernels.base import CopyMethod, CopyRequest, Direction
from liveserve.kernels.gpu import DeviceTables, ids_on_device, on_gpu, on_stream
from liveserve.kernels.layout import PagedCache

# 12 SMs are enough for the link (vllm/v1/kv_offload/cpu/swap_blocks_triton.py found the same); each
# holds tile_bytes in flight: 12 × 32 KiB, several times 55 GB/s × 2 µs.
DEFAULT_PROGRAMS = 12
DEFAULT_WARPS = 8
DEFAULT_TILE_BYTES = 32 * 1024


class TritonCopy(CopyMethod):
    """See ``CopyMethod``. 16-byte accesses where all addresses allow, narrower ones elsewhere.

    The first copy compiles (seconds) and pins a little memory: make one before serving.
    """

    name = "triton"
    needs = "triton needs the cache on a GPU and the pool pinned or on that GPU"

    def __init__(
        self,
        programs: int = DEFAULT_PROGRAMS,
        num_warps: int = DEFAULT_WARPS,
        tile_bytes: int = DEFAULT_TILE_BYTES,
        kernel: Any = None,
    ) -> None:
        """
        Args:
            programs: the grid: at most as many SMs are busy.
            num_warps: warps of a program, a power of two.
            tile_bytes: bytes that a program has in flight, a power of two.
            kernel: in place of ``triton_kernel.copy_kernel``: an interpreted one copies between
                CPU tensors.

        Raises:
            ValueError: a size is not positive, or not a power of two where it must be.
        """
        if programs <= 0:
            raise ValueError(f"programs must be positive, got {programs}")
        for name, value in (("num_warps", num_warps), ("tile_bytes", tile_bytes)):
            if value <= 0 or value & (value - 1):
                raise ValueError(f"{name} must be a power of two, got {value}")
        self.programs = programs
        self.num_warps = num_warps
        self.tile_bytes = tile_bytes
        self._injected = kernel is not None
        self._kernel = kernel
        self._tables = DeviceTables()

    def available(self) -> bool:
        if self._injected:
            return True
        return torch.cuda.is_available() and importlib.util.find_spec("triton") is not None

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
        device = torch.device(cache.device)
        with on_stream(device, stream):
            ids = ids_on_device(request, device)
            self._launch(request, self._tables.fragments(cache, layers), ids)

    def _launch(self, request: CopyRequest, table: torch.Tensor, ids: torch.Tensor) -> None:
        if self._kernel is None:
            from liveserve.kernels.triton_kernel import copy_kernel

            self._kernel = copy_kernel
        shape = LaunchShape.of(request, self.tile_bytes)
        self._kernel[(min(self.programs, shape.num_tiles),)](
            table,
            ids[0],
            ids[1],
            shape.num_rows,
            len(request.fragments),
            shape.num_chunks,
            request.pool_base,
            request.slot_stride,
            LOAD=request.direction is Direction.LOAD,
            ALIGN=shape.align,
            TAIL=shape.tail,
            ROWS=shape.rows,
            COLS=shape.cols,
            num_warps=self.num_warps,
        )


@dataclass(frozen=True, slots=True)
class LaunchShape:
    """How a copy is cut into tiles: see ``triton_kernel``."""

    align: int
    tail: bool
    rows: int
    cols: int
    num_rows: int
    num_chunks: int

    @property
    def num_tiles(self) -> int:
        return -(-self.num_rows // self.rows) * self.num_chunks

    @classmethod
    def of(cls, request: CopyRequest, tile_bytes: int) -> LaunchShape:
        """The shape for a copy of at least one byte."""
        pieces = request.fragments
        align = request.alignment_bytes
        tile_words = max(tile_bytes // min(align, 8), 2)
        words = max(pieces.max_bytes // min(align, 8), 2)
        cols = min(1 << (words - 1).bit_length(), tile_words)
        return cls(
            align=align,
            tail=bool((pieces.nbytes % align).any()),
            rows=tile_words // cols,
            cols=cols,
            num_rows=len(request.block_ids) * len(pieces),
            num_chunks=-(-words // cols),
        )
