"""The KV tier in the real omni pipeline: four conversations, KV memory for two, nothing changes.

Both servers keep five turns in a prompt, one more than the host by itself; one has no prefix cache
at all, as the host comes, the other the tier. The sessions take turns, so that an LRU cache would
have lost each of them before it speaks again.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from test_host_identity import TALKER, THINKER, read_record

from liveserve.bench.demo import ensure_tiny_model
from liveserve.bench.launch import running_server
from liveserve.bench.prefill import Reading, prefill_metrics, read_thinker
from liveserve.bench.workload import instructions_text
from liveserve.host.cpu.record import RECORD_ENV

from duplex import connect, get, turn

# Alone: where the orchestrator's loop gets no processor for a second, the host ends a request whose
# audio is done although its text is still to be read, and drops it.
pytestmark = [pytest.mark.host, pytest.mark.alone]

MODEL = Path(__file__).resolve().parents[1] / ".cache" / "tiny-model"
SESSIONS, TURNS, ANSWER_TOKENS = 4, 5, 3
# The tiny model has a token per character. With so many no block that is found again holds tokens
# of an answer: those were computed one at a time, which may round otherwise than a prefill.
INSTRUCTIONS_TOKENS = 264
SESSION_TOKENS = 480
BLOCK_TOKENS, BYTES_PER_TOKEN = 32, 4096
# The longest first: the host pads a prompt's audio to its longest, and with another padding its
# encoder's rows are not the same to the bit. Stock's own would change from one turn to the next.
NAMES = ("slower", "why", "wait")

THINKER_SIZES = {
    "max_model_len": 2 * SESSION_TOKENS - BLOCK_TOKENS,  # a block of the pool is never used
    "kv_cache_memory_bytes": 2 * SESSION_TOKENS * BYTES_PER_TOKEN,
}
SERVERS = {
    "stock": ["--liveserve", "off"],
    "tier": [
        *("--kv-connector", "liveserve", "--kv-dram-gb", "0.125"),
        # Chunks are cut by the listener's clock; that alone changes samples at the cuts.
        *("--liveserve-config", '{"switches": {"chunking": false}}'),
    ],
}


@dataclass
class Outcome:
    """What one server computed, turn by turn in the order in which they were asked for."""

    text: list[str] = field(default_factory=list)
    audio: list[str] = field(default_factory=list)
    text_ids: list[list[int]] = field(default_factory=list)
    codec_ids: list[list[int]] = field(default_factory=list)
    talker_rows: list[list[str]] = field(default_factory=list)
    readings: list[Reading] = field(default_factory=list)
    kv: dict[str, Any] = field(default_factory=dict)
    crowd_text: dict[tuple[int, int], str] = field(default_factory=dict)
    crowd_readings: list[Reading] = field(default_factory=list)
    kv_after: dict[str, Any] = field(default_factory=dict)


async def converse(url: str, turns: int, *, together: bool) -> dict[tuple[int, int], tuple]:
    """Every session's turns, by (session, turn): round by round, one at a time or all at once."""
    found: dict[tuple[int, int], tuple] = {}
    async with AsyncExitStack() as stack:
        sessions = [
            await stack.enter_async_context(
                connect(
                    url,
                    turn_detection=None,
                    instructions=instructions_text(3, index, INSTRUCTIONS_TOKENS),
                )
            )
            for index in range(SESSIONS)
        ]
        for number in range(turns):
            name = NAMES[number % len(NAMES)]
            if together:
                made = await asyncio.gather(
                    *(turn(session, name, ANSWER_TOKENS) for session in sessions)
                )
            else:
                made = [await turn(session, name, ANSWER_TOKENS) for session in sessions]
            found |= {(index, number): result for index, result in enumerate(made)}
    return found


async def settled(url: str) -> dict[str, Any]:
    """The thinker's state, once no copy is under way."""
    for _ in range(50):
        thinker = (await get(url, "/liveserve/kv"))["engines"][THINKER]
        dram = thinker["kv"]["dram"]
        if not dram["loading"] and not dram["storing"]:
            break
        await asyncio.sleep(0.1)
    return thinker


