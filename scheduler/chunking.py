"""How many codec frames travel together: small while the listener's buffer is thin, large when not.

The host sends a small first chunk and then large ones; the second one is rarely there before the
first has been played. Here a chunk leaves when it is as large as is useful, or when waiting for one
more frame would let the listener run dry.
"""

from __future__ import annotations

import math

import msgspec

from liveserve.scheduler.playback import PlaybackClock

# Weight of the newest observation in the running averages.
_WEIGHT = 0.2


class ChunkPolicy(msgspec.Struct, frozen=True):
    """Sizes in codec frames.

    Attributes:
        first: of the first chunk: the sooner it leaves, the sooner something is heard.
        smallest: no later chunk is smaller, but the last; the vocoder repeats its left context
            for each, so tiny chunks cost more than they help.
        largest: no chunk is larger: the vocoder's efficient size.
        margin_s: spare time for routing and jitter.
    """

    first: int = 4
    smallest: int = 6
    largest: int = 25
    margin_s: float = 0.1


class ChunkProgress:
    """One request's frames on their way to the vocoder.

    Learns two figures: the wall time between frames, and the wall time from sending a chunk to the
    client's having it. Both start unknown, and unknown counts as slow.
    """

    __slots__ = ("_last_frame_s", "_under_way", "deliver_s", "frame_s", "sent", "total")

    def __init__(self) -> None:
        self.total = 0  # frames made
        self.sent = 0  # frames that left
        self.frame_s = math.nan
        self.deliver_s = math.nan
        self._last_frame_s = math.nan
        self._under_way: list[tuple[float, float]] = []  # (seconds of audio sent in all, when)

    @property
    def pending(self) -> int:
        return self.total - self.sent

    def made(self, now_s: float) -> None:
        """One more frame exists."""
        self.total += 1
        if not math.isnan(self._last_frame_s):
            self.frame_s = _average(self.frame_s, now_s - self._last_frame_s)
        self._last_frame_s = now_s

    def observe(self, clock: PlaybackClock | None, now_s: float) -> None:
        """Learn from how much of what was sent has been routed."""
        while clock is not None and self._under_way:
            total_s, since_s = self._under_way[0]
            # The client's total is cut to whole milliseconds.
            if clock.routed_s + 0.01 < total_s:
                return
            self.deliver_s = _average(self.deliver_s, now_s - since_s)
            del self._under_way[0]

    def leave(self, frame_audio_s: float, now_s: float) -> int:
        """All pending frames are sent now; returns how many."""
        count, self.sent = self.pending, self.total
        self._under_way.append((self.sent * frame_audio_s, now_s))
        return count

    def is_due(
        self,
        policy: ChunkPolicy,
        clock: PlaybackClock | None,
        frame_audio_s: float,
        now_s: float,
    ) -> bool:
        """Whether the pending frames should leave now.

        Args:
            policy: sizes.
            clock: the session's playback clock, or None if there is no trustworthy one: then
                chunks have the largest size, as the host's.
            frame_audio_s: seconds of audio per frame.
            now_s: the time.
        """
        if self.sent == 0:
            return self.pending >= policy.first
        if self.pending >= policy.largest:
            return True
        if clock is None or self.pending < policy.smallest:
            return False
        return self.slack_s(policy, clock, frame_audio_s, now_s) <= _known(self.frame_s)

    def slack_s(
        self, policy: ChunkPolicy, clock: PlaybackClock, frame_audio_s: float, now_s: float
    ) -> float:
        """Wall seconds for which the pending frames can still wait without a gap."""
        ahead_s = (self.sent * frame_audio_s - clock.played_s(now_s)) / clock.rate
        return ahead_s - _known(self.deliver_s) - policy.margin_s


def _average(old: float, new: float) -> float:
    return new if math.isnan(old) else old + _WEIGHT * (new - old)


def _known(value: float) -> float:
    """An unknown duration counts as 0.2 s."""
    return 0.2 if math.isnan(value) else value
