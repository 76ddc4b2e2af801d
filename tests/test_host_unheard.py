"""Unheard KV is freed first: plain vLLM with prefix caching on the CPU, one process."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import tiny_text

from liveserve.config import Switches
from liveserve.events import Event, EventKind

pytestmark = pytest.mark.host

BLOCK, BLOCKS = 32, 15
PACE_S, HEARD_S = 0.1, 2.5  # 25 tokens of the answer are heard


def prompt(seed: int, length: int) -> list[int]:
    return [3 + (seed * 131 + 7 * i) % 500 for i in range(length)]


PROMPT_A = prompt(1, 60)


class Histories:
    """An engine whose pool keeps the histories of sessions."""

    def __init__(self, folder: Path) -> None:
        self.llm = tiny_text.make(
            tiny_text.write_model(folder),
            tiny_text.OURS,
            max_model_len=480,
            enable_prefix_caching=True,
            block_size=BLOCK,
            num_gpu_blocks_override=BLOCKS + 1,
            kv_cache_memory_bytes=1 << 21,
            gpu_memory_utilization=0.1,
        )
        core = tiny_text.core_of(self.llm)
        self.scheduler = core.scheduler
        self.runtime = self.scheduler.liveserve
        self.pool = self.scheduler.kv_cache_manager.block_pool
        self.tell = tiny_text.Link(core).tell
        self.runtime._session_of = lambda name: name.partition("-")[0]
        self.scheduler._liveserve_unheard._session_of = self.runtime._session_of

    def add(self, name: str, ids: list[int], tokens: int) -> None:
        request = {"prompt_token_ids": ids}
        self.llm.llm_engine.add_request(name, request, tiny_text.params(tokens))

    def run(self, ids: list[int], name: str, tokens: int = 1) -> tuple[list[int], int | None]:
        """Tokens of the answer, and how many of the prompt were cached."""
        self.add(name, ids, tokens)
        made, cached = [], None
        while self.llm.llm_engine.has_unfinished_requests():
            for output in self.llm.llm_engine.step():
                made = list(output.outputs[0].token_ids)
                cached = output.num_cached_tokens
        return made, cached

    def answer_until(self, name: str, tokens: int) -> list[int]:
        """The request still runs when this returns."""
        self.add(name, PROMPT_A, 400)
        made: list[int] = []
        while len(made) < tokens:
            for output in self.llm.llm_engine.step():
                made = list(output.outputs[0].token_ids)
        return made

    def speaking(self, name: str) -> None:
        now_s = time.monotonic()
        self.tell(
            Event(EventKind.OPENED, name, now_s, 1e-6, detail="duplex"),
            Event(EventKind.TEXT_PACE, name, now_s, PACE_S),
            Event(EventKind.COMMITTED, name, now_s),
            Event(EventKind.RESPONSE_CREATED, name, now_s, response_id="r"),
            tiny_text.hears(name, now_s, 5.0),
            Event(EventKind.PLAYBACK, name, now_s, HEARD_S, "r"),
        )

    def scenario(self, how: str, *, switch: bool = True, known: bool = True) -> dict[str, Any]:
        """What is kept of a's answer, and of an older session's history."""
        self.runtime.flip(Switches(unheard=switch))
        self.pool.reset_prefix_cache()
        self.runtime.unheard_blocks = 0
        # an older session's history: four full blocks
        old = prompt(9, 4 * BLOCK + 1)
        self.run(old, "old-1")
        if known:
            self.speaking("a")
        # the answer: 60 + 200 tokens are 8 full blocks and a part
        if how in ("aborted", "barge-in before abort"):
            made = self.answer_until("a-1", 200)
            if how == "barge-in before abort":
                self.tell(Event(EventKind.BARGE_IN, "a", time.monotonic(), HEARD_S))
            self.llm.llm_engine.abort_request(["a-1"], internal=False)
            self.llm.llm_engine.step()
        else:
            made, _ = self.run(PROMPT_A, "a-1", 200)
            if how == "complete, interrupted":
                self.tell(Event(EventKind.BARGE_IN, "a", time.monotonic(), HEARD_S))
            else:
                self.tell(Event(EventKind.COMMITTED, "a", time.monotonic()))  # heard to its end
        assert not self.scheduler.requests, list(self.scheduler.requests)
        # somebody needs 8 blocks: 2 were never used, and that part is free
        self.run(prompt(5, 8 * BLOCK - 1), "c-1")
        kept = {"unheard": self.runtime.unheard_blocks, "old": self.run(old, "old-2")[1]}
        # the next turn repeats what was heard
        heard = PROMPT_A + made[:25]
        kept["heard"] = self.run(heard + prompt(3, 20), "a-2")[1]
        self.tell(Event(EventKind.CLOSED, "a", time.monotonic()))
        return kept


def scenarios(folder: Path) -> dict[str, Any]:
    engine = Histories(folder)
    found: dict[str, Any] = {
        how: engine.scenario(how)
        for how in ("aborted", "barge-in before abort", "complete, interrupted", "complete, heard")
    }
    found["switched off"] = engine.scenario("aborted", switch=False)
    found["unknown session"] = engine.scenario("aborted", known=False)
    engine.runtime.ring.stale = True
    found["stale views"] = engine.scenario("aborted", known=False)
    found["errors"] = engine.runtime.errors
    found["free"] = engine.pool.get_num_free_blocks()
    queue, block = [], engine.pool.free_block_queue.fake_free_list_head.next_free_block
    while block.next_free_block is not None:
        queue.append(block.block_id)
        block = block.next_free_block
    found["queue is whole"] = sorted(queue) == list(range(1, BLOCKS + 1))
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return tiny_text.findings(scenarios, tmp_path_factory.mktemp("unheard"))


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
