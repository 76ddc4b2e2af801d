"""The KV connector in a real engine: plain vLLM on the CPU, one process, step by step.

The GPU holds about one session; what others leave is stored, evicted, and loaded again. Every
scenario compares token ids with an engine that has neither the connector nor a prefix cache.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import tiny_text
from tiny_text import OURS, Driver, params, prompt

from liveserve.bench.demo import ensure_tiny_model
from liveserve.bench.launch import running_server
from liveserve.config import ConfigError, KvConfig, LiveServeConfig, decode_config
from liveserve.host import kv_flags
from liveserve.host.cpu.deploy import deploy_path
from liveserve.host.serve import with_kv_connector

from duplex import get

pytestmark = pytest.mark.host

# Blocks of 32 tokens; one of the pool is its null block.
BLOCKS = 12
GIB = 1 << 30


def make(folder: Path, scheduler: str | None = OURS, **more: Any) -> Driver:
    from vllm.config import KVTransferConfig

    extra = {"dram_gb": 0.01, "link_gbps": 1.0} | more.pop("extra", {})
    chosen = kv_flags.transfer_config(None) | {"kv_connector_extra_config": extra}
    options = {"num_gpu_blocks_override": BLOCKS, "enable_prefix_caching": True} | more
    fits = 32 * (min(BLOCKS, options["num_gpu_blocks_override"]) - 1)
    options.setdefault("max_model_len", fits)
    return Driver(
        tiny_text.make(folder, scheduler, kv_transfer_config=KVTransferConfig(**chosen), **options)
    )


class Tokens:
    """What an engine without the tier says to a prompt."""

    def __init__(self, folder: Path) -> None:
        self._llm = tiny_text.make(folder, None, enable_prefix_caching=False)
        self._known: dict[tuple[tuple[int, ...], int], list[int]] = {}

    def __call__(self, ids: list[int], tokens: int = 8) -> list[int]:
        key = tuple(ids), tokens
        if key not in self._known:
            # The host keeps the worker's half of a connector for the whole process.
            from vllm.distributed.kv_transfer import kv_transfer_state as state

            there, state._KV_CONNECTOR_AGENT = state._KV_CONNECTOR_AGENT, None
            try:
                self._known[key] = tiny_text.generate(self._llm, [ids], params(tokens))[0][0]
            finally:
                state._KV_CONNECTOR_AGENT = there
        return self._known[key]


def connector(driver: Driver) -> Any:
    return driver.scheduler.connector


def manager(driver: Driver) -> Any:
    return connector(driver).kv_manager


def worker() -> Any:
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    return get_kv_transfer_group().kv_worker


def until(driver: Driver, there: Callable[[], bool]) -> None:
    """Step until ``there()``. By time, as copies go on between steps."""
    deadline_s = time.monotonic() + 20.0
    while not there():
        assert time.monotonic() < deadline_s, f"not there; {driver.status()}"
        driver.step()
        time.sleep(0.0002)


def ask(driver: Driver, name: str, ids: list[int], tokens: int = 8) -> list[int]:
    driver.add(name, ids, params(tokens))
    until(driver, lambda: name in driver.finished)
    return driver.tokens[name]


def settle(driver: Driver) -> None:
    """Step until nothing is under way."""
    until(driver, lambda: not driver.core.scheduler.has_requests())


def leaks(driver: Driver) -> list[str]:
    """What is still referred to once nothing is under way."""
    settle(driver)
    manager(driver).check()
    pool = driver.scheduler.kv_cache_manager.block_pool
    found = [f"block {b.block_id}: {b.ref_cnt}" for b in pool.blocks if b.ref_cnt and not b.is_null]
    if pool.get_num_free_blocks() != pool.num_gpu_blocks - 1:
        found.append(f"{pool.get_num_free_blocks()} blocks are free")
    if manager(driver).held:
        found.append(f"held: {manager(driver).held}")
    if connector(driver)._keys or connector(driver)._long or connector(driver)._partial:
        found.append("requests are remembered")
    if worker().num_moving:
        found.append("the worker has jobs")
    return found


def fill(driver: Driver, seed: int = 900) -> None:
    """Somebody else uses the whole pool, so that nothing else is left on the GPU."""
    ask(driver, f"fill{time.monotonic()}", prompt(seed, 32 * (BLOCKS - 2)), 4)
    settle(driver)


def scenarios(folder: Path) -> dict[str, Any]:
    tiny_text.write_model(folder)
    tokens = Tokens(folder)
    found: dict[str, Any] = {}
    for scenario in (
        turns,
        turns_on_the_hosts_scheduler,
        turns_of_a_worker_elsewhere,
        next_round,
        load_error,
        corrupt,
        companion_error,
        link_breaks,
        pool_full,
        kv_events,
        abort_mid_load,
        abort_mid_store,
        reset,
        preempted,
        convoy,
        slow_link,
        switched_off,
        long_prompt,
        preloaded,
    ):
        found[scenario.__name__] = scenario(folder, tokens)
    return found


def _turns(driver: Driver, tokens: Tokens) -> dict[str, Any]:
    """Four sessions of three turns, one after the other."""
    histories = {session: prompt(session, 70) for session in range(4)}
    same = True
    for turn in range(3):
        for session, history in histories.items():
            said = ask(driver, f"s{session}-{turn}", history)
            same = same and said == tokens(history)
            histories[session] = history + said + prompt(50 + turn, 20)
    leaked = leaks(driver)
    report = manager(driver).report()
    return {
        "same": same,
        "leaks": leaked,
        "stored": report.stored,
        "loaded": report.loaded,
        "hits": report.hits,
        "failed": report.load_failed + report.store_failed + report.errors,
    }


def shutdown() -> None:
    """The host keeps one worker's half to a process: let the next engine make its own."""
    from vllm.distributed.kv_transfer.kv_transfer_state import ensure_kv_transfer_shutdown

    ensure_kv_transfer_shutdown()


