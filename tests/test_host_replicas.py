"""Two thinkers: a session's turns go where its KV is. The host's real pool, and a real server."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import aiohttp
import numpy as np
import pytest

pytest.importorskip("vllm_omni")

from test_host_kv_tier import ANSWER_TOKENS, MODEL, NAMES

from liveserve.bench.demo import ensure_tiny_model
from liveserve.bench.launch import running_server
from liveserve.bench.workload import instructions_text
from liveserve.config import LiveServeConfig, Switches
from liveserve.events import EventKind, KvSnapshot, PressureSnapshot
from liveserve.host.seam import SeamError
from liveserve.host.sessions import warmup_id
from liveserve.plane import InteractionPlane

from duplex import connect, get, turn

pytestmark = pytest.mark.host


# ---- the host's pool, without engines ------------------------------------------------------


def request_of(session: str, number: int) -> str:
    from vllm_omni.engine.duplex.contracts import DuplexFence, duplex_ephemeral_stage_request_id

    return duplex_ephemeral_stage_request_id(DuplexFence(session, 0, number), stage_id=0)


def make_pool(replicas: int) -> Any:
    from vllm_omni.engine.stage_pool import StagePool

    clients = [
        SimpleNamespace(stage_type="llm", client_addresses={"input_address": f"tcp://{replica}"})
        for replica in range(replicas)
    ]
    model = SimpleNamespace(model="m", get_multimodal_config=None)
    return StagePool(0, clients, stage_vllm_config=SimpleNamespace(model_config=model))  # type: ignore[arg-type]


class Thinkers:
    """A thinker's pool whose replicas have all told of their pressure, and its router."""

    def __init__(self, replicas: int = 2, *, heard: bool = True, on: bool = True) -> None:
        from liveserve.host.replicas import ReplicaRouter

        self.pool = make_pool(replicas)
        self.plane = InteractionPlane(LiveServeConfig(switches=Switches(replicas=on)), dict)
        self.told: list[tuple[Any, EventKind, str]] = []
        self.plane.monitor.tell = lambda key, event: self.told.append(  # type: ignore[method-assign]
            (key, event.kind, event.session_id)
        )
        self.router = ReplicaRouter(self.pool, self.plane)
        for replica in range(replicas if heard else 0):
            self.hear(replica)

    def hear(self, replica: int, queued: int = 0) -> None:
        kv = KvSnapshot(block_tokens=16)
        snapshot = PressureSnapshot(queued_tokens=queued, prefill_token_us=1000.0, kv=kv)
        now_s = self.plane.now_s()
        self.plane.replicas.told(replica, snapshot, [], now_s, now_s)

    def pick(self, request: str, **kwargs: Any) -> int:
        return asyncio.run(self.pool._pick_or_select(request, **kwargs))

    def turn(self, session: str, number: int, *, ends: bool = True) -> int:
        """A turn of a session, as the orchestrator goes about it; returns its replica."""
        request, prompt = request_of(session, number), [0] * 2000
        self.router.ahead(request)
        replica = self.pick(request)
        sent = SimpleNamespace(prompt_token_ids=prompt)
        self.router.submitted(request, sent, session_owned=True)
        made = [SimpleNamespace(token_ids=[1, 2])]
        output = SimpleNamespace(prompt_token_ids=prompt, num_cached_tokens=0, outputs=made)
        self.router.answered(replica, output, request)
        if ends:
            self.pool.release_bindings([request])
        return replica

    @property
    def choices(self) -> Counter[str]:
        return self.plane.replicas.totals.choices

    def rounds(self) -> list[list[int]]:
        """Three rounds of two sessions that do not always speak in the same order."""
        return [[self.turn(s, n) for s in order] for n, order in enumerate(("ab", "ba", "ab"))]


def test_turns_stay_where_their_history_is_and_new_sessions_spread():
    thinkers = Thinkers()
    assert thinkers.rounds() == [[0, 1], [1, 0], [0, 1]]
    assert thinkers.choices == {"tie": 2, "kept": 4}
    assert thinkers.told == []
    assert not thinkers.pool._request_bindings


@pytest.mark.parametrize(("given", "why"), [({"on": False}, "off"), ({"heard": False}, "unknown")])
def test_without_an_answer_the_host_chooses(given, why):
    thinkers = Thinkers(**given)
    assert thinkers.rounds() == [[0, 1]] * 3  # by turns, whosever they are
    assert thinkers.choices == {why: 6}


def test_a_failure_leaves_the_choice_to_the_host(caplog):
    thinkers = Thinkers()
    thinkers.plane.replicas.choose = None  # type: ignore[assignment, method-assign]
    assert thinkers.rounds() == [[0, 1]] * 3
    failed = [record for record in caplog.records if "replica choice failed" in record.message]
    assert len(failed) == 1


