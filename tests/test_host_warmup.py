"""Prefill while the user speaks: in plain vLLM step by step, and in the real omni pipeline."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
import tiny_text
from test_host_identity import TALKER, THINKER, read_record
from test_host_reserve import reserved
from tiny_text import Driver, Link, asks, hears, params, prompt, request_of

from liveserve.bench.demo import ensure_tiny_model
from liveserve.bench.launch import running_server
from liveserve.bench.workload import instructions_text
from liveserve.config import LiveServeConfig, Switches
from liveserve.events import Event, EventKind
from liveserve.host.cpu.record import RECORD_ENV
from liveserve.host.sessions import warmup_id

from duplex import MODEL, Duplex, connect, get, speech

pytestmark = pytest.mark.host

BLOCK, USER, WARM = 32, "user", warmup_id("user", 0)
HISTORY = prompt(5, 200)  # six whole blocks and a piece
WHOLE = 192
ON = Switches(kv_prefill=True)


class Engine(Driver):
    """An engine with a prefix cache and warm-ups of a block a step.

    Attributes:
        steps: tokens that each request was given, step by step.
    """

    def __init__(self, folder: Path, scheduler: Any = tiny_text.OURS, **more: Any) -> None:
        config = {"switches": {"kv_prefill": True}, "kv": {"prefill_step_tokens": BLOCK}}
        config = msgspec.convert(config, LiveServeConfig)
        os.environ["LIVESERVE_CONFIG"] = msgspec.json.encode(config).decode()
        super().__init__(tiny_text.make(folder, tiny_text.OURS, enable_prefix_caching=True, **more))
        self.link, self.steps = Link(self.core), []
        self.link.tell(Event(EventKind.OPENED, USER, time.monotonic(), 1.0, detail="duplex"))
        schedule = self.scheduler.schedule

        def noted(*args: Any, **given: Any) -> Any:
            output = schedule(*args, **given)
            self.steps.append(dict(output.num_scheduled_tokens))
            return output

        self.scheduler.schedule = noted

    def warm(self, ids: list[int] = HISTORY, name: str = WARM) -> None:
        self.add(name, ids, params(16))

    def turn(self, ids: list[int] = HISTORY, name: str = request_of(USER)) -> list[int]:
        self.add(name, ids, params(8))
        self.until(lambda: name in self.finished)
        return self.tokens[name]

    def given(self, name: str = WARM) -> list[int]:
        return [tokens[name] for tokens in self.steps if name in tokens]

    def found(self, **more: Any) -> dict[str, Any]:
        """What warm-ups did, and what is left behind."""
        pool = self.scheduler.kv_cache_manager.block_pool
        snapshot = self.link.tell().snapshot
        return {
            "given": self.given(),
            "said": self.tokens.get(WARM),
            "ended": self.finished.get(WARM),
            "report": msgspec.to_builtins(self.scheduler._liveserve_warmups.report()),
            "errors": snapshot.errors_total,
            "left": [
                *self.scheduler.requests,
                *(b.block_id for b in pool.blocks if b.ref_cnt and not b.is_null),
            ],
            "threshold": self.scheduler.scheduler_config.long_prefill_token_threshold,
        } | more


def done(engine: Engine) -> dict[str, Any]:
    engine.warm()
    engine.run_out()
    told = WARM in engine.finished
    return engine.found(told=told, tokens=engine.turn([*HISTORY, 7, 8]))


def there(engine: Engine) -> dict[str, Any]:
    """Nothing is missing."""
    engine.turn()
    engine.warm()
    engine.run_out()
    return engine.found()


def half(engine: Engine) -> dict[str, Any]:
    """Half of it is there."""
    engine.turn(HISTORY[: 3 * BLOCK + 5], name="other")
    engine.warm()
    engine.run_out()
    engine.turn()
    return engine.found()


def overtaken(engine: Engine) -> dict[str, Any]:
    """The turn comes while its history is computed: it goes on from there."""
    engine.warm()
    engine.until(lambda: len(engine.given()) == 2)
    tokens = engine.turn([*HISTORY, 7, 8])
    return engine.found(tokens=tokens, turn=engine.given(request_of(USER)))


def cancelled(engine: Engine) -> dict[str, Any]:
    engine.warm()
    engine.until(lambda: len(engine.given()) == 3)
    engine.abort(WARM)
    engine.until(lambda: not engine.scheduler.has_requests())
    before = engine.found()["report"]["wasted"]
    engine.link.tell(Event(EventKind.CLOSED, USER, time.monotonic(), detail="closed"))
    engine.link.tell(Event(EventKind.OPENED, USER, time.monotonic(), 1.0, detail="duplex"))
    found = engine.found()
    return found | {"by_closing": found["report"]["wasted"] - before}


def behind(engine: Engine) -> dict[str, Any]:
    """Somebody waits for first audio, then has enough of it, then is about to run dry."""
    now_s, other = time.monotonic(), request_of("other")
    engine.link.tell(*asks("other", now_s))
    engine.add(other, prompt(9, 20), params(120))
    engine.warm()
    engine.until(lambda: len(engine.given(other)) == 20)
    first_audio = list(engine.given())
    engine.link.tell(hears("other", time.monotonic(), 1000.0))
    engine.until(lambda: len(engine.given()) == 3)
    both = [step for step in engine.steps if WARM in step]
    engine.link.tell(Event(EventKind.RATE, "other", time.monotonic(), 1e6))
    at, count = len(engine.steps), len(engine.given())
    engine.until(lambda: len(engine.steps) > at + 10)
    dry = engine.given()[count:]
    over = Event(EventKind.RESPONSE_DONE, "other", time.monotonic(), 0.0, "r", "completed")
    engine.link.tell(over)
    engine.abort(other)
    engine.run_out()
    return engine.found(first_audio=first_audio, both=both, other=other, dry=dry)


def elsewhere(engine: Engine) -> dict[str, Any]:
    """In other stages alone somebody waits for first audio, and then runs dry."""
    engine.link.tell(*asks("far", time.monotonic()))
    engine.warm()
    engine.until(lambda: len(engine.steps) > 10)
    waits = engine.given()
    engine.link.tell(hears("far", time.monotonic(), 0.01))
    engine.until(lambda: len(engine.steps) > 20)
    dry = engine.given()
    over = Event(EventKind.RESPONSE_DONE, "far", time.monotonic(), 0.0, "r", "completed")
    engine.link.tell(over)
    engine.run_out()
    return engine.found(waits=waits, dry=dry)


def ordinary_prefill(engine: Engine) -> dict[str, Any]:
    """An ordinary request that nobody says is urgent: it prefills in one step, as without us."""
    engine.warm()
    engine.until(lambda: len(engine.given()) == 2)
    engine.add("plain", prompt(9, 220), params(4))
    at = len(engine.steps)
    engine.run_out()
    return engine.found(steps=engine.steps[at:])


def slots(engine: Engine) -> dict[str, Any]:
    """The last slot is a warm-up's when somebody comes."""
    for number in range(3):
        engine.add(f"r{number}", prompt(20 + number, 8), params(200))
    engine.warm()
    engine.until(lambda: len(engine.given()) == 2)
    at = len(engine.steps)
    engine.add("r3", prompt(30, 8), params(4))
    engine.until(lambda: bool(engine.given("r3")))
    rounds = len(engine.steps) - at
    engine.abort("r0", "r1", "r2")
    engine.run_out()
    return engine.found(rounds=rounds)


