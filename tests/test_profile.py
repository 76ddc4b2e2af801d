"""The reload critical path: marks of engines and API process, put together turn by turn."""

from __future__ import annotations

import asyncio
import itertools
import json

import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from liveserve.bench import profile as command
from liveserve.bench.result_file import validate_result
from liveserve.cli import main
from liveserve.events import Event, EventKind, StageMarks, decode_reply, encode
from liveserve.profile import TO_AUDIO, TO_TEXT, StageProfile, TurnProfiler, as_json

SESSION = "s"
REQUEST = "duplex-s.cw.e.0.r.stage0-turn1"


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def stage(now_s: float = 100.0) -> tuple[StageProfile, Clock]:
    clock = Clock()
    clock.now_s = now_s
    profile = StageProfile(clock, max_requests=4)
    profile.switch(True)
    return profile, clock


def test_only_first_times_count_and_only_changes_are_told():
    profile, clock = stage()
    profile.scheduled(["a"])
    clock.now_s = 101.0
    profile.scheduled(["a", "b"])
    profile.made(["a", "unknown"])
    clock.now_s = 102.0
    profile.made(["a"])
    profile.sent("a")
    profile.sent("unknown")
    assert profile.take() == [
        StageMarks("a", scheduled_s=100.0, made_s=101.0, sent_s=102.0),
        StageMarks("b", scheduled_s=101.0),
    ]
    assert profile.take() == []
    profile.made(["b"])
    assert profile.take() == [StageMarks("b", scheduled_s=101.0, made_s=102.0)]


def test_marks_of_another_machine_are_told_on_the_other_clock():
    profile, _ = stage(100.0)
    profile.looked("a", 0.5, waits=False)
    profile.scheduled(["a"])
    assert profile.take(30.0) == [StageMarks("a", scheduled_s=70.0, match_s=0.5)]


def test_a_load_counts_until_it_is_scheduled():
    profile, clock = stage()
    profile.looked("a", 0.125, waits=True)
    clock.now_s = 101.0
    profile.looked("a", 0.125, waits=True)
    profile.looked("a", 0.25, waits=False)
    clock.now_s = 102.0
    profile.scheduled(["a"])
    profile.looked("a", 9.0, waits=False)  # preempted
    assert profile.take() == [StageMarks("a", 102.0, loading_s=100.0, loaded_s=101.0, match_s=0.5)]


def test_an_engine_remembers_few_requests_and_none_once_it_is_off():
    profile, _ = stage()
    profile.scheduled(map(str, range(10)))
    assert [m.request_id for m in profile.take()] == ["6", "7", "8", "9"]
    profile.made(["9"])
    profile.switch(False)
    assert profile.take() == []


def profiler() -> tuple[TurnProfiler, Clock]:
    clock = Clock()
    made = TurnProfiler(clock, max_turns=8)
    made.ask(1000.0)
    return made, clock


def event(kind: EventKind, at_s: float, session: str = SESSION, **fields: str) -> Event:
    return Event(kind, session, at_s, **fields)


def answer(
    turns: TurnProfiler,
    clock: Clock,
    at_s: list[float],
    *,
    session: str = SESSION,
    suffix: str = "",
) -> None:
    """A turn whose marks are ``at_s``: speech end, submitted, scheduled, token, text, codec chunk,
    audio made, audio sent."""
    ended, submitted, scheduled, token, text, codec, made, sent = at_s
    request = REQUEST + suffix
    turns.heard(event(EventKind.SPEECH_STOPPED, ended, session))
    turns.heard(event(EventKind.COMMITTED, ended, session))
    clock.now_s = submitted
    turns.submitted(session, request)
    turns.heard(event(EventKind.RESPONSE_CREATED, token, session, response_id="r"))
    clock.now_s = text
    turns.text_sent(session)
    turns.marked("thinker", [StageMarks(request + "-1a2b", scheduled, token)])
    turns.marked("talker", [StageMarks(request, token, codec, codec)])
    clock.now_s = sent
    turns.heard(event(EventKind.AUDIO_ROUTED, sent, session, response_id="r"))
    turns.marked("code2wav", [StageMarks(request, codec, made)])


