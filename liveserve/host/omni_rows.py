"""Seam: companion rows of an omni stage's blocks, between the host's mirror and the DRAM tier.

With prefix caching on, vLLM-Omni mirrors what a stage hands on per token (hidden states) in host
memory, one row per slot of the KV cache (`OmniPrefixCacheManager` in vllm_omni/core/prefix_cache).
A hit on a block reads its rows there; a block that comes back from another tier must bring them.

* Saving reads rows that the mirror has committed; rows on their way there are waited for, rows that
  it does not have are refused.
* Restoring is a write like the host's own: a `WriteTask` through its committer, which stays the
  only writer of the mirror. So older writes on their way to the same rows lose, delayed readers of
  the block's previous owner keep what they were promised, and the rows end up committed by the
  host's own code.

The connector is made before the mirror exists: it is built in the first step, and noted then.
"""

from __future__ import annotations

import functools
import logging
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from liveserve.host import versions
from liveserve.host.seam import SeamError, expect
from liveserve.kvtier.rows import RowsError, RowStore

logger = logging.getLogger("vllm.liveserve")

WAIT_S = 0.1
# What the host's committer takes at most for what it copies.
_S_PER_BYTE = 1e-9
_MARK = "_liveserve_noted"
# Runners of this process whose mirror was built. One, unless tests build more.
_runners: weakref.WeakSet[Any] = weakref.WeakSet()


def expected_bytes_per_block(vllm_config: Any) -> int:
    """Bytes of a block's rows as far as the model's configuration tells; 0: a stage without.

    For the size of the pool, which is allocated before the first row is seen.
    """
    if not has_rows(vllm_config):
        return 0
    model = vllm_config.model_config
    row = model.get_hidden_size() * model.dtype.itemsize
    return vllm_config.cache_config.block_size * row * (1 + len(_captured_layers(model)))


def has_rows(vllm_config: Any) -> bool:
    """Whether this engine is an omni stage with prefix caching, whose blocks have rows.

    Raises:
        SeamError: it cannot be told.
    """
    if versions.installed("vllm-omni") is None:
        return False
    try:
        from vllm_omni.config.model import OmniModelConfig
    except ImportError as exc:
        raise SeamError(str(exc)) from None
    if not isinstance(vllm_config.model_config, OmniModelConfig):
        return False
    return bool(vllm_config.cache_config.enable_prefix_caching)


def companion(
    vllm_config: Any,
    *,
    num_slots: int,
    checksums: bool = False,
) -> OmniRows | None:
    """The rows of the stage that this worker process runs; None: its blocks have none.

    To be called once, before the first step.

    Args:
        vllm_config: the stage's.
        num_slots: slots of the DRAM pool.
        checksums: check rows when they come back.

    Raises:
        SeamError: the stage has rows but the host does not look as expected: no tier here.
    """
    if not has_rows(vllm_config) or not _last_pipeline_rank():
        return None
    note_mirrors()
    store = RowStore(
        num_slots,
        vllm_config.cache_config.block_size,
        max_bytes=num_slots * expected_bytes_per_block(vllm_config),
        checksums=checksums,
    )
    return OmniRows(store, functools.partial(_mirror_of, vllm_config))


def note_mirrors() -> None:
    """Have every mirror that is built in this process noted. Idempotent.

    Raises:
        SeamError: the host's classes are not as expected.
    """
    try:
        _note_mirrors()
    except (ImportError, AttributeError) as exc:
        raise SeamError(str(exc)) from None


def _note_mirrors() -> None:
    from vllm_omni.core.prefix_cache import controller, interface, manager, runner_mixin
    from vllm_omni.core.prefix_cache.block_pool import PrefixBlockPool

    mixin = runner_mixin.PrefixCacheRunnerMixin
    build: Any = getattr(mixin, "_ensure_omni_prefix_cache", None)
    expect(callable(build), "PrefixCacheRunnerMixin._ensure_omni_prefix_cache")
    if hasattr(build, _MARK):
        return
    expect(hasattr(mixin, "omni_prefix_cache"), "PrefixCacheRunnerMixin.omni_prefix_cache")
    for owner, names in (
        (manager.OmniPrefixCacheManager, ("_commit_drained_writes", "_map_slots")),
        (controller.OmniPrefixCacheController, ("register", "dispatch", "escalate", "get_task")),
        (PrefixBlockPool, ("rows", "keys", "has_key")),
        (controller.WriteTask, ("mark_host_ready", "scatter_rows")),
        (manager._RequestTaskTable, ("alloc_tid",)),
        (manager._SlotStatusTable, ("get_slot_status",)),
        (interface.ModelCachePolicy, ("get_hit_keys",)),
    ):
        for name in names:
            expect(callable(getattr(owner, name, None)), f"{owner.__name__}.{name}")
    expect(
        {state.name: state.value for state in manager._Occupancy}
        == {"ABSENT": 0, "IN_TRANSIT": 1, "COMMITTED": 2},
        "the three states of a row (_Occupancy)",
    )
    fields = {"tid", "req_id", "write_n", "schedule", "chunks", "done", "state"}
    expect(fields <= set(controller.WriteTask.__dataclass_fields__), "fields of WriteTask")
    fields = {"slots_cpu", "tensors", "host"}
    expect(fields <= set(controller._WriteChunk.__dataclass_fields__), "fields of _WriteChunk")

    @functools.wraps(build)
    def noted(self: Any) -> None:
        build(self)
        if self.omni_prefix_cache is not None:
            _runners.add(self)

    setattr(noted, _MARK, True)
    mixin._ensure_omni_prefix_cache = noted


