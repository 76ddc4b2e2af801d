"""Full KV pools: who is preempted in plain vLLM, and that nobody is in omni stages."""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import tiny_text
import yaml
from prometheus_client.parser import text_string_to_metric_families

from liveserve.bench.demo import ensure_tiny_model
from liveserve.bench.launch import running_server
from liveserve.host.cpu.deploy import deploy_path
from liveserve.host.cpu.record import RECORD_ENV

from duplex import MODEL

pytestmark = pytest.mark.host

# Plain vLLM in one process, step by step; the rules for omni stages run in it too, where stock
# preempts safely and so says what the tokens should be.
LENGTHS = (30, 90, 5, 60, 120, 44)
PROMPTS = [[3 + (7 * i + j) % 500 for j in range(n)] for i, n in enumerate(LENGTHS)]
LENGTH = 100


class Pool:
    """An engine with few KV blocks.

    Attributes:
        preempted: request ids, in order.
        most: requests that ran at once, at most, while it was last driven.
        gated: steps of that in which some could not grow.
    """

    def __init__(
        self, folder: Path, scheduler: Any, *, blocks: int = 13, caching: bool = False
    ) -> None:
        # Two layers of keys and values of two heads: 64 KiB a block. One block is the null block.
        self.llm = tiny_text.make(
            folder,
            scheduler,
            kv_cache_memory_bytes=(blocks + 1) << 16,
            enable_prefix_caching=caching,
        )
        self.core = tiny_text.core_of(self.llm)
        self.scheduler = self.core.scheduler
        self.preempted: list[str] = []
        self.most = self.gated = 0
        preempt = self.scheduler._preempt_request

        def count(request: Any, *args: Any, **kwargs: Any) -> Any:
            self.preempted.append(request.request_id)
            return preempt(request, *args, **kwargs)

        self.scheduler._preempt_request = count

    @property
    def free(self) -> int:
        return self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()

    def add(self, name: str, ids: list[int], tokens: int = LENGTH) -> None:
        request = {"prompt_token_ids": ids}
        self.llm.llm_engine.add_request(name, request, tiny_text.params(tokens))

    def drive(self, at_most: int = 20_000) -> dict[str, list[int]]:
        """Step until all are done. Returns tokens by request."""
        tokens: dict[str, list[int]] = {}
        self.most = self.gated = 0
        for _ in range(at_most):
            if not self.scheduler.requests:
                break
            for output in self.llm.llm_engine.step():
                tokens[named(output.request_id)] = list(output.outputs[0].token_ids)
            self.most = max(self.most, len(self.scheduler.running))
            self.gated += bool(getattr(self.scheduler, "_liveserve_gated", ()))
        return tokens

    def crowd(
        self, prompts: list[list[int]] = PROMPTS, tokens: int = LENGTH
    ) -> dict[str, list[int]]:
        for index, ids in enumerate(prompts):
            self.add(str(index), ids, tokens)
        return self.drive()


def named(request_id: str) -> str:
    return request_id.partition("-")[0]


def reserved() -> Any:
    """The rules for omni stages over plain vLLM's scheduler."""
    from vllm.v1.request import RequestStatus

    from liveserve.host.reserve import ReservedRound
    from liveserve.host.scheduler_mixin import LiveSteps

    class Reserved(LiveSteps, ReservedRound):
        failed: tuple[str, ...] = ()

        def _fail(self, request: Any) -> None:
            self.failed += (request.request_id,)
            self.finish_requests(request.request_id, RequestStatus.FINISHED_ABORTED)

    return Reserved


def scenarios(folder: Path) -> dict[str, Any]:
    tiny_text.write_model(folder)
    stock = Pool(folder, None)
    expected = stock.crowd()
    found: dict[str, Any] = {"stock preempts": len(stock.preempted)}
    del stock
    found["victims"] = victims(folder)
    found |= crowds(folder, expected)
    found |= shared_prefixes(folder)
    pool = Pool(folder, reserved())
    runtime = pool.scheduler.liveserve
    runtime.flip(type(runtime.switches)(reserve=False))
    found["off"] = [pool.crowd() == expected, len(pool.preempted)]
    return found


