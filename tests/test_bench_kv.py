"""Token counts from the thinker's record, and the figures that the KV comparisons form."""

from __future__ import annotations

import base64
import json
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace

import pytest

from liveserve.bench import kv_text
from liveserve.bench.compare import LIVE, PRESETS, STOCK, Run, _chosen, compare
from liveserve.bench.metrics import aggregate
from liveserve.bench.prefill import Reading, prefill_metrics, read_thinker
from liveserve.bench.records import ResponseRecord
from liveserve.bench.server import parse_prompt_tokens
from liveserve.bench.workload import instructions_text
from liveserve.host.sessions import warmup_id


def request(session: str, turn: int) -> str:
    name = base64.urlsafe_b64encode(session.encode()).decode().rstrip("=")
    return f"duplex-s.{name}.e.0.r.stage0-turn{turn}"


def write_record(folder, *steps: dict) -> None:
    (folder / "stage0.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps))


def test_a_record_tells_what_was_asked_found_and_computed(tmp_path):
    warm, a, b = request("warm", 0), request("a", 0), request("a", 1)
    write_record(
        tmp_path,
        {"tokens": {warm: 9}, "new": {warm: [9, 0]}},
        {"sampled": {warm: [5]}},
        {"tokens": {a: 64}, "new": {a: [100, 0]}},
        {"tokens": {a: 36}, "new": {}},
        {"sampled": {a: [1]}},
        {"tokens": {a: 1}, "new": {}},
        {"sampled": {a: [2]}},
        {"tokens": {b: 54}, "new": {b: [150, 96]}},
        {"sampled": {b: [3]}},
    )
    readings = read_thinker(tmp_path, skip_sessions=1)
    assert readings == [Reading("a", 100, 0, 100, 2), Reading("a", 150, 96, 54, 1)]
    # 101 tokens of the second prompt were known: 100 and the first token of the answer
    assert prefill_metrics(readings) == {
        "prompt_tokens": 250.0,
        "prompt_tokens_repeated": 101.0,
        "prefill_tokens_computed": 154.0,
        "prefill_tokens_recomputed": 5.0,
        "prefix_hit_fraction": 96 / 250,
    }
    assert len(read_thinker(tmp_path)) == 3


def test_a_prompt_that_is_computed_twice_counts_twice(tmp_path):
    a = request("a", 0)
    write_record(
        tmp_path,
        {"tokens": {a: 40}, "new": {a: [40, 0]}},
        {"tokens": {a: 40}, "new": {a: [40, 32]}},  # after a preemption
        {"sampled": {a: [7]}},
    )
    (reading,) = read_thinker(tmp_path)
    assert (reading.cached, reading.computed) == (0, 80)
    assert prefill_metrics([reading])["prefill_tokens_recomputed"] == 40


def test_what_was_computed_ahead_of_a_turn_is_computed_and_no_turn(tmp_path):
    ahead, a = warmup_id("a", 0), request("a", 0)
    write_record(
        tmp_path,
        {"tokens": {ahead: 64}, "new": {ahead: [100, 0]}},
        {"tokens": {ahead: 32}, "new": {}},
        {"tokens": {a: 24}, "new": {a: [120, 96]}},
        {"sampled": {a: [7]}},
    )
    readings = read_thinker(tmp_path)
    assert [reading.ahead for reading in readings] == [True, False]
    metrics = prefill_metrics(readings)
    assert (metrics["prompt_tokens"], metrics["prefill_tokens_computed"]) == (120, 120)
    assert metrics["prefill_tokens_recomputed"] == 0


def test_nothing_asked_is_no_share():
    assert prefill_metrics([])["prefix_hit_fraction"] is None


def test_sources_of_prompt_tokens_in_the_hosts_exposition():
    text = """# TYPE vllm:prompt_tokens_by_source_total counter
vllm:prompt_tokens_by_source_total{replica="0",source="local_compute",stage="0"} 70.0
vllm:prompt_tokens_by_source_total{replica="1",source="local_compute",stage="0"} 5.0
vllm:prompt_tokens_by_source_total{replica="0",source="local_cache_hit",stage="0"} 25.0
vllm:prompt_tokens_by_source_total{replica="0",source="local_compute",stage="1"} 9.0
"""
    found = parse_prompt_tokens(text)
    assert found == {
        "0": {"local_compute": 75.0, "local_cache_hit": 25.0},
        "1": {"local_compute": 9.0},
    }
    metrics = aggregate([], [], span_s=1.0, stage_prompts=found)
    assert metrics["prompt_tokens"] == 100
    assert metrics["prefill_tokens_computed"] == 75
    assert metrics["prefix_hit_fraction"] == 0.25
    assert "prompt_tokens" not in aggregate([], [], span_s=1.0)


def test_later_turns_have_percentiles_of_their_own():
    records = [
        ResponseRecord(
            0, turn, 1.0, endpoint_s=0.0, first_audio_s=audio_s, first_text_s=audio_s / 2
        )
        for turn, audio_s in enumerate((9.0, 1.0, 3.0))
    ]
    metrics = aggregate(records, [], span_s=1.0)
    assert metrics["ttfp_p50_s"] == 3.0
    assert metrics["later_ttfp_p50_s"] == 2.0
    assert metrics["later_text_ttfp_p90_s"] == pytest.approx(1.4)


def test_savings_are_shares_of_what_stock_computed():
    runs = [
        Run(arm, "load", 0, SimpleNamespace(metrics=figures(computed)), more)
        for arm, computed, more in (
            (STOCK, 0, {"prefill_tokens_computed": 1000, "prefill_tokens_recomputed": 800}),
            (LIVE, 900, {"prefill_tokens_computed": 150, "prefill_tokens_recomputed": 40}),
        )
    ]
    found = compare(runs, [LIVE])
    assert found["prefill_tokens_saved_fraction"]["value"] == pytest.approx(0.95)
    assert found["prefill_computed_saved_fraction"]["value"] == pytest.approx(0.85)
    assert found["later_ttfp_p90_speedup"]["value"] == 1.0


def test_ours_is_also_compared_with_a_stock_that_has_a_prefix_cache():
    runs = [
        Run(arm, "load", 0, SimpleNamespace(metrics=figures(0)), {"later_ttfp_p90_s": ttfp_s})
        for arm, ttfp_s in ((STOCK, 4.0), ("stock prefix cache", 3.0), (LIVE, 1.0))
    ]
    found = compare(runs, [LIVE], against="stock prefix cache")
    assert found["later_ttfp_p90_speedup vs stock prefix cache"]["value"] == 3.0
    # nobody interrupted
    assert not any(name.startswith("waste") for name in found)


def figures(computed: float) -> dict:
    return {
        "later_ttfp_p90_s": 1.0,
        "continuity_fraction": None,
        "waste_fraction": 0.0,
        "responses_interrupted": 0,
        "prefill_tokens_computed": computed,  # of the server's counters: the record's wins
    }


def test_arms_of_a_preset_can_be_chosen_and_stock_always_runs():
    arms = PRESETS["kv"].arms
    assert [arm.name for arm in _chosen(arms, " liveserve")] == [STOCK, LIVE]
    assert _chosen(arms, None) == arms
    with pytest.raises(ValueError, match="'nothing' is not in this preset: it has stock, "):
        _chosen(arms, "nothing")


@pytest.mark.parametrize("name", ["kv", "kv-ablation"])
def test_every_server_of_the_kv_presets_has_the_same_window_and_memory(name):
    preset = PRESETS[name]
    (case,) = preset.cases.values()
    sizes = set()
    for arm in preset.arms:
        flags = dict(zip(arm.flags, arm.flags[1:], strict=False))
        assert int(flags["--history-turns"]) >= case.turns
        thinker = json.loads(flags["--stage-overrides"])["0"]
        sizes.add((thinker["max_model_len"], thinker["kv_cache_memory_bytes"]))
    assert len(sizes) == 1
    # two sessions fit, and three do not
    (length, kv_bytes), least = sizes.pop(), case.instructions_chars + 5 * 40
    assert 2 * least < kv_bytes / 4096 < 3 * least
    assert case.instructions_chars + case.turns * 90 < length


def test_instructions_are_as_long_as_asked_and_nobody_shares_a_beginning():
    texts = [instructions_text(7, index, 500) for index in range(12)]
    assert {len(text) for text in texts} == {500}
    assert len({text[:32] for text in texts}) == 12
    assert texts[3] == instructions_text(7, 3, 500)
    assert instructions_text(7, 3, 0) == ""


# -- kv-text ---------------------------------------------------------------------------------------


def answer(turn: int, ttft_s: float) -> kv_text.Answer:
    return kv_text.Answer(0, turn, 100, ttft_s, ttft_s + 1, [1])


def test_text_figures_and_ratios():
    def case(ttft_s: float, computed: float) -> dict:
        made = [answer(0, 9.0), answer(1, ttft_s)]
        sources = {"local_compute": computed, "external_kv_transfer": 1000 - computed}
        return kv_text.text_metrics(made, sources)

    cases = {kv_text.STOCK: case(0.6, 1000), kv_text.LIVE: case(0.2, 100)}
    assert cases[kv_text.LIVE]["prefix_hit_fraction"] == 0.9
    assert cases[kv_text.LIVE]["first_ttft_p50_s"] == 9.0
    ratios = kv_text.compare(cases)
    assert ratios["later_ttft_p50_speedup vs stock"]["value"] == pytest.approx(3.0)
    assert ratios["prefill_tokens_saved_fraction vs stock"]["value"] == pytest.approx(0.9)
    assert kv_text.compare({kv_text.STOCK: cases[kv_text.STOCK]}) == {}


@pytest.mark.parametrize("resident", [1.0, 2.0])
def test_a_whole_session_fits_in_every_server(resident):
    talk = replace(kv_text.Talk(), resident=resident)
    flags = kv_text.server_flags(talk)
    named = dict(pairwise(flags))
    tokens = int(named["--kv-cache-memory-bytes"]) // (6 * 2 * 64 * 2 * 4)
    assert int(named["--max-model-len"]) >= talk.last_tokens
    assert resident * talk.last_tokens <= tokens - 32 < (resident + 0.5) * talk.last_tokens


@pytest.mark.parametrize(
    ("flag", "value", "named"),
    [
        ("--turns", "0", "--turns 0"),
        ("--resident", "0.5", "--resident 0.5"),
        ("--dram-gb", "-1", "--dram-gb"),
        ("--arms", "liveserve,other", "--arms 'other'"),
    ],
)
def test_bad_input_is_named(flag, value, named, tmp_path, capsys):
    import argparse

    parser = argparse.ArgumentParser()
    kv_text.add_arguments(parser)
    args = parser.parse_args([flag, value, "--model-dir", str(tmp_path / "m")])
    assert kv_text.run(args) == 2
    assert named in capsys.readouterr().err
    assert not (tmp_path / "m").exists()