class OmniRows:
    """`liveserve.kvtier.rows.Companion` of one omni stage.

    For one thread at a time, which need not be the one that runs the model. The host's lock covers
    its tables only, as in the host.

    Args:
        store: where rows are kept.
        mirror: finds the stage's `OmniPrefixCacheManager`; None: not built yet.
        wait_s: bound of every wait, beside the time that copies take.
    """

    def __init__(
        self,
        store: RowStore,
        mirror: Callable[[], Any],
        *,
        wait_s: float = WAIT_S,
    ) -> None:
        self.store = store
        self._find = mirror
        self._wait_s = wait_s
        self._manager: Any = None
        self._broken = ""

    def save(self, block_ids: Sequence[int], slot_ids: Sequence[int]) -> None:
        """See `Companion.save`. Rows under way to the mirror are waited for, up to ``wait_s``."""
        manager = self._mirror()
        rows = self._rows_of(manager, block_ids, slot_ids)
        deadline_s = time.monotonic() + self._wait_s
        with manager._state_lock:
            self._drain(manager)
            keys = self._keys(manager)
            under_way = self._under_way(manager, keys, rows)
        if under_way:
            # The host's own way to force writes that wait for their request to finish.
            manager._controller.escalate(list(under_way))
            for task in under_way.values():
                self._wait(task, deadline_s)
        with manager._state_lock:
            self._drain(manager)
            if self._under_way(manager, keys, rows):
                raise RowsError("rows are being written again while they are saved")
            written = self._versions(manager, keys, rows)
        values = {key: manager._pool.rows(key, rows) for key in keys}
        with manager._state_lock:
            if not torch.equal(written, self._versions(manager, keys, rows)):
                raise RowsError("a block got new rows while they were saved")
        self.store.put(slot_ids, values)

    @torch.inference_mode()
    def restore(self, slot_ids: Sequence[int], block_ids: Sequence[int]) -> None:
        """See `Companion.restore`. Mirrors `OmniPrefixCacheManager._submit_step_writes`."""
        from vllm_omni.core.prefix_cache.controller import WriteTask, _WriteChunk
        from vllm_omni.core.prefix_cache.interface import WriteSchedule

        manager = self._mirror()
        rows = self._rows_of(manager, block_ids, slot_ids)
        values = self.store.take(slot_ids)
        with manager._state_lock:
            self._drain(manager)
            self._check_shapes(manager, values)
            tid = manager._request_tasks.alloc_tid()
            task = WriteTask(
                tid=tid,
                req_id="liveserve",  # belongs to no request: none ends it
                write_n=1,
                schedule=WriteSchedule.JOIN_NEXT_STEP,  # the rows are on the host already
                chunks=[_WriteChunk(slots_cpu=rows, tensors={}, host=values)],
            )
            manager._map_slots(rows, tid, values)
            manager._controller.register(task)
        manager._controller.dispatch([task])
        num_bytes = sum(value.nbytes for value in values.values())
        self._wait(task, time.monotonic() + self._wait_s + _S_PER_BYTE * num_bytes)
        with manager._state_lock:
            self._drain(manager)
            if self._under_way(manager, list(values), rows):
                raise RowsError("a block got new rows while they were restored")

    def _mirror(self) -> Any:
        """The stage's manager, found and checked at the first use."""
        if self._manager is not None:
            return self._manager
        if self._broken:
            raise RowsError(self._broken)
        try:
            manager = self._find()
            if manager is None:
                raise RowsError("the stage has not run a step yet: no block has rows")
            for name in ("_state_lock", "_slot_status", "_request_tasks", "_controller", "_pool"):
                expect(hasattr(manager, name), f"OmniPrefixCacheManager.{name}")
            expect(
                manager._config.block_size == self.store.block_size,
                f"blocks of {self.store.block_size} tokens, not {manager._config.block_size}",
            )
        except SeamError as exc:
            self._broken = f"no rows are kept: the host is not as expected ({exc})"
            logger.warning("LiveServe: the KV tier of this stage is off, %s.", self._broken)
            raise RowsError(self._broken) from None
        self._manager = manager
        return manager

    def _rows_of(
        self, manager: Any, block_ids: Sequence[int], slot_ids: Sequence[int]
    ) -> torch.Tensor:
        """Rows of the mirror, block by block: int64 ``[len(block_ids) * block_size]``."""
        if len(block_ids) != len(slot_ids):
            raise RowsError(f"{len(block_ids)} blocks but {len(slot_ids)} slots")
        num_blocks = manager._config.num_blocks
        if len(set(block_ids)) != len(block_ids) or not all(
            0 <= block < num_blocks for block in block_ids
        ):
            raise RowsError(
                f"blocks must be named once each, of 0..{num_blocks - 1}: {list(block_ids)[:8]}"
            )
        size = self.store.block_size
        starts = torch.tensor(block_ids, dtype=torch.int64) * size
        return (starts[:, None] + torch.arange(size)).flatten()

    def _drain(self, manager: Any) -> None:
        """Count finished writes as committed. The host's lock is held."""
        from vllm_omni.core.prefix_cache.interface import OmniPrefixCacheUnmatchError

        try:
            manager._commit_drained_writes()
        except OmniPrefixCacheUnmatchError as exc:  # the host ends its engine at its next step
            raise RowsError(f"the host's mirror failed: {exc}") from exc

    def _keys(self, manager: Any) -> list[str]:
        """What a hit on a block would read. The host's lock is held."""
        keys = manager._policy.get_hit_keys(manager._pool.keys())
        missing = [key for key in keys if not manager._pool.has_key(key)]
        if missing or not keys:
            raise RowsError(f"the stage has no rows yet ({', '.join(missing) or 'no key'})")
        return keys

    def _under_way(self, manager: Any, keys: Iterable[str], rows: torch.Tensor) -> dict[int, Any]:
        """Writes that own some of the rows, by id. The host's lock is held.

        Raises:
            RowsError: a row is absent, or its write is lost.
        """
        from vllm_omni.core.prefix_cache.manager import _Occupancy

        tasks: dict[int, Any] = {}
        for key in keys:
            status = manager._slot_status.get_slot_status(key)
            states = status.state[rows]
            absent = int((states == _Occupancy.ABSENT).sum())
            if absent:
                raise RowsError(f"{absent} of {rows.numel()} rows of {key} are absent")
            for tid in set(status.tids[rows[states == _Occupancy.IN_TRANSIT]].tolist()):
                tasks[tid] = manager._controller.get_task(tid)
        if None in tasks.values():
            raise RowsError("rows are marked as being written and nobody writes them")
        return tasks

    def _wait(self, task: Any, deadline_s: float) -> None:
        from vllm_omni.core.prefix_cache.controller import TaskState

        if not task.done.wait(max(0.0, deadline_s - time.monotonic())):
            raise RowsError(f"rows were not written within {self._wait_s:g} s")
        if task.state is TaskState.FAILED:
            raise RowsError("the host failed to write rows")

    def _versions(self, manager: Any, keys: Iterable[str], rows: torch.Tensor) -> torch.Tensor:
        """How often each row was claimed, int64 ``[keys, rows]``. The host's lock is held."""
        table = manager._slot_status
        return torch.stack([table.get_slot_status(key).slot_version[rows] for key in keys])

    def _check_shapes(self, manager: Any, values: dict[str, torch.Tensor]) -> None:
        """Rows must be all that a hit reads, as it reads them. The host's lock is held.

        Checked here because a write that fails in the committer ends the host's engine.
        """
        keys = self._keys(manager)
        if set(keys) != set(values):
            raise RowsError(f"rows of {sorted(values)} were stored, a hit needs {sorted(keys)}")
        none = torch.empty(0, dtype=torch.int64)
        for key, value in values.items():
            there = manager._pool.rows(key, none)
            if (there.dtype, there.shape[-1]) != (value.dtype, value.shape[-1]):
                raise RowsError(f"rows of {key} are {there.dtype} x {there.shape[-1]} by now")


def _mirror_of(vllm_config: Any) -> Any:
    """The manager of the runner that was built with ``vllm_config``; None: none yet.

    Raises:
        SeamError: several runners could be meant.
    """
    runners = [runner for runner in _runners if runner.omni_prefix_cache is not None]
    same = [runner for runner in runners if runner.vllm_config is vllm_config] or runners
    expect(len(same) <= 1, f"one mirror in this process, not {len(same)}")
    return same[0].omni_prefix_cache if same else None


def _last_pipeline_rank() -> bool:
    """Whether this worker has rows: the host mirrors them on the last rank alone."""
    from vllm.distributed.parallel_state import get_pp_group

    return bool(get_pp_group().is_last_rank)


def _captured_layers(model_config: Any) -> set[int]:
    """Mirrors ``_thinker_capture_layer_indices`` of Qwen3-Omni."""
    talker = getattr(model_config.hf_config, "talker_config", None)
    layer = getattr(talker, "accept_hidden_layer", None)
    if model_config.model_stage != "thinker" or layer is None:
        return set()
    return {0, int(layer)}
