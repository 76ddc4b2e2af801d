"""The simulated world: users with their players, the API process, and the engines between them.

The API process is the shipped `SessionTracker`; its events reach the engines `CostModel.signal_s`
later. A session stays with the replicas that it began with.
"""

from __future__ import annotations

import heapq
import math
import random
from bisect import bisect_right
from collections import deque
from collections.abc import Callable
from typing import Any

import msgspec

from liveserve.bench.player import Player
from liveserve.bench.records import (
    COMPLETED,
    FAILED,
    INTERRUPTED,
    ResponseRecord,
    SessionRecord,
)
from liveserve.bench.simulator.ar import Thinker
from liveserve.bench.simulator.engines import Engine, Request
from liveserve.bench.simulator.kv import CachingPool, History, Pool
from liveserve.bench.simulator.model import (
    CODE2WAV,
    TALKER,
    THINKER,
    CostModel,
    Session,
    SimConfig,
    System,
    Turn,
    Workload,
)
from liveserve.bench.simulator.talker import Talker
from liveserve.bench.simulator.vocoder import Vocoder
from liveserve.events import Event, EventKind
from liveserve.kv_signals import KvSignals
from liveserve.session import SessionTable, SessionTracker

_NEVER = 1 << 60
# Events that matter only to engines that work for their session.
_MINOR = frozenset({EventKind.PLAYBACK, EventKind.RATE, EventKind.REPLY_GAP, EventKind.TEXT_PACE})
# Events that a preload can follow from.
_PRELOADS = frozenset(
    {
        EventKind.SPEECH_STARTED,
        EventKind.SPEECH_STOPPED,
        EventKind.BARGE_IN,
        EventKind.COMMITTED,
        EventKind.CLOSED,
    }
)


class Sample(msgspec.Struct, frozen=True):
    """Pools and queues at one moment, over all replicas; blocks are simulated ones."""

    at_s: float
    sessions: int
    talker_running: int
    talker_held: int
    vocoder_chunks: int
    gpu_used_blocks: int
    gpu_cached_blocks: int
    dram_blocks: int


