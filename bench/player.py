"""The listener: a 1x playback clock over audio as it arrives.

Playback starts with the first audio, stalls when it has played all that has arrived (a gap), and
goes on when more comes. Times are listener seconds, audio lengths seconds of audio.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Gap:
    """A stall: the listener heard nothing from ``start_s`` for ``duration_s``."""

    start_s: float
    position_s: float
    duration_s: float


class Player:
    """Playback of one response.

    Invariants: the position never decreases, never passes what has arrived, and moves at 1x between
    gaps; ``position = now - started - sum(gaps)`` while playing.
    """

    def __init__(self) -> None:
        self.started_s: float | None = None
        self.stopped_s: float | None = None
        self.routed_s = 0.0
        self.gaps: list[Gap] = []
        self.complete = False
        self._ends_s = 0.0  # when all that has arrived will have been played
        self._stopped_position_s = 0.0

    def push(self, now_s: float, duration_s: float) -> None:
        """Audio of ``duration_s`` arrived. After ``stop`` it counts as routed, never as heard."""
        self.routed_s += duration_s
        if self.stopped_s is not None:
            return
        if self.started_s is None:
            self.started_s = self._ends_s = now_s
        self._close_gap(now_s, self.routed_s - duration_s)
        self._ends_s += duration_s

    def finish(self) -> None:
        """No more audio will come: running dry from now on is the end, not a gap."""
        self.complete = True

    def stop(self, now_s: float) -> None:
        """The listener stops playback for good (a barge-in, a hang-up)."""
        if self.stopped_s is not None:
            return
        self._stopped_position_s = self.position_s(now_s)
        if self.started_s is not None and not self.complete:
            self._close_gap(now_s, self.routed_s)
        self.stopped_s = now_s

    def position_s(self, now_s: float) -> float:
        """Seconds of the answer heard by ``now_s``."""
        if self.stopped_s is not None:
            return self._stopped_position_s
        return max(0.0, self.routed_s - max(0.0, self._ends_s - now_s))

    def reaches_s(self, position_s: float) -> float:
        """When ``position_s`` will be heard if nothing stalls; for more than has arrived, when
        that runs dry."""
        return self._ends_s - max(0.0, self.routed_s - position_s)

    @property
    def playing(self) -> bool:
        return self.started_s is not None and self.stopped_s is None

    def drained(self, now_s: float) -> bool:
        """All of a complete answer was heard."""
        return self.complete and now_s >= self._ends_s

    def timeline(self, now_s: float) -> list[tuple[float, float]]:
        """Corner points ``(time, position)`` of the playback frontier up to ``now_s``."""
        if self.started_s is None:
            return []
        points = [(self.started_s, 0.0)]
        for gap in self.gaps:
            points.append((gap.start_s, gap.position_s))
            points.append((gap.start_s + gap.duration_s, gap.position_s))
        end_s = self.stopped_s if self.stopped_s is not None else min(now_s, self._ends_s)
        if end_s > points[-1][0]:
            points.append((end_s, self.position_s(end_s)))
        return points

    def _close_gap(self, now_s: float, position_s: float) -> None:
        if now_s > self._ends_s:
            self.gaps.append(Gap(self._ends_s, position_s, now_s - self._ends_s))
            self._ends_s = now_s