def test_updates_stay_with_their_request_and_an_abort_does_not_lose_the_history():
    thinkers = Thinkers()
    home = thinkers.turn("a", 0, ends=False)
    request = request_of("a", 0)
    thinkers.hear(home, queued=100_000)
    assert thinkers.pick(request) == home  # an update of it
    assert thinkers.pool.preselect_replica_id(request) == home
    assert sum(thinkers.choices.values()) == 1
    thinkers.hear(home)
    thinkers.pool.release_bindings([request])  # interrupted
    assert thinkers.turn("a", 1) == home
    assert thinkers.choices["kept"] == 1


def test_a_queue_that_costs_more_than_the_history_moves_the_session_once():
    thinkers = Thinkers()
    home = thinkers.turn("a", 0)
    thinkers.hear(home, queued=1000)  # 1 s, and 2 s of prefill elsewhere
    assert thinkers.turn("a", 1) == home
    thinkers.hear(home, queued=10_000)
    other = thinkers.turn("a", 2)
    assert other != home
    assert thinkers.told == [((0, home), EventKind.MOVED, "a")]
    thinkers.hear(home)
    thinkers.hear(other)
    assert [thinkers.turn("a", n) for n in (3, 4)] == [other, other]
    assert len(thinkers.told) == 1


def test_a_replica_that_fails_loses_its_sessions_to_the_others():
    thinkers = Thinkers()
    home = thinkers.turn("a", 0, ends=False)
    thinkers.pool.mark_replica_unavailable(home)
    thinkers.plane.replicas.keep({1 - home})
    assert [thinkers.turn("a", n) for n in (1, 2)] == [1 - home] * 2
    assert thinkers.choices["single"] == 2


def test_other_requests_are_the_hosts():
    thinkers = Thinkers()
    home = thinkers.turn("a", 0)
    assert [thinkers.pick(f"chatcmpl-{n}") for n in range(4)] == [1, 0, 1, 0]
    companion = thinkers.pick(request_of("b", 0), affinity_request_id="chatcmpl-0")
    assert companion == 1
    # a warm-up goes where the session is, and is no turn
    assert thinkers.pick(warmup_id("a", 7)) == home
    assert thinkers.choices == {"tie": 1}
    one = Thinkers(1)
    assert [one.turn("a", n) for n in range(3)] == [0, 0, 0]
    assert not one.choices


def test_with_a_hub_it_binds_addresses_and_asks_the_load_balancer_else():
    thinkers = Thinkers(3)
    up = [SimpleNamespace(input_addr=f"tcp://{n}", status=None, queue_length=0) for n in range(3)]
    from vllm_omni.engine.stage_pool import ReplicaStatus

    for one in up:
        one.status = ReplicaStatus.UP
    asked: list[str] = []

    def select(task, replicas):
        asked.append(task["request_id"])
        return 1

    hub = SimpleNamespace(get_replicas_for_stage=lambda stage: SimpleNamespace(replicas=up))
    thinkers.pool.attach_hub(hub)
    thinkers.pool.attach_load_balancer(SimpleNamespace(select=select))
    assert [thinkers.turn("a", n) for n in range(3)] == [1, 1, 1]
    assert asked == [request_of("a", 0)]
    assert thinkers.choices == {"tie": 1, "kept": 2}
    assert not thinkers.pool._affinity
    up[1].status = None  # down
    assert thinkers.turn("a", 3) == 2  # the second of those that are up, as the balancer says
    assert not thinkers.pool._request_bindings


def test_audio_has_keys_of_its_own_on_each_replica():
    """The frontend's cache is one, the engines' are several."""
    thinkers, audio = Thinkers(), np.zeros(100, dtype=np.float32)

    def uuids(session, number):
        thinkers.turn(session, number, ends=False)
        prompt: dict[str, Any] = {"prompt": "x", "multi_modal_data": {"audio": [(audio, 16_000)]}}
        thinkers.router.scope(request_of(session, number), prompt)
        return prompt["multi_modal_uuids"]["audio"]

    (first,), (second,) = uuids("a", 0), uuids("b", 0)
    assert first.startswith("stage0:rep0:")
    assert second.startswith("stage0:rep1:")
    assert first.removeprefix("stage0:rep0:") == second.removeprefix("stage0:rep1:")
    assert (uuids("a", 1), uuids("b", 1)) == ([first], [second])
    prompt: dict[str, Any] = {"prompt": "x", "multi_modal_data": {"audio": [(audio, 16_000)]}}
    thinkers.router.scope("bound to nothing", prompt)
    Thinkers(1).router.scope(request_of("a", 0), prompt)
    assert "multi_modal_uuids" not in prompt


