"""Companion rows of omni stages: against the host's mirror in process, and in a real pipeline."""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
import threading
import types
from collections import defaultdict
from pathlib import Path

import pytest
import torch
from vllm_omni.core.prefix_cache import (
    HIDDEN_KEY,
    ModelCachePolicy,
    OmniPrefixCacheManager,
    OmniPrefixCacheUnmatchError,
    PrefixCacheConfig,
    manager,
)
from vllm_omni.core.prefix_cache.manager import _Occupancy
from vllm_omni.core.prefix_cache.runner_mixin import PrefixCacheRunnerMixin

from liveserve.bench.demo import ensure_tiny_model
from liveserve.bench.launch import running_server
from liveserve.host import omni_rows
from liveserve.host.cpu.record import RECORD_ENV
from liveserve.host.omni_rows import OmniRows
from liveserve.host.seam import SeamError
from liveserve.kvtier.rows import RowsError, RowStore

BLOCK, BLOCKS, HIDDEN, LAYER, WIDTH = 4, 12, HIDDEN_KEY, "hidden_states.layer_2", 6
DEFERRED = "codes.audio"


class View:
    """What a `FullAttentionGroupView` tells of a batch: the blocks of each request."""

    block_size = BLOCK

    def __init__(self) -> None:
        self.blocks: dict[str, list[int]] = {}
        self.computed: dict[str, int] = {}

    def batch_req_ids(self) -> list[str]:
        return list(self.blocks)

    def step_slots_cpu(self, req_ids: list[str], num_scheduled: dict[str, int]) -> torch.Tensor:
        slots = []
        for name in req_ids:
            for at in range(self.computed[name], self.computed[name] + num_scheduled[name]):
                slots.append(self.blocks[name][at // BLOCK] * BLOCK + at % BLOCK)
        return torch.tensor(slots, dtype=torch.int64)


class Stage:
    """A stage without a model: the mirror sees steps as from the model runner.

    Row t of the request with ``seed`` is a function of both, so that a recompute gives the same.
    """

    def __init__(self, *, deferred: bool = False, slots: int = 8, wait_s: float = 0.1) -> None:
        self.view = View()
        self.mirror = OmniPrefixCacheManager(PrefixCacheConfig(BLOCKS, BLOCK), self.view)
        self.deferred = deferred
        self.mirror.register_policy(
            ModelCachePolicy(deferred_keys=frozenset([DEFERRED] if deferred else []))
        )
        self.keys = [HIDDEN, LAYER, *([DEFERRED] if deferred else [])]
        self.finished: set[str] = set()
        self.seeds: dict[str, int] = {}
        self.rows = OmniRows(
            RowStore(slots, BLOCK, checksums=True), lambda: self.mirror, wait_s=wait_s
        )

    def values(self, seed: int, start: int, end: int, key: str) -> torch.Tensor:
        at = torch.arange(start, end, dtype=torch.float32)[:, None]
        kind = self.keys.index(key)
        return torch.sin(at * 1.3 + torch.arange(WIDTH + kind) * 0.7 + seed * 17.0 + kind * 5.0)

    def step(self, new: dict[str, tuple[int, list[int], int]], more: dict[str, int]) -> dict:
        """One step. ``new``: request → (seed, blocks, tokens hit); ``more``: tokens computed.

        Returns per request and key what the stage hands on: hit rows and this step's.
        """
        scheduled = [
            types.SimpleNamespace(req_id=name, num_computed_tokens=hit, block_ids=(blocks,))
            for name, (_, blocks, hit) in new.items()
        ]
        self.mirror.new_step_starts(
            types.SimpleNamespace(
                finished_req_ids=self.finished,
                scheduled_new_reqs=scheduled,
                num_scheduled_tokens=more,
            )
        )
        for name in self.finished:
            self.view.blocks.pop(name, None)
        self.finished = set()
        for name, (seed, blocks, hit) in new.items():
            self.view.blocks[name] = blocks
            self.view.computed[name] = hit
            self.seeds[name] = seed
        # requests that do not run in this step leave the batch
        parked = {name: self.view.blocks.pop(name) for name in set(self.view.blocks) - set(more)}
        outputs = {
            key: torch.cat([
                self.values(
                    self.seeds[name],
                    self.view.computed[name],
                    self.view.computed[name] + more[name],
                    key,
                )
                for name in self.view.blocks
            ])
            for key in self.keys
        }  # fmt: skip
        tokens = sum(more.values())
        hidden = outputs.pop(HIDDEN)
        step = self.mirror.save_outputs(
            hidden, outputs, num_tokens_unpadded=tokens, num_tokens_padded=tokens
        )
        for name, count in more.items():
            self.view.computed[name] += count
        got = self.mirror.materialize(step, list(self.view.blocks))
        self.view.blocks.update(parked)
        merged = {HIDDEN: got.hidden_states, **got.mm_outputs}
        return {name: {key: merged[key][name] for key in self.keys} for name in more}

    def finish(self, name: str) -> None:
        self.finished.add(name)

    def slots(self, blocks: list[int]) -> torch.Tensor:
        return torch.cat([torch.arange(block * BLOCK, (block + 1) * BLOCK) for block in blocks])

    def states(self, blocks: list[int], key: str = HIDDEN) -> set[int]:
        slots = self.slots(blocks)
        return set(self.mirror._slot_status.get_slot_status(key).state[slots].tolist())

    def assert_hit(self, name: str, seed: int, blocks: list[int], hit: int, more: int) -> None:
        """A request that hits ``hit`` tokens gets, bit for bit, what computing them would give."""
        got = self.step({name: (seed, blocks, hit)}, {name: more})[name]
        for key in self.keys:
            assert torch.equal(got[key], self.values(seed, 0, hit + more, key)), key


def ran(**kwargs) -> Stage:
    """A stage that computed 8 tokens of request a in blocks 1 and 2, and finished it."""
    stage = Stage(**kwargs)
    stage.step({"a": (1, [1, 2, 3], 0)}, {"a": 6})
    stage.step({}, {"a": 2})
    stage.finish("a")
    return stage


@pytest.mark.parametrize("deferred", [False, True])
def test_rows_come_back_in_other_blocks_and_a_hit_reads_them(deferred):
    stage = ran(deferred=deferred)
    stage.rows.save([1, 2], [5, 0])
    # the blocks get another owner, which writes over every row
    stage.step({"b": (2, [1, 2], 0)}, {"b": 8})
    stage.finish("b")
    stage.rows.restore([5, 0], [7, 4])
    for key in stage.keys:
        assert stage.states([7, 4], key) == {_Occupancy.COMMITTED}
    stage.assert_hit("c", 1, [7, 4, 9], 8, 3)
    stage.assert_hit("d", 1, [7, 10], 4, 4)  # only the first block is hit
    # and back over the very blocks
    stage.finish("c")
    stage.rows.restore([0], [2])
    stage.assert_hit("e", 1, [7, 2, 11], 8, 1)


def test_without_the_rows_the_hit_would_have_been_wrong():
    """The control: what the tests above compare does depend on the restored rows."""
    stage = ran()
    with pytest.raises(OmniPrefixCacheUnmatchError, match="absent"):
        stage.assert_hit("c", 1, [7, 4, 9], 8, 3)
    stage = ran()
    stage.step({"b": (2, [7, 4], 0)}, {"b": 8})
    with pytest.raises(AssertionError):
        stage.assert_hit("c", 1, [7, 4, 9], 8, 3)


def test_occupancy_is_as_after_the_hosts_own_write():
    stage = ran()
    stage.rows.save([1, 2], [0, 1])
    stage.rows.restore([0, 1], [5, 6])
    stage.step({"b": (1, [8, 9], 0)}, {"b": 8})
    stage.rows._drain(stage.mirror)
    ours, hosts = stage.slots([5, 6]), stage.slots([8, 9])
    for key in stage.keys:
        status = stage.mirror._slot_status.get_slot_status(key)
        for table in status:
            assert torch.equal(table[ours], table[hosts])
        assert torch.equal(stage.mirror._pool.rows(key, ours), stage.mirror._pool.rows(key, hosts))
    assert not stage.mirror._slot_status.task_slots
    assert not stage.mirror._controller.in_flight_tasks()


@pytest.mark.parametrize("tokens", [1, 7])
def test_absent_rows_are_refused(tokens):
    stage = Stage()
    with pytest.raises(RowsError, match="has no rows yet"):
        stage.rows.save([1], [0])
    stage.step({"a": (1, [1, 2], 0)}, {"a": tokens})
    with pytest.raises(RowsError, match=f"{8 - tokens} of 8 rows of .* are absent"):
        stage.rows.save([1, 2], [0, 1])
    assert not stage.rows.store.holds(0)
    with pytest.raises(RowsError, match="slot 0 holds no rows"):
        stage.rows.restore([0], [5])
    assert stage.states([5]) == {_Occupancy.ABSENT}


def test_deferred_rows_of_a_running_request_are_forced():
    stage = Stage(deferred=True)
    stage.step({"a": (1, [1, 2, 3], 0)}, {"a": 8})
    assert stage.states([1], DEFERRED) == {_Occupancy.IN_TRANSIT}
    stage.rows.save([1, 2], [0, 1])
    assert stage.states([1], DEFERRED) == {_Occupancy.COMMITTED}
    stage.step({}, {"a": 4})  # the request goes on, with a write of its own
    stage.finish("a")
    stage.step({"b": (2, [9], 0)}, {"b": 1})
    stage.rows.save([3], [2])
    stage.rows.restore([0, 1, 2], [4, 5, 6])
    stage.assert_hit("c", 1, [4, 5, 6, 7], 12, 2)


def threaded(stage: Stage) -> threading.Event:
    """Run the host's committer in its thread, as with a GPU; it writes when the event is set."""
    controller = stage.mirror._controller
    gate = threading.Event()
    write = stage.mirror._pool.write

    def gated(*args) -> None:
        gate.wait(10)
        write(*args)

    stage.mirror._pool.write = gated
    controller._eager = False  # staging buffers exist: nothing is pinned any more
    controller._worker = threading.Thread(target=controller._worker_loop, daemon=True)
    controller._worker.start()
    return gate


def test_rows_under_way_are_waited_for():
    stage = ran(wait_s=5.0)
    gate = threaded(stage)
    stage.step({"b": (3, [5, 6], 0)}, {"b": 8})
    assert stage.states([5]) == {_Occupancy.IN_TRANSIT}
    threading.Timer(0.1, gate.set).start()
    stage.rows.save([5, 6], [0, 1])
    stage.rows.restore([0, 1], [7, 8])
    stage.assert_hit("c", 3, [7, 8, 9], 8, 1)
    stage.mirror.shutdown()


def test_nobody_waits_long():
    stage = ran(wait_s=0.05)
    stage.rows.save([1, 2], [0, 1])
    gate = threaded(stage)
    stage.step({"b": (3, [5, 6], 0)}, {"b": 8})
    with pytest.raises(RowsError, match=r"not written within 0\.05 s"):
        stage.rows.save([5, 6], [2, 3])
    assert not stage.rows.store.holds(2)
    with pytest.raises(RowsError, match=r"not written within 0\.05 s"):
        stage.rows.restore([0, 1], [7, 8])
    # the late write of the restore that failed does not reach the block's next owner
    stage.rows._wait_s = 10.0
    gate.set()
    stage.step({"c": (4, [7, 8, 9], 0)}, {"c": 8})
    stage.finish("c")
    stage.assert_hit("d", 4, [7, 8, 10], 8, 1)
    stage.mirror.shutdown()


def test_a_late_write_of_the_previous_owner_does_not_reach_restored_rows():
    """Deferred rows stay on the device until the request ends: here after the block changed
    hands."""
    stage = Stage(deferred=True)
    stage.step({"a": (1, [1, 2], 0)}, {"a": 8})
    stage.rows.save([1, 2], [0, 1])
    stage.step({"b": (2, [5, 6], 0)}, {"b": 8})
    stage.rows.restore([0, 1], [5, 6])
    stage.finish("b")
    stage.step({"c": (3, [9], 0)}, {"c": 1})  # b's rows are written now
    stage.assert_hit("d", 1, [5, 6, 10], 8, 1)


def test_a_delayed_reader_of_the_previous_owner_keeps_its_rows():
    stage = ran()
    stage.rows.save([1, 2], [0, 1])
    stage.step({"b": (2, [5, 6], 0)}, {"b": 8})
    mirror = stage.mirror
    slots = stage.slots([5, 6])
    with mirror._state_lock:
        mirror._commit_drained_writes()
        planned = mirror._slot_ref(slots, HIDDEN, "reader")
    stage.rows.restore([0, 1], [5, 6])
    assert torch.equal(mirror._fetch_source(planned), stage.values(2, 0, 8, HIDDEN))


def test_a_block_that_is_written_while_it_is_saved_is_refused():
    stage = ran()
    read = stage.mirror._pool.rows

    def slow(key, slots):
        values = read(key, slots)
        if key == LAYER:
            with torch.inference_mode(), stage.mirror._state_lock:
                stage.mirror._map_slots(slots[:1], 99, [LAYER])
        return values

    stage.mirror._pool.rows = slow
    with pytest.raises(RowsError, match="new rows while they were saved"):
        stage.rows.save([1, 2], [0, 1])
    assert not stage.rows.store.holds(0)


def test_a_key_that_the_stage_has_only_since_is_missed():
    """Restoring without it would leave another block's rows in its place."""
    stage = ran()
    stage.rows.save([1, 2], [0, 1])
    stage.keys.append("new")
    stage.step({"b": (2, [5], 0)}, {"b": 4})
    with pytest.raises(RowsError, match=r"a hit needs \['__hidden_states__', .*'new'\]"):
        stage.rows.restore([0, 1], [7, 8])
    assert stage.states([7, 8]) == {_Occupancy.ABSENT}


def test_damaged_rows_are_not_restored():
    stage = ran()
    stage.rows.save([1, 2], [0, 1])
    with torch.inference_mode():
        stage.rows.store._data[LAYER][1, 2, 3] += 1
    with pytest.raises(RowsError, match="slot 1 are not what was stored"):
        stage.rows.restore([0, 1], [7, 8])
    assert stage.states([7, 8]) == {_Occupancy.ABSENT}


@pytest.mark.parametrize(
    ("blocks", "slots", "message"),
    [
        ([1], [0, 1], "1 blocks but 2 slots"),
        ([BLOCKS], [0], "named once"),
        ([1, 1], [0, 1], "once"),
    ],
)
def test_bad_blocks(blocks, slots, message):
    stage = ran()
    stage.rows.save([1, 2], [0, 1])
    for call in (lambda: stage.rows.save(blocks, slots), lambda: stage.rows.restore(slots, blocks)):
        with pytest.raises(RowsError, match=message):
            call()


def test_bytes_of_a_block():
    stage = Stage()
    assert stage.rows.store.bytes_per_slot == 0
    stage.step({"a": (1, [1], 0)}, {"a": 4})
    stage.rows.save([1], [0])
    assert stage.rows.store.bytes_per_slot == BLOCK * 4 * (WIDTH + WIDTH + 1)


# --- the seam


@pytest.fixture
def seam():
    """The host's class as it was, before and after."""
    stock = PrefixCacheRunnerMixin._ensure_omni_prefix_cache
    stock = getattr(stock, "__wrapped__", stock)
    PrefixCacheRunnerMixin._ensure_omni_prefix_cache = stock
    omni_rows._runners.clear()
    yield stock
    PrefixCacheRunnerMixin._ensure_omni_prefix_cache = stock
    omni_rows._runners.clear()


class Runner(PrefixCacheRunnerMixin):
    def __init__(self, vllm_config: object) -> None:
        self.vllm_config = vllm_config


def test_a_mirror_is_found_once_it_was_built(seam, monkeypatch):
    config, other = object(), object()
    runner = Runner(config)
    omni_rows.note_mirrors()
    omni_rows.note_mirrors()
    assert PrefixCacheRunnerMixin._ensure_omni_prefix_cache.__wrapped__ is seam
    assert omni_rows._mirror_of(config) is None
    mirror = object()
    monkeypatch.setattr(
        PrefixCacheRunnerMixin._ensure_omni_prefix_cache.__wrapped__,
        "__code__",
        (lambda self: setattr(self, "omni_prefix_cache", self.built)).__code__,
    )
    runner.built = None
    runner._ensure_omni_prefix_cache()
    assert omni_rows._mirror_of(config) is None  # not the last pipeline rank
    runner.built = mirror
    runner._ensure_omni_prefix_cache()
    assert omni_rows._mirror_of(config) is mirror
    assert omni_rows._mirror_of(other) is mirror  # a copy of the configuration
    second = Runner(other)
    second.built = object()
    second._ensure_omni_prefix_cache()
    assert omni_rows._mirror_of(config) is mirror
    with pytest.raises(SeamError, match="one mirror in this process, not 2"):
        omni_rows._mirror_of(object())


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (OmniPrefixCacheManager, "_map_slots"),
        (OmniPrefixCacheManager, "_commit_drained_writes"),
        (manager, "_Occupancy"),
        (manager, "_RequestTaskTable"),
    ],
)
def test_on_another_host_nothing_is_touched(seam, monkeypatch, owner, name):
    monkeypatch.delattr(owner, name)
    with pytest.raises(SeamError, match=name):
        omni_rows.note_mirrors()
    assert PrefixCacheRunnerMixin._ensure_omni_prefix_cache is seam


