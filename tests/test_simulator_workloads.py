"""The simulator's users: as their spec says, the same for a seed, nothing absurd gets through."""

from __future__ import annotations

import json
import statistics

import msgspec
import numpy as np
import pytest

from liveserve.bench.eviction import SLICE
from liveserve.bench.simulator.model import ModelError, Turn
from liveserve.bench.simulator.workloads import (
    PRESETS,
    WorkloadSpec,
    build,
    spec_of,
    write_trace,
)
from liveserve.bench.traces import TraceError, read_trace

INTERACTION = {
    "session_id": "a", "timestamp": 10.0, "turn": 0, "query_length": 20, "response_length": 64,
    "gap": None,
}  # fmt: skip
MOONCAKE = {"timestamp": 3000, "input_length": 700, "output_length": 32, "hash_ids": [0, 1]}


def turns(spec: WorkloadSpec) -> list[Turn]:
    return [turn for session in build(spec).sessions for turn in session.turns]


def of(name: str, **changes) -> WorkloadSpec:
    return msgspec.structs.replace(PRESETS[name], **changes)


@pytest.fixture
def file(tmp_path):
    def write(*lines: object, name: str = "trace.jsonl"):
        path = tmp_path / name
        text = "\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines)
        path.write_text(text + "\n")
        return str(path)

    return write


# ---- drawn ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PRESETS)
def test_the_same_seed_gives_the_same_users_and_another_seed_others(name):
    assert build(PRESETS[name]) == build(PRESETS[name])
    assert build(PRESETS[name]).sessions != build(of(name, seed=1)).sessions


def test_more_sessions_leave_the_first_as_they_were():
    few, many = (build(of("interaction", sessions=n)).sessions for n in (20, 40))
    by_index = {session.index: session.turns for session in many}
    assert all(by_index[session.index] == session.turns for session in few)


def test_sharegpt_lengths_have_the_published_means():
    """Means of the distribution before the cut are 161 and 338; cutting the tails lowers both."""
    spec = of("sharegpt", sessions=6000, asked="typed")
    asked = [turn.prompt_tokens - 16 for turn in turns(spec)]
    answered = [turn.answer_tokens for turn in turns(spec)]
    assert statistics.mean(asked) == pytest.approx(115, rel=0.08)
    assert statistics.mean(answered) == pytest.approx(303, rel=0.05)
    assert statistics.median(asked) == pytest.approx(45, rel=0.1)
    assert min(asked) >= 4
    assert max(asked) <= 1024
    assert max(a + b for a, b in zip(asked, answered, strict=True)) <= 2048
    assert all(turn.speech_s == 0 and turn.encoder_tokens == 0 for turn in turns(spec))


def test_answers_last_as_long_as_their_text_takes_to_say():
    english, chinese = turns(of("sharegpt")), turns(of("sharegpt", zh_fraction=1.0))
    assert all(t.answer_s == pytest.approx(t.answer_tokens / 3.2) for t in english)
    assert all(t.answer_s == pytest.approx(t.answer_tokens / 2.9) for t in chinese)
    assert [t.answer_tokens for t in english] == [t.answer_tokens for t in chinese]


def test_interaction_has_the_turns_answers_and_gaps_asked_for():
    spec = of("interaction", sessions=1500, turns=3.0, answer_tokens=50.0, gap_session_sigma=0.0)
    drawn = turns(spec)
    assert len(drawn) / 1500 == pytest.approx(3.0, rel=0.06)
    assert statistics.mean(t.answer_tokens for t in drawn) == pytest.approx(50, rel=0.05)
    assert statistics.median(t.reply_gap_s for t in drawn) == pytest.approx(2.0, rel=0.06)
    assert np.std(np.log([t.reply_gap_s for t in drawn])) == pytest.approx(0.5, rel=0.06)
    assert all(t.prompt_tokens == 16 + t.encoder_tokens for t in drawn)


def test_users_differ_in_how_quick_they_are():
    spec = of("interaction", sessions=300, turns=8.0, gap_sigma=0.1)
    medians = [
        statistics.median(turn.reply_gap_s for turn in session.turns)
        for session in build(spec).sessions
    ]
    assert np.std(np.log(medians)) == pytest.approx(0.6, rel=0.15)


def test_a_chance_of_barge_in_changes_nothing_else():
    never, often = turns(of("interaction", sessions=400)), turns(of("barge-in", sessions=400))
    assert [msgspec.structs.replace(t, barge_in_s=None) for t in often] == never
    barged = [t.barge_in_s / t.answer_s for t in often if t.barge_in_s is not None]
    assert len(barged) / len(often) == pytest.approx(0.5, abs=0.04)
    assert 0.1 <= min(barged) < 0.13
    assert 0.87 < max(barged) <= 0.9
    assert all(t.barge_in_s is not None for t in turns(of("barge-in", p_barge_in=1.0)))