def victims(folder: Path) -> list[Any]:
    """In plain vLLM the last of the plan's order, though the most urgent came last."""
    pool = Pool(folder, tiny_text.OURS)
    runtime, plans = pool.scheduler.liveserve, []
    plan = runtime.plan
    runtime.plan = lambda: plans.append(plan()) or plans[-1]
    runtime._session_of = named
    now_s = time.monotonic()
    for name in ("far", "middle", "other", "near"):
        pool.add(name, PROMPTS[1])
    pool.drive(at_most=2)  # they run in the order in which they came, until this is known:
    events = [
        [*tiny_text.asks(name, now_s), tiny_text.hears(name, now_s, routed_s)]
        for name, routed_s in (("far", 60.0), ("near", 0.1))
    ]
    tiny_text.Link(pool.core).tell(*itertools.chain(*events))
    found = []
    preempt = pool.scheduler._preempt_request

    def watch(request: Any, *args: Any, **kwargs: Any) -> Any:
        running = [r.request_id for r in pool.scheduler.running]
        planned = [named(name) for name in plans[-1].victims if name not in running]
        found.append([named(request.request_id), planned])
        return preempt(request, *args, **kwargs)

    pool.scheduler._preempt_request = watch
    pool.drive()
    return found


def crowds(folder: Path, expected: dict[str, list[int]]) -> dict[str, Any]:
    """Reserved: the same crowd in the same pool, four times."""
    from liveserve.host import reserve

    pool, found = Pool(folder, reserved()), {}

    def outcome(tokens: dict[str, list[int]]) -> list[Any]:
        return [tokens == expected, len(pool.preempted), pool.most, pool.gated]

    found["reserved"] = outcome(pool.crowd())

    # All long, though a history of short answers says otherwise.
    accounts = pool.scheduler._liveserve_accounts
    accounts.refresh()
    accounts.lengths.share = 0.0
    found["wrong guess"] = outcome(pool.crowd())
    found["learned"] = accounts.lengths.share

    # Accounts that allow everything: the host fails to allocate, and still preempts nobody.
    grow, enter = reserve.may_grow, reserve.may_enter
    reserve.may_grow = lambda free, claims, wants: [True] * len(claims)
    reserve.may_enter = lambda *args: True
    for index in range(4):
        pool.add(str(index), PROMPTS[index])
    pool.drive(at_most=300)
    found["no accounts"] = [len(pool.preempted), pool.free]

    # The rules come to a pool where nobody can go on: the least urgent fails, the others finish.
    reserve.may_grow, reserve.may_enter, reserve._STUCK_S = grow, enter, 0.05
    tokens = pool.drive()
    found["stuck"] = [
        sorted(map(named, pool.scheduler.failed)),
        len(pool.preempted),
        sorted(name for name in tokens if tokens[name] == expected[name]),
    ]
    return found


def shared_prefixes(folder: Path) -> dict[str, Any]:
    """Shared blocks count once: four times one long prompt, in less than four times its blocks."""
    found, long = {}, PROMPTS[4] + PROMPTS[1]
    for scheduler, name in ((None, "stock"), (reserved(), "shared")):
        pool = Pool(folder, scheduler, blocks=16, caching=True)
        pool.add("first", long, 1)
        pool.drive()
        tokens = pool.crowd([long + [i] * 4 for i in range(4)], 30)
        found[name] = [list(tokens.values()), len(pool.preempted), pool.most]
        del pool
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return tiny_text.findings(scenarios, tmp_path_factory.mktemp("reserve"))


def test_plain_vllm_preempts_from_the_back_of_our_order(found):
    assert found["victims"]
    for victim, planned in found["victims"]:
        assert planned[-1] == victim
    assert found["victims"][0][0] == "far"  # not the one that came last, which is the most urgent


def test_stock_preempts_in_this_pool_and_so_does_ours_switched_off(found):
    assert found["stock preempts"] > 0
    same, preemptions = found["off"]
    assert same
    assert preemptions > 0


def test_reserved_nobody_is_preempted_and_several_still_run(found):
    same, preemptions, most, gated = found["reserved"]
    assert same
    assert (preemptions, gated) == (0, 0)
    assert most >= 2


def test_a_wrong_guess_holds_requests_and_preempts_nobody(found):
    same, preemptions, most, gated = found["wrong guess"]
    assert same
    assert preemptions == 0
    assert gated > 0
    assert most > found["reserved"][2]
    assert found["learned"] == 1.0


def test_the_host_cannot_preempt_even_if_the_accounts_are_wrong(found):
    preemptions, free = found["no accounts"]
    assert preemptions == 0
    assert free == 0


def test_where_nobody_can_go_on_one_fails_and_the_others_finish(found):
    failed, preemptions, right = found["stuck"]
    assert failed
    assert preemptions == 0
    assert sorted(failed + right) == ["0", "1", "2", "3"]


def test_shared_prefixes_count_once(found):
    assert found["shared"] == found["stock"]
    _, preemptions, most = found["shared"]
    assert (preemptions, most) == (0, 4)


