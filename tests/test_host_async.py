"""Synchronous and asynchronous scheduling, for both model runners, without a model.

A worker that samples a function of the whole context stands in for the model. It knows only what a
model runner would: with the V1 runner a request that sat out a step must come back with all of its
tokens, with V2 it keeps its slot. Asynchronously a step is scheduled while the one before it runs,
and its output is handed back one step late.
"""

from __future__ import annotations

import json
import logging
from collections import deque
from typing import Any

import pytest
import tiny_text

pytest.importorskip("vllm")

from vllm import SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from liveserve.config import Switches

pytestmark = pytest.mark.host

BLOCK = 16
LENGTHS = (30, 90, 5, 60, 120, 44)
KINDS = [(False, False), (True, False), (False, True), (True, True)]
IDS = ["sync-v1", "async-v1", "sync-v2", "async-v2"]


class Worker:
    """A model runner, as far as a scheduler can tell."""

    def __init__(self, v2: bool) -> None:
        self.drafts: dict[str, list[int]] = {}  # of the step before, where there is speculation
        self._v2 = v2
        self._tokens: dict[str, list[int]] = {}
        self._last: set[str] = set()

    def execute(self, output: Any) -> ModelRunnerOutput:
        for name in output.finished_req_ids:
            self._tokens.pop(name, None)
        done = {}
        for new in output.scheduled_new_reqs:
            ids = new.prefill_token_ids if self._v2 else new.prompt_token_ids
            self._tokens[new.req_id] = list(ids)
            done[new.req_id] = new.num_computed_tokens
        cached = output.scheduled_cached_reqs
        for name, computed in zip(cached.req_ids, cached.num_computed_tokens, strict=True):
            done[name] = computed
            if not self._v2 and name not in self._last:
                self._tokens[name] = list(cached.all_token_ids[name])
        sampled = []
        for name, count in output.num_scheduled_tokens.items():
            tokens = self._tokens[name]
            drafts = output.scheduled_spec_decode_tokens.get(name, [])
            end = done[name] + count - len(drafts)
            assert end <= len(tokens), f"{name}: {end} tokens scheduled, {len(tokens)} are known"
            sampled.append([])
            for draft in [*drafts, None] if end == len(tokens) else []:
                sampled[-1].append(next_token(tokens))
                tokens.append(sampled[-1][-1])
                if draft != tokens[-1]:
                    break
            self.drafts[name] = [next_token(tokens), 0] if sampled[-1] else []
        self._last = set(output.num_scheduled_tokens)
        names = list(output.num_scheduled_tokens)
        return ModelRunnerOutput(names, {n: i for i, n in enumerate(names)}, sampled)


def next_token(context: list[int]) -> int:
    return hash(tuple(context)) % tiny_text.VOCABULARY


def expected(ids: list[int], count: int) -> list[int]:
    tokens = list(ids)
    for _ in range(count):
        tokens.append(next_token(tokens))
    return tokens[len(ids) :]


class Engine:
    """A scheduler and its worker, with as many steps under way as the host would have."""

    def __init__(self, scheduler: Any, v2: bool) -> None:
        self.scheduler, self.worker = scheduler, Worker(v2)
        self.depth = 2 if isinstance(scheduler, AsyncScheduler) else 1
        self.under_way: deque[tuple[Any, ModelRunnerOutput]] = deque()
        self.tokens: dict[str, list[int]] = {}

    def add(self, name: str, ids: list[int], count: int) -> Request:
        sampling = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
        hasher = get_request_block_hasher(BLOCK, sha256)
        request = Request(name, list(ids), sampling, None, block_hasher=hasher)
        self.scheduler.add_request(request)
        return request

    def step(self) -> Any:
        """Schedule once; take the oldest output when enough steps are under way."""
        output = None
        if self.scheduler.has_requests():
            output = self.scheduler.schedule()
            self.under_way.append((output, self.worker.execute(output)))
        if len(self.under_way) >= self.depth or output is None:
            self._update()
        return output

    def _update(self) -> None:
        made = self.scheduler.update_from_output(*self.under_way.popleft())
        if self.scheduler.num_spec_tokens:
            drafts = self.worker.drafts
            self.scheduler.update_draft_token_ids(DraftTokenIds([*drafts], [*drafts.values()]))
        for core_outputs in made.values():
            for output in core_outputs.outputs:
                self.tokens.setdefault(output.request_id, []).extend(output.new_token_ids)

    def run_out(self) -> None:
        for _ in range(5000):
            if not (self.scheduler.has_requests() or self.under_way):
                return
            self.step()
        raise AssertionError("requests never end")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_text.write_model(tmp_path_factory.mktemp("tiny"), weights=False)


