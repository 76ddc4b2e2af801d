"""Shape of a paged KV cache, as arithmetic: no torch, no host.

A cache is ``num_layers`` layers of ``num_blocks`` blocks; one block of one layer holds K and V for
``block_tokens`` tokens of ``num_kv_heads`` heads of ``head_dim`` elements. Sizes follow vLLM's
attention specs (vllm/v1/kv_cache_interface.py).
"""

from __future__ import annotations

from dataclasses import dataclass


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
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
                raise ValueError(f"PagedKVLayout.{name} must be a positive integer, got {value!r}")

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
