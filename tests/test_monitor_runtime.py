"""Monitor and StageRuntime joined by their real wire format, without a host."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field, replace

import msgspec
import pytest

from liveserve.config import LiveServeConfig, StageConfig, Switches
from liveserve.events import Batch, Event, EventKind, boot_id, decode_reply, encode
from liveserve.monitor import Monitor, StageLink
from liveserve.runtime import StageInfo, StageRuntime, slots_short
from liveserve.scheduler.plan import plan
from liveserve.scheduler.urgency import Urgency
from liveserve.session import SessionTracker


@dataclass
class Request:
    request_id: str
    num_output_tokens: int = 0


@dataclass
class Scheduler:
    """The part of a scheduler that the runtime reads."""

    run: list[Request] = field(default_factory=list)
    wait: list[Request] = field(default_factory=list)
    parked: set[str] = field(default_factory=set)
    used: int = 3

    def running(self):
        return self.run

    def waiting(self):
        return self.wait

    def can_run(self, request):
        return request.request_id not in self.parked

    def kv_blocks(self):
        return self.used, 10

    def kv_blocks_of(self, request):
        return 2


TALKER = StageInfo(1, "talker", token_s=0.08)


def engine(config: LiveServeConfig | None = None, info: StageInfo = TALKER, **kwargs):
    scheduler = Scheduler()
    config = config or LiveServeConfig()
    return StageRuntime(info, config, scheduler, lambda rid: rid[:1], **kwargs), scheduler


class Deployment:
    """A tracker, a monitor and real engines; ``drop`` loses messages to some of them."""

    def __init__(self, config: LiveServeConfig, infos: list[StageInfo]) -> None:
        self.engines = {(i, 0): engine(config, info)[0] for i, info in enumerate(infos)}
        self.drop: set[tuple[int, int]] = set()
        self.delay_s = 0.0
        self.tracker = SessionTracker(config, lambda event: self.monitor.publish(event))
        self.monitor = Monitor(config, self.tracker.table, self.live)
        self.stop = asyncio.Event()

    def live(self):
        return {key: self.sender(key) for key in self.engines}

    def sender(self, key):
        async def send(payload: bytes) -> bytes:
            await asyncio.sleep(self.delay_s)
            if key in self.drop:
                raise ConnectionError("lost")
            return self.engines[key].exchange(payload)

        return send

    async def __aenter__(self):
        self.task = asyncio.ensure_future(self.monitor.run(self.stop))
        await self.settle()
        return self

    async def __aexit__(self, *exc):
        self.stop.set()
        await asyncio.wait_for(self.task, 5)

    async def settle(self, seconds: float = 0.15):
        await asyncio.sleep(seconds)

    def views(self, key):
        return {v.session_id: msgspec.to_builtins(v) for v in self.engines[key].table}

    def expected(self):
        return {v.session_id: msgspec.to_builtins(v) for v in self.tracker.table}


INFOS = [StageInfo(0, "thinker"), TALKER, StageInfo(2, "code2wav", routes_audio=True)]
FAST = LiveServeConfig(heartbeat_ms=20, flush_interval_ms=2)


def talk(tracker: SessionTracker, session_id: str, now_s: float) -> None:
    tracker.opened(session_id, "duplex", now_s)
    tracker.committed(session_id, now_s)
    tracker.response_created(session_id, "r", now_s)
    tracker.audio_routed(session_id, "r", 2.0, now_s)
    tracker.playback_ack(session_id, "r", 100, None, now_s)


async def test_every_engine_sees_an_ack_within_100_ms():
    async with Deployment(LiveServeConfig(), INFOS) as deployment:
        talk(deployment.tracker, "a", time.monotonic())
        await asyncio.sleep(0.1)
        for key in deployment.engines:
            assert deployment.views(key) == deployment.expected()
            assert deployment.views(key)["a"]["clock"]["acked_s"] == 0.1


async def test_lost_messages_and_restarted_engines_are_resynced():
    async with Deployment(FAST, INFOS) as deployment:
        talk(deployment.tracker, "a", time.monotonic())
        await deployment.settle()
        deployment.drop.add((1, 0))
        talk(deployment.tracker, "b", time.monotonic())
        await deployment.settle()
        assert "b" not in deployment.views((1, 0))
        assert "b" in deployment.views((0, 0))
        deployment.drop.clear()
        deployment.engines[(2, 0)] = engine(FAST, INFOS[2])[0]  # restarted: knows nothing
        deployment.tracker.playback_ack("b", "r", 300, None, time.monotonic())
        await deployment.settle()
        for key in deployment.engines:
            assert deployment.views(key) == deployment.expected()
        assert deployment.monitor.links[(1, 0)].stats.failures >= 1


async def test_an_engine_that_leaves_and_one_that_joins():
    async with Deployment(FAST, INFOS) as deployment:
        talk(deployment.tracker, "a", time.monotonic())
        del deployment.engines[(2, 0)]
        deployment.engines[(1, 1)] = engine(FAST)[0]
        await deployment.settle()
        assert set(deployment.monitor.links) == {(0, 0), (1, 0), (1, 1)}
        assert deployment.views((1, 1)) == deployment.expected()


async def test_a_slow_engine_costs_memory_per_session_not_per_event():
    config = LiveServeConfig(heartbeat_ms=20, flush_interval_ms=1, outbox_capacity=64)
    async with Deployment(config, INFOS[:1]) as deployment:
        talk(deployment.tracker, "a", time.monotonic())
        await deployment.settle()
        deployment.delay_s = 0.3
        link = deployment.monitor.links[(0, 0)]
        for i in range(10_000):
            deployment.tracker.input("a", 0.01, time.monotonic())
            assert len(link.outbox) <= 64
            if i % 1000 == 0:
                await asyncio.sleep(0)
        deployment.delay_s = 0.0
        await deployment.settle(0.8)
        assert deployment.views((0, 0)) == deployment.expected()
        assert link.stats.overflows == 0
        assert link.stats.coalesced > 9_000


async def test_an_overflowing_link_starts_over():
    config = LiveServeConfig(heartbeat_ms=20, flush_interval_ms=1, outbox_capacity=16)
    async with Deployment(config, INFOS[:1]) as deployment:
        await deployment.settle()
        for i in range(200):
            deployment.tracker.opened(f"s{i}", "duplex", time.monotonic())
        assert deployment.monitor.links[(0, 0)].stats.overflows >= 1
        await deployment.settle()
        assert deployment.views((0, 0)) == deployment.expected()


async def test_query_answers_now_and_reports_a_silent_engine():
    config = LiveServeConfig(heartbeat_ms=10_000, exchange_timeout_s=0.2)
    async with Deployment(config, INFOS[:2]) as deployment:
        talk(deployment.tracker, "a", time.monotonic())
        deployment.drop.add((1, 0))
        replies = await deployment.monitor.query(1.0)
        assert replies[(1, 0)] is None
        assert [row.session_id for row in replies[(0, 0)].views] == ["a"]


def test_first_routed_event_keeps_its_time_while_later_ones_coalesce():
    link = StageLink((0, 0), None, 100, resync=False)
    for i in range(5):
        link.push(Event(EventKind.AUDIO_ROUTED, "a", float(i), 1.0 + i, "r"))
    assert [(e.at_s, e.value_s) for e in link.outbox] == [(0.0, 1.0), (4.0, 5.0)]
    link.push(Event(EventKind.BARGE_IN, "a", 5.0))
    link.push(Event(EventKind.AUDIO_ROUTED, "a", 6.0, 9.0, "r2"))
    assert [e.kind.name for e in link.outbox[-2:]] == ["BARGE_IN", "AUDIO_ROUTED"]


# ---- the engine side ---------------------------------------------------------------------------


def send(runtime: StageRuntime, events: list[Event], first_seq: int = 0, **kwargs):
    batch = Batch(kwargs.pop("boot", boot_id()), kwargs.pop("sent_s", 0.0), first_seq, events)
    for name, value in kwargs.items():
        setattr(batch, name, value)
    return decode_reply(runtime.exchange(encode(batch)))


def answer_events(session_id: str, now_s: float, routed_s: float = 2.0) -> list[Event]:
    return [
        Event(EventKind.OPENED, session_id, now_s, 1.0, detail="duplex"),
        Event(EventKind.COMMITTED, session_id, now_s),
        Event(EventKind.RESPONSE_CREATED, session_id, now_s, response_id="r"),
        Event(EventKind.AUDIO_ROUTED, session_id, now_s, routed_s, "r"),
    ]


def test_a_round_classifies_running_and_waiting_requests():
    now = [100.0]
    runtime, scheduler = engine(
        LiveServeConfig(stages={"talker": StageConfig(p_safe_s=1.0)}), clock=lambda: now[0]
    )
    scheduler.run = [Request("a1", 30), Request("b1", 100), Request("x1", 5)]
    scheduler.wait = [Request("c1", 0)]
    events = answer_events("a", 98.0) + answer_events("b", 98.0)
    events += [Event(EventKind.OPENED, "c", 97.0, 1.0, detail="duplex")]
    events += [Event(EventKind.COMMITTED, "c", 99.0)]
    reply = send(runtime, events, detail=True)
    # talker: frames / 12.5 - played: a 2.4 - 2, b 8 - 2; c has nothing yet, x is unknown
    assert runtime.ranks["a1"].urgency is Urgency.U0
    assert runtime.ranks["a1"].buffer_s == pytest.approx(0.4)
    assert runtime.ranks["b1"].urgency is Urgency.U2
    assert runtime.ranks["b1"].buffer_s == pytest.approx(6.0)
    assert runtime.ranks["c1"].urgency is Urgency.U1
    nobody = runtime.ranks["x1"]
    assert (nobody.urgency, nobody.buffer_s) == (Urgency.U2, None)
    assert nobody.age_s == pytest.approx(0.0, abs=1e-5)
    assert reply.snapshot.running_by_class == [1, 0, 2]
    assert reply.snapshot.waiting_by_class == [0, 1, 0]
    assert (reply.snapshot.kv_blocks_used, reply.snapshot.kv_blocks_total) == (3, 10)
    assert {row.request_id: row.urgency for row in reply.requests}["a1"] == "U0"
    now[0] = 103.0
    runtime.round()
    assert runtime.ranks["c1"].age_s == pytest.approx(3.0)  # since it reached this engine


PACED = LiveServeConfig(
    stages={"talker": StageConfig(p_safe_s=0.5, p_release_s=1.0, p_hold_s=2.0, age_limit_s=4.0)}
)


def test_holds_only_who_is_far_ahead_while_somebody_waits_and_not_for_long():
    now = [100.0]
    runtime, scheduler = engine(PACED, clock=lambda: now[0])
    scheduler.run = [Request("a1", 100), Request("b1", 20), Request("x1", 100)]
    # a is 8 s ahead, b 1.6 s; nobody knows x
    send(runtime, answer_events("a", 100.0, 9.0) + answer_events("b", 100.0))
    runtime.barge_in_rate = 0.0
    assert runtime.plan().held == frozenset()  # nobody waits and nobody ever interrupts
    asked = [Event(EventKind.OPENED, "c", 100.0, 1.0), Event(EventKind.COMMITTED, "c", 100.0)]
    send(runtime, asked, first_seq=8)
    made = runtime.plan()
    assert made.held == {"a1"}
    assert made.order[-1] == "a1"
    reply = send(runtime, [], first_seq=10, detail=True)
    assert reply.snapshot.held == 1
    assert [row.request_id for row in reply.requests if row.held] == ["a1"]
    # released before the age limit is over, and at once when views cannot be trusted
    for _ in range(50):
        now[0] += 0.1
        runtime.round()
        if not runtime.plan().held:
            break
    assert now[0] == pytest.approx(104.0, abs=0.3)
    runtime.ring.stale = True
    assert runtime.plan() is None
    assert runtime.held == frozenset()


def four_far_ahead():
    """An engine that holds all of its four requests; their ids come last."""
    runtime, scheduler = engine(PACED, clock=lambda: 100.0)
    scheduler.run = [Request(f"{name}1", 100) for name in "abcd"]
    send(runtime, [event for name in "abcd" for event in answer_events(name, 100.0, 9.0)])
    runtime.barge_in_rate = 0.5
    return runtime, scheduler, {"a1", "b1", "c1", "d1"}


def test_nobody_is_held_where_held_requests_would_take_the_slots_of_new_users():
    runtime, scheduler, everybody = four_far_ahead()
    for slots, held in ((0, everybody), (4, everybody), (3, set()), (6, everybody)):
        runtime.info = replace(runtime.info, slots=slots)
        assert runtime.plan().held == held, slots
        runtime.held = frozenset()
    # one whom another replica answers does not ask here
    send(runtime, answer_events("f", 100.0, 9.0), first_seq=16)
    runtime.info = replace(runtime.info, slots=4)
    assert runtime.plan().held == everybody
    # a fifth session; four slots are too few for all, five are not
    send(runtime, [Event(EventKind.OPENED, "e", 100.0, 1.0)], first_seq=20)
    for slots, held in ((4, set()), (5, everybody)):
        runtime.info = replace(runtime.info, slots=slots)
        assert runtime.plan().held == held, slots
    # and whoever left asks for nothing more, also if they had asked
    runtime.info = replace(runtime.info, slots=4)
    scheduler.run.append(Request("e1", 100))
    runtime.round()
    scheduler.run.pop()
    runtime.round()
    assert runtime.plan().held == set()
    send(runtime, [Event(EventKind.CLOSED, "e", 100.0)], first_seq=21)
    assert runtime.plan().held == everybody


@pytest.mark.parametrize(
    ("slots", "most"), [(1, 0), (2, 0), (4, 1), (16, 10), (64, 52), (256, 232), (0, 10_000)]
)
def test_spare_slots_are_their_square_root(slots, most):
    """``most`` may run before somebody could find no slot."""
    assert not slots_short(most, slots)
    assert slots_short(most + 1, slots) is (slots > 0)


def test_users_who_may_ask_later_are_no_reason_to_hold():
    """What is put off for them is urgent when they ask. Who interrupts is: their audio is waste."""
    runtime, _, everybody = four_far_ahead()
    speaks = [Event(EventKind.OPENED, "e", 100.0, 1.0), Event(EventKind.SPEECH_STARTED, "e", 100.0)]
    send(runtime, speaks, first_seq=16)
    assert runtime.plan().held == everybody
    runtime.barge_in_rate = 0.0
    assert runtime.plan().held == set()
    send(runtime, [Event(EventKind.COMMITTED, "e", 100.0)], first_seq=18)
    assert runtime.plan().held == everybody


def test_nobody_is_held_where_held_requests_would_take_the_kv_of_new_users():
    runtime, scheduler, everybody = four_far_ahead()

    def held(used: int, promised: int) -> set[str]:
        scheduler.used, runtime.promised_blocks, runtime.held = used, promised, frozenset()
        runtime.round()
        return set(runtime.plan().held)

    assert held(9, 0) == everybody  # nobody else is there to want it
    send(runtime, [Event(EventKind.OPENED, "e", 100.0, 1.0)], first_seq=16)
    # a fifth session; five like these four take more than the ten blocks from nine in use on
    assert held(7, 0) == held(8, 0) == held(3, 5) == everybody
    assert held(9, 0) == held(3, 6) == set()


def test_promised_blocks_are_pressure_and_end_holds():
    """Who holds KV is let finish while nobody is admitted, whatever is still free."""
    config = LiveServeConfig(
        stages={"talker": StageConfig(p_safe_s=0.5, p_hold_s=2.0, beta=1000.0)}
    )
    runtime, scheduler = engine(config, clock=lambda: 100.0)
    scheduler.run = [Request("a1", 100), Request("b1", 100)]
    send(runtime, [event for name in "ab" for event in answer_events(name, 100.0, 9.0)])
    runtime.barge_in_rate = 0.5
    for promised, held in ((0, {"a1", "b1"}), (6, {"a1", "b1"}), (7, set()), (90, set())):
        runtime.promised_blocks = promised
        runtime.round()
        assert runtime.plan().held == held, promised
        runtime.held = frozenset()
    reply = send(runtime, [], first_seq=8)
    assert reply.snapshot.kv_blocks_used == 3  # promised is not used


def test_without_our_chunks_nobody_is_held():
    runtime, scheduler = engine(PACED, clock=lambda: 100.0)
    scheduler.run = [Request("a1", 100)]
    send(runtime, answer_events("a", 100.0, 9.0))
    runtime.barge_in_rate = 0.5
    assert runtime.plan().held == {"a1"}
    runtime.flip(Switches(chunking=False))
    assert runtime.plan().held == frozenset()


def test_an_engine_sleeps_until_the_deadline_only_if_a_message_can_end_it(monkeypatch):
    now, slept, waited = [100.0], [], []
    monkeypatch.setattr(time, "sleep", slept.append)
    runtime, scheduler = engine(PACED, clock=lambda: now[0])
    scheduler.run = [Request("a1", 100)]
    send(runtime, [*answer_events("a", 100.0, 9.0), Event(EventKind.BARGE_IN, "z", 100.0)])
    assert runtime.plan().held == {"a1"}  # for the age limit, 4 s
    runtime.doze(only_held=True)
    assert (slept, waited) == ([0.005], [])  # nothing would wake it
    runtime.wait_for_message = waited.append
    runtime.doze(only_held=False)
    assert (slept, waited) == ([0.005] * 2, [])
    runtime.doze(only_held=True)
    assert waited == [0.25]
    now[0] = 103.9
    runtime.doze(only_held=True)
    assert waited[1:] == [pytest.approx(0.1)]
    now[0] = 104.1
    runtime.doze(only_held=True)
    runtime.doze(only_held=False)
    assert (len(slept), len(waited)) == (2, 2)


def test_a_request_that_waits_for_input_is_not_overdue_when_it_comes():
    now = [100.0]
    runtime, scheduler = engine(PACED, clock=lambda: now[0])
    scheduler.run, scheduler.wait = [Request("a1", 60)], [Request("b1", 0)]
    send(runtime, answer_events("a", 100.0, 9.0) + answer_events("b", 100.0)[:3])
    scheduler.parked = {"a1"}
    for _ in range(40):
        now[0] += 0.5
        runtime.round()
        assert runtime.plan().order == ("b1",)
        runtime.scheduled(["b1"])
    scheduler.parked = set()
    scheduler.run[0].num_output_tokens = 600
    send(runtime, [Event(EventKind.AUDIO_ROUTED, "a", now[0], 30.0, "r")], first_seq=7)
    assert runtime.plan().order[0] == "b1"  # U1 goes first: a1 has not been starved


def test_who_can_wait_has_buffer_and_has_not_waited_long():
    now = [100.0]
    runtime, scheduler = engine(PACED, clock=lambda: now[0])
    scheduler.run = [Request("a1", 100), Request("b1", 5)]
    send(runtime, answer_events("a", 100.0, 9.0) + answer_events("b", 100.0))
    runtime.plan()
    assert runtime.can_wait("a1")
    assert not runtime.can_wait("b1")
    assert not runtime.can_wait("nobody")
    now[0] += 4.5
    runtime.round()
    runtime.plan()
    assert not runtime.can_wait("a1")
    runtime.scheduled(["a1"])
    assert runtime.can_wait("a1")


def test_switches_flip_at_run_time_each_for_itself():
    runtime, scheduler = engine(PACED, clock=lambda: 100.0)
    scheduler.run = [Request("a1", 100)]
    send(runtime, answer_events("a", 100.0, 9.0))
    send(runtime, [Event(EventKind.BARGE_IN, "z", 100.0)], first_seq=4)
    assert runtime.plan().held == {"a1"}  # users interrupt: running ahead is waste
    send(runtime, [], first_seq=5, switches=Switches(pace=False))
    assert runtime.plan().held == frozenset()
    send(runtime, [], first_seq=5, switches=Switches(order=False, pace=False))
    assert runtime.plan() is None
    send(runtime, [], first_seq=5, switches=Switches())
    assert runtime.plan().held == {"a1"}


def test_holds_follow_the_measured_chunk_time():
    runtime, scheduler = engine(clock=lambda: 100.0)
    scheduler.run = [Request("a1", 100)]
    before = runtime.policy.p_release_s
    runtime.sent_s["a1"] = 1.0
    for _ in range(200):
        runtime.chunk_times.framed(0.2)
        runtime.chunk_times.delivered(0.5, 1.0)
    send(runtime, answer_events("a", 100.0))
    runtime.plan()
    # 25 frames and a delivery, and the same for somebody's first 4
    assert runtime.policy.p_release_s == pytest.approx(29 * 0.2 + 2 * 0.5 + 0.3, rel=0.02)
    assert runtime.tight_policy.p_release_s == pytest.approx(25 * 0.2 + 0.5 + 0.3, rel=0.02)
    assert runtime.policy.p_release_s > before
    assert runtime.policy.p_hold_s > runtime.policy.p_release_s
    assert runtime.ranks["a1"].buffer_s == pytest.approx(1.0)  # what was sent, not what was made


def test_a_saturated_stage_holds_only_for_those_who_wait():
    runtime, scheduler = engine(clock=lambda: 100.0)
    scheduler.run = [Request("a1", 500)]
    runtime.sent_s["a1"] = 40.0
    runtime.barge_in_rate = 0.5
    send(runtime, answer_events("a", 100.0, 40.0))
    held = []
    for frame_s in (0.01, 0.02, 0.03, 0.02, 0.01):  # of 0.08
        for _ in range(100):
            runtime.chunk_times.framed(frame_s)
        runtime.round()
        runtime.held = frozenset()
        held.append(bool(runtime.plan().held))
        assert runtime.tight_policy.pace
    assert held == [True, True, False, False, True]  # it ends at less than it begins at
    for _ in range(100):
        runtime.chunk_times.framed(0.03)
    send(runtime, [Event(EventKind.COMMITTED, "b", 100.0)], first_seq=4)
    runtime.round()
    assert runtime.plan().held == {"a1"}


def test_without_views_the_order_is_the_hosts():
    runtime, scheduler = engine(PACED, clock=lambda: 100.0)
    names = [f"{name}1" for name in "qcxaz"]
    scheduler.wait = [Request(name) for name in names]
    send(runtime, [])
    assert list(runtime.plan().order) == names


def test_stale_views_fail_closed_and_a_resync_heals_them():
    runtime, scheduler = engine(clock=lambda: 100.0)
    scheduler.run = [Request("a1", 1)]
    tracker_view = None
    send(runtime, answer_events("a", 98.0))
    assert runtime.ranks["a1"].urgency is Urgency.U0
    reply = send(runtime, answer_events("b", 98.0), first_seq=50)
    assert reply.resync
    assert reply.snapshot.stale
    assert runtime.ranks["a1"].urgency is Urgency.U2
    assert runtime.ranks["a1"].buffer_s is None
    tracker_view = list(runtime.table)
    reply = send(runtime, [], first_seq=60, views=tracker_view)
    assert not reply.resync
    assert runtime.ranks["a1"].urgency is Urgency.U0


def test_garbage_from_the_wire_is_counted_never_raised():
    runtime, _ = engine()
    reply = decode_reply(runtime.exchange(b"\xc1garbage"))
    assert reply.resync
    assert reply.snapshot.errors_total == 1


def test_a_failing_round_leaves_the_host_alone(caplog):
    runtime, scheduler = engine()
    scheduler.run = [object()]  # no request at all
    for _ in range(3):
        runtime.round()
    assert runtime.ranks == {}
    assert runtime.errors == 3
    assert sum("keep the host's order" in r.message for r in caplog.records) <= 1


def test_while_somebody_here_is_urgent_the_others_are_held_sooner(monkeypatch):
    seen = []
    monkeypatch.setattr(
        "liveserve.runtime.plan",
        lambda *given, **more: seen.append(given[4]) or plan(*given, **more),
    )
    runtime, scheduler = engine(clock=lambda: 100.0)
    a, b = Request("a1", 30), Request("b1", 100)  # 0.4 s and 6 s ahead
    send(runtime, answer_events("a", 98.0) + answer_events("b", 98.0))
    for running in ([a, b], [b]):
        scheduler.run = running
        runtime.round()
        assert runtime.plan() is not None
    tight, usual = seen
    assert tight.p_hold_s < usual.p_hold_s


def test_who_has_left_is_forgotten_and_after_a_failure_all_are_back():
    now = [10.0]
    runtime, scheduler = engine(clock=lambda: now[0])
    a, b, c = (Request(f"{name}1", 1) for name in "abc")
    scheduler.run, scheduler.wait = [a], [b]
    runtime.round()
    scheduler.run, scheduler.wait = [a, object()], [b]
    runtime.round()
    assert runtime.ranks == {}
    now[0] = 12.0
    scheduler.run, scheduler.wait = [a], [c]  # one came, and one went
    runtime.round()
    assert list(runtime.ranks) == ["a1", "c1"]
    assert runtime.ranks["a1"].age_s == pytest.approx(2.0)
    scheduler.run, scheduler.wait = [a], [b]
    now[0] = 13.0
    runtime.round()
    assert set(runtime.ranks) == {"a1", "b1"}
    assert runtime.ranks["b1"].age_s == pytest.approx(0.0, abs=1e-3)  # it came back as a new one


def test_events_from_another_machine_are_moved_to_our_clock():
    now = [1000.0]
    runtime, _ = engine(clock=lambda: now[0])
    send(runtime, answer_events("a", 50.0), boot="elsewhere", sent_s=50.0)
    clock = runtime.table.get("a").clock
    assert clock.played_s(1001.0) == pytest.approx(1.0)
    now[0] = 1002.3  # this message took 0.3 s: the smaller delay counts
    send(
        runtime,
        [Event(EventKind.PLAYBACK, "a", 52.0, 1.5, "r")],
        first_seq=4,
        boot="elsewhere",
        sent_s=52.0,
    )
    assert clock.acked_at_s == pytest.approx(1002.0)


def test_steps_are_timed_also_when_they_overlap():
    now = [10.0]
    runtime, _ = engine(clock=lambda: now[0])
    now[0] = 10.1
    runtime.stepped(10.0, tokens=4)
    now[0] = 10.2
    runtime.stepped(10.05, tokens=4)  # scheduled while the first ran
    snapshot = runtime.snapshot()
    assert snapshot.step_ms == pytest.approx(100.0)
    assert (snapshot.steps_total, snapshot.tokens_total) == (2, 8)


def test_views_are_bounded_by_configuration():
    runtime, _ = engine(LiveServeConfig(max_sessions=5))
    for i in range(50):
        send(runtime, [Event(EventKind.OPENED, f"s{i}", float(i), 1.0)], first_seq=i)
    assert len(runtime.table) == 5


@pytest.mark.parametrize("count", [256])
def test_a_round_over_many_requests_is_cheap(count):
    """Bound with a wide margin for slow machines; the figure itself is in bench/results."""
    now = time.monotonic()
    runtime, scheduler = engine()
    for i in range(count):
        name = chr(0x100 + i)
        send(runtime, answer_events(name, now), first_seq=4 * i)
        scheduler.run.append(Request(f"{name}1", i))
    best = min(_timed(runtime.round) for _ in range(20))
    assert len(runtime.ranks) == count
    assert best < 0.02


def _timed(call) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started
