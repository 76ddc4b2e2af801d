"""Utility of a U2 request at one stage (paper, eqs 1 and 2).

What is the same for every request of a round sits in `Weights`, so that one request costs a few
multiplications.
"""

from __future__ import annotations

from typing import NamedTuple

from liveserve.scheduler.policy_config import PolicyConfig

# Eq (2) divides by P_safe: a smaller one, 0 among them, counts as this.
MIN_P_SAFE_S = 0.01


class Weights(NamedTuple):
    """U = per_block · blocks − per_second · max(0, P − p_safe_s) for the requests of one round.

    per_block is β · pressure / total blocks: 0 below the KV watermark, and where the pool's
    counts are unknown. per_second is α / P_safe.
    """

    per_block: float
    per_second: float
    p_safe_s: float


def kv_pressure(free_blocks: int, total_blocks: int, watermark: float) -> float:
    """How full the KV pool is above ``watermark``: 0 at or below it, then linear to 1 when full.

    The ramp keeps the order from jumping when usage crosses the watermark.
    """
    if total_blocks <= 0 or watermark >= 1:
        return 0.0
    usage = 1.0 - free_blocks / total_blocks
    return min(1.0, max(0.0, (usage - watermark) / (1.0 - watermark)))


def weights(free_blocks: int | None, total_blocks: int | None, config: PolicyConfig) -> Weights:
    """The weights of a round, from the pool's real block counts (None: unknown).

    U_kv of eq (1) is the request's share of the pool times `kv_pressure`. With utility switched
    off all weights are 0.
    """
    if not config.utility:
        return Weights(0.0, 0.0, config.p_safe_s)
    per_block = 0.0
    if free_blocks is not None and total_blocks:
        pressure = kv_pressure(free_blocks, total_blocks, config.kv_high_watermark)
        per_block = config.beta * pressure / total_blocks
    per_second = config.alpha / max(config.p_safe_s, MIN_P_SAFE_S)
    return Weights(per_block, per_second, config.p_safe_s)


def utility(buffer_s: float | None, kv_blocks: int | None, of_round: Weights) -> float:
    """Eq (1): U of a request with buffer P that holds ``kv_blocks``.

    An input that is missing adds nothing: without a buffer there is no cost, without a block
    count no KV term, without both U is 0 and ready age decides.
    """
    per_block, per_second, p_safe_s = of_round
    gain = per_block * kv_blocks if kv_blocks else 0.0
    if buffer_s is not None and buffer_s > p_safe_s:
        return gain - per_second * (buffer_s - p_safe_s)
    return gain