def pool(engine: Engine) -> dict[str, Any]:
    """Somebody needs the blocks of a warm-up that may not go on."""
    engine.warm()
    engine.until(lambda: len(engine.given()) == 3)
    engine.add("big", prompt(40, 200), params(40))
    engine.until(lambda: "big" in engine.finished)
    return engine.found()


def stale(engine: Engine) -> dict[str, Any]:
    """Nobody knows who is urgent."""
    engine.link._next += 3
    engine.link.tell(Event(EventKind.SPEECH_STARTED, USER, time.monotonic()))
    engine.warm()
    engine.until(lambda: len(engine.steps) > 20)
    sat_out = not engine.given()
    engine.link.tell(views=[])
    engine.run_out()
    return engine.found(sat_out=sat_out)


def off(engine: Engine) -> dict[str, Any]:
    engine.warm()
    engine.until(lambda: len(engine.given()) == 1)
    engine.link.tell(switches=Switches(kv_prefill=False))
    engine.run_out()
    engine.link.tell(switches=ON)
    return engine.found()


SCENARIOS: tuple[Callable[[Engine], dict[str, Any]], ...] = (
    done, there, half, overtaken, cancelled, behind, elsewhere,
    ordinary_prefill, slots, stale, off,
)  # fmt: skip


def scenarios(folder: Path) -> dict[str, Any]:
    tiny_text.write_model(folder)
    engine, found = Engine(folder), {}
    for scenario in SCENARIOS:
        assert engine.scheduler.reset_prefix_cache()
        before = msgspec.to_builtins(engine.scheduler._liveserve_warmups.report())
        engine.tokens, engine.finished, engine.steps = {}, {}, []
        one = scenario(engine)
        for name in ("begun", "found", "computed", "used", "wasted"):
            one["report"][name] -= before[name]
        for reason, count in before["ended"].items():
            one["report"]["ended"][reason] -= count
        one["report"]["ended"] = {k: v for k, v in one["report"]["ended"].items() if v}
        found[scenario.__name__] = one
    small = {"num_gpu_blocks_override": 9, "max_model_len": 250}
    found["pool"] = pool(Engine(folder, **small))
    # the rules for omni stages, where nobody may be preempted
    found["reserved"] = done(Engine(folder, reserved(), **small))
    found["reserved pool"] = pool(Engine(folder, reserved(), **small))
    stock = tiny_text.make(folder, None, enable_prefix_caching=False)
    found["stock"] = tiny_text.generate(stock, [[*HISTORY, 7, 8]], params(8))[0][0]
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return tiny_text.findings(scenarios, tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize(
    "name", [*(s.__name__ for s in SCENARIOS), "pool", "reserved", "reserved pool"]
)
def test_nothing_is_said_and_nothing_left_behind(found, name):
    one = found[name]
    assert not one["said"]
    # whoever cancels a request does not hear of it again
    assert one["ended"] == (None if name == "cancelled" else "abort")
    assert (one["left"], one["errors"], one["threshold"]) == ([], 0, 0)
    assert one["report"]["now"] == 0
    assert max(one["given"], default=0) <= BLOCK


def test_a_turn_finds_what_was_computed_while_its_user_spoke(found):
    one = found["done"]
    assert one["told"]  # whoever asked for it hears that it is over
    assert sum(one["given"]) == WHOLE  # never the last token, after which one is sampled
    assert one["tokens"] == found["stock"]
    counts = {"begun": 1, "found": 0, "computed": WHOLE, "used": WHOLE, "wasted": 0}
    assert one["report"].items() >= counts.items()
    assert one["report"]["ended"] == {"done": 1}


def test_what_is_there_is_not_computed(found):
    assert found["there"]["given"] == []
    assert found["there"]["report"]["ended"] == {"there": 1}


def test_only_what_is_missing_is_computed(found):
    one = found["half"]
    assert one["given"] == [BLOCK] * 3
    assert (one["report"]["found"], one["report"]["computed"]) == (3 * BLOCK, 3 * BLOCK)


def test_a_turn_that_comes_early_goes_on_from_there(found):
    one = found["overtaken"]
    assert one["given"] == [BLOCK, BLOCK]
    assert one["turn"][0] == len(HISTORY) + 2 - 2 * BLOCK
    assert one["tokens"] == found["stock"]
    assert (one["report"]["used"], one["report"]["wasted"]) == (2 * BLOCK, 0)
    assert one["report"]["ended"] == {"turn": 1}


def test_abandoned_speech_counts_as_waste_once_its_session_is_over(found):
    one = found["cancelled"]
    assert one["report"]["computed"] == one["by_closing"] == 3 * BLOCK
    assert one["report"]["used"] == 0
    assert one["report"]["ended"] == {"cancelled": 1}


def test_never_ahead_of_anybody_urgent(found):
    one = found["behind"]
    assert one["first_audio"] == []
    assert one["dry"] == []
    # beside somebody who can wait: both run, the other first
    assert [list(step) for step in one["both"]] == [[one["other"], WARM]] * 3
    assert all(step[one["other"]] == 1 for step in one["both"])
    far = found["elsewhere"]
    assert far["waits"] == far["dry"] == []
    assert far["report"]["ended"] == {"done": 1}


def test_an_ordinary_prefill_is_neither_delayed_nor_cut(found):
    steps = found["ordinary_prefill"]["steps"]
    assert steps[0] == {"plain": 220}
    assert found["ordinary_prefill"]["report"]["ended"] == {"done": 1}


def test_its_slot_and_its_blocks_are_anybodys(found):
    assert found["slots"]["rounds"] == 1
    assert found["slots"]["report"]["ended"] == {"pressure": 1}
    assert found["pool"]["report"]["ended"] == {"pressure": 1}
    assert found["reserved pool"]["report"]["ended"] == {"pressure": 1}
    assert found["reserved"]["tokens"] == found["stock"]


def test_without_trustworthy_views_or_switched_off_it_does_not_run(found):
    assert found["stale"]["sat_out"]
    assert found["stale"]["report"]["ended"] == {"done": 1}
    assert found["off"]["given"] == [BLOCK]
    assert found["off"]["report"]["ended"] == {"off": 1}


# --- a real pipeline

SESSION_TOKENS, POOL_TOKENS = 800, 2048
THINKER_SIZES = {
    "max_model_len": POOL_TOKENS - BLOCK,  # a block of the pool is never used
    "kv_cache_memory_bytes": POOL_TOKENS * 4096,
}
# The longest first: see test_host_kv_tier.
NAMES = ("slower", "why", "wait")
# Nothing goes to DRAM, so that a history which leaves the GPU is in no tier.
CONFIG = {
    "switches": {"chunking": False, "kv_store": False, "kv_prefill": False},
    "kv": {"prefill_min_tokens": 16, "prefill_step_tokens": 64},
}


async def flip(url: str, **switches: bool) -> None:
    async with aiohttp.ClientSession() as http:
        async with http.post(url + "/liveserve/switches", json=switches) as response:
            assert response.status == 200, await response.text()
    for _ in range(200):  # the engine hears of it a moment later
        engines = (await get(url, "/liveserve/pressure", detail="1"))["engines"]
        if switches.items() <= engines[THINKER]["snapshot"]["switches"].items():
            return
        await asyncio.sleep(0.05)
    raise AssertionError(engines)


async def warmups(url: str) -> dict[str, Any]:
    kv = await get(url, "/liveserve/kv")
    return kv["engines"][THINKER]["kv"]["warmups"] | {"wishes": kv["warmups"]}


async def settled(url: str, wishes: int = 0) -> dict[str, Any]:
    """Once so many wishes for a warm-up were answered, and no warm-up is left."""
    end_s = time.monotonic() + 30
    while time.monotonic() < end_s:
        report = await warmups(url)
        submitted = report["wishes"].get("submitted", 0)
        if answered(report) >= wishes and sum(report["ended"].values()) == submitted:
            return report
        await asyncio.sleep(0.05)
    raise AssertionError(report)


def answered(report: dict[str, Any]) -> int:
    return sum(report["wishes"].values())


async def speak(session: Duplex, name: str, *, commit: bool = True) -> int:
    mark = session.mark
    data = base64.b64encode(speech(name)).decode()
    await session.send("input_audio_buffer.append", audio=data)
    if commit:
        await session.send("input_audio_buffer.commit", final=True, create_response=True)
    return mark


async def heard(session: Duplex, mark: int) -> str:
    """The answer's text, once it was heard to its end."""
    done = await session.wait("response.done", "error", after=mark)
    assert done["type"] == "response.done", done
    deltas = session.of_type("response.output_audio.delta", after=mark)
    response_id = deltas[0]["response_id"]
    played_ms = int(1e3 * session.audio_s(response_id))
    await session.send("playback.ack", played_ms=played_ms, response_id=response_id)
    await session.wait("playback.acknowledged", after=mark)
    texts = session.of_type("response.output_audio_transcript.delta", after=mark)
    return "".join(delta["delta"] for delta in texts)


def told(seed: int, tokens: int) -> dict[str, Any]:
    """Options of a session whose user pushes a button to end a turn."""
    return {"turn_detection": None, "instructions": instructions_text(seed, 0, tokens)}


async def converse(url: str, *, ahead: bool) -> list[str]:
    """Three turns; ``ahead``: their users speak until all that is known was computed."""
    texts = []
    async with connect(url, max_output_tokens=4, **told(1, SESSION_TOKENS)) as session:
        for name in NAMES:
            wishes = answered(await warmups(url))
            mark = await speak(session, name, commit=not ahead)
            if ahead:
                await settled(url, wishes + 1)
                await session.send("input_audio_buffer.commit", final=True, create_response=True)
            texts.append(await heard(session, mark))
    return texts


async def evict(url: str) -> None:
    """Somebody else needs the whole pool."""
    async with connect(url, max_output_tokens=2, **told(2, POOL_TOKENS - 160)) as session:
        await heard(session, await speak(session, "wait"))


async def tell(url: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    await flip(url, kv_prefill=False)
    found["off"] = await converse(url, ahead=False)
    found["not asked"] = await warmups(url)
    await evict(url)
    await flip(url, kv_prefill=True)
    found["on"] = await converse(url, ahead=True)
    found["used"] = await settled(url)
    await flip(url, kv_prefill=False)
    await evict(url)
    await flip(url, kv_prefill=True)
    # speech that comes to nothing: it is cancelled, or the client is gone
    async with connect(url, **told(3, SESSION_TOKENS)) as session:
        await speak(session, "why", commit=False)
        begun = await settled(url, answered(found["used"]) + 2)
    found["abandoned"] = await closed(url, begun)
    found["sizes"] = [begun["computed"], found["used"]["computed"]]
    # a prefix that the next session begins with, by the endpoint
    async with aiohttp.ClientSession() as http:
        body = {"prompt": "<|im_start|>system\n" + told(4, 600)["instructions"], "compute": True}
        async with http.post(url + "/liveserve/prefetch", json=body) as response:
            assert response.status == 202, await response.text()
    before = await settled(url, answered(found["abandoned"]) + 1)
    async with connect(url, max_output_tokens=2, **told(4, 600)) as session:
        await heard(session, await speak(session, "wait"))
    after = await settled(url)
    found["prefix"] = {name: after[name] - before[name] for name in ("computed", "used")}
    found["prefix computed"] = before["computed"] - found["abandoned"]["computed"]
    found["pressure"] = (await get(url, "/liveserve/pressure", detail="1"))["engines"]
    return found


async def closed(url: str, before: dict[str, Any]) -> dict[str, Any]:
    """Once the engine has heard that a session is over."""
    for _ in range(100):
        report = await warmups(url)
        if report["wasted"] > before["wasted"]:
            break
        await asyncio.sleep(0.05)
    return report


@pytest.fixture(scope="module")
def omni(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    ensure_tiny_model(MODEL)
    folder = tmp_path_factory.mktemp("omni")
    record, log = folder / "record", folder / "server.log"
    flags = [
        *("--kv-connector", "liveserve", "--kv-dram-gb", "0.01"),
        *("--seed-codes", "7", "--liveserve-config", json.dumps(CONFIG)),
        *("--stage-overrides", json.dumps({str(THINKER): THINKER_SIZES})),
    ]
    with running_server(MODEL, log, flags=flags, env={RECORD_ENV: str(record)}) as server:
        found = asyncio.run(tell(server.url))
        found["shm"] = [path.name for path in Path("/dev/shm").glob("*liveserve-warmup*")]
    found["log"] = log.read_text()
    lines = [json.loads(line) for line in (record / "stage0.jsonl").read_text().splitlines()]
    sampled = [item for line in lines for item in line.get("sampled", {}).items()]
    found["sampled"] = {name for name, tokens in sampled if tokens}
    found["given"] = {name for line in lines for name in line.get("tokens", {})}
    ids, _ = read_record(record, THINKER)
    found["ids"] = [tokens for tokens in ids if tokens]  # of turns: warm-ups sample nothing
    found["codes"], found["rows"] = read_record(record, TALKER)
    return found


def test_text_and_talker_rows_are_those_of_a_session_without_it(omni):
    turns = len(NAMES)
    assert omni["on"] == omni["off"]
    # off, somebody else, on
    first, second = slice(0, turns), slice(turns + 1, 2 * turns + 1)
    assert omni["ids"][second] == omni["ids"][first]
    assert all(len(ids) == 4 for ids in omni["ids"][first])
    assert omni["rows"][second] == omni["rows"][first]
    assert omni["codes"][second] == omni["codes"][first]
    assert all(len(rows) > 10 for rows in omni["rows"][first])


def test_what_was_computed_while_the_user_spoke_was_used(omni):
    assert omni["not asked"]["begun"] == 0
    used = omni["used"]
    assert used["ended"]["done"] >= 1
    assert set(used["ended"]) <= {"done", "there"}
    # a few of its blocks have outlived those who came between
    assert used["computed"] >= SESSION_TOKENS - 8 * BLOCK
    assert used["used"] == used["computed"]
    assert used["wasted"] == 0


def test_a_warmup_says_nothing_and_leaves_nothing_behind(omni):
    warm = {name for name in omni["given"] if name.startswith("liveserve-warmup")}
    assert warm
    assert not warm & omni["sampled"]
    assert omni["shm"] == []
    for engine in omni["pressure"]:
        assert engine["requests"] == []
        assert engine["snapshot"]["errors_total"] == 0
        assert engine["snapshot"]["kv_blocks_used"] == 0
    assert "Traceback" not in omni["log"]
    assert "stays stock" not in omni["log"]


def test_abandoned_speech_is_waste(omni):
    computed, before = omni["sizes"]
    assert computed - before >= SESSION_TOKENS - BLOCK  # it had other instructions
    assert omni["abandoned"]["wasted"] == computed - before


def test_a_prefix_can_be_computed_by_the_endpoint(omni):
    assert omni["prefix computed"] >= 600 - BLOCK
    assert omni["prefix"]["used"] >= omni["prefix computed"] - BLOCK
