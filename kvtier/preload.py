"""When to bring a session's offloaded history back before its turn arrives, and how much of it.

While the user speaks, the link to the GPU is idle. A *preload* moves the load of the session's
history there. `Preloader` decides when one begins and when it is given up; who runs it is the
tier's manager (`Loads`). Nothing depends on a preload: without it the turn loads or recomputes.

A session is *wanted* from a trigger (speech, barge-in, resume, prefetch) until its request asks for
its history, or until it is dropped. While it is wanted it has at most one job:

    idle ─wanted▶ wanted, no job ─step: admitted▶ wanted, job ─ended▶ wanted, no job …
      ▲              │ request, silence, close           │ the same: promote, or cancel
      └──────────────┴───────────────────────────────────┘

A job is admitted for as many blocks, prefix first, as satisfy all of:

- they arrive, behind what the link has to move before, by the time that the language stage is
  expected to ask for them: the rest of the utterance, then the lag (encoder, queue) until the
  request is there;
- there is room for them without evicting a block that is expected to be needed before that time:
  of a session that does not speak yet, an utterance and a lag after its next use begins;
- the bytes of all preloads under way stay within a budget.

What does not fit is tried again while the session is wanted, more often as the need comes closer.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import asdict, dataclass, field
from enum import Enum
from typing import Protocol

from liveserve.kvtier.next_use import GapPrior, ReplyGap

# An utterance that has outlasted its expected length goes on for this share of it.
_TAIL = 0.25
_PRIOR_UTTERANCE_S = 4.0
_PRIOR_LAG_S = 0.1
_LAG_WINDOW = 64.0
_MOST_DOUBLINGS = 4
# Share of the time that is left after which what was refused is looked at again at the latest.
_LOOK_SHARE = 0.125


class Cause(Enum):
    """Why a session's history will be needed."""

    SPEECH = "speech"
    BARGE_IN = "barge-in"
    RESUME = "resume"
    COMMIT = "commit"
    PREFETCH = "prefetch"


class Loads(Protocol):
    """What preloading asks of the tier's manager. None of it waits; jobs are hashable."""

    @property
    def block_bytes(self) -> int:
        """Bytes that one block takes on the link."""

    def offloaded(self, session: Hashable, keys: Sequence[Hashable] | None) -> Sequence[Hashable]:
        """What a load would bring back of ``keys`` (None: of the session's history), prefix first:
        in DRAM, not on the GPU, and not on its way there. Ends at a block that is nowhere."""

    def spare(self, count: int, wait_s: float, now_s: float) -> int:
        """Of ``count`` GPU blocks, how many can be taken now without touching what is reserved or
        evicting what is expected to be needed within ``wait_s``."""

    def estimate_s(self, num_bytes: int) -> float:
        """Seconds until a preload of ``num_bytes`` that is queued now has arrived
        (`TransferEngine.estimate_s`)."""

    def preload(self, keys: Sequence[Hashable], session: Hashable) -> Hashable | None:
        """Begin to load ``keys``, as `offloaded` named them. None: it cannot be done now."""

    def cancel(self, job: Hashable) -> None:
        """Load no more of it. It still ends (`Preloader.ended`), now or later."""

    def promote(self, job: Hashable) -> None:
        """A request waits for it."""


@dataclass(frozen=True, slots=True)
class PreloadLimits:
    """Bounds of preloading.

    Args:
        max_bytes: of all preloads under way together.
        max_sessions: sessions that are remembered; the longest silent one is forgotten beyond.
        slack_s: a preload is planned to arrive so long before it is needed: its end is noticed
            only between two steps.
        retry_s: what was refused is looked at again after that; the next time twice as late, up to
            sixteen times, but several times before it is needed.
        recheck_s: a session of which nothing was to load is looked at again after that: its blocks
            may have been evicted.
        max_looks: sessions that are looked at in one step, as a look takes time for every block of
            a history.
        silence_s: speech that stopped and was not made a turn for so long is over (the VAD erred).
        give_up_s: a session that was wanted and sent no request for so long is not any more.
        pause_s: after pressure nothing is admitted for so long.

    Raises:
        ValueError: names the field and its range.
    """

    max_bytes: int = 1 << 30
    max_sessions: int = 4096
    slack_s: float = 0.02
    retry_s: float = 0.05
    recheck_s: float = 1.0
    max_looks: int = 4
    silence_s: float = 1.0
    give_up_s: float = 60.0
    pause_s: float = 0.25

    def __post_init__(self) -> None:
        for name in ("max_bytes", "max_sessions", "max_looks"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"preload {name} must be a positive integer, got {value!r}")
        for name in ("slack_s", "retry_s", "recheck_s", "silence_s", "give_up_s", "pause_s"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"preload {name} must be a finite number from 0, got {value!r}")