@contextmanager
def engine(folder: Path, scheduler: str | None = OURS, **more: Any) -> Iterator[Driver]:
    driver = make(folder, scheduler, **more)
    try:
        yield driver
    finally:
        shutdown()


def turns(folder: Path, tokens: Tokens) -> dict[str, Any]:
    with engine(folder) as driver:
        return _turns(driver, tokens)


def turns_on_the_hosts_scheduler(folder: Path, tokens: Tokens) -> dict[str, Any]:
    with engine(folder, None) as driver:
        return _turns(driver, tokens)


def turns_of_a_worker_elsewhere(folder: Path, tokens: Tokens) -> dict[str, Any]:
    """What ended is reported with the steps, as from another process."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    with engine(folder) as driver:
        connector(driver)._here, get_kv_transfer_group().reports = None, True
        return _turns(driver, tokens)


def next_round(folder: Path, tokens: Tokens) -> dict[str, Any]:
    """A load is over when the round after the request's first begins."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    with engine(folder) as driver:
        half, jobs = get_kv_transfer_group(), []
        after_forward = half.start_load_kv

        def start(*args: Any, **kwargs: Any) -> None:
            jobs.append(worker().num_moving)
            after_forward(*args, **kwargs)

        history = prompt(1, 100)
        ask(driver, "first", history)
        settle(driver)
        fill(driver)
        driver.add("second", history, params(8))
        half.start_load_kv = start
        driver.step()
        began = jobs[:]
        deadline_s = time.monotonic() + 20.0
        while worker().engine.num_unfinished:
            assert time.monotonic() < deadline_s, "the load does not end"
            time.sleep(0.001)
        driver.step()
        known = bool(driver.tokens.get("second"))
        until(driver, lambda: "second" in driver.finished)
        same = driver.tokens["second"] == tokens(history)
        return {"same": same, "began": began, "known": known, "leaks": leaks(driver)}


def _reload(
    driver: Driver, tokens: Tokens, before: Callable[[], None], **more: Any
) -> dict[str, Any]:
    """A session's second turn, with its history in DRAM alone; ``before`` it asks."""
    history = prompt(1, 100)
    history += ask(driver, "first", history) + prompt(2, 20)
    settle(driver)
    fill(driver)
    loaded = manager(driver).report().loaded
    before()
    said = ask(driver, "second", history)
    report = manager(driver).report()
    return {
        "same": said == tokens(history),
        "loaded": report.loaded - loaded,
        "failed": report.load_failed,
        "corrupt": report.corrupt,
        "leaks": leaks(driver),
        **more,
    }


def load_error(folder: Path, tokens: Tokens) -> dict[str, Any]:
    from liveserve.kvtier.transfer_cpu import CpuLink

    with engine(folder) as driver:

        def breaks() -> None:
            link = worker().engine.link
            assert isinstance(link, CpuLink)
            copy, failures = link.method.copy, [OSError("no copy")]

            def fails(*args: Any) -> None:
                if failures:
                    raise failures.pop()
                copy(*args)

            link.method.copy = fails  # type: ignore[method-assign]

        found = _reload(driver, tokens, breaks)
        fill(driver)
        loaded = manager(driver).report().loaded
        found["again"] = ask(driver, "third", prompt(1, 100)) == tokens(prompt(1, 100))
        found["loaded again"] = manager(driver).report().loaded - loaded
        found["leaks"] += leaks(driver)
        return found


