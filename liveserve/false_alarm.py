"""False alarms: is speech over an answer an interruption, or a cough that ends it for nothing?

A VAD says that speech began, on a few frames' evidence; the host cancels the answer there and then.
`SpeechGate` lets such speech be provisional until it has lasted: the answer goes on, the audio is
kept, and either the barge-in follows, with the time at which the speech began, or nothing happened.

All times are milliseconds on the VAD's own audio clock, so neither the network's jitter nor a
client that sends faster or slower than real time changes a verdict.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Verdict(Enum):
    """What becomes of one chunk of input audio."""

    PASS = 0  # as the VAD has it
    HOLD = 1  # speech, but not yet a barge-in: keep the audio, let the answer go on
    COMMIT = 2  # it is a barge-in: report the start of speech now
    DISMISS = 3  # it was a false alarm: its audio and its end are dropped


@dataclass(frozen=True, slots=True)
class VadChunk:
    """What a streaming VAD found in one chunk.

    Attributes:
        started, stopped: a start, an end of speech was detected in it; with both, the end is the
            earlier one if ``active``, else the later one.
        active: speech goes on behind the chunk.
        speech_from_ms: first voiced sample, where ``started``.
        voiced_to_ms: last voiced sample so far.
        end_ms: end of the chunk.
    """

    started: bool
    stopped: bool
    active: bool
    speech_from_ms: float
    voiced_to_ms: float
    end_ms: float


class SpeechGate:
    """Judges the speech of one session, chunk by chunk."""

    def __init__(self) -> None:
        self.provisional = False
        self.voiced_ms = 0.0
        self._forced = False
        self._end_ms = 0.0

    def judge(self, chunk: VadChunk, *, answering: bool, limit_ms: float) -> Verdict:
        """The verdict on ``chunk``.

        Args:
            answering: an answer is made or played, so that speech would interrupt it.
            limit_ms: voiced milliseconds that make speech a barge-in; 0 takes the VAD's word.
        """
        if not self.provisional:
            if not chunk.started or not answering or limit_ms <= 0:
                return Verdict.PASS
            if chunk.stopped and chunk.active:
                return Verdict.PASS  # ordinary speech went before it in the same chunk
            self.voiced_ms = chunk.voiced_to_ms - chunk.speech_from_ms
            if self.voiced_ms >= limit_ms:
                return Verdict.PASS
            if chunk.stopped:
                return Verdict.DISMISS
            self.provisional, self._end_ms = True, chunk.end_ms
            return Verdict.HOLD
        if chunk.started:  # the noise ended in this chunk, and something else began
            self.voiced_ms = chunk.voiced_to_ms - chunk.speech_from_ms
        else:
            self.voiced_ms += max(0.0, chunk.voiced_to_ms - self._end_ms)
        self._end_ms = chunk.end_ms
        if self._forced or self.voiced_ms >= limit_ms:
            self.clear()
            return Verdict.COMMIT
        if not chunk.active:  # also where the detector was reset meanwhile
            self.clear()
            return Verdict.DISMISS
        return Verdict.HOLD

    def force(self) -> None:
        """The client said itself that it interrupts: what it says is no false alarm."""
        self._forced = self.provisional

    def clear(self) -> None:
        """Nothing is provisional any more."""
        self.provisional = self._forced = False
