"""Warm-ups, without a host: when one may run, and what became of what it computed."""

from __future__ import annotations

import itertools

import pytest

from liveserve.host.sessions import is_warmup, session_of, warmup_id
from liveserve.scheduler.urgency import Urgency
from liveserve.scheduler.views import Phase, SessionView
from liveserve.scheduler.warmup import Ledger, last_useful, may_run, runs_dry

U0, U1, U2 = Urgency
BLOCK = 32


def calm(**changes):
    return {"first_audio_waits": False, "others_prefill": False, "trusted": True} | changes


def test_beside_requests_that_can_wait_a_warmup_runs():
    assert may_run([], **calm())
    assert may_run([U2, U2], **calm())


@pytest.mark.parametrize("size", [1, 2, 3])
def test_never_beside_anybody_urgent(size):
    for classes in itertools.product(Urgency, repeat=size):
        assert may_run(classes, **calm()) is (set(classes) == {U2})


@pytest.mark.parametrize(
    "change", [{"first_audio_waits": True}, {"others_prefill": True}, {"trusted": False}]
)
def test_never_while_somebody_waits_or_nobody_knows(change):
    assert not may_run([U2], **calm(**change))


def speaking(routed_s: float, *, complete: bool = False) -> SessionView:
    view = SessionView("s", phase=Phase.SPEAKING)
    view.clock.route(routed_s, 0.0)
    view.clock.complete = complete
    return view


def test_a_listener_about_to_run_dry_is_told_from_one_whose_answer_is_all_there():
    assert not runs_dry([speaking(5.0)], 0.5, now_s=1.0)
    assert runs_dry([speaking(50.0), speaking(5.0)], 0.5, now_s=4.6)
    assert not runs_dry([speaking(5.0, complete=True)], 0.5, now_s=4.6)
    assert not runs_dry([SessionView("listening", phase=Phase.LISTENING)], 0.5, now_s=0.0)


@pytest.mark.parametrize(
    ("prompt", "useful"), [(0, 0), (1, 0), (32, 0), (33, 32), (64, 32), (65, 64), (200, 192)]
)
def test_whole_blocks_and_never_the_last_token(prompt, useful):
    assert last_useful(prompt, BLOCK) == useful


def totals(ledger: Ledger) -> tuple[int, int, int]:
    report = ledger.report()
    return report.computed // BLOCK, report.used // BLOCK, report.wasted // BLOCK


def test_what_a_turn_finds_was_used_and_the_rest_wasted():
    ledger = Ledger(BLOCK)
    ledger.begun(64)
    ledger.ended("a", [1, 2, 3, 4], "done")
    assert totals(ledger) == (4, 0, 0)
    ledger.turn("a", [9, 1, 2])
    assert totals(ledger) == (4, 2, 2)
    ledger.turn("a", [1, 2, 3])  # nothing is counted twice
    ledger.over("a")
    assert totals(ledger) == (4, 2, 2)
    report = ledger.report(now=1)
    assert (report.begun, report.now, report.found, report.ended) == (1, 1, 64, {"done": 1})


def test_abandoned_speech_is_wasted_when_the_session_is_over_and_used_by_its_next_turn():
    ledger = Ledger(BLOCK)
    ledger.ended("a", [1, 2], "cancelled")
    ledger.ended("b", [3], "cancelled")
    assert totals(ledger) == (3, 0, 0)
    ledger.over("a")
    assert totals(ledger) == (3, 0, 2)
    ledger.turn("b", [3])
    assert totals(ledger) == (3, 1, 2)


def test_another_sessions_turn_may_use_it_and_decides_nothing_for_the_owner():
    ledger = Ledger(BLOCK)
    ledger.ended("a", [1, 2], "done")
    ledger.turn("b", [1])
    assert totals(ledger) == (2, 1, 0)
    ledger.turn("a", [1, 2])
    assert totals(ledger) == (2, 2, 0)


def test_what_is_computed_again_was_wasted_once():
    ledger = Ledger(BLOCK)
    ledger.ended("a", [1, 2], "done")
    ledger.ended("b", [2, 3], "done")  # 2 was evicted in between
    assert totals(ledger) == (4, 0, 1)
    ledger.turn("b", [2, 3])
    ledger.turn("a", [1])
    assert totals(ledger) == (4, 3, 1)


def test_memory_is_bounded():
    ledger = Ledger(BLOCK, max_owners=2)
    for number in range(5):
        ledger.ended(f"s{number}", [number], "done")
    assert totals(ledger) == (5, 0, 3)
    ledger.turn("s4", [0, 4])
    assert totals(ledger) == (5, 1, 3)


def test_a_warmup_is_told_by_its_id_and_belongs_to_its_session():
    for session in ("s-1", "ü.☃/?", "x" * 200):
        name = warmup_id(session, 3)
        assert is_warmup(name)
        assert session_of(name) == session
        assert session_of(name + "-0a1b2c3d") == session  # an engine's suffix
    assert warmup_id("s", 1) != warmup_id("s", 2)
    for other in ("duplex-s.YQ.e.0.r.stage0-turn1", "chatcmpl-1", "YQ"):
        assert not is_warmup(other)
    assert session_of("duplex-s.YQ.e.0.r.stage0-turn1") == "a"