def corrupt(folder: Path, tokens: Tokens) -> dict[str, Any]:
    with engine(folder) as driver:

        def spoil() -> None:
            worker().pool.data[:, 100] ^= 1

        return _reload(driver, tokens, spoil)


def companion_error(folder: Path, tokens: Tokens) -> dict[str, Any]:
    """What belongs to the blocks cannot be restored."""

    class Rows:
        def save(self, *_: Any) -> None:
            raise AssertionError

        def restore(self, *_: Any) -> None:
            raise RuntimeError("rows are absent")

    with engine(folder) as driver:
        return _reload(driver, tokens, lambda: setattr(worker(), "_companion", Rows()))


def link_breaks(folder: Path, tokens: Tokens) -> dict[str, Any]:
    """As if the worker's link were dead: every job fails from now on, and all goes on without."""
    from liveserve.kernels.base import Direction

    with engine(folder) as driver:
        return _reload(
            driver,
            tokens,
            lambda: worker().engine.broken(Direction.LOAD, RuntimeError("gone")),
        )


def pool_full(folder: Path, tokens: Tokens) -> dict[str, Any]:
    """DRAM for three blocks."""
    with engine(folder, extra={"dram_gb": 3.1 * 65536 / GIB}) as driver:
        found = _turns(driver, tokens)
        return found | {"slots": manager(driver).report().slots}


def kv_events(folder: Path, tokens: Tokens) -> dict[str, Any]:
    """DRAM for three blocks, while the host publishes KV events."""
    from vllm.config import KVEventsConfig
    from vllm.distributed.kv_events import BlockStored

    events = KVEventsConfig(enable_kv_cache_events=True, publisher="null")
    with engine(folder, extra={"dram_gb": 3.1 * 65536 / GIB}, kv_events_config=events) as driver:
        published: list[Any] = []
        publish = driver.scheduler.kv_event_publisher.publish
        driver.scheduler.kv_event_publisher.publish = lambda batch: (
            published.extend(batch.events),
            publish(batch),
        )
        found = _turns(driver, tokens)
        dram = [event for event in published if event.medium == "CPU"]
        stored = [event for event in dram if isinstance(event, BlockStored)]
        return found | {
            "told stored": len(stored),
            "told removed": len(dram) - len(stored),
            "sizes": sorted({event.block_size for event in stored}),
            "evicted": sum(manager(driver).report().evicted.values()),
            "gpu": len(published) - len(dram),
        }


def abort_mid_load(folder: Path, tokens: Tokens) -> dict[str, Any]:
    with engine(folder, extra={"link_gbps": 0.001}) as driver:
        history = prompt(1, 100)
        ask(driver, "first", history)
        settle(driver)
        fill(driver)
        driver.add("second", history, params(8))
        driver.step()
        loading = manager(driver).report().loading
        driver.abort("second")
        found = {"loading": loading, "leaks": leaks(driver)}
        found["same"] = ask(driver, "third", history) == tokens(history)
        return found | {"leaks": found["leaks"] + leaks(driver)}


def abort_mid_store(folder: Path, tokens: Tokens) -> dict[str, Any]:
    """A request is aborted while an earlier turn of it is stored, and itself stored then."""
    with engine(folder, extra={"link_gbps": 0.001}, num_gpu_blocks_override=24) as driver:
        history = prompt(1, 100)
        history += ask(driver, "first", history) + prompt(2, 40)
        driver.step()
        storing = manager(driver).report().storing
        driver.add("second", history, params(40))
        for _ in range(3):
            driver.step()
        driver.abort("second")
        found = {"storing": storing, "leaks": leaks(driver)}
        found["stored"] = manager(driver).report().stored
        for seed in (902, 903, 904):
            fill(driver, seed)
        found["same"] = ask(driver, "third", history) == tokens(history)
        found["loaded"] = manager(driver).report().loaded
        return found | {"leaks": found["leaks"] + leaks(driver)}


