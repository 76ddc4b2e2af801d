"""Seams in the host's duplex sessions: everything a session hears and says, seen by the tracker.

Two classes of the host are extended and put in their place by name: `DuplexSessionManager`, the one
point through which a session's commands come in and its events go out, and `RealtimeEnvelope`,
the one point where a client's JSON becomes a command.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, TypeGuard

from vllm_omni.engine.duplex.commands import (
    AckPlayback,
    AppendAudio,
    DuplexCommandError,
    UpdateSession,
)
from vllm_omni.engine.duplex.events import (
    AudioDelta,
    InputCommitted,
    OutputAudioCleared,
    ResponseCreated,
    ResponseDone,
    SessionClosed,
    SessionCreated,
    SessionResumed,
    SessionUpdated,
    SpeechStarted,
    SpeechStopped,
    TextDelta,
    TranscriptDelta,
    error_event,
)
from vllm_omni.engine.duplex.session.manager import DuplexSessionManager
from vllm_omni.entrypoints.duplex.realtime_input import RealtimeEnvelope

from liveserve.config import LiveServeConfig
from liveserve.host.seam import expect
from liveserve.plane import InteractionPlane, current_plane
from liveserve.session import AckRefused


class LiveSessionManager(DuplexSessionManager):
    """Reports each session's commands and events to the plane; refuses impossible acks."""

    plane: InteractionPlane | None = None

    def _dispatch_command(self, message: Any) -> None:
        if self.plane is not None and message.session_id in self.runners:
            refusal = self._command(self.plane, message.session_id, message.command)
            if refusal is not None:
                self._emit_raw(message.session_id, refusal)
                return
        super()._dispatch_command(message)

    def _command(self, plane: InteractionPlane, session_id: str, command: Any) -> Any:
        now_s = plane.now_s()
        if isinstance(command, AckPlayback):
            try:
                plane.tracker.playback_ack(
                    session_id,
                    _response_of(command),
                    command.played_ms,
                    command.committed_ms,
                    now_s,
                )
            except AckRefused as exc:
                return _refusal(plane, exc.code, str(exc), command)
        elif isinstance(command, UpdateSession):
            try:
                live_options(command.patch.get("extra_body"))
            except OptionError as exc:
                return _refusal(plane, exc.code, str(exc), command)
        elif isinstance(command, AppendAudio):
            plane.tracker.input(session_id, _append_s(command), now_s)
        return None

    def _emit_raw(self, session_id: str, event: Any, *, epoch: int | None = None) -> None:
        super()._emit_raw(session_id, event, epoch=epoch)
        if self.plane is not None:
            self._event(self.plane, session_id, event)

    def _event(self, plane: InteractionPlane, session_id: str, event: Any) -> None:
        tracker, now_s = plane.tracker, plane.now_s()
        if isinstance(event, AudioDelta):
            session = self.get(session_id)
            if session is not None and event.response_id:
                sent_ms = session.playback_for_response(event.response_id).sent_ms
                tracker.audio_routed(session_id, event.response_id, sent_ms / 1e3, now_s)
        elif isinstance(event, TextDelta | TranscriptDelta):
            if plane.profiler.on:
                plane.profiler.text_sent(session_id)
        elif isinstance(event, SpeechStarted):
            tracker.speech_started(session_id, now_s)
        elif isinstance(event, SpeechStopped):
            tracker.speech_stopped(session_id, now_s)
        elif isinstance(event, InputCommitted):
            tracker.committed(session_id, now_s)
        elif isinstance(event, ResponseCreated):
            response_id = event.response_id or str(event.response.get("id", ""))
            tracker.response_created(session_id, response_id, now_s)
        elif isinstance(event, ResponseDone):
            self._response_done(plane, session_id, event, now_s)
        elif isinstance(event, OutputAudioCleared):
            # The answer was complete; the user interrupted while it still played.
            tracker.barge_in(session_id, "interrupted", now_s)
        elif isinstance(event, SessionClosed):  # also SessionExpired
            tracker.closed(session_id, event.reason, now_s)
        elif isinstance(event, SessionResumed):
            tracker.resumed(session_id, now_s)
        elif isinstance(event, SessionCreated):
            tracker.opened(session_id, "duplex", now_s)
            problem = self._adopt_rate(plane, session_id)
            if problem is not None:
                super()._emit_raw(session_id, _refusal(plane, problem.code, str(problem)))
        elif isinstance(event, SessionUpdated):
            self._adopt_rate(plane, session_id)
            if plane.warmer is not None:
                plane.warmer.want(session_id)  # its instructions may be new

    def _response_done(
        self, plane: InteractionPlane, session_id: str, event: Any, now_s: float
    ) -> None:
        response_id = event.response_id or str(event.response.get("id", ""))
        status = event.status or "completed"
        if status == "cancelled":
            details = event.response.get("status_details") or {}
            reason = details.get("reason") if isinstance(details, dict) else None
            plane.tracker.barge_in(session_id, str(reason or "cancelled"), now_s)
        plane.tracker.response_done(session_id, response_id, status, now_s)

    def _adopt_rate(self, plane: InteractionPlane, session_id: str) -> OptionError | None:
        """Take over the session's playback rate; returns what is wrong with its options."""
        session = self.get(session_id)
        if session is None:
            return None
        try:
            rate = live_options(session.config.extra_body).playback_rate
        except OptionError as exc:
            return exc
        if rate is not None:
            plane.tracker.rate(session_id, rate, plane.now_s())
        return None


