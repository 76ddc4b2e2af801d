"""SessionTracker: the events of a conversation, what it learns, and what it refuses."""

from __future__ import annotations

import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, generate_latest

from liveserve.config import LiveServeConfig
from liveserve.events import Event, EventKind
from liveserve.metrics import Metrics
from liveserve.scheduler.views import Phase
from liveserve.session import AckRefused, SessionTable, SessionTracker, StageTotals, Totals


class Recorder:
    """A tracker, its events, and a second table fed by them alone (an engine's side)."""

    def __init__(self, **config: object) -> None:
        self.events: list[Event] = []
        settings = LiveServeConfig(**config)
        self.tracker = SessionTracker(settings, self.events.append)
        self.remote = SessionTable(settings.max_sessions)

    def view(self, session_id: str = "a"):
        return self.tracker.table.get(session_id)

    def kinds(self) -> list[EventKind]:
        return [event.kind for event in self.events]

    def replayed(self) -> SessionTable:
        for event in self.events:
            self.remote.apply(event)
        self.events.clear()
        return self.remote


def start_answer(rec: Recorder, session_id: str = "a", at_s: float = 2.0, response: str = "r1"):
    rec.tracker.opened(session_id, "duplex", 0.0)
    rec.tracker.committed(session_id, at_s)
    rec.tracker.response_created(session_id, response, at_s + 0.1)


def test_a_conversation_walks_through_the_phases():
    rec = Recorder()
    tracker = rec.tracker
    tracker.opened("a", "duplex", 0.0)
    assert rec.view().phase is Phase.IDLE
    tracker.speech_started("a", 1.0)
    assert rec.view().speech_active
    assert rec.view().phase is Phase.LISTENING
    tracker.input("a", 0.1, 1.1)
    tracker.input("a", 0.1, 1.2)
    assert rec.view().input_s == pytest.approx(0.2)
    tracker.speech_stopped("a", 1.9)
    tracker.committed("a", 2.0)
    assert rec.view().phase is Phase.THINKING
    tracker.response_created("a", "r1", 2.4)
    assert rec.view().ready_at_s == 2.0  # asked for at the commit, not with the first output
    tracker.audio_routed("a", "r1", 0.32, 2.5)
    assert rec.view().phase is Phase.SPEAKING
    tracker.audio_routed("a", "r1", 2.32, 2.7)
    tracker.playback_ack("a", "r1", 200, None, 2.75)
    assert rec.view().clock.played_s(2.75) == pytest.approx(0.2)
    tracker.response_done("a", "r1", "completed", 2.8)
    assert rec.view().phase_at(4.0) is Phase.SPEAKING
    assert rec.view().phase_at(5.0) is Phase.IDLE
    tracker.closed("a", "client_close", 6.0)
    assert rec.view() is None
    assert tracker.totals.heard_s == pytest.approx(2.32)
    assert tracker.totals.wasted_s == 0.0


def test_barge_in_counts_what_was_not_heard_and_resets_the_clock():
    rec = Recorder()
    start_answer(rec)
    rec.tracker.audio_routed("a", "r1", 8.0, 3.0)
    rec.tracker.playback_ack("a", "r1", 1000, None, 4.0)
    rec.tracker.barge_in("a", "turn_detected", 4.5)
    rec.tracker.response_done("a", "r1", "cancelled", 4.5)
    barge_in = next(e for e in rec.events if e.kind is EventKind.BARGE_IN)
    assert barge_in.value_s == pytest.approx(1.5)
    assert rec.tracker.totals.wasted_s == pytest.approx(6.5)
    assert rec.tracker.totals.heard_s == pytest.approx(1.5)
    assert rec.view().phase is Phase.LISTENING
    assert not rec.view().clock.started
    # late packets and acks of the dropped answer change nothing
    rec.tracker.audio_routed("a", "r1", 9.0, 4.6)
    rec.tracker.playback_ack("a", "r1", 1500, None, 4.7)
    assert not rec.view().clock.started
    assert rec.view().phase is Phase.LISTENING


@pytest.mark.parametrize(
    ("played_ms", "committed_ms", "code"),
    [
        (-1, None, "playback_ack_invalid"),
        (math.nan, None, "playback_ack_invalid"),
        (math.inf, None, "playback_ack_invalid"),
        (100, -5, "playback_ack_invalid"),
        (2251, None, "playback_ack_ahead"),
        (100, 9000, "playback_ack_ahead"),
        (10**12, None, "playback_ack_ahead"),
        (549, None, "playback_ack_backwards"),
    ],
)
def test_impossible_acks_are_refused_and_change_nothing(played_ms, committed_ms, code):
    rec = Recorder()
    start_answer(rec)
    rec.tracker.audio_routed("a", "r1", 2.0, 3.0)
    rec.tracker.playback_ack("a", "r1", 800, None, 3.8)
    before, count = msgspec.structs.asdict(rec.view().clock), len(rec.events)
    with pytest.raises(AckRefused, match=r"playback\.ack") as refused:
        rec.tracker.playback_ack("a", "r1", played_ms, committed_ms, 3.9)
    assert refused.value.code == code
    assert msgspec.structs.asdict(rec.view().clock) == before
    assert len(rec.events) == count


