"""What the planning policy can be told about one stage. Pure data; no host, no files."""

from __future__ import annotations

import math

import msgspec


class PolicyConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The policy of one stage. Buffers and ages are wall seconds.

    ``p_safe_s <= p_release_s < p_hold_s``: a hold begins above p_hold_s and ends at p_release_s.
    The paper gives no values: the defaults are those of a stage that makes a chunk in well under
    half a second; α and β are what an offline sweep tunes.

    Attributes:
        p_safe_s: smallest buffer that is safe from an underrun (paper, P_safe^s). The same value
            must classify the requests (`liveserve.scheduler.urgency.rank`).
        p_hold_s: a request with more buffer than this may be held.
        p_release_s: a held request runs again at this buffer or less. Not below the time that
            this stage and those after it need for the next chunk.
        alpha: weight of the buffer that a barge-in would waste (paper, eq 1). 0: utility
            is never negative, so with ``utility`` on nothing is held.
        beta: weight of the KV that finishing would release (paper, eq 1). U_kv is a share of the
            pool: with the defaults no hold begins at p_hold_s for a request that has more than
            1/16 of a full pool.
        kv_high_watermark: share of the KV pool, 0 to 1, from which on held KV counts. 1: never.
        age_limit_s: no request is held for longer; one that got nothing for twice as long goes
            ahead of U1 (`liveserve.scheduler.plan`).
        order: sort by class. Off: the caller's order.
        pace: hold requests.
        utility: order U2 by utility and let KV pressure end a hold. Off: U2 by ready age, and
            holding looks at the buffer alone.

    Raises:
        ValueError: a value is out of its range; names the field.
    """

    p_safe_s: float = 0.5
    p_hold_s: float = 2.0
    p_release_s: float = 1.0
    alpha: float = 1.0
    beta: float = 16.0
    kv_high_watermark: float = 0.9
    age_limit_s: float = 5.0
    order: bool = True
    pace: bool = True
    utility: bool = True

    def __post_init__(self) -> None:
        for name in ("p_safe_s", "p_hold_s", "p_release_s", "alpha", "beta", "kv_high_watermark"):
            _number(name, getattr(self, name))
        if _number("age_limit_s", self.age_limit_s) == 0:
            raise ValueError("age_limit_s must be above 0: give seconds, for example 5.0")
        if self.kv_high_watermark > 1:
            raise ValueError(
                f"kv_high_watermark is a share of the pool: use 0 to 1, got "
                f"{self.kv_high_watermark!r}"
            )
        if self.p_release_s < self.p_safe_s:
            raise ValueError(
                f"p_release_s ({self.p_release_s}) must not be below p_safe_s ({self.p_safe_s}): "
                "a held request would run dry"
            )
        if self.p_hold_s <= self.p_release_s:
            raise ValueError(
                f"p_hold_s ({self.p_hold_s}) must be above p_release_s ({self.p_release_s}): "
                "without a gap requests flap between held and running"
            )
        for name in ("order", "pace", "utility"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} is a switch: use true or false")


def _number(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError(f"{name} must be a number, got {value!r}")
    if not math.isfinite(value) or value < 0:
        raise ValueError(f"{name} must be a finite number, 0 or more, got {value!r}")
    return value