def test_a_mirror_of_another_kind_turns_the_rows_off_in_one_line(caplog):
    odd = types.SimpleNamespace(_state_lock=threading.Lock())
    rows = OmniRows(RowStore(4, BLOCK), lambda: odd)
    for _ in range(2):
        with pytest.raises(RowsError, match=r"no rows are kept.*Manager\._slot_st"):
            rows.save([1], [0])
        with pytest.raises(RowsError, match="no rows are kept"):
            rows.restore([0], [1])
    assert len(caplog.records) == 1


def test_another_block_size_turns_the_rows_off():
    stage = ran()
    rows = OmniRows(RowStore(4, 2 * BLOCK), lambda: stage.mirror)
    with pytest.raises(RowsError, match="blocks of 8 tokens, not 4"):
        rows.save([1], [0])


def test_memory_is_bounded_by_what_was_counted(seam, monkeypatch):
    """A pool of n slots was sized for n blocks with the expected rows, not for more."""
    monkeypatch.setattr(omni_rows, "has_rows", lambda config: True)
    monkeypatch.setattr(omni_rows, "_last_pipeline_rank", lambda: True)
    talker = types.SimpleNamespace(accept_hidden_layer=2)
    model = types.SimpleNamespace(
        get_hidden_size=lambda: WIDTH,
        dtype=torch.float32,
        hf_config=types.SimpleNamespace(talker_config=talker),
        model_stage="thinker",
    )
    config = types.SimpleNamespace(
        model_config=model, cache_config=types.SimpleNamespace(block_size=BLOCK)
    )
    assert omni_rows.expected_bytes_per_block(config) == BLOCK * WIDTH * 4 * 3
    rows = omni_rows.companion(config, num_slots=10)
    rows.store.put([0], {"hidden": torch.zeros(BLOCK, 2 * 3 * WIDTH)})  # twice as wide
    assert rows.store.usable_slots == 5
    talker.accept_hidden_layer = None
    assert omni_rows.expected_bytes_per_block(config) == BLOCK * WIDTH * 4