@given(st.lists(st.floats(0, 10), min_size=7, max_size=7))
def test_parts_add_up_to_the_whole(steps):
    times = [100.0]
    for step in steps:
        times.append(times[-1] + step)
    ended, submitted, scheduled, token, codec, made, sent, _ = times
    text = token + steps[-1] / 100
    turns, clock = profiler()
    answer(turns, clock, [ended, submitted, scheduled, token, text, codec, made, sent])
    (turn,) = turns.turns(0)
    assert set(turn.parts) == {*TO_AUDIO, *TO_TEXT}
    assert sum(turn.parts[part] for part in TO_AUDIO) == pytest.approx(sent - ended)
    assert sum(turn.parts[part] for part in TO_TEXT) == pytest.approx(text - ended)
    assert turn.to_audio_s == sent - ended
    assert turn.to_text_s == text - ended
    assert turn.outcome == "spoken"


def test_match_and_load_are_taken_out_of_the_queue():
    turns, clock = profiler()
    turns.heard(event(EventKind.COMMITTED, 100.0))
    clock.now_s = 100.5
    turns.submitted(SESSION, REQUEST)
    turns.heard(event(EventKind.RESPONSE_CREATED, 101.0, response_id="r"))
    marks = StageMarks(REQUEST, 102.0, 103.0, loading_s=100.75, loaded_s=101.75, match_s=0.125)
    turns.marked("thinker", [marks])
    clock.now_s = 104.0
    turns.text_sent(SESSION)
    turns.heard(event(EventKind.RESPONSE_DONE, 105.0, response_id="r", detail="completed"))
    (turn,) = turns.turns(0)
    assert turn.parts == {
        "encode": 0.5, "queue": 0.375, "match": 0.125, "load": 1.0, "prefill": 1.0,
        "text_route": 1.0,
    }  # fmt: skip
    assert turn.to_audio_s is None


def test_marks_find_their_turn_though_others_have_similar_names():
    turns, clock = profiler()
    for number in (1, 11):
        session = f"s{number}"
        turns.heard(event(EventKind.COMMITTED, 100.0, session))
        turns.submitted(session, f"request-turn{number}")
    turns.marked("thinker", [StageMarks("request-turn11-ab", 101.0, 102.0)])
    clock.now_s += 10
    for number in (1, 11):
        turns.heard(event(EventKind.CLOSED, 110.0, f"s{number}"))
    clock.now_s += 10
    found = {turn.session_id: turn for turn in turns.turns(0)}
    assert not found["s1"].stages
    assert not found["s1"].parts
    assert found["s11"].parts["prefill"] == 1.0


def test_late_news_of_the_answer_before_does_not_end_a_turn():
    turns, _ = profiler()
    turns.heard(event(EventKind.COMMITTED, 100.0))
    turns.submitted(SESSION, REQUEST)
    turns.heard(event(EventKind.RESPONSE_CREATED, 101.0, response_id="new"))
    turns.heard(event(EventKind.AUDIO_ROUTED, 101.0, response_id="old"))
    turns.heard(event(EventKind.RESPONSE_DONE, 101.0, response_id="old", detail="cancelled"))
    assert turns._now[SESSION].audio_s is None
    turns.heard(event(EventKind.BARGE_IN, 102.0))
    assert not turns._now


def test_it_is_on_only_while_somebody_asks_and_its_memory_is_bounded():
    clock = Clock()
    turns = TurnProfiler(clock, max_turns=8)
    turns.heard(event(EventKind.COMMITTED, 100.0))
    assert not turns._now
    turns.ask(5.0)
    for number in range(40):
        turns.heard(event(EventKind.SPEECH_STOPPED, 100.0, f"a{number}"))
        turns.heard(event(EventKind.COMMITTED, 100.0, f"b{number}"))
        turns.submitted(f"b{number}", f"r{number}")
    assert len(turns._ends) == len(turns._now) == 8
    for number in range(40):
        turns.heard(event(EventKind.CLOSED, 100.0, f"b{number}"))
    clock.now_s += 4
    done = turns.turns(0)
    assert [turn.session_id for turn in done] == [f"b{number}" for number in range(32, 40)]
    assert [turn.number for turn in done] == list(range(1, 9))
    assert [turn.number for turn in turns.turns(7)] == [8]
    assert turns.newest == 8
    clock.now_s += 10
    assert not turns.on
    turns.heard(event(EventKind.COMMITTED, 200.0, "late"))
    assert not turns._ends
    assert not turns._now


