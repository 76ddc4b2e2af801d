"""Fitting a cost model: known costs come out again, and a server that shows too little is told."""

from __future__ import annotations

import asyncio
import json
import random

import msgspec
import pytest

from liveserve.bench import calibrate_server
from liveserve.bench.calibrate_server import Observed, fitted, match_overheads, simulated_metrics
from liveserve.bench.sessions import SessionsConfig, SessionsReport
from liveserve.bench.simulator.costs import load_costs, spreads
from liveserve.bench.simulator.fit import (
    FitError,
    Step,
    fit_steps,
    read_record,
    steps_of_polls,
)
from liveserve.bench.simulator.measured import (
    Pace,
    compare,
    in_slow_motion,
    listener_metrics,
    pace_of,
    workload_of,
)
from liveserve.bench.simulator.model import ModelError, SimConfig, StepCost, VocoderCost
from liveserve.bench.simulator.simulate import simulate

THINKER = StepCost(0.010, 0.0015, 2e-6, 1e-4, 0.0)
VOCODER = VocoderCost(0.012, 0.0013)
PACE = Pace(frames_per_token=4.0)


def ar_steps(
    cost: StepCost, count: int = 400, noise: float = 0.1, parallel: float = 9.0
) -> list[Step]:
    draw = random.Random(7)
    steps = []
    for index in range(count):
        decodes = draw.randint(0, 8)
        context = sum(draw.randint(50, 900) for _ in range(decodes))
        prefill = draw.randint(20, 400) if index % 5 == 0 or not decodes else 0
        active = draw.randint(1, 3)
        seconds = cost.seconds(decodes, context, prefill, prefill**2 / 2)
        seconds *= max(1.0, active / parallel) * (1 + draw.uniform(-noise, noise))
        steps.append(Step(seconds, decodes, context, prefill, prefill**2 / 2, active=active))
    return steps


def vocoder_steps(cost: VocoderCost, parallel: float = 9.0) -> list[Step]:
    draw = random.Random(8)
    steps = []
    for _ in range(200):
        chunks, frames, active = (
            draw.randint(1, 8),
            draw.choice((4, 14, 29, 50)),
            draw.randint(1, 3),
        )
        seconds = cost.seconds(chunks, frames) * max(1.0, active / parallel)
        steps.append(Step(seconds, chunks=chunks, frames=frames, active=active))
    return steps


# ---- fits -----------------------------------------------------------------------------------


def test_known_costs_come_out_again():
    fit = fit_steps({"thinker": ar_steps(THINKER), "code2wav": vocoder_steps(VOCODER)})
    for name in ("fixed_s", "per_request_s", "per_prefill_token_s"):
        assert getattr(fit.thinker, name) == pytest.approx(getattr(THINKER, name), rel=0.1), name
    assert fit.code2wav.fixed_s == pytest.approx(0.012, rel=1e-6)
    assert fit.code2wav.per_frame_s == pytest.approx(0.0013, rel=1e-6)
    assert fit.talker is None
    assert fit.parallel_steps is None
    assert fit.quality["thinker"].error_p50 < 0.08
    assert abs(fit.quality["thinker"].bias) < 0.02


def test_costs_are_never_negative():
    flat = [Step(0.01 - 1e-5 * n, decodes=n) for n in range(8) for _ in range(20)]
    fit = fit_steps({"talker": flat})
    assert fit.talker.per_request_s == 0.0
    assert fit.talker.fixed_s == pytest.approx(0.01, rel=0.01)


@pytest.mark.parametrize("parallel", [1.5, 2.0])
def test_how_many_steps_run_at_full_speed_is_found(parallel):
    stages = {
        "thinker": ar_steps(THINKER, noise=0.05, parallel=parallel),
        "code2wav": vocoder_steps(VOCODER, parallel),
    }
    fit = fit_steps(stages, shared=True)
    assert fit.parallel_steps == pytest.approx(parallel, abs=0.101)
    assert fit.thinker.fixed_s == pytest.approx(THINKER.fixed_s, rel=0.1)


def test_few_steps_are_not_fitted():
    with pytest.raises(FitError, match="talker: 3 steps"):
        fit_steps({"talker": [Step(0.01, 1)] * 3})


# ---- records --------------------------------------------------------------------------------


def record(folder, stage: int, steps) -> None:
    lines = [
        json.dumps({"start_s": start, "end_s": end, "requests": len(tokens), "tokens": tokens})
        for start, end, tokens in steps
    ]
    (folder / f"stage{stage}.jsonl").write_text("\n".join([*lines, '{"sampled": {}}']) + "\n")