@pytest.fixture
def make(folder, monkeypatch):
    """Makes an engine of plain vLLM with our scheduler."""
    init_none_hash(sha256)
    monkeypatch.setenv("LIVESERVE", "on")
    monkeypatch.setenv("LIVESERVE_CONFIG", json.dumps({"stages": {"llm": {"pace": True}}}))

    def engine(asynchronous: bool, v2: bool, *, blocks: int = 100, spec: int = 0) -> Engine:
        config = EngineArgs(
            model=str(folder),
            skip_tokenizer_init=True,
            dtype="float32",
            max_model_len=256,
            max_num_seqs=4,
            max_num_batched_tokens=128,
            block_size=BLOCK,
            scheduler_cls=tiny_text.OURS,
        ).create_engine_config()
        # A CPU platform has neither asynchronous scheduling nor the V2 runner; a scheduler does as
        # it is told.
        config.scheduler_config.async_scheduling = asynchronous
        if spec:
            config.speculative_config = Speculation(spec)
        layer = FullAttentionSpec(
            block_size=BLOCK, num_kv_heads=1, head_size=1, dtype=config.model_config.dtype
        )
        pool = KVCacheConfig(blocks, [], [KVCacheGroupSpec(["layer"], layer)])
        config.cache_config.num_gpu_blocks = blocks
        scheduler = config.scheduler_config.get_scheduler_cls()(
            vllm_config=config,
            kv_cache_config=pool,
            structured_output_manager=StructuredOutputManager(config),
            block_size=BLOCK,
        )
        scheduler.use_v2_model_runner = v2
        assert isinstance(scheduler, AsyncScheduler) is asynchronous
        assert scheduler.liveserve is not None
        return Engine(scheduler, v2)

    return engine


def hold(runtime: Any, name: str) -> Any:
    """Let every plan hold ``name``. Returns the method that makes the plans otherwise."""
    planned = runtime.plan

    def plan() -> Any:
        made = planned()
        runtime.held = frozenset([name])
        return made._replace(held=runtime.held)

    runtime.plan = plan
    return planned


@pytest.mark.parametrize(("asynchronous", "v2"), KINDS, ids=IDS)
@pytest.mark.parametrize("blocks", [100, 20], ids=["roomy", "preempting"])
def test_tokens_are_the_same_whatever_a_plan_says(make, asynchronous, v2, blocks):
    engine = make(asynchronous, v2, blocks=blocks)
    held = tiny_text.shuffle_plans(engine.scheduler)
    for index, length in enumerate(LENGTHS):
        engine.add(str(index), tiny_text.prompt(index, length), 60)
    preemptions = {}
    requests = dict(engine.scheduler.requests)
    engine.run_out()
    preemptions = sum(request.num_preemptions for request in requests.values())
    for index, length in enumerate(LENGTHS):
        assert engine.tokens[str(index)] == expected(tiny_text.prompt(index, length), 60)
    assert sum(held) > 50
    assert (preemptions > 0) is (blocks == 20)
    pool = engine.scheduler.kv_cache_manager.block_pool
    assert pool.get_num_free_blocks() == blocks - 1
    assert engine.scheduler.liveserve.errors == 0


@pytest.mark.parametrize(("asynchronous", "v2"), KINDS, ids=IDS)
def test_a_held_request_gets_nothing_and_keeps_its_place(make, asynchronous, v2):
    engine = make(asynchronous, v2)
    for name in "ab":
        engine.add(name, tiny_text.prompt(ord(name), 20), 40)
    for _ in range(6):
        engine.step()
    runtime = engine.scheduler.liveserve
    planned = hold(runtime, "a")
    for _ in range(10):
        assert set(engine.step().num_scheduled_tokens) == {"b"}
    assert "a" in [request.request_id for request in engine.scheduler.running]
    runtime.plan = planned
    assert "a" in engine.step().num_scheduled_tokens
    engine.run_out()
    for name in "ab":
        assert engine.tokens[name] == expected(tiny_text.prompt(ord(name), 20), 40)


