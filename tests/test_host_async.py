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
from collections.abc import Collection, Sequence
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
            if drafts and drafts[0] < 0:  # asynchronously only a worker knows them, for one step
                assert name in self._last, f"{name}: its drafts are lost"
                drafts, end = self.drafts[name], len(tokens)
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


def expected(ids: list[int], count: int, stops: Collection[int] = ()) -> list[int]:
    tokens = list(ids)
    for _ in range(count):
        tokens.append(next_token(tokens))
        if tokens[-1] in stops:
            break
    return tokens[len(ids) :]


class Engine:
    """A scheduler and its worker, with as many steps under way as the host would have."""

    def __init__(self, scheduler: Any, v2: bool) -> None:
        self.scheduler, self.worker = scheduler, Worker(v2)
        self.depth = 2 if isinstance(scheduler, AsyncScheduler) else 1
        self.under_way: deque[tuple[Any, ModelRunnerOutput]] = deque()
        self.tokens: dict[str, list[int]] = {}

    def add(self, name: str, ids: list[int], count: int, stops: Collection[int] = ()) -> Request:
        sampling = SamplingParams(
            temperature=0, max_tokens=count, ignore_eos=True, stop_token_ids=list(stops)
        )
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
        if self.scheduler.num_spec_tokens and self.depth == 1:
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
    """Makes an engine with our scheduler, plain vLLM's or another by its name."""
    init_none_hash(sha256)
    monkeypatch.setenv("LIVESERVE", "on")
    monkeypatch.setenv("LIVESERVE_CONFIG", json.dumps({"stages": {"llm": {"pace": True}}}))

    def engine(
        asynchronous: bool,
        v2: bool,
        *,
        blocks: int = 100,
        spec: int = 0,
        scheduler_cls: str = tiny_text.OURS,
    ) -> Engine:
        config = EngineArgs(
            model=str(folder),
            skip_tokenizer_init=True,
            dtype="float32",
            max_model_len=256,
            max_num_seqs=4,
            max_num_batched_tokens=128,
            block_size=BLOCK,
            scheduler_cls=scheduler_cls,
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


# ---- KV reserved ahead: vLLM-Omni's autoregressive scheduler -----------------------------------

OMNI = "liveserve.host.ar.LiveARScheduler"
# 16 blocks hold the longest context; the six requests may come to take 47.
POOL = 17
# Answers end early; asynchronously one step is under way by then.
STOPS = range(0, tiny_text.VOCABULARY, 50)


class Crowd:
    """All requests at once in a pool for a third of them.

    Attributes:
        gated: steps in which some could not grow.
        most: requests in one step, at most.
        promised: free blocks that those in the pool were likely to take, step by step.
    """

    def __init__(
        self, engine: Engine, stops: Collection[int] = (), lengths: Sequence[int] = LENGTHS
    ) -> None:
        self.engine, self.stops, self.lengths = engine, stops, lengths
        self.gated = self.most = 0
        self.promised: list[int] = []
        self.requests = [
            engine.add(str(index), tiny_text.prompt(index, length), 60, stops)
            for index, length in enumerate(lengths)
        ]

    def run_out(self, *, aborts: int = 0) -> None:
        """Until all are done. ``aborts``: so many running requests are aborted on the way."""
        for step in range(5000):
            scheduler = self.engine.scheduler
            if not (scheduler.has_requests() or self.engine.under_way):
                return
            output = self.engine.step()
            self.promised.append(scheduler.liveserve.promised_blocks)
            self.gated += bool(scheduler._liveserve_gated)
            self.most = max(self.most, len(output.num_scheduled_tokens) if output else 0)
            if aborts and step % 10 == 9 and scheduler.running:
                aborts -= 1
                name = scheduler.running[0].request_id
                scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)
        raise AssertionError("requests never end")

    @property
    def preemptions(self) -> int:
        return sum(request.num_preemptions for request in self.requests)

    def check(self) -> None:
        """All that was asked for came, and no block is missing."""
        for index, length in enumerate(self.lengths):
            answer = expected(tiny_text.prompt(index, length), 60, self.stops)
            made = self.engine.tokens.get(str(index), [])
            aborted = self.requests[index].status is RequestStatus.FINISHED_ABORTED
            assert made == (answer[: len(made)] if aborted else answer)
        pool = self.engine.scheduler.kv_cache_manager.block_pool
        assert pool.get_num_free_blocks() == POOL - 1
        assert self.engine.scheduler.liveserve.errors == 0


