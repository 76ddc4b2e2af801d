"""Who is evicted from the GPU in a real engine, and that no token depends on it."""

from __future__ import annotations

import asyncio
import os
import random
import sys
import time
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
import tiny_text

pytest.importorskip("vllm")  # before transformers: it makes torchvision importable

from liveserve.bench.launch import running_server
from liveserve.config import LiveServeConfig, Switches
from liveserve.events import Event, EventKind
from liveserve.host.cpu import adapt
from liveserve.host.serve import plugin_names

from duplex import get

pytestmark = pytest.mark.host

BLOCK, BLOCKS = 32, 13
SESSIONS = ("a", "b", "c", "d")
WAITS_S = {"a": 0.0, "b": 60.0, "c": 5.0, "d": 300.0}  # how long each answer plays


def make(folder: Path, scheduler: str | None, **kv: Any) -> tiny_text.Driver:
    config = msgspec.convert({"kv": kv}, LiveServeConfig)
    os.environ["LIVESERVE_CONFIG"] = msgspec.json.encode(config).decode()
    llm = tiny_text.make(
        folder, scheduler, enable_prefix_caching=True, num_gpu_blocks_override=BLOCKS + 1
    )
    return tiny_text.Driver(llm)


def turn_of(session: str, turn: int) -> str:
    return tiny_text.request_of(session) + f".{turn}"


def talks(link: tiny_text.Link | None, session: str, *, audio_s: float | None = None) -> None:
    """The session's turn begins; with ``audio_s`` its answer has been routed."""
    if link is None:
        return
    now_s = time.monotonic()
    events = [Event(EventKind.OPENED, session, now_s, 1.0, detail="duplex")]
    events += [Event(EventKind.COMMITTED, session, now_s)]
    if audio_s is not None:
        events += [
            Event(EventKind.RESPONSE_CREATED, session, now_s, response_id="r"),
            Event(EventKind.AUDIO_ROUTED, session, now_s, audio_s or 0.01, "r"),
            Event(EventKind.RESPONSE_DONE, session, now_s, 0.0, "r", "completed"),
        ]
    link.tell(*events)


def crowd(
    driver: tiny_text.Driver, link: tiny_text.Link | None, round_name: str
) -> list[list[int]]:
    """Three turns of four sessions over one system prompt, in a pool for half of them."""
    system, draw = tiny_text.prompt(99, 40), random.Random(3)
    histories = {name: [*system] for name in SESSIONS}
    made: list[list[int]] = []
    for turn in range(3):
        order = draw.sample(SESSIONS, k=len(SESSIONS))
        for name in order:
            talks(link, name)
            histories[name] += tiny_text.prompt(ord(name) + turn, 22)
            request = turn_of(name, turn) + round_name
            driver.add(request, histories[name], tiny_text.params(40))
        driver.run_out()
        for name in SESSIONS:
            tokens = driver.tokens[turn_of(name, turn) + round_name]
            made.append(tokens)
            histories[name] += tokens
            talks(link, name, audio_s=WAITS_S[name])
    return made


def whole(driver: tiny_text.Driver) -> bool:
    pool = driver.scheduler.kv_cache_manager.block_pool
    free = [block.block_id for block in pool.free_block_queue.get_all_free_blocks()]
    return sorted(free) == list(range(1, BLOCKS + 1)) and len(free) == pool.get_num_free_blocks()


def preemptions(driver: tiny_text.Driver) -> list[str]:
    preempt, preempted = driver.scheduler._preempt_request, []

    def count(request: Any, *args: Any, **given: Any) -> Any:
        preempted.append(request.request_id)
        return preempt(request, *args, **given)

    driver.scheduler._preempt_request = count
    return preempted


def identity(folder: Path) -> dict[str, Any]:
    tiny_text.write_model(folder)
    found: dict[str, Any] = {}
    driver = make(folder, None)
    preempted = preemptions(driver)
    expected = crowd(driver, None, "")
    found["stock preempts"] = len(preempted)
    for policy in ("next-use", "t-lru"):
        driver = make(folder, tiny_text.OURS, policy=policy, safe_blocks=1)
        link, kv = tiny_text.Link(driver.core), driver.scheduler.liveserve.kv
        preempted = preemptions(driver)
        found[policy] = {"same": crowd(driver, link, "") == expected, "whole": whole(driver)}
        report = link.tell(detail=True)
        found[policy] |= {
            "preempted": len(preempted),
            "kv": msgspec.to_builtins(report.snapshot.kv),
            "sessions": {row.session_id: row.gpu_blocks for row in report.kv_sessions},
            "errors": report.snapshot.errors_total,
        }
        link.tell(switches=Switches(kv_evict=False))
        found[policy]["off"] = [
            crowd(driver, link, "off") == expected, kv.snapshot().policy, whole(driver)
        ]  # fmt: skip
        link.tell(switches=Switches())
        reset = driver.scheduler.reset_prefix_cache()
        cleared = kv.snapshot().cached
        found[policy]["reset"] = [
            reset, cleared, crowd(driver, link, "reset") == expected, whole(driver)
        ]  # fmt: skip

        def broken(*_: Any) -> list[int]:
            raise RuntimeError("broken")

        kv.gpu.queue.policy.evict = broken
        found[policy]["broken"] = [
            crowd(driver, link, "broken") == expected,
            kv.snapshot().policy,
            kv.snapshot().errors,
            whole(driver),
        ]
    return found


@pytest.fixture(scope="module")
def same(tmp_path_factory):
    return tiny_text.findings(identity, tmp_path_factory.mktemp("identity"))