def test_acks_within_tolerance_and_for_unknown_responses_are_left_alone():
    rec = Recorder()
    start_answer(rec)
    rec.tracker.audio_routed("a", "r1", 2.0, 3.0)
    rec.tracker.playback_ack("a", None, 2200, None, 5.0)  # cut to what was routed
    assert rec.view().clock.played_s(5.0) == 2.0
    rec.tracker.playback_ack("a", "someone-elses", 99_000, None, 5.1)
    rec.tracker.playback_ack("nobody", None, 99_000, None, 5.1)
    assert rec.view().clock.played_s(5.2) == 2.0


def test_reply_gap_is_learned_from_playback_end_to_speech():
    rec = Recorder()
    start_answer(rec)
    rec.tracker.audio_routed("a", "r1", 4.0, 3.0)
    rec.tracker.response_done("a", "r1", "completed", 3.5)
    prior = rec.view().reply_gap_s
    rec.tracker.speech_started("a", 12.0)  # playback ended at 7.0
    assert rec.view().reply_gap_s > prior
    learned = rec.view().reply_gap_s
    rec.tracker.committed("a", 14.0)  # the same turn does not count twice
    assert rec.view().reply_gap_s == learned


def test_speaking_over_the_answer_is_no_reply_gap():
    rec = Recorder()
    start_answer(rec)
    rec.tracker.audio_routed("a", "r1", 4.0, 3.0)
    rec.tracker.response_done("a", "r1", "completed", 3.5)
    prior = rec.view().reply_gap_s
    rec.tracker.speech_started("a", 4.0)
    assert rec.view().reply_gap_s == prior


def test_text_pace_is_seconds_of_speech_per_token():
    rec = Recorder()
    rec.tracker.opened("a", "duplex", 0.0)
    for turn in range(30):
        rec.tracker.committed("a", 10.0 * turn)
        rec.tracker.made("a", "thinker", 12)  # before the response is announced
        rec.tracker.response_created("a", f"r{turn}", 10.0 * turn + 1)
        rec.tracker.made("a", "thinker", 8)
        rec.tracker.audio_routed("a", f"r{turn}", 10.0, 10.0 * turn + 2)
        rec.tracker.response_done("a", f"r{turn}", "completed", 10.0 * turn + 3)
    assert rec.view().text_token_s == pytest.approx(0.5, rel=0.01)
    rec.tracker.opened("b", "duplex", 400.0)
    assert rec.view("b").text_token_s == pytest.approx(0.5, rel=0.01)


def make(rec: Recorder, tokens: int, frames: int, audio_s: float):
    rec.tracker.made("a", "thinker", tokens)
    rec.tracker.made("a", "talker", frames, frames * 0.08)
    rec.tracker.made("a", "code2wav", 0, audio_s)


def stages(rec: Recorder) -> dict[str, tuple[float, float, float, float]]:
    return {
        name: (made.made_tokens, made.wasted_tokens, made.made_s, made.wasted_s)
        for name, made in rec.tracker.totals.stages.items()
    }


def test_waste_is_counted_for_every_stage_beyond_what_was_heard():
    rec = Recorder()
    start_answer(rec)
    pace_s = rec.view().text_token_s
    make(rec, tokens=40, frames=125, audio_s=8.0)
    rec.tracker.audio_routed("a", "r1", 6.0, 3.0)
    rec.tracker.playback_ack("a", "r1", 1000, None, 4.0)
    rec.tracker.barge_in("a", "turn_detected", 5.0)  # 2 s heard
    found = stages(rec)
    assert found["talker"] == pytest.approx((125, 100, 10.0, 8.0))
    assert found["code2wav"] == pytest.approx((0, 0, 8.0, 6.0))
    text_s = 40 * pace_s
    assert found["thinker"] == pytest.approx((40, 40 * (1 - 2 / text_s), text_s, text_s - 2.0))
    assert rec.tracker.totals.wasted_s == pytest.approx(4.0)  # of what was sent
    rec.tracker.response_done("a", "r1", "cancelled", 5.0)
    rec.tracker.closed("a", "bye", 6.0)
    assert stages(rec) == found  # counted once


