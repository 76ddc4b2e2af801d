"""What turns waited for their history, from a server's profile and its counts, and its targets."""

from __future__ import annotations

import asyncio
import itertools
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from aiohttp import web

from liveserve.bench import preload
from liveserve.bench.compare import (
    LIVE,
    PRELOAD_TARGETS,
    PRESETS,
    UNLOADED,
    Run,
    _chosen,
    _verdict,
    compare,
    link_gbps,
    tables,
)
from liveserve.bench.preload import later_turns, preload_metrics, run_watched
from liveserve.bench.report import save_waits
from liveserve.bench.sessions import SessionsConfig

NUMBERS = itertools.count(1)


def turn(session: str, load_s: float | None) -> dict:
    parts = {} if load_s is None else {"load": load_s, "prefill": 0.1}
    return {"speech_end_s": float(next(NUMBERS)), "session_id": session, "parts": parts}


def test_a_first_turn_has_no_history_whatever_it_waited_for():
    turns = [turn("a", 9.0), turn("b", None), turn("a", 0.1), turn("b", 0.2), turn("b", None)]
    found = later_turns(turns[::-1])  # in any order
    assert [one["parts"]["load"] for one in found] == [0.1, 0.2]


def test_without_preload_every_turn_with_an_offloaded_history_waited():
    turns = [turn("a", 0.0), *(turn("a", load_s) for load_s in (0.15, 0.0, 0.3))]
    metrics = preload_metrics(turns, {}, slow_motion=1.5)
    assert (metrics["turns_offloaded"], metrics["turns_waited"]) == (2, 2)
    assert metrics["resident_fraction"] == 0.0
    assert metrics["onpath_reloads_ms"] == pytest.approx([100.0, 200.0])
    assert metrics["onpath_reload_p50_ms"] == pytest.approx(150.0)
    assert metrics["later_turns_profiled"] == 3


def test_with_preload_those_that_found_it_there_waited_for_nothing():
    turns = [turn("a", 0.0), *(turn("a", load_s) for load_s in (0.0,) * 9 + (0.05,))]
    metrics = preload_metrics(turns, {"hits": 7, "late": 1, "short": 0}, slow_motion=1.0)
    # two more had their history on the GPU all the time
    assert (metrics["turns_offloaded"], metrics["turns_resident"]) == (8, 7)
    assert metrics["resident_fraction"] == 7 / 8
    assert metrics["onpath_reloads_ms"] == pytest.approx([0.0] * 7 + [50.0])
    assert metrics["onpath_reload_p50_ms"] == 0.0
    assert metrics["onpath_reload_p90_ms"] == pytest.approx(15.0)  # between the 7th and the 8th


def test_a_history_that_was_computed_again_instead_is_not_resident():
    metrics = preload_metrics([turn("a", 0.0), turn("a", 0.0)], {"hits": 1, "short": 1}, 1.0)
    assert (metrics["turns_offloaded"], metrics["turns_waited"]) == (2, 0)
    assert metrics["resident_fraction"] == 0.5
    metrics = preload_metrics([], {}, 1.0)
    assert metrics["resident_fraction"] is None
    assert metrics["onpath_reload_p90_ms"] is None


def made(arm: str, pair: int, resident: float, p50_ms: float, p90_ms: float) -> Run:
    metrics = {
        "later_text_ttfp_p50_s": 0.2 if arm == UNLOADED else 0.1,
        "continuity_fraction": None,
        "waste_fraction": None,
        "resident_fraction": resident,
        "onpath_reload_p50_ms": p50_ms,
        "onpath_reload_p90_ms": p90_ms,
        "turns_offloaded": 9,
    }
    config = SimpleNamespace(slow_motion=1.5)
    return Run(arm, "load", pair, SimpleNamespace(metrics=metrics, config=config))


