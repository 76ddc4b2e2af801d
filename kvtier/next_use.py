"""When a session's history will be read again (paper eq. 4): T_next = T_play + T_reply.

T_reply, the gap from the end of playback to the next input, is a moving average per session that
is shrunk to the workload's average while the session has few observations. `NextUse` keeps T_next
of every session as an absolute time, so it changes on events and not with the clock.

Not every turn is followed by another. What is to be evicted first is therefore not simply the
largest T_next: a session that comes back in 20 s with probability 1/2 is worth as much as one that
surely comes back in 40 s. The chance of another turn is learned by turn number (`NextUse.chance`),
and sessions of one chance are ordered by T_next alone.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

# Classes of sessions by turns answered so far: 1, 2, … LANES and more.
LANES = 8
# Before anything was observed every turn is as likely as this to be followed by another.
_PRIOR_CHANCE = 0.9
_PRIOR_WEIGHT = 8.0
# Observations after which old ones fade.
_WINDOW = 4096.0
# Bins of reply times, four to a doubling of 1 + multiple; the middle of each.
_BINS = 64
_MIDDLES = [2.0 ** ((index + 0.5) / 4.0) - 1.0 for index in range(_BINS)]
# New observations after which sums over the bins are made again.
_REFRESH = 16
# An overdue session is looked at again after at least this share of its expected gap.
_MIN_STEP = 0.25


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


class ReplyTimes:
    """Empirical distribution, over all sessions, of when a reply came or the session ended.

    Times are multiples of the session's own expected gap, so that quick and slow users pool. The
    prior is a Lomax tail: with nothing observed the expected remaining gap is the expected gap
    plus what has passed already, and an end is looked for much later than a reply.
    """

    def __init__(self) -> None:
        self._came = [0.0] * _BINS
        self._ended = [0.0] * _BINS
        self._lane_came = [0.0] * LANES
        self._lane_ended = [0.0] * LANES
        self.chance = [_PRIOR_CHANCE] * LANES  # of another turn, by lane
        # By bin, sums over the bins after it: replies, their times, ends.
        self._later = [(0.0, 0.0, 0.0)] * _BINS
        self._totals = (0.0, 0.0)
        self._unread = 0  # observations that are not in these sums

    def came(self, lane: int, multiple: float) -> None:
        """A reply came ``multiple`` expected gaps after the end of playback."""
        self._came[_bin(multiple)] += 1.0
        self._lane_came[lane] += 1.0
        self._learn()

    def ended(self, lane: int, multiple: float) -> None:
        """The session ended, or was given up, with no further reply."""
        self._ended[_bin(multiple)] += 1.0
        self._lane_ended[lane] += 1.0
        self._learn()

    def remaining(self, lane: int, multiple: float) -> float:
        """Expected gaps until the next use, when ``multiple`` have passed without a reply.

        Given that a reply will come, times how much less likely that has become: sessions that
        will not come back drift towards infinity, and so to the head of the eviction order.
        """
        if self._unread >= _REFRESH:
            self._sum()
        came, came_time, ended = self._later[_bin(multiple)]
        came_time -= came * multiple
        prior = 1.0 + multiple
        total_came = self._totals[0] + _PRIOR_WEIGHT
        total_ended = self._totals[1] + _PRIOR_WEIGHT
        prior_came = _PRIOR_WEIGHT / (prior * prior)
        wait = (came_time + prior_came * prior) / (came + prior_came)
        still_came = (came + prior_came) / total_came
        still_ended = (ended + _PRIOR_WEIGHT / prior) / total_ended
        chance = self.chance[lane]
        # chance ÷ chance given the silence so far, by Bayes' rule
        less_likely = (chance * still_came + (1.0 - chance) * still_ended) / still_came
        return max(wait, _MIN_STEP) * max(less_likely, 1.0)

    def _learn(self) -> None:
        self._unread += 1
        came, ended = sum(self._lane_came), sum(self._lane_ended)
        if came + ended > _WINDOW:
            for counts in (self._came, self._ended, self._lane_came, self._lane_ended):
                counts[:] = [count / 2 for count in counts]
            came, ended = came / 2, ended / 2
        overall = (came + _PRIOR_WEIGHT * _PRIOR_CHANCE) / (came + ended + _PRIOR_WEIGHT)
        for lane in range(LANES):
            seen = self._lane_came[lane] + self._lane_ended[lane] + _PRIOR_WEIGHT
            self.chance[lane] = (self._lane_came[lane] + _PRIOR_WEIGHT * overall) / seen

    def _sum(self) -> None:
        came = came_time = ended = 0.0
        for index in range(_BINS - 1, -1, -1):
            self._later[index] = (came, came_time, ended)
            came += self._came[index]
            came_time += self._came[index] * _MIDDLES[index]
            ended += self._ended[index]
        self._totals = (came, ended)
        self._unread = 0


def _bin(multiple: float) -> int:
    return min(_BINS - 1, int(4.0 * math.log2(1.0 + multiple)))


@dataclass(slots=True)
class Estimate:
    """Next use of one session.

    Attributes:
        next_use_s: absolute time; in the past for a session that is needed now.
        lane: class of return chance, an index into `NextUse.chance`.
    """

    next_use_s: float
    lane: int
    needed: bool
    turns: int
    since_s: float  # needed: when that began; waiting: end of playback
    gap_s: float  # expected, from the end of playback to the next input
    check_at_s: float  # when to look again if nothing happens


# What a subscriber hears: session, its estimate, or None when nothing is known of it any more,
# and then whether it is over (True) or only out of sight (False).
Listener = Callable[[Hashable, "Estimate | None", bool], None]


class NextUse:
    """Next-use estimates of all sessions. One thread owns it; times on one monotonic clock.

    The interaction plane says what happens (`needed`, `waiting`, `close`, `lost`); eviction
    policies of both tiers subscribe and are told of every change. An overdue session is re-keyed
    in `advance`, which a policy calls before it decides: each time further into the future, so a
    session costs a logarithmic number of looks however long it is silent.

    Args:
        max_sessions: the longest silent session is forgotten beyond that.
        protect_s: a session that is needed now and says no more begins to drain after that.
        forget_s: a session with no reply for this long after playback counts as ended.
        weigh_chance: False: T_next alone orders sessions (paper eq. 4), whatever the chance that
            there will be another turn.
    """

    def __init__(
        self,
        max_sessions: int = 4096,
        protect_s: float = 60.0,
        forget_s: float = 1800.0,
        weigh_chance: bool = True,
    ) -> None:
        if max_sessions < 1:
            raise ValueError(f"max_sessions must be 1 or more, got {max_sessions}")
        for name, value in (("protect_s", protect_s), ("forget_s", forget_s)):
            if not (math.isfinite(value) and value > 0):
                raise ValueError(f"{name} must be a finite number above 0, got {value!r}")
        self.times = ReplyTimes()
        self._max = max_sessions
        self._protect_s = protect_s
        self._forget_s = forget_s
        self._estimates: dict[Hashable, Estimate] = {}
        self._due: list[tuple[float, int, Hashable]] = []
        self._count = 0
        self._listeners: list[Listener] = []
        # Of another turn, by lane.
        self.chance = self.times.chance if weigh_chance else [1.0] * LANES

    def __len__(self) -> int:
        return len(self._estimates)

    def get(self, session: Hashable) -> Estimate | None:
        return self._estimates.get(session)

    def subscribe(self, listener: Listener) -> None:
        self._listeners.append(listener)

    def unsubscribe(self, listener: Listener) -> None:
        # A new list: it may be walked right now.
        self._listeners = [known for known in self._listeners if known != listener]

    # ---- what happens ----------------------------------------------------------------------

    def needed(self, session: Hashable, now_s: float) -> None:
        """Speech started, a barge-in, or a turn is in flight: its history is needed now."""
        known = self._estimates.pop(session, None)
        if known is None:
            known = Estimate(now_s, 0, True, 0, now_s, 0.0, now_s + self._protect_s)
        elif not known.needed:
            waited_s = max(0.0, now_s - known.since_s)  # 0: spoke over the answer
            self.times.came(known.lane, waited_s / known.gap_s)
            known.needed, known.since_s = True, now_s
        known.next_use_s, known.check_at_s = known.since_s, now_s + self._protect_s
        self._put(session, known)

    def waiting(
        self, session: Hashable, playback_ends_s: float, reply_gap_s: float, now_s: float
    ) -> None:
        """The answer so far will have been played at ``playback_ends_s``; a reply is expected
        ``reply_gap_s`` after that. Without finite figures the session is `lost`."""
        if not (math.isfinite(playback_ends_s) and math.isfinite(reply_gap_s)):
            self.lost(session)
            return
        known = self._estimates.pop(session, None)
        if known is None:
            known = Estimate(now_s, 0, True, 0, now_s, 0.0, now_s)
        if known.needed:
            known.needed = False
            known.turns += 1
        known.lane = min(known.turns, LANES) - 1
        known.since_s = max(playback_ends_s, now_s)
        known.gap_s = max(reply_gap_s, 1e-3)
        known.next_use_s = next_use_s(now_s, playback_ends_s - now_s, reply_gap_s)
        known.check_at_s = known.since_s + known.gap_s
        self._put(session, known)

    def close(self, session: Hashable, now_s: float) -> None:
        """The session is over: nobody will read its history again."""
        known = self._estimates.pop(session, None)
        if known is None:
            return
        if not known.needed:
            self.times.ended(known.lane, max(0.0, now_s - known.since_s) / known.gap_s)
        self._tell(session, None, True)

    def lost(self, session: Hashable) -> None:
        """Nothing is known of the session any more: it is treated as if by LRU."""
        if self._estimates.pop(session, None) is not None:
            self._tell(session, None, False)

    def clear(self) -> None:
        """Every session is `lost`."""
        for session in tuple(self._estimates):
            self.lost(session)

    def advance(self, now_s: float, limit: int = 32) -> None:
        """Re-key at most ``limit`` sessions whose time has passed without news."""
        due = self._due
        while due and limit > 0 and due[0][0] <= now_s:
            check_at_s, _, session = heapq.heappop(due)
            known = self._estimates.get(session)
            if known is None or known.check_at_s != check_at_s:
                continue  # something happened since
            limit -= 1
            passed_s = now_s - known.since_s
            if known.needed:
                step_s = max(passed_s, self._protect_s)
            elif passed_s >= self._forget_s:
                self.close(session, now_s)
                continue
            else:
                step_s = known.gap_s * self.times.remaining(known.lane, passed_s / known.gap_s)
            known.next_use_s = now_s + step_s
            known.check_at_s = min(known.next_use_s, max(now_s, known.since_s) + self._forget_s)
            self._schedule(session, known)
            self._tell(session, known, False)

    # ---- bookkeeping -----------------------------------------------------------------------

    def _put(self, session: Hashable, known: Estimate) -> None:
        self._estimates[session] = known  # newest last
        self._schedule(session, known)
        self._tell(session, known, False)
        if len(self._estimates) > self._max:
            self.lost(next(iter(self._estimates)))

    def _schedule(self, session: Hashable, known: Estimate) -> None:
        self._count += 1
        heapq.heappush(self._due, (known.check_at_s, self._count, session))
        if len(self._due) > 2 * len(self._estimates) + 64:
            self._due = [
                entry
                for entry in self._due
                if (found := self._estimates.get(entry[2])) and found.check_at_s == entry[0]
            ]
            heapq.heapify(self._due)

    def _tell(self, session: Hashable, known: Estimate | None, over: bool) -> None:
        for listener in self._listeners:
            listener(session, known, over)
