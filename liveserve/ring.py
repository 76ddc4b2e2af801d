"""Bounded, sequence-numbered event ring of one engine.

A gap in the numbers, or an overflow before the engine drained the ring, makes every view
unreliable: the ring says so until a resync, and policies fail closed meanwhile.
"""

from __future__ import annotations

from collections import deque

from liveserve.events import Event


class EventRing:
    """Args:
    capacity: events held between two drains; more than that is an overflow.
    """

    def __init__(self, capacity: int) -> None:
        if capacity < 1:
            raise ValueError(f"ring capacity must be at least 1, got {capacity}")
        self._events: deque[Event] = deque(maxlen=capacity)
        self.next_seq = 0
        self.stale = False
        self.lost = 0
        self.total = 0

    def __len__(self) -> int:
        return len(self._events)

    def push(self, first_seq: int, events: list[Event]) -> None:
        """Append ``events`` numbered from ``first_seq``; repeated ones are skipped."""
        if first_seq > self.next_seq:
            self.lost += first_seq - self.next_seq
            self.stale = True
        fresh = events[max(0, self.next_seq - first_seq) :]
        room = (self._events.maxlen or 0) - len(self._events)
        if len(fresh) > room:
            self.lost += len(fresh) - room
            self.stale = True
        self._events.extend(fresh)
        self.total += len(fresh)
        self.next_seq = max(self.next_seq, first_seq + len(events))

    def drain(self) -> list[Event]:
        """Remove and return what is held, oldest first."""
        events = list(self._events)
        self._events.clear()
        return events

    def resync(self, next_seq: int) -> None:
        """Start over from a complete set of views as of ``next_seq``."""
        self._events.clear()
        self.next_seq = next_seq
        self.stale = False
