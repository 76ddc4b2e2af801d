"""Session events as next-use times, through the runtime and its wire format; no host."""

from __future__ import annotations

import random
import time

import msgspec
import pytest

from liveserve.config import LiveServeConfig
from liveserve.events import Batch, Event, EventKind, KvSnapshot, decode_reply, encode
from liveserve.kv_signals import KvSignals, KvStage
from liveserve.kvtier.policies import LogOnly, NextUsePolicy
from liveserve.kvtier.report import Latencies, TierReport
from liveserve.metrics import Metrics
from liveserve.plane import kv_report
from liveserve.runtime import StageInfo, StageRuntime
from liveserve.session import SessionTable

K = EventKind


class Gpu:
    """Keeps what the runtime tells it."""

    def __init__(self) -> None:
        self.switched: list[bool] = []
        self.filled = 0

    def used(self, session, blocks):
        raise AssertionError("only the host's requests tell")

    def upcoming(self, count):
        return []

    def switch(self, on):
        self.switched.append(on)

    def fill(self, snapshot):
        self.filled += 1
        snapshot.policy = "next-use"
        snapshot.block_tokens, snapshot.prompt_tokens, snapshot.hit_tokens = 16, 1000, 640
        snapshot.evicted = {"next-use/orphan": 3}

    def sessions(self, limit):
        return {"a": 5, "b": 2}


class Tier:
    def __init__(self) -> None:
        self.made = TierReport(
            policy="next-use", slots=100, used=7, hits=10, evicted={"recency": 4}, reload_p90_ms=12
        )

    def report(self):
        return self.made

    def sessions(self):
        return {"b": 9}


class Queues:
    def running(self):
        return ()

    def waiting(self):
        return ()

    def can_run(self, request):
        return True

    def kv_blocks(self):
        return 3, 10

    def kv_blocks_of(self, request):
        return 0


class Session:
    """Events of one session applied to its view, as an engine does."""

    def __init__(self, signals: KvSignals, name: str = "s") -> None:
        self.signals, self.name, self.table = signals, name, SessionTable(8)

    def at(self, now_s: float, kind: EventKind, value_s: float = 0.0, rid: str = "", detail=""):
        event = Event(kind, self.name, now_s, value_s, rid, detail)
        self.signals.happened(event, self.table.apply(event))
        return self.signals.next_use.get(self.name)

    def answers(self, at_s: float = 10.0, audio_s: float = 4.0):
        """A turn whose answer of ``audio_s`` was routed at ``at_s``."""
        self.at(0.0, K.OPENED, 1.0, detail="duplex")
        self.at(0.0, K.REPLY_GAP, 3.0)
        self.at(at_s - 1.0, K.COMMITTED)
        self.at(at_s - 0.5, K.RESPONSE_CREATED, rid="r")
        self.at(at_s, K.AUDIO_ROUTED, audio_s, "r")
        return self.at(at_s, K.RESPONSE_DONE, rid="r", detail="completed")


@pytest.fixture
def session():
    return Session(KvSignals(8))


def test_speech_a_turn_and_its_answer(session):
    assert session.at(0.0, K.OPENED, 1.0, detail="duplex") is None
    assert session.at(1.0, K.INPUT, 0.5) is None  # an open microphone says nothing
    assert session.at(2.0, K.SPEECH_STARTED).needed
    assert session.at(4.0, K.SPEECH_STOPPED).needed
    assert session.at(4.1, K.COMMITTED).needed
    assert session.at(4.2, K.RESPONSE_CREATED, rid="r").needed
    session.at(4.3, K.REPLY_GAP, 3.0)
    known = session.at(5.0, K.AUDIO_ROUTED, 2.0, "r")
    assert (known.needed, known.next_use_s) == (False, 5.0 + 2.0 + 3.0)
    known = session.at(6.0, K.AUDIO_ROUTED, 6.0, "r")  # more audio: it plays until 11
    assert known.next_use_s == pytest.approx(14.0)
    known = session.at(8.0, K.PLAYBACK, 1.0, "r")  # the client is two seconds behind
    assert known.next_use_s == pytest.approx(8.0 + 5.0 + 3.0)
    known = session.at(8.5, K.RESPONSE_DONE, rid="r", detail="completed")
    assert known.next_use_s == pytest.approx(16.0)
    assert known.turns == 1


