"""Which replica takes a turn: the policy, the book that feeds it, what the engines hear of it."""

from __future__ import annotations

import asyncio
import math
import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from liveserve.config import LiveServeConfig
from liveserve.events import (
    Batch,
    Event,
    EventKind,
    KvSessionRow,
    KvSnapshot,
    PressureSnapshot,
    Reply,
    boot_id,
    decode_batch,
    decode_reply,
    encode,
)
from liveserve.kv_preload import KvPreload
from liveserve.kv_signals import KvSignals, KvStage
from liveserve.kvtier.policies import NextUsePolicy
from liveserve.kvtier.preload import PreloadLimits
from liveserve.metrics import Metrics
from liveserve.monitor import Monitor
from liveserve.replicas import MAX_AGE_S, QUIET_S, ReplicaBook
from liveserve.runtime import StageInfo, StageRuntime
from liveserve.scheduler.replicas import (
    WHYS,
    Choice,
    PrefillCost,
    ReplicaPolicy,
    ReplicaView,
    choose,
    cost_s,
)
from liveserve.scheduler.views import SessionView
from liveserve.session import SessionTable

BLOCK = 16
POLICY = ReplicaPolicy()
TOKENS = st.integers(0, 10_000)
SECONDS = st.floats(0.0, 5.0)
VIEWS = st.lists(
    st.builds(
        ReplicaView,
        st.integers(0, 7),
        SECONDS,
        TOKENS,
        TOKENS,
        st.floats(1e-6, 1e-3),
        st.floats(0.0, 1e-4),
    ),
    min_size=2,
    max_size=6,
    unique_by=lambda view: view.replica_id,
)
LAST = st.one_of(st.none(), st.integers(0, 8))


def view(replica_id, queue_s=0.0, gpu=0, dram=0, prefill_s=1e-3, load_s=1e-5):
    return ReplicaView(replica_id, queue_s, gpu, dram, prefill_s, load_s)


# ---- the policy ----------------------------------------------------------------------------


@settings(max_examples=150, deadline=None)
@given(VIEWS, TOKENS, LAST, st.randoms(use_true_random=False))
def test_it_is_deterministic_and_order_does_not_matter(views, history, last, draw):
    choice = choose(views, history, last)
    shuffled = draw.sample(views, k=len(views))
    assert choose(shuffled, history, last) == choice
    assert choice.why in WHYS
    assert choice.replica_id is None or choice.replica_id in {v.replica_id for v in views}


@settings(max_examples=150, deadline=None)
@given(VIEWS, TOKENS, LAST)
def test_nothing_it_chooses_costs_much_more_than_the_best(views, history, last):
    choice = choose(views, history, last)
    costs = {v.replica_id: cost_s(v, history) for v in views}
    best = min(costs.values())
    if choice.replica_id is not None:
        assert not POLICY.is_worse(costs[choice.replica_id], best)
    if choice.why in ("queue", "load"):
        assert costs[choice.replica_id] == best
    if choice.why == "tie":  # whatever the host does, it is not far off
        assert not POLICY.is_worse(max(costs.values()), best)


@settings(max_examples=150, deadline=None)
@given(VIEWS, TOKENS, LAST, st.data())
def test_what_is_not_known_is_left_to_the_host(views, history, last, data):
    index = data.draw(st.integers(0, len(views) - 1))
    name = data.draw(st.sampled_from(["queue_s", "gpu_tokens", "dram_tokens", "prefill_token_s"]))
    bad = data.draw(st.sampled_from([None, math.nan, math.inf, -1]))
    views[index] = replace(views[index], **{name: bad})
    assert choose(views, history, last) == Choice(None, "unknown")


def test_a_load_rate_is_needed_only_for_what_is_in_dram():
    without = replace(view(0, gpu=500), load_token_s=None)
    assert choose([without, view(1)], 1000, 0).replica_id == 0
    assert choose([replace(without, dram_tokens=1), view(1)], 1000, 0) == (None, "unknown")


@settings(max_examples=150, deadline=None)
@given(VIEWS, TOKENS, LAST, st.floats(0.0, 100.0))
def test_a_longer_queue_at_home_never_keeps_a_turn_that_a_shorter_one_moved(
    views, history, last, more_s
):
    choice = choose(views, history, last)
    if choice.why != "queue":
        return
    home = (
        last if any(v.replica_id == last and v.gpu_tokens + v.dram_tokens for v in views) else None
    )
    if home is None:
        return
    longer = [replace(v, queue_s=v.queue_s + more_s) if v.replica_id == home else v for v in views]
    assert choose(longer, history, last) == choice