class World:
    """One run. `run` it once; then read ``records``, ``sessions``, ``samples`` and the engines."""

    def __init__(
        self, workload: Workload, costs: CostModel, system: System, config: SimConfig, seed: int
    ) -> None:
        self.costs, self.system, self.config, self.seed = costs, system, config, seed
        self.live_config = msgspec.structs.replace(config.live, switches=system.switches)
        self.frame_s = 1.0 / costs.frame_rate_hz
        self.handover_s = costs.handover_s
        self.active = 0  # engines that are in a step
        self.engine_count = 0
        self.now_s = 0.0
        self.events = 0
        self._heap: list[tuple[float, int, Callable[[float, Any], None], Any]] = []
        self._count = 0
        self._minor = False
        # What engines can see of all sessions.
        self._seen = SessionTable(self.live_config.max_sessions)
        self.prefilled = 0
        self.tracker = SessionTracker(self.live_config, self._publish)
        self.users: dict[str, User] = {}
        self._placed = [
            [0] * stage.replicas for stage in (costs.thinker, costs.talker, costs.code2wav)
        ]
        self.records: list[ResponseRecord] = []
        self.sessions: list[SessionRecord] = []
        self.leads_s: list[tuple[float, float]] = []
        self.reloads: list[tuple[float, int, int]] = []
        self.samples: list[Sample] = []
        self.signals = [
            KvSignals(self.live_config.max_sessions) for _ in range(costs.thinker.replicas)
        ]
        self._follows = system.eviction == "next-use"
        self.thinkers = [self._thinker(index) for index in range(costs.thinker.replicas)]
        self.talkers = [self._talker() for _ in range(costs.talker.replicas)]
        self.vocoders = [
            Vocoder(self, 2, CODE2WAV, costs.code2wav) for _ in range(costs.code2wav.replicas)
        ]
        self.engines: list[Engine] = [*self.thinkers, *self.talkers, *self.vocoders]
        self._hearing = self.engines if system.live else []
        self.detect_s = costs.speech_start_s
        if system.live and system.switches.false_alarm:
            self.detect_s = max(self.detect_s, self.live_config.false_alarm_ms / 1e3)
        self._concurrency = workload.concurrency
        self._queue: deque[User] = deque()
        self._open = 0
        for session in workload.sessions:
            self.at(session.arrival_s, self._arrives, session)
        if config.timeline_s:
            self.at(0.0, self._sample, None)

    def _thinker(self, index: int) -> Thinker:
        costs = self.costs
        thinker = Thinker(self, 0, THINKER, costs.thinker, costs.max_answer_tokens)
        thinker.pool = CachingPool(
            costs.thinker,
            self.config.min_block_tokens,
            costs.dram_bytes,
            costs.link,
            self.system,
            self.signals[index].next_use,
            self.config.prefix_caching,
            self.at,
            thinker.loaded,
            thinker.room,
        )
        return thinker

    def _talker(self) -> Talker:
        costs = self.costs
        talker = Talker(self, 1, TALKER, costs.talker, costs.max_answer_frames)
        talker.pool = Pool(costs.talker, self.config.min_block_tokens)
        return talker

    def crowding(self) -> float:
        """How much longer work beside the engines takes now, where they share a machine."""
        parallel = self.costs.parallel_steps
        return 1.0 if parallel is None else max(1.0, (self.active + 1) / parallel)

    # ---- time ------------------------------------------------------------------------------

    def at(self, at_s: float, call: Callable[[float, Any], None], argument: Any = None) -> None:
        """``call(at_s, argument)`` when it is ``at_s``."""
        self._count += 1
        heapq.heappush(self._heap, (at_s, self._count, call, argument))

    def run(self) -> None:
        """Until nothing happens any more, or until `SimConfig.until_s`."""
        heap, pop, until_s = self._heap, heapq.heappop, self.config.until_s
        events = 0
        while heap:
            at_s, _, call, argument = pop(heap)
            if at_s > until_s:
                break
            self.now_s = at_s
            events += 1
            call(at_s, argument)
        self.events = events
        if heap:
            self.now_s = until_s
            for record in self.records:
                if record.outcome == FAILED and record.error is None:
                    record.error = "the run was cut off"

    # ---- sessions --------------------------------------------------------------------------

    def _arrives(self, now_s: float, session: Session) -> None:
        user = User(self, session)
        if self._concurrency is not None and self._open >= self._concurrency:
            self._queue.append(user)
        else:
            self._begin(user, now_s)

    def _begin(self, user: User, now_s: float) -> None:
        self._open += 1
        user.begin(now_s)

    def over(self, now_s: float) -> None:
        """A session is over: the next of a closed loop begins."""
        self._open -= 1
        if self._queue:
            self._begin(self._queue.popleft(), now_s)

    def place(self, stage: int) -> int:
        """A replica of ``stage`` for a new session: one that has the fewest."""
        placed = self._placed[stage]
        index = placed.index(min(placed))
        placed[index] += 1
        return index

    def place_back(self, user: User) -> None:
        """``user``'s session asks for nothing more."""
        for placed, index in zip(
            self._placed, (user.replica, user.talker, user.vocoder), strict=True
        ):
            placed[index] -= 1

    def fail(self, answer: Answer, why: str, now_s: float) -> None:
        """The server gives ``answer`` up, and the user their session."""
        answer.record.error = why
        answer.user.session_record.errors[why] += 1
        answer.user.session_record.error = why
        self.tracker.response_done(answer.session_id, answer.request_id, "failed", now_s)
        answer.abort(now_s)
        answer.over = True
        answer.record.done_s = now_s
        answer.user.leave(now_s, "failed")

    # ---- events to the engines -------------------------------------------------------------

    def _publish(self, event: Event) -> None:
        if self.system.live:
            user = self.users.get(event.session_id)
            if user is not None:
                view = self.tracker.table.get(event.session_id)
                if self._follows:
                    self.signals[user.replica].happened(event, view)
                if event.kind in _PRELOADS:
                    self.thinkers[user.replica].pool.happened(event, view)
        if self._hearing:
            minor = self._minor or event.kind in _MINOR
            self.at(self.now_s + self.costs.signal_s, self._deliver, (event, minor))

    def _deliver(self, now_s: float, what: tuple[Event, bool]) -> None:
        event, minor = what
        session_id = event.session_id
        changes = not minor and self._waiting_changes(event)
        for engine in self._hearing:
            if not minor or session_id in engine.sessions:
                engine.hear(event, now_s, minor=minor, changes=changes)

    def _waiting_changes(self, event: Event) -> bool:
        """Whether ``event`` changes whether somebody waits for first audio
        (`StageRuntime.first_audio_waits`)."""
        before = bool(self._seen.thinking)
        self._seen.apply(event)
        return before != bool(self._seen.thinking)

    def routed(self, answer: Answer, total_s: float, now_s: float) -> None:
        """Audio of ``answer`` goes to its client."""
        self._minor = answer.routed_any
        answer.routed_any = True
        self.tracker.audio_routed(answer.session_id, answer.request_id, total_s, now_s)
        self._minor = False

    # ---- what was seen ---------------------------------------------------------------------

    def _sample(self, now_s: float, _: None) -> None:
        def total(engines: list[Any], what: Callable[[Any], int]) -> int:
            return sum(map(what, engines))

        self.samples.append(
            Sample(
                now_s,
                self._open,
                total(self.talkers, lambda e: len(e.running)),
                total(self.talkers, lambda e: len(e.held)),
                total(self.vocoders, lambda e: sum(len(r.chunks) for r in e.sessions.values())),
                total(self.thinkers, lambda e: e.pool.used),
                total(self.thinkers, lambda e: e.pool.cached),
                total(self.thinkers, lambda e: e.pool.tier.in_dram),
            )
        )
        if self._heap:
            self.at(now_s + self.config.timeline_s, self._sample, None)