def test_the_playback_rate_counts(session):
    session.answers(audio_s=4.0)
    assert session.at(10.0, K.RATE, 2.0).since_s == pytest.approx(12.0)


def test_a_reply_is_learnt_from_when_the_answer_was_over(session):
    session.answers(at_s=10.0, audio_s=4.0)
    assert session.at(20.0, K.SPEECH_STARTED).needed
    # 6 s after the end, twice the expected gap of 3 s
    assert sum(session.signals.next_use.times._came) == 1.0
    assert session.signals.next_use.times._came[int(4 * 1.584962)] == 1.0


def test_a_barge_in_needs_it_now_and_the_old_answer_says_no_more(session):
    session.answers()
    assert session.at(11.0, K.SPEECH_STARTED).needed
    assert session.at(11.2, K.PLAYBACK, 1.2, "r").needed
    assert session.at(11.3, K.BARGE_IN, 1.3).needed
    assert session.at(11.4, K.RESPONSE_DONE, rid="r", detail="cancelled").needed
    assert session.at(11.5, K.AUDIO_ROUTED, 9.0, "r").needed
    assert session.at(13.0, K.SPEECH_STOPPED).needed
    assert session.signals.next_use.get("s").turns == 1
    # without VAD: the barge-in alone
    other = Session(session.signals, "t")
    other.answers()
    assert other.at(11.0, K.BARGE_IN, 1.0).needed


def test_speech_that_came_to_nothing_keeps_it_until_it_drains(session):
    session.answers(at_s=10.0, audio_s=40.0)
    session.at(11.0, K.SPEECH_STARTED)
    session.at(11.2, K.SPEECH_STOPPED)
    assert session.at(12.0, K.PLAYBACK, 2.0, "r").needed
    session.signals.next_use.advance(100.0)
    assert session.signals.next_use.get("s").next_use_s > 100.0


def test_a_cancelled_answer_ends_now(session):
    session.answers(at_s=10.0, audio_s=40.0)
    known = session.at(12.0, K.RESPONSE_DONE, rid="r", detail="cancelled")
    assert known.next_use_s == pytest.approx(15.0)


def test_a_text_answer_has_no_playback(session):
    session.at(0.0, K.OPENED, 1.0, detail="text")
    session.at(1.0, K.COMMITTED)
    session.at(1.0, K.RESPONSE_CREATED, rid="r")
    known = session.at(5.0, K.RESPONSE_DONE, rid="r", detail="completed")
    assert known.next_use_s == pytest.approx(5.0 + 2.0)


def test_acks_after_the_end_do_not_keep_a_silent_session(session):
    session.answers(at_s=10.0, audio_s=4.0)
    for now_s in range(14, 60):
        known = session.at(float(now_s), K.PLAYBACK, 4.0, "r")
    assert known.since_s == pytest.approx(14.0)


def test_a_paused_client_is_waited_for(session):
    session.answers(at_s=10.0, audio_s=4.0)
    session.at(11.0, K.PLAYBACK, 1.0, "r")
    known = session.at(13.0, K.PLAYBACK, 1.0, "r")
    assert known.next_use_s == pytest.approx(13.0 + 3.0 + 3.0)


@pytest.mark.parametrize(
    ("why", "over"),
    [("client", True), ("expired", True), ("finished", False), ("forgotten", False)],
)
def test_a_closed_session_is_over_unless_it_goes_on_under_another_name(session, why, over):
    heard = []
    session.answers()
    session.signals.next_use.subscribe(lambda *what: heard.append(what))
    session.at(30.0, K.CLOSED, detail=why)
    assert heard == [("s", None, over)]