def compute(folder: Path, server: str) -> Outcome:
    outcome, record = Outcome(), folder / "record"
    flags = [
        *("--history-turns", str(TURNS), "--seed-codes", "7"),
        *("--stage-overrides", json.dumps({str(THINKER): THINKER_SIZES})),
        *SERVERS[server],
    ]
    env = {RECORD_ENV: str(record)}
    with running_server(MODEL, folder / "server.log", flags=flags, env=env) as running:
        alone = asyncio.run(converse(running.url, TURNS, together=False))
        order = sorted(alone, key=lambda key: (key[1], key[0]))
        outcome.text = [alone[key][0] for key in order]
        outcome.audio = [alone[key][1] for key in order]
        outcome.text_ids, _ = read_record(record, THINKER)
        outcome.codec_ids, outcome.talker_rows = read_record(record, TALKER)
        outcome.readings = read_thinker(record)
        if server == "tier":
            outcome.kv = asyncio.run(settled(running.url))
            crowd = asyncio.run(converse(running.url, 3, together=True))
            outcome.crowd_text = {key: text for key, (text, _) in crowd.items()}
            outcome.crowd_readings = read_thinker(record)[len(outcome.readings) :]
            outcome.kv_after = asyncio.run(settled(running.url))
    return outcome


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory) -> dict[str, Outcome]:
    ensure_tiny_model(MODEL)
    return {name: compute(tmp_path_factory.mktemp(f"server-{name}"), name) for name in SERVERS}


def test_the_runs_are_what_they_are_meant_to_be(outcomes):
    """All five turns are in the last prompts, and four sessions are twice the KV memory."""
    for outcome in outcomes.values():
        assert len(outcome.readings) == SESSIONS * TURNS
        assert [len(ids) for ids in outcome.text_ids] == [ANSWER_TOKENS] * SESSIONS * TURNS
        assert all(len(rows) > 20 for rows in outcome.talker_rows[: SESSIONS * TURNS])
        assert len(set(outcome.audio)) == SESSIONS * TURNS
        prompts = [reading.prompt for reading in outcome.readings]
        by_turn = [prompts[n * SESSIONS : (n + 1) * SESSIONS] for n in range(TURNS)]
        assert all(min(b) - max(a) > 20 for a, b in pairwise(by_turn))
        blocks = [(p // BLOCK_TOKENS, (p + ANSWER_TOKENS - 1) // BLOCK_TOKENS) for p in prompts]
        assert all(before == after for before, after in blocks)
        assert sum(by_turn[-1]) > 1.8 * 2 * SESSION_TOKENS
    assert all(r.cached == 0 for r in outcomes["stock"].readings)


@pytest.mark.parametrize("what", ["text", "text_ids", "talker_rows", "codec_ids", "audio"])
def test_everything_is_identical_to_no_tier(outcomes, what):
    tier, stock = getattr(outcomes["tier"], what), getattr(outcomes["stock"], what)
    assert tier == stock


def test_recomputed_prefill_falls_by_four_fifths(outcomes):
    stock, tier = (prefill_metrics(outcomes[name].readings) for name in ("stock", "tier"))
    assert tier["prompt_tokens"] == stock["prompt_tokens"]
    assert stock["prefill_tokens_recomputed"] == stock["prompt_tokens_repeated"]
    assert tier["prefill_tokens_recomputed"] <= 0.2 * stock["prefill_tokens_recomputed"]
    # in every later turn of every session
    readings = outcomes["tier"].readings
    for before, reading in zip(readings, readings[SESSIONS:], strict=False):
        assert before.session == reading.session
        assert reading.cached > 0.7 * before.prompt
        assert reading.cached % BLOCK_TOKENS == 0


def test_it_came_from_dram_and_the_gpu_had_evicted_it(outcomes):
    kv = outcomes["tier"].kv["kv"]
    least = SESSIONS * (TURNS - 1) * (INSTRUCTIONS_TOKENS // BLOCK_TOKENS)
    assert kv["dram"]["loaded"] > least / 2
    assert kv["dram"]["stored"] >= least / (TURNS - 1)
    assert sum(kv["evicted"].values()) > least / 2


def test_all_at_once_the_text_is_the_same(outcomes):
    """Loads then run beside other sessions' steps, and requests wait for memory."""
    tier, stock = outcomes["tier"], outcomes["stock"]
    texts = {
        (position % SESSIONS, position // SESSIONS): text
        for position, text in enumerate(stock.text)
    }
    assert len(tier.crowd_text) == 3 * SESSIONS
    assert tier.crowd_text == {key: texts[key] for key in tier.crowd_text}
    assert any(reading.cached for reading in tier.crowd_readings)


@pytest.mark.parametrize("when", ["kv", "kv_after"])
def test_nothing_is_left_behind(outcomes, when):
    state: Mapping[str, Any] = getattr(outcomes["tier"], when)
    assert state["blocks_used"] == 0
    kv, dram = state["kv"], state["kv"]["dram"]
    assert kv["free"] == state["blocks"]
    assert (dram["loading"], dram["storing"]) == (0, 0)
    assert (kv["errors"], dram["errors"], dram["corrupt"]) == (0, 0, 0)
    assert dram["store_failed"] == 0
    if when == "kv":  # all at once on a busy machine, a load may take too long
        assert dram["load_failed"] == 0
    assert dram["used"] == dram["stored"] - sum(dram["evicted"].values())
