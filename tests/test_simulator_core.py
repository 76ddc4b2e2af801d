"""The simulator: hand-made cases, conservation, determinism, and that it runs the shipped code."""

from __future__ import annotations

import ast
import json
import math
import random
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import liveserve.runtime
from liveserve.bench.records import COMPLETED, FAILED, INTERRUPTED
from liveserve.bench.result_file import validate_result
from liveserve.bench.simulator import command
from liveserve.bench.simulator.model import (
    CostModel,
    ModelError,
    Session,
    SimConfig,
    StageCost,
    StepCost,
    Turn,
    VocoderCost,
    Workload,
    system,
)
from liveserve.bench.simulator.simulate import (
    Job,
    metrics_of,
    run_world,
    simulate,
    simulate_all,
)
from liveserve.bench.simulator.world import World
from liveserve.cli import main
from liveserve.scheduler.plan import plan as shipped_plan

SIMULATOR = Path(command.__file__).parent

# Round figures, so that what happens can be worked out by hand.
HAND = CostModel(
    "hand",
    thinker=StageCost(StepCost(0.005, per_prefill_token_s=1e-4), max_requests=1),
    talker=StageCost(StepCost(0.01)),
    code2wav=VocoderCost(0.02, 0.001),
    talker_sees_prompt=False,
    handover_s=0.002,
    deliver_s=0.003,
    endpoint_s=0.2,
)
# A deployment whose talker is busy with eight sessions.
BUSY = CostModel(
    "busy",
    thinker=StageCost(StepCost(0.011, 3e-4, 1e-8, 2e-5, 1e-9), kv_blocks=4000),
    talker=StageCost(StepCost(0.012, 4e-3, 1e-8, 1e-5), kv_blocks=60_000),
    code2wav=VocoderCost(0.02, 0.0008),
)


def workload(
    sessions: int,
    *,
    turns: int = 2,
    seed: int = 1,
    p_barge_in: float = 0.3,
    concurrency: int | None = 8,
    answers=(2.0, 4.0, 8.0),
    prompt=(20, 150),
    **more,
) -> Workload:
    draw = random.Random(seed)
    users = []
    for index in range(sessions):
        asked = []
        for _ in range(turns):
            answer_s, spoken_over = draw.choice(answers), draw.random() < p_barge_in
            share = draw.uniform(0.1, 0.9)
            asked.append(
                Turn(
                    prompt_tokens=draw.randint(*prompt),
                    answer_tokens=max(1, int(3.3 * answer_s)),
                    answer_s=answer_s,
                    speech_s=draw.uniform(0.5, 3),
                    reply_gap_s=draw.uniform(0.2, 2),
                    barge_in_s=share * answer_s if spoken_over else None,
                )
            )
        users.append(Session(index, draw.uniform(0, 4), tuple(asked), **{"jitter_s": 0.01, **more}))
    return Workload("random", tuple(users), concurrency=concurrency)


def one_turn(arrival_s: float = 0.0, index: int = 0, **changes) -> Session:
    turn = Turn(prompt_tokens=100, answer_tokens=10, answer_s=0.8, speech_s=2.0)
    return Session(index, arrival_s, (msgspec.structs.replace(turn, **changes),))


# ---- by hand -----------------------------------------------------------------------------------


def test_one_turn_takes_what_its_steps_take():
    (answer,) = simulate(Workload("one", (one_turn(),)), HAND, "stock").responses
    asked_s = 2.0 + 0.02 + 0.2  # speech, network, endpoint
    text_s = asked_s + 0.005 + 100 * 1e-4
    assert answer.endpoint_s == pytest.approx(asked_s + 0.02)
    assert answer.first_text_s == pytest.approx(text_s + 0.003 + 0.02)
    # Four frames of 10 ms, a chunk of four through the vocoder, and out.
    first_s = text_s + 0.002 + 4 * 0.01 + 0.002 + (0.02 + 4 * 0.001) + 0.003 + 0.02
    assert answer.first_audio_s == pytest.approx(first_s)
    # The other six frames, with the first four as their left context.
    last_s = text_s + 0.002 + 10 * 0.01 + 0.002 + (0.02 + 10 * 0.001) + 0.003 + 0.02
    assert answer.last_audio_s == pytest.approx(last_s)
    assert answer.outcome == COMPLETED
    assert answer.heard_s == answer.routed_s == pytest.approx(0.8)
    assert answer.stopped_s == pytest.approx(first_s + 0.8)
    assert not answer.gaps


