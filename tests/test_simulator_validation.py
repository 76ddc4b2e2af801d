"""The simulator against a recorded run of the real pipeline: its cost model is fitted to the run's
steps here, its users are the run's users, and what they get must be what the run's users got.

`liveserve bench validate --json bench/results/cpu/validate.json --costs
bench/simulator/presets/cpu-tiny.json` records another.
"""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from liveserve import cli
from liveserve.bench import validate
from liveserve.bench.simulator.costs import load_costs
from liveserve.bench.simulator.model import CostModel
from liveserve.bench.validate import JUDGED, fit_all, is_met, judge

RECORDED = Path(validate.__file__).parent / "results" / "cpu" / "validate.json"


@pytest.fixture(scope="module")
def cases():
    return json.loads(RECORDED.read_text())["cases"]


@pytest.fixture(scope="module")
def models(cases):
    return fit_all(cases)


@pytest.fixture(scope="module")
def judged(cases, models):
    """By server: every figure by its name."""
    return {
        (arm := case["params"]["arm"]): {f.name: f for f in judge(case, models[arm].costs)}
        for case in cases
    }


@pytest.mark.parametrize("arm", ["stock", "liveserve"])
def test_simulated_users_get_what_the_measured_ones_got(judged, arm):
    figures = judged[arm]
    assert figures.keys() >= JUDGED.keys()
    assert not {f.name: f.error for f in figures.values() if not is_met(f)}


def test_the_simulator_sees_what_liveserve_changes(judged):
    """The direction and most of the size of each difference between the two servers."""
    stock, live = judged["stock"], judged["liveserve"]
    for name in ("waste_fraction", "continuity_fraction"):
        measured = live[name].measured - stock[name].measured
        simulated = live[name].simulated - stock[name].simulated
        assert simulated == pytest.approx(measured, abs=0.2), name
        assert simulated * measured > 0, name


@pytest.mark.parametrize(
    ("path", "factor"),
    [("talker.step.fixed_s", 2.0), ("code2wav.fixed_s", 4.0), ("handover_s", 10.0)],
)
def test_a_wrong_cost_model_would_be_noticed(cases, models, path, factor):
    case = next(case for case in cases if case["params"]["arm"] == "stock")
    fields = part = msgspec.to_builtins(models["stock"].costs)
    *above, last = path.split(".")
    for name in above:
        part = part[name]
    part[last] *= factor
    figures = judge(case, msgspec.convert(fields, CostModel))
    assert not all(is_met(figure) for figure in figures)


def test_the_committed_model_is_the_one_of_the_recorded_run(models):
    costs = models["stock"].costs
    committed = load_costs("cpu-tiny")
    assert committed.sources.keys() == costs.sources.keys()
    assert committed.thinker.step.fixed_s == pytest.approx(costs.thinker.step.fixed_s, rel=0.1)
    assert committed.talker.step.fixed_s == pytest.approx(costs.talker.step.fixed_s, rel=0.1)
    assert committed.parallel_steps == pytest.approx(costs.parallel_steps)
    assert committed.handover_s == pytest.approx(costs.handover_s, rel=0.3)


def test_the_command_compares_a_recorded_run_without_a_server(
    models, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(validate, "fit_all", lambda cases: models)
    out, model = tmp_path / "again.json", tmp_path / "costs.json"
    flags = ["--from", str(RECORDED), "--json", str(out), "--costs", str(model)]
    code = cli.main(["bench", "validate", *flags])
    shown = capsys.readouterr().out
    assert code == int("missed" in shown)
    assert "liveserve ttfp_p90_s" in shown
    ratios = json.loads(out.read_text())["ratios"]
    assert len(ratios) == 2 * len(JUDGED)
    assert load_costs(str(model)) == models["stock"].costs


def test_a_file_that_is_no_recorded_run_is_named(tmp_path, capsys):
    path = tmp_path / "other.json"
    assert cli.main(["bench", "validate", "--from", str(path)]) == 2
    path.write_text("{}")
    assert cli.main(["bench", "validate", "--from", str(path)]) == 2
    result = json.loads(RECORDED.read_text())
    path.write_text(json.dumps(result | {"bench": "sessions"}))
    assert cli.main(["bench", "validate", "--from", str(path)]) == 2
    path.write_text(json.dumps(result | {"cases": []}))
    assert cli.main(["bench", "validate", "--from", str(path)]) == 1
    errors = capsys.readouterr().err
    assert errors.count(str(path)) == 3
    assert "bench sessions" in errors
