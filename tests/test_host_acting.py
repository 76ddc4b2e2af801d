"""Order and holds inside a real engine: plain vLLM on the CPU, one process, step by step."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from liveserve.host.cpu import adapt

pytestmark = pytest.mark.host

# Each scenario is a function of the program; its findings come back as JSON.
PROGRAM = """
import sys, vllm, torch, json  # vllm first: it makes torchvision importable on a CPU build of torch
from transformers import Qwen3Config, Qwen3ForCausalLM
from vllm import LLM, SamplingParams
from liveserve.config import LiveServeConfig, StageConfig
from liveserve.events import Batch, Event, EventKind, encode, decode_reply
import dataclasses, time

folder = sys.argv[1]
torch.manual_seed(0)
Qwen3ForCausalLM(Qwen3Config(
    vocab_size=512, hidden_size=128, intermediate_size=256, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, head_dim=64, max_position_embeddings=512,
)).save_pretrained(folder)
OURS = "liveserve.host.plain.LiveScheduler"
LENGTHS = (30, 90, 5, 60, 120, 44)
PROMPTS = [[3 + (7 * i + j) % 500 for j in range(n)] for i, n in enumerate(LENGTHS)]

def make(scheduler, **more):
    options = dict(dtype="float32", max_model_len=256, max_num_seqs=4, enforce_eager=True,
                   kv_cache_memory_bytes=1 << 25, skip_tokenizer_init=True, scheduler_cls=scheduler)
    return LLM(folder, **(options | more))

def params(n=20, **more):
    return SamplingParams(temperature=0, max_tokens=n, ignore_eos=True, detokenize=False, **more)

def run(llm, prompts, sampling):
    outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], sampling, use_tqdm=False)
    return [[list(c.token_ids) for c in o.outputs] for o in outputs]

def core_of(llm):
    return llm.llm_engine.engine_core.engine_core

def tell(llm, events, seq=[0]):
    batch = Batch("", time.monotonic(), seq[0], events)
    if seq[0] == 0:
        batch.views = []
    seq[0] += len(events)
    return decode_reply(core_of(llm).liveserve_exchange(encode(batch)))

def add(llm, name, prompt, n):
    llm.llm_engine.add_request(name, {"prompt_token_ids": prompt}, params(n))

def session(name, now, routed=None):
    events = [Event(EventKind.OPENED, name, now, 1.0, detail="duplex"),
              Event(EventKind.COMMITTED, name, now),
              Event(EventKind.RESPONSE_CREATED, name, now, response_id="r")]
    if routed is not None:
        events.append(Event(EventKind.AUDIO_ROUTED, name, now, routed, "r"))
    return events

found = {}

# 1. The host's own machinery under our scheduler: the same tokens as under its own.
plain = {}
for scheduler in (None, OURS):
    found_here = {}
    llm = make(scheduler)
    found_here["decode"] = run(llm, PROMPTS, params())
    found_here["parallel samples"] = run(llm, PROMPTS[:2], SamplingParams(
        n=3, temperature=1.0, seed=5, max_tokens=8, ignore_eos=True, detokenize=False))
    del llm
    llm = make(scheduler, max_num_batched_tokens=32, enable_prefix_caching=True)
    found_here["chunked prefill, prefix cache"] = run(llm, PROMPTS + PROMPTS, params(12))
    del llm
    # room for about two of the four requests that run at once: they preempt one another
    llm = make(scheduler, kv_cache_memory_bytes=(1 << 20) + (1 << 19), enable_prefix_caching=False)
    preempted = []
    scheduler_object = core_of(llm).scheduler
    preempt = scheduler_object._preempt_request
    scheduler_object._preempt_request = lambda request, *args, **kwargs: (
        preempted.append(request.request_id), preempt(request, *args, **kwargs))[1]
    found_here["preemption"] = run(llm, PROMPTS, params(100))
    found.setdefault("preemptions", []).append(len(preempted))
    plain[scheduler or "stock"] = found_here
    del llm
