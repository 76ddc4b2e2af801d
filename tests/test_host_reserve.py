"""Full KV pools: who is preempted in plain vLLM, and that nobody is in omni stages."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from liveserve.bench.demo import ensure_tiny_model
from liveserve.bench.launch import running_server
from liveserve.host.cpu import adapt
from liveserve.host.cpu.deploy import deploy_path
from liveserve.host.cpu.record import RECORD_ENV

pytestmark = pytest.mark.host

# Plain vLLM in one process, step by step; the rules for omni stages run in it too, where stock
# preempts safely and so says what the tokens should be. Findings come back as JSON.
PROGRAM = """
import sys, vllm, torch, json  # vllm first: it makes torchvision importable on a CPU build of torch
from transformers import Qwen3Config, Qwen3ForCausalLM
from vllm import LLM, SamplingParams
from vllm.v1.request import RequestStatus
import liveserve.host.reserve as reserve
from liveserve.events import Batch, Event, EventKind, encode
from liveserve.host.plain import LiveScheduler
from liveserve.host.scheduler_mixin import LiveSteps
import dataclasses, time

folder = sys.argv[1]
torch.manual_seed(0)
Qwen3ForCausalLM(Qwen3Config(
    vocab_size=512, hidden_size=128, intermediate_size=256, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, head_dim=64, max_position_embeddings=512,
)).save_pretrained(folder)
LENGTHS = (30, 90, 5, 60, 120, 44)
PROMPTS = [[3 + (7 * i + j) % 500 for j in range(n)] for i, n in enumerate(LENGTHS)]
LENGTH = 100

class Reserved(LiveSteps, reserve.ReservedRound):
    failed = ()
    def _fail(self, request):
        self.failed += (request.request_id,)
        self.finish_requests(request.request_id, RequestStatus.FINISHED_ABORTED)

def make(scheduler, blocks=13, caching=False):
    # Two layers of keys and values of two heads: 64 KiB a block. One block is the null block.
    llm = LLM(folder, dtype="float32", max_model_len=256, max_num_seqs=4, enforce_eager=True,
              block_size=32, kv_cache_memory_bytes=(blocks + 1) << 16,
              enable_prefix_caching=caching, skip_tokenizer_init=True, scheduler_cls=scheduler)
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    preempt, preempted = scheduler._preempt_request, []
    def count(request, *args, **kwargs):
        preempted.append(request.request_id)
        return preempt(request, *args, **kwargs)
    scheduler._preempt_request = count
    return llm, scheduler, preempted

def params(n=LENGTH):
    return SamplingParams(temperature=0, max_tokens=n, ignore_eos=True, detokenize=False)

def add(llm, name, prompt, n=LENGTH):
    llm.llm_engine.add_request(name, {"prompt_token_ids": prompt}, params(n))

def named(request_id):
    return request_id.partition("-")[0]

def drive(llm, scheduler, at_most=20_000):
    '''Returns tokens by request, most that ran at once, steps in which some could not grow.'''
    tokens, most, gated = {}, 0, 0
    steps = 0
    while scheduler.requests and steps < at_most:
        steps += 1
        for output in llm.llm_engine.step():
            tokens[named(output.request_id)] = list(output.outputs[0].token_ids)
        most = max(most, len(scheduler.running))
        gated += bool(getattr(scheduler, "_liveserve_gated", ()))
    return tokens, most, gated

def crowd(llm, scheduler, prompts=PROMPTS, n=LENGTH):
    for index, prompt in enumerate(prompts):
        add(llm, str(index), prompt, n)
    return drive(llm, scheduler)

found = {}
llm, scheduler, preempted = make(None)
expected, _, _ = crowd(llm, scheduler)
found["stock preempts"] = len(preempted)
found["blocks"] = scheduler.kv_cache_manager.block_pool.num_gpu_blocks - 1
del llm

