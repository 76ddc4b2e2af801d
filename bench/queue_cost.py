"""What our free queue costs over vLLM's own, per block that is taken, hashed and freed.

Sessions take turns on vLLM's real `BlockPool` at the given size: a turn touches the session's
blocks, takes 16 to 64 new ones (which evicts as many), enters them under their hashes, and frees
all of them, with the session's events around it. The same turns run on the host's queue and on
ours, in short blocks that alternate, and each case is the median of them.
"""

from __future__ import annotations

import gc
import random
import statistics
import time
from types import SimpleNamespace
from typing import Any

from liveserve.kvtier.next_use import NextUse

QUEUES = ("host", "lru", "next-use", "log-only")
_SESSION_BLOCKS = 128  # at which a session begins anew
_TOKENS = 16
_CHUNK = 50  # turns at a time


class Turns:
    """One pool under one queue; every instance with the same seed runs the same turns."""

    def __init__(self, queue: str, blocks: int, seed: int) -> None:
        from vllm.v1.core.block_pool import BlockPool

        from liveserve.host.block_pool import GpuKv

        self._draw = random.Random(seed)
        self._pool = BlockPool(blocks, enable_caching=True, hash_block_size=_TOKENS)
        self._next_use = NextUse(max_sessions=blocks)
        self._now_s = 0.0
        self._gpu: GpuKv | None = None
        if queue != "host":
            self._gpu = GpuKv(self._pool, queue, self._next_use, lambda: self._now_s)
        self._sessions = max(4, blocks // (_SESSION_BLOCKS // 2))
        self._hashes: list[list[bytes]] = [[] for _ in range(self._sessions)]
        self._hash = 0

    def run(self, turns: int) -> tuple[float, int]:
        """Seconds in the pool and the blocks handled, over ``turns`` turns."""
        spent_s, handled = 0.0, 0
        for _ in range(turns):
            took_s, blocks = self._turn()
            spent_s += took_s
            handled += blocks
        return spent_s, handled

    def fill(self) -> None:
        """Until every block of the pool has held something, and as much again."""
        left = 2 * self._pool.num_gpu_blocks
        while left > 0:
            left -= self._turn()[1]

    def _turn(self) -> tuple[float, int]:
        draw, pool, gpu = self._draw, self._pool, self._gpu
        session = draw.randrange(self._sessions)
        name = str(session)
        self._now_s += draw.expovariate(self._sessions / 60.0)
        now_s = self._now_s
        hashes = self._hashes[session]
        if len(hashes) > _SESSION_BLOCKS:
            hashes = self._hashes[session] = []
        wanted = draw.randint(16, 64)
        hashes += [(self._hash + i).to_bytes(32, "big") for i in range(wanted)]
        self._hash += wanted
        plays_s, gap_s = draw.uniform(5.0, 60.0), draw.lognormvariate(0.7, 0.6)
        request: Any = SimpleNamespace(block_hashes=hashes)
        hits = []
        for one in hashes:
            found = pool.get_cached_block(one, [0])  # type: ignore[arg-type]
            if found is None:
                break
            hits += found
        started = time.perf_counter()
        if gpu is not None:
            self._next_use.needed(name, now_s)
        pool.touch(hits)
        blocks = hits + pool.get_new_blocks(len(hashes) - len(hits))
        pool.cache_full_blocks(request, blocks, len(hits), len(hashes), _TOKENS, 0)
        if gpu is not None:
            gpu.used(name, [block.block_id for block in blocks])
        pool.free_blocks(reversed(blocks))
        if gpu is not None:
            self._next_use.waiting(name, now_s + plays_s, gap_s, now_s)
        return time.perf_counter() - started, len(blocks)


def measure(blocks: int, turns: int, seed: int) -> list[dict[str, Any]]:
    """One case per queue: ``us_per_block``, and its ratio to the host's.

    Raises:
        ImportError: vLLM is not installed.
    """
    pools = {queue: Turns(queue, blocks, seed) for queue in QUEUES}
    for pool in pools.values():
        pool.fill()
    chunks: dict[str, list[float]] = {queue: [] for queue in QUEUES}
    gc.collect()
    gc.freeze()  # as vLLM does once it is up
    try:
        for _ in range(max(3, turns // _CHUNK)):
            for queue, pool in pools.items():
                spent_s, handled = pool.run(_CHUNK)
                chunks[queue].append(1e6 * spent_s / handled)
    finally:
        gc.unfreeze()
    host_us = statistics.median(chunks["host"])
    return [
        {
            "params": {
                "part": "queue",
                "queue": queue,
                "blocks": blocks,
                "turns": turns,
                "seed": seed,
            },
            "metrics": {
                "us_per_block": statistics.median(times),
                "host_ratio": statistics.median(times) / host_us,
                "pair_ratios": [
                    ours / host for ours, host in zip(times, chunks["host"], strict=True)
                ],
            },
        }
        for queue, times in chunks.items()
    ]


def ratios(cases: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """``queue_cost_ratio``: next use against the host's queue."""
    metrics = next(c["metrics"] for c in cases if c["params"]["queue"] == "next-use")
    pairs = sorted(metrics["pair_ratios"])
    low, high = (pairs[int(share * (len(pairs) - 1))] for share in (0.1, 0.9))
    value = {"value": metrics["host_ratio"], "low": low, "high": high, "better": "lower"}
    return {"queue_cost_ratio": value}