@pytest.mark.parametrize(
    ("views", "last", "expected"),
    [
        ([view(0, gpu=8000), view(1)], 0, (0, "kept")),
        ([view(0, 3.0, gpu=8000), view(1)], 0, (0, "kept")),  # 3 s of queue, 8 s of prefill
        ([view(0, 20.0, gpu=8000), view(1)], 0, (1, "queue")),
        # in DRAM it is nearly as good as on the GPU
        ([view(0, 3.0, dram=8000), view(1)], 0, (0, "kept")),
        # nothing is left at home: another one that has it, or the one with less to do, or any
        ([view(0), view(1, gpu=4000)], 0, (1, "kept")),
        ([view(0, 30.0), view(1)], 0, (1, "load")),
        ([view(0), view(1)], 0, (None, "tie")),
        # home is gone
        ([view(1), view(2)], 0, (None, "tie")),
        ([view(1, gpu=100), view(2)], 0, (1, "kept")),
        ([view(0, gpu=8000)], 0, (None, "single")),
        ([], None, (None, "single")),
    ],
)
def test_cases(views, last, expected):
    assert choose(views, 8000, last) == expected


def test_a_new_session_has_no_home_and_avoids_a_queue():
    assert choose([view(0), view(1)], 0, None) == (None, "tie")
    assert choose([view(0, 0.04), view(1)], 0, None) == (None, "tie")
    assert choose([view(0, 1.0), view(1)], 0, None) == (1, "load")


@settings(max_examples=60, deadline=None)
@given(st.integers(2, 4), st.integers(0, 2**32), st.floats(1e-5, 1e-3))
def test_sessions_do_not_flap(replicas, seed, prefill_s):
    """Queues that differ by less than a move must gain move nobody, though every replica has the
    history; one that is overloaded for a while is left once and not returned to by chance.
    """
    draw, held = random.Random(seed), {r: 1000 for r in range(replicas)}
    last, moves = 0, 0
    for turn in range(40):
        base = 3.0 if 10 <= turn < 20 else 0.0
        queues = {r: draw.uniform(0, POLICY.gain_s) + (base if r == 0 else 0.0) for r in held}
        views = [view(r, queues[r], held[r], prefill_s=prefill_s) for r in held]
        chosen, _ = choose(views, 1000, last)
        assert chosen is not None
        moves += chosen != last
        last = chosen
    assert (moves, last != 0) == (1, True)


@pytest.mark.parametrize("setting", [{"gain_s": -1.0}, {"gain_share": math.nan}])
def test_a_bad_policy_names_the_setting(setting):
    with pytest.raises(ValueError, match=next(iter(setting))):
        ReplicaPolicy(**setting)


def test_what_a_token_of_prefill_costs():
    cost = PrefillCost()
    assert cost.token_s is None
    cost.stepped(5.0, 500)  # the first one compiles
    assert cost.token_s == pytest.approx(0.01)
    for _ in range(30):
        cost.stepped(0.02, 4)
        cost.stepped(0.02 + 500 * 1e-4, 500)
    assert cost.token_s == pytest.approx(1e-4, rel=0.05)
    cost.stepped(0.001, 100)  # less than an ordinary step: still a cost, and never a negative one
    assert cost.token_s > 0


# ---- what the API process knows ------------------------------------------------------------


def pressure(queued=0, wait_s=0.0, prefill_us=1000.0, load_block_s=0.0):
    return PressureSnapshot(
        queued_tokens=queued,
        oldest_wait_s=wait_s,
        prefill_token_us=prefill_us,
        kv=KvSnapshot(block_tokens=BLOCK, load_block_s=load_block_s),
    )


def turn(book, session, request, replica, now_s, *, prompt=800, cached=0, made=20):
    left = book.submitted(session, request, replica, prompt, now_s)
    book.answered(session, request, replica, prompt, cached, made)
    return left


def test_a_session_stays_where_its_turns_were():
    book = ReplicaBook(8)
    for replica in (0, 1):
        book.told(replica, pressure(), [], 0.0, 0.1)
    assert book.choose("a", "a1", (0, 1), 0.2) is None
    assert turn(book, "a", "a1", 1, 0.2) is None
    assert book.choose("a", "a2", (0, 1), 0.3) == 1
    assert turn(book, "a", "a2", 1, 0.3, prompt=900, cached=800) is None
    report = book.report(on=True)
    assert report["choices"] == {"tie": 1, "kept": 1}
    assert (report["sessions"], report["moved"]) == ({"1": 1}, 0)
    assert (report["prompt_tokens"], report["cached_tokens"]) == (900, 800)


