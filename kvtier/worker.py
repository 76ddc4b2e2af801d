"""The worker's half of the KV tier: runs jobs on the GPU blocks and DRAM slots of one process.

It knows tensors and numbers, no host: `liveserve.host.connector` gives it vLLM's cache, and on a
GPU it runs as well without vLLM. One thread owns it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from liveserve.kernels.layout import PagedCache
from liveserve.kvtier.jobs import Ended, Job
from liveserve.kvtier.links import open_link
from liveserve.kvtier.pool import GIB, HostPool, slots_in
from liveserve.kvtier.transfer import TransferEngine
from liveserve.kvtier.transfer_base import ChecksumError, Kind, Ready, Transfer, TransferError

if TYPE_CHECKING:
    import torch

    from liveserve.kvtier.rows import Companion

logger = logging.getLogger("vllm.liveserve")


def describe(layers: Mapping[str, torch.Tensor], num_blocks: int) -> PagedCache:
    """Where the bytes of a host's cache are.

    Args:
        layers: a tensor for each layer by name, in order. Blocks are counted by the first
            dimension or, behind K and V, by the second; an attention backend may count several
            blocks for each of the KV manager's. Layers that share one tensor are described once.
        num_blocks: blocks of the KV manager.

    Raises:
        ValueError: no such dimension, or blocks that are not a few contiguous pieces.
    """
    seen: dict[int, torch.Tensor] = {}
    for name, tensor in layers.items():
        shape = getattr(tensor, "shape", None)
        if shape is None or not len(shape):
            raise ValueError(f"layer {name} has no tensor of blocks (a {type(tensor).__name__})")
        seen.setdefault(tensor.data_ptr(), tensor)
    tensors = list(seen.values())
    if not tensors:
        raise ValueError("the cache has no layers")
    shape = tuple(tensors[0].shape)
    for block_dim in (0, 1):
        count = shape[block_dim] if block_dim < len(shape) else 0
        if count >= num_blocks and count % num_blocks == 0 and (block_dim == 0 or shape[0] == 2):
            return PagedCache.from_layers(
                tensors, block_dim=block_dim, kernel_blocks_per_block=count // num_blocks
            )
    raise ValueError(f"no dimension of {shape} counts the {num_blocks} blocks of the cache")


class KvWorker:
    """Copies what it is told to, and says how it ended.

    Args:
        cache: the paged cache.
        num_slots: slots of the pool; whoever gives jobs decides which of them are used.
        companion: keeps what belongs to a block beside its KV; see `liveserve.kvtier.rows`.
        link_gbps: on a CPU: as slow as a link of that rate, 1e9 bytes/s.
        checksums: check what is loaded against what was stored.
        max_wait_s: see `TransferEngine`.

    Raises:
        PoolError: the memory cannot be had.
        ValueError: ``link_gbps`` is not positive, or given for a GPU.
    """

    def __init__(
        self,
        cache: PagedCache,
        num_slots: int,
        *,
        companion: Companion | None = None,
        link_gbps: float | None = None,
        checksums: bool = False,
        max_wait_s: float = 0.001,
    ) -> None:
        self.cache = cache
        self.pool = HostPool(num_slots, cache.slot_bytes, device=cache.device)
        try:
            link = open_link(cache, self.pool.data, link_gbps=link_gbps)
        except BaseException:
            self.pool.close()
            raise
        self.engine = TransferEngine(
            cache, self.pool.data, link, max_wait_s=max_wait_s, checksums=checksums
        )
        self._companion = companion
        self._moving: dict[int, Transfer] = {}
        self._ended: list[Ended] = []
        self._warned = False

    @property
    def num_moving(self) -> int:
        """Jobs that have not ended yet, or were not reported."""
        return len(self._moving) + len(self._ended)

    def begin(self, jobs: Iterable[Job], after: Ready | None = None) -> None:
        """Start ``jobs``, in order. What cannot start ends as failed.

        Args:
            after: nothing moves before this has happened: all compute that was enqueued so far, so
                that a store reads what it wrote, and a load overwrites nothing that it reads. None:
                it has.
        """
        for job in jobs:
            try:
                self._moving[job.number] = self.engine.submit(
                    job.kind, job.block_ids, job.slot_ids, after=after, tag=job
                )
            except (TransferError, ValueError) as error:
                self._fail(job, error)

    def cancel(self, numbers: Iterable[int]) -> None:
        """Move no more of these jobs; they end as failed unless they have ended."""
        for number in numbers:
            transfer = self._moving.get(number)
            if transfer is not None:
                self.engine.cancel(transfer)

    def promote(self, numbers: Iterable[int]) -> None:
        """Somebody waits for these preloads."""
        for number in numbers:
            transfer = self._moving.get(number)
            if transfer is not None and transfer.kind is not Kind.STORE:
                self.engine.promote(transfer)

    def wait(self, timeout_s: float) -> None:
        """Return when the oldest load that a request waits for has moved, if there is one, or
        after ``timeout_s``."""
        loads = (t for t in self._moving.values() if t.kind is Kind.ON_PATH)
        oldest = next(loads, None)
        if oldest is not None:
            self.engine.wait(oldest, timeout_s)

    def poll(self) -> list[Ended]:
        """Jobs that ended since the last call, with their companions saved or restored."""
        for transfer in self.engine.poll():
            job: Job = transfer.tag
            del self._moving[job.number]
            if transfer.ok:
                self._follow(job)
            else:
                self._fail(job, transfer.error)
        ended, self._ended = self._ended, []
        return ended

    def close(self) -> None:
        """Stop, without waiting for what has not begun. Closing again does nothing."""
        self.engine.close(drain=False)
        self.pool.close()

    def _follow(self, job: Job) -> None:
        """The KV is there: now what belongs to it."""
        companion = self._companion
        try:
            if companion is None:
                pass
            elif job.kind is Kind.STORE:
                companion.save(job.block_ids, job.slot_ids)
            else:
                companion.restore(job.slot_ids, job.block_ids)
        except Exception as error:
            self._fail(job, error)
        else:
            self._ended.append(Ended(job.number, True))

    def _fail(self, job: Job, error: BaseException | None) -> None:
        corrupt = (error.slot,) if isinstance(error, ChecksumError) else ()
        self._ended.append(Ended(job.number, False, corrupt, str(error or "cancelled")))
        if error is not None and not self._warned:
            self._warned = True
            logger.warning(
                "LiveServe: a %s of %d KV blocks failed: %s. What is missing is recomputed "
                "(counted in the metrics, logged once).",
                job.kind.name.lower().replace("_", "-"),
                len(job.block_ids),
                error,
            )


def compute_so_far(device: Any) -> Ready | None:
    """Something that has happened once all work that is enqueued on ``device``'s current stream is
    done; None on a CPU, where it is.
    """
    import torch

    if torch.device(device).type != "cuda":
        return None
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    return event


def slots_for(dram_bytes: int, cache: PagedCache, row_bytes: int = 0) -> int:
    """Slots that ``dram_bytes`` hold, each with its companion rows.

    Raises:
        PoolError: not even one.
    """
    return slots_in(dram_bytes / GIB, cache.slot_bytes + row_bytes)
