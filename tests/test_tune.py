"""``liveserve tune``: its parts, and that it improves on the defaults for users it has not seen."""

from __future__ import annotations

import json

import msgspec
import pytest

from liveserve.bench import tune as tuning
from liveserve.bench.result_file import validate_result
from liveserve.bench.simulator.costs import load_costs
from liveserve.bench.simulator.workloads import spec_of
from liveserve.bench.tune import RANGES, Candidate, Trial, pareto, tune, write_config
from liveserve.cli import main
from liveserve.config import ConfigError, LiveServeConfig, StageConfig, parse_config

ONE_EACH = {"thinker.replicas": 1, "talker.replicas": 1, "code2wav.replicas": 1}
USERS = {
    "sessions": 36,
    "concurrency": 36,
    "turns": 2,
    "p_barge_in": 0.6,
    "max_answer_tokens": 48,
    "ramp_s": 12,
    "jitter_s": 0.02,
}
FOUND = Candidate(0.5, 20.0, 0.2, 0.4, 1.5, 0.3, 2.0)


def trial(ttfp: float, waste: float, stalls: float, dram_gb: float | None = None) -> Trial:
    return Trial(Candidate(dram_gb=dram_gb), ttfp, waste, stalls)


def test_the_front_has_what_nothing_beats():
    a, b = trial(0.3, 0.10, 0.0), trial(0.4, 0.05, 0.0)
    worse, equal = trial(0.4, 0.06, 0.0), trial(0.3, 0.10, 0.0)
    assert pareto([a, worse, b, equal]) == [a, b, equal]
    cheap = trial(0.4, 0.06, 0.0, dram_gb=0.5)
    dear = trial(0.4, 0.06, 0.0, dram_gb=2.0)
    assert pareto([dear, cheap]) == [cheap]


def test_loss_is_relative_to_the_defaults_and_no_worse_means_in_everything():
    default = trial(0.3, 0.05, 0.001)
    assert default.loss(default) == 0
    assert trial(0.2, 0.05, 0.001).loss(default) < 0
    assert trial(0.2, 0.02, 0.001).loss(default) < trial(0.2, 0.05, 0.001).loss(default)
    assert trial(0.302, 0.05, 0.001).no_worse(default)
    assert not trial(0.1, 0.01, 0.01).no_worse(default)
    assert not trial(0.4, 0.01, 0.0).no_worse(default)


def test_a_candidate_becomes_a_configuration_and_keeps_the_rest():
    base = LiveServeConfig(
        heartbeat_ms=250.0,
        stages={"talker": StageConfig(age_limit_s=7.0), "thinker": StageConfig(alpha=2.0)},
    )
    config = FOUND.config(base)
    policy = config.policy("talker", config.switches)
    assert (policy.alpha, policy.beta, policy.p_safe_s) == (0.5, 20.0, 0.2)
    assert (policy.p_release_s, policy.p_hold_s) == (0.4, 0.6)
    assert (policy.kv_high_watermark, policy.age_limit_s) == (0.3, 7.0)
    assert config.kv.dram_bytes == 2 * 2**30
    assert config.stages["thinker"] == base.stages["thinker"]
    assert config.heartbeat_ms == 250.0
    assert Candidate().config(base) == base
    assert FOUND.costs(load_costs("cpu-tiny")).dram_bytes == 2 * 2**30


def test_what_is_written_reads_back_and_holds_no_defaults(tmp_path):
    path, config = tmp_path / "deep" / "live.json", FOUND.config(LiveServeConfig())
    write_config(path, config)
    assert parse_config(str(path)) == config
    assert set(json.loads(path.read_text())) == {"stages", "kv"}
    write_config(path, LiveServeConfig())
    assert json.loads(path.read_text()) == {}


def test_a_configuration_that_serve_would_refuse_is_not_written(tmp_path):
    path = tmp_path / "live.json"
    path.write_text("{}")
    broken = LiveServeConfig(stages={"talker": StageConfig(p_safe_s=2.0, p_release_s=1.0)})
    with pytest.raises(ConfigError, match="p_release_s"):
        write_config(path, broken)
    assert path.read_text() == "{}"
    assert [p.name for p in tmp_path.iterdir()] == ["live.json"]


