"""What a policy may read: a session as the engines see it. Knows no protocol and no host."""

from __future__ import annotations

from enum import IntEnum

import msgspec

from liveserve.scheduler.playback import PlaybackClock


class Phase(IntEnum):
    """Where a conversation stands, from the server's side."""

    IDLE = 0  # nothing in flight; the listener may still think
    LISTENING = 1  # the user speaks or input streams in
    THINKING = 2  # a response was asked for, nothing audible yet
    SPEAKING = 3  # the client has audio of the response to play


class SessionView(msgspec.Struct):
    """One session. Times are seconds on the owner's monotonic clock.

    Attributes:
        wants_audio: the response will be spoken; a text-only session has no playback to protect.
        ready_at_s: when the response in flight was asked for (A_i of class U1 counts from here).
        reply_gap_s: predicted gap from the end of playback to the next input.
        text_token_s: seconds of speech per text token.
    """

    session_id: str
    phase: Phase = Phase.IDLE
    wants_audio: bool = True
    speech_active: bool = False
    response_id: str = ""
    clock: PlaybackClock = msgspec.field(default_factory=PlaybackClock)
    opened_at_s: float = 0.0
    ready_at_s: float = 0.0
    last_event_s: float = 0.0
    input_s: float = 0.0
    reply_gap_s: float = 2.0
    text_token_s: float = 0.3
    barge_ins: int = 0

    def phase_at(self, now_s: float) -> Phase:
        """The phase, knowing that a completed response ends when it has been played."""
        over = self.phase is Phase.SPEAKING and self.clock.complete
        return Phase.IDLE if over and self.clock.buffer_s(now_s) <= 0 else self.phase

    def shift(self, offset_s: float) -> None:
        """Move every time by ``offset_s``: from the sender's clock to ours."""
        self.opened_at_s += offset_s
        self.ready_at_s += offset_s
        self.last_event_s += offset_s
        self.clock.routed_at_s += offset_s
        self.clock.position_at_s += offset_s
        if self.clock.acked_at_s >= 0:
            self.clock.acked_at_s += offset_s