def test_it_moves_when_waiting_costs_more_and_says_what_it_left():
    book = ReplicaBook(8)
    for replica in (0, 1):
        book.told(replica, pressure(), [], 0.0, 0.1)
    turn(book, "a", "a1", 0, 0.2)
    book.told(0, pressure(queued=700), [], 0.3, 0.3)  # 0.7 s, and 0.82 s of prefill elsewhere
    assert book.choose("a", "a2", (0, 1), 0.3) == 0
    book.ended(["a2"])
    book.told(0, pressure(queued=7000), [], 0.4, 0.4)
    assert book.choose("a", "a3", (0, 1), 0.4) == 1
    assert turn(book, "a", "a3", 1, 0.4) == 0
    assert turn(book, "a", "a4", 1, 0.5) is None
    assert book.report(on=True)["moved"] == 1


def test_who_waits_for_memory_is_a_queue_too():
    book = ReplicaBook(8)
    for replica in (0, 1):
        book.told(replica, pressure(wait_s=0.0 if replica else 5.0), [], 0.0, 0.1)
    turn(book, "a", "a1", 0, 0.2)
    assert book.choose("a", "a2", (0, 1), 0.2) == 1


def test_what_was_submitted_since_counts_until_the_engine_tells_of_it():
    book = ReplicaBook(8)
    for replica in (0, 1):
        book.told(replica, pressure(), [], 0.0, 0.1)

    def queue_s(replica):
        return {v.replica_id: v.queue_s for v in book.views("x", (0, 1), 0.3)}[replica]

    book.submitted("a", "a1", 0, 500, 0.2)
    book.sent("chat", 0, 300, 0.2)
    assert queue_s(0) == pytest.approx(0.8)
    book.told(0, pressure(queued=500), [], 0.15, 0.25)  # was asked before they were sent
    assert queue_s(0) == pytest.approx(1.3)
    book.told(0, pressure(queued=800), [], 0.25, 0.3)
    assert queue_s(0) == pytest.approx(0.8)
    book.submitted("b", "b1", 1, 400, 0.3)
    assert queue_s(1) == pytest.approx(0.4)
    book.answered("b", "b1", 1, 400, 0, 1)
    assert queue_s(1) == 0.0
    # chosen, and on its way
    book.told(1, pressure(), [], 0.3, 0.3)
    assert book.choose("b", "b2", (0, 1), 0.3) == 1
    assert queue_s(1) == pytest.approx(1e-3)
    book.ended(["b2"])
    assert queue_s(1) == 0.0
    # a warm-up is nobody's queue
    book.choose("b", "warm-up", (0, 1), 0.3, counted=False)
    assert (queue_s(1), sum(book.totals.choices.values())) == (0.0, 1)


def test_an_engine_that_does_not_answer_is_busy_and_then_unknown():
    book = ReplicaBook(8)
    for replica in (0, 1):
        book.told(replica, pressure(), [], 0.0, 0.0)
    turn(book, "a", "a1", 0, 0.0)
    book.told(1, pressure(), [], 9.0, 9.0)
    views = book.views("a", (0, 1), 10.0)
    assert [v.queue_s for v in views] == [pytest.approx(10.0 - QUIET_S), 0.0]
    assert book.choose("a", "a2", (0, 1), 10.0) == 1
    assert book.choose("a", "a3", (0, 1), MAX_AGE_S + 0.1) is None
    assert book.choose("a", "a4", (0, 1, 2), 10.0) is None  # one that never said anything
    assert book.totals.choices["unknown"] == 2


def test_what_the_engines_say_of_a_session_replaces_what_was_assumed():
    book = ReplicaBook(8)
    for replica in (0, 1):
        book.told(replica, pressure(load_block_s=1e-3), [], 0.0, 0.1)
    turn(book, "a", "a1", 0, 0.2, prompt=800, made=0)
    assert [(v.gpu_tokens, v.dram_tokens) for v in book.views("a", (0, 1), 0.2)] == [
        (800, 0),
        (0, 0),
    ]
    rows = [KvSessionRow("a", gpu_blocks=10, dram_blocks=40), KvSessionRow("unknown", 5)]
    book.told(0, pressure(load_block_s=1e-3), rows, 0.3, 0.3)
    first, _ = book.views("a", (0, 1), 0.3)
    assert (first.gpu_tokens, first.dram_tokens) == (160, 480)
    assert cost_s(first, 800) == pytest.approx(480 * 1e-3 / BLOCK + 160 * 1e-3)
    # all of it was evicted, everywhere
    book.told(0, pressure(), [KvSessionRow("a")], 0.4, 0.4)
    assert book.choose("a", "a2", (0, 1), 0.4) is None