def test_a_text_model_has_no_rows():
    plain = types.SimpleNamespace(
        model_config=types.SimpleNamespace(),
        cache_config=types.SimpleNamespace(enable_prefix_caching=True, block_size=32),
    )
    assert omni_rows.companion(plain, num_slots=4) is None
    assert omni_rows.expected_bytes_per_block(plain) == 0


# --- a real pipeline

MODEL = Path(__file__).resolve().parents[1] / ".cache" / "tiny-model"
LONG = "Tell me a longer story about rivers and the people who live on them, please. " * 6
PROMPTS = (LONG, "Another one: " + LONG, LONG, LONG)
OVERRIDES = {
    "0": {
        "enable_prefix_caching": True,
        "kv_transfer_config": {
            "kv_connector": "RowsMover",
            "kv_connector_module_path": "rows_mover",
            # the host refuses prefix caching together with loads, and these are none of its kind
            "kv_role": "kv_producer",
        },
    }
}


async def ask(url: str, prompts: tuple[str, ...]) -> list[str]:
    import aiohttp

    digests = []
    for prompt in prompts:
        body = {
            "model": "tiny",
            "messages": [{"role": "user", "content": prompt}],
            "modalities": ["text", "audio"],
            "max_tokens": 16,
            "temperature": 0,
        }
        async with aiohttp.ClientSession() as http:
            async with http.post(url + "/v1/chat/completions", json=body) as response:
                assert response.status == 200, await response.text()
                answer = await response.json()
        found = [c["message"]["audio"]["data"] for c in answer["choices"] if c["message"]["audio"]]
        digests.append(hashlib.sha256(found[0].encode()).hexdigest())
    return digests