def test_stale_views_let_go_of_everything_once_and_views_bring_it_back():
    signals, closed = KvSignals(8), []
    signals.follow(lambda: closed.append(True))
    a, b = Session(signals, "a"), Session(signals, "b")
    for one in (a, b):
        one.answers(at_s=10.0, audio_s=5.0)
    signals.trust(False)
    signals.trust(False)
    assert (len(closed), len(signals.next_use), signals.stale_total) == (1, 0, 1)
    assert a.at(11.0, K.SPEECH_STARTED) is None  # not while stale
    c, d = Session(KvSignals(8), "c"), Session(KvSignals(8), "d")
    c.at(0.0, K.OPENED, 1.0)
    d.at(0.0, K.OPENED, 1.0)
    d.at(1.0, K.COMMITTED)
    signals.load([*a.table, *b.table, *c.table, *d.table], 12.0)
    known = signals.next_use
    assert known.get("a").needed  # it speaks
    assert known.get("b").next_use_s == pytest.approx(15.0 + 3.0)
    assert known.get("c") is None
    assert known.get("d").needed
    assert not signals.stale


def test_policies_of_both_tiers_fail_closed():
    signals = KvSignals(8)
    kv = KvStage(signals, Gpu(), time.monotonic)
    policies = [NextUsePolicy(4, signals.next_use), LogOnly(4, signals.next_use)]
    for policy in policies:
        kv.follow(policy)
        signals.next_use.waiting("s", 100.0, 1.0, 0.0)
        policy.use("s", [0, 1], 0.0)
        policy.free([1, 0], 0.0)
        assert getattr(policy, "shadow", policy).table.group[0] is not None
    signals.trust(False)
    for policy in policies:
        assert getattr(policy, "shadow", policy).table.group[0] is None


def test_whatever_happens_memory_is_bounded():
    signals, draw = KvSignals(8), random.Random(1)
    table, kinds = SessionTable(8), list(EventKind)
    for step in range(5000):
        name, kind = f"s{draw.randrange(40)}", draw.choice(kinds)
        value = draw.choice((0.5, 1.0, 3.0))
        event = Event(kind, name, 0.1 * step, value, draw.choice(("", "r")), "completed")
        signals.happened(event, table.apply(event))
        signals.next_use.advance(0.1 * step)
        assert len(signals.next_use) <= 8
        assert len(signals._spoke) <= 8
    assert len(signals.next_use._due) <= 2 * 8 + 64 + 1


def runtime():
    made = StageRuntime(StageInfo(0, "thinker"), LiveServeConfig(), Queues(), lambda rid: rid)
    made.kv = KvStage(KvSignals(8), Gpu(), made.now_s)
    return made


class Link:
    def __init__(self, engine: StageRuntime) -> None:
        self.engine, self.seq = engine, 0

    def tell(self, *events: Event, **more):
        batch = Batch("", time.monotonic(), self.seq, list(events), **more)
        self.seq += len(events)
        return decode_reply(self.engine.exchange(encode(batch)))


def test_events_reach_the_estimator_and_a_gap_closes_it():
    engine = runtime()
    link, now_s = Link(engine), time.monotonic()
    link.tell(views=[])
    link.tell(Event(K.OPENED, "s", now_s, 1.0), Event(K.COMMITTED, "s", now_s))
    assert engine.kv.next_use.get("s").needed
    link.seq += 1  # one is lost
    reply = link.tell(Event(K.RESPONSE_CREATED, "s", now_s, response_id="r"), detail=True)
    assert reply.resync
    assert reply.snapshot.kv.signals_stale
    assert engine.kv.next_use.get("s") is None
    link.tell(views=list(engine.table))
    assert engine.kv.next_use.get("s").needed
    assert not engine.kv.signals.stale


def test_a_listener_comes_before_the_view_and_the_switch_reaches_the_gpu():
    engine = runtime()
    phases = []
    engine.on_event.append(lambda event: phases.append(engine.table.get("s")))
    link = Link(engine)
    link.tell(Event(K.OPENED, "s", 0.0, 1.0), views=[])
    assert phases == [None]
    switches = msgspec.structs.replace(engine.switches, kv_evict=False)
    link.tell(switches=switches)
    assert engine.kv.gpu.switched == [False]