def test_stock_serves_first_come_first_served():
    users = Workload("three", tuple(one_turn(0.001 * index, index) for index in (0, 1, 2)))
    answers = simulate(users, HAND, "stock").responses
    prefill_s, decode_s = 0.005 + 100 * 1e-4, 0.005
    began_s = 2.22
    for answer in answers:  # one at a time in the thinker, in the order in which they came
        assert answer.first_text_s == pytest.approx(began_s + prefill_s + 0.023)
        began_s += prefill_s + 9 * decode_s


def test_two_decode_together_and_a_prefill_is_cut_to_the_step():
    costs = msgspec.structs.replace(
        HAND,
        thinker=StageCost(
            StepCost(0.005, per_request_s=0.001, per_prefill_token_s=1e-4), max_step_tokens=80
        ),
    )
    (answer,) = simulate(Workload("one", (one_turn(),)), costs, "stock").responses
    # 80 tokens, then 20.
    text_s = 2.22 + (0.005 + 80 * 1e-4) + (0.005 + 20 * 1e-4)
    assert answer.first_text_s == pytest.approx(text_s + 0.023)


def test_a_listener_hears_a_gap_when_the_next_chunk_is_late():
    slow = msgspec.structs.replace(HAND, talker=StageCost(StepCost(0.1)))
    users = Workload("one", (one_turn(answer_s=1.6, answer_tokens=10),))
    (answer,) = simulate(users, slow, "stock").responses
    # Four frames last 0.32 s; the next sixteen take 1.6 s to make.
    (gap,) = answer.gaps
    vocoder_s = 0.02 + 20 * 0.001 - (0.02 + 4 * 0.001)
    assert gap.duration_s == pytest.approx(1.6 + vocoder_s - 0.32)
    assert answer.stopped_s == pytest.approx(answer.first_audio_s + 1.6 + gap.duration_s)


def test_a_barge_in_stops_everything_and_the_history_is_cut():
    users = Workload(
        "one",
        (
            Session(
                0,
                0.0,
                (
                    Turn(117, 200, 60.0, speech_s=1.0, barge_in_s=3.0),
                    Turn(100, 10, 0.8, speech_s=1.0),
                ),
            ),
        ),
    )
    first, second = simulate(users, BUSY, "stock").responses
    assert first.outcome == INTERRUPTED
    (gap,) = first.gaps
    assert first.barge_in_s == pytest.approx(first.first_audio_s + gap.duration_s + 3.0)
    # Stock learns of it from its VAD, and the client from it.
    assert first.stopped_s == pytest.approx(first.barge_in_s + 0.02 + 0.1 + 0.02)
    assert first.heard_s == pytest.approx(3.14)
    assert second.outcome == COMPLETED
    world = run_world(users, BUSY, system("stock"), SimConfig(), 0)
    # 11 of 200 tokens were said in 3.14 of 60 s: two full blocks of 64 with the question.
    assert math.ceil(3.14 / 60 * 200) == 11
    assert world.users == {}
    assert world.thinkers[0].pool.hit_tokens == 128
    # The thinker computes what is not cached, the talker all that it is shown.
    assert world.prefilled == 117 + (117 + 11 + 100 - 128) + (16 + 117) + (16 + 228)


def test_text_only_answers_need_no_talker():
    users = Workload("one", (one_turn(answer_s=0.0),))
    world = run_world(users, HAND, system("liveserve"), SimConfig(), 0)
    (answer,) = world.records
    assert answer.outcome == COMPLETED
    assert answer.first_audio_s is None
    assert world.talkers[0].steps == 0


def test_a_closed_loop_starts_a_session_when_one_is_over():
    users = Workload("loop", tuple(one_turn(0.0, i) for i in range(3)), concurrency=1)
    ended_s = 0.0
    for session in simulate(users, HAND, "stock").sessions:
        assert session.start_s == pytest.approx(ended_s)
        ended_s = session.end_s


# ---- laws --------------------------------------------------------------------------------------

# Of a turn at most, hardly above what it takes; a policy that asks for more may have more.
STOCK_EVENTS, LIVE_EVENTS, LIVE_ROUNDS = 38, 115, 29
SYSTEMS = ("stock", "stock-no-offload", "liveserve", "liveserve-no-chunking-no-one-shot")