def test_it_improves_on_the_defaults_for_users_it_was_not_tuned_on():
    spec = spec_of("interaction", **USERS)
    costs = load_costs("qwen3-omni-h200", ONE_EACH)
    found = tune(spec, costs, LiveServeConfig(), trials=4)
    assert len(found.trials) == 1 + 4 + 2
    assert found.trials[0].candidate == Candidate()
    assert found.choice in found.trials
    assert found.better
    default, chosen = found.held_out
    assert chosen.candidate == found.choice.candidate != Candidate()
    assert chosen.waste_fraction < 0.9 * default.waste_fraction
    assert chosen.ttfp_p90_s < 1.02 * default.ttfp_p90_s
    assert default.ttfp_p90_s != found.trials[0].ttfp_p90_s  # other users
    for swept in found.trials[1:]:
        for name, (low, high) in RANGES.items():
            assert 0.99 * low <= getattr(swept.candidate, name) <= 1.01 * high
        swept.candidate.config(LiveServeConfig()).policy("talker", LiveServeConfig().switches)


SMALL = ["--workload", "interaction", "--set", "sessions=4", "--set", "turns=1", "--trials", "2"]


def test_command_writes_configuration_result_and_plot(tmp_path, capsys):
    out, result, plot = tmp_path / "live.json", tmp_path / "result.json", tmp_path / "front.png"
    argv = ["tune", *SMALL, "--workers", "1", "--dram-gb", "1", "4", "--config"]
    argv += ['{"heartbeat_ms": 250}', "--out", str(out)]
    assert main([*argv, "--json", str(result), "--plot", str(plot)]) == 0
    assert parse_config(str(out)).heartbeat_ms == 250.0
    assert plot.read_bytes().startswith(b"\x89PNG")
    written = json.loads(result.read_text())
    validate_result(written)
    assert written["simulated"] is True
    parts = [case["params"]["part"] for case in written["cases"]]
    assert parts.count("held-out defaults") == parts.count("held-out chosen") == 1
    assert {c["params"]["dram_gb"] for c in written["cases"]} >= {None, 1.0, 4.0}
    assert "on users that it was not chosen on" in capsys.readouterr().out


def test_where_the_choice_is_no_better_the_defaults_stay(tmp_path, monkeypatch, capsys):
    same = trial(0.3, 0.05, 0.0)
    chosen = same._replace(candidate=FOUND)
    worse = chosen._replace(waste_fraction=0.2)
    found = tuning.Tuned([same, chosen], [same], chosen, (same, worse))
    monkeypatch.setattr(tuning, "tune", lambda *args, **kwargs: found)
    out = tmp_path / "live.json"
    assert main(["tune", *SMALL, "--out", str(out)]) == 0
    assert parse_config(str(out)) == LiveServeConfig()
    assert "the defaults stay" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "error"),
    [
        (["--trials", "0"], "--trials must be 1 or more"),
        (["--dram-gb", "-1"], "--dram-gb"),
        (["--set", "sessions"], "write FIELD=VALUE"),
        (["--workload", "nothing"], "workload 'nothing'"),
        (["--costs", "abacus"], "cost model 'abacus'"),
        (["--config", '{"stages": {"talker": {"alpha": -1}}}'], "alpha"),
    ],
)
def test_bad_arguments_get_one_line(argv, error, capsys):
    assert main(["tune", *argv]) == 2
    said = capsys.readouterr().err.strip()
    assert error in said
    assert said.count("\n") == 0


def test_every_changed_field_is_written():
    """Whatever is set is in the file: structs that gain a field need no change here."""
    config = msgspec.convert({"kv": {"safe_blocks": 8}, "playback": "wall"}, LiveServeConfig)
    assert tuning._changed(config) == {"kv": {"safe_blocks": 8}, "playback": "wall"}


def test_held_out_users_are_others_and_nothing_that_got_worse_is_chosen(monkeypatch):
    """On a made-up simulator: a small α wastes nothing at all and stalls, a large one wastes some
    and does not."""
    seeds = []

    def simulated(jobs, workers, advance, keep):
        seeds.append([job.seed for job in jobs])
        found = []
        for job in jobs:
            alpha = (job.config.live.stages.get("talker") or StageConfig()).alpha
            stalls, waste = (0.0, 0.1) if alpha is None else (0.0, 0.05)
            if alpha is not None and alpha < 1:
                stalls, waste = 0.3, 0.0
            found.append(
                {
                    "ttfp_p90_s": 0.3,
                    "generated_waste_fraction": waste,
                    "gap_total_s": stalls,
                    "routed_s": 100.0,
                }
            )
        return found

    monkeypatch.setattr(tuning, "simulate_all", simulated)
    spec = spec_of("interaction", **USERS, seed=7)
    found = tune(spec, load_costs("cpu-tiny"), LiveServeConfig(), trials=8, seeds=2)
    swept, near, held_out = seeds
    assert set(swept) == set(near) == {7, 8}
    assert not set(held_out) & {7, 8}
    assert len(held_out) == 2 * 4
    assert any(trial.waste_fraction == 0 for trial in found.trials)
    assert found.choice.waste_fraction == 0.05
    assert found.better