@pytest.mark.parametrize("name", ["preselect_replica_id", "get_bound_replica_id"])
def test_another_pool_stays_the_hosts(monkeypatch, name):
    from vllm_omni.engine.stage_pool import StagePool

    from liveserve.host.replicas import ReplicaRouter

    pool = make_pool(2)
    monkeypatch.delattr(StagePool, name)
    with pytest.raises(SeamError, match=name):
        ReplicaRouter(pool, InteractionPlane(LiveServeConfig(), dict))
    assert type(pool) is StagePool


# ---- a server ------------------------------------------------------------------------------

ORDERS = ((0, 1), (1, 0), (0, 1))
THINKER = {"num_replicas": 2, "devices": "0,0", "mm_processor_cache_gb": 1}


@dataclass
class Talk:
    """Two sessions of three turns."""

    text: dict[tuple[int, int], str] = field(default_factory=dict)
    blocks: dict[int, list[set[int]]] = field(default_factory=dict)  # replicas, turn by turn
    open: dict[str, Any] = field(default_factory=dict)
    report: dict[str, Any] = field(default_factory=dict)
    closed: list[int] = field(default_factory=list)  # GPU blocks of sessions, by replica


async def talk(url: str) -> Talk:
    found = Talk()
    async with AsyncExitStack() as stack:
        sessions = [
            await stack.enter_async_context(
                connect(url, turn_detection=None, instructions=instructions_text(3, index, 288))
            )
            for index in range(2)
        ]
        for number, (order, name) in enumerate(zip(ORDERS, NAMES, strict=True)):
            for index in order:
                found.text[index, number], _ = await turn(sessions[index], name, ANSWER_TOKENS)
                rows = await thinkers(url)
                session_id = sessions[index].session_id
                have = {
                    replica
                    for replica, engine in enumerate(rows)
                    for row in engine["sessions"]
                    if row["session_id"] == session_id and row["gpu_blocks"]
                }
                found.blocks.setdefault(index, []).append(have)
        found.report = (await get(url, "/liveserve/kv"))["replicas"]
    for _ in range(100):
        engines = await thinkers(url)
        found.closed = [sum(row["gpu_blocks"] for row in e["sessions"]) for e in engines]
        if not any(found.closed):
            break
        await asyncio.sleep(0.1)
    return found


async def thinkers(url: str) -> list[dict[str, Any]]:
    engines = (await get(url, "/liveserve/kv", timeout_s=20))["engines"]
    return [engine for engine in engines if engine["stage_id"] == 0]


async def both(url: str) -> tuple[Talk, Talk]:
    ours = await talk(url)
    async with aiohttp.ClientSession() as http:
        async with http.post(url + "/liveserve/switches", json={"replicas": False}) as response:
            assert response.status == 200
    return ours, await talk(url)


@pytest.fixture(scope="module")
def talks(tmp_path_factory) -> tuple[Talk, Talk]:
    """With our choice, then with the host's."""
    ensure_tiny_model(MODEL)
    flags = [
        *("--history-turns", "4", "--stage-overrides", json.dumps({"0": THINKER})),
        *("--kv-connector", "liveserve", "--kv-dram-gb", "0.125"),
    ]
    log = tmp_path_factory.mktemp("replicas") / "server.log"
    with running_server(MODEL, log, flags=flags) as server:
        return asyncio.run(both(server.url))


def test_each_session_stays_on_its_replica_and_finds_its_history(talks):
    ours, _ = talks
    assert sorted(map(sorted, (ours.blocks[0][0], ours.blocks[1][0]))) == [[0], [1]]
    assert all(have == ours.blocks[index][0] for index in (0, 1) for have in ours.blocks[index])
    report = ours.report
    assert (report["choices"]["kept"], report["moved"], report["on"]) == (4, 0, True)
    assert report["sessions"] == {"0": 1, "1": 1}
    assert report["cached_tokens"] > 0.7 * report["prompt_tokens"] > 0


def test_where_the_host_chooses_they_wander_and_say_the_same(talks):
    ours, hosts = talks
    assert hosts.report["choices"]["off"] == 2 * len(ORDERS)
    assert hosts.report["moved"] >= 2
    assert hosts.text == ours.text
    assert len(set(ours.text.values())) > 2


def test_what_is_over_is_kept_for_nobody_on_either_replica(talks):
    assert [talk.closed for talk in talks] == [[0, 0], [0, 0]]