@settings(max_examples=12, deadline=None)
@given(seed=st.integers(0, 999), name=st.sampled_from(SYSTEMS), concurrency=st.integers(1, 12))
def test_time_tokens_blocks_and_bytes_are_conserved(seed, name, concurrency):
    # Pools so small that blocks are evicted, stored and loaded all the time.
    costs = msgspec.structs.replace(
        BUSY,
        thinker=msgspec.structs.replace(BUSY.thinker, kv_blocks=160, max_requests=6, replicas=2),
        dram_bytes=40 * 64 * BUSY.thinker.kv_bytes_per_token,
        max_answer_tokens=64,
        max_answer_frames=400,
    )
    users = workload(14, turns=3, seed=seed, concurrency=concurrency)
    world = run_world(users, costs, system(name), SimConfig(), seed)
    assert all(engine.runtime is None or not engine.runtime.errors for engine in world.engines)
    # Everybody was served, or left at the end of their own accord.
    assert len(world.sessions) == 14
    assert all(record.outcome in (COMPLETED, INTERRUPTED) for record in world.records)
    # Time.
    for engine in world.engines:
        assert not engine.busy
        assert not engine.sessions
        assert 0 <= engine.busy_s <= world.now_s
    for session in users.sessions:
        mine = [r for r in world.records if r.session == session.index]
        assert [r.turn for r in mine] == list(range(len(mine)))
        at_s = session.arrival_s
        for answer in mine:
            assert answer.speech_end_s >= at_s
            assert answer.endpoint_s > answer.speech_end_s
            assert answer.first_text_s > answer.endpoint_s  # nobody is served before they ask
            assert answer.first_audio_s > answer.first_text_s
            assert answer.stopped_s > answer.first_audio_s
            at_s = answer.barge_in_s or answer.stopped_s
            heard_for_s = answer.stopped_s - answer.first_audio_s
            silent_s = sum(gap.duration_s for gap in answer.gaps)
            # Who speaks over the very end may run dry before the server has noticed.
            heard_s = min(answer.routed_s, heard_for_s - silent_s)
            assert answer.heard_s == pytest.approx(heard_s, abs=1e-9)
    # Tokens and audio.
    whole = [r for r in world.records if r.outcome == COMPLETED]
    assert all(r.routed_s == r.heard_s == pytest.approx(r.planned_answer_s) for r in whole)
    frames = sum(talker.tokens for talker in world.talkers)
    made = sum(vocoder.frames_made for vocoder in world.vocoders)
    routed = sum(r.routed_s for r in world.records) * costs.frame_rate_hz
    assert frames >= made >= round(routed)
    planned = sum(t.answer_tokens for s in users.sessions for t in s.turns)
    asked = sum(t.prompt_tokens for s in users.sessions for t in s.turns)
    assert sum(thinker.tokens for thinker in world.thinkers) <= planned
    totals = world.tracker.totals
    assert totals.stages["talker"].made_tokens == frames
    assert totals.stages["thinker"].made_tokens == sum(t.tokens for t in world.thinkers)
    if len(world.records) == users.turns:
        assert world.prefilled >= asked
    check_pools(world)
    if name == "stock-no-offload":
        assert all(thinker.pool.to_dram.bytes_moved == 0 for thinker in world.thinkers)


def check_pools(world: World) -> None:
    """After the end nobody holds a block, and all bytes that were to be moved have been."""
    for talker in world.talkers:
        assert talker.pool.used == 0
        assert talker.pool.blocks_taken == talker.pool.blocks_given
    for thinker in world.thinkers:
        pool = thinker.pool
        pool.check()
        assert pool.used == 0
        assert pool.tier.in_flight == 0
        for link, blocks in (
            (pool.to_dram, pool.tier.totals.stored),
            (pool.to_gpu, pool.tier.totals.loaded),
        ):
            assert link.bytes_queued == link.bytes_moved == blocks * pool.block_bytes


@settings(max_examples=10, deadline=None)
@given(
    seed=st.integers(0, 999),
    name=st.sampled_from(
        ("stock", "liveserve", "liveserve-no-chunking", "liveserve-no-order", "liveserve-no-pace")
    ),
    concurrency=st.integers(1, 10),
    acks=st.booleans(),
)
def test_steps_advanced_together_end_as_step_by_step(seed, name, concurrency, acks):
    users = workload(8, seed=seed, concurrency=concurrency, acks=acks)
    together = simulate(users, BUSY, name, SimConfig(), seed)
    one_by_one = simulate(users, BUSY, name, SimConfig(step_by_step=True), seed)
    assert together.responses == one_by_one.responses
    assert together.sessions == one_by_one.sessions
    assert together.metrics["steps"] == one_by_one.metrics["steps"]
    assert together.metrics["stage_waste"] == one_by_one.metrics["stage_waste"]
    if name == "liveserve":
        assert together.metrics["rounds"] < 0.7 * one_by_one.metrics["rounds"]


