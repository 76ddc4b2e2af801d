"""Seam in a duplex session: speech over an answer is provisional until it has lasted.

The host interrupts an answer on the chunk in which its VAD says that speech began. Here that chunk,
and those that follow until the speech has lasted, look like the middle of an utterance, which the
host buffers without interrupting (`server_vad_utterance_active` in
vllm_omni/engine/duplex/session/overlap_policy.py): its ``overlap.decision`` events tell the client
so. Then either the start is reported, with the time at which it was, and the host's own barge-in
follows; or the audio is dropped and the answer was never touched. Generation needs no hold for it:
the talker is paced anyway.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from vllm_omni.engine.duplex.commands import (
    BargeIn,
    CancelInput,
    CancelResponse,
    ClearInput,
    ClearOutputAudio,
    Commit,
)
from vllm_omni.engine.duplex.events import DuplexEvent
from vllm_omni.engine.duplex.realtime_events import (
    discard_pending_input_audio,
    emit_input_speech_started,
)
from vllm_omni.engine.duplex.session import helpers, runner
from vllm_omni.engine.duplex.session.control import SessionControl
from vllm_omni.engine.duplex.session.runner import DuplexSessionRunner
from vllm_omni.engine.duplex.turn_detection import (
    TurnDetectionResult,
    apply_turn_detection_result,
)
from vllm_omni.engine.duplex.vad import SileroStreamingVAD, SileroVADConfig

from liveserve.false_alarm import SpeechGate, VadChunk, Verdict
from liveserve.host.duplex import LiveOptions, LiveSessionManager, OptionError, live_options
from liveserve.host.seam import expect
from liveserve.plane import InteractionPlane
from liveserve.scheduler.views import Phase

_SAMPLES_PER_MS = 16  # of the host's VAD
_SHORTEST_SPEECH_MS = 32  # the host's floor of min_speech_duration_ms


@dataclass(frozen=True, slots=True, kw_only=True)
class BargeInNotice(DuplexEvent):
    """Tells a client that asked for it whether to duck, stop or go on playing.

    ``state``: "provisional", then "committed" or "dismissed". Sent to sessions with
    ``extra_body.liveserve.events``.
    """

    wire_type = "liveserve.barge_in"

    state: str = ""
    audio_start_ms: int = 0


@dataclass(slots=True)
class _Before:
    """The input as it was when the provisional speech began."""

    start_ms: int
    pending_bytes: int
    input_since_commit: bool
    speech_since_commit: bool


class LiveSessionControl(SessionControl):
    """Server VAD whose speech over an answer is provisional at first."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.gate = SpeechGate()
        self._before: _Before | None = None

    async def run_turn_detection(self, event: dict[str, object]) -> TurnDetectionResult | None:
        result = await super().run_turn_detection(event)
        plane = self._plane()
        if result is None or plane is None or self._detector is None:
            return result
        try:
            judged = self._judge(plane, result)
        except Exception:
            plane.failed("false alarms")
            self.gate.clear()
            return result
        if judged is not result:
            for name in ("audio_start_ms", "audio_end_ms", "force_listen"):
                event.pop(name, None)
            apply_turn_detection_result(event, judged)
        return judged

    def reset_vad(self) -> None:
        super().reset_vad()
        self.gate.clear()

    def _plane(self) -> InteractionPlane | None:
        manager = self._ctx.manager
        return manager.plane if isinstance(manager, LiveSessionManager) else None

    def _judge(self, plane: InteractionPlane, result: TurnDetectionResult) -> TurnDetectionResult:
        was_provisional = self.gate.provisional
        chunk = vad_chunk(result, self._detector.vad, self._config)
        verdict = self.gate.judge(
            chunk, answering=self._answering(plane), limit_ms=self._limit_ms(plane)
        )
        if verdict is Verdict.HOLD:
            start_ms = result.audio_start_ms or 0
            if not was_provisional:
                self._begin(plane, start_ms)
            elif result.speech_started and self._before is not None:
                self._before.start_ms = start_ms
            return replace(_without_edges(result), is_speech=True, speech_active=True)
        if verdict is Verdict.COMMIT:
            return replace(
                result, is_speech=True, speech_started=True, audio_start_ms=self.commit()
            )
        if verdict is Verdict.DISMISS:
            self.dismiss()
            return replace(
                _without_edges(result), is_speech=False, speech_active=False, audio_end_ms=None
            )
        return result

    def _answering(self, plane: InteractionPlane) -> bool:
        """Whether speech would interrupt something.

        The host takes an answer for playing until the client has acknowledged all of it; a client
        that never does would have every short turn of its user dropped, so our clock counts too.
        """
        session = self._ctx.session
        view = plane.tracker.table.get(session.session_id)
        return (
            view is not None
            and view.phase_at(plane.now_s()) in (Phase.THINKING, Phase.SPEAKING)
            and session.capabilities.supports_barge_in
            and not self._out.auto_responds()
            and helpers.response_in_progress(session, self._ctx.tasks)
        )

    def _limit_ms(self, plane: InteractionPlane) -> float:
        if not plane.monitor.switches.false_alarm:
            return 0.0
        own_ms = self._options().false_alarm_ms
        return plane.config.false_alarm_ms if own_ms is None else own_ms

    def _options(self) -> LiveOptions:
        try:
            return live_options(self._ctx.session.config.extra_body)
        except OptionError:  # the client was told when it opened the session
            return LiveOptions()

    # ---- what becomes of it ----------------------------------------------------------------

    def _begin(self, plane: InteractionPlane, start_ms: int) -> None:
        state = self._ctx.model_state
        self._before = _Before(
            start_ms,
            state.audio_buffer.pending_byte_count,
            state.input_since_commit,
            state.speech_since_commit,
        )
        plane.tracker.speech_provisional(self._ctx.session.session_id, plane.now_s())
        self._notify("provisional", start_ms)

    def commit(self) -> int:
        """The provisional speech interrupts. Returns when it began, on the input's audio clock."""
        self.gate.clear()
        before, self._before = self._before, None
        start_ms = before.start_ms if before is not None else 0
        self._notify("committed", start_ms)
        return start_ms

    def dismiss(self) -> None:
        """The provisional speech was none: the input is as it was before."""
        self.gate.clear()
        plane, session, state = self._plane(), self._ctx.session, self._ctx.model_state
        if plane is not None:
            plane.tracker.false_alarm(session.session_id)
        before, self._before = self._before, None
        if before is None:
            return
        buffer = state.audio_buffer
        if not before.pending_bytes:
            session.release_input_bytes(buffer.pending_byte_count)
            buffer.clear()
            self._out.emit_events(discard_pending_input_audio(self._out.require_projector()))
        state.input_since_commit = before.input_since_commit
        state.speech_since_commit = before.speech_since_commit
        session.reset_overlap_speech()
        self._notify("dismissed", before.start_ms)

    def _notify(self, state: str, start_ms: int) -> None:
        if self._options().events:
            self._out.emit_events([BargeInNotice(state=state, audio_start_ms=start_ms)])


