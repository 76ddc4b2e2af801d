"""Urgency classes of a request at one stage (paper, Scheduling).

U0: playing and about to run dry. U1: nothing audible yet. U2: the rest, to be ordered by utility.
A request whose session is unknown, stale or silent is U2 without a buffer: it keeps host order.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from liveserve.scheduler.views import SessionView


class Urgency(IntEnum):
    U0 = 0
    U1 = 1
    U2 = 2


_U0, _U1, _U2 = Urgency


@dataclass(slots=True)
class Rank:
    """Where one request stands. ``buffer_s`` (P_i^s) is None where it is not defined."""

    urgency: Urgency
    buffer_s: float | None
    age_s: float


def rank(
    view: SessionView | None,
    produced_s: float,
    p_safe_s: float,
    arrival_s: float,
    now_s: float,
    into: Rank | None = None,
) -> Rank:
    """Class, P_i^s and ready age of a request.

    Args:
        view: its session, or None if there is no trustworthy one.
        produced_s: what this stage made for it so far, in seconds of audio.
        p_safe_s: the smallest buffer that is safe from an underrun at this stage (P_safe^s).
        arrival_s: when the request reached this stage's engine.
        now_s: the time of this round.
        into: is changed and returned instead of a new one, which would take as long as the rest.
    """
    ranked = Rank(_U2, None, 0.0) if into is None else into
    if view is None or not view.wants_audio:
        ranked.urgency, ranked.buffer_s, ranked.age_s = _U2, None, max(0.0, now_s - arrival_s)
        return ranked
    ready_s = view.ready_at_s
    age_s = now_s - (ready_s if ready_s > arrival_s else arrival_s)
    if age_s < 0.0:
        age_s = 0.0
    clock = view.clock
    routed_s = clock.routed_s
    if not routed_s > 0.0:
        ranked.urgency, ranked.buffer_s, ranked.age_s = _U1, None, age_s
        return ranked
    # `stage_buffer_s` written out: the two calls would be a fifth of the whole.
    played_s, rate = clock.position_s, clock.rate
    if not clock.paused:
        elapsed_s = now_s - clock.position_at_s
        if elapsed_s > 0.0:
            played_s += rate * elapsed_s
        if played_s > routed_s:
            played_s = routed_s
    buffer_s = (produced_s - played_s) / rate
    ranked.urgency = _U0 if buffer_s <= p_safe_s else _U2
    ranked.buffer_s, ranked.age_s = buffer_s, age_s
    return ranked