def test_an_answer_that_was_heard_out_wastes_nothing_in_any_stage():
    rec = Recorder()
    start_answer(rec)
    make(rec, tokens=40, frames=127, audio_s=10.0)  # two frames more than audio: not speech
    rec.tracker.audio_routed("a", "r1", 10.0, 3.0)
    rec.tracker.response_done("a", "r1", "completed", 4.0)
    rec.tracker.closed("a", "bye", 20.0)
    for made_tokens, wasted_tokens, made_s, wasted_s in stages(rec).values():
        assert (wasted_tokens, made_s, wasted_s) == (0, 10.0, 0)
        assert made_tokens in (0, 40, 127)


def test_an_answer_that_is_complete_and_interrupted_wastes_the_rest():
    rec = Recorder()
    start_answer(rec)
    make(rec, tokens=40, frames=125, audio_s=10.0)
    rec.tracker.audio_routed("a", "r1", 10.0, 3.0)
    rec.tracker.response_done("a", "r1", "completed", 4.0)
    rec.tracker.barge_in("a", "interrupted", 5.5)  # 2.5 s heard
    assert stages(rec)["thinker"] == pytest.approx((40, 30, 10.0, 7.5))
    assert stages(rec)["talker"] == pytest.approx((125, 93.75, 10.0, 7.5))


def test_what_was_made_for_an_answer_that_was_never_announced_is_waste():
    rec = Recorder()
    rec.tracker.opened("a", "duplex", 0.0)
    rec.tracker.committed("a", 1.0)
    rec.tracker.made("a", "thinker", 5)
    rec.tracker.barge_in("a", "barge_in", 1.5)
    assert stages(rec)["thinker"] == pytest.approx((5, 5, 1.5, 1.5))
    # the next answer's first tokens come before it is announced, and are its own
    rec.tracker.committed("a", 2.0)
    rec.tracker.made("a", "thinker", 4)
    rec.tracker.response_created("a", "r2", 2.1)
    rec.tracker.audio_routed("a", "r2", 1.0, 2.2)
    rec.tracker.response_done("a", "r2", "completed", 2.3)
    rec.tracker.closed("a", "bye", 9.0)
    assert stages(rec)["thinker"] == pytest.approx((9, 5, 2.5, 1.5))


def test_an_answer_in_text_alone_wastes_nothing():
    rec = Recorder()
    start_answer(rec)
    rec.tracker.made("a", "thinker", 12)
    rec.tracker.response_done("a", "r1", "completed", 3.0)
    rec.tracker.closed("a", "bye", 4.0)
    assert stages(rec)["thinker"] == (12, 0, 0, 0)


def test_provisional_speech_counts_from_when_it_began():
    rec = Recorder()
    start_answer(rec)
    rec.tracker.audio_routed("a", "r1", 8.0, 3.0)
    rec.tracker.speech_provisional("a", 5.0)
    rec.tracker.speech_started("a", 5.4)
    rec.tracker.barge_in("a", "turn_detected", 5.4)
    assert rec.tracker.totals.heard_s == pytest.approx(2.0)
    assert next(e for e in rec.events if e.kind is EventKind.BARGE_IN).value_s == pytest.approx(2)
    # and only that one
    rec.tracker.response_created("a", "r2", 6.1)
    rec.tracker.audio_routed("a", "r2", 8.0, 7.0)
    rec.tracker.barge_in("a", "turn_detected", 10.0)
    assert rec.tracker.totals.heard_s == pytest.approx(5.0)


def test_a_false_alarm_changes_no_view():
    rec = Recorder()
    start_answer(rec)
    rec.tracker.audio_routed("a", "r1", 8.0, 3.0)
    before = msgspec.structs.asdict(rec.view()), len(rec.events)
    rec.tracker.speech_provisional("a", 4.0)
    rec.tracker.false_alarm("a")
    assert (msgspec.structs.asdict(rec.view()), len(rec.events)) == before
    assert rec.tracker.totals.false_alarms == 1
    rec.tracker.barge_in("a", "turn_detected", 6.0)
    assert rec.tracker.totals.heard_s == pytest.approx(3.0)


def test_metrics_count_waste_by_stage_once():
    registry = CollectorRegistry()
    metrics = Metrics(registry)
    totals = Totals(false_alarms=2)
    totals.stages["talker"] = StageTotals(125, 100, 10.0, 8.0)
    metrics.sessions([], totals, 1.0)
    totals.stages["talker"].wasted_s += 1.0
    metrics.sessions([], totals, 2.0)
    text = generate_latest(registry).decode()
    for line in (
        'liveserve_stage_made_tokens_total{stage="talker"} 125.0',
        'liveserve_stage_wasted_tokens_total{stage="talker"} 100.0',
        'liveserve_stage_made_seconds_total{stage="talker"} 10.0',
        'liveserve_stage_wasted_seconds_total{stage="talker"} 9.0',
        "liveserve_false_alarms_total 2.0",
    ):
        assert line in text


