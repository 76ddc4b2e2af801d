"""What the listener has heard: the playback clock, and P_i^s per stage.

The clock trusts, in this order: the client's acks, extrapolated at the playback rate since the
last one; else the wall clock since the first routed packet. It never runs past the audio that was
routed to the client, so a stall in delivery is a stall in playback. All times are seconds on one
monotonic clock.
"""

from __future__ import annotations

import math
from enum import IntEnum

import msgspec

# An ack older than this no longer steers the clock: the client may have stopped acking.
ACK_TRUST_S = 5.0
# Two acks of one position closer together than this are a duplicate, not a pause.
DUPLICATE_ACK_S = 0.1


class ClockSource(IntEnum):
    NONE = 0  # nothing routed yet
    WALL = 1  # progress counter: wall clock since the first routed packet
    ACK = 2  # the client reports what it played


class PlaybackClock(msgspec.Struct):
    """Playback position of one response.

    Attributes:
        rate: seconds of audio the client plays per second of wall time (1.0 is real time).
        routed_s: seconds of audio handed to the client so far.
        routed_at_s: when the last of it was.
        position_s: seconds played at ``position_at_s``.
        acked_s: highest position the client reported.
        acked_at_s: when it did; negative if it never did.
        paused: the client reported the same position twice with audio at hand.
        stalls: how often the client ran dry before the response was complete.
        complete: all audio of the response was routed.
    """

    rate: float = 1.0
    routed_s: float = 0.0
    routed_at_s: float = 0.0
    position_s: float = 0.0
    position_at_s: float = 0.0
    acked_s: float = 0.0
    acked_at_s: float = -1.0
    paused: bool = False
    stalls: int = 0
    complete: bool = False

    @property
    def started(self) -> bool:
        return self.routed_s > 0.0

    def source(self, now_s: float) -> ClockSource:
        if not self.started:
            return ClockSource.NONE
        if self.acked_at_s >= 0 and now_s - self.acked_at_s <= ACK_TRUST_S:
            return ClockSource.ACK
        return ClockSource.WALL

    def played_s(self, now_s: float) -> float:
        """Seconds of audio heard at ``now_s``: within [acked_s, routed_s]."""
        position_s = self.position_s
        if self.paused:
            return position_s
        # `max` and `min` would take longer than the rest of a round's look at a request.
        elapsed_s = now_s - self.position_at_s
        if elapsed_s > 0.0:
            position_s += self.rate * elapsed_s
        routed_s = self.routed_s
        return position_s if position_s < routed_s else routed_s

    def buffer_s(self, now_s: float) -> float:
        """Wall seconds until the client runs dry if nothing more is routed."""
        return (self.routed_s - self.played_s(now_s)) / self.rate

    def ends_at_s(self) -> float:
        """When everything routed so far will have been played, if playback goes on."""
        return self.position_at_s + (self.routed_s - self.position_s) / self.rate

    def route(self, total_s: float, now_s: float) -> None:
        """``total_s`` seconds of audio have been routed in all; a smaller total is ignored."""
        if not math.isfinite(total_s) or total_s <= self.routed_s:
            return
        if not self.started:
            self.position_at_s = now_s
        else:
            played = self.played_s(now_s)
            if played >= self.routed_s and not self.complete and not self.paused:
                self.stalls += 1
            self.position_s, self.position_at_s = played, max(now_s, self.position_at_s)
        self.routed_s, self.routed_at_s = total_s, now_s

    def ack(self, played_s: float, now_s: float) -> None:
        """The client has played ``played_s`` seconds.

        Late or repeated acks never move the clock back behind an earlier one, and an ack ahead
        of the routed audio is cut to it; whether to refuse such an ack is the caller's choice.
        """
        if not math.isfinite(played_s):
            return
        played_s = min(played_s, self.routed_s)
        if played_s < self.acked_s:
            return
        if self.acked_at_s >= 0 and played_s == self.acked_s:
            if now_s - self.acked_at_s < DUPLICATE_ACK_S:
                return
            self.paused = played_s < self.routed_s
        else:
            self.paused = False
        self.acked_s, self.acked_at_s = played_s, now_s
        self.position_s, self.position_at_s = played_s, now_s

    def set_rate(self, rate: float, now_s: float) -> None:
        """Change the playback rate from ``now_s`` on.

        Raises:
            ValueError: ``rate`` is not a finite number above 0.
        """
        if not math.isfinite(rate) or rate <= 0:
            raise ValueError(f"playback rate must be a finite number above 0, got {rate!r}")
        self.position_s, self.position_at_s = self.played_s(now_s), now_s
        self.rate = rate

    def restart(self) -> None:
        """A new response begins: nothing routed, nothing played, same rate."""
        self.routed_s = self.routed_at_s = 0.0
        self.position_s = self.position_at_s = self.acked_s = 0.0
        self.acked_at_s = -1.0
        self.stalls = 0
        self.paused = self.complete = False


def stage_buffer_s(produced_s: float, clock: PlaybackClock, now_s: float) -> float:
    """P_i^s in wall seconds: how far a stage's output runs ahead of the listener.

    ``produced_s`` is the stage's output in seconds of audio: text tokens × seconds per token for
    the thinker, codec frames ÷ frame rate for the talker, routed audio for code2wav.
    """
    return (produced_s - clock.played_s(now_s)) / clock.rate