# 1. Victims in plain vLLM: the last of the plan's order, though the most urgent came last.
llm, scheduler, preempted = make(LiveScheduler)
runtime, plans = scheduler.liveserve, []
plan = runtime.plan
runtime.plan = lambda: plans.append(plan()) or plans[-1]
runtime._session_of = named
now = time.monotonic()
events = []
for name, routed in (("far", 60.0), ("near", 0.1)):
    events += [Event(EventKind.OPENED, name, now, 1.0, detail="duplex"),
               Event(EventKind.COMMITTED, name, now),
               Event(EventKind.RESPONSE_CREATED, name, now, response_id="r"),
               Event(EventKind.AUDIO_ROUTED, name, now, routed, "r")]
for name in ("far", "middle", "other", "near"):
    add(llm, name, PROMPTS[1])
drive(llm, scheduler, at_most=2)  # they run in the order in which they came, until this is known:
core = llm.llm_engine.engine_core.engine_core
core.liveserve_exchange(encode(Batch("", now, 0, events, views=[])))
victims = []
count = scheduler._preempt_request
def watch(request, *args, **kwargs):
    running = [r.request_id for r in scheduler.running]
    victims.append((request.request_id, list(plans[-1].victims), running))
    return count(request, *args, **kwargs)
scheduler._preempt_request = watch
drive(llm, scheduler)
found["victims"] = [
    [named(victim), [named(v) for v in planned if v not in running]]
    for victim, planned, running in victims
]
del llm

# 2. Reserved: the same crowd in the same pool.
llm, scheduler, preempted = make(Reserved)
tokens, most, gated = crowd(llm, scheduler)
found["reserved"] = [tokens == expected, len(preempted), most, gated]

# 3. All long, though a history of short answers says otherwise.
accounts = scheduler._liveserve_accounts
accounts.refresh()
accounts.lengths.share = 0.0
tokens, most, gated = crowd(llm, scheduler)
found["wrong guess"] = [tokens == expected, len(preempted), most, gated]
found["learned"] = accounts.lengths.share

# 4. Accounts that allow everything: the host fails to allocate, and still preempts nobody.
grow, enter = reserve.may_grow, reserve.may_enter
reserve.may_grow = lambda free, claims, wants: [True] * len(claims)
reserve.may_enter = lambda *args: True
for index in range(4):
    add(llm, str(index), PROMPTS[index])
drive(llm, scheduler, at_most=300)
found["no accounts"] = [len(preempted), scheduler.kv_cache_manager.block_pool.get_num_free_blocks()]

# 5. The rules come to a pool where nobody can go on: the least urgent fails, the others finish.
reserve.may_grow, reserve.may_enter, reserve._STUCK_S = grow, enter, 0.05
tokens, _, _ = drive(llm, scheduler)
found["stuck"] = [sorted(map(named, scheduler.failed)), len(preempted),
                  sorted(name for name in tokens if tokens[name] == expected[name])]
del llm

# 6. Blocks that are shared count once: four times the same long prompt in less than four pools.
LONG = PROMPTS[4] + PROMPTS[1]
for scheduler_class, name in ((None, "stock"), (Reserved, "shared")):
    llm, scheduler, preempted = make(scheduler_class, blocks=16, caching=True)
    prompts = [LONG + [i] * 4 for i in range(4)]
    add(llm, "first", LONG, 1)
    drive(llm, scheduler)
    tokens, most, _ = crowd(llm, scheduler, prompts, 30)
    found[name] = [list(tokens.values()), len(preempted), most]
    del llm

# 7. Switched off, it is the host.
llm, scheduler, preempted = make(Reserved)
runtime = scheduler.liveserve
runtime.flip(type(runtime.switches)(reserve=False))
tokens, _, _ = crowd(llm, scheduler)
found["off"] = [tokens == expected, len(preempted)]
print("FOUND", json.dumps(found))
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    env = {**os.environ, **adapt.default_env(), "LIVESERVE": "on", "HF_HUB_OFFLINE": "1"}
    env |= {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
    command = [sys.executable, "-c", PROGRAM, str(tmp_path_factory.mktemp("reserve") / "model")]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("FOUND ")]
    assert lines, done.stderr[-4000:]
    return json.loads(lines[0][6:])


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


MODEL = Path(__file__).resolve().parents[1] / ".cache" / "tiny-model"
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
