"""Utility of U2 requests (paper, eqs 1 and 2) and the policy's configuration."""

from __future__ import annotations

import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from liveserve.scheduler.policy_config import PolicyConfig
from liveserve.scheduler.utility import MIN_P_SAFE_S, kv_pressure, utility, weights

FULL = (0, 100)  # free blocks, all blocks


@given(
    buffer_s=st.floats(0, 100),
    blocks=st.integers(0, 100),
    free=st.integers(0, 100),
    p_safe_s=st.floats(0.05, 1.0),
    alpha=st.floats(0, 10),
    beta=st.floats(0, 100),
)
def test_it_is_the_papers_equation(buffer_s, blocks, free, p_safe_s, alpha, beta):
    config = PolicyConfig(p_safe_s=p_safe_s, alpha=alpha, beta=beta, kv_high_watermark=0.8)
    c_barge = max(0.0, buffer_s - p_safe_s) / p_safe_s
    u_kv = kv_pressure(free, 100, 0.8) * blocks / 100
    value = utility(buffer_s, blocks, weights(free, 100, config))
    assert value == pytest.approx(beta * u_kv - alpha * c_barge, abs=1e-9)


def test_no_cost_up_to_p_safe_and_one_unit_per_p_safe_above_it():
    of_round = weights(None, None, PolicyConfig(p_safe_s=0.5, alpha=3.0))
    assert [utility(p, 7, of_round) for p in (-1.0, 0.5, 1.0, 2.0)] == [0, 0, -3, -9]


def test_p_safe_of_zero_divides_by_nothing():
    value = utility(1.0, 0, weights(None, None, PolicyConfig(p_safe_s=0.0)))
    assert value == pytest.approx(-1.0 / MIN_P_SAFE_S)


@pytest.mark.parametrize(
    ("free", "pressure"), [(100, 0), (21, 0), (20, 0), (15, 0.25), (10, 0.5), (0, 1)]
)
def test_kv_counts_only_above_the_watermark(free, pressure):
    assert kv_pressure(free, 100, 0.8) == pytest.approx(pressure)


@given(st.integers(1, 10_000), st.floats(0, 0.99), st.data())
def test_pressure_grows_without_a_jump(total, watermark, data):
    free = data.draw(st.integers(1, total))
    less, more = kv_pressure(free, total, watermark), kv_pressure(free - 1, total, watermark)
    assert 0 <= less <= more <= 1
    assert more - less <= 1.0 / total / (1 - watermark) + 1e-9


def test_a_watermark_of_one_never_counts_and_an_empty_pool_is_no_pressure():
    assert kv_pressure(0, 100, 1.0) == 0
    assert kv_pressure(0, 0, 0.5) == 0


@pytest.mark.parametrize("pool", [(None, 100), (0, None), (None, None), (0, 0)])
def test_without_pool_counts_there_is_no_kv_term(pool):
    assert utility(None, 50, weights(*pool, PolicyConfig())) == 0


def test_each_missing_input_of_a_request_adds_nothing():
    of_round = weights(*FULL, PolicyConfig(p_safe_s=0.5, alpha=1.0, beta=10.0))
    assert utility(None, 50, of_round) == pytest.approx(5.0)
    assert utility(1.5, None, of_round) == pytest.approx(-2.0)
    assert utility(math.nan, 50, of_round) == pytest.approx(5.0)
    assert utility(None, None, of_round) == 0


def test_switched_off_it_is_zero():
    assert utility(9.0, 50, weights(*FULL, PolicyConfig(utility=False))) == 0


@pytest.mark.parametrize(
    ("wrong", "field"),
    [
        ({"p_safe_s": -0.1}, "p_safe_s"),
        ({"p_safe_s": math.nan}, "p_safe_s"),
        ({"p_hold_s": math.inf}, "p_hold_s"),
        ({"alpha": -1.0}, "alpha"),
        ({"beta": "8"}, "beta"),
        ({"beta": True}, "beta"),
        ({"kv_high_watermark": 1.1}, "kv_high_watermark"),
        ({"kv_high_watermark": -0.1}, "kv_high_watermark"),
        ({"age_limit_s": 0.0}, "age_limit_s"),
        ({"p_release_s": 0.4}, "p_release_s"),
        ({"p_hold_s": 1.0}, "p_hold_s"),
        ({"pace": 1}, "pace"),
        ({"order": "on"}, "order"),
        ({"utility": None}, "utility"),
    ],
)
def test_a_bad_setting_is_one_error_that_names_it(wrong, field):
    with pytest.raises(ValueError, match=rf"^{field} "):
        PolicyConfig(**wrong)


def test_configuration_travels_as_json_and_is_validated_there():
    config = PolicyConfig(p_hold_s=3.0, pace=False)
    assert msgspec.json.decode(msgspec.json.encode(config), type=PolicyConfig) == config
    with pytest.raises(msgspec.ValidationError, match="p_release_s"):
        msgspec.json.decode('{"p_release_s": 0.1}', type=PolicyConfig)
    with pytest.raises(msgspec.ValidationError, match="p_hold"):
        msgspec.json.decode('{"p_hold": 1}', type=PolicyConfig)