@dataclass(slots=True)
class PreloadTotals:
    """What preloading did since it started. Counts, unless they are ``_blocks``.

    Attributes:
        wanted: triggers, by cause.
        admitted, partial: jobs that began; those of them for less than what was offloaded.
        refused: looks at a session with nothing admitted, by what stood in the way: "link" (it
            would come too late), "room" (it would evict what is needed sooner), "budget",
            "pressure", "manager".
        cancelled: jobs cancelled, by reason: "silence", "closed", "pressure", "forgotten", "gave
            up", "stale".
        hits, late, short: turns whose history was offloaded when they began, by how their request
            found it: all there; a job under way, which was promoted; something still to load.
        loaded_blocks, wasted_blocks: blocks that jobs brought; of those, for sessions that sent no
            request for them.
    """

    wanted: dict[str, int] = field(default_factory=dict)
    admitted: int = 0
    partial: int = 0
    refused: dict[str, int] = field(default_factory=dict)
    cancelled: dict[str, int] = field(default_factory=dict)
    hits: int = 0
    late: int = 0
    short: int = 0
    admitted_blocks: int = 0
    loaded_blocks: int = 0
    wasted_blocks: int = 0


@dataclass(slots=True)
class PreloadReport(PreloadTotals):
    """Totals, and sessions that are wanted and jobs that have not ended by now."""

    now_wanted: int = 0
    now_loading: int = 0


@dataclass(slots=True, eq=False)
class _Session:
    """What is known of a session. ``due_s``: when a prefetch is to be there.

    ``had_offloaded``: something of the history was in DRAM only, since it is wanted.
    """

    utterance: ReplyGap
    wanted: bool = False
    spoke: bool = False  # the turn began with speech, so its length is worth learning
    began_s: float = 0.0
    due_s: float | None = None
    stopped_s: float | None = None
    committed_s: float | None = None
    heard_s: float = 0.0  # last trigger
    arrived_s: float = -math.inf  # last request
    try_at_s: float = 0.0
    refusals: int = 0  # in a row
    keys: Sequence[Hashable] | None = None
    had_offloaded: bool = False
    loaded_blocks: int = 0
    job: Hashable | None = None


@dataclass(slots=True)
class _Job:
    session: _Session | None  # None: nobody waits for it any more
    num_blocks: int
    cancelled: bool = False


