"""``liveserve bench paper``: its settings, its arithmetic, and the command at a small scale."""

from __future__ import annotations

import json
from collections import Counter

import pytest

from liveserve.bench.paper import LIVE, NO_OFFLOAD, STOCK, _jobs, settings
from liveserve.bench.paper_table import (
    Runs,
    compared,
    measured_rows,
    ratios_of,
    rows,
    tables,
)
from liveserve.bench.result_file import validate_result
from liveserve.cli import main


def case(
    figure: str, setting: str, which: str, load: float | None = None, seed: int = 0, **metrics
):
    params = {
        "figure": figure,
        "setting": setting,
        "system": which,
        "load": load,
        "seed": seed,
        "scale": 1.0,
    }
    return {"params": params, "metrics": metrics}


def pair(figure: str, setting: str, stock: dict, live: dict, load: float | None = None):
    return [case(figure, setting, STOCK, load, **stock), case(figure, setting, LIVE, load, **live)]


def test_settings_cover_the_papers_evaluation_and_can_be_built():
    found = settings()
    assert {s.figure for s in found} == {
        "load", "load-ming", "data", "arrivals", "barge-in", "ablation", "kv", "long",
    }  # fmt: skip
    assert max(Counter((s.figure, s.name) for s in found).values()) == 1
    for setting in found:
        jobs, params = _jobs(setting, 3, 0.05)
        assert [p["system"] for p in params] == list(setting.systems)
        assert all(job.seed == 3 for job in jobs)
        assert len({id(job.workload) for job in jobs}) == 1  # every system sees the same users
    by_name = {(s.figure, s.name): s for s in found}
    ours, theirs = by_name["barge-in", "p=0.5"], by_name["ablation", "p=0.5"]
    assert (ours.workload, ours.changes, ours.costs) == (
        theirs.workload, theirs.changes, theirs.costs,
    )  # fmt: skip


def test_ratios_are_formed_setting_by_setting_from_means_over_seeds():
    cases = [
        *pair("load", "a", {"ttfp_p90_s": 0.6}, {"ttfp_p90_s": 0.3}),
        case("load", "a", LIVE, seed=1, ttfp_p90_s=0.1),  # mean of ours: 0.2
        *pair("arrivals", "b", {"ttfp_p90_s": 0.5}, {"ttfp_p90_s": 1.0}),
        *pair("ablation", "c", {"ttfp_p90_s": 9.0}, {"ttfp_p90_s": 1.0}),  # not one of them
        *pair("data", "d", {"ttfp_p90_s": None}, {"ttfp_p90_s": 1.0}),
    ]
    assert compared(Runs(cases), "ttfp_p90_s") == pytest.approx([3.0, 0.5])
    ratio = ratios_of(cases)["ttfp_p90_speedup"]
    assert (ratio["value"], ratio["low"], ratio["high"]) == pytest.approx((1.75, 0.5, 3.0))
    text = next(r for r in rows(Runs(cases)) if r.what.startswith("P90 audio TTFP"))
    assert text.ours == "1.75x (0.50x to 3.00x)"
    assert text.settings == "2 settings"


def test_continuity_is_compared_where_stock_is_nearest_to_theirs():
    cases = [
        *pair("load", "few", {"continuity_fraction": 0.99}, {"continuity_fraction": 1.0}, 8),
        *pair("load", "some", {"continuity_fraction": 0.8}, {"continuity_fraction": 0.97}, 64),
        *pair("load", "many", {"continuity_fraction": 0.3}, {"continuity_fraction": 0.9}, 128),
    ]
    cases.append(case("load", "some", NO_OFFLOAD, 64, continuity_fraction=0.75))
    row = next(r for r in rows(Runs(cases)) if r.what == "continuity, c=12")
    assert row.settings.startswith("some")
    assert row.ours == "80.0 % (no offload: 75.0 %) → 97.0 %"


def test_what_keeps_the_slo_is_found_even_if_more_load_makes_more_answers():
    def runs(fraction: float, useful: float) -> dict:
        return {"continuity_fraction": fraction, "useful_rps": useful}

    cases = [
        *pair("load", "few", runs(0.95, 1.0), runs(1.0, 1.0), 8),
        *pair("load", "many", runs(0.5, 1.2), runs(0.92, 2.0), 64),
    ]
    row = next(r for r in rows(Runs(cases)) if r.what.startswith("useful answers/s, Qwen3"))
    assert row.ours == "1.00 (few) → 2.00 (many)"


