"""Weights that follow the load: the controller alone, and in the simulator against fixed ones."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from liveserve.bench.adaptive import load_shift, loss, run_level, shifted
from liveserve.bench.simulator.workloads import build, spec_of
from liveserve.scheduler.adapt import Bounds, Observation, State, adapt, wanted, weights_at
from liveserve.scheduler.policy_config import PolicyConfig

QUIET = Observation(5, 0.5, 0.0, 0.0, 0.5)
WAIT = Observation(5, 0.0, 0.5, 0.0, 0.5)
WASTE = Observation(5, 0.5, 0.0, 0.3, 0.5)


def after(*windows: Observation, bounds: Bounds = Bounds(), state: State = State()) -> State:  # noqa: B008
    for seen in windows:
        state = adapt(state, seen, bounds)
    return state


def test_waits_go_down_waste_goes_up_and_both_go_down():
    assert after(*[WAIT] * 9).level == -Bounds().most
    assert after(*[WASTE] * 9).level == Bounds().most
    both = Observation(5, 0.5, 0.5, 0.3, 0.5)
    assert after(both).level == -1


def test_a_signal_between_its_bounds_goes_on_but_does_not_begin():
    between = Observation(5, 0.5, 0.0, 0.03, 0.5)
    assert after(*[between] * 5).level == 0
    assert after(WASTE, between).level == 2
    waits = Observation(5, 0.0, 0.03, 0.0, 0.5)
    assert after(*[waits] * 5).level == 0
    assert after(WAIT, waits).level == -2


def test_patience_and_rest_hold_the_level():
    bounds = Bounds(patience=3, rest=2)
    assert after(WASTE, WASTE, QUIET, WASTE, WASTE, bounds=bounds).level == 0
    assert after(WASTE, WASTE, WASTE, bounds=bounds).level == 1
    assert after(*[WASTE] * 5, bounds=bounds).level == 1
    assert after(*[WASTE] * 6, bounds=bounds).level == 2


def test_without_signals_it_returns_to_what_is_configured():
    calm = Bounds().calm
    up = after(*[WASTE] * 2)
    assert after(*[QUIET] * (calm - 1), state=up).level == 2
    assert after(*[QUIET] * (3 * calm), state=up).level == 0
    assert after(*[QUIET] * (3 * calm), state=after(WAIT)).level == 0


def test_a_load_that_flips_moves_it_ever_more_rarely():
    flips = [WAIT, WASTE] * 50
    assert after(*flips).moves < 10
    slow = ([WAIT] * 5 + [WASTE] * 5) * 4
    assert after(*slow).moves > 10  # it still follows what lasts


@pytest.mark.parametrize(
    "seen",
    [
        Observation(0, None, None, None, None),
        Observation(0, 0.5, 0.0, 0.9),  # nothing ended: that share says nothing
        Observation(5, 0.0, 0.0, 0.9),  # nobody interrupts
        Observation(5, 0.0, 0.9, 0.0, 0.05),  # the pool is empty: they wait for something else
    ],
)
def test_what_says_nothing_moves_nothing(seen):
    assert wanted(State(), seen, Bounds()) == 0


@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.builds(
            Observation,
            st.integers(0, 9),
            st.none() | st.floats(0, 1),
            st.none() | st.floats(0, 1),
            st.none() | st.floats(0, 1),
            st.none() | st.floats(0, 1),
        ),
        max_size=80,
    ),
    st.integers(0, 4),
    st.integers(1, 3),
    st.integers(0, 3),
)
def test_it_is_bounded_and_takes_one_step_at_a_time(windows, most, patience, rest):
    bounds, state = Bounds(most=most, patience=patience, rest=rest), State()
    for seen in windows:
        before, state = state, adapt(state, seen, bounds)
        assert abs(state.level) <= most
        assert abs(state.level - before.level) <= 1
        assert (state.level != before.level) == (state.moves > before.moves)
        assert 1 <= state.doubt <= bounds.reluctance
        if before.resting:
            assert state.level == before.level


def test_levels_move_the_ratio_of_the_weights():
    base = PolicyConfig(alpha=1.0, beta=16.0)
    assert weights_at(0, base) == (1.0, 16.0)
    assert weights_at(2, base) == (4.0, 4.0)
    assert weights_at(-1, base) == (0.5, 32.0)


@pytest.mark.parametrize(
    ("bounds", "field"),
    [
        (Bounds(wait_low=0.2, wait_high=0.1), "wait_low"),
        (Bounds(waste_high=2.0), "waste_high"),
        (Bounds(patience=0), "patience"),
        (Bounds(most=-1), "most"),
    ],
)
def test_bounds_that_make_no_sense_are_named(bounds, field):
    with pytest.raises(ValueError, match=field):
        bounds.check()


# ---- in the simulator ----------------------------------------------------------------------


def test_loads_follow_one_another():
    one = build(spec_of("interaction", sessions=3))
    two = build(spec_of("interaction", sessions=2))
    both = shifted(one, two, 100.0)
    assert [s.index for s in both.sessions] == [0, 1, 2, 3, 4]
    assert [s.arrival_s for s in both.sessions[3:]] == [s.arrival_s + 100 for s in two.sessions]


def test_the_same_run_adapts_the_same():
    users, costs, config = load_shift(seed=0, scale=0.05)
    once, again = (run_level(users, costs, config, 0, None) for _ in range(2))
    assert once == again
    assert once.levels


def test_adapted_weights_are_near_the_best_fixed_ones_under_a_load_that_shifts():
    users, costs, config = load_shift(seed=2, scale=0.25)
    as_configured = run_level(users, costs, config, 2, 0).metrics
    most = Bounds().most
    of_level = {
        level: loss(run_level(users, costs, config, 2, level).metrics, as_configured)
        for level in (-most, 0, most)
    }
    online = run_level(users, costs, config, 2, None).metrics
    assert max(of_level.values()) - min(of_level.values()) > 0.1  # there is something to choose
    assert loss(online, as_configured) < min(of_level.values()) + 0.1
    assert online["continuity_fraction"] >= as_configured["continuity_fraction"] - 0.01
