"""Next-use estimates: eq. 4, what is overdue, who drains, and the chance of another turn."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from liveserve.kvtier.next_use import LANES, NextUse, ReplyTimes


def key(estimator: NextUse, session: str) -> float:
    known = estimator.get(session)
    assert known is not None
    return known.next_use_s


def test_a_waiting_session_is_needed_after_playback_and_gap():
    estimator = NextUse()
    estimator.needed("a", 10.0)
    assert key(estimator, "a") == 10.0
    estimator.waiting("a", 24.0, 2.5, now_s=12.0)
    assert key(estimator, "a") == 26.5
    estimator.waiting("a", 30.0, 2.5, now_s=13.0)  # more audio of the same answer
    assert key(estimator, "a") == 32.5
    assert estimator.get("a").turns == 1


@pytest.mark.parametrize("when_s", [14.0, 25.0], ids=["barge-in", "speech start"])
def test_speech_makes_a_session_needed_now(when_s):
    estimator = NextUse()
    estimator.waiting("a", 24.0, 2.5, now_s=12.0)
    estimator.needed("a", when_s)
    assert key(estimator, "a") == when_s
    estimator.advance(when_s + 30.0)
    assert key(estimator, "a") == when_s  # still protected
    estimator.advance(when_s + 61.0)
    assert key(estimator, "a") > when_s + 61.0 + 30.0  # no turn in a minute: it drains


def test_overdue_sessions_drain_in_few_looks():
    estimator = NextUse(forget_s=1e9)
    looks: list[float] = []
    estimator.subscribe(lambda session, known, over: looks.append(known.next_use_s))
    estimator.waiting("a", 0.0, 2.0, now_s=0.0)
    looks.clear()
    for now_s in range(1, 20_000):
        estimator.advance(float(now_s))
    assert looks == sorted(looks)
    assert looks[0] >= 2.0 + 2.0  # overdue by nothing: expected to take as long again
    assert 5 < len(looks) < 40
    # Silent for as long, it is expected later than a session that only begins to listen.
    estimator.waiting("b", 20_060.0, 2.0, now_s=20_000.0)
    assert key(estimator, "a") > key(estimator, "b")


def test_with_nothing_observed_the_remaining_gap_is_the_gap_plus_the_silence():
    times = ReplyTimes()
    chance = times.chance[0]
    for silent in (0.5, 1.0, 7.0):
        expected = (1 + silent) * (chance + (1 - chance) * (1 + silent))
        assert times.remaining(0, silent) == pytest.approx(expected)


def test_the_remaining_gap_follows_what_was_observed():
    times = ReplyTimes()
    for _ in range(500):
        times.came(0, 1.0)
    for _ in range(500):
        times.came(0, 10.0)
    assert times.remaining(0, 2.0) == pytest.approx(8.0, rel=0.12)  # the slow half is left
    assert times.remaining(0, 30.0) > 30.0  # nobody was ever that slow


def test_sessions_that_end_early_make_silence_a_sign_of_the_end():
    replies, ends = ReplyTimes(), ReplyTimes()
    for times in (replies, ends):
        for _ in range(300):
            times.came(0, 1.0)
    for _ in range(300):
        ends.ended(0, 50.0)
    assert ends.remaining(0, 5.0) > 3 * replies.remaining(0, 5.0)


def test_the_chance_of_another_turn_is_learned_by_turn():
    estimator = NextUse()
    for n in range(200):  # three of four leave after one turn, who stays has three
        session = str(n)
        for turn in range(1 if n % 4 else 3):
            estimator.needed(session, 10.0 * turn)
            estimator.waiting(session, 10.0 * turn + 5.0, 2.0, now_s=10.0 * turn + 1.0)
        estimator.close(session, 100.0)
    assert estimator.chance[0] == pytest.approx(0.25, abs=0.03)
    assert estimator.chance[1] > 0.8
    assert estimator.chance[2] < 0.2
    assert NextUse(weigh_chance=False).chance == [1.0] * LANES


def test_ends_are_told_apart_from_lost_sight():
    heard: list[tuple[object, bool]] = []
    estimator = NextUse(max_sessions=3, forget_s=100.0)
    estimator.subscribe(lambda s, known, over: heard.append((s, over)) if known is None else None)
    estimator.waiting("closed", 1.0, 1.0, now_s=0.0)
    estimator.close("closed", 5.0)
    estimator.close("closed", 6.0)
    estimator.waiting("forgotten", 1.0, 1.0, now_s=0.0)
    for now_s in range(1, 120):
        estimator.advance(float(now_s))
    estimator.waiting("blind", math.nan, 1.0, now_s=0.0)
    estimator.needed("blind", 200.0)
    estimator.waiting("blind", math.inf, 1.0, now_s=201.0)
    for n in range(4):
        estimator.needed(f"many {n}", 300.0)
    assert heard == [("closed", True), ("forgotten", True), ("blind", False), ("many 0", False)]
    assert len(estimator) == 3


def test_settings_are_named_when_they_are_wrong():
    with pytest.raises(ValueError, match="max_sessions"):
        NextUse(max_sessions=0)
    with pytest.raises(ValueError, match="forget_s"):
        NextUse(forget_s=math.nan)


events = st.lists(
    st.tuples(
        st.sampled_from(["needed", "waiting", "close", "lost", "advance"]),
        st.integers(0, 5),
        st.floats(0.0, 50.0),
        st.floats(-20.0, 60.0),
    ),
    max_size=120,
)


@given(events)
def test_any_order_of_events_gives_finite_times_and_bounded_books(steps):
    estimator = NextUse(max_sessions=4, forget_s=500.0)
    now_s = 0.0
    for what, session, passed_s, other_s in steps:
        now_s += passed_s
        if what == "needed":
            estimator.needed(session, now_s)
        elif what == "waiting":
            estimator.waiting(session, now_s + other_s, abs(other_s), now_s)
            assert estimator.get(session).next_use_s >= now_s
        elif what == "advance":
            estimator.advance(now_s, limit=1000)
            for n in range(6):
                known = estimator.get(n)
                if known is not None and not known.needed:
                    assert known.next_use_s > now_s or known.check_at_s > now_s
        else:
            getattr(estimator, what)(*((session, now_s) if what == "close" else (session,)))
            assert estimator.get(session) is None
        assert len(estimator) <= 4
        assert len(estimator._due) <= 2 * len(estimator) + 65
        assert all(0 < chance <= 1 for chance in estimator.chance)
        for n in range(6):
            known = estimator.get(n)
            assert known is None or math.isfinite(known.next_use_s)
