"""What a tier tells of itself: totals, regret, reload times. Everything here is bounded."""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field


@dataclass(slots=True)
class TierReport:
    """One DRAM tier, as of now. What is counted counts blocks, since the start.

    Attributes:
        policy: name of the policy that chooses its victims.
        slots, used: of the pool; ``block_bytes`` each.
        hits: found in DRAM by a request, whether it waited for them or they had been preloaded.
        preloaded: loaded without a request.
        timeouts, no_room: requests that waited too long, or for whose load the GPU had no room.
        store_missed: left the GPU, or were taken back, before they were stored.
        refused: stores for which no slot could be had.
        evicted: by reason.
        regret: evicted, then asked for within ``regret_s``.
        loading, storing: under way now.
        reloads: times that a request waited for its blocks; how long, of the newest.
    """

    policy: str = ""
    slots: int = 0
    used: int = 0
    block_bytes: int = 0
    hits: int = 0
    preloaded: int = 0
    timeouts: int = 0
    no_room: int = 0
    stored: int = 0
    store_failed: int = 0
    store_missed: int = 0
    refused: int = 0
    loaded: int = 0
    load_failed: int = 0
    corrupt: int = 0
    evicted: dict[str, int] = field(default_factory=dict)
    regret: int = 0
    regret_s: float = 0.0
    loading: int = 0
    storing: int = 0
    reloads: int = 0
    reload_p50_ms: float = 0.0
    reload_p90_ms: float = 0.0
    reload_max_ms: float = 0.0
    errors: int = 0


class Regret:
    """Counts what was evicted and asked for again soon.

    Args:
        window_s: how soon.
        capacity: the oldest evictions are forgotten beyond that.
    """

    def __init__(self, window_s: float, capacity: int) -> None:
        if not (math.isfinite(window_s) and window_s > 0):
            raise ValueError(f"window_s must be a finite number above 0, got {window_s!r}")
        if capacity < 1:
            raise ValueError(f"capacity must be 1 or more, got {capacity}")
        self.window_s = window_s
        self.count = 0
        self._capacity = capacity
        self._evicted_s: OrderedDict[Hashable, float] = OrderedDict()

    def __len__(self) -> int:
        """Evictions that are remembered."""
        return len(self._evicted_s)

    def evicted(self, keys: Iterable[Hashable], now_s: float) -> None:
        """``keys`` were evicted."""
        known = self._evicted_s
        for key in keys:
            known.pop(key, None)
            known[key] = now_s
        while known and (
            len(known) > self._capacity or now_s - next(iter(known.values())) > self.window_s
        ):
            known.popitem(last=False)

    def needed(self, key: Hashable, now_s: float) -> bool:
        """``key`` is asked for, and is back after this. Returns whether that is one to regret."""
        evicted_s = self._evicted_s.pop(key, None)
        soon = evicted_s is not None and now_s - evicted_s <= self.window_s
        self.count += soon
        return soon

    def clear(self) -> None:
        """What was evicted so far is worth nothing any more (reset)."""
        self._evicted_s.clear()


class Latencies:
    """The newest ``window`` waits, in milliseconds."""

    def __init__(self, window: int = 1024) -> None:
        self._ms: deque[float] = deque(maxlen=window)
        self.count = 0

    def add(self, ms: float) -> None:
        self._ms.append(ms)
        self.count += 1

    def percentile_ms(self, share: float) -> float:
        """Of the window, nearest rank, 0 … 1; 0 if there were none."""
        ordered = sorted(self._ms)
        if not ordered:
            return 0.0
        return ordered[min(len(ordered) - 1, max(0, math.ceil(share * len(ordered)) - 1))]