@pytest.mark.parametrize("policy", ["next-use", "t-lru"])
def test_tokens_are_those_of_stock_whatever_evicts(same, policy):
    assert same["stock preempts"] > 0  # the pool is small enough to matter
    case = same[policy]
    assert case["same"]
    assert case["whole"]
    assert case["preempted"] > 0
    assert (case["errors"], case["kv"]["errors"]) == (0, 0)
    assert case["off"] == [True, "lru", True]
    assert case["reset"] == [True, 0, True, True]
    assert case["broken"] == [True, "lru", 1, True]


def test_it_tells_who_was_evicted_and_who_has_what(same):
    kv = same["next-use"]["kv"]
    assert (kv["policy"], kv["configured"], kv["block_tokens"]) == ("next-use", "next-use", BLOCK)
    assert sum(kv["evicted"].values()) > 0
    assert any(name.startswith("next-use/") for name in kv["evicted"])
    assert 0 < kv["hit_tokens"] < kv["prompt_tokens"]
    assert kv["regret"] > 0  # four sessions in a pool for two
    assert kv["sessions_known"] == len(SESSIONS)
    sessions = same["next-use"]["sessions"]
    assert set(sessions) <= set(SESSIONS)
    assert sum(sessions.values()) > 0


def choice(folder: Path) -> dict[str, Any]:
    """Session a is read first and its user speaks again; b's answer, read later, plays on."""
    driver = make(folder, tiny_text.OURS, policy="next-use")
    link, kv = tiny_text.Link(driver.core), driver.scheduler.liveserve.kv
    link.tell()
    found = {}
    prompts = {name: tiny_text.prompt(ord(name), 6 * BLOCK + 1) for name in "abc"}

    def turn(name: str, tag: str) -> int:
        """Tokens of the prompt that were found."""
        before = kv.gpu.hit_tokens
        driver.add(turn_of(name, 0) + tag, prompts[name], tiny_text.params(2))
        driver.run_out()
        return kv.gpu.hit_tokens - before

    for how in ("on", "off", "stale", "unheard"):
        link.tell(switches=Switches(kv_evict=how != "off"))
        assert driver.scheduler.reset_prefix_cache()
        for name in "ab":
            talks(link, name)
            turn(name, how)
            talks(link, name, audio_s=60.0)
        now_s = time.monotonic()
        link.tell(Event(EventKind.SPEECH_STARTED, "a", now_s))
        if how == "stale":
            link._next += 1
            found["resync"] = link.tell().resync
        turn("c", how)  # 13 blocks are used, it needs 7
        found[how] = [turn("a", how + "2"), turn("b", how + "3")]
        link.tell(views=[])
    found["errors"] = kv.snapshot().errors
    found["whole"] = whole(driver)
    return found


def without_caching(folder: Path) -> list[Any]:
    llm = tiny_text.make(folder, tiny_text.OURS, enable_prefix_caching=False)
    core = tiny_text.core_of(llm)
    pool = core.scheduler.kv_cache_manager.block_pool
    reply = tiny_text.Link(core).tell(detail=True)
    return [type(pool).__name__, type(pool.free_block_queue).__name__, reply.snapshot.kv]


def scenarios(folder: Path) -> dict[str, Any]:
    tiny_text.write_model(folder)
    return {"choice": choice(folder), "without caching": without_caching(folder)}


@pytest.fixture(scope="module")
def scenes(tmp_path_factory):
    return tiny_text.findings(scenarios, tmp_path_factory.mktemp("scenes"))


def test_next_use_keeps_the_session_that_is_needed_and_lru_the_other(scenes):
    found = scenes["choice"]
    everything = 6 * BLOCK
    assert found["on"][0] == everything
    assert found["off"][0] < everything
    assert found["resync"]
    assert found["stale"] == found["off"]  # fail closed: the host's order
    assert found["errors"] == 0
    assert found["whole"]


def test_without_prefix_caching_the_host_stays_as_it_is(scenes):
    assert scenes["without caching"] == ["BlockPool", "FreeKVCacheBlockQueue", None]


def test_the_endpoint_of_a_live_server(tmp_path):
    """Plain vLLM, with our scheduler and prefix caching."""
    model = tiny_text.write_model(tmp_path / "model")
    tiny_text.write_tokenizer(model)
    env = {**adapt.default_env(), "LIVESERVE": "on", "VLLM_PLUGINS": plugin_names({})}
    flags = ["--dtype", "float32", "--max-model-len", "256", "--block-size", str(BLOCK)]
    flags += ["--enforce-eager", "--kv-cache-memory-bytes", str(1 << 25)]
    flags += ["--enable-prefix-caching", "--scheduler-cls", tiny_text.OURS]
    with running_server(
        model,
        tmp_path / "server.log",
        serve=[sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model"],
        flags=flags,
        env=env,
        omni=False,
    ) as server:
        asyncio.run(ask(server.url))


async def ask(url: str) -> None:
    body = {"model": "tiny", "prompt": tiny_text.prompt(1, 100), "max_tokens": 4}
    async with aiohttp.ClientSession() as http:
        for _ in range(2):
            async with http.post(url + "/v1/completions", json=body) as response:
                assert response.status == 200, await response.text()
    (engine,) = (await get(url, "/liveserve/kv"))["engines"]
    assert engine["answered"]
    assert (engine["stage"], engine["blocks_used"]) == ("llm", 0)
    assert engine["blocks"] > 100
    kv = engine["kv"]
    assert (kv["policy"], kv["errors"], kv["signals_stale"]) == ("next-use", 0, False)
    assert (kv["prompt_tokens"], kv["hit_tokens"]) == (200, 96)
    assert (kv["cached"], kv["evicted"], kv["dram"]) == (3, {}, None)
    assert engine["sessions"] == []  # plain vLLM has none
