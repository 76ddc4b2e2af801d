"""Where the bytes of a paged KV cache are, as arithmetic: no torch at import, no host.

A cache is layers of blocks. What one block holds of one layer lies in one or more *planes* (K and V
apart, or both packed; a plane per head where the layout puts heads outside blocks): an array of
*fragments*, ``fragment_bytes`` long and ``block_stride`` bytes apart, one per block. So

    address(layer, plane, block) = base + block * block_stride

A *slot* is one block's fragments packed layer-major, each at a multiple of 16 bytes: a row of a
uint8 pool tensor ``[num_slots, slot_bytes]``. Sizes follow vLLM's attention specs
(vllm/v1/kv_cache_interface.py); layouts follow vllm/v1/kv_cache_layout.py (LBHNC, LBNHC, BLHNC, …).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import torch

Int64Array = npt.NDArray[np.int64]
SLOT_ALIGN_BYTES = 16
MAX_PLANES_PER_LAYER = 256


@dataclass(frozen=True, slots=True)
class PagedKVLayout:
    """A uniform paged KV cache.

    Raises:
        ValueError: a field is not a positive integer.
    """

    num_layers: int
    num_blocks: int
    block_tokens: int
    num_kv_heads: int
    head_dim: int
    dtype_bytes: int

    def __post_init__(self) -> None:
        for name in self.__slots__:
            _check_positive(f"PagedKVLayout.{name}", getattr(self, name))

    @property
    def fragment_bytes(self) -> int:
        """Bytes of K (or V) of one block in one layer: the smallest contiguous piece."""
        return self.block_tokens * self.num_kv_heads * self.head_dim * self.dtype_bytes

    @property
    def block_bytes(self) -> int:
        """Bytes of one block across all layers, K and V together."""
        return 2 * self.num_layers * self.fragment_bytes

    @property
    def total_bytes(self) -> int:
        """Bytes of the whole cache."""
        return self.num_blocks * self.block_bytes

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that ``num_tokens`` tokens occupy (the last one may be partly filled)."""
        if num_tokens < 0:
            raise ValueError(f"num_tokens must not be negative, got {num_tokens}")
        return -(-num_tokens // self.block_tokens)


@dataclass(frozen=True, slots=True)
class Plane:
    """Fragments of one layer: ``fragment_bytes`` at ``base + block * block_stride``.

    ``view`` is the plane as a uint8 tensor ``[num_blocks, fragment_bytes]`` with strides
    ``(block_stride, 1)``; None where only addresses are known.

    Raises:
        ValueError: a size is not positive, or fragments overlap.
    """

    base: int
    block_stride: int
    fragment_bytes: int
    view: torch.Tensor | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        _check_positive("Plane.base", self.base)
        _check_positive("Plane.fragment_bytes", self.fragment_bytes)
        _check_positive("Plane.block_stride", self.block_stride)
        if self.block_stride < self.fragment_bytes:
            raise ValueError(
                f"Plane.block_stride is {self.block_stride} bytes, less than its fragments of "
                f"{self.fragment_bytes}: blocks overlap"
            )


@dataclass(frozen=True, slots=True, eq=False)
class FragmentTable:
    """The pieces to copy of every block: int64 arrays ``[num_fragments]``, in slot order.

    Piece ``f`` of block ``b`` lies at ``base[f] + b * block_stride[f]``, has ``nbytes[f]`` bytes
    and its place in a slot starts at ``slot_offset[f]``. Neighbours that touch on both sides are
    one piece, so a BLHNC block is a single piece.
    """

    base: Int64Array
    block_stride: Int64Array
    nbytes: Int64Array
    slot_offset: Int64Array

    def __len__(self) -> int:
        return len(self.base)

    @property
    def bytes_per_block(self) -> int:
        return int(self.nbytes.sum())

    @property
    def max_bytes(self) -> int:
        """Length of the longest piece, 0 where there is none."""
        return int(self.nbytes.max(initial=0))

    @property
    def alignment_bytes(self) -> int:
        """The largest power of two up to 16 that divides every address and offset of a piece."""
        bits = np.bitwise_or.reduce(
            np.concatenate([self.base, self.block_stride, self.slot_offset, [SLOT_ALIGN_BYTES]])
        )
        return int(bits & -bits)


@dataclass(frozen=True, eq=False)
class PagedCache:
    """A real paged KV cache: planes of every layer, layer-major.

    Raises:
        ValueError: nothing to describe, or planes that share bytes.
    """

    layers: tuple[tuple[Plane, ...], ...]
    num_blocks: int
    device: str = "cpu"

    def __post_init__(self) -> None:
        _check_positive("PagedCache.num_blocks", self.num_blocks)
        if not self.layers or not all(self.layers):
            raise ValueError("PagedCache.layers must hold at least one plane for every layer")
        self._check_disjoint()

    @classmethod
    def from_layers(
        cls,
        layers: Sequence[torch.Tensor | Sequence[torch.Tensor]],
        *,
        block_dim: int = 0,
        kernel_blocks_per_block: int = 1,
    ) -> PagedCache:
        """Describes per-layer tensors as vLLM registers them, or ``(K, V)`` pairs of such.

        Any dimension order is fine as long as the memory of a block is a few contiguous pieces:
        ``[B, H, N, C]`` views of LBHNC, LBNHC or BLHNC memory, ``[B, 2, N, H, D]``,
        ``[2, B, N, H, D]`` with ``block_dim=1``.

        Args:
            layers: one tensor (or several) for each layer, all on one device.
            block_dim: the dimension that counts blocks.
            kernel_blocks_per_block: attention backends may split the KV manager's block; the
                tensors then count that many kernel blocks for each block.

        Raises:
            TypeError: not a tensor.
            ValueError: tensors on several devices or with different numbers of blocks, blocks that
                are not contiguous, or memory that overlaps.
        """
        _check_positive("kernel_blocks_per_block", kernel_blocks_per_block)
        described: list[tuple[Plane, ...]] = []
        counts: dict[int, int] = {}
        devices: dict[str, int] = {}
        for index, entry in enumerate(layers):
            tensors = entry if isinstance(entry, (tuple, list)) else (entry,)
            planes: list[Plane] = []
            for tensor in tensors:
                found = _planes_of(tensor, index, block_dim, kernel_blocks_per_block)
                counts.setdefault(tensor.shape[block_dim] // kernel_blocks_per_block, index)
                devices.setdefault(str(tensor.device), index)
                planes += found
            described.append(tuple(planes))
        if len(counts) > 1:
            raise ValueError(f"layers differ in their number of blocks: {sorted(counts)}")
        if len(devices) > 1:
            raise ValueError(f"layers must share one device, found {sorted(devices)}")
        if not counts:
            raise ValueError("layers must name at least one tensor")
        return cls(tuple(described), next(iter(counts)), next(iter(devices)))

    @classmethod
    def from_allocation(
        cls, tensor: torch.Tensor, *, layer_dim: int = 0, block_dim: int = 1
    ) -> PagedCache:
        """Describes one tensor that holds every layer, e.g. ``[L, B, …]`` or, with
        ``layer_dim=1, block_dim=0``, ``[B, L, …]``. ``block_dim`` counts ``tensor``'s dimensions.

        Raises:
            ValueError: as ``from_layers``; or both dimensions are the same.
        """
        dims = range(-tensor.dim(), tensor.dim())
        if layer_dim not in dims or block_dim not in dims:
            raise ValueError(f"layer_dim and block_dim must be dimensions of {tuple(tensor.shape)}")
        layer_dim, block_dim = layer_dim % tensor.dim(), block_dim % tensor.dim()
        if layer_dim == block_dim:
            raise ValueError(f"layer_dim and block_dim must differ, both are {layer_dim}")
        return cls.from_layers(
            tensor.unbind(layer_dim), block_dim=block_dim - (block_dim > layer_dim)
        )

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @cached_property
    def layer_offsets(self) -> tuple[int, ...]:
        """Where each layer starts in a slot, in bytes, and behind them the slot's size."""
        sizes = (sum(_aligned(p.fragment_bytes) for p in planes) for planes in self.layers)
        return tuple(itertools.accumulate(sizes, initial=0))

    @property
    def slot_bytes(self) -> int:
        """Bytes of one block in a pool: a multiple of 16."""
        return self.layer_offsets[-1]

    @cached_property
    def block_bytes(self) -> int:
        """Bytes of one block's fragments, without alignment."""
        return sum(p.fragment_bytes for planes in self.layers for p in planes)

    def address(self, layer: int, plane: int, block: int) -> tuple[int, int]:
        """Address and length in bytes of one fragment.

        Raises:
            IndexError: no such layer, plane or block.
        """
        found = self.layers[layer][plane]
        if not 0 <= block < self.num_blocks:
            raise IndexError(f"block {block} is not in 0..{self.num_blocks - 1}")
        return found.base + block * found.block_stride, found.fragment_bytes

    def check_layers(self, layers: range | None) -> range:
        """``layers``, or all layers where it is None.

        Raises:
            ValueError: a step other than 1, or layers that the cache does not have.
        """
        if layers is None:
            return range(self.num_layers)
        if layers.step != 1:
            raise ValueError(f"layers must have step 1, got {layers}")
        if len(layers) and not 0 <= layers.start < layers.stop <= self.num_layers:
            raise ValueError(f"layers {layers} must lie in 0..{self.num_layers}")
        return layers

    def fragments(self, layers: range | None = None) -> FragmentTable:
        """The pieces of a block in these layers (all by default); computed once per range.

        Raises:
            ValueError: as ``check_layers``.
        """
        chosen = self.check_layers(layers)
        table = self._tables.get(chosen)
        if table is None:
            table = self._tables[chosen] = self._fragments(chosen)
        return table

    @cached_property
    def _tables(self) -> dict[range, FragmentTable]:
        return {}

    def _fragments(self, layers: range) -> FragmentTable:
        rows: list[list[int]] = []
        for layer in layers:
            offset = self.layer_offsets[layer]
            for plane in self.layers[layer]:
                row = [plane.base, plane.block_stride, plane.fragment_bytes, offset]
                last = rows[-1] if rows else [0, 0, 0, 0]
                touches = (last[0] + last[2], last[3] + last[2]) == (plane.base, offset)
                if touches and last[1] == plane.block_stride:
                    last[2] += plane.fragment_bytes
                else:
                    rows.append(row)
                offset += _aligned(plane.fragment_bytes)
        columns = np.array(rows, dtype=np.int64).reshape(-1, 4).T
        return FragmentTable(*(np.ascontiguousarray(column) for column in columns))

    def _check_disjoint(self) -> None:
        named = [
            (plane, f"plane {p} of layer {index}")
            for index, planes in enumerate(self.layers)
            for p, plane in enumerate(planes)
        ]
        named.sort(key=lambda item: item[0].base)
        for i, (low, low_name) in enumerate(named):
            end = low.base + (self.num_blocks - 1) * low.block_stride + low.fragment_bytes
            for high, high_name in named[i + 1 :]:
                if high.base >= end:
                    break
                if _share_bytes(low, high, self.num_blocks):
                    raise ValueError(f"{low_name} and {high_name} overlap in memory")


def _check_positive(name: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
        raise ValueError(f"{name} must be a positive integer, got {value!r}")


def _aligned(nbytes: int) -> int:
    return -(-nbytes // SLOT_ALIGN_BYTES) * SLOT_ALIGN_BYTES


def _share_bytes(low: Plane, high: Plane, num_blocks: int) -> bool:
    """Whether two planes have a byte in common; ``high`` starts within ``low``."""
    if low.block_stride == high.block_stride:
        into = (high.base - low.base) % low.block_stride
        return into < low.fragment_bytes or into + high.fragment_bytes > low.block_stride
    blocks = np.arange(num_blocks, dtype=np.int64)
    starts = high.base + blocks * high.block_stride
    # The last block of `low` that starts before the end of each fragment of `high`.
    before = (starts + high.fragment_bytes - 1 - low.base) // low.block_stride
    ends = low.base + np.clip(before, 0, num_blocks - 1) * low.block_stride + low.fragment_bytes
    return bool((ends > starts).any())


def _planes_of(tensor: torch.Tensor, layer: int, block_dim: int, kernel_blocks: int) -> list[Plane]:
    import torch

    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"layer {layer} must be a tensor, got {type(tensor).__name__}")
    if tensor.layout != torch.strided or tensor.device.type == "meta":
        raise ValueError(f"layer {layer} must be a dense tensor with memory of its own")
    if not -tensor.dim() <= block_dim < tensor.dim():
        raise ValueError(f"layer {layer}: block_dim {block_dim} is not in {tuple(tensor.shape)}")
    if tensor.numel() == 0:
        raise ValueError(f"layer {layer} is empty: its shape is {tuple(tensor.shape)}")
    block_dim %= tensor.dim()
    itemsize = tensor.element_size()
    if tensor.shape[block_dim] % kernel_blocks:
        raise ValueError(
            f"layer {layer} has {tensor.shape[block_dim]} kernel blocks, not a multiple of "
            f"kernel_blocks_per_block={kernel_blocks}"
        )
    num_blocks = tensor.shape[block_dim] // kernel_blocks
    kernel_stride = tensor.stride(block_dim) * itemsize
    # (stride, size) of what a block holds, in bytes, innermost first.
    inner = [
        (tensor.stride(d) * itemsize, tensor.shape[d])
        for d in range(tensor.dim())
        if d != block_dim and tensor.shape[d] > 1
    ]
    if kernel_blocks > 1:
        inner.append((kernel_stride, kernel_blocks))
    inner.sort()
    fragment = itemsize
    while inner and inner[0][0] == fragment:
        fragment *= inner.pop(0)[1]
    outer = inner[::-1]
    if math.prod(size for _, size in outer) > MAX_PLANES_PER_LAYER:
        raise ValueError(
            f"layer {layer}: a block is not contiguous (shape {tuple(tensor.shape)}, strides "
            f"{tensor.stride()}): its longest contiguous piece has {fragment} bytes. Use a layout "
            "whose blocks are contiguous, e.g. VLLM_KV_CACHE_LAYOUT=LBHNC"
        )
    # Of a single block the stride means nothing, and should not spoil alignment.
    block_stride = kernel_stride * kernel_blocks if num_blocks > 1 else _aligned(fragment)
    if block_stride < fragment:
        raise ValueError(f"layer {layer}: blocks overlap, {block_stride} bytes apart")
    start = tensor.data_ptr()
    storage = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
    first = tensor.storage_offset() * itemsize
    planes = []
    for index in itertools.product(*(range(size) for _, size in outer)):
        shift = sum(i * stride for i, (stride, _) in zip(index, outer, strict=True))
        view = torch.as_strided(
            storage, (num_blocks, fragment), (block_stride, 1), storage_offset=first + shift
        )
        planes.append(Plane(start + shift, block_stride, fragment, view))
    return planes
