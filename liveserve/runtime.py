"""LiveServe inside one stage engine: ring, views, each request's class every round, and the plan.

The host's scheduler calls `round` and `plan` before it schedules, `scheduled` with what it
scheduled, and `stepped` after a model step; the UTILITY handler calls `exchange`. All run on the
engine's one thread. An exception here is counted and logged once, never raised into the host:
without a plan requests keep the host's order.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import msgspec

from liveserve.config import LiveServeConfig, Switches
from liveserve.events import (
    Batch,
    Event,
    EventKind,
    KvSnapshot,
    PressureSnapshot,
    Reply,
    RequestRow,
    SessionRow,
    boot_id,
    decode_batch,
    encode,
)
from liveserve.kv_signals import KvStage
from liveserve.profile import StageProfile
from liveserve.ring import EventRing
from liveserve.scheduler.chunking import ChunkPolicy, ChunkTimes
from liveserve.scheduler.pacing import may_hold
from liveserve.scheduler.plan import NO_BUDGETS, Budgets, Candidate, Plan, plan
from liveserve.scheduler.replicas import PrefillCost
from liveserve.scheduler.urgency import Rank, Urgency, rank
from liveserve.scheduler.views import SessionView
from liveserve.session import SessionTable

if TYPE_CHECKING:
    from liveserve.kv_preload import KvPreload

logger = logging.getLogger("vllm.liveserve")

# Weight of the newest step in the averages of step time and token rate.
_STEP_WEIGHT = 0.1
# Longest sleep of an engine whose requests are held: where something else than a message may happen
# meanwhile, and where nothing can.
_DOZE_S = 0.005
_SLEEP_S = 0.25
# Weight of the newest response in the share of responses that users interrupt.
_BARGE_IN_WEIGHT = 0.05
# That share while nothing is known. Low enough to be forgotten after some thirty responses that
# were heard to their end.
_BARGE_IN_PRIOR = 0.1
# A held request keeps its slot and its KV. Where there is not enough of them for all sessions of a
# stage, nobody is held while more than this share of KV is taken, or all slots but so many times
# their square root: those held must have time to end before the rest is taken.
CROWDED_SHARE = 0.75
_SPARE_SLOTS = 1.5
# Shares of a frame's length that making one takes, from which on a stage counts as saturated, and
# below which it no longer does. What a saturated one puts off will be urgent when others come.
_SATURATED, _RELAXED = 0.3, 0.25
# Rows of requests and of sessions in a detailed reply.
MAX_ROWS = 512


class RequestLike(Protocol):
    """What a round reads of the host's request (vllm/v1/request.py)."""

    request_id: str

    @property
    def num_output_tokens(self) -> int: ...


class Queues(Protocol):
    """The host scheduler, as far as the runtime looks at it."""

    def running(self) -> Iterable[RequestLike]: ...

    def waiting(self) -> Iterable[RequestLike]: ...

    def can_run(self, request: RequestLike) -> bool:
        """False while it waits for input: nothing that a scheduler does would let it run."""
        ...

    def kv_blocks(self) -> tuple[int, int]:
        """Blocks in use, blocks in all."""
        ...

    def kv_blocks_of(self, request: RequestLike) -> int: ...


@dataclass(frozen=True, slots=True)
class StageInfo:
    """One stage engine.

    Attributes:
        token_s: seconds of audio per output token (1 / frame rate for the talker); None where a
            token has no fixed length (thinker: the session's pace counts).
        routes_audio: its output is what the listener hears (code2wav).
        may_hold: a running request can sit out a step and lose nothing.
        slots: requests that may run at once (max_num_seqs). 0: not known.
    """

    stage_id: int
    name: str
    token_s: float | None = None
    routes_audio: bool = False
    kv_block_bytes: int = 0
    may_hold: bool = True
    slots: int = 0


@dataclass(slots=True)
class _Known(Candidate):
    """A request of this engine, kept from round to round and refreshed in each.

    ``since_s`` is infinite while it cannot run. ``made_s``: what this stage made for it, in
    seconds of audio.
    """

    session_id: str
    arrival_s: float
    made_s: float = 0.0


def slots_short(running: int, slots: int) -> bool:
    """Whether so few of ``slots`` are free that those held may not end before the rest is taken;
    never where it is not known how many there are (0).
    """
    return slots > 0 and running > max(0.0, slots - _SPARE_SLOTS * math.sqrt(slots))


_current: StageRuntime | None = None


