"""LiveServe as a plugin of the host's own commands, without ``liveserve serve``."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import aiohttp
import pytest

from liveserve.bench.demo import ensure_tiny_model
from liveserve.bench.launch import running_server
from liveserve.host.cpu import adapt
from liveserve.host.cpu.deploy import deploy_path
from liveserve.host.serve import plugin_names

from duplex import get

pytestmark = pytest.mark.host

MODEL = Path(__file__).resolve().parents[1] / ".cache" / "tiny-model"


def test_vllm_serve_omni_with_the_switch_in_the_environment(tmp_path):
    """Turn mode: a chat with audio is seen by every stage."""
    ensure_tiny_model(MODEL)
    env = {**adapt.default_env(), "LIVESERVE": "on", "VLLM_PLUGINS": plugin_names({})}
    env["LIVESERVE_CPU_FAST_CODES"] = "1"
    deploy = str(deploy_path("turn", folder=tmp_path))
    with running_server(
        MODEL,
        tmp_path / "server.log",
        serve=[str(Path(sys.executable).with_name("vllm")), "serve"],
        flags=["--omni", "--deploy-config", deploy],
        env=env,
    ) as server:
        asyncio.run(chat_is_seen(server.url))


async def chat_is_seen(url: str) -> None:
    body = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "Tell me a story"}],
        "modalities": ["text", "audio"],
        "max_tokens": 16,
    }
    async with aiohttp.ClientSession() as http:
        async with http.post(url + "/v1/chat/completions", json=body) as response:
            assert response.status == 200, await response.text()
            await response.read()
    sessions = await get(url, "/liveserve/sessions")
    assert sessions["totals"]["audio_routed_s"] > 3
    assert sessions["totals"]["responses"] == {"completed": 1}
    engines = (await get(url, "/liveserve/pressure", detail=1, timeout_s=10))["engines"]
    assert [e["snapshot"]["stage"] for e in engines] == ["thinker", "talker", "code2wav"]
    for engine in engines:
        assert engine["snapshot"]["attached"]
        assert engine["snapshot"]["steps_total"] > 0
        assert [v["session_id"] for v in engine["views"]] == [
            row["session_id"] for row in sessions["sessions"]
        ]


# In one process: the same prompts with vLLM's scheduler and with ours over it.
PLAIN = """
import sys, vllm, torch  # vllm first: it makes torchvision importable on a CPU build of torch
from transformers import Qwen3Config, Qwen3ForCausalLM
folder = sys.argv[1]
torch.manual_seed(0)
Qwen3ForCausalLM(Qwen3Config(
    vocab_size=512, hidden_size=128, intermediate_size=256, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, head_dim=64, max_position_embeddings=512,
)).save_pretrained(folder)
from vllm import LLM, SamplingParams
prompts = [{"prompt_token_ids": list(range(5, 5 + n))} for n in (3, 40, 90, 17)]
params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, detokenize=False)
found = []
for scheduler in (None, "liveserve.host.plain.LiveScheduler"):
    llm = LLM(folder, skip_tokenizer_init=True, dtype="float32", max_model_len=256, max_num_seqs=2,
              enforce_eager=True, kv_cache_memory_bytes=1 << 25, scheduler_cls=scheduler)
    found.append([o.outputs[0].token_ids for o in llm.generate(prompts, params, use_tqdm=False)])
    core = llm.llm_engine.engine_core.engine_core
    runtime = getattr(core.scheduler, "liveserve", None)
    del llm
assert found[0] == found[1], found
snapshot = runtime.snapshot()
assert snapshot.stage == "llm" and snapshot.steps_total >= 40, snapshot
assert snapshot.tokens_total == 80 and snapshot.kv_blocks_total > 0, snapshot
from liveserve.events import Batch, decode_reply, encode
reply = decode_reply(core.liveserve_exchange(encode(Batch("", 0.0, 0, [], views=[], detail=True))))
assert reply.snapshot.attached and not reply.requests
print("SAME")
"""


def test_plain_vllm_with_scheduler_cls(tmp_path):
    env = {**os.environ, **adapt.default_env(), "LIVESERVE": "on", "HF_HUB_OFFLINE": "1"}
    env |= {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
    command = [sys.executable, "-c", PLAIN, str(tmp_path / "model")]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.strip().endswith("SAME")
