"""Eviction benchmark: sessions out of prompts, overlays that hide the future, replay, command."""

from __future__ import annotations

import json
from collections import Counter

import pytest

from liveserve.bench.eviction import (
    REPLAYED,
    SLICE,
    full_blocks,
    measure_cost,
    replay,
    replay_ratios,
)
from liveserve.bench.overlay import (
    OVERLAYS,
    Kind,
    VoiceModel,
    lay_over,
    of_long_sessions,
    sessions_of,
    with_blocks,
)
from liveserve.bench.result_file import validate_result
from liveserve.bench.traces import TraceError, TraceRequest, read_trace
from liveserve.cli import main
from liveserve.kvtier.next_use import NextUse
from liveserve.kvtier.optimal import Optimal
from liveserve.kvtier.policies import Lru, NextUsePolicy

REQUESTS = with_blocks(read_trace(SLICE))
CACHED = [full_blocks(request) for request in REQUESTS]
NUM_BLOCKS = 1 + max(block for blocks in CACHED for block in blocks)


def prompt(at_s: float, *blocks: int, output: int = 100) -> TraceRequest:
    return TraceRequest(at_s, 512 * len(blocks) - 1, output, blocks)


def test_a_session_goes_on_where_a_prompt_holds_an_earlier_one():
    requests = [
        prompt(0, 0, 1, 2, 3),
        prompt(1, 0, 10, 11),
        prompt(2, 0, 1, 2, 4, 5),  # the started block 3 filled up and is 4 now
        prompt(3, 0, 10, 12, 13),
        prompt(4, 0, 1, 20, 21),  # shares a prefix only: somebody else
        prompt(5, 0, 1, 2, 4, 6, 7),
        prompt(6, 0),
        prompt(7, 0),
    ]
    assert sessions_of(requests) == [0, 1, 0, 1, 2, 0, 3, 4]
    assert [r.at_s for r in of_long_sessions(requests, 3)] == [0, 2, 5]
    with pytest.raises(TraceError, match="no session of 4 turns"):
        of_long_sessions(requests, 4)


def test_histories_of_an_interaction_trace_grow_by_query_and_answer():
    requests = with_blocks(
        [
            TraceRequest(0.0, 600, 500, session="a"),
            TraceRequest(1.0, 10, 10, session="b"),
            TraceRequest(2.0, 30, 10, session="a", turn=1),
        ]
    )
    assert [r.blocks for r in requests] == [(0, 1), (2,), (0, 3, 4)]
    assert [r.input_tokens for r in requests] == [600, 10, 1130]
    assert full_blocks(requests[2]) == (0, 3)
    with pytest.raises(TraceError, match="neither sessions nor prompt blocks"):
        with_blocks([TraceRequest(0.0, 600, 500)])


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_an_overlay_has_every_turn_once_and_in_order(overlay):
    seen = lay_over(REQUESTS, overlay, VoiceModel(), seed=3)
    assert seen == lay_over(REQUESTS, overlay, VoiceModel(), seed=3)
    turns = [what for what in seen if what.kind is Kind.TURN]
    assert sorted(what.request for what in turns) == list(range(len(REQUESTS)))
    assert [what.at_s for what in seen] == sorted(what.at_s for what in seen)
    sessions = sessions_of(REQUESTS)
    last: dict[int, int] = {}
    for what in turns:
        assert what.session == sessions[what.request]
        assert what.request > last.get(what.session, -1)
        last[what.session] = what.request
    if overlay != "voice":
        assert all(what.at_s == pytest.approx(REQUESTS[what.request].at_s) for what in turns)
    if overlay == "none":
        assert len(seen) == len(turns)


