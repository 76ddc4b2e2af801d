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

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from liveserve.scheduler.pacing import bars, may_hold, next_deadline_s
from liveserve.scheduler.policy_config import PolicyConfig
from liveserve.scheduler.urgency import Rank, Urgency
from liveserve.scheduler.utility import weights


@dataclass(slots=True)
class Candidate:
    """One request of a round. The caller may keep one per request and refresh it every round.

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


# Everybody fits.
NO_BUDGETS = Budgets(1 << 60, None, None)


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


# What a class is sorted by. The id settles ties: two requests are never compared.
_Key = tuple[float | None, float, str, Candidate]


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
    start_s, start_utility, stay_s, stay_utility, held_since_s = bars(of_round, now_s, config)
    start_loss, stay_loss = -start_utility, -stay_utility
    overdue_s = now_s - 2.0 * config.age_limit_s
    playing, efficient, loss_per_block = Urgency.U0, Urgency.U2, -per_block
    least_buffer_s = least_since_s = math.inf
    first: list[_Key] = []
    overdue: list[_Key] = []
    second: list[_Key] = []
    third: list[_Key] = []
    paced: list[_Key] = []
    for candidate in candidates:
        request_id, ranked = candidate.request_id, candidate.rank
        urgency, buffer_s = ranked.urgency, ranked.buffer_s
        since_s = candidate.since_s
        if urgency is efficient and since_s > overdue_s:
            # `utility.utility` written out, with its sign turned: the call would be a tenth of
            # the round.
            blocks = candidate.kv_blocks_held
            loss = loss_per_block * blocks if blocks else 0.0
            if buffer_s is not None and buffer_s > p_safe_s:
                loss += per_second * (buffer_s - p_safe_s)
            key = (loss, -ranked.age_s, request_id, candidate)
            if buffer_s is None or not (
                buffer_s > start_s or (buffer_s > stay_s and request_id in held)
            ):
                third.append(key)
                contended = contended or candidate.waiting
            elif since_s > held_since_s and loss > (
                stay_loss if request_id in held else start_loss
            ):
                paced.append(key)
                if buffer_s < least_buffer_s:
                    least_buffer_s = buffer_s
                if since_s < least_since_s:
                    least_since_s = since_s
            else:
                third.append(key)
        elif urgency is playing:
            first.append((buffer_s, -ranked.age_s, request_id, candidate))
        elif since_s <= overdue_s:
            overdue.append((candidate.waiting, since_s, request_id, candidate))
        else:
            second.append((-ranked.age_s, 0.0, request_id, candidate))
    contended = contended or bool(first or overdue or second)
    if paced and not (config.pace and may_hold(contended, barge_in_rate)):
        third += paced
        paced = []
    if config.order:
        for keys in (first, overdue, second, third, paced):
            keys.sort()
        runs = [*first, *overdue, *second, *third]
    else:
        place = {candidate.request_id: index for index, candidate in enumerate(candidates)}
        runs = [*first, *overdue, *second, *third]
        for keys in (runs, third, paced):
            keys.sort(key=lambda key: place[key[2]])
    sitting = [key[2] for key in paced]
    runnable = [key[2] for key in runs]
    if budgets is NO_BUDGETS:
        admitted, blocked = runnable, None
    else:
        admitted, blocked = _admit(runs, runnable, budgets)
    deadline_s = None
    if paced:
        deadline_s = next_deadline_s(least_buffer_s, least_since_s, now_s, config)
    victims = [key[2] for key in third + paced if not key[3].waiting]
    victims.reverse()
    return Plan(
        tuple(runnable + sitting),
        frozenset(sitting),
        tuple(admitted),
        blocked,
        tuple(victims),
        deadline_s,
    )


def _admit(
    runs: Sequence[_Key], runnable: list[str], budgets: Budgets
) -> tuple[list[str], str | None]:
    """Ids of what fits of ``runs`` (their ids: ``runnable``), and of the request that ended it."""
    tokens, free, total = budgets
    blocks = sys.maxsize if free is None else free
    # Mostly all do, which two sums show sooner than a walk does.
    if (
        sum([key[3].tokens_needed for key in runs]) <= tokens
        and sum([key[3].kv_blocks_needed for key in runs]) <= blocks
    ):
        return runnable, None
    admitted: list[str] = []
    for _, _, request_id, candidate in runs:
        wanted, more = candidate.tokens_needed, candidate.kv_blocks_needed
        if wanted > tokens > 0 and candidate.is_prefill:
            wanted = tokens
        if wanted > tokens or more > blocks:
            never = wanted > budgets.tokens and not candidate.is_prefill
            needs = (candidate.kv_blocks_held or 0) + more
            if never or (free is not None and total is not None and needs > total):
                continue
            return admitted, request_id
        tokens -= wanted
        blocks -= more
        admitted.append(request_id)
    return admitted, None