BLOCK, CONTEXT, AUDIO_TOKENS, SESSIONS = 32, 256, 90, 5
# Blocks of the thinker and the talker. One context takes eight, without the null block.
POOLS = (8, 11)
TEXT_TOKENS = [8 + 2 * index for index in range(SESSIONS)]


@dataclass
class Answer:
    """What a client got. ``audio_s``: seconds of audio."""

    token_ids: list[int]
    audio_s: float
    prompt_tokens: int


@dataclass
class Outcome:
    alone: list[Answer] = field(default_factory=list)
    together: list[Answer] = field(default_factory=list)
    again: Answer | None = None
    preemptions: dict[str, float] = field(default_factory=dict)
    batches: dict[int, int] = field(default_factory=dict)  # largest of each stage


async def ask(url: str, index: int) -> Answer:
    body: dict[str, Any] = {
        "model": "tiny",
        "messages": [{"role": "user", "content": f"Question {index}: " + "rivers " * 3 * index}],
        "modalities": ["text", "audio"],
        "max_tokens": TEXT_TOKENS[index],
        "temperature": 0,
        "return_token_ids": True,
    }
    timeout = aiohttp.ClientTimeout(total=60)
    async with aiohttp.ClientSession(timeout=timeout) as http:
        async with http.post(url + "/v1/chat/completions", json=body) as response:
            assert response.status == 200, await response.text()
            answer = await response.json()
    token_ids: list[int] = []
    audio_s = 0.0
    for choice in answer["choices"]:
        token_ids = choice.get("token_ids") or token_ids
        if choice["message"].get("audio"):
            wav = base64.b64decode(choice["message"]["audio"]["data"])
            audio_s = len(wav) / 2 / 24_000
    return Answer(token_ids, audio_s, answer["usage"]["prompt_tokens"])


async def crowd(url: str, outcome: Outcome) -> None:
    for index in range(SESSIONS):
        outcome.alone.append(await ask(url, index))
    outcome.together = await asyncio.gather(*(ask(url, index) for index in range(SESSIONS)))
    outcome.again = await ask(url, 0)
    async with aiohttp.ClientSession() as http, http.get(url + "/metrics") as response:
        for family in text_string_to_metric_families(await response.text()):
            for sample in family.samples:
                if sample.name == "vllm:num_preemptions_total":
                    outcome.preemptions[sample.labels["stage"]] = sample.value


@pytest.fixture(scope="module")
def outcome(tmp_path_factory):
    ensure_tiny_model(MODEL)
    folder = tmp_path_factory.mktemp("pools")
    path = deploy_path(
        "turn",
        model=MODEL,
        max_sessions=SESSIONS,
        max_model_len=CONTEXT,
        audio_max_tokens=AUDIO_TOKENS,
        folder=folder,
    )
    deploy = yaml.safe_load(path.read_text())
    for stage, blocks in zip(deploy["stages"], POOLS, strict=False):
        all_blocks = SESSIONS * CONTEXT // BLOCK
        stage["kv_cache_memory_bytes"] = stage["kv_cache_memory_bytes"] // all_blocks * (blocks + 1)
    path.write_text(yaml.safe_dump(deploy))
    outcome, record = Outcome(), folder / "record"
    flags = ["--deploy-config", str(path), "--fast-codes", "--seed-codes", "7"]
    env = {RECORD_ENV: str(record)}
    with running_server(MODEL, folder / "server.log", flags=flags, env=env) as server:
        asyncio.run(crowd(server.url, outcome))
    for stage in (0, 1):
        steps = map(json.loads, (record / f"stage{stage}.jsonl").read_text().splitlines())
        outcome.batches[stage] = max(step.get("requests", 0) for step in steps)
    return outcome


def test_the_pools_are_far_too_small_for_all_at_once(outcome):
    text = [a.prompt_tokens + n for a, n in zip(outcome.alone, TEXT_TOKENS, strict=True)]
    audio = [a.prompt_tokens + a.audio_s * 12.5 for a in outcome.alone]
    for tokens, pool in zip((text, audio), POOLS, strict=True):
        assert sum(-(-n // BLOCK) for n in tokens) > 1.5 * pool
    assert all(1 < outcome.batches[stage] < SESSIONS for stage in (0, 1))


def test_full_pools_lose_nothing_and_preempt_nobody(outcome):
    assert outcome.together == outcome.alone
    assert [len(answer.token_ids) for answer in outcome.together] == TEXT_TOKENS
    assert all(answer.audio_s > 2 for answer in outcome.together)
    assert outcome.preemptions["0"] == outcome.preemptions["1"] == 0
    assert outcome.again == outcome.alone[0]