found["same"] = {name: plain["stock"][name] == plain[OURS][name] for name in plain["stock"]}

# 2. Order: with one slot, who waits for first audio goes first, the oldest of them before others.
def session_named(request_id):
    return request_id.partition("-")[0]

def drive(llm, steps, record):
    for _ in range(steps):
        for output in llm.llm_engine.step():
            record.append((session_named(output.request_id), len(output.outputs[0].token_ids)))

llm = make(OURS, max_num_seqs=1)
runtime = core_of(llm).scheduler.liveserve
runtime._session_of = session_named
now = time.monotonic()
tell(llm, session("b", now) + session("c", now))
for name in ("nobody", "c", "b"):
    add(llm, name, PROMPTS[2], 3)
record = []
while llm.llm_engine.has_unfinished_requests():
    drive(llm, 1, record)
found["finish order"] = list(dict.fromkeys(name for name, _ in record))
del llm

# 3. Hold: a runs far ahead of its listener while b waits for its first audio.
llm = make(OURS)
runtime = core_of(llm).scheduler.liveserve
runtime._session_of = session_named
runtime.info = dataclasses.replace(runtime.info, token_s=0.5)
runtime.config = LiveServeConfig(stages={"llm": StageConfig(
    p_safe_s=0.5, p_release_s=1.0, p_hold_s=2.0, age_limit_s=60.0, pace=True)})
runtime._set_policy()
now = time.monotonic()
tell(llm, session("a", now, routed=0.5), seq=[0])
add(llm, "a", PROMPTS[0], 60)
record = []
drive(llm, 12, record)
ahead = len([1 for name, _ in record if name == "a"])
held_before = sorted(session_named(r) for r in runtime.held)
seq = [4]
tell(llm, session("b", time.monotonic()), seq=seq)
add(llm, "b", PROMPTS[1], 10)
record = []
while ("b", 10) not in record:
    drive(llm, 1, record)
found["hold"] = {
    "a ran free while nobody waited": ahead >= 10 and held_before == [],
    "a while b was served": len([1 for name, _ in record if name == "a"]),
    "b": len([1 for name, _ in record if name == "b"]),
    "in running": [session_named(r.request_id) for r in core_of(llm).scheduler.running],
}
# b is heard: nobody waits any more, a goes on to its end, and its tokens are the stock ones
tell(llm, [Event(EventKind.AUDIO_ROUTED, "b", time.monotonic(), 99.0, "r")], seq=seq)
tell(llm, [Event(EventKind.CLOSED, "b", time.monotonic())], seq=seq)
last = None
while llm.llm_engine.has_unfinished_requests():
    for output in llm.llm_engine.step():
        last = list(output.outputs[0].token_ids)
del llm
found["hold"]["tokens as stock"] = last == run(make(None), [PROMPTS[0]], params(60))[0][0]
print("FOUND", json.dumps(found))
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    env = {**os.environ, **adapt.default_env(), "LIVESERVE": "on", "HF_HUB_OFFLINE": "1"}
    env |= {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
    command = [sys.executable, "-c", PROGRAM, str(tmp_path_factory.mktemp("acting") / "model")]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("FOUND ")]
    assert lines, done.stderr[-4000:]
    return json.loads(lines[0][6:])


@pytest.mark.parametrize(
    "what", ["decode", "parallel samples", "chunked prefill, prefix cache", "preemption"]
)
def test_the_hosts_machinery_gives_the_same_tokens(found, what):
    assert found["same"][what]


def test_the_preemption_case_really_preempts(found):
    assert all(count > 0 for count in found["preemptions"])


def test_the_longest_waiting_first_audio_goes_first(found):
    assert found["finish order"] == ["c", "b", "nobody"]


def test_a_hold_frees_the_steps_and_keeps_the_place(found):
    hold = found["hold"]
    assert hold["a ran free while nobody waited"]
    assert hold["b"] == 10
    assert hold["a while b was served"] <= 1
    assert "a" in hold["in running"]
    assert hold["tokens as stock"]