def test_a_record_tells_prompts_from_tokens_and_who_else_ran(tmp_path):
    record(
        tmp_path, 0,
        [(1.0, 1.1, {"a": 60}), (1.102, 1.13, {"a": 1, "b": 40}), (2.0, 2.02, {"a": 1, "b": 1})],
    )  # fmt: skip
    record(tmp_path, 2, [(1.101, 1.5, {"a": 29 * 16, "b": 4 * 16})])
    steps = read_record(tmp_path)
    first, second, third = steps["thinker"]
    assert (first.decodes, first.prefill_tokens, first.prefill_pairs) == (0, 60, 1800.0)
    assert first.seconds == pytest.approx(0.102)  # with the 2 ms before the next
    assert (second.decodes, second.context_tokens, second.prefill_tokens) == (1, 60, 40)
    assert second.seconds == pytest.approx(0.03)  # an idle pause follows: the usual 2 ms count
    assert (third.decodes, third.context_tokens) == (2, 61 + 40)
    assert [step.active for step in steps["thinker"]] == [1, 2, 1]
    (chunks,) = steps["code2wav"]
    assert (chunks.chunks, chunks.frames, chunks.active) == (2, 29, 1)


@pytest.mark.parametrize(
    "line",
    ["{", '{"start_s": 2.0, "end_s": 1.0, "tokens": {"a": 1}}', '{"start_s": 1.0}', "[]",
     '{"start_s": 1.0, "end_s": 2.0, "tokens": {"a": "x"}}'],
)  # fmt: skip
def test_a_damaged_record_is_named_by_file_and_line(tmp_path, line):
    (tmp_path / "stage1.jsonl").write_text('{"sampled": {}}\n' + line + "\n")
    with pytest.raises(FitError, match=r"stage1\.jsonl:2"):
        read_record(tmp_path)
    with pytest.raises(FitError, match="LIVESERVE_CPU_RECORD"):
        read_record(tmp_path / "elsewhere")


# ---- polls ----------------------------------------------------------------------------------


def polls(cost: StepCost, count: int = 60) -> list[dict]:
    """What a server with these costs answers, stage by stage."""
    draw = random.Random(3)
    steps = tokens = 0
    found = []
    for _ in range(count):
        batch = draw.randint(1, 8)
        steps += 10
        tokens += 10 * batch
        found.append(
            {
                "engines": [
                    {
                        "stage_id": stage,
                        "replica_id": 0,
                        "answered": True,
                        "snapshot": {
                            "stage": name,
                            "attached": True,
                            "steps_total": steps,
                            "tokens_total": tokens,
                            "step_ms": 1e3 * cost.seconds(batch, 0),
                            "kv_blocks_total": 40_000,
                            "kv_block_bytes": 16 * 90_000,
                        },
                    }
                    for stage, name in ((0, "thinker"), (1, "talker"))
                ]
            }
        )
    return found


def test_step_costs_come_out_of_a_servers_counters():
    fit = fit_steps(steps_of_polls(polls(THINKER)))
    assert fit.talker.fixed_s == pytest.approx(THINKER.fixed_s, rel=1e-6)
    assert fit.talker.per_request_s == pytest.approx(THINKER.per_request_s, rel=1e-6)


def test_an_idle_or_restarted_engine_says_nothing():
    idle = polls(THINKER, 2)[:1] * 5
    assert steps_of_polls(idle) == {}
    restarted = polls(THINKER, 9)[::-1]
    assert steps_of_polls(restarted) == {}
    silent = [{"engines": [{"stage_id": 0, "replica_id": 0, "answered": False}]}]
    assert steps_of_polls(silent) == {}


def test_a_snapshot_without_its_counts_is_an_error():
    broken = polls(THINKER, 3)
    del broken[2]["engines"][1]["snapshot"]["step_ms"]
    with pytest.raises(FitError, match="step_ms"):
        steps_of_polls(broken)


# ---- overheads, and the whole model ---------------------------------------------------------


def simulated_report(costs, config: SessionsConfig) -> SessionsReport:
    """A run of ``config`` on a server that is a simulation."""
    slow = config.slow_motion
    settings = SimConfig(ack_interval_s=0.2 * slow, max_gap_s=0.1 * slow, prefix_caching=False)
    workload = workload_of(config, PACE, costs)
    result = simulate(workload, in_slow_motion(costs, config), "liveserve", settings)

    class Report(SessionsReport):
        @property
        def metrics(self):
            return listener_metrics([(self.responses, self.sessions)], config)

    return Report(config, result.responses, result.sessions)


CONFIG = SessionsConfig(
    sessions=1, turns=4, answer_seconds=(5.0, 6.0), slow_motion=2.0, reply_gap=0.5
)