class User:
    """One session: the user, their client, and the replicas that serve them."""

    def __init__(self, world: World, session: Session) -> None:
        self.world = world
        self.plan = session
        self.session_id = f"s{session.index}"
        self.delay_s = session.network_delay_s
        self.number = -1  # of the turn under way
        self.answer: Answer | None = None
        self.gone = False
        self.replica = self.talker = self.vocoder = 0
        self.history = History(self.session_id, session.prefix, session.prefix_tokens)
        self.session_record = SessionRecord(
            session.index,
            planned_start_s=session.arrival_s,
            start_s=session.arrival_s,
            turns_planned=len(session.turns),
        )
        self._jitter = (
            random.Random(f"{world.seed}/{session.index}") if session.jitter_s > 0 else None
        )

    def begin(self, now_s: float) -> None:
        world = self.world
        world.users[self.session_id] = self
        world.sessions.append(self.session_record)
        self.session_record.start_s = now_s
        self.replica = world.place(0)
        world.thinkers[self.replica].pool.histories[self.session_id] = self.history
        self.talker = world.place(1)
        self.vocoder = world.place(2)
        spoken = any(turn.answer_s > 0 for turn in self.plan.turns)
        world.tracker.opened(
            self.session_id, "duplex" if spoken else "text", now_s, self.plan.playback_rate
        )
        self._next(now_s)

    def _next(self, now_s: float) -> None:
        """The user will speak again, or not."""
        number = self.number + 1
        turns = self.plan.turns
        if number >= len(turns):
            self.leave(now_s, "heard")
            return
        start_s = now_s if number == 0 else now_s + turns[number - 1].reply_gap_s
        start_s = max(start_s, turns[number].not_before_s or 0.0)
        self.world.at(start_s, self.speak, None)

    def speak(self, now_s: float, _: None = None) -> None:
        """The user begins to speak: a new turn, over the answer or not."""
        world, costs = self.world, self.world.costs
        if self.gone:
            return
        before = self.answer
        over_answer = before is not None and not before.over
        self.number += 1
        leaves = self.number >= len(self.plan.turns)
        heard_s = now_s + self.delay_s + costs.speech_start_s
        if over_answer:
            assert before is not None
            before.record.barge_in_s = now_s
            if world.detect_s > costs.speech_start_s:
                world.at(heard_s, self._provisional, None)
            heard_s = now_s + self.delay_s + world.detect_s
            world.at(heard_s, self._barged_in, (before, leaves))
        if leaves:
            return
        turn = self.plan.turns[self.number]
        if not over_answer:
            world.at(heard_s, self._started, None)
        end_s = now_s + turn.speech_s
        answer = Answer(self, turn, self.number, end_s)
        committed_s = max(end_s + self.delay_s + costs.endpoint_s, heard_s)
        world.at(committed_s, self._committed, answer)

    def _provisional(self, now_s: float, _: None) -> None:
        self.world.tracker.speech_provisional(self.session_id, now_s)

    def _started(self, now_s: float, _: None) -> None:
        self.world.tracker.speech_started(self.session_id, now_s)

    def _barged_in(self, now_s: float, what: tuple[Answer, bool]) -> None:
        answer, leaves = what
        world = self.world
        answer.interrupted(now_s)
        world.tracker.barge_in(self.session_id, "speech", now_s)
        if leaves:
            self.leave(now_s, "left")
        else:
            world.tracker.speech_started(self.session_id, now_s)

    def _committed(self, now_s: float, answer: Answer) -> None:
        world, tracker = self.world, self.world.tracker
        if self.gone:
            return
        self.answer = answer
        answer.record.endpoint_s = answer.record.created_s = now_s + self.delay_s
        tracker.speech_stopped(self.session_id, now_s)
        tracker.committed(self.session_id, now_s)
        tracker.response_created(self.session_id, answer.request_id, now_s)
        encode_s = 0.0
        if answer.turn.encoder_tokens:
            encode_s = (
                world.costs.encode_s + world.costs.encode_token_s * answer.turn.encoder_tokens
            )
        world.at(now_s + world.crowding() * encode_s, answer.begin, None)

    def heard_out(self, answer: Answer, now_s: float) -> None:
        """The answer was heard (or read) to its end."""
        self.session_record.turns_done += 1
        self._next(now_s)

    def leave(self, now_s: float, why: str) -> None:
        """The session is over; a client that hangs up says so a reply gap later, and one that
        falls silent is disconnected after `SimConfig.silent_s`."""
        world = self.world
        if self.gone:
            return
        self.gone = True
        self.session_record.end_s = now_s
        world.over(now_s)
        if why == "left":
            world.at(now_s, self._closed, None)
        elif self.plan.hangs_up:
            gap_s = self.plan.turns[-1].reply_gap_s
            world.at(now_s + gap_s + self.delay_s, self._closed, None)
        else:
            world.at(now_s + world.config.silent_s, self._closed, None)

    def _closed(self, now_s: float, _: None) -> None:
        self.world.place_back(self)
        self.world.tracker.closed(self.session_id, "closed", now_s)
        del self.world.users[self.session_id]
        del self.world.thinkers[self.replica].pool.histories[self.session_id]

    def packet_s(self, now_s: float) -> float:
        """When a packet that leaves now arrives."""
        delay_s = self.delay_s
        if self._jitter is not None:
            delay_s += self._jitter.expovariate(1.0 / self.plan.jitter_s)
        return now_s + delay_s


