"""EventRing: numbering, bounds, and when it admits that views are unreliable."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from liveserve.events import Event, EventKind
from liveserve.ring import EventRing


def events(count: int, start: int = 0) -> list[Event]:
    return [Event(EventKind.INPUT, f"s{i}", float(i)) for i in range(start, start + count)]


def test_in_order_batches_come_out_in_order():
    ring = EventRing(10)
    ring.push(0, events(3))
    ring.push(3, events(2, 3))
    assert [e.session_id for e in ring.drain()] == ["s0", "s1", "s2", "s3", "s4"]
    assert len(ring) == 0
    assert (ring.next_seq, ring.total, ring.lost, ring.stale) == (5, 5, 0, False)


def test_repeated_events_are_taken_once():
    ring = EventRing(10)
    ring.push(0, events(3))
    ring.push(1, events(4, 1))
    assert [e.session_id for e in ring.drain()] == [f"s{i}" for i in range(5)]
    assert not ring.stale


def test_a_gap_makes_it_stale_until_a_resync():
    ring = EventRing(10)
    ring.push(0, events(1))
    ring.push(4, events(1, 4))
    assert ring.stale
    assert ring.lost == 3
    ring.resync(7)
    assert not ring.stale
    assert ring.drain() == []
    ring.push(7, events(1, 7))
    assert not ring.stale


def test_overflow_makes_it_stale_and_keeps_memory_bounded():
    ring = EventRing(4)
    ring.push(0, events(6))
    assert ring.stale
    assert len(ring) == 4
    assert ring.lost == 2


@given(st.integers(1, 8), st.lists(st.tuples(st.integers(0, 30), st.integers(0, 12)), max_size=20))
def test_never_more_than_capacity_and_never_an_event_twice(capacity, pushes):
    ring, seen = EventRing(capacity), []
    for index, (first, count) in enumerate(pushes):
        ring.push(first, events(count, first))
        assert len(ring) <= capacity
        if index % 3 == 0:
            seen += [e.session_id for e in ring.drain()]
    seen += [e.session_id for e in ring.drain()]
    assert len(seen) == len(set(seen))


def test_capacity_is_checked():
    with pytest.raises(ValueError, match="capacity"):
        EventRing(0)
