"""Metrics on hand-made records with known answers, the server's counters, and the plots."""

from collections import Counter
from pathlib import Path

import pytest
from rich.console import Console

from liveserve.bench.metrics import aggregate, percentiles
from liveserve.bench.player import Gap
from liveserve.bench.records import (
    COMPLETED,
    FAILED,
    INTERRUPTED,
    ResponseRecord,
    SessionRecord,
)
from liveserve.bench.report import results_table, save_plots
from liveserve.bench.server import parse_stage_tokens


def response(turn: int, outcome: str = COMPLETED, **fields: object) -> ResponseRecord:
    record = ResponseRecord(session=0, turn=turn, planned_answer_s=10.0, outcome=outcome)
    for name, value in fields.items():
        assert hasattr(record, name), name
        setattr(record, name, value)
    return record


HEARD_OUT = response(
    0,
    speech_end_s=1.0,
    endpoint_s=1.5,
    created_s=1.5,
    first_text_s=1.6,
    first_audio_s=2.0,
    last_audio_s=4.5,
    stopped_s=12.05,
    routed_s=10.0,
    heard_s=10.0,
    text_deltas=30,
    gaps=[Gap(2.3, 0.3, 0.05)],
    arrivals=[(2.0, 0.3), (2.35, 10.0)],
    playback=[(2.0, 0.0), (2.3, 0.3), (2.35, 0.3), (12.05, 10.0)],
)
BARGED = response(
    1,
    INTERRUPTED,
    speech_end_s=20.0,
    endpoint_s=20.5,
    created_s=20.5,
    first_text_s=20.7,
    first_audio_s=21.5,
    last_audio_s=25.5,
    barge_in_s=25.0,
    stopped_s=25.2,
    routed_s=10.0,
    heard_s=3.5,
    text_deltas=30,
    gaps=[Gap(21.8, 0.3, 0.2)],
    arrivals=[(21.5, 0.3), (22.0, 10.0)],
    playback=[(21.5, 0.0), (21.8, 0.3), (22.0, 0.3), (25.2, 3.5)],
)
SILENT = response(2, FAILED, error="timeout_first_audio", speech_end_s=27.0, endpoint_s=27.5)
SESSION = SessionRecord(0, 0.0, 0.0, 40.0, errors=Counter({"timeout_first_audio": 1}))


def run(**fields: object) -> dict:
    return aggregate([HEARD_OUT, BARGED, SILENT], [SESSION], span_s=40.0, **fields)  # type: ignore[arg-type]


def test_known_answers() -> None:
    metrics = run()
    expected = {
        "responses": 3,
        "responses_completed": 1,
        "responses_interrupted": 1,
        "responses_failed": 1,
        "ttfp_p50_s": 0.75,  # 0.5 and 1.0
        "ttfp_p90_s": 0.95,
        "ttfp_mean_s": 0.75,
        "ttfp_from_speech_end_p50_s": 1.25,
        "text_ttfp_p50_s": 0.15,
        "rtf_p50": 0.4,  # 3/10 and 5/10
        "barge_in_stop_p50_s": 0.2,
        "continuity_fraction": 0.5,  # 0.05 s passes, 0.2 s does not; the silent one never played
        "gaps": 2,
        "gaps_over_limit": 1,
        "gap_total_s": 0.25,
        "gap_max_s": 0.2,
        "routed_s": 20.0,
        "heard_s": 13.5,
        "waste_fraction": 6.5 / 20,
        "completed_turns_per_s": 2 / 40,
        "useful_rps": 1 / 40,
        "text_tokens_routed": 60,
        "text_tokens_heard": 30 + 30 * 0.35,
        "codec_tokens_heard": 13.5 * 12.5,
    }
    for name, value in expected.items():
        assert metrics[name] == pytest.approx(value), name
    assert metrics["errors"] == {"timeout_first_audio": 1}
    assert "generated_s" not in metrics


def test_slo_and_gap_limit_decide_what_is_useful() -> None:
    strict = run(ttfp_slo_s=0.4)
    assert (strict["useful_rps"], strict["ttfp_slo_fraction"]) == (0, 0)
    loose = run(max_gap_s=0.25, ttfp_slo_s=1.0)
    assert (loose["useful_rps"], loose["continuity_fraction"]) == (2 / 40, 1)
    assert loose["ttfp_slo_fraction"] == 1