def read_record(folder: Path, stage: int) -> tuple[list[int], list[list[int]], list[list[str]]]:
    """Per request of a stage: tokens of its first step, sampled ids, digests of input rows."""
    first: dict[str, int] = {}
    ids: dict[str, list[int]] = defaultdict(list)
    rows: dict[str, list[str]] = defaultdict(list)
    for line in (folder / f"stage{stage}.jsonl").read_text().splitlines():
        step = json.loads(line)
        for request, tokens in step.get("tokens", {}).items():
            first.setdefault(request, tokens)
        for request, tokens in step.get("sampled", {}).items():
            ids[request] += tokens
        for request, digests in step.get("rows", {}).items():
            rows[request] += digests
    return list(first.values()), list(ids.values()), list(rows.values())


@pytest.mark.host
def test_talker_rows_after_hits_on_restored_blocks_equal_those_of_a_full_recompute(tmp_path):
    ensure_tiny_model(MODEL)
    record, log = tmp_path / "record", tmp_path / "server.log"
    flags = ["--cpu-mode", "turn", "--seed-codes", "7", "--fast-codes"]
    flags += ["--stage-overrides", json.dumps(OVERRIDES)]
    # chunks that follow the clock are cut elsewhere each time, and samples differ at the cuts
    flags += ["--liveserve-config", json.dumps({"switches": {"chunking": False}})]
    env = {RECORD_ENV: str(record), "PYTHONPATH": str(Path(__file__).parent)}
    with running_server(MODEL, log, flags=flags, env=env) as running:
        audio = asyncio.run(ask(running.url, PROMPTS))
    first, ids, _ = read_record(record, 0)
    _, codec_ids, talker_rows = read_record(record, 1)
    # the first run of a prompt computed all of it, the others hit blocks that were moved
    assert first[0] > 32 * 4
    assert first[2] == first[3] <= 32
    assert len(talker_rows[0]) > 20
    for again in (2, 3):
        assert ids[again] == ids[0]
        assert talker_rows[again] == talker_rows[0]
        assert codec_ids[again] == codec_ids[0]
        assert audio[again] == audio[0]
    assert talker_rows[1] != talker_rows[0]
    moved = re.findall(
        r"rows_mover moved (\d+) blocks, (\d+) bytes of rows each, (\d+) expected, keys (.*)",
        log.read_text(),
    )
    assert len(moved) >= 4
    assert int(moved[0][0]) >= first[0] // 32
    for _, seen, expected, _ in moved:
        assert seen == expected