def test_what_a_turn_costs_to_simulate():
    """How quick a run is, in what it does instead of in seconds."""
    users = workload(40, answers=(4.0, 8.0), concurrency=3, acks=True)
    names = ("stock", "liveserve")
    stock, ours = (run_world(users, BUSY, system(name), SimConfig(), 0) for name in names)
    assert stock.events < STOCK_EVENTS * len(stock.records)
    assert ours.events < LIVE_EVENTS * len(ours.records)
    assert sum(e.rounds for e in ours.engines) < LIVE_ROUNDS * len(ours.records)


def test_the_same_arguments_give_the_same_result_in_any_process():
    jobs = [Job(workload(10), BUSY, system(n), SimConfig(), 3) for n in ("stock", "liveserve")]
    here = simulate_all(jobs, 1, None, metrics_of)
    assert here == simulate_all(jobs, 1, None, metrics_of)
    assert here == simulate_all(jobs, 2, None, metrics_of)
    other = simulate(workload(10), BUSY, "stock", SimConfig(), 4)
    assert other.metrics["ttfp_p50_s"] != here[0]["ttfp_p50_s"]  # another seed's jitter


# ---- the shipped policies decide ---------------------------------------------------------------


def test_policies_are_imported_and_none_is_defined_here():
    shipped = {"scheduler", "kvtier", "runtime", "session", "kv_signals", "kv_preload"} | {
        "config",
        "events",
    }
    roots, defined = set(), set()
    for path in SIMULATOR.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module:
                parts = node.module.split(".")
                if parts[0] == "liveserve":
                    roots.add(".".join(parts[1:3]) if parts[1] in LINKED else parts[1])
            elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                defined.add(node.name)
    assert {
        "runtime",
        "session",
        "kv_signals",
        "scheduler.chunking",
        "scheduler.one_shot",
        "scheduler.reserve",
        "kvtier.policies",
        "kvtier.tier",
        "kvtier.slots",
        "kvtier.next_use",
        "kvtier.preload",
    } <= roots
    assert {root.split(".")[0] for root in roots} <= shipped | {"bench"}
    root = SIMULATOR.parents[1]
    policies = [
        root / "kvtier" / f"{name}.py" for name in ("policies", "next_use", "tier", "slots")
    ]
    theirs = {
        node.name
        for path in (*(root / "scheduler").glob("*.py"), *policies)
        for node in ast.parse(path.read_text()).body
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and node.name[0] != "_"
    }
    assert {"plan", "rank", "utility", "may_hold", "one_shot_batch", "Tier", "Lru"} <= theirs
    assert not theirs & defined


LINKED = ("scheduler", "kvtier", "bench")


def test_a_changed_policy_changes_the_result(monkeypatch):
    users = workload(16, p_barge_in=0.6, answers=(8.0,), concurrency=2)  # nothing is saturated
    paced = simulate(users, BUSY, "liveserve").metrics

    def never_hold(candidates, budgets, held, now_s, config, **more):
        config = msgspec.structs.replace(config, pace=False)
        return shipped_plan(candidates, budgets, held, now_s, config, **more)

    monkeypatch.setattr(liveserve.runtime, "plan", never_hold)
    free = simulate(users, BUSY, "liveserve").metrics
    assert free["generated_waste_fraction"] > 1.5 * paced["generated_waste_fraction"]


def test_the_vocoders_runtime_learns_what_a_step_costs():
    world = run_world(workload(6), BUSY, system("liveserve"), SimConfig(), 0)
    (vocoder,) = world.vocoders
    per_frame_s = vocoder.busy_s / vocoder.frames_made
    assert 0.1 * per_frame_s < vocoder.runtime.token_s < per_frame_s