def reset(folder: Path, tokens: Tokens) -> dict[str, Any]:
    """The prefix cache is reset while blocks are stored and loaded; then with the connector's."""
    with engine(folder, extra={"link_gbps": 0.001}) as driver:
        history, other = prompt(1, 100), prompt(5, 100)
        ask(driver, "first", history)
        driver.step()
        done = [driver.core.reset_prefix_cache()]  # its blocks are held for their store
        settle(driver)
        found: dict[str, Any] = {"stored": manager(driver).report().stored}
        driver.add("second", history, params(8))
        driver.step()
        found["loading"] = manager(driver).report().loading
        done.append(driver.core.reset_prefix_cache())
        until(driver, lambda: "second" in driver.finished)
        found["loaded"] = manager(driver).report().loaded
        found["same"] = [driver.tokens["second"] == tokens(history)]
        found["leaks"] = leaks(driver)
        fill(driver)
        driver.add("third", history, params(8))
        driver.step()
        found["loading then"] = manager(driver).report().loading
        done.append(driver.core.reset_prefix_cache(reset_connector=True))
        found["used then"] = manager(driver).report().used
        until(driver, lambda: "third" in driver.finished)
        found["same"] += [driver.tokens["third"] == tokens(history)]
        found["same"] += [ask(driver, "fourth", other) == tokens(other)]
        driver.add("fifth", history, params(30))
        for _ in range(6):
            driver.step()
        done.append(
            driver.core.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
        )
        until(driver, lambda: "fifth" in driver.finished)
        found["same"] += [driver.tokens["fifth"] == tokens(history, 30)]
        found["leaks"] += leaks(driver)
        return found | {"done": done}


def preempted(folder: Path, tokens: Tokens) -> dict[str, Any]:
    """Requests that grow out of the pool preempt one another, with loads and stores between."""
    with engine(folder, None, num_gpu_blocks_override=9) as driver:
        prompts = {f"r{i}": prompt(i, 90) for i in range(3)}
        for name, ids in prompts.items():
            ask(driver, "warm" + name, ids)
        settle(driver)
        preemptions = 0
        for name, ids in prompts.items():
            driver.add(name, ids, params(60))
        requests = dict(driver.scheduler.requests)
        until(driver, lambda: all(name in driver.finished for name in prompts))
        preemptions = sum(request.num_preemptions for request in requests.values())
        return {
            "same": [driver.tokens[name] == tokens(ids, 60) for name, ids in prompts.items()],
            "preemptions": preemptions,
            "loaded": manager(driver).report().loaded,
            "leaks": leaks(driver),
        }


def convoy(folder: Path, tokens: Tokens) -> dict[str, Any]:
    """Eight requests at once with one prefix, which is in DRAM alone."""
    with engine(folder, num_gpu_blocks_override=24, max_num_seqs=8) as driver:
        shared = prompt(1, 128)
        ask(driver, "first", shared)
        settle(driver)
        for other in (902, 903, 904, 905):
            ask(driver, f"fill{other}", prompt(other, 250), 4)
        settle(driver)
        asked = {f"r{i}": shared + prompt(20 + i, 10) for i in range(8)}
        for name, ids in asked.items():
            driver.add(name, ids, params(8))
        until(driver, lambda: all(name in driver.finished for name in asked))
        return {
            "same": all(driver.tokens[name] == tokens(ids) for name, ids in asked.items()),
            "loaded": manager(driver).report().loaded,
            "waited": manager(driver).report().reloads,
            "leaks": leaks(driver),
        }


def slow_link(folder: Path, tokens: Tokens) -> dict[str, Any]:
    """A load that takes longer than a request may wait."""
    with engine(folder, extra={"link_gbps": 0.0005, "load_timeout_s": 0.05}) as driver:
        found = _reload(driver, tokens, lambda: None)
        return found | {"timeouts": manager(driver).report().timeouts}


def switched_off(folder: Path, tokens: Tokens) -> dict[str, Any]:
    """Loads off at run time, then stores."""
    import msgspec

    with engine(folder) as driver:
        runtime = driver.scheduler.liveserve

        def flip(**switches: bool) -> None:
            runtime.flip(msgspec.structs.replace(runtime.switches, **switches))

        found = _reload(driver, tokens, lambda: flip(kv_load=False, kv_evict=False))
        flip(kv_load=True, kv_store=False, kv_evict=True)
        stored = manager(driver).report().stored
        other = prompt(7, 100)
        found["same"] = [found["same"], ask(driver, "other", other) == tokens(other)]
        found["stored then"] = manager(driver).report().stored - stored
        found["leaks"] += leaks(driver)
        return found


