"""Hold and release: generate just ahead of the listener instead of as fast as possible.

Only a U2 request with a trustworthy buffer is held, and only while holding can profit somebody.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from liveserve.scheduler.policy_config import PolicyConfig
from liveserve.scheduler.utility import Weights

# Users who interrupt more rarely than this count as users who never do.
_RARE = 0.02


class Bars(NamedTuple):
    """What a U2 request must pass to be held this round: more buffer, and less utility.

    Attributes:
        start_s, start_utility: for one that was not held in the round before.
        stay_s, stay_utility: for one that was; less buffer will do, so that a hold lasts.
        since_s: one that last ran, or became able to, at this time or earlier is not held.
    """

    start_s: float
    start_utility: float
    stay_s: float
    stay_utility: float
    since_s: float


def may_hold(contended: bool, barge_in_rate: float) -> bool:
    """Whether holding can profit anybody.

    Args:
        contended: another request wants the step that a hold would free.
        barge_in_rate: share of responses that users of this workload interrupt, 0 to 1.

    If nobody waits and hardly anybody interrupts, running ahead costs nothing and holding might.
    """
    return contended or barge_in_rate > _RARE


def bars(of_round: Weights, now_s: float, config: PolicyConfig) -> Bars:
    """The bars of a round.

    A hold begins above p_hold_s and ends at p_release_s. It begins only if utility will still be
    negative once the buffer has fallen by the difference: so it lasts that long unless KV
    pressure rises. With utility switched off the buffer alone decides.
    """
    start = stay = math.inf
    if config.utility:
        start, stay = of_round.per_second * (config.p_release_s - config.p_hold_s), 0.0
    return Bars(config.p_hold_s, start, config.p_release_s, stay, now_s - config.age_limit_s)


def next_deadline_s(
    least_buffer_s: float, least_since_s: float, now_s: float, config: PolicyConfig
) -> float:
    """When the first of the held requests must run again, on the clock of ``now_s``.

    Args:
        least_buffer_s: smallest P_i^s among them. P is time to underrun, so it falls by one
            second per second; a listener who pauses only makes the deadline early.
        least_since_s: earliest time at which one of them last ran.
    """
    left_s = least_buffer_s - config.p_release_s
    falls_s = now_s + left_s if left_s > 0.0 else now_s
    oldest_s = least_since_s + config.age_limit_s
    return oldest_s if oldest_s < falls_s else falls_s
