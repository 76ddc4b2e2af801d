"""The link that fits a cache: where it lives decides how its blocks move."""

from __future__ import annotations

from functools import cache as memoized
from typing import TYPE_CHECKING

from liveserve.kernels.base import CopyMethod, Direction
from liveserve.kernels.calibrate import BUILT_IN, Table
from liveserve.kernels.layout import PagedCache
from liveserve.kernels.methods import available_methods
from liveserve.kvtier.transfer_base import Link
from liveserve.kvtier.transfer_cpu import CpuLink
from liveserve.kvtier.transfer_cuda import Choose, CudaLink
from liveserve.kvtier.transfer_pieces import bytes_of

if TYPE_CHECKING:
    import torch


def open_link(
    cache: PagedCache,
    pool: torch.Tensor,
    *,
    link_gbps: float | None = None,
    table: Table = BUILT_IN,
) -> Link:
    """A link between ``cache`` and ``pool`` (uint8 ``[num_slots, >= cache.slot_bytes]``).

    Args:
        link_gbps: rate to imitate on a machine without a GPU, 1e9 bytes/s.
        table: what each method is worth on this machine.

    Raises:
        ValueError: ``link_gbps`` is not positive, or given for a GPU; a GPU's pool is not pinned.
    """
    if cache.device == "cpu":
        return CpuLink(cache, pool, link_gbps=link_gbps)
    if link_gbps is not None:
        raise ValueError(f"--link-gbps imitates a link on a CPU; the cache is on {cache.device}")
    return CudaLink(
        cache, pool, choose=method_chooser(cache, pool, table), gbps=calibrated_gbps(cache, table)
    )


def method_chooser(cache: PagedCache, pool: torch.Tensor, table: Table) -> Choose:
    """Picks by ``table`` among what can copy between the two. Each direction has method objects of
    its own, because each is a thread."""
    methods = {
        direction: {n: m for n, m in available_methods().items() if m.supports(cache, pool)}
        for direction in Direction
    }

    @memoized
    def choose(direction: Direction, num_blocks: int, layers: range) -> CopyMethod:
        pieces = cache.fragments(layers)
        name = table.choose(
            direction,
            pieces.bytes_per_block // len(pieces),
            num_blocks * len(pieces),
            slot_bytes=bytes_of(cache, layers),
            methods=methods[direction],
        )
        return methods[direction][name]

    return choose


def calibrated_gbps(cache: PagedCache, table: Table) -> float:
    """What ``table`` expects of the slower direction in large copies of whole blocks.

    Raises:
        ValueError: the table knows no rate for one direction.
    """
    pieces = cache.fragments()
    size, count = pieces.bytes_per_block // len(pieces), 4800
    best = []
    for direction in Direction:
        names = {rate.method for rate in table.rates if rate.direction is direction}
        rates = [table.gbps(name, direction, size, count) for name in names]
        known = [rate for rate in rates if rate is not None]
        if not known:
            raise ValueError(f"the calibration table has no rate for a {direction.value}")
        best.append(max(known))
    return min(best)
