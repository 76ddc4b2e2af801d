"""Order and holds inside a real engine: plain vLLM on the CPU, one process, step by step."""

from __future__ import annotations

import asyncio
import dataclasses
import multiprocessing
import time
from pathlib import Path
from typing import Any

import pytest
import tiny_text
from tiny_text import OURS, Driver, Link, asks, hears, params, prompt, request_of

from liveserve.config import LiveServeConfig, StageConfig, export
from liveserve.events import Batch, Event, EventKind, PressureSnapshot, decode_reply, encode
from liveserve.host.engine import METHOD

pytestmark = [pytest.mark.host, pytest.mark.alone]


def scenarios(folder: Path) -> dict[str, Any]:
    tiny_text.write_model(folder)
    return {"order": order(folder), "hold": hold(folder), "sleep": sleep(folder)}


def order(folder: Path) -> list[str]:
    """Who finishes when one runs at a time: b and c wait for first audio, c for longer."""
    driver = Driver(tiny_text.make(folder, OURS, max_num_seqs=1))
    names = {request_of("b"): "b", request_of("c"): "c", "nobody": "nobody"}
    now_s = time.monotonic()
    Link(driver.core).tell(*asks("b", now_s), *asks("c", now_s))
    for request_id in ("nobody", request_of("c"), request_of("b")):
        driver.add(request_id, prompt(1, 5), params(3))
    driver.run_out()
    return [names[request_id] for request_id in driver.finished]


def hold(folder: Path) -> dict[str, Any]:
    """a runs far ahead of its listener while b waits for its first audio."""
    a, b = request_of("a"), request_of("b")
    stock = Driver(tiny_text.make(folder, None))
    stock.add(a, prompt(1, 30), params(60))
    stock.run_out()

    driver = Driver(tiny_text.make(folder, OURS))
    runtime, link = driver.scheduler.liveserve, Link(driver.core)
    runtime.info = dataclasses.replace(runtime.info, token_s=0.5)
    stage = StageConfig(p_safe_s=0.5, p_release_s=1.0, p_hold_s=2.0, age_limit_s=60.0, pace=True)
    runtime.config = LiveServeConfig(stages={"llm": stage})
    runtime._set_policy()
    runtime.barge_in_rate = 0.0
    now_s = time.monotonic()
    link.tell(*asks("a", now_s), hears("a", now_s, 0.5))
    driver.add(a, prompt(1, 30), params(60))
    for _ in range(12):
        driver.step()
    found: dict[str, Any] = {"a alone": driver.record.count(a), "held alone": len(runtime.held)}
    link.tell(*asks("b", time.monotonic()))
    driver.add(b, prompt(2, 90), params(10))
    driver.record.clear()
    driver.until(lambda: b in driver.finished)
    found["a while b was served"] = driver.record.count(a)
    found["b"] = driver.record.count(b)
    found["a kept its place"] = a in [request.request_id for request in driver.scheduler.running]
    # b is heard: nobody waits any more, and a goes on to its end
    now_s = time.monotonic()
    link.tell(hears("b", now_s, 99.0), Event(EventKind.CLOSED, "b", now_s))
    driver.run_out()
    found["tokens as stock"] = driver.tokens[a] == stock.tokens[a]
    return found


def sleep(folder: Path) -> dict[str, Any]:
    """An engine process whose only request is held for three seconds."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    async def run() -> dict[str, Any]:
        llm = AsyncLLM.from_engine_args(AsyncEngineArgs(str(folder), **tiny_text.options(OURS)))
        try:
            return await asyncio.wait_for(_sleep(llm), 40)
        finally:
            llm.shutdown()

    return asyncio.run(run())


async def _sleep(llm: Any) -> dict[str, Any]:
    from vllm.sampling_params import RequestOutputKind

    found: dict[str, Any] = {}
    made: list[float] = []  # when a's tokens came
    now_s = time.monotonic()
    # z interrupted an answer: running ahead is waste.
    events = [*asks("a", now_s), hears("a", now_s, 30.0), Event(EventKind.BARGE_IN, "z", now_s)]
    told = 0

    async def generate(request_id: str, tokens: int, times: list[float]) -> None:
        sampling = params(tokens, output_kind=RequestOutputKind.DELTA)
        ids = {"prompt_token_ids": prompt(1, 30)}
        async for output in llm.generate(ids, sampling, request_id):
            times += [time.monotonic()] * len(output.outputs[0].token_ids)

    async def snapshot() -> PressureSnapshot:
        nonlocal told
        batch = Batch("", time.monotonic(), told, events[told:], views=None if told else [])
        told = len(events)
        answer = await llm.engine_core.call_utility_async(METHOD, encode(batch))
        return decode_reply(bytes(answer)).snapshot

    await snapshot()
    task = asyncio.ensure_future(generate(request_of("a"), 200, made))
    while not ((await snapshot()).held and made):
        await asyncio.sleep(0.02)
    pid = multiprocessing.active_children()[0].pid
    before, since_s, count = _switches(pid), time.monotonic(), len(made)
    await asyncio.sleep(1.0)
    found["wake-ups per second"] = (_switches(pid) - before) / (time.monotonic() - since_s)
    answered = []
    for _ in range(15):
        asked_s = time.monotonic()
        held = (await snapshot()).held
        answered.append(time.monotonic() - asked_s)
        await asyncio.sleep(0.02)
    found["answered_s"] = min(answered)
    added = []
    for index in range(3):
        came: list[float] = []
        asked_s = time.monotonic()
        await generate(f"nobody-{index}", 1, came)
        added.append(came[0] - asked_s)
        await asyncio.sleep(0.02)
    found["added_s"] = min(added)
    found["held meanwhile"] = held == 1 and len(made) == count
    while len(made) == count:
        await asyncio.sleep(0.01)
    found["held_s"] = made[count] - made[count - 1]
    task.cancel()  # aborts it
    while (await snapshot()).kv_blocks_used:
        await asyncio.sleep(0.02)
    return found


def _switches(pid: int) -> int:
    """How often the process's main thread has gone to sleep."""
    status = Path(f"/proc/{pid}/task/{pid}/status").read_text()
    return int(status.partition("\nvoluntary_ctxt_switches:")[2].split()[0])


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    stage = StageConfig(p_safe_s=0.5, p_release_s=5.0, p_hold_s=10.0, age_limit_s=3.0, pace=True)
    env: dict[str, str] = {}
    export(LiveServeConfig(stages={"llm": stage}), env)
    return tiny_text.findings(scenarios, tmp_path_factory.mktemp("acting"), **env)


def test_the_longest_waiting_first_audio_goes_first(found):
    assert found["order"] == ["c", "b", "nobody"]


def test_a_hold_frees_the_steps_and_keeps_the_place(found):
    hold = found["hold"]
    assert hold["a alone"] >= 10
    assert hold["held alone"] == 0
    assert hold["b"] == 10
    assert hold["a while b was served"] <= 1
    assert hold["a kept its place"]
    assert hold["tokens as stock"]


def test_an_engine_sleeps_while_all_is_held(found):
    """It wakes for messages and for the deadline: the age limit here."""
    sleep = found["sleep"]
    assert sleep["wake-ups per second"] < 80  # about 160 where it only dozes
    # A sleep without messages takes 0.25 s.
    assert sleep["answered_s"] < 0.1
    assert sleep["added_s"] < 0.15
    assert sleep["held meanwhile"]
    assert 2.7 < sleep["held_s"] < 6.0