def current_runtime() -> StageRuntime | None:
    """The runtime of this engine process, if its scheduler is ours."""
    return _current


class StageRuntime:
    """See the module. Making one makes it this process's `current_runtime`."""

    def __init__(
        self,
        info: StageInfo,
        config: LiveServeConfig,
        queues: Queues,
        session_of: Callable[[str], str],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        global _current
        _current = self
        self.info = info
        self.config = config
        self.ring = EventRing(config.ring_capacity)
        self.table = SessionTable(config.max_sessions, use_acks=config.playback == "auto")
        self.ranks: dict[str, Rank] = {}
        self.errors = 0
        self.switches = config.switches
        self.held: frozenset[str] = frozenset()
        self.barge_in_rate = _BARGE_IN_PRIOR
        # Per request: seconds of audio that have left the stage, where that is less than what was
        # made (codec frames that wait to travel together). Set by the chunking seam.
        self.sent_s: dict[str, float] = {}
        # KV blocks that are free, but kept for those in the pool: they count as pressure, since
        # nobody is admitted to them. Set by what reserves them (`liveserve.host.reserve`).
        self.promised_blocks = 0
        # Tokens of prompts that are not computed yet; set by the scheduler's seam.
        self.queued_tokens: Callable[[], int] | None = None
        self.chunk_times = ChunkTimes()
        self._rested: set[str] = set()  # requests that were held since their last frame
        self._met: set[str] = set()  # sessions that asked this engine for something; some have gone
        self.profile = StageProfile(clock)
        # Told of every event before it changes its session's view (`liveserve.host.unheard`).
        self.on_event: list[Callable[[Event], None]] = []
        # KV beyond the request; None where nothing outlives it. Set by `liveserve.host.block_pool`.
        self.kv: KvStage | None = None
        # Sleeps for that many seconds or until the engine has a message. Set by the engine's seam.
        self.wait_for_message: Callable[[float], None] | None = None
        self.unheard_blocks = 0
        self._chunk_time_s: float | None = None
        self._tight_time_s: float | None = None
        self._saturated = False
        self._chunk_frames = config.chunks.largest  # frames for which a held request is let go on
        self._set_policy()
        self._queues = queues
        self._session_of = session_of
        self._clock = clock
        self._boot = boot_id()
        self._offset_s: float | None = None
        # Of the requests that the last round found, kept up to date; `ranks` unless it failed.
        self._known: dict[str, _Known] = {}
        self._ranks: dict[str, Rank] = {}
        self._candidates: list[Candidate] = []  # those of them that can run
        self._urgent = False  # one of those is not U2
        self._budgets = NO_BUDGETS
        self._kv_blocks = 0, 0  # in use or promised, in all
        self._holds = 0
        self._deadline_s: float | None = None
        self._by_class = ([0, 0, 0], [0, 0, 0])
        self._step_ms = 0.0
        self.token_s = 0.0  # what a step takes per padded token, on average
        self._prefill = PrefillCost()
        self._steps = 0
        self._tokens = 0
        self._tokens_per_s = 0.0
        self._rate_mark = (clock(), 0)
        self._round_us = 0.0
        self._stepped_at_s = float("-inf")

    # ---- called by the host's scheduler ----------------------------------------------------

    def round(self) -> None:
        """Refresh the views and rank every request of this engine (paper, Algorithm 1)."""
        started = time.perf_counter()
        try:
            self._round(self._clock())
        except Exception:
            self._failed("round")
            self.ranks, self._candidates = {}, []
        self._round_us += _STEP_WEIGHT * (1e6 * (time.perf_counter() - started) - self._round_us)

    def plan(self) -> Plan | None:
        """Order and holds of the round just made, or None where the host's own order stands."""
        self._follow_chunk_time()
        policy = self.tight_policy
        if self.ring.stale or not (policy.order or policy.pace) or not self.ranks:
            self.held = frozenset()
            return None
        try:
            made = self._plan(self._clock())
        except Exception:
            self._failed("plan")
            self.held = frozenset()
            return None
        self._holds += len(made.held - self.held)
        self.held, self._deadline_s = made.held, made.next_deadline_s
        if self.sent_s:
            self._rested |= made.held
        return made

    def doze(self, only_held: bool) -> None:
        """Sleep until the first held request may run again.

        Args:
            only_held: until then only a message can change anything; the sleep ends with it. Else,
                and where messages cannot end it, it is short.
        """
        left_s = self._deadline_s - self._clock() if self._deadline_s is not None else 0.0
        if left_s <= 0.0:
            return
        if only_held and self.wait_for_message is not None:
            self.wait_for_message(min(_SLEEP_S, left_s))
        else:
            self.nap(left_s)

    @staticmethod
    def nap(seconds: float) -> None:
        """A short sleep, of ``seconds`` at most."""
        time.sleep(min(_DOZE_S, seconds))

    def can_wait(self, request_id: str) -> bool:
        """Whether a request can sit out a step of a one-shot stage: it has a trustworthy buffer
        that is safe after it, and has not waited for the age limit already.
        """
        known = self._known.get(request_id)
        if known is None or known.rank.buffer_s is None or request_id not in self.ranks:
            return False
        waited_s = self._clock() - known.since_s
        policy = self.policy
        safe_s = policy.p_safe_s + self.config.generation_step_s
        return known.rank.buffer_s >= safe_s and waited_s < policy.age_limit_s

    def scheduled(self, request_ids: Collection[str]) -> None:
        """The host scheduled these requests in this round."""
        now_s = self._clock()
        if self.profile.on:
            self.profile.scheduled(request_ids)
        for request_id in request_ids:
            known = self._known.get(request_id)
            if known is not None:
                known.since_s = now_s

    def stepped(self, began_s: float, tokens: int, padded: int = 1, taken: int = 0) -> None:
        """A model step that was scheduled at ``began_s`` is complete: it made ``tokens``, and took
        in ``taken``, or ``padded`` if every request counts as much as the longest.
        """
        now_s = self._clock()
        # With async scheduling steps overlap: a step's own time starts where the last one ended.
        took_ms = 1e3 * (now_s - max(began_s, self._stepped_at_s))
        self._stepped_at_s = now_s
        each_s = 1e-3 * took_ms / max(1, padded)
        self.token_s += (each_s - self.token_s) * (_STEP_WEIGHT if self._steps else 1.0)
        self._step_ms += (took_ms - self._step_ms) * (_STEP_WEIGHT if self._steps else 1.0)
        if taken:
            self._prefill.stepped(took_ms / 1e3, taken)
        self._steps += 1
        self._tokens += tokens

    def sized(self, policy: ChunkPolicy) -> ChunkPolicy:
        """``policy`` with chunks no larger than is worth while where what is far ahead is held and
        users interrupt.
        """
        if self.policy.pace and self.info.token_s and may_hold(False, self.barge_in_rate):
            frames = self.chunk_times.enough(policy, self.info.token_s)
            policy = msgspec.structs.replace(policy, largest=frames)
        self._chunk_frames = policy.largest
        return policy

    def rested(self, request_id: str) -> bool:
        """A frame of the request was made: whether it was held since the one before."""
        rested = request_id in self._rested
        self._rested.discard(request_id)
        return rested

    def chunk_time_moved(self) -> bool:
        """Whether the measured chunk time is a tenth off the one that the bounds of holds have, or
        the stage is saturated now, or no longer."""
        if not self.sent_s or not self.switches.chunking:
            return False
        if self._is_saturated() is not self._saturated:
            return True
        known_s = self._chunk_time_s
        return known_s is None or abs(self._measured_chunk_s() - known_s) > 0.1 * known_s

    def waiting(self) -> Iterable[RequestLike]:
        """Requests that wait and could run."""
        return (r for r in self._queues.waiting() if self._queues.can_run(r))

    def now_s(self) -> float:
        return self._clock()

    # ---- called by the UTILITY handler -----------------------------------------------------

    def exchange(self, payload: bytes) -> bytes:
        """Apply one encoded `Batch`; answer with an encoded `Reply`."""
        try:
            batch = decode_batch(payload)
            self._receive(batch)
            detail, kv_of = batch.detail, batch.kv_of
        except Exception:
            self._failed("exchange")
            self.ring.stale = True
            detail, kv_of = False, []
        self.round()
        reply = Reply(self.snapshot(fresh=detail), self.ring.next_seq, resync=self.ring.stale)
        if self.profile.on:
            reply.marks = self.profile.take(self._offset_s or 0.0)
        try:
            if detail:
                reply.requests, reply.views = self._request_rows(), self._session_rows()
                if self.kv is not None:
                    reply.kv_sessions = self.kv.session_rows(MAX_ROWS)
            elif kv_of and self.kv is not None:
                reply.kv_sessions = self.kv.rows_of(kv_of)
        except Exception:
            self._failed("detail")
        return encode(reply)

    def snapshot(self, *, fresh: bool = True) -> PressureSnapshot:
        """The engine's pressure now; not ``fresh``: its KV totals may be a moment old."""
        now_s = self._clock()
        mark_s, mark_tokens = self._rate_mark
        if now_s - mark_s >= 1.0:
            self._tokens_per_s = (self._tokens - mark_tokens) / (now_s - mark_s)
            self._rate_mark = (now_s, self._tokens)
        used, total = self._queues.kv_blocks()
        running, waiting = self._by_class
        return PressureSnapshot(
            stage_id=self.info.stage_id,
            stage=self.info.name,
            attached=True,
            stale=self.ring.stale,
            waiting_by_class=list(waiting),
            running_by_class=list(running),
            held=len(self.held),
            holds_total=self._holds,
            kv_blocks_used=used,
            kv_blocks_total=total,
            kv_block_bytes=self.info.kv_block_bytes,
            unheard_blocks_total=self.unheard_blocks,
            tokens_per_s=self._tokens_per_s,
            tokens_total=self._tokens,
            step_ms=self._step_ms,
            steps_total=self._steps,
            round_us=self._round_us,
            switches=self.switches,
            sessions=len(self.table),
            events_total=self.ring.total,
            events_lost=self.ring.lost,
            errors_total=self.errors,
            queued_tokens=self.queued_tokens() if self.queued_tokens is not None else 0,
            oldest_wait_s=self._oldest_wait_s(now_s),
            prefill_token_us=1e6 * (self._prefill.token_s or 0.0),
            kv=self._kv_snapshot(fresh=fresh),
        )

    # ---- inside ----------------------------------------------------------------------------

    def view_of(self, session_id: str) -> SessionView | None:
        """The session's view, or None when views cannot be trusted (policies fail closed)."""
        return None if self.ring.stale else self.table.get(session_id)

    def flip(self, switches: Switches) -> None:
        """Which mechanisms are on from the next round."""
        if switches != self.switches:
            self.switches = switches
            self._set_policy()
            if self.kv is not None:
                self.kv.gpu.switch(switches.kv_evict)
            logger.info("LiveServe: stage %s switches to %s", self.info.name, switches)

    def retune(self, config: LiveServeConfig) -> None:
        """Plan by ``config`` from the next round."""
        self.config = config
        self._set_policy()

    def _receive(self, batch: Batch) -> None:
        if batch.switches is not None:
            self.flip(batch.switches)
        self.profile.switch(batch.profile)
        offset_s = 0.0
        if not self._boot or batch.boot_id != self._boot:
            # Another machine's clock: the smallest difference seen is the one with least delay.
            delta_s = self._clock() - batch.sent_s
            self._offset_s = delta_s if self._offset_s is None else min(self._offset_s, delta_s)
            offset_s = self._offset_s
        if batch.views is not None:
            for view in batch.views:
                view.shift(offset_s)
            self.ring.resync(batch.first_seq)
            self.table.load(batch.views)
            if self.kv is not None:
                self.kv.signals.load(self.table, self._clock())
                self.preload(lambda preload: preload.load(self.table, self._clock()))
        events = batch.events
        if offset_s:
            events = [
                type(event)(
                    event.kind,
                    event.session_id,
                    event.at_s + offset_s,
                    event.value_s,
                    event.response_id,
                    event.detail,
                )
                for event in events
            ]
        self.ring.push(batch.first_seq, events)
        for asked in batch.prefetch:
            self.preload(lambda preload, asked=asked: preload.prefetch(asked, self._clock()))  # type: ignore[misc]

    def _round(self, now_s: float) -> None:
        if self.kv is not None:
            self.kv.signals.trust(not self.ring.stale)
        for event in self.ring.drain():
            for listener in self.on_event:
                listener(event)
            view = self.table.apply(event)
            if self.kv is not None:
                self._tell_kv(event, view)
            interrupted = event.kind is EventKind.BARGE_IN
            if interrupted or (
                event.kind is EventKind.RESPONSE_DONE and event.detail == "completed"
            ):
                self.barge_in_rate += _BARGE_IN_WEIGHT * (interrupted - self.barge_in_rate)
        if self.kv is not None:
            self.preload(lambda preload: preload.step(now_s))
        queues, view_of, p_safe_s = self._queues, self.table.get, self.policy.p_safe_s
        can_run, known, ranks = queues.can_run, self._known, self._ranks
        known_before = known.get
        # Where a token has no length (thinker, code2wav) only what the listener has counts: text
        # ahead of the speech is no use until the stages after this one took it.
        token_s = self.info.token_s
        sent_s, trusted, held_blocks = self.sent_s, not self.ring.stale, None
        enough = Urgency.U2
        used, total = queues.kv_blocks()
        used = min(total, used + self.promised_blocks)
        self._kv_blocks = used, total
        self._budgets = NO_BUDGETS  # the host has its own; the plan gives it order and holds
        if total and used > self.policy.kv_high_watermark * total:
            held_blocks = queues.kv_blocks_of
            self._budgets = Budgets(NO_BUDGETS.tokens, total - used, total)
        candidates: list[Candidate] = []
        by_class = ([0, 0, 0], [0, 0, 0])
        urgent, here = False, 0
        for waiting, requests in enumerate((queues.running(), queues.waiting())):
            counts = by_class[waiting]
            for request in requests:
                request_id = request.request_id
                one = known_before(request_id)
                if one is None:
                    one = known[request_id] = self._meet(request_id, now_s, here)
                    ranks[request_id] = one.rank
                here += 1
                view = view_of(one.session_id) if trusted else None
                if view is None:
                    made_s = 0.0
                elif token_s is None:
                    made_s = view.clock.routed_s
                elif request_id in sent_s:
                    made_s = sent_s[request_id]
                else:
                    made_s = request.num_output_tokens * token_s
                one.made_s = made_s
                urgency = rank(view, made_s, p_safe_s, one.arrival_s, now_s, one.rank).urgency
                counts[urgency] += 1
                if not can_run(request):
                    one.since_s = math.inf
                    continue
                if one.since_s == math.inf:
                    one.since_s = now_s  # it could not run a round ago: it has waited since now
                if urgency is not enough:
                    urgent = True
                one.waiting = waiting == 1
                one.kv_blocks_held = held_blocks(request) if held_blocks else None
                candidates.append(one)
        if len(known) > here:
            self._forget_gone()
        self.ranks, self._candidates = ranks, candidates
        self._by_class, self._urgent = by_class, urgent
        if not sent_s.keys() <= ranks.keys():
            for request_id in sent_s.keys() - ranks.keys():
                del sent_s[request_id]
            self._rested &= ranks.keys()

    def _forget_gone(self) -> None:
        queues = self._queues
        here = {request.request_id for request in queues.running()}
        here.update([request.request_id for request in queues.waiting()])
        for request_id in self._known.keys() - here:
            del self._known[request_id], self._ranks[request_id]
        self._met = {session_id for session_id in self._met if self.table.get(session_id)}

    def _meet(self, request_id: str, now_s: float, met: int) -> _Known:
        """A request that came since the last round; those keep the order in which they came."""
        session_id = self._session_of(request_id)
        self._met.add(session_id)
        return _Known(
            request_id,
            rank(None, 0.0, 0.0, now_s, now_s),
            tokens_needed=1,
            kv_blocks_held=None,
            kv_blocks_needed=0,
            waiting=True,
            is_prefill=False,
            since_s=now_s,
            session_id=session_id,
            arrival_s=now_s - 1e-6 + 1e-9 * (met % 1000),
        )

    def _follow_chunk_time(self) -> None:
        """Let the bounds of holds follow the measured chunk time, in steps of a tenth."""
        if self.chunk_time_moved():
            self._chunk_time_s = self._measured_chunk_s()
            self._tight_time_s = self._measured_chunk_s(makes_way=True)
            self._saturated = self._is_saturated()
            self._set_policy()

    def _is_saturated(self) -> bool:
        times, frame_audio_s = self.chunk_times, self.info.token_s or math.inf
        bound = _RELAXED if self._saturated else _SATURATED
        return times.measured and times.frame_s * times.rate > bound * frame_audio_s

    def _measured_chunk_s(self, *, makes_way: bool = False) -> float:
        return self.chunk_times.lead_s(self._chunk_frames, self.config.chunks, makes_way=makes_way)

    def preload(self, act: Callable[[KvPreload], object]) -> None:
        """``act`` on what decides on preloads, if there is any; after a failure there is none."""
        preload = self.kv.preload if self.kv is not None else None
        if preload is None:
            return
        try:
            act(preload)
        except Exception:
            self._failed("preload")
            assert self.kv is not None
            self.kv.preload = None

    def _tell_kv(self, event: Event, view: SessionView | None) -> None:
        if self.kv is None:
            return
        try:
            self.kv.signals.happened(event, view)
            if not self.kv.signals.stale:
                self.preload(lambda preload: preload.happened(event, view))
        except Exception:
            self._failed("KV signals")
            self.kv.signals.trust(False)  # until the next set of views

    def _oldest_wait_s(self, now_s: float) -> float:
        since_s = (known.since_s for known in self._known.values() if known.waiting)
        return max(0.0, now_s - min(since_s, default=now_s))

    def _kv_snapshot(self, *, fresh: bool) -> KvSnapshot | None:
        try:
            return self.kv.snapshot(fresh=fresh) if self.kv is not None else None
        except Exception:
            self._failed("KV snapshot")
            return None

    def _set_policy(self) -> None:
        name, switches, time_s = self.info.name, self.switches, self._chunk_time_s
        unpaced = msgspec.structs.replace(switches, pace=False)
        # Without our chunks nobody says which frames have left: those that wait here would count as
        # the listener's.
        if not self.info.may_hold or (self.info.token_s and not switches.chunking):
            switches = unpaced
        self._unpaced_policy = self.config.policy(name, unpaced, time_s)
        # A saturated stage puts nothing off but for somebody who waits.
        self.policy = self.config.policy(name, unpaced if self._saturated else switches, time_s)
        # While something is urgent, others go on only for their next chunk.
        self.tight_policy = self.config.policy(name, switches, self._tight_time_s, tight=True)

    def _plan(self, now_s: float) -> Plan:
        urgent = self._urgent or self.first_audio_waits()
        policy = self.tight_policy if urgent else self.policy
        if self._crowded():
            policy = self._unpaced_policy
        return plan(
            self._candidates,
            self._budgets,
            self.held,
            now_s,
            policy,
            barge_in_rate=self.barge_in_rate,
            contended=urgent,
        )

    def _crowded(self) -> bool:
        """Whether slots or KV are short, if all its sessions had as much as those that run."""
        running, slots, (used, total) = sum(self._by_class[0]), self.info.slots, self._kv_blocks
        few_slots, little_kv = slots_short(running, slots), used > CROWDED_SHARE * total
        if not (few_slots or little_kv):
            return False
        asking = {one.session_id for one in self._known.values()}
        sessions = len(asking) + sum(
            # Who never asked for anything may ask here.
            view.session_id in self._met or view.ready_at_s < view.opened_at_s
            for view in self.table
            if view.session_id not in asking
        )
        return (few_slots and sessions > slots) or (
            little_kv and sessions * used > total * running > 0
        )

    def first_audio_waits(self) -> bool:
        """Whether a session waits for its first audio, in whichever stage. Stages share the
        machine, and the next one will have to run for it.
        """
        return bool(self.table.thinking)

    def _request_rows(self) -> list[RequestRow]:
        rows: list[RequestRow] = []
        queues = (("running", self._queues.running()), ("waiting", self._queues.waiting()))
        for state, requests in queues:
            for request in requests:
                ranked = self.ranks.get(request.request_id)
                if ranked is None or len(rows) >= MAX_ROWS:
                    continue
                known = self._known[request.request_id]
                rows.append(
                    RequestRow(
                        request_id=request.request_id,
                        session_id=known.session_id,
                        state=state,
                        held=request.request_id in self.held,
                        urgency=ranked.urgency.name,
                        buffer_s=ranked.buffer_s,
                        age_s=ranked.age_s,
                        produced_s=known.made_s,
                        tokens=request.num_output_tokens,
                        kv_blocks=self._queues.kv_blocks_of(request),
                    )
                )
        return rows

    def _session_rows(self) -> list[SessionRow]:
        now_s = self._clock()
        return [session_row(view, now_s) for view in list(self.table)[-MAX_ROWS:]]

    def _failed(self, where: str) -> None:
        self.errors += 1
        if self.errors == 1:
            logger.exception(
                "LiveServe: %s failed in stage %s; requests keep the host's order "
                "(counted in liveserve_errors_total, logged once)",
                where,
                self.info.name,
            )


def session_row(view: SessionView, now_s: float) -> SessionRow:
    """A session for people to read, as of ``now_s``."""
    clock = view.clock
    return SessionRow(
        session_id=view.session_id,
        phase=view.phase_at(now_s).name.lower(),
        speech_active=view.speech_active,
        response_id=view.response_id,
        clock_source=clock.source(now_s).name.lower(),
        routed_s=clock.routed_s,
        played_s=clock.played_s(now_s),
        acked_s=clock.acked_s,
        buffer_s=clock.buffer_s(now_s),
        barge_ins=view.barge_ins,
        reply_gap_s=view.reply_gap_s,
    )