def test_barge_in_and_reload_rows():
    waste = "generated_waste_fraction"
    cases = [
        *pair("barge-in", "p=0.5", {waste: 0.2, "useful_rps": 1.0, "ttfp_p90_s": 0.5},
              {waste: 0.02, "useful_rps": 1.5, "ttfp_p90_s": 0.4}, 0.5),
        *pair("barge-in", "p=1", {waste: 0.4}, {waste: 0.1}, 1.0),
        *pair("kv", "long", {"reloads": 4, "reload_total_s": 0.2, "later_text_ttfp_p50_s": 0.3},
              {"reloads": 0, "reload_total_s": 0.0, "later_text_ttfp_p50_s": 0.1}),
    ]  # fmt: skip
    ours = {row.what: row.ours for row in rows(Runs(cases))}
    assert ours["generated audio that nobody hears, at most"] == "40.0 % → 10.0 %"
    assert ours["useful answers/s under barge-in, p=0.5"] == "1.50x"
    assert ours["P90 TTFP of the full system, p=0.5"] == "-20.0 %"
    text = "4 turns x 50 ms of 300 ms → 0 turns x 0 ms of 100 ms"
    assert ours["reload on the first-token path"] == text
    found = ratios_of(cases)
    assert found["waste_stock_fraction"]["high"] == 0.4
    assert found["reload_saved_fraction"]["value"] == 1.0


def test_measured_rows_come_from_result_files_or_not_at_all(tmp_path):
    assert measured_rows(tmp_path) == []
    (tmp_path / "eviction-cost.json").write_text("{not json")
    assert measured_rows(tmp_path) == []
    costs = [
        {
            "params": {"policy": name, "blocks": 60_000},
            "metrics": {"decision_mean_ms": mean, "decision_p90_ms": 2 * mean},
        }
        for name, mean in (("scan", 10.0), ("next-use", 0.05))
    ]
    (tmp_path / "eviction-cost.json").write_text(json.dumps({"cases": costs}))
    (row,) = measured_rows(tmp_path)
    assert row.ours == "10.000 / 20.000 ms → 0.050 / 0.100 ms"


def test_command_at_a_small_scale_and_again_from_its_file(tmp_path, capsys):
    out, plots = tmp_path / "paper.json", tmp_path / "plots"
    only = [a for f in ("load-ming", "barge-in", "kv", "long") for a in ("--only", f)]
    argv = ["bench", "paper", *only, "--scale", "0.015", "--workers", "1", "--json", str(out)]
    assert main([*argv, "--plots", str(plots)]) == 0
    first = capsys.readouterr().out
    result = json.loads(out.read_text())
    validate_result(result)
    assert result["simulated"] is True
    assert result["ratios"].keys() >= {"ttfp_p90_speedup", "throughput_ratio"}
    assert {p.name for p in plots.iterdir()} == {
        "load-ming.png", "barge-in.png", "residency.png", "index.png",
    }  # fmt: skip
    assert "**Simulated**" in first
    assert "**Measured**" in first
    assert "A quick look at scale 0.015" in first
    assert len(tables(result)) == 4
    text = tmp_path / "table.md"
    assert main(["bench", "paper", "--from", str(out), "--markdown", str(text)]) == 0
    assert text.read_text() in first
    # The long example: LiveServe makes it at about the pace at which it is heard.
    runs = Runs(result["cases"])
    made_s, heard_s = (
        runs.get("long", "8 users", LIVE, f"generation_{n}") for n in ("s", "audio_s")
    )
    assert 0.8 * heard_s < made_s < 1.1 * heard_s
    assert runs.get("long", "8 users", STOCK, "generation_s") < 0.3 * heard_s


@pytest.mark.parametrize(
    ("argv", "error"),
    [
        (["--only", "everything"], "--only 'everything': use load"),
        (["--scale", "0"], "--scale must be above 0"),
        (["--scale", "nan"], "--scale must be above 0"),
        (["--seeds", "0"], "--seeds must be 1 or more"),
        (["--from", "/nowhere.json"], "--from /nowhere.json"),
    ],
)
def test_bad_arguments_get_one_line(argv, error, capsys):
    assert main(["bench", "paper", *argv]) == 2
    said = capsys.readouterr().err.strip()
    assert error in said
    assert said.count("\n") == 0


def test_another_benchs_file_is_refused(tmp_path, capsys):
    path = tmp_path / "other.json"
    path.write_text("[]")
    assert main(["bench", "paper", "--from", str(path)]) == 2
    assert "no result file" in capsys.readouterr().err
