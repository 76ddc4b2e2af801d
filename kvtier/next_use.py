"""When a session's history will be read again (paper eq. 4): T_next = T_play + T_reply.

T_reply, the gap from the end of playback to the next input, is a moving average per session that
is shrunk to the workload's average while the session has few observations.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field


@dataclass(slots=True)
class GapPrior:
    """Average reply gap over all sessions.

    Args:
        mean_s: value before anything was observed.
        weight: how many observations the initial value counts for.
        window: observations after which old ones fade.
    """

    mean_s: float = 2.0
    weight: float = 4.0
    window: float = 256.0

    def observe(self, gap_s: float) -> None:
        self.weight = min(self.weight + 1.0, self.window)
        self.mean_s += (gap_s - self.mean_s) / self.weight


@dataclass(slots=True)
class ReplyGap:
    """One session's reply gap in seconds, shrunk to ``prior`` by ``shrinkage`` pseudo-observations.

    A gap that is negative or not finite is ignored: the user spoke over the answer, or a clock
    was wrong, and neither tells how long this user waits.
    """

    prior: GapPrior
    shrinkage: float = 2.0
    decay: float = 0.7
    _sum_s: float = field(default=0.0, repr=False)
    _count: float = field(default=0.0, repr=False)

    def observe(self, gap_s: float) -> None:
        if not math.isfinite(gap_s) or gap_s < 0:
            return
        self._sum_s = self._sum_s * self.decay + gap_s
        self._count = self._count * self.decay + 1.0
        self.prior.observe(gap_s)

    @property
    def mean_s(self) -> float:
        """Expected gap in seconds."""
        total = self._sum_s + self.shrinkage * self.prior.mean_s
        return total / (self._count + self.shrinkage)


def next_use_s(now_s: float, remaining_playback_s: float, reply_gap_s: float) -> float:
    """Absolute time at which the history is expected to be needed (paper eq. 4)."""
    return now_s + max(0.0, remaining_playback_s) + max(0.0, reply_gap_s)