def test_a_replica_that_died_is_forgotten():
    book = ReplicaBook(8)
    for replica in (0, 1, 2):
        book.told(replica, pressure(), [], 0.0, 0.1)
    turn(book, "a", "a1", 0, 0.2)
    book.keep([1, 2])
    assert book.choose("a", "a2", (1, 2), 0.3) is None
    assert [v.gpu_tokens for v in book.views("a", (0, 1), 0.3)] == [0, 0]


def test_memory_is_bounded_and_closing_forgets():
    book = ReplicaBook(4)
    for number in range(20):
        book.submitted(f"s{number}", f"r{number}", 0, 10, 0.0)
    assert (len(book._sessions), len(book._sent)) == (4, 4)
    for number in range(20):
        book.closed(f"s{number}")
        book.ended([f"r{number}"])
    assert not book._sessions
    assert not book._sent
    assert turn(book, "s1", "r1", 1, 0.0) is None  # as if it were new


def test_engines_are_asked_when_a_turn_nears_and_not_for_every_event():
    book = ReplicaBook(8)
    assert not book.asks("a", 0.0, at_once=True)  # not a session that anybody serves
    book.submitted("a", "a1", 0, 10, 0.0)
    asked = [book.asks("a", at_s, at_once=at_s == 0.5) for at_s in (0.1, 0.2, 0.5, 0.9, 1.6)]
    assert asked == [True, False, True, False, True]


def test_metrics_count_on():
    registry, book = CollectorRegistry(), ReplicaBook(8)
    metrics = Metrics(registry)
    for _ in range(2):
        book.left_to_host("off")
        book.submitted("a", "a1", book.totals.moved % 2, 10, 0.0)
        book.submitted("a", "a2", 1 - book.totals.moved % 2, 10, 0.0)
        metrics.replicas(book.totals)
        metrics.replicas(book.totals)
    assert registry.get_sample_value("liveserve_replica_choices_total", {"why": "off"}) == 2
    assert registry.get_sample_value("liveserve_replica_moves_total") == book.totals.moved > 1


# ---- what the engines are told and tell ----------------------------------------------------


def test_a_move_is_told_to_the_replica_that_was_left_and_kv_is_asked_of_all():
    sent: dict[tuple[int, int], list[Batch]] = {}

    def engine(key):
        async def answer(payload):
            sent.setdefault(key, []).append(decode_batch(payload))
            return encode(Reply(PressureSnapshot()))

        return answer

    async def run():
        config, table = LiveServeConfig(), SessionTable(8)
        engines = {key: engine(key) for key in ((0, 0), (0, 1), (1, 0))}
        monitor = Monitor(config, table, lambda: engines)
        monitor._refresh_links()
        for link in monitor.links.values():
            await monitor._exchange(link, detail=False)
        assert (monitor.replicas(0), monitor.replicas(1)) == (2, 1)
        monitor.tell((0, 0), Event(EventKind.MOVED, "a", 0.0))
        monitor.tell((0, 5), Event(EventKind.MOVED, "a", 0.0))
        monitor.ask_kv(0, "a")
        monitor.ask_kv(0, "a")
        for _ in range(2):
            for link in monitor.links.values():
                await monitor._exchange(link, detail=False)

    asyncio.run(run())
    seen = {key: [(len(b.events), b.kv_of) for b in batches[1:]] for key, batches in sent.items()}
    assert seen == {
        (0, 0): [(1, ["a"]), (0, [])],
        (0, 1): [(0, ["a"]), (0, [])],
        (1, 0): [(0, []), (0, [])],
    }


class Gpu:
    """What a `KvStage` asks of the GPU."""

    def blocks_of(self, session):
        return {"a": 3}.get(session, 0)

    def fill(self, snapshot):
        snapshot.block_tokens = BLOCK


class Dram:
    def sessions(self):
        return {"a": 5, "b": 7}

    def report(self):
        return None


class Queues:
    def running(self):
        return []

    waiting = running

    def can_run(self, request):
        return True

    def kv_blocks(self):
        return 0, 10

    def kv_blocks_of(self, request):
        return 0