@pytest.mark.parametrize("name", ["plan", "rank"])
def test_a_policy_that_fails_leaves_the_hosts_order(name, monkeypatch):
    def broken(*args, **kwargs):
        raise RuntimeError("no plan")

    monkeypatch.setattr(liveserve.runtime, name, broken)
    result = simulate(workload(6), BUSY, "liveserve")
    assert result.metrics["policy_errors"] > 0
    assert result.metrics["responses_failed"] == 0


def test_liveserve_wastes_less_and_has_fewer_gaps_where_the_talker_is_the_bottleneck():
    users = workload(48, turns=2, p_barge_in=0.5, answers=(6.0, 12.0), concurrency=16)
    stock, ours = (simulate(users, BUSY, name).metrics for name in ("stock", "liveserve"))
    assert ours["generated_waste_fraction"] < 0.7 * stock["generated_waste_fraction"]
    assert ours["continuity_fraction"] > stock["continuity_fraction"] + 0.3
    assert ours["ttfp_p50_s"] <= 1.05 * stock["ttfp_p50_s"]
    assert ours["lead_p50_s"] < 0.7 * stock["lead_p50_s"]


def test_at_low_load_liveserve_is_no_worse():
    users = workload(12, p_barge_in=0.0, concurrency=2)
    stock, ours = (simulate(users, BUSY, name).metrics for name in ("stock", "liveserve"))
    assert ours["ttfp_p50_s"] <= 1.03 * stock["ttfp_p50_s"]
    assert ours["completed_turns_per_s"] >= 0.99 * stock["completed_turns_per_s"]
    assert ours["continuity_fraction"] == 1.0


# ---- KV ----------------------------------------------------------------------------------------


def small_pools(**changes) -> CostModel:
    thinker = msgspec.structs.replace(BUSY.thinker, kv_blocks=200, max_requests=4)
    return msgspec.structs.replace(
        BUSY, thinker=thinker, max_answer_tokens=64, max_answer_frames=400, **changes
    )


def talkative() -> Workload:
    return workload(10, turns=4, p_barge_in=0.0, answers=(2.0,), prompt=(300, 500))


def test_offloaded_histories_come_back_instead_of_being_computed_again():
    costs = small_pools(link=msgspec.structs.replace(BUSY.link, gbps=2.0))
    offload = simulate(talkative(), costs, "stock").metrics
    none = simulate(talkative(), costs, "stock-no-offload").metrics
    assert offload["history_loaded_tokens"] > 0
    assert offload["reloads"] > 0
    assert offload["reload_p50_s"] > 0.01
    assert none["reloads"] == none["history_loaded_tokens"] == 0
    assert none["history_recomputed_tokens"] > 3 * offload["history_recomputed_tokens"]
    assert none["prefill_tokens"] > offload["prefill_tokens"]


@pytest.mark.parametrize("name", ["stock", "liveserve", "liveserve-no-preload"])
@pytest.mark.parametrize("gbps", [0.05, 2.0])
def test_blocks_that_are_loaded_are_in_one_pair_of_hands(name, gbps):
    costs = small_pools(link=msgspec.structs.replace(BUSY.link, gbps=gbps))
    users = workload(10, turns=4, p_barge_in=0.4, answers=(2.0,), prompt=(300, 500))
    world = run_world(users, costs, system(name), SimConfig(), 0)
    check_pools(world)
    assert world.thinkers[0].pool.tier.totals.loaded > 0
    assert all(record.outcome in (COMPLETED, INTERRUPTED) for record in world.records)


def test_preload_takes_reloads_off_the_first_token_path():
    costs = small_pools(link=msgspec.structs.replace(BUSY.link, gbps=2.0))
    ours = simulate(talkative(), costs, "liveserve").metrics
    without = simulate(talkative(), costs, "liveserve-no-preload").metrics
    assert ours["preloads"] > 0
    assert ours["reload_total_s"] < 0.7 * without["reload_total_s"]
    slow = small_pools(link=msgspec.structs.replace(BUSY.link, gbps=0.02))
    assert simulate(talkative(), slow, "liveserve").metrics["preloads_refused"] > 0


def test_a_shared_prefix_is_computed_once():
    users = workload(6, turns=1, prefix="system", prefix_tokens=640, concurrency=1)
    shared = simulate(users, BUSY, "stock").metrics
    assert shared["history_hit_tokens"] == 5 * 640
    off = simulate(users, BUSY, "stock", SimConfig(prefix_caching=False)).metrics
    assert off["history_hit_tokens"] == 0