def test_last_answers_are_spoken_over_as_often_as_others():
    last = [s.turns[-1].barge_in_s for s in build(of("barge-in", sessions=800)).sessions]
    assert sum(value is not None for value in last) / 800 == pytest.approx(0.5, abs=0.05)


def test_video_adds_encoder_tokens_to_a_share_of_turns():
    plain, video = turns(of("interaction")), turns(of("video", video_fraction=0.3))
    extra = [v.encoder_tokens - p.encoder_tokens for v, p in zip(video, plain, strict=True)]
    shown = [tokens for tokens in extra if tokens]
    assert len(shown) / len(extra) == pytest.approx(0.3, abs=0.07)
    assert statistics.median(shown) == pytest.approx(980, rel=0.15)


def test_long_answers_are_a_minute_or_two():
    assert all(59.8 <= turn.answer_s <= 120.2 for turn in turns(of("long", sessions=200)))


def test_the_longest_answer_can_be_limited():
    limited = turns(of("long", max_answer_tokens=96))
    assert {turn.answer_tokens for turn in limited} == {96}


def test_closed_loop_starts_as_many_users_as_asked_and_queues_the_others():
    workload = build(of("interaction", sessions=30, concurrency=4, ramp_s=3.0))
    assert workload.concurrency == 4
    arrivals = [session.arrival_s for session in workload.sessions]
    assert arrivals == sorted(arrivals)
    assert all(arrival < 3.0 for arrival in arrivals[:4])
    assert set(arrivals[4:]) == {3.0}


@pytest.mark.parametrize(("arrivals", "variation"), [("poisson", 1.0), ("burst", 2.0)])
def test_open_arrivals_have_their_rate_and_burstiness(arrivals, variation):
    spec = of("sharegpt", sessions=6000, arrivals=arrivals, rate=5.0)
    workload = build(spec)
    gaps = np.diff([session.arrival_s for session in workload.sessions])
    assert workload.concurrency is None
    assert gaps.mean() == pytest.approx(0.2, rel=0.08)
    assert gaps.std() / gaps.mean() == pytest.approx(variation, rel=0.12)


def test_clients_have_the_properties_asked_for():
    spec = of(
        "interaction", sessions=500, ack_fraction=0.5, hangup_fraction=0.25, jitter_s=0.01,
        network_delay_s=0.05, playback_rate=0.5, prefix_tokens=300,
    )  # fmt: skip
    sessions = build(spec).sessions
    assert sum(s.acks for s in sessions) / 500 == pytest.approx(0.5, abs=0.07)
    assert sum(s.hangs_up for s in sessions) / 500 == pytest.approx(0.25, abs=0.06)
    first = sessions[0]
    assert (first.jitter_s, first.network_delay_s, first.playback_rate) == (0.01, 0.05, 0.5)
    assert {(s.prefix, s.prefix_tokens) for s in sessions} == {("system", 300)}


# ---- traces ---------------------------------------------------------------------------------


def test_an_interaction_trace_keeps_its_turns_lengths_and_gaps(file):
    path = file(
        INTERACTION,
        INTERACTION | {"session_id": "b", "timestamp": 35.0, "response_length": 0},
        INTERACTION | {"turn": 1, "timestamp": 40.5, "gap": 2.25, "query_length": 7},
    )
    a, b = build(spec_of(path)).sessions
    assert [t.prompt_tokens for t in a.turns] == [20, 7]
    assert [t.answer_tokens for t in a.turns] == [64, 64]
    assert (a.turns[0].answer_s, a.turns[0].reply_gap_s) == (20.0, 2.25)
    assert b.arrival_s == pytest.approx(25.0 - b.turns[0].speech_s)
    assert b.turns[0].answer_tokens == 1
    assert a.turns[1].not_before_s is None


def test_a_trace_can_set_the_time_of_every_turn(file):
    path = file(INTERACTION, INTERACTION | {"turn": 1, "timestamp": 40.0, "gap": 2.0})
    (session,) = build(spec_of(path, trace_times="trace", speed="2")).sessions
    second = session.turns[1]
    assert second.not_before_s + second.speech_s == pytest.approx(15.0)
    assert session.turns[0].reply_gap_s == 0.0


def test_a_mooncake_turn_brings_what_is_new_in_its_prompt(file):
    path = file(
        MOONCAKE | {"input_length": 1500, "hash_ids": [0, 1, 2]},
        MOONCAKE | {"timestamp": 4000, "input_length": 1200, "hash_ids": [0, 8, 9]},
        MOONCAKE | {"timestamp": 9000, "input_length": 1700, "hash_ids": [0, 1, 5, 6]},
    )
    first, second = build(spec_of(path)).sessions
    # Both begin with block 0 and nothing else: 512 tokens of a shared prefix.
    assert (first.prefix, first.prefix_tokens) == ("block-0", 512) == (
        second.prefix, second.prefix_tokens,
    )  # fmt: skip
    assert [t.prompt_tokens for t in first.turns] == [1500 - 512, 1700 - 1500 - 32]
    assert [t.prompt_tokens for t in second.turns] == [1200 - 512]


