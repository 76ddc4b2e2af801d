"""``liveserve bench warmup``: what is made of its turns, and what it refuses."""

from __future__ import annotations

import argparse

import pytest

from liveserve.bench import warmup
from liveserve.bench.records import COMPLETED, ResponseRecord
from liveserve.bench.result_file import build_result


def turn(arm: str, length_s: float, pair: int, text_s: float | None) -> warmup.Turn:
    answer = ResponseRecord(0, 0, 1.0, outcome=COMPLETED, endpoint_s=10.0)
    if text_s is not None:
        answer.first_text_s, answer.first_audio_s = 10.0 + text_s, 10.5 + text_s
    used = 64 if arm == "on" else 0
    return warmup.Turn(arm, length_s, pair, answer, computed=2 * used, used=used)


TRIAL = warmup.Trial(lengths_s=(0.5, 2.0), pairs=2)


def test_medians_by_length_and_ratios_of_the_longest_pair_by_pair():
    turns = [
        *(turn("off", length_s, pair, 1.0) for length_s in (0.5, 2.0) for pair in (0, 1)),
        *(turn("on", 0.5, pair, 0.8) for pair in (0, 1)),
        turn("on", 2.0, 0, 0.5),
        turn("on", 2.0, 1, 0.25),
    ]
    cases, ratios = warmup.summary(turns, TRIAL)
    seen = {
        (case["params"]["utterance_s"], case["params"]["kv_prefill"]): case["metrics"]
        for case in cases
    }
    assert seen[2.0, False]["text_ttfp_p50_s"] == pytest.approx(1.0)
    assert seen[2.0, True]["text_ttfp_p50_s"] == pytest.approx(0.375)
    assert seen[0.5, True]["audio_ttfp_p50_s"] == pytest.approx(1.3)
    assert seen[2.0, True]["warmup_computed_tokens"] == 256
    assert seen[2.0, True]["warmup_used_tokens"] == 128
    text = ratios["text_ttfp_speedup_longest"]
    assert (text["value"], text["low"], text["high"]) == pytest.approx((3.0, 2.0, 4.0))
    assert ratios["audio_ttfp_speedup_longest"]["low"] == pytest.approx(1.5)
    build_result("warmup", cases, command="x", ratios=ratios)  # a valid result


def test_answers_that_never_came_are_left_out(tmp_path):
    turns = [turn("off", 0.5, 0, 1.0), turn("on", 2.0, 0, None), turn("off", 2.0, 0, 1.0)]
    cases, ratios = warmup.summary(turns, TRIAL)
    assert ratios == {}
    build_result("warmup", cases, command="x", ratios=ratios)
    assert warmup.save_plot(tmp_path, cases, TRIAL).stat().st_size > 1000


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("--lengths", "0.5"),
        ("--lengths", "a,b"),
        ("--lengths", "0.01,1"),
        ("--lengths", "1,100"),
        ("--lengths", "nan,1"),
        ("--pairs", "0"),
        ("--instructions", "0"),
        ("--step-tokens", "0"),
    ],
)
def test_a_wrong_flag_is_named(flag, value, capsys):
    parser = argparse.ArgumentParser()
    warmup.add_arguments(parser)
    assert warmup.run(parser.parse_args([f"{flag}={value}"])) == 2
    assert flag in capsys.readouterr().err