def test_an_engine_tells_of_the_sessions_it_is_asked_about():
    runtime = StageRuntime(StageInfo(0, "thinker"), LiveServeConfig(), Queues(), lambda rid: rid)
    runtime.kv = KvStage(KvSignals(8), Gpu(), runtime.now_s, tier=Dram())
    runtime.queued_tokens = lambda: 123
    runtime.stepped(runtime.now_s() - 0.5, 1, taken=500)

    def ask(sessions):
        batch = Batch(boot_id(), runtime.now_s(), 0, [], views=[], kv_of=sessions)
        return decode_reply(runtime.exchange(encode(batch)))

    reply = ask(["a", "b", "c"])
    rows = [(row.session_id, row.gpu_blocks, row.dram_blocks) for row in reply.kv_sessions]
    assert rows == [("a", 3, 5), ("b", 0, 7), ("c", 0, 0)]
    assert reply.snapshot.queued_tokens == 123
    assert reply.snapshot.prefill_token_us == pytest.approx(1000.0, rel=0.2)
    assert ask([]).kv_sessions == []


# ---- KV drains -----------------------------------------------------------------------------


def happen(signals, table, kind, session, at_s, detail="", value_s=1.0):
    event = Event(kind, session, at_s, value_s, "", detail)
    signals.happened(event, table.apply(event))


@pytest.mark.parametrize(
    ("kind", "detail"),
    [
        (EventKind.CLOSED, "client_close"),
        (EventKind.CLOSED, "idle_ttl_expired"),
        (EventKind.CLOSED, "disconnect_grace_expired"),
        (EventKind.MOVED, ""),
    ],
)
@pytest.mark.parametrize("later", [False, True])
def test_kv_of_a_session_that_closes_or_moves_away_goes_first(kind, detail, later):
    """On every replica: of those that it left by moving, too, though it goes on elsewhere."""
    signals, table = KvSignals(8), SessionTable(8)
    policy = NextUsePolicy(8, signals.next_use)
    for session in ("gone", "stays"):
        for what in (EventKind.OPENED, EventKind.COMMITTED):
            happen(signals, table, what, session, 1.0, "duplex")
    # It will be needed in a minute, and the other one at once.
    happen(signals, table, EventKind.RESPONSE_CREATED, "stays", 1.0)
    happen(signals, table, EventKind.AUDIO_ROUTED, "stays", 1.0, value_s=60.0)
    assert signals.next_use.get("stays").next_use_s > 60.0
    policy.use("gone", [0, 1, 2], 1.0)
    policy.use("stays", [3, 4, 5], 1.0)
    for block in (2, 1, 0, 5, 4, 3):
        policy.free([block], 1.0)
    happen(signals, table, EventKind.SPEECH_STARTED, "gone", 2.0)
    happen(signals, table, kind, "gone", 2.0, detail)
    if later and kind is EventKind.MOVED:
        for what in (EventKind.SPEECH_STARTED, EventKind.COMMITTED, EventKind.RESPONSE_DONE):
            happen(signals, table, what, "gone", 3.0, "completed")
    assert set(policy.evict(3, 3.0)) == {0, 1, 2}


class Loads:
    block_bytes = 1000

    def __init__(self):
        self.asked = []

    def offloaded(self, session, keys):
        self.asked.append(session)
        return []

    def spare(self, count, wait_s, now_s):
        return count

    def estimate_s(self, num_bytes):
        return 0.5 + num_bytes * 1e-6

    def cancel(self, job): ...

    def promote(self, job): ...


def test_what_moved_away_is_not_preloaded_until_a_turn_comes_back():
    loads, session = Loads(), SessionView("a")
    preload = KvPreload(loads, PreloadLimits(), lambda: True, lambda ids: [])
    assert preload.block_s == pytest.approx(1e-3)

    def speaks(at_s):
        loads.asked.clear()
        preload.happened(Event(EventKind.SPEECH_STARTED, "a", at_s), session)
        preload.step(at_s)
        preload.happened(Event(EventKind.SPEECH_STOPPED, "a", at_s + 0.5), session)
        preload.happened(Event(EventKind.RESPONSE_DONE, "a", at_s + 0.6), session)
        return loads.asked[:1]

    assert speaks(1.0) == ["a"]
    preload.happened(Event(EventKind.MOVED, "a", 10.0), session)
    assert preload.preloader.num_wanted == 0
    assert speaks(11.0) == []
    session.speech_active = True
    preload.load([session], 12.0)
    assert preload.preloader.num_wanted == 0
    session.speech_active = False
    preload.arrived("a", 13.0)
    assert speaks(14.0) == ["a"]
