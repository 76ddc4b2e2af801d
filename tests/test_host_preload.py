"""Preload in a real engine: plain vLLM on the CPU, told of sessions as the API process would.

Every scenario has a session whose first turn is in DRAM alone, and compares the token ids of its
second with those of an engine without any of it.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import tiny_text
from test_host_connector import Tokens, ask, engine, leaks, manager, settle, worker
from tiny_text import Driver, Link, params, prompt

from liveserve.config import Switches
from liveserve.events import Event, EventKind, Prefetch
from liveserve.kernels.base import Direction

pytestmark = [pytest.mark.host, pytest.mark.alone]

BLOCK_BYTES = 65536
SLOW_GBPS = BLOCK_BYTES / 0.03 / 1e9  # 30 ms a block
SLOWER_GBPS = SLOW_GBPS / 4  # a preload still moves after a step, however long that takes
USER = "user"
OPENED, SPEECH, STOPPED, COMMITTED, BARGE_IN, RESUMED, CLOSED = (
    EventKind.OPENED,
    EventKind.SPEECH_STARTED,
    EventKind.SPEECH_STOPPED,
    EventKind.COMMITTED,
    EventKind.BARGE_IN,
    EventKind.RESUMED,
    EventKind.CLOSED,
)


def fill(driver: Driver, seed: int = 920) -> None:
    """Others use the whole pool at once, so that nothing else is left on the GPU."""
    names = [f"fill{time.monotonic()}-{number}" for number in range(3)]
    for number, (name, blocks) in enumerate(zip(names, (5, 5, 1), strict=True)):
        driver.add(name, prompt(seed + number, 32 * blocks - 8), params(8))
    driver.until(lambda: all(name in driver.finished for name in names))
    settle(driver)


class Talk:
    """One user in an engine, and what is found out.

    Attributes:
        history: token ids of the turn to come; its first 3 blocks were stored and evicted.
    """

    def __init__(self, driver: Driver, tokens: Tokens) -> None:
        self.driver, self.tokens, self.link = driver, tokens, Link(driver.core)
        self.link.tell(Event(OPENED, USER, time.monotonic(), 1.0, detail="duplex"))
        self.turns = 0
        self.history = prompt(1, 100)
        self.history += self.ask() + prompt(2, 20)
        settle(driver)
        fill(driver)

    def says(self, *kinds: EventKind, **more: Any) -> None:
        now_s = time.monotonic()
        self.link.tell(*(Event(kind, USER, now_s) for kind in kinds), **more)

    def ask(self) -> list[int]:
        self.turns += 1
        return ask(self.driver, f"{tiny_text.request_of(USER)}.{self.turns}", self.history)

    def waits(self) -> bool:
        """The turn to come finds its history under way, or not there."""
        return manager(self.driver).loading > 0

    def found(self, **more: Any) -> dict[str, Any]:
        """The turn's tokens, what preloading did, and what is left behind."""
        before = manager(self.driver).report().reloads
        same = self.ask() == self.tokens(self.history)
        settle(self.driver)
        snapshot = self.driver.scheduler.liveserve.snapshot()
        assert snapshot.kv is not None
        return {
            "same": same,
            "waited": manager(self.driver).report().reloads - before,
            "preload": msgspec.to_builtins(snapshot.kv.preload),
            "errors": snapshot.errors_total + manager(self.driver).errors,
            "leaks": leaks(self.driver),
        } | more


def speech(talk: Talk) -> dict[str, Any]:
    talk.says(SPEECH)
    settle(talk.driver)
    talk.says(STOPPED, COMMITTED)
    return talk.found()


def barge_in(talk: Talk) -> dict[str, Any]:
    talk.says(BARGE_IN)
    settle(talk.driver)
    talk.says(SPEECH, COMMITTED)
    return talk.found()


def resume(talk: Talk) -> dict[str, Any]:
    talk.says(RESUMED)
    settle(talk.driver)
    talk.says(COMMITTED)
    return talk.found()


def prefetch_session(talk: Talk) -> dict[str, Any]:
    talk.link.tell(prefetch=[Prefetch(USER, 5.0)])
    settle(talk.driver)
    return talk.found()


def prefetch_prefix(talk: Talk) -> dict[str, Any]:
    talk.link.tell(prefetch=[Prefetch("prefix-1", 5.0, talk.history)])
    settle(talk.driver)
    return talk.found()


def other_prefix(talk: Talk) -> dict[str, Any]:
    """Of another prompt nothing is there."""
    talk.link.tell(prefetch=[Prefetch("prefix-1", 5.0, prompt(77, 100))])
    settle(talk.driver)
    return talk.found()


def late(talk: Talk) -> dict[str, Any]:
    """The request comes while its preload moves."""
    talk.says(SPEECH)
    talk.driver.step()
    moving = talk.waits()
    talk.says(COMMITTED)
    return talk.found(moving=moving)


def closed(talk: Talk) -> dict[str, Any]:
    """The client goes while its preload moves."""
    talk.says(SPEECH)
    talk.driver.step()
    moving = talk.waits()
    talk.says(CLOSED)
    return talk.found(moving=moving)


def lost(talk: Talk) -> dict[str, Any]:
    """The engine misses an event while a preload moves."""
    talk.says(SPEECH)
    talk.driver.step()
    moving = talk.waits()
    talk.link._next += 7
    talk.says(STOPPED)
    return talk.found(moving=moving)


def evicted(talk: Talk) -> dict[str, Any]:
    """Somebody else takes the blocks between preload and turn."""
    talk.says(SPEECH)
    settle(talk.driver)
    fill(talk.driver, seed=930)
    talk.says(COMMITTED)
    found = talk.found()
    return found | {"loaded": manager(talk.driver).report().loaded}