def test_ratios_are_formed_in_pairs_against_the_server_without_preload():
    runs = [
        made(UNLOADED, 0, 0.0, 80.0, 100.0),
        made(LIVE, 0, 1.0, 0.0, 0.0),
        made(LIVE, 1, 0.9, 0.0, 6.0),
        made(UNLOADED, 1, 0.1, 60.0, 80.0),
    ]
    found = compare(runs, [LIVE])
    fraction = found["onpath_reload_p90_fraction"]
    assert (fraction["low"], fraction["high"]) == (0.0, pytest.approx(0.075))
    assert fraction["better"] == "lower"
    assert found["preload_hit_fraction"]["value"] == pytest.approx(0.95)
    assert found["onpath_reload_p50_ms"] == {
        "value": 0.0,
        "low": 0.0,
        "high": 0.0,
        "better": "lower",
    }
    assert found["later_text_ttfp_p50_speedup"]["value"] == pytest.approx(2.0)
    every, summary = tables(runs, found)
    assert summary.title == "LiveServe against preload off"
    assert list(every.columns[1].cells) == [UNLOADED, LIVE] * 2
    assert "resident" in [column.header for column in every.columns]
    # What stock is measured by is no target here.
    verdicts = dict(zip(summary.columns[0].cells, summary.columns[4].cells, strict=True))
    assert verdicts.keys() >= PRELOAD_TARGETS.keys()
    assert {name for name, verdict in verdicts.items() if verdict} == PRELOAD_TARGETS.keys()


@pytest.mark.parametrize(
    ("name", "met", "missed"),
    [
        ("preload_hit_fraction", 0.9, 0.89),
        ("onpath_reload_p50_ms", 0.0, 0.1),
        ("onpath_reload_p90_fraction", 0.05, 0.051),
    ],
)
def test_targets_of_the_issue(name, met, missed):
    assert _verdict(name, met, PRELOAD_TARGETS).endswith(" met")
    assert _verdict(name, missed, PRELOAD_TARGETS).endswith(" missed")


def test_the_preset_differs_in_preload_alone_and_cannot_hold_everybody():
    preset = PRESETS["preload"]
    off, on = preset.arms
    assert (off.name, on.name) == (UNLOADED, LIVE)
    switch = ("--liveserve-config", json.dumps({"switches": {"kv_preload": False}}))
    assert off.flags == (*on.flags, *switch)
    assert [arm.name for arm in _chosen(preset.arms, LIVE)] == [UNLOADED, LIVE]
    (case,) = preset.cases.values()
    flags = dict(zip(on.flags, on.flags[1:], strict=False))
    kv_bytes = json.loads(flags["--stage-overrides"])["0"]["kv_cache_memory_bytes"]
    assert case.sessions * case.instructions_chars * 4096 > 1.2 * kv_bytes
    assert float(flags["--kv-dram-gb"]) * 2**30 > 2 * case.sessions * 2048 * 4096


@pytest.mark.parametrize("slow_motion", [1.0, 1.5, 3.0])
def test_on_the_presets_link_a_reload_takes_71_ms_of_the_listener(slow_motion):
    case = SessionsConfig(instructions_chars=1900, turns=5, slow_motion=slow_motion)
    history_bytes = (1900 + 60 * 2.5) * 4096
    wall_s = history_bytes / (1e9 * link_gbps(case))
    assert wall_s / slow_motion == pytest.approx(0.071)


def test_turns_are_watched_while_users_talk_and_a_moment_longer(monkeypatch):
    async def scenario():
        talking = asyncio.Event()

        async def profile(request: web.Request) -> web.Response:
            after = int(request.query["after"])
            if after < 0:
                talking.set()
                return web.json_response({"newest": 5, "turns": [{"number": 5}]})
            done = [{"number": 6}] if after < 6 else []
            return web.json_response({"newest": 6, "turns": done})

        async def users(case):
            await talking.wait()
            return "the report"

        app = web.Application()
        app.router.add_post("/liveserve/profile", profile)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        monkeypatch.setattr(preload, "run_sessions", users)
        monkeypatch.setattr(preload, "_LAST_MARKS_S", 1.5)
        try:
            return await run_watched(SessionsConfig(url=url))
        finally:
            await runner.cleanup()

    assert asyncio.run(scenario()) == ("the report", [{"number": 6}])


def test_waits_are_plotted(tmp_path: Path):
    waits = {UNLOADED: {"reload (ms)": [70.0, 71.0], "text (s)": []}, LIVE: {"reload (ms)": [0.0]}}
    path = save_waits(tmp_path / "new" / "reload.png", waits, "turns")
    assert path.read_bytes().startswith(b"\x89PNG")