class Answer:
    """One answer, from the committed turn to the last sound of it."""

    def __init__(self, user: User, turn: Turn, number: int, speech_end_s: float) -> None:
        world = user.world
        self.world, self.user, self.turn = world, user, turn
        self.session_id = user.session_id
        self.request_id = f"{user.session_id}-{number}"
        self.frames = (
            max(1, round(turn.answer_s * world.costs.frame_rate_hz)) if turn.answer_s > 0 else 0
        )
        self.barge_in_s = turn.barge_in_s
        self.record = ResponseRecord(
            user.plan.index,
            number,
            planned_answer_s=turn.answer_s,
            planned_barge_in_s=turn.barge_in_s,
            speech_end_s=speech_end_s,
        )
        self.player = Player()
        self.thinker: Request | None = None
        self.talker: Request | None = None
        self.vocoder: Request | None = None
        self.text_over = False
        # When each text token is made, those of the thinker's stretch under way as well.
        self.text_times_s: list[float] = []
        self.text_wanted = world.costs.talker_starts_after if self.frames else _NEVER
        self._text_call = 0
        self._text_called = 0
        self.over = False  # heard out, interrupted or failed
        self.complete = False  # all of it was routed
        self.routed_any = False
        self._said = False  # when the user will speak over it is known
        self._last_packet_s = 0.0
        self._lead_sum_s = self._lead_max_s = 0.0
        self._leads = 0

    # ---- thinker ---------------------------------------------------------------------------

    def begin(self, now_s: float, _: None = None) -> None:
        """The question reaches the thinker."""
        if self.over:
            return
        world, history = self.world, self.user.history
        world.records.append(self.record)
        prompt = history.tokens + self.turn.prompt_tokens
        request = Request(self, prompt, self.turn.answer_tokens, now_s)
        request.history = history
        self.thinker = request
        world.thinkers[self.user.replica].add(request, now_s)

    def first_text(self, now_s: float) -> None:
        costs, request = self.world.costs, self.thinker
        assert request is not None
        self.record.first_text_s = now_s + costs.deliver_s + self.user.delay_s
        if request.loaded_blocks or request.recomputed:
            loaded = (request.load_s, request.loaded_blocks, request.recomputed)
            self.world.reloads.append(loaded)

    def text_ready(self, now_s: float) -> int:
        """Text tokens that the talker can use; more than there are once there are all."""
        if self.text_over and now_s >= self.text_times_s[-1] + self.world.handover_s:
            return _NEVER
        return bisect_right(self.text_times_s, now_s - self.world.handover_s)

    def want_text(self, token: int) -> None:
        """The talker waits for the ``token``-th text token, or for the end of the text."""
        if self.text_over:
            self.text_is_made(min(token, len(self.text_times_s)))
        elif token <= len(self.text_times_s):
            self.text_is_made(token)
        else:
            self.text_wanted = token

    def text_is_made(self, token: int) -> None:
        """The token that the talker waits for is made, or being made."""
        self.text_wanted = _NEVER
        self._text_call += 1
        self._text_called = token
        at_s = self.text_times_s[token - 1] + self.world.handover_s
        self.world.at(max(at_s, self.world.now_s), self.text_came, self._text_call)

    def text_untold(self, tokens: int) -> None:
        """The last ``tokens`` tokens will be made at another time."""
        del self.text_times_s[-tokens:]
        if self._text_called > len(self.text_times_s):
            self._text_call += 1
            self.text_wanted, self._text_called = self._text_called, 0

    def text_came(self, now_s: float, call: int) -> None:
        """The text that the talker waited for is there."""
        if self.over or call != self._text_call:
            return
        self._text_called = 0
        world, costs = self.world, self.world.costs
        engine = world.talkers[self.user.talker]
        if self.talker is None:
            assert self.thinker is not None
            prompt = costs.talker_prompt_tokens
            if costs.talker_sees_prompt:
                prompt += self.user.history.tokens + self.turn.prompt_tokens
            self.talker = Request(self, prompt, self.frames, now_s)
            engine.add(self.talker, now_s)
        elif self.talker.blocked and not self.talker.gone:
            engine.unblock(self.talker, now_s)

    def thinker_done(self, now_s: float) -> None:
        """The text is complete."""
        world, request = self.world, self.thinker
        assert request is not None
        world.tracker.made(self.session_id, THINKER, request.num_output_tokens)
        if self.frames:
            # It waits for a token that will not come, or for fewer than there must be to begin.
            if self.text_wanted != _NEVER:
                self.text_is_made(len(self.text_times_s))
            return
        self._end_text(now_s)

    def _end_text(self, now_s: float) -> None:
        """An answer to be read: it is over with its last token."""
        self._keep(self.turn.answer_tokens)
        self.over = self.complete = True
        record = self.record
        record.outcome, record.done_s = COMPLETED, now_s + self.user.delay_s
        record.text_deltas = self.turn.answer_tokens
        record.stopped_s = record.done_s
        self.world.tracker.response_done(self.session_id, self.request_id, "completed", now_s)
        self.world.at(record.done_s, self._read, None)

    def _read(self, now_s: float, _: None) -> None:
        self.user.heard_out(self, now_s)

    def _keep(self, answer_tokens: int) -> None:
        self.user.history.tokens += self.turn.prompt_tokens + answer_tokens

    # ---- talker and vocoder ----------------------------------------------------------------

    def frames_left(self, context: int, count: int, total: int, last: bool, now_s: float) -> None:
        """``count`` frames leave the talker, with ``context`` frames before them; ``total``
        so far."""
        world = self.world
        world.tracker.made(self.session_id, TALKER, count, count * world.frame_s)
        if self.vocoder is None:
            self.vocoder = Request(self, 0, 0, now_s)
            self.vocoder.entered = True
        engine = world.vocoders[self.user.vocoder]
        chunk = (self.vocoder, (context, count, total, last))
        world.at(now_s + world.crowding() * world.handover_s, engine.chunk, chunk)

    def route(self, now_s: float, what: tuple[int, int, bool]) -> None:
        """Audio leaves the server."""
        if self.over:
            return
        frames, total, last = what
        world, user = self.world, self.user
        seconds = frames * world.frame_s
        world.tracker.made(self.session_id, CODE2WAV, 0, seconds)
        world.routed(self, total * world.frame_s, now_s)
        self.record.routed_s += seconds
        if last:
            self.complete = True
            self._keep(self.turn.answer_tokens)
            world.tracker.response_done(self.session_id, self.request_id, "completed", now_s)
        packet_s = max(user.packet_s(now_s), self._last_packet_s)
        self._last_packet_s = packet_s
        world.at(packet_s, self._arrives, (seconds, last))

    # ---- client ----------------------------------------------------------------------------

    def _arrives(self, now_s: float, what: tuple[float, bool]) -> None:
        seconds, last = what
        record, player, world = self.record, self.player, self.world
        if player.stopped_s is not None:
            return  # the user has spoken over it
        rate = self.user.plan.playback_rate
        player.push(now_s, seconds / rate)
        if record.first_audio_s is None:
            record.first_audio_s = now_s
            if self.user.plan.acks and world.system.live:
                world.at(now_s + world.config.ack_interval_s, self._ack, None)
        record.last_audio_s = now_s
        lead_s = player.routed_s - player.position_s(now_s)
        self._leads += 1
        self._lead_sum_s += lead_s
        if lead_s > self._lead_max_s:
            self._lead_max_s = lead_s
        barge_in_s = self.barge_in_s
        if barge_in_s is not None and not self._said and player.routed_s * rate >= barge_in_s:
            self._said = True
            world.at(max(now_s, player.reaches_s(barge_in_s / rate)), self._spoken_over, None)
        if last:
            player.finish()
            record.done_s = now_s
            world.at(player.reaches_s(player.routed_s), self._heard, None)

    def _spoken_over(self, now_s: float, _: None) -> None:
        if not self.over:
            self.user.speak(now_s)

    def _heard(self, now_s: float, _: None) -> None:
        if self.over or self.record.barge_in_s is not None:
            return
        self.over = True
        record = self.record
        record.outcome, record.stopped_s = COMPLETED, now_s
        self._settle_record(now_s)
        self.user.heard_out(self, now_s)

    def _settle_record(self, now_s: float) -> None:
        record, player = self.record, self.player
        record.heard_s = min(
            record.routed_s, player.position_s(now_s) * self.user.plan.playback_rate
        )
        record.gaps = player.gaps
        record.text_deltas = self.thinker.num_output_tokens if self.thinker is not None else 0
        if self._leads:
            self.world.leads_s.append((self._lead_sum_s / self._leads, self._lead_max_s))

    def _ack(self, now_s: float, _: None) -> None:
        if self.over or self.player.stopped_s is not None:
            return
        played_s = self.player.position_s(now_s) * self.user.plan.playback_rate
        self.world.at(now_s + self.user.delay_s, self._acked, played_s)
        if not self.player.drained(now_s):
            self.world.at(now_s + self.world.config.ack_interval_s, self._ack, None)

    def _acked(self, now_s: float, played_s: float) -> None:
        if not self.over:
            self.world.tracker.playback_ack(
                self.session_id, self.request_id, played_s * 1e3, None, now_s
            )

    # ---- its end before its end ------------------------------------------------------------

    def interrupted(self, now_s: float) -> None:
        """The server has noticed that the user speaks over it."""
        if self.over:
            return
        world, record, user = self.world, self.record, self.user
        world.thinkers[user.replica].cut(now_s)
        world.talkers[user.talker].cut(now_s)
        self.over = True
        record.outcome = INTERRUPTED
        stopped_s = now_s + user.delay_s
        # Playback goes on until the client learns of it.
        self.player.stop(stopped_s)
        record.stopped_s = stopped_s
        self._settle_record(stopped_s)
        user.session_record.turns_done += 1
        heard = record.heard_s
        tokens = math.ceil(heard / self.turn.answer_s * self.turn.answer_tokens)
        made = self.thinker.num_output_tokens if self.thinker is not None else 0
        tokens = min(tokens, made)
        history = user.history
        pool = world.thinkers[user.replica].pool
        if self.complete:
            begun = history.tokens - self.turn.answer_tokens
            pool.forget_after(history, begun + tokens, now_s)
        elif self.thinker is not None and self.thinker.gone:
            begun = history.tokens + self.turn.prompt_tokens
            pool.forget_after(history, begun + tokens, now_s)
        self.abort(now_s, tokens)

    def abort(self, now_s: float, kept: int = 0) -> None:
        """Every stage drops its work; the conversation keeps ``kept`` tokens of the answer."""
        world, user = self.world, self.user
        thinker = self.thinker
        if thinker is not None and not thinker.gone:
            world.tracker.made(self.session_id, THINKER, thinker.num_output_tokens)
            asked = user.history.tokens + self.turn.prompt_tokens
            keep = min(thinker.context, asked + kept)
            world.thinkers[user.replica].end(thinker, keep, now_s)
            self._keep(kept)
        talker = self.talker
        if talker is not None and not talker.gone:
            progress = talker.progress
            if progress is not None and progress.pending:
                count = progress.pending
                world.tracker.made(self.session_id, TALKER, count, count * world.frame_s)
            world.talkers[user.talker].end(talker, 0, now_s)
        if self.vocoder is not None:
            world.vocoders[user.vocoder].end(self.vocoder, now_s)