class Preloader:
    """Preloads of one engine. One thread owns it; it reads no clock, so it can be replayed.

    Args:
        loads: the tier's manager.
        limits: bounds.
    """

    def __init__(self, loads: Loads, limits: PreloadLimits | None = None) -> None:
        self.limits = limits or PreloadLimits()
        self.totals = PreloadTotals()
        self._loads = loads
        self._sessions: dict[Hashable, _Session] = {}
        self._wanted: dict[Hashable, _Session] = {}
        self._jobs: dict[Hashable, _Job] = {}
        self._utterances = GapPrior(_PRIOR_UTTERANCE_S)
        self._lag = GapPrior(_PRIOR_LAG_S, window=_LAG_WINDOW)
        self._paused_until_s = -math.inf

    def is_wanted(self, session: Hashable) -> bool:
        return session in self._wanted

    @property
    def num_wanted(self) -> int:
        return len(self._wanted)

    @property
    def num_jobs(self) -> int:
        """Jobs that have not ended, cancelled ones too."""
        return len(self._jobs)

    @property
    def in_flight_bytes(self) -> int:
        return sum(job.num_blocks for job in self._jobs.values()) * self._loads.block_bytes

    def report(self) -> PreloadReport:
        return PreloadReport(
            **asdict(self.totals), now_wanted=self.num_wanted, now_loading=self.num_jobs
        )

    def left_s(self, session: Hashable, now_s: float) -> float | None:
        """Predicted seconds until the language stage asks for the session's history; None: nothing
        says that it will."""
        known = self._wanted.get(session)
        return None if known is None else self._left_s(known, now_s)

    # ---- what happens ----------------------------------------------------------------------

    def wanted(
        self,
        session: Hashable,
        now_s: float,
        cause: Cause,
        *,
        due_s: float | None = None,
        keys: Sequence[Hashable] | None = None,
    ) -> None:
        """The session's history, or ``keys``, will be needed.

        A request can overtake the events of its own turn: what happened before the session's last
        request says nothing of the next turn, and is ignored.

        Args:
            due_s: absolute time by which it is to be there; None: at the end of an utterance that
                begins now.
            keys: for a prefix that is no session's history. It is wanted until it is there, or
                until ``due_s``.
        """
        known = self._sessions.get(session)
        if known is not None and now_s < known.arrived_s:
            return
        self.totals.wanted[cause.value] = self.totals.wanted.get(cause.value, 0) + 1
        speaks = cause in (Cause.SPEECH, Cause.BARGE_IN)
        self._sessions.pop(session, None)
        if known is None:
            known = _Session(ReplyGap(self._utterances))
        self._sessions[session] = known  # newest last
        if not known.wanted:
            known.wanted, known.spoke, known.committed_s = True, False, None
            known.had_offloaded, known.loaded_blocks = False, 0
            known.due_s = None
            self._wanted[session] = known
        if speaks and (not known.spoke or known.committed_s is not None):
            known.spoke, known.began_s, known.committed_s = True, now_s, None
        elif not known.spoke:
            known.began_s = now_s
        # Speech says more than a forecast from before it.
        known.due_s = None if known.spoke else due_s
        known.keys = keys if keys is not None else known.keys if cause is Cause.PREFETCH else None
        known.stopped_s, known.heard_s, known.try_at_s, known.refusals = None, now_s, now_s, 0
        if len(self._sessions) > self.limits.max_sessions:
            oldest = next(iter(self._sessions))
            self._drop(oldest, "forgotten")
            del self._sessions[oldest]

    def stopped(self, session: Hashable, now_s: float) -> None:
        """The user fell silent. Unless a turn is made of it, that was no speech."""
        known = self._wanted.get(session)
        if known is not None and known.committed_s is None and known.spoke:
            known.stopped_s = now_s

    def committed(self, session: Hashable, now_s: float) -> None:
        """The user's turn is complete: its request is on the way."""
        known = self._wanted.get(session)
        if known is None or known.committed_s is not None:
            return
        if known.spoke:
            known.utterance.observe(now_s - known.began_s)
        known.committed_s, known.stopped_s, known.due_s = now_s, None, None
        known.try_at_s, known.refusals = now_s, 0

    def arrived(self, session: Hashable, now_s: float) -> None:
        """The session's request asks for its history, for the first time. A preload under way goes
        on as its on-path load; nothing more is preloaded."""
        known = self._sessions.get(session)
        if known is not None:
            known.arrived_s = now_s
        if self._wanted.pop(session, None) is None or known is None:
            return
        known.wanted = False
        if known.committed_s is not None:
            self._lag.observe(max(0.0, now_s - known.committed_s))
        job, known.job = known.job, None
        if job is not None:
            self._jobs[job].session = None
            self._loads.promote(job)
        if known.had_offloaded:
            if job is not None:
                self.totals.late += 1
            elif self._loads.offloaded(session, known.keys):
                self.totals.short += 1
            else:
                self.totals.hits += 1

    def closed(self, session: Hashable, now_s: float) -> None:
        """The session is over, or its client is gone: no preload for it, running or to come."""
        self._drop(session, "closed")
        self._sessions.pop(session, None)

    def ended(self, job: Hashable, num_loaded: int, now_s: float) -> None:
        """``job`` ended, for whatever reason; ``num_loaded`` of its blocks are on the GPU under
        their keys. An unknown job is ignored."""
        one = self._jobs.pop(job, None)
        if one is None:
            return
        self.totals.loaded_blocks += num_loaded
        known = one.session
        if known is None:
            # Promoted, and so in use, or cancelled, and so of no use.
            self.totals.wasted_blocks += num_loaded if one.cancelled else 0
            return
        known.job = None
        known.loaded_blocks += num_loaded
        # One that failed is not tried again at once.
        known.try_at_s = now_s if num_loaded else now_s + self.limits.retry_s
        known.refusals = 0

    def pressure(self, num_blocks: int, now_s: float) -> int:
        """A request needs ``num_blocks`` GPU blocks that preloads hold: cancel those that are
        needed last, and admit none for a moment. Returns how many blocks the cancelled ones hold.
        """
        self._paused_until_s = now_s + self.limits.pause_s
        running = [(self._left_s(s, now_s), name) for name, s in self._wanted.items() if s.job]
        freed = 0
        for _, name in sorted(running, key=lambda one: -one[0]):
            if freed >= num_blocks:
                break
            known = self._wanted[name]
            freed += self._jobs[known.job].num_blocks
            self._cancel(known, "pressure")
            known.try_at_s = self._paused_until_s
        return freed

    def fail_closed(self) -> None:
        """What is known of sessions cannot be trusted: forget all of it, cancel what runs."""
        for session in list(self._wanted):
            self._drop(session, "stale")
        self._sessions.clear()

    def step(self, now_s: float) -> None:
        """Once in a round: drop what is not wanted any more, admit what fits, soonest needed first.
        Costs nothing while nobody is wanted."""
        due: list[tuple[float, Hashable]] = []
        limits = self.limits
        for session, known in list(self._wanted.items()):
            stopped_s = known.stopped_s
            if stopped_s is not None and now_s - stopped_s >= limits.silence_s:
                self._drop(session, "silence")
            elif now_s - max(known.heard_s, known.due_s or 0.0) >= limits.give_up_s:
                self._drop(session, "gave up")
            elif known.job is None and now_s >= known.try_at_s and stopped_s is None:
                due.append((self._left_s(known, now_s), session))
        for left_s, session in sorted(due, key=lambda one: one[0])[: limits.max_looks]:
            known = self._wanted[session]
            refusal = self._admit(session, known, left_s, now_s)
            if refusal is None:
                known.try_at_s, known.refusals = now_s + limits.recheck_s, 0
            else:
                pause_s = limits.retry_s * 2**known.refusals
                if left_s > 0:
                    pause_s = min(pause_s, max(limits.retry_s, _LOOK_SHARE * left_s))
                known.try_at_s = now_s + pause_s
                known.refusals = min(known.refusals + 1, _MOST_DOUBLINGS)
            if known.keys is not None and known.job is None and (refusal is None or not left_s):
                # A prefix, which is there by now, or late: no request will say that it was used.
                del self._wanted[session], self._sessions[session]
            if refusal is not None:
                self.totals.refused[refusal] = self.totals.refused.get(refusal, 0) + 1

    # ---- inside ----------------------------------------------------------------------------

    def _left_s(self, known: _Session, now_s: float) -> float:
        lag_s = self._lag.mean_s
        if known.due_s is not None:
            return max(0.0, known.due_s - now_s)
        if known.committed_s is not None:
            return max(0.0, known.committed_s + lag_s - now_s)
        expected_s = known.utterance.mean_s
        passed_s = now_s - known.began_s
        return max(expected_s - passed_s, _TAIL * expected_s) + lag_s

    def _admit(self, session: Hashable, known: _Session, left_s: float, now_s: float) -> str | None:
        """Begin a job for what fits. Returns what stood in the way of all of it, if anything."""
        loads, limits = self._loads, self.limits
        keys = loads.offloaded(session, known.keys)
        if not keys:
            return None
        known.had_offloaded = True
        if now_s < self._paused_until_s:
            return "pressure"
        budget = (limits.max_bytes - self.in_flight_bytes) // loads.block_bytes
        count = min(len(keys), budget)
        if count <= 0:
            return "budget"
        count = self._in_time(count, left_s - limits.slack_s)
        if not count:
            return "link"
        # Others of whom the same holds are needed as long after they begin to speak.
        notice_s = self._utterances.mean_s + self._lag.mean_s if known.spoke else 0.0
        count = min(count, loads.spare(count, max(0.0, left_s - notice_s), now_s))
        if count <= 0:
            return "room"
        job = loads.preload(keys[:count], session)
        if job is None:
            return "manager"
        known.job = job
        self._jobs[job] = _Job(known, count)
        self.totals.admitted += 1
        self.totals.admitted_blocks += count
        self.totals.partial += count < len(keys)
        return None

    def _in_time(self, count: int, left_s: float) -> int:
        """How many of ``count`` blocks would have arrived in ``left_s``."""
        block_bytes, estimate_s = self._loads.block_bytes, self._loads.estimate_s
        low, high = 0, count
        while low < high:
            middle = (low + high + 1) // 2
            if estimate_s(middle * block_bytes) <= left_s:
                low = middle
            else:
                high = middle - 1
        return low

    def _drop(self, session: Hashable, reason: str) -> None:
        known = self._wanted.pop(session, None)
        if known is None:
            return
        known.wanted = False
        self._cancel(known, reason)
        self.totals.wasted_blocks += known.loaded_blocks
        known.loaded_blocks = 0

    def _cancel(self, known: _Session, reason: str) -> None:
        job, known.job = known.job, None
        if job is None:
            return
        one = self._jobs[job]
        one.session, one.cancelled = None, True
        self.totals.cancelled[reason] = self.totals.cancelled.get(reason, 0) + 1
        self._loads.cancel(job)
