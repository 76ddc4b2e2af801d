"""Sessions as state: one reducer for both sides, and the tracker that feeds it on the API side.

`apply` turns an event into a change of a `SessionView`. The API process and every engine run the
same function over the same events, so they agree. `SessionTracker` watches the live sessions
(it is called by the host hooks), refuses impossible playback reports, and emits the events.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from liveserve.config import LiveServeConfig
from liveserve.events import Event, EventKind
from liveserve.kvtier.next_use import GapPrior, ReplyGap
from liveserve.scheduler.views import Phase, SessionView

# Weight of the newest response in the average of seconds of speech per text token.
_PACE_WEIGHT = 0.3
_NAMES = {kind: kind.name.lower() for kind in EventKind}
# What changes no phase, and whether nobody speaks.
_CLOCK_ONLY = frozenset(
    {EventKind.PLAYBACK, EventKind.RATE, EventKind.REPLY_GAP, EventKind.TEXT_PACE}
)
# Responses per session whose routed and acked positions are remembered, for late acks.
_REMEMBERED_RESPONSES = 4


def apply(view: SessionView, event: Event, *, use_acks: bool = True) -> None:
    """Change ``view`` as ``event`` says. Events about another response leave the clock alone."""
    kind, now_s, clock = event.kind, event.at_s, view.clock
    view.last_event_s = now_s
    this_response = not event.response_id or event.response_id == view.response_id
    if kind is EventKind.AUDIO_ROUTED:
        if this_response:
            clock.route(event.value_s, now_s)
            view.phase = Phase.SPEAKING
    elif kind is EventKind.PLAYBACK:
        if this_response and use_acks:
            clock.ack(event.value_s, now_s)
    elif kind is EventKind.INPUT:
        view.input_s = event.value_s
        if view.phase_at(now_s) is Phase.IDLE:
            view.phase = Phase.LISTENING
    elif kind is EventKind.SPEECH_STARTED:
        view.speech_active = True
        if view.phase_at(now_s) is Phase.IDLE:
            view.phase = Phase.LISTENING
    elif kind is EventKind.SPEECH_STOPPED:
        view.speech_active = False
    elif kind is EventKind.COMMITTED:
        view.phase, view.ready_at_s, view.input_s = Phase.THINKING, now_s, 0.0
        view.response_id = ""
        clock.restart()
    elif kind is EventKind.RESPONSE_CREATED:
        if view.phase is not Phase.THINKING:
            view.ready_at_s = now_s
        view.phase, view.response_id = Phase.THINKING, event.response_id
        clock.restart()
    elif kind is EventKind.RESPONSE_DONE:
        if this_response:
            clock.complete = True
            if not clock.started and view.phase is Phase.THINKING:
                view.phase = Phase.IDLE
    elif kind is EventKind.BARGE_IN:
        view.barge_ins += 1
        view.phase, view.response_id = Phase.LISTENING, ""
        clock.restart()
    elif kind is EventKind.RATE:
        clock.set_rate(event.value_s, now_s)
    elif kind is EventKind.REPLY_GAP:
        view.reply_gap_s = event.value_s
    elif kind is EventKind.TEXT_PACE:
        view.text_token_s = event.value_s
    elif kind is EventKind.OPENED:
        view.opened_at_s = now_s
        view.wants_audio = event.detail != "text"
        clock.set_rate(event.value_s, now_s)


class SessionTable:
    """Views by session id, at most ``max_sessions``; the longest silent one is forgotten first.

    Attributes:
        thinking: sessions that wait for their first audio.
        get: the view of a session id, or None.
    """

    def __init__(self, max_sessions: int, *, use_acks: bool = True) -> None:
        self._views: dict[str, SessionView] = {}
        self.thinking: set[str] = set()
        # The dict's own method: it is asked once for each request of every round.
        self.get: Callable[[str], SessionView | None] = self._views.get
        self._max = max_sessions
        self._use_acks = use_acks

    def __len__(self) -> int:
        return len(self._views)

    def __iter__(self) -> Iterator[SessionView]:
        return iter(self._views.values())

    def apply(self, event: Event) -> SessionView | None:
        """Apply ``event``, creating the session if it is new. Returns None once it is closed."""
        views, session_id = self._views, event.session_id
        view = views.pop(session_id, None)
        if event.kind is EventKind.CLOSED:
            self.thinking.discard(session_id)
            return None
        if view is None:
            if len(views) >= self._max:
                oldest = next(iter(views))
                del views[oldest]
                self.thinking.discard(oldest)
            view = SessionView(session_id, opened_at_s=event.at_s)
        apply(view, event, use_acks=self._use_acks)
        views[session_id] = view  # newest last
        if event.kind not in _CLOCK_ONLY:
            self._sort_in(view)
        return view

    def _sort_in(self, view: SessionView) -> None:
        if view.phase is Phase.THINKING and view.wants_audio:
            self.thinking.add(view.session_id)
        else:
            self.thinking.discard(view.session_id)

    def load(self, views: Iterable[SessionView]) -> None:
        """Replace everything by ``views``, cut to the newest ``max_sessions``."""
        newest = sorted(views, key=lambda view: view.last_event_s)[-self._max :]
        self._views.clear()
        self.thinking.clear()
        for view in newest:
            self._views[view.session_id] = view
            self._sort_in(view)


class AckRefused(ValueError):
    """A playback report that cannot be true.

    Attributes:
        code: machine-readable reason, as sent to the client.
    """

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


@dataclass(slots=True)
class _Made:
    """What one stage made for a response; ``seconds`` is None for text, which has no fixed pace."""

    tokens: int = 0
    seconds: float | None = None

    def add(self, tokens: int, seconds: float | None) -> None:
        self.tokens += tokens
        if seconds is not None:
            self.seconds = (self.seconds or 0.0) + seconds


@dataclass(slots=True)
class _Response:
    routed_s: float = 0.0
    acked_s: float = 0.0
    completed: bool = False
    made: dict[str, _Made] = field(default_factory=dict)

    @property
    def text_tokens(self) -> int:
        return sum(made.tokens for made in self.made.values() if made.seconds is None)


@dataclass(slots=True)
class _Session:
    """What the tracker keeps of a session beside its view.

    Attributes:
        settled: the newest response has been counted as heard and wasted.
        pending: made since then, for a response that has not been announced.
        provisional_at_s: when speech began that may be an interruption.
    """

    gap: ReplyGap
    responses: dict[str, _Response] = field(default_factory=dict)
    current: str = ""
    gap_pending: bool = False
    settled: bool = True
    pending: dict[str, _Made] = field(default_factory=dict)
    provisional_at_s: float | None = None
    one_turn: bool = False


@dataclass(slots=True)
class StageTotals:
    """What one stage made for responses that ended, and what of it nobody heard.

    Seconds are seconds of speech: of text at the response's pace, of codec frames, of audio.
    Stages whose output has no tokens (code2wav) count seconds alone.
    """

    made_tokens: float = 0.0
    wasted_tokens: float = 0.0
    made_s: float = 0.0
    wasted_s: float = 0.0


@dataclass(slots=True)
class Totals:
    """What the tracker has seen since it started, over all sessions.

    ``wasted_s`` is what reached clients and was not heard; ``stages`` also has what did not reach
    them.
    """

    routed_s: float = 0.0
    heard_s: float = 0.0
    wasted_s: float = 0.0
    false_alarms: int = 0
    stages: dict[str, StageTotals] = field(default_factory=dict)
    barge_ins: dict[str, int] = field(default_factory=dict)
    responses: dict[str, int] = field(default_factory=dict)
    events: dict[str, int] = field(default_factory=dict)


class SessionTracker:
    """Watches every live session. Not thread-safe: one event loop owns it.

    Args:
        config: limits and tolerances.
        publish: receives every event, after it was applied to `table`.
    """

    def __init__(self, config: LiveServeConfig, publish: Callable[[Event], None]) -> None:
        self.table = SessionTable(config.max_sessions, use_acks=config.playback == "auto")
        self.totals = Totals()
        self._config = config
        self._publish = publish
        self._sessions: dict[str, _Session] = {}
        self._gap_prior = GapPrior()
        self._text_token_s = SessionView("").text_token_s

    # ---- what the host reports -------------------------------------------------------------

    def opened(self, session_id: str, kind: str, now_s: float, rate: float = 1.0) -> None:
        """A session begins; ``kind`` is "duplex", "turn" or "text"."""
        if session_id in self._sessions:
            return
        while len(self._sessions) >= self._config.max_sessions:
            self.closed(next(iter(self._sessions)), "forgotten", now_s)
        gap = ReplyGap(self._gap_prior)
        self._sessions[session_id] = _Session(gap, one_turn=kind != "duplex")
        self._emit(EventKind.OPENED, session_id, now_s, rate, detail=kind)
        self._emit(EventKind.REPLY_GAP, session_id, now_s, gap.mean_s)
        self._emit(EventKind.TEXT_PACE, session_id, now_s, self._text_token_s)

    def rate(self, session_id: str, rate: float, now_s: float) -> None:
        """The client plays at ``rate`` from now on. Raises ValueError if it is not above 0."""
        if not math.isfinite(rate) or rate <= 0:
            raise ValueError(f"playback_rate must be a finite number above 0, got {rate!r}")
        if session_id in self._sessions:
            self._emit(EventKind.RATE, session_id, now_s, rate)

    def input(self, session_id: str, seconds: float, now_s: float) -> None:
        """``seconds`` more of input audio arrived."""
        view = self.table.get(session_id)
        if view is not None and session_id in self._sessions:
            self._emit(EventKind.INPUT, session_id, now_s, view.input_s + max(0.0, seconds))

    def speech_provisional(self, session_id: str, now_s: float) -> None:
        """Speech began over an answer; `speech_started` or `false_alarm` will follow."""
        if session_id in self._sessions:
            self._sessions[session_id].provisional_at_s = now_s

    def false_alarm(self, session_id: str) -> None:
        """Speech over an answer was over before it counted as one."""
        if session_id in self._sessions:
            self._sessions[session_id].provisional_at_s = None
            self.totals.false_alarms += 1

    def speech_started(self, session_id: str, now_s: float) -> None:
        self._end_gap(session_id, self._spoke_at_s(session_id, now_s))
        self._emit_known(EventKind.SPEECH_STARTED, session_id, now_s)

    def speech_stopped(self, session_id: str, now_s: float) -> None:
        if session_id in self._sessions:
            self._sessions[session_id].provisional_at_s = None
            self._emit(EventKind.SPEECH_STOPPED, session_id, now_s)

    def committed(self, session_id: str, now_s: float) -> None:
        view = self.table.get(session_id)
        self._end_gap(session_id, now_s - (view.input_s if view else 0.0))
        self._settle(session_id, now_s)
        if session_id in self._sessions:
            self._sessions[session_id].provisional_at_s = None
            self._emit(EventKind.COMMITTED, session_id, now_s)

    def response_created(self, session_id: str, response_id: str, now_s: float) -> None:
        session = self._sessions.get(session_id)
        if session is None:
            return
        made, session.pending = session.pending, {}  # it is announced with its first output
        self._settle(session_id, now_s)
        session.current = response_id
        session.responses[response_id] = _Response(made=made)
        while len(session.responses) > _REMEMBERED_RESPONSES:
            del session.responses[next(iter(session.responses))]
        session.settled = False
        self._emit(EventKind.RESPONSE_CREATED, session_id, now_s, response_id=response_id)

    def made(self, session_id: str, stage: str, tokens: int, seconds: float | None = None) -> None:
        """``stage`` made ``tokens`` more for the session's response, ``seconds`` of speech; None
        for text, whose pace is learned.
        """
        session = self._sessions.get(session_id)
        if session is None:
            return
        response = session.responses.get(session.current)
        made = session.pending if response is None or session.settled else response.made
        made.setdefault(stage, _Made()).add(tokens, seconds)

    def audio_routed(self, session_id: str, response_id: str, total_s: float, now_s: float) -> None:
        """``total_s`` seconds of ``response_id``'s audio have gone to the client in all."""
        session = self._sessions.get(session_id)
        response = session.responses.get(response_id) if session else None
        if response is None or not total_s > response.routed_s:
            return
        self.totals.routed_s += total_s - response.routed_s
        response.routed_s = total_s
        self._emit(EventKind.AUDIO_ROUTED, session_id, now_s, total_s, response_id=response_id)

    def playback_ack(
        self,
        session_id: str,
        response_id: str | None,
        played_ms: float,
        committed_ms: float | None,
        now_s: float,
    ) -> None:
        """The client says it has played ``played_ms`` of a response (its newest if None).

        Raises:
            AckRefused: negative, not finite, ahead of what was routed, or behind an earlier ack.
        """
        session = self._sessions.get(session_id)
        if session is None:
            return
        for name, value in (("played_ms", played_ms), ("committed_ms", committed_ms)):
            if value is not None and (not math.isfinite(value) or value < 0):
                raise AckRefused(
                    "playback_ack_invalid",
                    f"playback.ack {name} must be a finite number of milliseconds, 0 or more; "
                    f"got {value!r}.",
                )
        response = session.responses.get(response_id or session.current)
        if response is None:
            return  # not ours to judge: the host answers for unknown responses
        tolerance_ms = self._config.ack_tolerance_ms
        sent_ms, acked_ms = response.routed_s * 1e3, response.acked_s * 1e3
        for name, value in (("played_ms", played_ms), ("committed_ms", committed_ms)):
            if value is not None and value > sent_ms + tolerance_ms:
                raise AckRefused(
                    "playback_ack_ahead",
                    f"playback.ack {name}={value:.0f} is ahead of the {sent_ms:.0f} ms of audio "
                    "that were sent; report only audio that was received and played.",
                )
        if played_ms < acked_ms - tolerance_ms:
            raise AckRefused(
                "playback_ack_backwards",
                f"playback.ack played_ms={played_ms:.0f} is behind the {acked_ms:.0f} ms that "
                "were acknowledged before; played_ms never goes back within a response.",
            )
        played_s = min(played_ms / 1e3, response.routed_s)
        response.acked_s = max(response.acked_s, played_s)
        self._emit(
            EventKind.PLAYBACK,
            session_id,
            now_s,
            played_s,
            response_id=response_id or session.current,
        )

    def response_done(self, session_id: str, response_id: str, status: str, now_s: float) -> None:
        session = self._sessions.get(session_id)
        if session is None:
            return
        count = self.totals.responses
        count[status] = count.get(status, 0) + 1
        response = session.responses.get(response_id)
        if response is not None and status == "completed":
            response.completed = True
            if response.text_tokens and response.routed_s:
                self._learn_pace(session_id, response.routed_s / response.text_tokens, now_s)
        session.gap_pending = True
        self._emit(
            EventKind.RESPONSE_DONE, session_id, now_s, response_id=response_id, detail=status
        )

    def barge_in(self, session_id: str, reason: str, now_s: float) -> None:
        """The user interrupted: what was made and not heard is waste.

        Where the interruption was provisional at first, it counts from when it began.
        """
        view = self.table.get(session_id)
        session = self._sessions.get(session_id)
        if view is None or session is None:
            return
        spoke_at_s = self._spoke_at_s(session_id, now_s)
        heard_s = view.clock.played_s(spoke_at_s)
        self.totals.barge_ins[reason] = self.totals.barge_ins.get(reason, 0) + 1
        self._settle(session_id, spoke_at_s)
        session.gap_pending, session.provisional_at_s = False, None
        self._emit(EventKind.BARGE_IN, session_id, now_s, heard_s, detail=reason)

    def expire_turns(self, now_s: float) -> None:
        """Close every one-turn session whose answer is complete and has been played."""
        for session_id, session in tuple(self._sessions.items()):
            view = self.table.get(session_id)
            if session.one_turn and (view is None or view.phase_at(now_s) is Phase.IDLE):
                self.closed(session_id, "finished", now_s)

    def resumed(self, session_id: str, now_s: float) -> None:
        self._emit_known(EventKind.RESUMED, session_id, now_s)

    def closed(self, session_id: str, reason: str, now_s: float) -> None:
        if session_id not in self._sessions:
            return
        self._settle(session_id, now_s)
        del self._sessions[session_id]
        self._emit(EventKind.CLOSED, session_id, now_s, detail=reason)

    def speech_s(self, session_id: str, response_id: str) -> float | None:
        """How long the response's text is expected to take to say, or None if that is unknown."""
        session, view = self._sessions.get(session_id), self.table.get(session_id)
        response = session.responses.get(response_id) if session else None
        if response is None or view is None or not response.text_tokens:
            return None
        return response.text_tokens * view.text_token_s

    # ---- learned figures -------------------------------------------------------------------

    def _spoke_at_s(self, session_id: str, now_s: float) -> float:
        session = self._sessions.get(session_id)
        began_s = session.provisional_at_s if session is not None else None
        return now_s if began_s is None else began_s

    def _settle(self, session_id: str, now_s: float) -> None:
        """Count the response that ends here as heard up to now and wasted beyond, and all of what
        was made for one that was never announced as wasted.
        """
        session, view = self._sessions.get(session_id), self.table.get(session_id)
        if session is None or view is None:
            return
        if not session.settled:
            session.settled = True
            heard_s, routed_s = view.clock.played_s(now_s), view.clock.routed_s
            self.totals.heard_s += heard_s
            self.totals.wasted_s += routed_s - heard_s
            response = session.responses.get(session.current)
            if response is not None:
                total_s = routed_s if response.completed else None
                self._count_stages(response.made, heard_s, view.text_token_s, total_s)
        self._count_stages(session.pending, 0.0, view.text_token_s, None)
        session.pending = {}

    def _count_stages(
        self, made: dict[str, _Made], heard_s: float, text_token_s: float, total_s: float | None
    ) -> None:
        """Add what each stage made. ``total_s``: how long all of it takes to say, where that is
        known; a complete answer without audio wastes nothing.
        """
        for stage, amount in made.items():
            made_s = total_s
            if made_s is None:
                own_s = amount.tokens * text_token_s if amount.seconds is None else amount.seconds
                made_s = max(heard_s, own_s)
            wasted = 1.0 - heard_s / made_s if made_s > heard_s else 0.0
            totals = self.totals.stages.setdefault(stage, StageTotals())
            totals.made_tokens += amount.tokens
            totals.wasted_tokens += wasted * amount.tokens
            totals.made_s += made_s
            totals.wasted_s += wasted * made_s

    def _end_gap(self, session_id: str, now_s: float) -> None:
        """The user's next turn began: learn the reply gap, unless they spoke over the answer."""
        session, view = self._sessions.get(session_id), self.table.get(session_id)
        if session is None or view is None or not session.gap_pending:
            return
        session.gap_pending = False
        if view.clock.started and view.clock.complete:
            session.gap.observe(now_s - view.clock.ends_at_s())
            self._emit(EventKind.REPLY_GAP, session_id, now_s, session.gap.mean_s)

    def _learn_pace(self, session_id: str, text_token_s: float, now_s: float) -> None:
        view = self.table.get(session_id)
        if view is None:
            return
        self._text_token_s += _PACE_WEIGHT * (text_token_s - self._text_token_s)
        value_s = view.text_token_s + _PACE_WEIGHT * (text_token_s - view.text_token_s)
        self._emit(EventKind.TEXT_PACE, session_id, now_s, value_s)

    # ---- emission --------------------------------------------------------------------------

    def _emit_known(self, kind: EventKind, session_id: str, now_s: float) -> None:
        if session_id in self._sessions:
            self._emit(kind, session_id, now_s)

    def _emit(
        self,
        kind: EventKind,
        session_id: str,
        now_s: float,
        value_s: float = 0.0,
        *,
        response_id: str = "",
        detail: str = "",
    ) -> None:
        event = Event(kind, session_id, now_s, value_s, response_id, detail)
        self.table.apply(event)
        name = _NAMES[kind]
        self.totals.events[name] = self.totals.events.get(name, 0) + 1
        self._publish(event)