def test_sessions_are_bounded_on_both_sides():
    rec = Recorder(max_sessions=8)
    for i in range(100):
        rec.tracker.opened(f"s{i}", "duplex", float(i))
    assert len(rec.tracker.table) == 8
    assert len(rec.replayed()) == 8
    assert rec.tracker.table.get("s99") is not None


def test_one_turn_sessions_end_when_their_audio_was_played():
    rec = Recorder()
    rec.tracker.opened("chat", "turn", 0.0)
    rec.tracker.committed("chat", 0.0)
    rec.tracker.response_created("chat", "chat", 0.0)
    rec.tracker.audio_routed("chat", "chat", 3.0, 1.0)
    rec.tracker.response_done("chat", "chat", "completed", 1.1)
    rec.tracker.expire_turns(2.0)
    assert rec.view("chat") is not None
    rec.tracker.expire_turns(4.5)
    assert rec.view("chat") is None
    assert rec.tracker.totals.heard_s == 3.0


@pytest.mark.parametrize("rate", [0, -1, math.nan, math.inf])
def test_bad_playback_rates_are_refused(rate):
    rec = Recorder()
    rec.tracker.opened("a", "duplex", 0.0)
    with pytest.raises(ValueError, match="playback_rate"):
        rec.tracker.rate("a", rate, 1.0)
    assert rec.view().clock.rate == 1.0


CALLS = {
    "speech_started": lambda t, s, x, now: t.speech_started(s, now),
    "speech_stopped": lambda t, s, x, now: t.speech_stopped(s, now),
    "input": lambda t, s, x, now: t.input(s, x, now),
    "committed": lambda t, s, x, now: t.committed(s, now),
    "created": lambda t, s, x, now: t.response_created(s, f"r{int(x)}", now),
    "routed": lambda t, s, x, now: t.audio_routed(s, f"r{int(x)}", x * 3, now),
    "done": lambda t, s, x, now: t.response_done(s, f"r{int(x)}", "completed", now),
    "barge_in": lambda t, s, x, now: t.barge_in(s, "voice", now),
    "closed": lambda t, s, x, now: t.closed(s, "bye", now),
    "made": lambda t, s, x, now: t.made(s, "talker", int(x), x),
    "provisional": lambda t, s, x, now: t.speech_provisional(s, now),
    "false_alarm": lambda t, s, x, now: t.false_alarm(s),
    "opened": lambda t, s, x, now: t.opened(s, "duplex", now),
    "rate": lambda t, s, x, now: t.rate(s, x + 0.1, now),
}


@given(
    st.lists(
        st.tuples(
            st.sampled_from([*CALLS, "ack"]),
            st.sampled_from("abc"),
            st.floats(0, 4),
            st.floats(0, 5),
        ),
        max_size=60,
    )
)
def test_an_engine_that_gets_the_events_sees_what_the_tracker_sees(calls):
    rec, now = Recorder(max_sessions=2), 10.0
    for name, session_id, value, wait in calls:
        now += wait
        if name == "ack":
            try:
                rec.tracker.playback_ack(session_id, None, value * 1000, None, now)
            except AckRefused:
                continue
        else:
            CALLS[name](rec.tracker, session_id, value, now)
    mine = {v.session_id: msgspec.to_builtins(v) for v in rec.tracker.table}
    theirs = {v.session_id: msgspec.to_builtins(v) for v in rec.replayed()}
    assert mine == theirs
    totals = rec.tracker.totals
    assert totals.heard_s + totals.wasted_s <= totals.routed_s + 1e-6
    for made in totals.stages.values():
        assert -1e-6 <= made.wasted_s <= made.made_s + 1e-6
        assert -1e-6 <= made.wasted_tokens <= made.made_tokens + 1e-6


_ANY_EVENT = st.builds(
    Event,
    st.sampled_from(EventKind),
    st.sampled_from("abcd"),
    st.floats(0.0, 9.0),
    st.just(1.0),
    st.sampled_from(["", "r1"]),
    st.sampled_from(["duplex", "text", "completed"]),
)


@given(st.lists(_ANY_EVENT, max_size=40), st.lists(_ANY_EVENT, max_size=20))
def test_who_waits_is_kept_as_the_views_have_it(before, after):
    table = SessionTable(3)
    for event in before:
        table.apply(event)
        check_who_waits(table)
    other = SessionTable(2)
    for event in after:
        other.apply(event)
    other.load(list(table))
    assert len(other) <= 2
    check_who_waits(other)
    for event in after:
        other.apply(event)
        check_who_waits(other)


def check_who_waits(table: SessionTable) -> None:
    thinks = {v.session_id for v in table if v.phase is Phase.THINKING}
    audio = {v.session_id for v in table if v.wants_audio}
    assert table.thinking == thinks & audio