def fails(talk: Talk) -> dict[str, Any]:
    link = worker().engine.link
    copy, failures = link.method.copy, [OSError("no copy")]

    def broken(*args: Any) -> None:
        if failures and args[0] is Direction.LOAD:
            raise failures.pop()
        copy(*args)

    link.method.copy = broken
    talk.says(SPEECH)
    settle(talk.driver)
    return talk.found(failed=manager(talk.driver).report().load_failed)


def switched_off(talk: Talk) -> dict[str, Any]:
    talk.link.tell(switches=Switches(kv_preload=False))
    talk.says(SPEECH)
    settle(talk.driver)
    talk.says(COMMITTED)
    return talk.found()


def pressed(talk: Talk) -> dict[str, Any]:
    """A request needs the whole pool while a preload moves."""
    talk.says(SPEECH)
    talk.driver.step()
    moving = talk.waits()
    began_s = time.monotonic()
    fill(talk.driver, seed=940)
    return talk.found(moving=moving, filled_in_s=time.monotonic() - began_s)


def overloaded(talk: Talk) -> dict[str, Any]:
    """Nothing would arrive in time: first text comes as soon as without preload."""

    def turn(on: bool) -> float:
        fill(talk.driver)
        settle(talk.driver)
        talk.says(switches=Switches(kv_preload=on))
        if on:
            talk.link.tell(prefetch=[Prefetch(USER, 0.03)])
            talk.driver.step()
        began_s = time.monotonic()
        talk.turns += 1
        name = f"{tiny_text.request_of(USER)}.{talk.turns}"
        talk.driver.add(name, talk.history, params(1))
        talk.driver.until(lambda: name in talk.driver.finished)
        return time.monotonic() - began_s

    turn(False)
    times: dict[bool, list[float]] = {False: [], True: []}
    for _ in range(5):
        for on in times:
            times[on].append(turn(on))
    fill(talk.driver)
    on_s, off_s = (statistics.median(times[on]) for on in (True, False))
    return talk.found(on_s=on_s, off_s=off_s)


SCENARIOS: dict[Callable[[Talk], dict[str, Any]], float] = {
    speech: 1.0,
    barge_in: 1.0,
    resume: 1.0,
    prefetch_session: 1.0,
    prefetch_prefix: 1.0,
    other_prefix: 1.0,
    evicted: 1.0,
    fails: 1.0,
    switched_off: 1.0,
    late: SLOWER_GBPS,
    closed: SLOWER_GBPS,
    lost: SLOWER_GBPS,
    pressed: SLOWER_GBPS,
    overloaded: SLOW_GBPS,
}


def scenarios(folder: Path) -> dict[str, Any]:
    tiny_text.write_model(folder)
    tokens, found = Tokens(folder), {}
    for scenario, gbps in SCENARIOS.items():
        with engine(folder, extra={"link_gbps": gbps}) as driver:
            found[scenario.__name__] = scenario(Talk(driver, tokens))
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return tiny_text.findings(scenarios, tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize("name", [scenario.__name__ for scenario in SCENARIOS])
def test_the_same_tokens_and_nothing_left_behind(found, name):
    one = found[name]
    assert one["same"]
    assert one["leaks"] == []
    assert one["errors"] == 0
    assert (one["preload"]["now_loading"], one["preload"]["now_wanted"]) == (0, 0)


@pytest.mark.parametrize(
    ("name", "cause"),
    [
        ("speech", "speech"),
        ("barge_in", "barge-in"),
        ("resume", "resume"),
        ("prefetch_session", "prefetch"),
    ],
)
def test_every_trigger_has_the_history_there_when_the_request_comes(found, name, cause):
    one = found[name]
    assert one["waited"] == 0
    assert one["preload"]["wanted"][cause] == 1
    assert one["preload"]["hits"] == 1
    assert one["preload"]["loaded_blocks"] >= 3


def test_a_prefix_is_loaded_by_its_tokens_alone(found):
    assert found["prefetch_prefix"]["waited"] == 0
    assert found["prefetch_prefix"]["preload"]["loaded_blocks"] >= 3
    assert found["other_prefix"]["waited"] == 1
    assert found["other_prefix"]["preload"]["admitted"] == 0


def test_without_the_switch_the_request_loads(found):
    one = found["switched_off"]
    assert one["waited"] == 1
    assert one["preload"]["admitted"] == 0


def test_a_preload_that_comes_late_is_joined(found):
    one = found["late"]
    assert one["moving"]
    assert one["preload"]["late"] == 1
    assert one["preload"]["cancelled"] == {}


@pytest.mark.parametrize(("name", "reason"), [("closed", "closed"), ("lost", "stale")])
def test_a_preload_that_nobody_waits_for_is_cancelled(found, name, reason):
    one = found[name]
    assert one["moving"]
    assert one["preload"]["cancelled"] == {reason: 1}
    assert one["preload"]["hits"] == 0


def test_blocks_that_were_evicted_again_or_never_came_are_loaded(found):
    assert found["evicted"]["loaded"] >= 6
    assert found["fails"]["failed"] == 3


def test_a_request_that_needs_the_room_gets_it(found):
    one = found["pressed"]
    assert one["moving"]
    assert one["preload"]["cancelled"]["pressure"] >= 1


def test_under_an_overloaded_link_first_text_is_no_later_than_without_preload(found):
    one = found["overloaded"]
    assert one["preload"]["refused"]["link"] >= 5
    assert one["preload"]["admitted"] == 0
    print(f"first token: {1e3 * one['on_s']:.0f} ms with, {1e3 * one['off_s']:.0f} ms without")
    assert one["on_s"] < 2.0 * one["off_s"] + 0.05