def test_turns_are_numbered_as_they_are_done_so_that_each_is_told_once():
    turns, clock = profiler()
    for session in ("slow", "quick"):
        turns.heard(event(EventKind.COMMITTED, 100.0, session))
    turns.submitted("slow", "first")
    answer(turns, clock, [100 + step / 10 for step in range(8)], session="quick")
    told = turns.turns(0)
    assert [turn.session_id for turn in told] == ["quick"]
    after = turns.newest
    turns.heard(event(EventKind.CLOSED, 101.0, "slow"))  # began before, is done behind it
    clock.now_s += 10
    assert [turn.session_id for turn in turns.turns(after)] == ["slow"]
    assert turns.turns(turns.newest) == []


def test_marks_travel_in_a_reply():
    from liveserve.events import PressureSnapshot, Reply

    marks = [StageMarks("a", 1.0, 2.0, match_s=0.5)]
    assert decode_reply(encode(Reply(PressureSnapshot(), marks=marks))).marks == marks


# ---- the command ---------------------------------------------------------------------------


def some_turns() -> list[dict]:
    turns, clock = profiler()
    for number, start_s in enumerate((200.0, 300.0, 400.0)):
        steps = [0.0, 0.5, 0.6, 0.7 + 0.1 * number, 0.95, 1.0, 1.5, 1.6]
        answer(turns, clock, [start_s + step for step in steps], suffix=str(number))
    return json.loads(json.dumps([as_json(turn) for turn in turns.turns(0)]))


def test_summary_has_percentiles_of_every_part():
    metrics = command.summary(some_turns())
    assert metrics["turns_seen"] == 3
    assert metrics["to_audio_p50_s"] == pytest.approx(1.6)
    assert metrics["prefill_p50_s"] == pytest.approx(0.2)
    assert metrics["prefill_p99_s"] == pytest.approx(0.3, abs=0.01)
    assert {f"{part}_p90_s" for part in command.WHAT} <= metrics.keys()
    assert set(command.WHAT) == {*TO_AUDIO, *TO_TEXT}


def test_the_timeline_has_each_part_where_it_was():
    events = command.trace(some_turns()).events()
    spans = [e for e in events if e["ph"] == "X" and e["cat"] == "critical path"]
    first = spans[: len({"encode", "queue", "prefill", "talker", "vocoder", "route"})]
    assert [span["name"] for span in first] == [
        "encode", "queue", "prefill", "talker", "vocoder", "route",
    ]  # fmt: skip
    assert first[0]["ts"] == 0
    for before, after in itertools.pairwise(first):
        assert after["ts"] == pytest.approx(before["ts"] + before["dur"])
    (whole,) = [e for e in events if e["ph"] == "X" and "turn 1" in e["name"]]
    assert sum(span["dur"] for span in first) == pytest.approx(whole["dur"])


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--seconds", "0"], "--seconds"),
        (["--seconds", "nan"], "--seconds"),
        (["--turns", "0"], "--turns"),
        (["--url", "localhost:8000"], "--url"),
    ],
)
def test_bad_flags_are_named(flags, named, capsys):
    assert main(["profile", *flags]) == 2
    assert named in capsys.readouterr().err


def test_no_server_is_one_line(capsys):
    assert main(["profile", "--url", "http://127.0.0.1:9", "--seconds", "1"]) == 1
    error = capsys.readouterr().err
    assert "--url http://127.0.0.1:9" in error
    assert "Traceback" not in error


async def test_it_watches_writes_and_leaves_out_what_was_before(tmp_path, capsys, monkeypatch):
    """Against a server that has one turn from before and then two more."""
    turns, asked = some_turns(), []

    async def profile(request: web.Request) -> web.Response:
        after = int(request.query["after"])
        asked.append(after)
        known = turns[: min(3, len(asked))]
        found = [turn for turn in known if turn["number"] > after]
        return web.json_response({"turns": found, "newest": known[-1]["number"]})

    app = web.Application()
    app.router.add_post("/liveserve/profile", profile)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    monkeypatch.setattr(command, "_POLL_S", 0.01)
    files = {"--json": tmp_path / "profile.json", "--trace": tmp_path / "trace.json"}
    flags = ["--url", url, "--turns", "2", *(str(x) for pair in files.items() for x in pair)]
    try:
        assert await asyncio.to_thread(main, ["profile", *flags]) == 0
    finally:
        await runner.cleanup()
    assert asked == [-1, 1, 2]
    result = json.loads(files["--json"].read_text())
    validate_result(result)
    (case,) = result["cases"]
    assert [turn["number"] for turn in case["metrics"]["turns"]] == [2, 3]
    assert json.loads(files["--trace"].read_text())["traceEvents"]
    shown = capsys.readouterr().out
    assert "to first audio" in shown
    assert "1600.0" in shown