@pytest.mark.parametrize(("asynchronous", "v2"), KINDS, ids=IDS)
def test_no_step_is_kept_waiting_by_a_doze(make, asynchronous, v2):
    """An engine dozes only when all is held and no output is on its way."""
    engine = make(asynchronous, v2)
    runtime, dozes = engine.scheduler.liveserve, []

    def doze(only_held: bool) -> None:
        steps = [output.total_num_scheduled_tokens for output, _ in engine.under_way]
        dozes.append((only_held, any(steps)))

    runtime.doze = doze
    engine.add("a", tiny_text.prompt(1, 20), 40)
    for _ in range(5):
        engine.step()
    hold(runtime, "a")
    for _ in range(6):
        assert not engine.step().num_scheduled_tokens
    assert dozes
    assert all(dozed == (True, False) for dozed in dozes)
    engine.add("waits", tiny_text.prompt(2, 20), 4).status = RequestStatus.WAITING_FOR_STREAMING_REQ
    dozes.clear()
    engine.step()
    assert [only_held for only_held, _ in dozes] == [False]  # it comes when it comes


@pytest.mark.parametrize(("asynchronous", "v2"), KINDS, ids=IDS)
def test_aborts_while_steps_are_under_way(make, asynchronous, v2):
    engine = make(asynchronous, v2)
    tiny_text.shuffle_plans(engine.scheduler)
    for index, length in enumerate(LENGTHS):
        engine.add(str(index), tiny_text.prompt(index, length), 40)
    for index in range(5):
        for _ in range(index + 1):
            engine.step()
        engine.scheduler.finish_requests(str(index), RequestStatus.FINISHED_ABORTED)
    engine.run_out()
    assert engine.tokens["5"] == expected(tiny_text.prompt(5, LENGTHS[5]), 40)
    for index in range(5):
        made = engine.tokens.get(str(index), [])
        assert made == expected(tiny_text.prompt(index, LENGTHS[index]), 40)[: len(made)]
    pool = engine.scheduler.kv_cache_manager.block_pool
    assert pool.get_num_free_blocks() == 99
    engine.scheduler.liveserve.round()
    assert not engine.scheduler.liveserve.ranks


class Speculation:
    """The parts of a speculative config that a scheduler reads."""

    method = "draft_model"
    max_num_new_slots_for_drafting = 0

    def __init__(self, tokens: int) -> None:
        self.num_speculative_tokens = tokens

    def __getattr__(self, name: str) -> Any:
        return (lambda: False) if name.startswith(("use", "uses")) else None


@pytest.mark.parametrize("v2", [False, True], ids=["v1", "v2"])
def test_drafts_outlive_a_hold(make, v2):
    """Synchronously drafts stay with the request until it is scheduled."""
    engine = make(False, v2, spec=2)
    held = tiny_text.shuffle_plans(engine.scheduler)
    steps = engine.scheduler.current_step
    for index, length in enumerate(LENGTHS):
        engine.add(str(index), tiny_text.prompt(index, length), 60)
    engine.run_out()
    for index, length in enumerate(LENGTHS):
        assert engine.tokens[str(index)] == expected(tiny_text.prompt(index, length), 60)
    assert sum(held) > 30
    # Two tokens a step: fewer steps than tokens, in spite of the holds.
    assert engine.scheduler.current_step - steps < 120


def test_drafts_that_only_a_worker_knows_are_not_held(make, caplog):
    """Asynchronously a request's drafts stay in the worker for one step: a hold would lose them."""
    with caplog.at_level(logging.INFO, "vllm.liveserve"):
        engine = make(True, False, spec=2)
    assert sum("speculative" in record.getMessage() for record in caplog.records) == 1
    runtime = engine.scheduler.liveserve
    assert runtime.policy.order
    assert not runtime.policy.pace
    runtime.flip(Switches(pace=False))
    runtime.flip(Switches())
    assert not runtime.policy.pace
    assert make(False, False, spec=2).scheduler.liveserve.policy.pace
