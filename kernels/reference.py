"""Copies by torch index operations: the oracle, and what a machine without a GPU uses.

Works plane by plane on tensor views, so it shares no address arithmetic with the other methods.
"""

from __future__ import annotations

import torch

from liveserve.kernels.base import CopyMethod, CopyRequest, Direction
from liveserve.kernels.gpu import on_stream
from liveserve.kernels.layout import SLOT_ALIGN_BYTES, PagedCache


class ReferenceCopy(CopyMethod):
    """See ``CopyMethod``. Needs tensor views of the planes; any device, any alignment."""

    name = "reference"
    needs = "cache has no tensor views: describe it with PagedCache.from_layers"

    def available(self) -> bool:
        return True

    def supports(self, cache: PagedCache, pool: torch.Tensor) -> bool:
        return all(plane.view is not None for planes in cache.layers for plane in planes)

    def run(
        self,
        request: CopyRequest,
        cache: PagedCache,
        pool: torch.Tensor,
        layers: range | None,
        stream: torch.cuda.Stream | None,
    ) -> None:
        """Between a GPU and ordinary memory it blocks the host."""
        direction = request.direction
        blocks, slots = torch.from_numpy(request.block_ids), torch.from_numpy(request.slot_ids)
        device = torch.device(cache.device)
        with on_stream(device, stream):
            if device.type == "cuda" and direction is Direction.LOAD:
                # The host reads the pool at once: what the stream still writes there comes first.
                torch.cuda.current_stream().synchronize()
            for layer in cache.check_layers(layers):
                offset = cache.layer_offsets[layer]
                for plane in cache.layers[layer]:
                    assert plane.view is not None
                    end = offset + plane.fragment_bytes
                    cached, pooled = _widest(plane.view, pool[:, offset:end])
                    if direction is Direction.LOAD:
                        _copy_rows(pooled, slots, cached, blocks)
                    else:
                        _copy_rows(cached, blocks, pooled, slots)
                    offset = -(-end // SLOT_ALIGN_BYTES) * SLOT_ALIGN_BYTES


def _copy_rows(
    source: torch.Tensor, source_ids: torch.Tensor, target: torch.Tensor, target_ids: torch.Tensor
) -> None:
    rows = source.index_select(0, source_ids.to(source.device)).to(target.device)
    target.index_copy_(0, target_ids.to(target.device), rows)


def _widest(*views: torch.Tensor) -> list[torch.Tensor]:
    """The uint8 ``[rows, n]`` views as int64 where all allow it: torch copies elements, not rows,
    so this is five times as fast."""
    words = all(
        number % 8 == 0
        for view in views
        for number in (view.shape[1], view.stride(0), view.storage_offset())
    )
    return [view.view(torch.int64) for view in views] if words else list(views)