def test_stock_preempts_where_the_pool_is_used_up_and_liveserve_does_not():
    costs = msgspec.structs.replace(
        BUSY,
        talker=msgspec.structs.replace(BUSY.talker, kv_blocks=80),
        talker_sees_prompt=False,
        max_answer_frames=300,
    )
    users = workload(16, turns=1, p_barge_in=0.0, answers=(16.0,))
    stock = simulate(users, costs, "stock").metrics
    ours = simulate(users, costs, "liveserve").metrics
    assert stock["preempted"] > 0
    assert ours["preempted"] == 0
    assert stock["responses_completed"] == ours["responses_completed"] == 16


def test_a_prompt_that_never_fits_fails_and_the_others_are_served():
    costs = small_pools()
    users = Workload("big", (one_turn(0.0, 0, prompt_tokens=50_000), one_turn(0.0, 1)))
    result = simulate(users, costs, "stock")
    assert sorted(r.outcome for r in result.responses) == [COMPLETED, FAILED]
    assert result.metrics["sessions_failed"] == 1
    assert any("does not fit" in error for error in result.metrics["errors"])


# ---- bad input, command ------------------------------------------------------------------------


def test_absurd_arguments_are_refused_with_the_field():
    with pytest.raises(ModelError, match="has no sessions"):
        simulate(Workload("none", ()), BUSY, "stock")
    with pytest.raises(ModelError, match=r"session 0, turn 0: answer_s must be .* finite"):
        simulate(Workload("nan", (one_turn(answer_s=math.nan),)), BUSY, "stock")
    with pytest.raises(ModelError, match="index is used twice"):
        simulate(Workload("twice", (one_turn(), one_turn())), BUSY, "stock")
    with pytest.raises(ModelError, match="encoder_tokens"):
        simulate(Workload("odd", (one_turn(encoder_tokens=101),)), BUSY, "stock")
    costs = msgspec.structs.replace(BUSY, talker=StageCost(StepCost(0.0)))
    with pytest.raises(ModelError, match=r"talker\.step\.fixed_s must be above 0"):
        simulate(Workload("one", (one_turn(),)), costs, "stock")
    with pytest.raises(ModelError, match="liveserve-no-SWITCH"):
        system("liveserve-no-brakes")


def test_a_run_that_is_cut_off_says_so():
    result = simulate(workload(4), BUSY, "stock", SimConfig(until_s=4.0))
    cut = [r for r in result.responses if r.outcome == FAILED]
    assert cut
    assert {r.error for r in cut} == {"the run was cut off"}


SMALL = ["--set", "sessions=6", "--set", "turns=2", "--set", "answer_tokens=12"]


def test_command_writes_a_result_and_plots(tmp_path, capsys):
    out = tmp_path / "result.json"
    argv = ["simulate", *SMALL, "--set", "p_barge_in=0.5", "--json", str(out)]
    assert main([*argv, "--plot", str(tmp_path / "plots"), "--workers", "1"]) == 0
    result = json.loads(out.read_text())
    validate_result(result)
    assert result["simulated"] is True
    assert [case["params"]["system"] for case in result["cases"]] == ["stock", "liveserve"]
    assert result["ratios"]["ttfp_p90_speedup"]["value"] > 0
    assert result["ratios"]["simulated_turns_per_min_liveserve"]["value"] > 0
    assert {p.name for p in (tmp_path / "plots").iterdir()} == {
        "ttfp.png",
        "timeline-stock.png",
        "timeline-liveserve.png",
    }
    printed = capsys.readouterr().out
    assert "turns/min" in printed
    assert f"{sum(case['metrics']['responses'] for case in result['cases'])} turns sim" in printed


@pytest.mark.parametrize(
    ("argv", "error"),
    [
        (["--workload", "nothing"], "workload 'nothing'"),
        (["--systems", "vllm"], "system 'vllm' is unknown"),
        (["--costs", "abacus"], "cost model 'abacus'"),
        (["--set", "sessions"], "write FIELD=VALUE"),
        (["--seeds", "0"], "--seeds must be 1 or more"),
        (["--max-gap-ms", "-1"], "max_gap_s"),
        (["--config", '{"stages": {"talker": {"p_safe_s": -1}}}'], "p_safe_s"),
    ],
)
def test_bad_arguments_get_one_line(argv, error, capsys):
    assert main(["simulate", *argv]) == 2
    said = capsys.readouterr().err.strip()
    assert error in said
    assert said.count("\n") == 0