def test_overheads_are_those_that_first_text_and_first_audio_show():
    true = load_costs("qwen3-omni-h200", {"encode_s": 0.12, "handover_s": 0.04,
                                          "encode_token_s": 0.0})  # fmt: skip
    report = simulated_report(true, CONFIG)
    guess = msgspec.structs.replace(true, encode_s=0.5, handover_s=0.001)
    found = match_overheads(guess, report.metrics, CONFIG, PACE, "liveserve")
    assert found.encode_s == pytest.approx(0.12, rel=0.02)
    assert found.handover_s == pytest.approx(0.04, rel=0.05)


def test_a_fitted_model_behaves_like_the_server_it_was_fitted_to():
    """Counters and first audio of a simulated server; then more users than it was fitted with."""
    cost = StepCost(0.011, 0.0008)
    base = load_costs("qwen3-omni-h200")
    true = msgspec.structs.replace(
        base,
        talker=msgspec.structs.replace(base.talker, step=cost),
        thinker=msgspec.structs.replace(base.thinker, step=msgspec.structs.replace(
            base.thinker.step, fixed_s=cost.fixed_s, per_request_s=cost.per_request_s)),
        encode_s=0.15,
    )  # fmt: skip
    observed = Observed([simulated_report(true, CONFIG)], polls(cost))
    costs, _ = fitted(observed, base, "mine")
    assert costs.name == "mine"
    assert costs.talker.kv_blocks == 40_000
    assert costs.talker.kv_bytes_per_token == 90_000
    config = SessionsConfig(sessions=12, turns=3, answer_seconds=(6.0,), slow_motion=2.0)
    mine = simulated_metrics(costs, config, PACE, "stock")
    theirs = simulated_metrics(true, config, PACE, "stock")
    for figure in compare(theirs, mine):
        assert abs(figure.error) < 0.1, figure


def test_a_fitted_model_says_where_each_figure_is_from():
    base = load_costs("qwen3-omni-h200")
    observed = Observed([simulated_report(base, CONFIG)], polls(StepCost(0.011, 0.0008)))
    costs, _ = fitted(observed, base, "mine")
    assert costs.sources["talker.step.fixed_s"].startswith("fitted to 59 steps")
    assert costs.sources["link.gbps"].startswith("of the base: ")
    assert costs.sources["thinker.step.per_prefill_token_s"].startswith("of the base: ")
    assert spreads(costs)["talker.step.per_request_s"] == pytest.approx(1.05)
    assert costs.talker.step.per_prefill_token_s == base.talker.step.per_prefill_token_s
    # Fitting again, on this one, does not pile the words up.
    again, _ = fitted(observed, costs, "again")
    assert again.sources["link.gbps"] == costs.sources["link.gbps"]


def test_a_server_without_counters_is_told_so():
    base = load_costs("qwen3-omni-h200")
    with pytest.raises(FitError, match="thinker and talker"):
        fitted(Observed([simulated_report(base, CONFIG)]), base, "mine")


def test_answers_without_audio_cannot_be_matched():
    costs = load_costs("qwen3-omni-h200")
    with pytest.raises(ModelError, match="text_ttfp_p50_s"):
        match_overheads(costs, {"text_ttfp_p50_s": None}, CONFIG, PACE, "stock")
    with pytest.raises(ModelError, match="heard to its end"):
        pace_of([], 12.5)


# ---- the command ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--base", "gpt"], "gpt"),
        (["--turns", "0"], "--turns"),
        (["--slow-motion", "-1"], "--slow-motion"),
        (["--url", "http://127.0.0.1:9"], "no model server answers"),
    ],
)
def test_wrong_flags_are_named_and_nothing_is_written(tmp_path, capsys, flags, named):
    from liveserve import cli

    path = tmp_path / "costs.json"
    assert cli.main(["calibrate", str(path), *flags]) == 2
    assert named in capsys.readouterr().err
    assert not path.exists()


def test_users_are_numbers(capsys):
    from liveserve import cli

    with pytest.raises(SystemExit):
        cli.main(["calibrate", "costs.json", "--users", "1,none"])
    assert "1,2,4,8" in capsys.readouterr().err


def test_the_command_writes_a_model_that_loads(tmp_path, capsys, monkeypatch):
    from liveserve import cli

    base = load_costs("qwen3-omni-h200")

    async def observe(config, users):
        await asyncio.sleep(0)
        assert users == (1, 3)
        return Observed([simulated_report(base, CONFIG)], polls(StepCost(0.011, 0.0008)))

    monkeypatch.setattr(calibrate_server, "observe", observe)
    path = tmp_path / "costs.json"
    assert cli.main(["calibrate", str(path), "--users", "1,3"]) == 0
    assert load_costs(str(path)).name == "costs"
    assert "talker: fixed 11 ms, per request 0.8 ms" in capsys.readouterr().out
