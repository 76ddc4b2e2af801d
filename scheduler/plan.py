"""Algorithm 1: one planning round of one stage, as a pure function.

The order is U0 ‖ overdue ‖ U1 ‖ U2 ‖ held:

- U0 by buffer, smallest first. Strict priority over everything.
- Overdue: not U0, and got nothing for 2 · age_limit_s. Running before waiting, because only what
  holds KV can give it back; then whoever got nothing for longest. So nobody starves behind a
  stream of new U1 or behind a large request that KV does not suffice for.
- U1 by ready age, oldest first.
- U2 by utility, largest first; equal ones by ready age, oldest first.
- Held (`liveserve.scheduler.pacing`), ordered as U2 is.

The request id breaks ties, so the plan does not depend on the order of the input.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import NamedTuple

from liveserve.scheduler.pacing import bars, may_hold, next_deadline_s
from liveserve.scheduler.policy_config import PolicyConfig
from liveserve.scheduler.urgency import Rank, Urgency
from liveserve.scheduler.utility import weights


class Candidate(NamedTuple):
    """One request of a round.

    Attributes:
        tokens_needed: tokens it would take this round.
        kv_blocks_held: KV blocks it owns; None if unknown.
        kv_blocks_needed: further blocks that ``tokens_needed`` tokens take.
        waiting: not among the host's running requests.
        is_prefill: may take fewer tokens than it needs (chunked prefill).
        since_s: when it was last scheduled or became able to run, whichever is later; clock of
            ``now_s``.
    """

    request_id: str
    rank: Rank
    tokens_needed: int
    kv_blocks_held: int | None
    kv_blocks_needed: int
    waiting: bool
    is_prefill: bool
    since_s: float


class Budgets(NamedTuple):
    """What a round may spend. Without block counts (None) the host alone guards its pool."""

    tokens: int
    free_blocks: int | None
    total_blocks: int | None


class Plan(NamedTuple):
    """A round.

    Attributes:
        order: every request, most urgent first, held ones last.
        held: must not run this round. Input of the next round.
        admitted: what fits the budgets, in order, up to the first that does not fit. One that
            would not fit an idle engine either is passed over instead of stopping everybody.
        blocked: the request that did not fit; None if all did.
        victims: who gives its KV back first where preemption is needed: running U2, from the
            back of ``order``. Overdue requests are spared.
        next_deadline_s: when the first held request must run again, on the clock of ``now_s``:
            an engine with nothing else to do can sleep until then. None if none is held.
    """

    order: tuple[str, ...]
    held: frozenset[str]
    admitted: tuple[str, ...]
    blocked: str | None
    victims: tuple[str, ...]
    next_deadline_s: float | None


def plan(
    candidates: Sequence[Candidate],
    budgets: Budgets,
    held: frozenset[str],
    now_s: float,
    config: PolicyConfig,
    *,
    barge_in_rate: float = 0.0,
    contended: bool = False,
) -> Plan:
    """Order, hold and admit.

    Args:
        candidates: every request that could run now, each id once.
        held: `Plan.held` of the round before.
        barge_in_rate: share of responses that users interrupt, 0 to 1; unknown is 0.
        contended: somebody outside of this engine wants what a hold would free, for example
            another stage on the same device. Contention inside is seen here: an overdue request,
            a U0, a U1, or a waiting U2 whose buffer is too small to hold it.
    """
    of_round = weights(budgets.free_blocks, budgets.total_blocks, config)
    per_block, per_second, p_safe_s = of_round
    start, stay, held_since_s = bars(of_round, now_s, config)
    overdue_s = now_s - 2.0 * config.age_limit_s
    playing, unheard = Urgency.U0, Urgency.U1
    # One list of sort keys per class. They end in the id and the request, which settle ties:
    # ids are unique, so two requests are never compared.
    first: list[tuple[float | None, float, str, Candidate]] = []
    overdue: list[tuple[bool, float, str, Candidate]] = []
    second: list[tuple[float, str, Candidate]] = []
    third: list[tuple[float, float, str, Candidate]] = []
    paced: list[tuple[float, float, str, Candidate]] = []
    for candidate in candidates:
        request_id, (urgency, buffer_s, age_s), _, blocks, _, waiting, _, since_s = candidate
        if urgency is playing:
            first.append((buffer_s, -age_s, request_id, candidate))
        elif since_s <= overdue_s:
            overdue.append((waiting, since_s, request_id, candidate))
        elif urgency is unheard:
            second.append((-age_s, request_id, candidate))
        else:
            # `utility.utility` written out: the call would be a tenth of the round.
            gain = per_block * blocks if blocks else 0.0
            if buffer_s is not None and buffer_s > p_safe_s:
                gain -= per_second * (buffer_s - p_safe_s)
            above_s, below = stay if request_id in held else start
            if buffer_s is None or not buffer_s > above_s:
                third.append((-gain, -age_s, request_id, candidate))
                contended = contended or waiting
            elif gain < below and since_s > held_since_s:
                paced.append((-gain, -age_s, request_id, candidate))
            else:
                third.append((-gain, -age_s, request_id, candidate))
    contended = contended or bool(first or overdue or second)
    if paced and not (config.pace and may_hold(contended, barge_in_rate)):
        third += paced
        paced = []
    if config.order:
        for keys in (first, overdue, second, third, paced):
            keys.sort()
        rest = [key[3] for key in third]
        sitting = [key[3] for key in paced]
        runnable = [key[3] for key in first]
        runnable += [key[3] for key in overdue]
        runnable += [key[2] for key in second]
        runnable += rest
    else:
        held_now = {key[2] for key in paced}
        efficient = {key[2] for key in third}
        sitting = [c for c in candidates if c.request_id in held_now]
        runnable = [c for c in candidates if c.request_id not in held_now]
        rest = [c for c in runnable if c.request_id in efficient]
    admitted, blocked = _admit(runnable, budgets)
    sitting_ids = [candidate[0] for candidate in sitting]
    deadline_s = None
    if paced:
        buffers = [key[3][1][1] or 0.0 for key in paced]  # nothing is held without a buffer
        oldest_s = min([key[3][7] for key in paced])
        deadline_s = next_deadline_s(min(buffers), oldest_s, now_s, config)
    victims = [candidate[0] for candidate in rest + sitting if not candidate[5]]
    victims.reverse()
    return Plan(
        tuple([candidate[0] for candidate in runnable] + sitting_ids),
        frozenset(sitting_ids),
        tuple(admitted),
        blocked,
        tuple(victims),
        deadline_s,
    )


def _admit(runnable: Sequence[Candidate], budgets: Budgets) -> tuple[list[str], str | None]:
    """Ids of what fits, and of the request that ended it."""
    tokens = budgets.tokens
    free, total = budgets.free_blocks, budgets.total_blocks
    blocks = sys.maxsize if free is None else free
    admitted: list[str] = []
    for request_id, _, wanted, held, more, _, is_prefill, _ in runnable:
        if wanted > tokens > 0 and is_prefill:
            wanted = tokens
        if wanted > tokens or more > blocks:
            never = wanted > budgets.tokens and not is_prefill
            if never or (free is not None and total is not None and (held or 0) + more > total):
                continue
            return admitted, request_id
        tokens -= wanted
        blocks -= more
        admitted.append(request_id)
    return admitted, None
