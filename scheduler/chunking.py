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
_WEIGHT = 0.1
# Two frames of a request further apart than this were not made one after the other.
_PAUSE_S = 0.5
# What a frame and a delivery take while nothing is known.
_GUESS_S = 0.1
# Mean deviations by which few deliveries are late (of a normal distribution, one in eighteen).
_SPREADS = 2.0
# A vocoder's audio is shorter than its frames by up to so much of one (Qwen3-Omni's: 555 samples).
_TRIMMED = 0.5


class ChunkPolicy(msgspec.Struct, frozen=True):
    """Sizes in codec frames.

    Attributes:
        first: of the first chunk, at most: the sooner it leaves, the sooner something is heard.
        smallest: the second chunk is not smaller. What the first one lasts is all the time for it.
        small: later ones are not smaller, but the last; the vocoder repeats its left context for
            each, so small chunks cost more than they help.
        largest: no chunk is larger: the vocoder's efficient size.
        deliveries: where chunks that users will interrupt are smaller than that, to have less to
            waste, they last at least this many times as long as a delivery takes: the vocoder
            repeats its left context for each, and must not be the busier for it.
        margin_s: wall seconds by which a chunk comes before it must.
    """

    first: int = 4
    smallest: int = 4
    small: int = 10
    largest: int = 25
    deliveries: float = 16.0
    margin_s: float = 0.3

    def within(self, first: int, largest: int) -> ChunkPolicy:
        """These sizes between a deployment's own first and largest one."""
        return msgspec.structs.replace(
            self,
            first=first,
            smallest=min(self.smallest, largest),
            small=min(self.small, largest),
            largest=largest,
        )


class ChunkTimes:
    """What frames and deliveries take now, averaged over the requests of a stage.

    Attributes:
        frame_s: wall seconds between two frames of a request that runs; a guess until ``measured``.
        deliver_s: wall seconds from sending a chunk until the client has it.
        spread_s: how far deliveries are from that, on average.
        rate: seconds of audio that a listener plays in a wall second.
    """

    __slots__ = ("deliver_s", "frame_s", "measured", "rate", "spread_s")

    def __init__(self) -> None:
        self.frame_s = self.deliver_s = _GUESS_S
        self.spread_s = 0.0
        self.rate = 1.0
        self.measured = False

    def framed(self, took_s: float) -> None:
        if took_s < _PAUSE_S:
            self.frame_s += (_WEIGHT if self.measured else 1.0) * (took_s - self.frame_s)
            self.measured = True

    def delivered(self, took_s: float, rate: float) -> None:
        self.spread_s += _WEIGHT * (abs(took_s - self.deliver_s) - self.spread_s)
        self.deliver_s += _WEIGHT * (took_s - self.deliver_s)
        self.rate += _WEIGHT * (rate - self.rate)

    @property
    def late_s(self) -> float:
        """Few deliveries take longer."""
        return self.deliver_s + _SPREADS * self.spread_s

    def lead_s(self, frames: int, policy: ChunkPolicy, *, makes_way: bool = False) -> float:
        """Wall seconds from making the first of ``frames`` frames until the client has them.

        Should somebody ask for a response meanwhile, their first chunk is made and delivered
        before: time for that is counted too, unless one is waited for already (``makes_way``).
        """
        times = 1
        if not makes_way:
            frames, times = frames + policy.first, 2
        return frames * self.frame_s + times * self.late_s + policy.margin_s

    def enough(self, policy: ChunkPolicy, frame_audio_s: float) -> int:
        """Frames of the smallest chunk that lasts as long as ``policy.deliveries`` asks for."""
        frames = math.ceil(policy.deliveries * self.deliver_s * self.rate / frame_audio_s)
        return min(policy.largest, max(policy.small, frames))


class ChunkProgress:
    """One request's frames on their way to the vocoder."""

    __slots__ = ("_last_frame_s", "_under_way", "sent", "times", "total")

    def __init__(self, times: ChunkTimes) -> None:
        self.times = times
        self.total = 0  # frames made
        self.sent = 0  # frames that left
        self._last_frame_s = math.nan
        self._under_way: list[tuple[float, float]] = []  # (audio there with it, when sent)

    @property
    def pending(self) -> int:
        return self.total - self.sent

    def made(self, now_s: float, *, rested: bool = False) -> None:
        """One more frame exists; ``rested``: the request was held before it."""
        self.total += 1
        if not (rested or math.isnan(self._last_frame_s)):
            self.times.framed(now_s - self._last_frame_s)
        self._last_frame_s = now_s

    def observe(self, clock: PlaybackClock | None, now_s: float) -> None:
        """Learn from how much of what was sent has been routed."""
        if clock is None:
            return
        there = [since_s for total_s, since_s in self._under_way if clock.routed_s >= total_s]
        if there:
            # Seen late if the request did not run meanwhile; the clock knows when it came.
            took_s = min(now_s, max(clock.routed_at_s, there[-1])) - there[-1]
            self.times.delivered(took_s, clock.rate)
            del self._under_way[: len(there)]

    def leave(self, frame_audio_s: float, now_s: float) -> int:
        """All pending frames are sent now; returns how many."""
        count, self.sent = self.pending, self.total
        self._under_way.append(((self.sent - _TRIMMED) * frame_audio_s, now_s))
        return count

    def least(self, policy: ChunkPolicy) -> int:
        """No fewer pending frames are ever due; the more were sent, the more it takes."""
        sent = self.sent
        return min(max(sent, policy.smallest), policy.small, policy.largest) if sent else 1

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
                chunks have the host's sizes.
            frame_audio_s: seconds of audio per frame.
            now_s: the time.
        """
        sent = self.sent
        pending = self.total - sent
        if sent == 0:
            return pending >= self._first(policy, clock, frame_audio_s)
        if pending >= policy.largest:
            return True
        if clock is None or pending < self.least(policy):
            return False
        ahead_s = (sent * frame_audio_s - clock.played_s(now_s)) / clock.rate
        return ahead_s <= self.times.lead_s(1, policy)

    def _first(self, policy: ChunkPolicy, clock: PlaybackClock | None, frame_audio_s: float) -> int:
        """Frames of the first chunk: fewer than the host's where it lasts until the second comes.

        Both are delivered alike, so that the second takes only as long as it takes to make.
        """
        if clock is None:
            return policy.first
        second_s = policy.smallest * self.times.frame_s + policy.margin_s
        enough = math.ceil(second_s * clock.rate / frame_audio_s)
        return max(1, min(policy.first, enough))