class LiveSessionRunner(DuplexSessionRunner):
    """A client's explicit word on provisional speech counts at once."""

    async def _on_command(self, command: Any) -> None:
        control = self.control
        if isinstance(control, LiveSessionControl) and control.gate.provisional:
            if isinstance(command, Commit):
                await self._interrupt(control)
            elif isinstance(command, ClearInput):
                control.dismiss()
                control.reset_vad()
            elif isinstance(command, BargeIn | CancelInput | CancelResponse | ClearOutputAudio):
                control.gate.force()
        await super()._on_command(command)

    async def _interrupt(self, control: LiveSessionControl) -> None:
        """The client ends the user's turn, so there was one: interrupt as the VAD's start would."""
        start_ms = control.commit()
        self._emit_events(emit_input_speech_started(self._require_projector(), start_ms))
        if helpers.response_in_progress(self.session, self.tasks):
            decision: dict[str, object] = {"cancel_reason": "turn_detected"}
            await self._barge_in_for_overlap({}, decision)


def _without_edges(result: TurnDetectionResult) -> TurnDetectionResult:
    """``result`` with neither a start nor an end of speech to act on."""
    return replace(
        result,
        speech_started=False,
        speech_stopped=False,
        audio_start_ms=None,
        should_commit=False,
    )


def vad_chunk(result: TurnDetectionResult, vad: SileroStreamingVAD, config: Any) -> VadChunk:
    """What the VAD found, with the voiced part on its audio clock.

    The VAD reports a start less ``prefix_padding_ms``, cut at its last reset, and an end plus
    ``silence_duration_ms``.
    """
    end_ms = vad._processed_samples / _SAMPLES_PER_MS
    if result.speech_active:
        voiced_to_ms = end_ms - vad._silence_samples / _SAMPLES_PER_MS
    elif result.speech_stopped and result.audio_end_ms is not None:
        voiced_to_ms = float(result.audio_end_ms) - config.silence_duration_ms
    else:
        voiced_to_ms = 0.0
    from_ms = 0.0
    if result.speech_started:
        shortest_ms = max(_SHORTEST_SPEECH_MS, config.min_speech_duration_ms)
        from_ms = min(
            (result.audio_start_ms or 0) + config.prefix_padding_ms, voiced_to_ms - shortest_ms
        )
    return VadChunk(
        result.speech_started,
        result.speech_stopped,
        result.speech_active,
        from_ms,
        voiced_to_ms,
        end_ms,
    )


def install() -> None:
    """Put both classes in the places where the host looks them up by name."""
    expect(
        getattr(runner, "SessionControl", None) in (SessionControl, LiveSessionControl),
        "session.runner.SessionControl is not the host's class",
    )
    expect(
        getattr(runner, "DuplexSessionRunner", None) in (DuplexSessionRunner, LiveSessionRunner),
        "session.runner.DuplexSessionRunner is not the host's class",
    )
    for name in ("_on_command", "_barge_in_for_overlap"):
        expect(hasattr(DuplexSessionRunner, name), f"DuplexSessionRunner.{name} is gone")
    for name in ("run_turn_detection", "reset_vad"):
        expect(hasattr(SessionControl, name), f"SessionControl.{name} is gone")
    vad = SileroStreamingVAD(SileroVADConfig(), frame_scorer=lambda _frame: 0.0)
    for name in ("_processed_samples", "_silence_samples"):
        expect(hasattr(vad, name), f"SileroStreamingVAD.{name} is gone")
    runner.SessionControl = LiveSessionControl
    runner.DuplexSessionRunner = LiveSessionRunner