def test_generated_from_server_counters() -> None:
    metrics = run(stage_tokens={"0": 90.0, "1": 337.5, "2": 0.0})
    assert metrics["generated_s"] == pytest.approx(27.0)
    assert metrics["generated_waste_fraction"] == pytest.approx(0.5)
    assert metrics["text_tokens_generated"] == 90
    assert metrics["text_waste_fraction"] == pytest.approx(1 - 40.5 / 90)


def test_waste_by_stage_is_the_servers_where_it_tells() -> None:
    made = {"talker": {"made_tokens": 400, "wasted_tokens": 100, "made_s": 32.0, "wasted_s": 8.0}}
    metrics = run(stage_made=made)
    assert metrics["stage_waste_source"] == "server"
    assert metrics["stage_waste"] == {"talker": {**made["talker"], "waste_fraction": 0.25}}
    assert "waste_fraction" not in made["talker"]


def test_waste_by_stage_else_is_what_reached_the_client() -> None:
    metrics = run()
    assert metrics["stage_waste_source"] == "client"
    lost_s = metrics["routed_s"] - metrics["heard_s"]
    for stage in ("thinker", "talker", "code2wav"):
        waste = metrics["stage_waste"][stage]
        assert waste["made_s"] == metrics["routed_s"]
        assert waste["wasted_s"] == pytest.approx(lost_s)
        assert waste["waste_fraction"] == pytest.approx(metrics["waste_fraction"])
    talker, thinker = metrics["stage_waste"]["talker"], metrics["stage_waste"]["thinker"]
    assert talker["wasted_tokens"] == pytest.approx(12.5 * lost_s)
    heard = thinker["made_tokens"] - thinker["wasted_tokens"]
    assert heard == pytest.approx(metrics["text_tokens_heard"])


def test_nothing_measured_is_null_not_zero() -> None:
    metrics = aggregate([SILENT], [SESSION], span_s=40.0)
    assert metrics["stage_waste"]["talker"]["waste_fraction"] is None
    for name in ("ttfp_p90_s", "rtf_mean", "continuity_fraction", "waste_fraction"):
        assert metrics[name] is None
    assert aggregate([], [], span_s=0.0)["useful_rps"] is None


def test_percentiles_interpolate_and_skip_none() -> None:
    found = percentiles("x", [None, *range(101)])
    assert found == {"x_p50_s": 50.0, "x_p90_s": 90.0, "x_p95_s": 95.0, "x_p99_s": 99.0}


def test_stage_tokens_from_the_hosts_exposition() -> None:
    text = """# TYPE vllm:generation_tokens_total counter
vllm:generation_tokens_total{model_name="m",replica="0",stage="0"} 62.0
vllm:generation_tokens_total{model_name="m",replica="0",stage="1"} 300.0
vllm:generation_tokens_total{model_name="m",replica="1",stage="1"} 5.0
vllm_omni:generation_tokens_total{model_name="m"} 367.0
vllm:prompt_tokens_total{model_name="m",replica="0",stage="1"} 9.0
"""
    assert parse_stage_tokens(text) == {"0": 62.0, "1": 305.0}
    assert parse_stage_tokens("") == {}


@pytest.mark.parametrize("responses", [[HEARD_OUT, BARGED, SILENT], [SILENT], []])
def test_table_and_plots_of_any_run(tmp_path: Path, responses: list[ResponseRecord]) -> None:
    metrics = aggregate(responses, [SESSION], span_s=40.0, stage_tokens={"1": 300.0})
    console = Console(width=100, record=True, file=(tmp_path / "out").open("w"))
    console.print(results_table(metrics, "t"))
    text = console.export_text()
    assert "timeout_first_audio 1" in text
    assert "waste, as the client sees it" in text
    assert ("0.95 s" in text) == (len(responses) == 3)
    for path in save_plots(tmp_path / "plots", responses, subtitle="K=4"):
        assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_timeline_shows_the_longest_answer_of_any_session() -> None:
    from matplotlib.figure import Figure

    from liveserve.bench.report import _timelines

    short = response(0, routed_s=4.0, arrivals=[(1.0, 4.0)], playback=[(1.0, 0.0), (5.0, 4.0)])
    long = response(0, routed_s=30.0, arrivals=[(1.0, 30.0)], playback=[(1.0, 0.0), (31.0, 30.0)])
    long.session = 1
    figure = _timelines(Figure, [short, long], "K=1", 0.1)
    assert all(axes.get_ylim()[0] == 0 and axes.get_ylim()[1] > 30 for axes in figure.axes)
