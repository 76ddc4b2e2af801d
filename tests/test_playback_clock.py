"""Laws of the playback clock, and P_i^s."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from liveserve.scheduler.playback import (
    ACK_TRUST_S,
    ClockSource,
    PlaybackClock,
    stage_buffer_s,
)

steps = st.lists(
    st.tuples(
        st.floats(0, 3),  # wait
        st.sampled_from(["route", "ack", "rate"]),
        st.one_of(st.floats(-5, 80), st.sampled_from([math.nan, math.inf, -math.inf])),
    ),
    max_size=40,
)


@given(steps, st.floats(0.1, 4))
def test_position_stays_between_acked_and_routed_and_never_runs_back(ops, rate):
    clock, now = PlaybackClock(rate=rate), 100.0
    acked = routed = 0.0
    for wait, op, value in ops:
        before, now = clock.played_s(now), now + wait
        assert clock.played_s(now) >= before - 1e-9
        if op == "route":
            clock.route(value, now)
            if math.isfinite(value):
                routed = max(routed, value)
        elif op == "ack":
            clock.ack(value, now)
            if math.isfinite(value) and value >= acked:
                acked = min(value, routed)
        elif math.isfinite(value) and value > 0:
            clock.set_rate(value, now)
        assert clock.routed_s == routed
        assert acked - 1e-9 <= clock.played_s(now) <= routed + 1e-9
        assert clock.buffer_s(now) >= -1e-9


def test_wall_clock_counts_from_the_first_routed_packet_and_stalls_when_dry():
    clock = PlaybackClock()
    assert clock.source(0.0) is ClockSource.NONE
    clock.route(2.0, 10.0)
    assert clock.source(11.0) is ClockSource.WALL
    assert clock.played_s(11.5) == pytest.approx(1.5)
    assert clock.buffer_s(11.5) == pytest.approx(0.5)
    assert clock.played_s(15.0) == 2.0  # dry since 12.0
    clock.route(4.0, 15.0)
    assert clock.stalls == 1
    assert clock.played_s(16.0) == pytest.approx(3.0)


def test_a_gapless_stream_has_no_stalls():
    clock = PlaybackClock()
    clock.route(2.0, 0.0)
    clock.route(4.0, 1.9)
    assert clock.stalls == 0


def test_ack_overrides_the_wall_clock_and_is_extrapolated():
    clock = PlaybackClock()
    clock.route(10.0, 0.0)
    clock.ack(1.0, 3.0)  # the client started late
    assert clock.source(3.0) is ClockSource.ACK
    assert clock.played_s(3.5) == pytest.approx(1.5)
    assert clock.source(3.0 + ACK_TRUST_S + 0.1) is ClockSource.WALL


def test_duplicate_and_late_acks_change_nothing():
    clock = PlaybackClock()
    clock.route(10.0, 0.0)
    clock.ack(2.0, 2.0)
    clock.ack(1.5, 2.2)  # arrived late
    clock.ack(2.0, 2.05)  # duplicate
    assert not clock.paused
    assert clock.played_s(3.0) == pytest.approx(3.0)


def test_pause_is_seen_from_repeated_positions_and_ends_with_progress():
    clock = PlaybackClock()
    clock.route(10.0, 0.0)
    clock.ack(2.0, 2.0)
    clock.ack(2.0, 2.4)
    assert clock.paused
    assert clock.played_s(60.0) == 2.0
    clock.ack(2.2, 60.2)
    assert not clock.paused
    assert clock.played_s(61.2) == pytest.approx(3.2)


def test_slow_listener_has_more_time_to_underrun():
    clock = PlaybackClock(rate=0.25)
    clock.route(1.0, 0.0)
    assert clock.buffer_s(0.0) == pytest.approx(4.0)
    assert clock.played_s(2.0) == pytest.approx(0.5)
    # 3 s of audio made, 0.5 heard: 10 wall seconds ahead
    assert stage_buffer_s(3.0, clock, 2.0) == pytest.approx(10.0)


@pytest.mark.parametrize("rate", [0.0, -1.0, math.nan, math.inf])
def test_a_bad_rate_is_refused(rate):
    clock = PlaybackClock()
    with pytest.raises(ValueError, match="playback rate"):
        clock.set_rate(rate, 0.0)
    assert clock.rate == 1.0


def test_restart_keeps_only_the_rate():
    clock = PlaybackClock(rate=0.5)
    clock.route(5.0, 1.0)
    clock.ack(1.0, 2.0)
    clock.complete = True
    clock.restart()
    assert clock == PlaybackClock(rate=0.5)
