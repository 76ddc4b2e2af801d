"""Compute that transfers compete with: a decode-like loop, and a transformer on a paged cache.

Weights are random; what counts is the shape of the work. The sizes are those of the active
parameters of Qwen3-Omni-30B-A3B's thinker, whose experts are one dense MLP here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch.nn.functional import rms_norm, scaled_dot_product_attention, silu


@dataclass(frozen=True, slots=True)
class ModelShape:
    """``mlp``: inner width of the gated MLP."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp: int


THINKER = ModelShape(layers=48, hidden=2048, heads=32, kv_heads=4, head_dim=128, mlp=6144)
# The same blocks in the cache, a hundredth of the work in a layer: for a CPU.
SMALL = ModelShape(layers=4, hidden=256, heads=4, kv_heads=4, head_dim=128, mlp=512)


class _Layer:
    def __init__(self, shape: ModelShape, device: str, dtype: torch.dtype) -> None:
        def weight(rows: int, columns: int) -> torch.Tensor:
            return torch.randn(rows, columns, device=device, dtype=dtype) / math.sqrt(rows)

        self.shape = shape
        attention = shape.heads * shape.head_dim
        self.qkv = weight(shape.hidden, attention + 2 * shape.kv_heads * shape.head_dim)
        self.out = weight(attention, shape.hidden)
        self.gate_up = weight(shape.hidden, 2 * shape.mlp)
        self.down = weight(shape.mlp, shape.hidden)

    def project(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q ``[n, heads, head_dim]``, k and v ``[n, kv_heads, head_dim]`` of x ``[n, hidden]``."""
        size = self.shape.head_dim
        rows = rms_norm(x, (self.shape.hidden,)) @ self.qkv
        heads = rows.unflatten(1, (-1, size))
        counts = [self.shape.heads, self.shape.kv_heads, self.shape.kv_heads]
        q, k, v = heads.split(counts, dim=1)
        return q, k, v

    def finish(self, x: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        x = x + attended @ self.out
        gate, up = (rms_norm(x, (self.shape.hidden,)) @ self.gate_up).chunk(2, dim=1)
        return x + (silu(gate) * up) @ self.down


class DecodeLoop:
    """Decode steps of ``batch`` sequences of ``context`` tokens, bound by memory as on a GPU.

    All layers read the same K and V, which are larger than an L2 cache. On a GPU a step is one CUDA
    graph, so the host is not what limits it.
    """

    def __init__(
        self, shape: ModelShape, *, batch: int, context: int, device: str, dtype: torch.dtype
    ) -> None:
        self.device = device
        self._layers = [_Layer(shape, device, dtype) for _ in range(shape.layers)]
        self._x = torch.randn(batch, shape.hidden, device=device, dtype=dtype)
        kv = (2, batch, shape.kv_heads, context, shape.head_dim)
        self._k, self._v = torch.randn(kv, device=device, dtype=dtype)
        self.stream: torch.cuda.Stream | None = None
        self._graph: torch.cuda.CUDAGraph | None = None
        if device.startswith("cuda"):
            self._capture()

    def _capture(self) -> None:
        self.stream = torch.cuda.Stream(self.device)
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            for _ in range(3):
                self._step()
        self.stream.synchronize()
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, stream=self.stream):
            self._step()

    def step(self) -> None:
        """On a GPU enqueues a step on ``stream``; on a CPU does it."""
        if self._graph is None:
            self._step()
        else:
            with torch.cuda.stream(self.stream):
                self._graph.replay()

    def _step(self) -> torch.Tensor:
        x = self._x
        for layer in self._layers:
            q, _, _ = layer.project(x)
            attended = scaled_dot_product_attention(
                q.unsqueeze(2), self._k, self._v, enable_gqa=True
            )
            x = layer.finish(x, attended.flatten(1))
        return x


class PagedModel:
    """A transformer that keeps K and V in paged blocks: prefill in chunks, like a server's.

    ``cache[i]`` is layer i: ``[2, num_blocks, block_tokens, kv_heads, head_dim]``. Within a chunk
    every token sees every other: the work of a causal prefill and a little more.
    """

    def __init__(
        self,
        shape: ModelShape,
        cache: Sequence[torch.Tensor],
        *,
        device: str,
        dtype: torch.dtype,
    ) -> None:
        self.shape = shape
        self._cache = cache
        self._dtype = dtype
        self._block_tokens = cache[0].shape[2]
        self._layers = [_Layer(shape, device, dtype) for _ in range(shape.layers)]

    def prefill(
        self,
        x: torch.Tensor,
        blocks: torch.Tensor,
        *,
        start: int,
        chunk: int,
        before: Callable[[int], None] | None = None,
        after: Callable[[int], None] | None = None,
    ) -> torch.Tensor:
        """Runs tokens ``start`` … ``start + n`` of a sequence.

        Args:
            x: ``[n, hidden]``.
            blocks: int64 ``[(start + n) / block_tokens]``, the sequence's blocks on the device; its
                first ``start`` tokens are read from there.
            start, chunk: multiples of the block's tokens, as n is.
            before, after: called around every layer of every chunk with the layer's number.

        Returns:
            the last chunk's output ``[<= chunk, hidden]``.

        Raises:
            ValueError: sizes are not multiples of a block's tokens.
        """
        tokens = self._block_tokens
        if start % tokens or chunk % tokens or x.shape[0] % tokens:
            raise ValueError(f"start, chunk and the tokens of x must be multiples of {tokens}")
        rows = x[:0]
        for first in range(0, x.shape[0], chunk):
            rows = x[first : first + chunk]
            for index in range(self.shape.layers):
                if before is not None:
                    before(index)
                rows = self._layer(index, rows, blocks, start + first)
                if after is not None:
                    after(index)
        return rows

    def _layer(self, index: int, x: torch.Tensor, blocks: torch.Tensor, start: int) -> torch.Tensor:
        layer, kv = self._layers[index], self._cache[index]
        end = start + x.shape[0]
        first, last = start // self._block_tokens, end // self._block_tokens
        q, *new = layer.project(x)
        seen = []
        for plane, rows in zip(kv, new, strict=True):
            paged = rows.unflatten(0, (-1, self._block_tokens)).to(plane.dtype)
            plane.index_copy_(0, blocks[first:last], paged)
            seen.append(plane.index_select(0, blocks[:last]).flatten(0, 1).to(self._dtype))
        # [1, heads, tokens, head_dim]
        q, k, v = (t.transpose(0, 1).unsqueeze(0) for t in (q, *seen))
        attended = scaled_dot_product_attention(q, k, v, enable_gqa=True)
        return layer.finish(x, attended.squeeze(0).transpose(0, 1).flatten(1))
