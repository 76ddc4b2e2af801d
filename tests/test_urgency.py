"""Urgency classes (paper, Scheduling) and their fail-closed cases."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from liveserve.scheduler.playback import PlaybackClock, stage_buffer_s
from liveserve.scheduler.urgency import Rank, Urgency, rank
from liveserve.scheduler.views import Phase, SessionView


def speaking(routed_s: float, since_s: float = 0.0) -> SessionView:
    view = SessionView("s", phase=Phase.SPEAKING, ready_at_s=since_s)
    view.clock.route(routed_s, since_s)
    return view


def test_no_view_is_u2_by_age_of_the_request():
    ranked = rank(None, 1.0, 0.5, arrival_s=3.0, now_s=10.0)
    assert ranked == Rank(Urgency.U2, None, 7.0)


def test_text_only_session_has_no_playback_to_protect():
    view = SessionView("s", phase=Phase.THINKING, wants_audio=False)
    assert rank(view, 0.0, 0.5, 3.0, 10.0).urgency is Urgency.U2


def test_before_the_first_packet_it_is_u1_aged_from_when_it_was_asked_for():
    view = SessionView("s", phase=Phase.THINKING, ready_at_s=4.0)
    ranked = rank(view, 9.0, 0.5, arrival_s=3.0, now_s=10.0)
    assert ranked == Rank(Urgency.U1, None, 6.0)
    assert rank(view, 9.0, 0.5, arrival_s=8.0, now_s=10.0).age_s == 2.0


@pytest.mark.parametrize(
    ("produced_s", "urgency"), [(3.49, Urgency.U0), (3.5, Urgency.U0), (3.51, Urgency.U2)]
)
def test_playing_is_u0_up_to_p_safe(produced_s, urgency):
    view = speaking(20.0)
    ranked = rank(view, produced_s, p_safe_s=0.5, arrival_s=0.0, now_s=3.0)
    assert ranked.urgency is urgency
    assert ranked.buffer_s == pytest.approx(produced_s - 3.0)


@given(st.floats(0, 100), st.floats(0, 100), st.floats(0, 10), st.floats(0, 50))
def test_a_larger_buffer_is_never_more_urgent(made_s, more_s, p_safe_s, now_s):
    view = speaking(200.0)
    less = rank(view, made_s, p_safe_s, 0.0, now_s)
    larger = rank(view, made_s + more_s, p_safe_s, 0.0, now_s)
    assert larger.urgency >= less.urgency
    assert larger.buffer_s >= less.buffer_s


@given(
    st.floats(0, 60),
    st.floats(0.25, 4),
    st.lists(st.tuples(st.floats(0, 3), st.sampled_from("ra"), st.floats(0, 40)), max_size=8),
)
def test_the_buffer_is_that_of_the_playback_clock(made_s, rate, steps):
    """`rank` has the formula written out."""
    view, now_s = SessionView("s", clock=PlaybackClock(rate=rate)), 10.0
    view.clock.route(1.0, now_s)
    for wait_s, step, value_s in steps:
        now_s += wait_s
        (view.clock.route if step == "r" else view.clock.ack)(value_s, now_s)
        for at_s in (now_s - 1.0, now_s, now_s + 0.7, now_s + 90.0):
            expected = stage_buffer_s(made_s, view.clock, at_s)
            assert rank(view, made_s, 0.5, 0.0, at_s).buffer_s == expected


def test_phase_ends_when_a_complete_response_was_played():
    view = SessionView("s", phase=Phase.SPEAKING, clock=PlaybackClock())
    view.clock.route(2.0, 10.0)
    assert view.phase_at(30.0) is Phase.SPEAKING  # more may come
    view.clock.complete = True
    assert view.phase_at(11.0) is Phase.SPEAKING
    assert view.phase_at(12.0) is Phase.IDLE
