"""Which replica of a stage takes a session's turn: where its KV is, unless waiting costs more.

KV of one replica cannot be read by another, so what a turn costs elsewhere is the prefill of its
whole history. `choose` compares what each replica would make the turn wait for; everything in
seconds. It is a pure function: where something is not known it leaves the choice to the host.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import median_low
from typing import NamedTuple

# A step of at least so many tokens says what a token of prefill costs; a smaller one, what a step
# costs anyway.
_MANY_TOKENS = 64
# The newest of the former that are remembered; weight of the newest of the latter.
_STEPS = 15
_STEP_WEIGHT = 0.1


@dataclass(frozen=True, slots=True)
class ReplicaView:
    """One replica, as a session's next turn would find it. None: not known.

    Attributes:
        queue_s: how long a request waits there before its own work begins.
        gpu_tokens: of the session's history on its GPU.
        dram_tokens: of the rest, in its DRAM.
        prefill_token_s: seconds to prefill a token.
        load_token_s: seconds to load a token's KV from DRAM.
    """

    replica_id: int
    queue_s: float | None
    gpu_tokens: int | None
    dram_tokens: int | None
    prefill_token_s: float | None
    load_token_s: float | None = 0.0


@dataclass(frozen=True, slots=True)
class ReplicaPolicy:
    """How much a move has to gain. A session's next turns follow the move, and the prefill delays
    others: what gains little is not worth it, and must not be undone a turn later.

    Attributes:
        gain_s: at least so many seconds,
        gain_share: and this share of what the turn costs at the other replica.
    """

    gain_s: float = 0.05
    gain_share: float = 0.25

    def __post_init__(self) -> None:
        for name in ("gain_s", "gain_share"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"{name} must be a finite number, 0 or more, got {value!r}")

    def is_worse(self, cost_s: float, than_s: float) -> bool:
        """Whether ``cost_s`` is worth a move to where it is ``than_s``."""
        return cost_s > than_s * (1.0 + self.gain_share) + self.gain_s


_DEFAULT = ReplicaPolicy()


class Choice(NamedTuple):
    """Attributes:
    replica_id: None: the host chooses.
    why: "kept": where its KV is; "queue": moved, waiting there costs more than the prefill; "load":
        its KV is nowhere, and this replica has clearly less to do than another; "tie": nowhere,
        and they have the same to do; "unknown": something is not known; "single": no choice.
    """

    replica_id: int | None
    why: str


# Every `Choice.why`, and "off": not asked.
WHYS = ("kept", "queue", "load", "tie", "unknown", "single", "off")


def cost_s(view: ReplicaView, history_tokens: int) -> float | None:
    """Seconds until ``view`` has a history of ``history_tokens`` and time for the turn; None if
    something that matters is not known, or cannot be true.
    """
    known = [
        float(part)
        for part in (view.queue_s, view.gpu_tokens, view.dram_tokens, view.prefill_token_s)
        if part is not None and math.isfinite(part) and part >= 0
    ]
    if len(known) < 4:
        return None
    queue_s, gpu, dram, prefill_token_s = known
    gpu = min(gpu, history_tokens)
    dram = min(dram, history_tokens - gpu)
    load_token_s = view.load_token_s if dram else 0.0
    if load_token_s is None or not (math.isfinite(load_token_s) and load_token_s >= 0):
        return None
    return queue_s + dram * load_token_s + (history_tokens - gpu - dram) * prefill_token_s


def choose(
    views: Iterable[ReplicaView],
    history_tokens: int,
    last: int | None,
    policy: ReplicaPolicy = _DEFAULT,
) -> Choice:
    """Who takes the next turn of a session.

    Args:
        views: the replicas that can, in any order.
        history_tokens: of the session, so far.
        last: the replica that took its last turn; None: it had none.
    """
    by_id = {view.replica_id: view for view in views}
    if len(by_id) < 2:
        return Choice(None, "single")
    costs: dict[int, float] = {}
    for replica_id in sorted(by_id):
        cost = cost_s(by_id[replica_id], history_tokens)
        if cost is None:
            return Choice(None, "unknown")
        costs[replica_id] = cost
    best = min(costs, key=costs.__getitem__)
    holds = {r: (v.gpu_tokens or 0) + (v.dram_tokens or 0) for r, v in by_id.items()}
    if history_tokens > 0 and any(holds.values()):
        # Where nothing is left of it, the last replica is one like any other.
        home = last if last in costs and holds[last] else max(sorted(holds), key=holds.__getitem__)
        if policy.is_worse(costs[home], costs[best]):
            return Choice(best, "queue")
        return Choice(home, "kept")
    if policy.is_worse(max(costs.values()), costs[best]):
        return Choice(best, "load")
    return Choice(None, "tie")


class PrefillCost:
    """What a token of prefill costs a stage, from the steps that it makes."""

    def __init__(self) -> None:
        self._step_s: float | None = None
        self._token_s: deque[float] = deque(maxlen=_STEPS)

    def stepped(self, took_s: float, tokens: int) -> None:
        """A step of ``tokens`` new tokens took ``took_s``."""
        if tokens < _MANY_TOKENS:
            before_s = took_s if self._step_s is None else self._step_s
            self._step_s = before_s + _STEP_WEIGHT * (took_s - before_s)
        elif took_s > 0:
            own_s = took_s - min(self._step_s or 0.0, 0.9 * took_s)
            self._token_s.append(own_s / tokens)

    @property
    def token_s(self) -> float | None:
        """Seconds per token, the median (an engine's first steps take many times longer); None
        until there was a step with enough of them.
        """
        return median_low(self._token_s) if self._token_s else None