def long_prompt(folder: Path, tokens: Tokens) -> dict[str, Any]:
    """A long prompt is stored while its answer is still being made."""
    with engine(folder, extra={"ahead_tokens": 64}) as driver:
        driver.add("first", prompt(1, 100), params(60))
        until(driver, lambda: manager(driver).report().stored >= 3)
        early = "first" not in driver.finished
        until(driver, lambda: "first" in driver.finished)
        return {
            "early": early,
            "same": driver.tokens["first"] == tokens(prompt(1, 100), 60),
            "leaks": leaks(driver),
        }


def preloaded(folder: Path, tokens: Tokens) -> dict[str, Any]:
    """A history is loaded before its turn comes."""
    with engine(folder) as driver:
        history = prompt(1, 100)
        ask(driver, "first", history)
        settle(driver)
        fill(driver)
        tier = manager(driver)
        keys = tier.offloaded("first")
        load = tier.preload(keys, "first")
        settle(driver)
        found = {"keys": len(keys), "ended": load.ended, "left": tier.offloaded("first")}
        found["same"] = ask(driver, "second", history) == tokens(history)
        report = tier.report()
        found |= {"preloaded": report.preloaded, "hits": report.hits, "waits": report.reloads}
        return found | {"leaks": leaks(driver)}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return tiny_text.findings(scenarios, tmp_path_factory.mktemp("model"))


def test_nothing_leaks_in_any_scenario(found):
    assert {name: one["leaks"] for name, one in found.items() if one["leaks"]} == {}


def test_token_ids_are_those_without_the_tier_in_any_scenario(found):
    for name, one in found.items():
        same = one["same"]
        assert all(same) if isinstance(same, list) else same, name


@pytest.mark.parametrize(
    "name", ["turns", "turns_on_the_hosts_scheduler", "turns_of_a_worker_elsewhere"]
)
def test_blocks_are_stored_evicted_and_loaded_again(found, name):
    one = found[name]
    # Three full blocks a session and turn at most, and each is stored once.
    assert one["stored"] >= 12
    assert one["loaded"] >= 8
    assert one["hits"] >= one["loaded"]
    assert one["failed"] == 0


def test_a_load_begins_with_its_step_and_is_known_when_the_next_round_begins(found):
    assert (found["next_round"]["began"], found["next_round"]["known"]) == ([1], True)


def test_a_load_that_fails_is_recomputed(found):
    one = found["load_error"]
    assert (one["loaded"], one["corrupt"]) == (0, 0)
    assert one["failed"] > 0
    assert one["again"]
    assert one["loaded again"] == 3  # it is still there


def test_corrupt_blocks_are_recomputed(found):
    one = found["corrupt"]
    assert one["loaded"] == 0
    assert one["corrupt"] == 1


@pytest.mark.parametrize("name", ["companion_error", "link_breaks"])
def test_without_companions_or_a_link_all_is_recomputed(found, name):
    one = found[name]
    assert one["loaded"] == 0
    assert one["failed"] > 0


def test_dram_for_few_blocks(found):
    one = found["pool_full"]
    assert one["slots"] == 3
    assert one["failed"] == 0


def test_the_hosts_kv_events_tell_what_is_in_dram(found):
    one = found["kv_events"]
    assert one["evicted"] > 0
    assert (one["told stored"], one["told removed"]) == (one["stored"], one["evicted"])
    assert one["sizes"] == [32]
    assert one["gpu"] > 0


def test_aborts(found):
    assert found["abort_mid_load"]["loading"] == 3
    assert found["abort_mid_store"]["storing"] == 3
    assert found["abort_mid_store"]["stored"] > 3
    assert found["abort_mid_store"]["loaded"] > 0


def test_resets_succeed_while_blocks_are_copied(found):
    one = found["reset"]
    assert one["done"] == [True] * 4
    assert (one["stored"], one["loading"], one["loaded"]) == (3, 3, 3)
    assert one["loading then"] == 3
    assert one["used then"] == 0


def test_preemption(found):
    assert found["preempted"]["preemptions"] > 0
    assert found["preempted"]["loaded"] > 0


def test_one_load_serves_all_who_share_a_prefix(found):
    assert found["convoy"]["loaded"] == 4
    assert found["convoy"]["waited"] == 8


def test_nobody_waits_longer_than_allowed(found):
    assert found["slow_link"]["timeouts"] == 1
    assert found["slow_link"]["loaded"] == 0


def test_switches_act_at_run_time(found):
    assert found["switched_off"]["loaded"] == 0
    assert found["switched_off"]["stored then"] == 0