def test_an_error_in_the_signals_costs_only_them():
    engine = runtime()
    link = Link(engine)
    link.tell(views=[])

    def broken(*_):
        raise RuntimeError("no")

    engine.kv.signals.next_use.needed = broken
    reply = link.tell(Event(K.OPENED, "s", 0.0, 1.0), Event(K.COMMITTED, "s", 0.0))
    assert engine.kv.signals.stale
    assert (reply.snapshot.errors_total, reply.resync) == (1, False)
    assert engine.table.get("s").ready_at_s == pytest.approx(0.0, abs=0.1)


def test_the_report_joins_both_tiers():
    engine = runtime()
    link = Link(engine)
    link.tell(views=[])
    engine.kv.tier = Tier()
    engine.kv.next_use.waiting("b", engine.now_s() + 50, 2.0, engine.now_s())
    reply = link.tell(detail=True)
    assert reply.snapshot.kv.dram.reload_p90_ms == 12
    rows = {row.session_id: row for row in reply.kv_sessions}
    assert [row.session_id for row in reply.kv_sessions] == ["b", "a"]
    assert (rows["b"].gpu_blocks, rows["b"].dram_blocks, rows["a"].gpu_blocks) == (2, 9, 5)
    assert rows["b"].next_use_in_s == pytest.approx(52, abs=1)
    assert rows["a"].next_use_in_s is None
    report = kv_report(0, 0, reply)
    assert report["kv"]["evicted"] == {"next-use/orphan": 3}
    assert report["sessions"][0]["dram_blocks"] == 9
    assert kv_report(1, 0, None) == {"stage_id": 1, "replica_id": 0, "answered": False}


def test_totals_are_not_made_at_every_exchange():
    engine = runtime()
    link = Link(engine)
    for _ in range(20):
        link.tell(views=[])
    assert engine.kv.gpu.filled < 20
    before = engine.kv.gpu.filled
    link.tell(detail=True)
    assert engine.kv.gpu.filled == before + 1


def test_a_broken_tier_does_not_break_the_snapshot():
    engine = runtime()
    engine.kv.tier = object()
    reply = Link(engine).tell(views=[])
    assert reply.snapshot.kv is None
    assert engine.errors == 1


def test_the_tier_hears_of_the_unheard_and_cannot_harm():
    kv, told = KvStage(KvSignals(8), Gpu(), time.monotonic), []

    def broken(*_):
        raise RuntimeError("no")

    kv.on_void += [broken, lambda *what: told.append(what)]
    kv.void([b"key"])
    assert told == [([b"key"],)]


def test_metrics():
    from prometheus_client import CollectorRegistry

    registry = CollectorRegistry()
    engine = runtime()
    engine.kv.tier = Tier()
    snapshot = Link(engine).tell(views=[]).snapshot
    assert isinstance(snapshot.kv, KvSnapshot)
    Metrics(registry).reply((0, 0), snapshot, 0.001)

    def value(name, **labels):
        labels = {"stage": "thinker", "replica": "0"} | labels
        return registry.get_sample_value(f"liveserve_{name}", labels)

    assert value("kv_tier_blocks", tier="gpu") == 10
    assert value("kv_tier_blocks", tier="dram") == 100
    assert value("kv_hit_tokens", tier="dram") == 160  # 10 blocks of 16
    assert value("kv_hit_tokens", tier="gpu") == 480
    assert value("kv_prompt_tokens") == 1000
    orphans = {"policy": "next-use", "reason": "orphan"}
    assert value("kv_evicted_blocks", tier="gpu", **orphans) == 3
    assert value("kv_evicted_blocks", tier="dram", policy="next-use", reason="recency") == 4
    assert value("kv_eviction_policy", tier="gpu", policy="next-use") == 1
    assert value("kv_eviction_policy", tier="gpu", policy="lru") == 0
    assert value("kv_reload_seconds", quantile="0.9") == pytest.approx(0.012)


def test_latencies():
    waits = Latencies(window=10)
    assert waits.percentile_ms(0.9) == 0.0
    for ms in range(1, 21):
        waits.add(float(ms))
    assert waits.count == 20
    assert waits.percentile_ms(0.9) == 19.0  # of 11 … 20
    assert waits.percentile_ms(1.0) == 20.0
    assert waits.percentile_ms(0.0) == 11.0
