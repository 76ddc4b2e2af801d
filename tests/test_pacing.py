"""Hold and release: hysteresis, its limits, and the deadline of an engine where all are held."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from liveserve.scheduler.pacing import bars, may_hold, next_deadline_s
from liveserve.scheduler.plan import Budgets, Candidate, Plan, plan
from liveserve.scheduler.policy_config import PolicyConfig
from liveserve.scheduler.urgency import Rank, Urgency
from liveserve.scheduler.utility import weights

CONFIG = PolicyConfig(p_safe_s=0.5, p_release_s=1.0, p_hold_s=2.0, alpha=1.0, beta=16.0)
NOBODY: frozenset[str] = frozenset()
HELD = frozenset({"a"})
ROOM = Budgets(1000, 1000, 1000)


def playing(buffer_s, request_id="a", *, since_s=0.0, blocks=0, waiting=False) -> Candidate:
    """A request with audio ahead: U0 or U2 as its buffer says."""
    if buffer_s is not None and buffer_s <= CONFIG.p_safe_s:
        rank = Rank(Urgency.U0, buffer_s, 1.0)
    else:
        rank = Rank(Urgency.U2, buffer_s, 1.0)
    return Candidate(request_id, rank, 1, blocks, 0, waiting, False, since_s)


def unheard(request_id="u", since_s=0.0) -> Candidate:
    return Candidate(request_id, Rank(Urgency.U1, None, 1.0), 1, 0, 0, True, False, since_s)


def paced(candidate: Candidate, held=NOBODY, now_s=0.0, config=CONFIG, budgets=ROOM) -> bool:
    result = plan([candidate], budgets, held, now_s, config, barge_in_rate=0.5)
    return candidate.request_id in result.held


@pytest.mark.parametrize(
    ("buffer_s", "was_held", "held"),
    [
        (2.01, False, True),
        (2.0, False, False),
        (1.5, False, False),
        (1.5, True, True),
        (1.01, True, True),
        (1.0, True, False),
        (0.4, True, False),  # U0
    ],
)
def test_a_hold_begins_above_p_hold_and_ends_at_p_release(buffer_s, was_held, held):
    assert paced(playing(buffer_s), HELD if was_held else NOBODY) is held


@pytest.mark.parametrize("buffer_s", [None, math.nan])
def test_without_a_buffer_nothing_is_held(buffer_s):
    assert not paced(playing(buffer_s), HELD)
    assert not paced(playing(buffer_s), NOBODY)


def test_a_first_audio_request_is_never_held():
    result = plan([unheard("a")], ROOM, HELD, 0.0, CONFIG, barge_in_rate=1.0, contended=True)
    assert result.held == NOBODY


def test_age_ends_a_hold_and_forbids_a_new_one():
    for held in (HELD, NOBODY):
        assert paced(playing(9.0, since_s=0.0), held, now_s=4.99)
        assert not paced(playing(9.0, since_s=0.0), held, now_s=5.0)


def test_kv_pressure_lets_a_heavy_request_finish():
    full, roomy = Budgets(1000, 0, 100), Budgets(1000, 50, 100)
    heavy = playing(3.0, blocks=50)  # C_barge 5, U_kv 0.5 · 16 = 8 when full
    assert paced(heavy, HELD, budgets=roomy)
    assert not paced(heavy, HELD, budgets=full)
    assert paced(playing(3.0, blocks=5), HELD, budgets=full)


@pytest.mark.parametrize(("blocks", "held"), [(99, True), (101, False)])
def test_the_default_beta_lets_a_sixteenth_of_a_full_pool_through(blocks, held):
    request = playing(2.0 + 1e-6, blocks=blocks)
    assert paced(request, config=PolicyConfig(), budgets=Budgets(1000, 0, 1600)) is held


def test_without_cost_or_switch_nothing_is_held():
    assert not paced(playing(9.0), HELD, config=PolicyConfig(alpha=0.0))
    assert not paced(playing(9.0), HELD, config=PolicyConfig(pace=False))


def test_with_utility_off_the_buffer_alone_decides():
    config = PolicyConfig(utility=False)
    full = Budgets(1000, 0, 100)
    assert paced(playing(2.5, blocks=100), NOBODY, config=config, budgets=full)
    assert not paced(playing(1.9), NOBODY, config=config)
    assert paced(playing(1.9), HELD, config=config)


def test_holding_needs_somebody_who_profits():
    assert [may_hold(c, r) for c in (False, True) for r in (0.0, 0.1)] == [False, True, True, True]
    assert not may_hold(False, math.nan)
    alone = [playing(9.0), playing(8.0, "b")]
    assert plan(alone, ROOM, HELD, 0.0, CONFIG).held == NOBODY
    assert plan(alone, ROOM, HELD, 0.0, CONFIG, contended=True).held == {"a", "b"}


@pytest.mark.parametrize(
    ("other", "held"),
    [
        (unheard(), True),
        (playing(0.3, "u"), True),
        (playing(1.5, "u", waiting=True), True),
        (playing(None, "u", waiting=True), True),
        (playing(9.0, "u", since_s=-10.0), True),  # overdue: somebody took its steps
        (playing(1.5, "u"), False),
        (playing(None, "u"), False),
        (playing(9.0, "u", waiting=True), False),  # waits itself, and can be held
    ],
)
def test_who_counts_as_contention(other, held):
    assert ("a" in plan([playing(9.0), other], ROOM, NOBODY, 0.0, CONFIG).held) is held


@given(
    step_s=st.floats(0.01, 0.3),
    makes_s=st.floats(0.05, 1.5),
    blocks=st.integers(0, 60),
    free=st.integers(0, 12),
    buffer_s=st.floats(0.6, 4.0),
)
def test_holds_last_and_do_not_flap(step_s, makes_s, blocks, free, buffer_s):
    """One talker against a steady queue: it makes ``makes_s`` per step when it runs."""
    held, was, began_s, since_s = NOBODY, False, None, 0.0
    budgets = Budgets(1000, free, 100)
    for step in range(300):
        now_s = step * step_s
        request = playing(buffer_s, blocks=blocks, since_s=since_s)
        held = plan([request, unheard("u", now_s)], budgets, held, now_s, CONFIG).held
        is_held = "a" in held
        aged = since_s + CONFIG.age_limit_s <= now_s
        if is_held:
            assert buffer_s > CONFIG.p_release_s
        if is_held and not was:
            assert buffer_s > CONFIG.p_hold_s
            began_s = now_s
        if was and not is_held and not aged:
            assert now_s - began_s >= CONFIG.p_hold_s - CONFIG.p_release_s - 1e-6
        was = is_held
        buffer_s -= step_s
        if not is_held:
            buffer_s += makes_s
            since_s = now_s


@given(
    st.dictionaries(
        st.sampled_from("abcdef"),
        st.tuples(st.floats(1.01, 30.0), st.floats(90.0, 100.0)),
        min_size=1,
    )
)
def test_nothing_happens_before_the_deadline_and_something_does_at_it(state):
    def at(now_s: float, held: frozenset[str]) -> Plan:
        requests = [
            playing(buffer_s - (now_s - 100.0), name, since_s=since_s)
            for name, (buffer_s, since_s) in state.items()
        ]
        return plan(requests, ROOM, held, now_s, CONFIG, barge_in_rate=0.5)

    first = at(100.0, frozenset(state))
    assert (first.next_deadline_s is None) == (not first.held)
    if first.next_deadline_s is None:
        return
    assert first.next_deadline_s >= 100.0
    before_s = first.next_deadline_s - 1e-6
    if before_s > 100.0:
        assert at(before_s, first.held).held == first.held
    assert at(first.next_deadline_s + 1e-6, first.held).held < first.held


def test_the_deadline_is_the_earlier_of_buffer_and_age():
    assert next_deadline_s(3.0, 10.0, 10.0, CONFIG) == pytest.approx(12.0)
    assert next_deadline_s(30.0, 10.0, 12.0, CONFIG) == pytest.approx(15.0)
    assert next_deadline_s(0.5, 10.0, 12.0, CONFIG) == pytest.approx(12.0)


def test_a_hold_is_easier_to_keep_than_to_begin():
    of_round = weights(None, None, CONFIG)
    of_all = bars(of_round, 10.0, CONFIG)
    assert (of_all.start_s, of_all.stay_s, of_all.since_s) == (2.0, 1.0, 5.0)
    assert of_all.start_utility == pytest.approx(-2.0)  # α · (p_hold − p_release) / P_safe
    assert of_all.stay_utility == 0