def test_a_long_prompt_is_stored_before_its_turn_is_over(found):
    assert found["long_prompt"]["early"]


def test_a_preload_makes_the_turn_a_hit(found):
    one = found["preloaded"]
    assert (one["keys"], one["ended"], one["left"]) == (3, True, [])
    assert (one["preloaded"], one["hits"], one["waits"]) == (3, 3, 0)


# ---- settings -----------------------------------------------------------------------------------


def parse(*flags: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    kv_flags.add_arguments(parser)
    return parser.parse_args(flags)


def test_flags_become_settings():
    args = parse("--kv-connector", "liveserve", "--kv-dram-gb", "0.25", "--kv-policy", "lru")
    chosen = kv_flags.from_args(args, KvConfig(link_gbps=3.0))
    assert chosen == KvConfig(dram_bytes=GIB // 4, policy="lru", link_gbps=3.0)
    assert kv_flags.from_args(parse(), KvConfig()) is None
    base = KvConfig(dram_bytes=5 << 20)
    assert kv_flags.from_args(parse("--kv-connector", "liveserve"), base) == base


@pytest.mark.parametrize(
    ("flags", "what"),
    [
        (["--kv-connector", "liveserve"], "needs memory: give --kv-dram-gb"),
        (["--kv-dram-gb", "1"], "--kv-dram-gb is of no use alone: add --kv-connector"),
        (["--link-gbps", "1"], "--link-gbps is of no use alone"),
        (
            ["--kv-connector", "liveserve", "--kv-dram-gb", "1e6"],
            "of host memory are available",
        ),
    ],
)
def test_settings_that_cannot_work_name_flag_and_fix(flags, what):
    with pytest.raises(ConfigError, match=what):
        kv_flags.from_args(parse(*flags), KvConfig())


@pytest.mark.parametrize(
    ("flags", "what"),
    [
        (["--kv-dram-gb", "lots"], "--kv-dram-gb: 'lots' is not a number of GiB above 0"),
        (["--kv-dram-gb", "-1"], "'-1' is not a number of GiB above 0"),
        (["--kv-dram-gb", "nan"], "'nan' is not a number of GiB above 0"),
        (["--link-gbps", "0"], "--link-gbps: '0' is not a rate above 0"),
        (["--kv-policy", "fifo"], "choose from 'lru', 't-lru', 'next-use', 'log-only'"),
        (["--kv-connector", "other"], "choose from 'liveserve'"),
    ],
)
def test_flags_with_bad_values_say_what_is_allowed(flags, what, capsys):
    with pytest.raises(SystemExit):
        parse(*flags)
    assert what in capsys.readouterr().err


@pytest.mark.parametrize(
    ("extra", "what"),
    [
        ({"dram_gb": "x"}, "dram_gb: 'x' is not a number"),
        ({"dram": 1}, "unknown field `dram`; its keys are dram_gb, dram_bytes, policy"),
        ({"policy": "fifo"}, "Invalid enum value 'fifo'"),
        ({"dram_bytes": -1}, "dram_bytes"),
    ],
)
def test_extra_configuration_is_checked(extra, what):
    with pytest.raises(ConfigError, match=what):
        kv_flags.settings(KvConfig(), extra)
    good = {"dram_gb": 0.5, "policy": "t-lru"}
    assert kv_flags.settings(KvConfig(link_gbps=2.0), good) == KvConfig(
        dram_bytes=GIB // 2, policy="t-lru", link_gbps=2.0
    )


def test_an_engine_without_a_prefix_cache_or_memory_is_refused():
    kv_flags.check_engine(KvConfig(dram_bytes=1), True)
    with pytest.raises(ConfigError, match="remove --no-enable-prefix-caching"):
        kv_flags.check_engine(KvConfig(dram_bytes=1), False)
    with pytest.raises(ConfigError, match="give --kv-dram-gb GIB"):
        kv_flags.check_engine(KvConfig(), True)


def overrides_of(command: list[str]) -> dict[str, Any]:
    assert command[-2] == "--stage-overrides"
    return json.loads(command[-1])


@pytest.mark.parametrize("form", ["--stage-overrides", "--stage-overrides="])
def test_only_the_thinker_gets_the_connector(form):
    text = '{"0": {"max_num_seqs": 2}, "1": {"devices": "1"}}'
    given = [form + text] if form.endswith("=") else [form, text]
    command = with_kv_connector(["model", *given, "--port", "1"])
    assert command[:3] == ["model", "--port", "1"]
    made = overrides_of(command)
    assert made["1"] == {"devices": "1"}
    assert made["0"].pop("max_num_seqs") == 2
    assert made["0"] == {
        "enable_prefix_caching": True,
        "kv_transfer_config": {
            "kv_connector": "liveserve",
            "kv_role": "kv_producer",
            "kv_load_failure_policy": "recompute",
        },
    }


@pytest.mark.parametrize(
    ("command", "what"),
    [
        (["--no-enable-prefix-caching"], "remove --no-enable-prefix-caching"),
        (["--stage-overrides", '{"0": {"enable_prefix_caching": false}}'], "enable_prefix_caching"),
        (["--stage-overrides", '{"0": {"kv_transfer_config": {}}}'], "give one of them"),
        (["--kv-transfer-config", "{}"], "give one of them"),
        (["--stage-overrides", "[]"], "no JSON object of objects"),
        (["--stage-overrides"], "no JSON object of objects"),
    ],
)
def test_commands_that_contradict_the_connector_are_refused(command, what):
    with pytest.raises(ConfigError, match=what):
        with_kv_connector(["model", *command])


def test_settings_reach_the_engines_through_the_environment():
    text = '{"kv": {"dram_bytes": 4096, "gpu_policy": "lru"}, "switches": {"kv_load": false}}'
    config = decode_config(text, where="test")
    assert config.kv == KvConfig(dram_bytes=4096, gpu_policy="lru")
    assert not config.switches.kv_load
    with pytest.raises(ConfigError, match=r"kv\.store_ahead"):
        decode_config('{"kv": {"store_ahead": 2}}', where="test")
    assert LiveServeConfig().kv.dram_bytes == 0


def refused(folder: Path) -> dict[str, str]:
    """What engines say that cannot have the tier."""
    from vllm.config import KVTransferConfig

    tiny_text.write_model(folder)
    found = {}
    for name, extra, more in (
        ("no prefix cache", {"dram_gb": 0.01}, {"enable_prefix_caching": False}),
        ("no memory", {}, {}),
        ("too little", {"dram_bytes": 100}, {}),
        ("too much", {"dram_gb": 200}, {}),
        ("bad rate", {"dram_gb": 0.01, "link_gbps": "fast"}, {}),
    ):
        chosen = kv_flags.transfer_config(None) | {"kv_connector_extra_config": extra}
        options = {"enable_prefix_caching": True, "num_gpu_blocks_override": BLOCKS} | more
        try:
            tiny_text.make(folder, None, kv_transfer_config=KVTransferConfig(**chosen), **options)
            found[name] = "started"
        except Exception as error:
            found[name] = str(error)
        shutdown()
    return found


def test_engines_that_cannot_have_the_tier_say_why(tmp_path):
    found = tiny_text.findings(refused, tmp_path)
    assert "remove --no-enable-prefix-caching" in found["no prefix cache"]
    assert "give --kv-dram-gb GIB" in found["no memory"]
    assert "holds no block: one takes 65536 bytes" in found["too little"]
    assert "--kv-dram-gb may be at most" in found["too much"]
    assert "link_gbps" in found["bad rate"]


def mismatch(folder: Path) -> dict[str, Any]:
    """A host whose pool lacks what the tier needs, or whose cache cannot be described."""
    import logging

    from liveserve.host import connector as module

    tiny_text.write_model(folder)
    lines: list[str] = []

    class Lines(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.levelno >= logging.WARNING:
                lines.append(record.getMessage())

    logging.getLogger("vllm.liveserve").addHandler(Lines())
    tokens, found = Tokens(folder), {}

    def says(driver: Driver) -> dict[str, Any]:
        ids = prompt(1, 100)
        one = {"same": ask(driver, "a", ids) == tokens(ids), "tier": manager(driver) is not None}
        one["lines"] = [line for line in lines if "no KV tier" in line]
        lines.clear()
        return one

    describe = module.describe
    module.describe = lambda *_: describe({}, 1)
    with engine(folder) as driver:
        found["layout"] = says(driver)
    module.describe = describe
    module.FreeKVCacheBlockQueue = type("Queue", (), {})
    with engine(folder, None) as driver:
        found["pool"] = says(driver)
    return found


def test_on_a_mismatch_the_host_stays_stock_and_one_line_says_why(tmp_path):
    found = tiny_text.findings(mismatch, tmp_path)
    for name, what in (("layout", "the cache has no layers"), ("pool", "prepend_n is gone")):
        one = found[name]
        assert one["same"], name
        assert not one["tier"], name
        assert len(one["lines"]) == 1, one
        assert what in one["lines"][0]


def plugin(folder: Path) -> dict[str, Any]:
    """``vllm serve``'s own parser, on and off. Importing it takes long, a fork does not."""
    import vllm.engine.arg_utils  # noqa: F401

    found = {}
    for switch in ("on", "off"):
        with multiprocessing.get_context("fork").Pool(1) as child:
            found[switch] = child.apply(parsed_flags, (folder, switch))
    return found


def parsed_flags(folder: Path, switch: str) -> dict[str, Any]:
    os.environ["LIVESERVE"] = switch
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    def parsed(*flags: str) -> Any:
        parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
        return AsyncEngineArgs.from_cli_args(parser.parse_args(list(flags)))

    stock = parsed("--model", str(folder))
    made = parsed("--model", str(folder), "--kv-connector", "liveserve", "--kv-dram-gb", "0.5")
    try:
        parsed("--kv-connector", "liveserve")
        error = "none"
    except SystemExit as exit_:
        error = str(exit_.code)
    return {
        "stock": stock.kv_transfer_config is None,
        "connector": made.kv_transfer_config.kv_connector,
        "role": made.kv_transfer_config.kv_role,
        "extra": made.kv_transfer_config.kv_connector_extra_config,
        "prefix caching": made.enable_prefix_caching,
        "error": error,
    }


@pytest.fixture(scope="module")
def parsers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return tiny_text.findings(plugin, tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize("switch", ["on", "off"])
def test_vllm_serve_has_the_flags(parsers, switch):
    found = parsers[switch]
    assert found["stock"]
    assert (found["connector"], found["role"]) == ("liveserve", "kv_producer")
    assert found["extra"]["dram_bytes"] == GIB // 2
    assert found["prefix caching"]
    assert found["error"] == "2"


# ---- the omni pipeline --------------------------------------------------------------------------

MODEL = Path(__file__).resolve().parents[1] / ".cache" / "tiny-model"


async def conversations(url: str) -> tuple[list[tuple[str, str]], dict[str, Any]]:
    """Text and audio of three conversations of three turns, one answer at a time, and the KV page.
    The thinker's KV holds little more than one of them."""
    histories: list[list[dict[str, str]]] = [[] for _ in range(3)]
    said = []
    async with aiohttp.ClientSession() as http:
        for turn in range(3):
            for session, history in enumerate(histories):
                words = f"session {session} says in turn {turn} enough to fill a block or even two"
                history.append({"role": "user", "content": words})
                body = {"model": "tiny", "messages": history, "modalities": ["text", "audio"]}
                body |= {"max_tokens": 8, "temperature": 0}
                async with http.post(url + "/v1/chat/completions", json=body) as response:
                    assert response.status == 200, await response.text()
                    messages = [c["message"] for c in (await response.json())["choices"]]
                text = next(m["content"] for m in messages if m["content"])
                audio = next(m["audio"]["data"] for m in messages if m.get("audio"))
                said.append((text, audio))
                history.append({"role": "assistant", "content": text})
    return said, await get(url, "/liveserve/kv")


def test_omni_with_the_tier_says_and_sounds_the_same(tmp_path):
    ensure_tiny_model(MODEL)
    deploy = deploy_path(
        "turn",
        max_sessions=2,
        max_model_len=384,
        audio_max_tokens=100,
        kv_cache_bytes=13 * 32 * 4096,
        folder=tmp_path,
    )
    # Chunks that follow the buffer are cut by the clock, and their samples differ at the cuts.
    config = json.dumps({"switches": {"chunking": False}})
    flags = ["--deploy-config", str(deploy), "--fast-codes", "--seed-codes", "1"]
    flags += ["--liveserve-config", config]
    tier = ["--kv-connector", "liveserve", "--kv-dram-gb", "0.1"]
    said = {}
    for name, more in (("without", []), ("with", tier)):
        with running_server(MODEL, tmp_path / f"{name}.log", flags=[*flags, *more]) as server:
            said[name], page = asyncio.run(conversations(server.url))
    assert said["with"] == said["without"]
    rows = {stage["stage"]: stage["kv"] for stage in page["engines"]}
    thinker = rows["thinker"]["dram"]
    assert thinker["loaded"] >= 2  # how many depends on when stores end
    assert thinker["hits"] >= thinker["loaded"]
    assert (thinker["load_failed"], thinker["store_failed"], thinker["errors"]) == (0, 0, 0)
    assert not (rows["talker"] or {}).get("dram")