def test_voice_turns_follow_playback_gap_and_utterance():
    seen = lay_over(REQUESTS, "voice", VoiceModel(), seed=3)
    told: dict[int, list] = {}
    for what in seen:
        told.setdefault(what.session, []).append(what)
    longest = max(told.values(), key=len)
    kinds = [what.kind for what in longest if what.kind is not Kind.CLOSE]
    assert kinds == [Kind.SPEECH, Kind.TURN, Kind.PLAYING] * (len(kinds) // 3)
    for before, after in zip(longest[2::3], longest[3::3], strict=False):
        assert after.at_s >= before.ends_s  # nobody speaks over the answer


def test_barge_ins_cut_answers_short():
    model = VoiceModel(barge_in_fraction=1.0)
    ends: dict[int, float] = {}
    cut = whole = 0
    for what in lay_over(REQUESTS, "voice", model, seed=3):
        if what.kind is Kind.PLAYING:
            ends[what.session] = what.ends_s
        elif what.kind is Kind.SPEECH and what.session in ends:
            cut += what.at_s < ends[what.session]
            whole += what.at_s >= ends[what.session]
    assert cut > 20 * max(1, whole)


@pytest.mark.parametrize("overlay", ["voice", "fitted"])
def test_playback_does_not_tell_which_turn_is_the_last(overlay):
    """The policy sees nothing before the end of playback that differs for last turns."""
    seen = lay_over(REQUESTS, overlay, VoiceModel(), seed=3)
    is_last, lengths = {}, {True: [], False: []}
    for what in seen:
        if what.kind is Kind.TURN:
            is_last[what.session] = what.is_last
        elif what.kind is Kind.PLAYING:
            lengths[is_last[what.session]].append(what.ends_s - what.at_s)
    means = {last: sum(values) / len(values) for last, values in lengths.items()}
    assert means[True] == pytest.approx(means[False], rel=0.15)


def test_hanging_up_is_seen_only_after_the_answer_and_by_its_share():
    for share in (0.0, 1.0):
        seen = lay_over(REQUESTS, "voice", VoiceModel(hangup_fraction=share), seed=3)
        ends: dict[int, float] = {}
        closed = 0
        for what in seen:
            if what.kind is Kind.PLAYING:
                ends[what.session] = what.ends_s
            elif what.kind is Kind.CLOSE:
                assert what.at_s >= ends[what.session]
                closed += 1
        assert closed == share * len(set(sessions_of(REQUESTS)))


def run_policy(overlay: str, policy, estimator: NextUse, capacity: int = 160):
    seen = lay_over(REQUESTS, overlay, VoiceModel(), seed=1)
    return replay(CACHED, seen, policy, estimator, capacity)


def test_replay_without_signals_is_lru_victim_by_victim():
    estimator = NextUse(10_000)
    ours = run_policy("none", NextUsePolicy(NUM_BLOCKS, estimator), estimator)
    lru = run_policy("none", Lru(NUM_BLOCKS), NextUse())
    assert len(lru.victims) > 5000
    assert ours == lru


def test_replay_with_signals_lies_between_lru_and_the_optimum():
    seen = lay_over(REQUESTS, "voice", VoiceModel(), seed=1)
    turns = [CACHED[what.request][:160] for what in seen if what.kind is Kind.TURN]
    estimator = NextUse(10_000)
    ours = run_policy("voice", NextUsePolicy(NUM_BLOCKS, estimator), estimator)
    lru = run_policy("voice", Lru(NUM_BLOCKS), NextUse())
    best = run_policy("voice", Optimal(NUM_BLOCKS, turns), NextUse())
    assert lru.blocks == ours.blocks == best.blocks
    assert lru.hits < ours.hits < best.hits
    closed = (ours.hits - lru.hits) / (best.hits - lru.hits)
    assert closed > 0.3
    assert sum(ours.reload_s) < sum(lru.reload_s)


def test_replay_counts_hits_and_what_must_come_back_over_the_link():
    cached = [(0, 1, 2), (5, 6, 7), (0, 1, 2, 3)]
    requests = [prompt(10.0 * n, *blocks, 90 + n) for n, blocks in enumerate(cached)]
    seen = lay_over(requests, "none", VoiceModel(), seed=1)
    sessions = [what.session for what in seen]
    assert sessions == [0, 1, 0]
    result = replay(cached, seen, Lru(8), NextUse(), 4, link_gbps=50.331648)
    assert result.victims == [2, 1, 7, 6, 5]
    assert (result.hits, result.blocks) == (1, 10)
    assert result.reload_s == pytest.approx([0.002])  # 1 and 2 were computed before; 3 is new
    assert replay(cached, seen, Lru(8), NextUse(), 4, from_s=15.0).blocks == 4


def test_prompts_larger_than_the_memory_are_cut():
    cached = [tuple(range(10)), tuple(range(10))]
    requests = [prompt(float(n), *range(10), 90 + n) for n in range(2)]
    seen = lay_over(requests, "none", VoiceModel(), seed=1)
    result = replay(cached, seen, Lru(10), NextUse(), 4)
    assert (result.hits, result.blocks, result.victims) == (4, 20, [])


@pytest.mark.parametrize("name", ["lru", "scan", "scan-numpy", "block-heap", "next-use"])
def test_costs_are_measured_for_every_policy(name):
    metrics = measure_cost(name, 600, turns=10, seed=1)
    assert all(value > 0 for value in metrics.values())
    assert metrics["decision_us_per_block"] <= metrics["cycle_us_per_block"]
    assert metrics["decision_p50_ms"] <= metrics["decision_p90_ms"]


def test_gap_closed_is_over_memory_sizes():
    def case(overlay: str, policy: str, closed: float | None) -> dict:
        params = {"overlay": overlay, "policy": policy}
        return {"params": params, "metrics": {"gap_closed_fraction": closed}}

    cases = [
        case("voice", "next-use", 0.5),
        case("voice", "next-use", 0.7),
        case("voice", "next-use", None),
        case("voice", "lru", 0.0),
        case("typed", "next-use", 0.2),
    ]
    ratios = replay_ratios(cases)
    assert ratios.keys() == {"gap_closed_fraction", "gap_closed_fraction_typed"}
    closed = ratios["gap_closed_fraction"]
    assert (closed["value"], closed["low"], closed["high"]) == (pytest.approx(0.6), 0.5, 0.7)


def test_the_command_writes_a_result_and_plots(tmp_path, capsys):
    out = tmp_path / "result.json"
    command = [
        "bench", "eviction", "--blocks", "600", "--turns", "10", "--memory-gib", "4",
        "--overlays", "voice", "none", "--json", str(out), "--plots", str(tmp_path / "plots"),
    ]  # fmt: skip
    assert main(command) == 0
    result = json.loads(out.read_text())
    validate_result(result)
    assert {
        "index_us_per_block", "index_p90_ms", "index_scan_speedup", "gap_closed_fraction",
    } <= result["ratios"].keys()  # fmt: skip
    parts = Counter(case["params"]["part"] for case in result["cases"])
    assert parts == {"cost": 5, "replay": 2 * len(REPLAYED)}
    replays = [c for c in result["cases"] if c["params"]["part"] == "replay"]
    by = {(c["params"]["overlay"], c["params"]["policy"]): c["metrics"] for c in replays}
    assert by["none", "next-use"]["victims_as_lru"]
    assert not by["voice", "next-use"]["victims_as_lru"]
    for overlay in ("voice", "none"):
        hits = {policy: by[overlay, policy]["hit_fraction"] for policy in REPLAYED}
        assert max(hits.values()) == hits["optimal"]
        assert by[overlay, "optimal"]["gap_closed_fraction"] == 1.0
        assert by[overlay, "lru"]["gap_closed_fraction"] == 0.0
    names = {path.name for path in (tmp_path / "plots").iterdir()}
    assert names == {"cost.png", "replay-voice.png", "replay-none.png"}
    assert "gap_closed_fraction = " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--preset", "full"], "--trace FILE"),
        (["--trace", "/nonexistent"], "/nonexistent: cannot be read"),
        (["--blocks", "10"], "--blocks"),
        (["--memory-gib", "-1"], "--memory-gib"),
        (["--memory-gib", "nan"], "--memory-gib"),
        (["--memory-gib", "0.01"], "one block takes 0.047 GiB"),
        (["--link-gbps", "0"], "--link-gbps"),
        (["--barge-in", "1.5"], "--barge-in"),
        (["--hangup", "nan"], "--hangup"),
        (["--turns", "1"], "--turns"),
        (["--min-turns", "1000"], "no session of 1000 turns"),
        (["--only", "replay", "--trace-format", "azure"], "header: expected TIMESTAMP"),
    ],
)
def test_bad_options_are_one_line(options, message, capsys):
    extra = [] if "--only" in options else ["--only", "replay"]
    if "--blocks" in options or "--turns" in options:
        extra = ["--only", "cost"]
    assert main(["bench", "eviction", *options, *extra]) == 2
    captured = capsys.readouterr()
    assert message in captured.err.splitlines()[-1]
    assert captured.out == ""