def test_prompts_of_a_mooncake_session_add_up_to_the_trace():
    workload = build(spec_of(str(SLICE)))
    requests = read_trace(SLICE)
    assert workload.turns == len(requests)
    outputs = sum(max(1, request.output_tokens) for request in requests)
    assert sum(turn.answer_tokens for s in workload.sessions for turn in s.turns) == outputs


def test_an_azure_trace_is_one_session_a_request(file):
    path = file(
        "TIMESTAMP,ContextTokens,GeneratedTokens",
        "2023-11-16 18:15:46.6805900,374,44",
        "2023-11-16 18:15:56.6805900,396,109",
        name="azure.csv",
    )
    workload = build(spec_of(path, asked="typed"))
    assert [s.arrival_s for s in workload.sessions] == [0.0, pytest.approx(10.0)]
    assert [s.turns[0].prompt_tokens for s in workload.sessions] == [374, 396]
    assert workload.turns == 2
    assert workload.concurrency is None


def test_a_trace_can_be_cut_and_come_as_a_closed_loop(file):
    path = file(*(INTERACTION | {"session_id": i, "timestamp": 10.0 + i} for i in range(9)))
    workload = build(spec_of(path, sessions="5", arrivals="closed", concurrency="2"))
    assert len(workload.sessions) == 5
    assert workload.concurrency == 2


def test_what_is_written_as_a_trace_reads_back(tmp_path):
    written = build(of("interaction", sessions=12, arrivals="poisson", rate=0.2))
    path = tmp_path / "out.jsonl"
    assert write_trace(written, path) == written.turns
    read = build(spec_of(str(path)))
    assert len(read.sessions) == 12
    for session in read.sessions:
        (same,) = [s for s in written.sessions if len(s.turns) == len(session.turns)
                   and s.turns[0].answer_tokens == session.turns[0].answer_tokens]  # fmt: skip
        assert [t.prompt_tokens for t in session.turns] == [t.prompt_tokens for t in same.turns]
        assert [t.reply_gap_s for t in session.turns[:-1]] == [
            t.reply_gap_s for t in same.turns[:-1]
        ]


# ---- what is refused ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lines", "named"),
    [
        ([INTERACTION, INTERACTION | {"turn": -1}], ":2: turn"),
        ([INTERACTION | {"query_length": 0}], ":1: query_length"),
        ([INTERACTION | {"gap": -2.0}], ":1: gap"),
        ([INTERACTION, INTERACTION | {"session_id": "b", "timestamp": 1.0}], ":2: timestamp"),
        ([MOONCAKE | {"output_length": 1e99}], ":1: output_length"),
        ([MOONCAKE, '{"timestamp": 3000, "input_length": 7'], ":2: "),
        ([{"what": 1}], ":1: "),
        ([""], "is empty"),
    ],
)
def test_a_damaged_trace_is_named_by_file_line_and_field(file, lines, named):
    path = file(*lines)
    with pytest.raises(TraceError) as caught:
        build(spec_of(path))
    assert str(caught.value).startswith(path)
    assert named in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"p_barge_in": 1.5}, "p_barge_in"),
        ({"p_barge_in": "often"}, "p_barge_in"),
        ({"rate": 0}, "rate"),
        ({"sessions": 0}, "sessions"),
        ({"concurrency": -1}, "concurrency"),
        ({"gap_s": float("inf")}, "gap_s"),
        ({"answer_tokens": float("nan")}, "answer_tokens"),
        ({"barge_in_between": (0.9, 0.1)}, "barge_in_between"),
        ({"arrivals": "sometimes"}, "arrivals"),
        ({"asked": "sung"}, "asked"),
        ({"trace": "x.jsonl"}, "trace"),
        ({"colour": "red"}, "colour"),
    ],
)
def test_an_absurd_setting_is_named(changes, named):
    with pytest.raises(ModelError, match=named):
        spec_of("interaction", **changes)


def test_a_spec_that_was_made_in_code_is_checked_as_well():
    with pytest.raises(ModelError, match="p_barge_in"):
        build(WorkloadSpec(kind="sharegpt", p_barge_in=2.0))


def test_a_spec_can_be_a_file(tmp_path):
    path = tmp_path / "mine.json"
    path.write_text('{"kind": "video", "sessions": 3, "video_fraction": 1.0}')
    assert spec_of(str(path), seed=4) == WorkloadSpec(
        kind="video", sessions=3, video_fraction=1.0, seed=4
    )
    path.write_text("[1]")
    with pytest.raises(ModelError, match=r"mine\.json"):
        spec_of(str(path))
    with pytest.raises(ModelError, match="sharegpt"):
        spec_of("no-such-workload")