class OptionError(ValueError):
    """An option of a session is wrong; ``code`` says which to a program."""

    def __init__(self, name: str, wanted: str, got: object) -> None:
        super().__init__(f"session.extra_body.liveserve.{name} must be {wanted}, got {got!r}.")
        self.code = f"invalid_{name}"


@dataclass(frozen=True, slots=True)
class LiveOptions:
    """``extra_body.liveserve`` of a session object; what it does not give is None or off.

    Attributes:
        playback_rate: seconds of audio that the client plays per wall second.
        false_alarm_ms: this session's own; see `LiveServeConfig.false_alarm_ms`.
        events: send the client ``liveserve.*`` events.
    """

    playback_rate: float | None = None
    false_alarm_ms: float | None = None
    events: bool = False


def live_options(extra_body: object) -> LiveOptions:
    """The options of a session.

    Raises:
        OptionError: one is not what it must be.
    """
    options = extra_body.get("liveserve") if isinstance(extra_body, Mapping) else None
    if options is None:
        return LiveOptions()
    if not isinstance(options, Mapping):
        options = {"playback_rate": options}
    rate, limit_ms = options.get("playback_rate"), options.get("false_alarm_ms")
    events = options.get("events", False)
    if "playback_rate" in options and not (_is_number(rate) and rate > 0):
        raise OptionError("playback_rate", "a finite number above 0", rate)
    if limit_ms is not None and not (_is_number(limit_ms) and limit_ms >= 0):
        raise OptionError("false_alarm_ms", "a finite number of milliseconds, 0 or more", limit_ms)
    if not isinstance(events, bool):
        raise OptionError("events", "true or false", events)
    return LiveOptions(rate, limit_ms, events)


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _refusal(plane: InteractionPlane, code: str, message: str, command: Any = None) -> Any:
    """The error event that answers ``command``, counted."""
    plane.metrics.rejected.labels(code).inc()
    return error_event(code, message, event_id=command.event_id if command is not None else None)


def _response_of(command: Any) -> str | None:
    """The response an ack is about: named, or through its item (playback_ledger.py)."""
    if command.response_id:
        return command.response_id
    if command.item_id and command.item_id.startswith("item_"):
        return command.item_id.removeprefix("item_")
    return None


def _append_s(command: Any) -> float:
    """Seconds of audio in an append."""
    if command.duration_ms:
        return float(command.duration_ms) / 1e3
    rate_hz = command.sample_rate_hz or 16_000
    width = 2 if str(command.format).lower() in {"pcm16", "pcm_s16le", "s16le"} else 4
    return len(command.audio) / width / rate_hz


class LiveEnvelope(RealtimeEnvelope):
    """Refuses floods, and answers malformed numbers with an error instead of a dropped socket.

    One per connection. The limits are class attributes because the host constructs it.
    """

    max_events_per_s: ClassVar[float] = math.inf
    max_event_burst: ClassVar[float] = math.inf

    _allowance: float | None = None
    _refilled_at_s: float = 0.0

    def translate(self, payload: Any) -> Any:
        if not self._admit(time.monotonic()):
            raise _refused(
                "rate_limited",
                f"more than {self.max_event_burst:.0f} events at once or "
                f"{self.max_events_per_s:.0f} per second; the event was dropped, slow down.",
                payload,
            )
        try:
            return super().translate(payload)
        except DuplexCommandError:
            raise
        except (ValueError, OverflowError, TypeError) as exc:
            # For example int() of NaN or Infinity, which json.loads accepts.
            raise _refused(
                "bad_event", f"{payload.get('type')}: {exc}; check its numbers.", payload
            ) from exc

    def _admit(self, now_s: float) -> bool:
        """Token bucket: whether one more event may pass."""
        if self._allowance is None:
            self._allowance = self.max_event_burst
        else:
            grown = self._allowance + self.max_events_per_s * (now_s - self._refilled_at_s)
            self._allowance = min(self.max_event_burst, grown)
        self._refilled_at_s = now_s
        if self._allowance < 1.0:
            return False
        self._allowance -= 1.0
        return True


def _refused(code: str, message: str, payload: Any) -> DuplexCommandError:
    plane = current_plane()
    if plane is not None:
        plane.metrics.rejected.labels(code).inc()
    event_id = payload.get("event_id")
    return DuplexCommandError(
        message, code=code, event_id=event_id if isinstance(event_id, str) else None
    )


def install(config: LiveServeConfig) -> None:
    """Put both classes in the places where the host looks them up by name."""
    from vllm_omni.engine import duplex_orchestrator
    from vllm_omni.entrypoints.duplex import serving

    expect(
        getattr(duplex_orchestrator, "DuplexSessionManager", None)
        in (DuplexSessionManager, LiveSessionManager),
        "duplex_orchestrator.DuplexSessionManager is not the host's class",
    )
    expect(
        getattr(serving, "RealtimeEnvelope", None) in (RealtimeEnvelope, LiveEnvelope),
        "duplex.serving.RealtimeEnvelope is not the host's class",
    )
    for name in ("_dispatch_command", "_emit_raw", "get"):
        expect(hasattr(DuplexSessionManager, name), f"DuplexSessionManager.{name} is gone")
    LiveEnvelope.max_events_per_s = config.max_events_per_s
    LiveEnvelope.max_event_burst = float(config.max_event_burst)
    duplex_orchestrator.DuplexSessionManager = LiveSessionManager
    serving.RealtimeEnvelope = LiveEnvelope
