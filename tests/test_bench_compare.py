"""Ratios of a comparison on runs with known figures, and its presets."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from liveserve.bench.compare import (
    PRESETS,
    STOCK,
    STOCK_ARM,
    UNLOADED,
    Run,
    _verdict,
    compare,
    in_turn,
    live_arm,
    regime_slow_motion,
)


def made(arm: str, pair: int, case: str = "c", **metrics: float) -> Run:
    defaults = {
        "ttfp_p50_s": 1.0,
        "ttfp_p90_s": 2.0,
        "completed_turns_per_s": 1.0,
        "continuity_fraction": 0.5,
        "waste_fraction": 0.3,
    }
    return Run(arm, case, pair, SimpleNamespace(metrics=defaults | metrics))


def test_ratios_are_formed_inside_a_pair_and_carry_their_spread():
    runs = [
        made(STOCK, 0, ttfp_p90_s=3.0),
        made("liveserve", 0, ttfp_p90_s=1.0, continuity_fraction=0.9, waste_fraction=0.05),
        made(STOCK, 1, ttfp_p90_s=2.0),
        made("liveserve", 1, ttfp_p90_s=2.0, continuity_fraction=0.8, waste_fraction=0.07),
    ]
    found = compare(runs, ["liveserve"])
    speedup = found["ttfp_p90_speedup"]
    assert (speedup["value"], speedup["low"], speedup["high"]) == (2.0, 1.0, 3.0)
    assert found["continuity_delta_pp"]["value"] == pytest.approx(35.0)
    assert found["waste_stock_fraction"]["value"] == 0.3
    assert found["waste_ours_fraction"]["value"] == pytest.approx(0.06)
    assert found["throughput_ratio"]["value"] == 1.0


def test_a_run_without_a_figure_gives_no_ratio():
    runs = [made(STOCK, 0), made("liveserve", 0, ttfp_p90_s=None, continuity_fraction=None)]
    found = compare(runs, ["liveserve"])
    assert "ttfp_p90_speedup" not in found
    assert "continuity_delta_pp" not in found
    assert "ttfp_p50_speedup" in found


def test_ratios_with_a_case_of_their_own_go_without_its_name():
    runs = [
        *(made(STOCK, 0, case) for case in ("load", "barge-in", "light")),
        made("liveserve", 0, "load", ttfp_p90_s=1.0),
        made("liveserve", 0, "barge-in", waste_fraction=0.1),
        made("liveserve", 0, "light", ttfp_p50_s=1.02, completed_turns_per_s=0.9),
    ]
    found = compare(runs, ["liveserve"])
    assert found["ttfp_p90_speedup"]["value"] == 2.0
    assert found["ttfp_p90_speedup barge-in"]["value"] == 1.0
    assert found["waste_ours_fraction"]["value"] == 0.1
    assert found["waste_ours_fraction load"]["value"] == 0.3
    assert found["lowload_worst_regression"]["value"] == pytest.approx(0.1)
    assert _verdict("lowload_worst_regression", 0.1) == "<= 0.03 missed"
    assert _verdict("ttfp_p90_speedup", 2.0) == ">= 1.55 met"
    assert _verdict("ttfp_p90_speedup barge-in", 1.0) == ""


def test_loss_at_low_load_is_that_of_the_metric_with_the_worst_median():
    ours = [(1.2, 0.9), (0.9, 1.0), (1.0, 1.0)]  # TTFP P50 swings by the noise, throughput loses
    runs = [made(STOCK, pair, "light") for pair in range(3)]
    runs += [
        made("liveserve", pair, "light", ttfp_p50_s=p50, completed_turns_per_s=0.98 * rate)
        for pair, (p50, rate) in enumerate(ours)
    ]
    loss = compare(runs, ["liveserve"])["lowload_worst_regression"]
    assert loss["value"] == pytest.approx(0.02)
    assert (loss["low"], loss["high"]) == pytest.approx((0.02, 0.118))


def test_slow_motion_puts_stock_in_the_papers_regime():
    assert regime_slow_motion(0.15, 2.0) == 2.0
    # measured on one machine, in a fast and in a slow hour: RTF 0.215 at K = 2 and 0.106 at K = 3
    assert regime_slow_motion(0.106, 3.0) == pytest.approx(regime_slow_motion(0.215, 2.0), abs=0.2)
    assert regime_slow_motion(0.01, 2.0) == 1.0
    assert regime_slow_motion(9.0, 2.0) == 5.0


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_valid_and_both_servers_get_the_same_users(name):
    preset = PRESETS[name]
    assert preset.arms[0].name == (UNLOADED if name == "preload" else STOCK)
    assert len({arm.name for arm in preset.arms}) == len(preset.arms)
    for case in preset.cases.values():
        case.validate()
        assert case.slow_motion >= 1


def test_servers_take_turns():
    one, two = STOCK_ARM, live_arm()

    def turns(pairs, together):
        return [(p, a.name, c) for p, a, c in in_turn((one, two), ["x", "y"], pairs, together)]

    together = turns(2, True)
    assert together[:4] == [
        (0, "stock", "x"), (0, "liveserve", "x"), (0, "liveserve", "y"), (0, "stock", "y"),
    ]  # fmt: skip
    apart = turns(2, False)
    assert [arm for _, arm, _ in apart] == ["stock"] * 2 + ["liveserve"] * 4 + ["stock"] * 2
    assert sorted(together) == sorted(apart)
    for case in ("x", "y"):  # as often first as last
        firsts = [arm for pair, arm, c in together if c == case][::2]
        assert sorted(firsts) == ["liveserve", "stock"]


def test_servers_are_up_together_where_that_is_fair():
    assert PRESETS["ci"].together
    assert not PRESETS["ablation"].together  # twelve servers
    assert not PRESETS["kv"].together
    assert not PRESETS["preload"].together  # what one kept in KV would be read