@pytest.mark.parametrize(("asynchronous", "v2"), KINDS, ids=IDS)
@pytest.mark.parametrize("stops", [(), STOPS], ids=["full", "stopping"])
@pytest.mark.parametrize("share", [1.0, 0.0], ids=["worst-case", "wrong-guess"])
def test_reserved_nobody_is_preempted(make, asynchronous, v2, stops, share):
    engine = make(asynchronous, v2, blocks=POOL, scheduler_cls=OMNI)
    held = tiny_text.shuffle_plans(engine.scheduler)
    engine.scheduler._liveserve_accounts.lengths.share = share
    crowd = Crowd(engine, stops)
    crowd.run_out()
    crowd.check()
    assert crowd.preemptions == 0
    assert sum(held) > 50
    # KV that is kept for somebody is pressure until it is used; a guess of nothing keeps none.
    assert (crowd.promised[1] > 3) is (share == 1.0)
    assert crowd.promised[-1] == 0
    # A guess that all will be short lets in as many as may run, and then some cannot grow.
    assert crowd.most == (4 if share == 0.0 else 2)
    assert (crowd.gated > 0) is (share == 0.0 and not stops)


@pytest.mark.parametrize(("asynchronous", "v2"), KINDS, ids=IDS)
def test_reserved_blocks_come_back_from_aborts(make, asynchronous, v2):
    engine = make(asynchronous, v2, blocks=POOL, scheduler_cls=OMNI)
    engine.scheduler._liveserve_accounts.lengths.share = 0.0
    crowd = Crowd(engine)
    crowd.run_out(aborts=3)
    statuses = [request.status for request in crowd.requests]
    assert statuses.count(RequestStatus.FINISHED_ABORTED) == 3
    assert statuses.count(RequestStatus.FINISHED_LENGTH_CAPPED) == 3
    crowd.check()
    assert crowd.preemptions == 0


def test_reserved_drafts_count_and_are_never_held(make):
    """A step may end behind the last token by the drafts of two, here in a block of its own."""
    engine = make(True, False, blocks=POOL, spec=2, scheduler_cls=OMNI)
    engine.scheduler._liveserve_accounts.lengths.share = 0.0
    crowd = Crowd(engine, lengths=(36, 100, 4, 68, 116, 52))
    crowd.run_out()
    crowd.check()
    assert crowd.preemptions == 0
    assert crowd.gated == 0
    assert crowd.most > 1


@pytest.mark.parametrize(("asynchronous", "v2"), KINDS, ids=IDS)
def test_not_reserved_the_host_preempts(make, asynchronous, v2):
    engine = make(asynchronous, v2, blocks=POOL, scheduler_cls=OMNI)
    engine.scheduler.liveserve.flip(Switches(reserve=False))
    crowd = Crowd(engine)
    crowd.run_out()
    crowd.check()
    assert crowd.preemptions > 0


class Chunks:
    """The host's chunk adapter on a stage that receives and has all of it: counts its rounds."""

    receives_chunks = True
    model_mode = "ar"
    _pending_load_reqs = replaced_streaming_prompt_ids = ()

    def __init__(self) -> None:
        self.rounds = 0

    def process_pending_chunks(self, *queues: Any, scheduler_requests: Any) -> None:
        self.rounds += 1

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: {}  # of all other calls: nothing has happened


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_inputs_are_looked_for_ahead_only_synchronously(make, asynchronous):
    engine = make(asynchronous, False, blocks=POOL, scheduler_cls=OMNI)
    engine.scheduler.chunk_transfer_adapter = adapter = Chunks()
    assert engine.scheduler.liveserve.switches.lookahead
    engine.add("a", tiny_text.prompt(1, 20), 40)
    engine.step()
    assert adapter.rounds == (1 if asynchronous else 2)
    engine.run_out()
    assert engine.tokens["a"] == expected(tiny_text.prompt(1, 20), 40)
