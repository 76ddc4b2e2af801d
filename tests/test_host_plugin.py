"""LiveServe as a plugin of the host's own commands, without ``liveserve serve``."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import tiny_text

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
    kv = (await get(url, "/liveserve/kv", timeout_s=10))["engines"]
    # Prefix caching is off in this deployment: no KV outlives its request.
    assert [(e["stage"], e["kv"]) for e in kv] == [
        ("thinker", None), ("talker", None), ("code2wav", None)
    ]  # fmt: skip


def plain(folder: Path) -> dict[str, Any]:
    """The same prompts with vLLM's scheduler and with ours over it."""
    tiny_text.write_model(folder)
    prompts = [tiny_text.prompt(length, length) for length in (3, 40, 90, 17)]
    found: dict[str, Any] = {}
    for name, scheduler in (("stock", None), ("ours", tiny_text.OURS)):
        llm = tiny_text.make(folder, scheduler, max_num_seqs=2)
        found[name] = tiny_text.generate(llm, prompts, tiny_text.params())
    core = tiny_text.core_of(llm)
    reply = tiny_text.Link(core).tell(detail=True)
    snapshot = reply.snapshot
    found |= {
        "stage": snapshot.stage,
        "attached": snapshot.attached,
        "steps": snapshot.steps_total,
        "tokens": snapshot.tokens_total,
        "blocks": snapshot.kv_blocks_total,
        "requests": len(reply.requests),
    }
    return found


def test_plain_vllm_with_scheduler_cls(tmp_path):
    found = tiny_text.findings(plain, tmp_path)
    assert found["ours"] == found["stock"]
    assert found["stage"] == "llm"
    assert found["attached"]
    assert found["steps"] >= 40
    assert found["tokens"] == 80
    assert found["blocks"] > 0
    assert found["requests"] == 0
