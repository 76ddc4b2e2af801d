"""Unheard KV is freed first: plain vLLM with prefix caching on the CPU, one process."""

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
import sys, vllm, torch, json, time
from transformers import Qwen3Config, Qwen3ForCausalLM
from vllm import LLM, SamplingParams
from liveserve.config import Switches
from liveserve.events import Batch, Event, EventKind, encode

folder = sys.argv[1]
torch.manual_seed(0)
Qwen3ForCausalLM(Qwen3Config(
    vocab_size=512, hidden_size=128, intermediate_size=256, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, head_dim=64, max_position_embeddings=512,
)).save_pretrained(folder)
BLOCK, BLOCKS = 32, 15
llm = LLM(folder, dtype="float32", max_model_len=480, max_num_seqs=4, enforce_eager=True,
          skip_tokenizer_init=True, scheduler_cls="liveserve.host.plain.LiveScheduler",
          enable_prefix_caching=True, block_size=BLOCK, num_gpu_blocks_override=BLOCKS + 1,
          kv_cache_memory_bytes=1 << 21, gpu_memory_utilization=0.1)
core = llm.llm_engine.engine_core.engine_core
scheduler = core.scheduler
runtime = scheduler.liveserve
pool = scheduler.kv_cache_manager.block_pool
runtime._session_of = scheduler._liveserve_unheard._session_of = lambda r: r.partition("-")[0]
seq = [0]

def tell(*events, views=None):
    batch = Batch("", time.monotonic(), seq[0], list(events))
    if seq[0] == 0:
        batch.views = []
    seq[0] += len(events)
    core.liveserve_exchange(encode(batch))

def prompt(seed, length):
    return [3 + (seed * 131 + 7 * i) % 500 for i in range(length)]

def run(ids, name, n=1):
    llm.llm_engine.add_request(name, {"prompt_token_ids": ids}, SamplingParams(
        temperature=0, max_tokens=n, ignore_eos=True, detokenize=False))
    out, cached = [], None
    while llm.llm_engine.has_unfinished_requests():
        for output in llm.llm_engine.step():
            out = list(output.outputs[0].token_ids)
            cached = output.num_cached_tokens
    return out, cached

PACE_S, HEARD_S = 0.1, 2.5  # 25 tokens of the answer are heard
PROMPT_A = prompt(1, 60)

def speaking(name):
    now = time.monotonic()
    tell(Event(EventKind.OPENED, name, now, 1e-6, detail="duplex"),
         Event(EventKind.TEXT_PACE, name, now, PACE_S),
         Event(EventKind.COMMITTED, name, now),
         Event(EventKind.RESPONSE_CREATED, name, now, response_id="r"),
         Event(EventKind.AUDIO_ROUTED, name, now, 5.0, "r"),
         Event(EventKind.PLAYBACK, name, now, HEARD_S, "r"))

def answer_until(name, tokens):
    # max_tokens beyond: the request still runs when this returns
    llm.llm_engine.add_request(name, {"prompt_token_ids": PROMPT_A}, SamplingParams(
        temperature=0, max_tokens=400, ignore_eos=True, detokenize=False))
    made = []
    while len(made) < tokens:
        for output in llm.llm_engine.step():
            made = list(output.outputs[0].token_ids)
    return made

def scenario(how, switch=True, known=True):
    runtime.flip(Switches(unheard=switch))
    pool.reset_prefix_cache()
    runtime.unheard_blocks = 0
    # an older session's history: four full blocks
    old = prompt(9, 4 * BLOCK + 1)
    run(old, "old-1")
    if known:
        speaking("a")
    # the answer: 60 + 200 tokens are 8 full blocks and a part
    if how == "aborted":
        made = answer_until("a-1", 200)
        llm.llm_engine.abort_request(["a-1"], internal=False)
        llm.llm_engine.step()
    elif how == "barge-in before abort":
        made = answer_until("a-1", 200)
        tell(Event(EventKind.BARGE_IN, "a", time.monotonic(), HEARD_S))
        llm.llm_engine.abort_request(["a-1"], internal=False)
        llm.llm_engine.step()
    else:
        made, _ = run(PROMPT_A, "a-1", 200)
        if how == "complete, interrupted":
            tell(Event(EventKind.BARGE_IN, "a", time.monotonic(), HEARD_S))
        else:
            tell(Event(EventKind.COMMITTED, "a", time.monotonic()))  # heard to its end
    assert not scheduler.requests, list(scheduler.requests)
    # somebody needs 8 blocks: 2 were never used, and that part is free
    run(prompt(5, 8 * BLOCK - 1), "c-1")
    kept = {"unheard": runtime.unheard_blocks, "old": run(old, "old-2")[1]}
    # the next turn repeats what was heard
    heard = PROMPT_A + made[:25]
    kept["heard"] = run(heard + prompt(3, 20), "a-2")[1]
    tell(Event(EventKind.CLOSED, "a", time.monotonic()))
    return kept

found = {
    how: scenario(how)
    for how in ("aborted", "barge-in before abort", "complete, interrupted", "complete, heard")
}
found["switched off"] = scenario("aborted", switch=False)
found["unknown session"] = scenario("aborted", known=False)
runtime.ring.stale = True
found["stale views"] = scenario("aborted", known=False)
found["errors"] = runtime.errors
found["free"] = pool.get_num_free_blocks()
queue, block = [], pool.free_block_queue.fake_free_list_head.next_free_block
while block.next_free_block is not None:
    queue.append(block.block_id)
    block = block.next_free_block
found["queue is whole"] = sorted(queue) == list(range(1, BLOCKS + 1))
print("FOUND", json.dumps(found))
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    env = {**os.environ, **adapt.default_env(), "LIVESERVE": "on", "HF_HUB_OFFLINE": "1"}
    env |= {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
    command = [sys.executable, "-c", PROGRAM, str(tmp_path_factory.mktemp("unheard") / "model")]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("FOUND ")]
    assert lines, done.stderr[-4000:]
    return json.loads(lines[0][6:])


# 60 + 200 tokens are 8 full blocks; 85 are heard: 2 full blocks, and the 3rd ends behind them.
UNHEARD, HEARD, OLD = 6, 64, 128


@pytest.mark.parametrize("how", ["aborted", "barge-in before abort", "complete, interrupted"])
def test_the_unheard_goes_first_and_the_heard_stays(found, how):
    case = found[how]
    assert case["unheard"] == UNHEARD
    assert case["old"] == OLD  # an older history, next in the host's order, was spared
    assert case["heard"] == HEARD


@pytest.mark.parametrize("how", ["switched off", "complete, heard", "unknown session"])
def test_else_the_hosts_order_stands(found, how):
    assert found[how]["unheard"] == 0
    assert found[how]["old"] < OLD


def test_stale_views_change_nothing(found):
    assert found["stale views"]["unheard"] == 0


def test_the_pool_is_whole_afterwards(found):
    assert found["errors"] == 0
    assert found["free"] == 15
    assert found["queue is whole"]
