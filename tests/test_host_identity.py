"""Results never change: the same conversations with LiveServe on and off, on the real pipeline."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
from collections import defaultdict
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import fmean

import aiohttp
import pytest

from liveserve.bench.demo import ensure_tiny_model
from liveserve.bench.launch import running_server
from liveserve.bench.workload import instructions_text
from liveserve.host.cpu.record import RECORD_ENV

from duplex import connect, turn

pytestmark = pytest.mark.host

MODEL = Path(__file__).resolve().parents[1] / ".cache" / "tiny-model"
TURNS = (("weather", 8), ("story", 12), ("why", 6))
CROWD, CROWD_TOKENS = 4, 12
# The longer first: the host pads a prompt's audio to its longest, and with another padding its
# encoder's rows are not the same to the bit.
CROWD_ASKS = ("slower", "why")
THINKER, TALKER, CODE2WAV = range(3)


@dataclass
class Outcome:
    """What one server computed. Requests are in the order in which they first ran."""

    audio: list[str] = field(default_factory=list)  # digests, one after another
    audio_s: list[float] = field(default_factory=list)
    text: list[str] = field(default_factory=list)
    chat_ids: list[list[int]] = field(default_factory=list)
    token_ids: dict[int, list[list[int]]] = field(default_factory=dict)  # by stage
    rows: dict[int, list[list[str]]] = field(default_factory=dict)
    crowd: list[list[str]] = field(default_factory=list)  # texts of a round
    crowd_stride: float = 0.0  # talker steps per frame while text arrives


def read_requests(folder: Path, stage: int) -> tuple[dict[str, list[int]], dict[str, list[str]]]:
    """Sampled ids and input-row digests of a stage, by request."""
    ids: dict[str, list[int]] = defaultdict(list)
    rows: dict[str, list[str]] = defaultdict(list)
    path = folder / f"stage{stage}.jsonl"
    for line in path.read_text().splitlines():
        step = json.loads(line)
        for request, tokens in step.get("sampled", {}).items():
            ids[request] += tokens
        for request, digests in step.get("rows", {}).items():
            rows[request] += digests
    return ids, rows


def read_record(folder: Path, stage: int) -> tuple[list[list[int]], list[list[str]]]:
    """Sampled ids and input-row digests of each request of a stage."""
    ids, rows = read_requests(folder, stage)
    return list(ids.values()), list(rows.values())


def frame_stride(folder: Path, skip: int) -> float:
    """Talker steps from one frame of a request to its next, early in an answer; the mean over all
    requests but the first ``skip``."""
    steps: dict[str, list[int]] = defaultdict(list)
    lines = map(json.loads, (folder / f"stage{TALKER}.jsonl").read_text().splitlines())
    for number, line in enumerate(line for line in lines if "tokens" in line):
        for request in line["tokens"]:
            steps[request].append(number)
    early = [numbers[1:10] for numbers in list(steps.values())[skip:]]
    return fmean(b - a for numbers in early for a, b in pairwise(numbers))


async def one_after_another(url: str, outcome: Outcome) -> None:
    async with connect(url) as session:
        for name, tokens in TURNS:
            response_id, mark = await session.answer(tokens=tokens, name=name)
            await session.wait("response.done", after=mark)
            deltas = session.of_type("response.output_audio.delta", after=mark)
            audio = b"".join(base64.b64decode(delta["delta"]) for delta in deltas)
            outcome.audio_s.append(session.audio_s(response_id))
            outcome.audio.append(hashlib.sha256(audio).hexdigest())
            texts = session.of_type("response.output_audio_transcript.delta", after=mark)
            outcome.text.append("".join(delta["delta"] for delta in texts))
            # heard to its end, so that the whole answer stays in the history
            played_ms = int(1e3 * session.audio_s(response_id))
            await session.send("playback.ack", played_ms=played_ms, response_id=response_id)
            await session.wait("playback.acknowledged")


async def chat(url: str, outcome: Outcome) -> None:
    for prompt in ("Hello", "Tell me a longer story about rivers"):
        body = {
            "model": "tiny",
            "messages": [{"role": "user", "content": prompt}],
            "modalities": ["text"],
            "max_tokens": 24,
            "temperature": 0,
            "return_token_ids": True,
        }
        async with aiohttp.ClientSession() as http:
            async with http.post(url + "/v1/chat/completions", json=body) as response:
                assert response.status == 200, await response.text()
                answer = await response.json()
        outcome.chat_ids.append(answer["choices"][0]["token_ids"])


async def together(url: str, outcome: Outcome) -> None:
    """Sessions that all ask at once, and again once all have heard their answers.

    They end their turns themselves: what a VAD hears last depends on how busy the machine is.
    """
    async with AsyncExitStack() as stack:
        sessions = [
            await stack.enter_async_context(
                connect(url, turn_detection=None, instructions=instructions_text(5, index, 32))
            )
            for index in range(CROWD)
        ]
        for name in CROWD_ASKS:
            made = await asyncio.gather(*(turn(s, name, CROWD_TOKENS) for s in sessions))
            outcome.crowd.append([text for text, _ in made])


# Chunking cuts the codec stream elsewhere, and the vocoder's left context with it, so the samples
# differ at the cuts; the codes do not.
SERVERS = {
    "off": ["--liveserve", "off"],
    "on": ["--liveserve-config", '{"switches": {"chunking": false}}'],
    "chunking": [],
}


def compute(folder: Path, server: str) -> Outcome:
    outcome, record = Outcome(), folder / "record"
    env, flags = {RECORD_ENV: str(record)}, [*SERVERS[server], "--seed-codes", "7"]
    with running_server(MODEL, folder / "server.log", flags=flags, env=env) as running:
        asyncio.run(one_after_another(running.url, outcome))
        asyncio.run(chat(running.url, outcome))
        for stage in (THINKER, TALKER):
            outcome.token_ids[stage], outcome.rows[stage] = read_record(record, stage)
        asyncio.run(together(running.url, outcome))
        outcome.crowd_stride = frame_stride(record, len(outcome.token_ids[TALKER]))
    return outcome


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    ensure_tiny_model(MODEL)
    return {name: compute(tmp_path_factory.mktemp(f"server-{name}"), name) for name in SERVERS}


def test_the_record_is_not_empty(outcomes):
    outcome = outcomes["on"]
    # three turns and two chats in the thinker; each turn had its length in text tokens
    lengths = [len(ids) for ids in outcome.token_ids[THINKER]]
    assert lengths[: len(TURNS)] == [tokens for _, tokens in TURNS]
    assert len(outcome.rows[TALKER]) >= len(TURNS)
    assert all(len(rows) > 10 for rows in outcome.rows[TALKER][: len(TURNS)])
    assert len(set(outcome.audio)) == len(TURNS)
    assert all(len(ids) == 24 for ids in outcome.chat_ids)


@pytest.mark.parametrize("what", ["audio", "text", "chat_ids", "token_ids", "rows"])
def test_one_after_another_everything_is_identical(outcomes, what):
    """Text ids, the talker's input rows, codec ids and audio bytes."""
    assert getattr(outcomes["on"], what) == getattr(outcomes["off"], what)


@pytest.mark.parametrize("what", ["text", "chat_ids", "token_ids", "rows"])
def test_with_chunking_all_but_the_samples_at_the_cuts_is_identical(outcomes, what):
    assert getattr(outcomes["chunking"], what) == getattr(outcomes["off"], what)
    assert outcomes["chunking"].audio_s == pytest.approx(outcomes["off"].audio_s, abs=0.01)


@pytest.mark.parametrize("server", ["on", "chunking"])
def test_under_concurrency_the_text_is_identical(outcomes, server):
    assert outcomes[server].crowd == outcomes["off"].crowd
    texts = [text for made in outcomes[server].crowd for text in made]
    assert [len(text) for text in texts] == [CROWD_TOKENS] * CROWD * len(CROWD_ASKS)
    assert len(set(texts)) > CROWD  # what was said depends on who asked what


def test_with_lookahead_a_request_runs_in_more_talker_steps(outcomes):
    """Stock runs it in every other one while somebody else has a frame to make."""
    assert outcomes["on"].crowd_stride < outcomes["off"].crowd_stride - 0.1
