"""The ``liveserve`` KV connector of vLLM: `KvManager` in the scheduler, `KvWorker` in the workers.

It never reports tokens of its own: what it loads is published in the GPU's prefix cache, and the
host finds it there (see `liveserve.kvtier.manager`). So for the host it is a producer only, and is
made with ``kv_role="kv_producer"``. That role is also what lets an omni stage keep its prefix cache
(check_prefix_cache_kv_transfer in vllm_omni/core/prefix_cache/group_view.py refuses consumers,
whose tokens it could not tell from its own), and what leaves frees undelayed
(``defer_block_free``): loads are ordered behind all compute by events of our own.

Mirrors vllm/distributed/kv_transfer/kv_connector/v1/base.py. Without the ``liveserve`` scheduler
nothing is known of sessions, and eviction from DRAM is LRU.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.v1.core.kv_cache_utils import FreeKVCacheBlockQueue, make_block_hash_with_group_id
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.request import RequestStatus

from liveserve.config import KvConfig, LiveServeConfig, Switches, from_env
from liveserve.host import kv_flags, omni_rows, versions
from liveserve.host.kv_events import tier_events
from liveserve.host.kv_prefix import prefix_keys
from liveserve.host.seam import SeamError, expect
from liveserve.host.sessions import is_warmup, session_of
from liveserve.host.stages import stage_info
from liveserve.kv_preload import KvPreload, TierLoads
from liveserve.kv_signals import KvStage
from liveserve.kvtier.jobs import Ended, Job, Orders, merge
from liveserve.kvtier.loads import Load
from liveserve.kvtier.manager import KvManager, Limits
from liveserve.kvtier.next_use import NextUse
from liveserve.kvtier.policies import make_policy
from liveserve.kvtier.preload import PreloadLimits
from liveserve.kvtier.transfer_base import Kind
from liveserve.kvtier.worker import KvWorker, compute_so_far, describe, slots_for
from liveserve.runtime import StageRuntime, current_runtime

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

logger = logging.getLogger("vllm.liveserve")

# Omni stages whose history is read again. A talker's prompt is placeholders, alike for everybody.
_OMNI_STAGES = frozenset({"thinker"})
# Share of the GPU's blocks that stores may keep from being evicted.
_HELD_SHARE = 0.75
# How many free blocks a look ahead walks over.
_MAX_WALK = 1024
# How long an engine that has nothing else to do waits for a load before it looks for news.
_IDLE_WAIT_S = 0.005

# The workers of this process, by a name of their own.
_WORKERS: WeakValueDictionary[str, LiveServeConnector] = WeakValueDictionary()


@dataclass
class KvOrders(KVConnectorMetadata):
    """What the workers are to do in this step."""

    orders: Orders


@dataclass
class KvReport(KVConnectorWorkerMetadata):
    """Jobs that ended, and how many workers say so of each."""

    ended: dict[int, tuple[Ended, int]] = field(default_factory=dict)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        assert isinstance(other, KvReport)
        both = dict(self.ended)
        for number, (outcome, count) in other.ended.items():
            known = both.get(number)
            both[number] = (
                (outcome, count) if known is None else (merge(known[0], outcome), known[1] + count)
            )
        return KvReport(both)


@dataclass
class KvHandshake(KVConnectorHandshakeMetadata):
    """What a worker has. No slots: it has no tier, and said why."""

    num_slots: int
    block_bytes: int
    gbps: float = 0.0  # of the link, one direction
    name: str = ""  # among the workers of its process


class PoolBlocks:
    """`liveserve.kvtier.gpu_blocks.GpuBlocks` over the host's pool.

    Args:
        block_tokens: tokens of a block.
        promised: free blocks that running requests count on.
        upcoming: ids of about so many blocks that are evicted next; None: the host's order.
    """

    def __init__(
        self,
        pool: BlockPool,
        block_tokens: int,
        promised: Callable[[], int],
        upcoming: Callable[[int], list[int]] | None = None,
    ) -> None:
        self._pool = pool
        self._block_tokens = block_tokens
        self._promised = promised
        self._upcoming = upcoming

    def find(self, key: bytes) -> int | None:
        block = self._pool.cached_block_hash_to_block.get_one_block(key)  # type: ignore[arg-type]
        return None if block is None else block.block_id

    def holds(self, key: bytes, block: int) -> bool:
        return self._pool.cached_block_hash_to_block.contain(key, block)  # type: ignore[arg-type]

    def is_free(self, block: int) -> bool:
        return self._pool.blocks[block].ref_cnt == 0

    def spare(self) -> int:
        return max(0, self._pool.get_num_free_blocks() - self._promised())

    def free(self) -> int:
        return self._pool.get_num_free_blocks()

    def take(self, count: int) -> list[int]:
        return [block.block_id for block in self._pool.get_new_blocks(count)]

    def hold(self, blocks: Sequence[int]) -> None:
        self._pool.touch([self._pool.blocks[block] for block in blocks])

    def release(self, blocks: Sequence[int], *, soonest: bool = False) -> None:
        pool = self._pool
        found = [pool.blocks[block] for block in blocks]
        queue = pool.free_block_queue
        # Under a policy the order of releases does not decide, and its list has a form of its own.
        if not soonest or getattr(queue, "policy", None) is not None:
            pool.free_blocks(found)
            return
        free = []
        for block in found:
            block.ref_cnt -= 1
            if block.ref_cnt == 0:
                free.append(block)
        queue.prepend_n(free)

    def publish(self, key: bytes, block: int, depth: int) -> None:
        self._pool._insert_block_hash(
            key,  # type: ignore[arg-type]
            self._pool.blocks[block],
            num_tokens=(depth + 1) * self._block_tokens,
        )

    def upcoming(self, limit: int) -> list[tuple[bytes, int, int]]:
        """Nothing while as many blocks are free that hold nothing: no eviction is near."""
        blocks, queue = self._pool.blocks, self._pool.free_block_queue
        found: list[tuple[bytes, int, int]] = []
        head = queue.fake_free_list_head.next_free_block
        for _ in range(min(limit, queue.num_free_blocks)):
            if head is None or head.block_hash is not None:
                break
            head = head.next_free_block
        else:
            return found
        if self._upcoming is not None:
            ids = self._upcoming(limit)
        else:
            ids = []
            for _ in range(_MAX_WALK):
                if head is None or head.next_free_block is None or len(ids) >= limit:
                    break
                ids.append(head.block_id)
                head = head.next_free_block
        for block in ids:
            key = blocks[block].block_hash
            tokens = blocks[block].block_hash_num_tokens or 0
            if key is not None and tokens % self._block_tokens == 0:
                found.append((key, block, tokens // self._block_tokens - 1))
        return found

    def without(self, held: dict[int, int], action: Callable[[], bool]) -> bool:
        """``action()`` while the references ``held`` are set aside; nothing else may happen in it
        that takes blocks."""
        pool = self._pool
        blocks = [pool.blocks[block] for block, count in held.items() for _ in range(count)]
        pool.free_blocks(blocks)
        try:
            return action()
        finally:
            pool.touch(blocks)


class LiveServeConnector(KVConnectorBase_V1, SupportsHMA):
    """See the module.

    Attributes:
        kv_manager: in the scheduler, once the workers have said what they have; None: no tier.
        kv_worker: in a worker, once it knows its cache; None: no tier.
        promised: free blocks that running requests count on; set by `liveserve.host.reserve`.
        reports: in a worker: whether it reports what ended with its steps. Not if the scheduler is
            in the same process, and the only one: it asks when a round begins, and so knows of a
            load one step earlier.

    Raises:
        ConfigError: the tier's settings cannot work.
    """

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self.kv_manager: KvManager[bytes] | None = None
        self.kv_worker: KvWorker | None = None
        self.promised: Callable[[], int] | None = None
        self.reports = True
        self._config = from_env() or LiveServeConfig()
        extra = self._kv_transfer_config.kv_connector_extra_config
        self._settings: KvConfig = kv_flags.settings(self._config.kv, extra)
        kv_flags.check_engine(self._settings, vllm_config.cache_config.enable_prefix_caching)
        self._runtime: StageRuntime | None = None
        self._other_runtime = current_runtime()  # of an engine that was here before this one
        self._block_tokens = 0
        self._num_workers = 1
        self._here: KvWorker | None = None  # the only worker, if it is in this process
        self._partial: dict[int, tuple[Ended, int]] = {}
        self._keys: dict[str, list[bytes]] = {}
        self._changes: list[tuple[bytes, bool]] = []  # of DRAM; taken in every step
        self._long: dict[str, Request] = {}
        self._running = 0
        self._waited = ""  # the first request that waited after the last round
        self._usable = self._check()

    def _check(self) -> bool:
        """Whether there can be a tier here; says why not."""
        try:
            if not versions.supported():
                return False
            groups = self._kv_cache_config.kv_cache_groups
            expect(
                len(groups) == 1 and isinstance(groups[0].kv_cache_spec, FullAttentionSpec),
                "the model has other layers than one group of full attention",
            )
            parallel = self._vllm_config.parallel_config
            expect(
                parallel.decode_context_parallel_size == 1
                and parallel.prefill_context_parallel_size == 1,
                "the context is split among GPUs",
            )
            stage = stage_info(self._vllm_config, self._kv_cache_config).name
            useful = stage in _OMNI_STAGES or stage == "llm"
            expect(useful, f"the history of stage {stage} is not read again")
            self._block_tokens = groups[0].kv_cache_spec.block_size
        except SeamError as error:
            self._no_tier(error)
            return False
        return True

    def _no_tier(self, why: object) -> None:
        logger.warning("LiveServe: no KV tier in this engine, which runs as without it (%s).", why)

    # ---- for the host ----------------------------------------------------------------------

    @property
    def requires_kv_delivery(self) -> bool:
        """A store that is lost is a miss later on."""
        return False

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: VllmConfig) -> str | None:
        """A block's layers lie together, so that it is one copy. CPU attention knows no layout but
        its own."""
        from vllm.platforms import current_platform

        return "BLHNC" if current_platform.is_cuda() else None

    # ---- in a worker -----------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        if not self._usable:
            return
        settings = self._settings
        try:
            cache = describe(kv_caches, self._kv_cache_config.num_blocks)
            row_bytes = omni_rows.expected_bytes_per_block(self._vllm_config)
        except (SeamError, ValueError) as error:
            self._no_tier(error)
            return
        num_slots = slots_for(settings.dram_bytes, cache, row_bytes)
        checksums = settings.checksums
        if checksums is None:
            checksums = cache.device == "cpu"
        try:
            companion = omni_rows.companion(
                self._vllm_config, num_slots=num_slots, checksums=checksums
            )
        except SeamError as error:
            self._no_tier(error)
            return
        self.kv_worker = KvWorker(
            cache,
            num_slots,
            companion=companion,
            link_gbps=settings.link_gbps if cache.device == "cpu" else None,
            checksums=checksums,
            max_wait_s=1e-3 * settings.max_wait_ms,
        )
        self._block_bytes = cache.slot_bytes + row_bytes
        logger.info(
            "LiveServe: KV tier of %d blocks (%.3g GiB, %d bytes each).",
            num_slots,
            num_slots * self._block_bytes / 2**30,
            self._block_bytes,
        )

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        if self.kv_worker is None:
            return KvHandshake(0, 0)
        engine, name = self.kv_worker.engine, uuid.uuid4().hex
        _WORKERS[name] = self
        return KvHandshake(engine.num_slots, self._block_bytes, engine.link.gbps, name)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """Before the forward pass: loads begin, to be there when it ends. None of their blocks is
        used in this step."""
        super().bind_connector_metadata(connector_metadata)
        worker = self.kv_worker
        if worker is None or not isinstance(connector_metadata, KvOrders):
            return
        orders = connector_metadata.orders
        self._begin(worker, [job for job in orders.begin if job.kind is not Kind.STORE])
        worker.promote(orders.promote)
        worker.cancel(orders.cancel)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """After the forward pass was launched, as no load is synchronous: stores begin."""
        meta, worker = self._connector_metadata, self.kv_worker
        if worker is not None and isinstance(meta, KvOrders):
            self._begin(worker, [job for job in meta.orders.begin if job.kind is Kind.STORE])

    def _begin(self, worker: KvWorker, jobs: list[Job]) -> None:
        if jobs:
            worker.begin(jobs, compute_so_far(worker.cache.device))

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing is loaded for the step that runs."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Blocks are stored when they are complete."""

    def wait_for_save(self) -> None:
        """The blocks are held until they are copied."""

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        if self.kv_worker is None or not self.reports:
            return None
        ended = self.kv_worker.poll()
        return KvReport({outcome.number: (outcome, 1) for outcome in ended}) if ended else None

    def shutdown(self) -> None:
        if self.kv_worker is not None:
            self.kv_worker.close()

    # ---- in the scheduler: at the start ----------------------------------------------------

    def bind_kv_cache_manager(self, kv_cache_manager: KVCacheManager) -> None:
        super().bind_kv_cache_manager(kv_cache_manager)
        if not self._usable:
            return
        try:
            pool = kv_cache_manager.block_pool
            for owner, names in (
                (pool, ("touch", "free_blocks", "get_new_blocks", "_insert_block_hash", "blocks")),
                (pool.cached_block_hash_to_block, ("get_one_block", "contain")),
                (FreeKVCacheBlockQueue, ("prepend_n",)),
                (
                    kv_cache_manager,
                    (
                        "reset_prefix_cache",
                        "get_block_ids",
                        "prefix_cache_lookup_enabled",
                        "new_step_starts",
                    ),
                ),
            ):
                for name in names:
                    expect(hasattr(owner, name), f"{type(owner).__name__}.{name} is gone")
        except SeamError as error:
            self._usable = False
            self._no_tier(error)
            return
        self._reset_gpu = kv_cache_manager.reset_prefix_cache
        kv_cache_manager.reset_prefix_cache = self._reset_prefix_cache  # type: ignore[method-assign]
        self._start_step = kv_cache_manager.new_step_starts
        kv_cache_manager.new_step_starts = self._new_step_starts  # type: ignore[method-assign]

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        """Every worker is ready: as many slots as the smallest pool has."""
        workers = [worker for worker in metadata.values() if isinstance(worker, KvHandshake)]
        num_slots = min((worker.num_slots for worker in workers), default=0)
        if not self._usable or not num_slots or self._kv_cache_manager is None:
            return
        self._num_workers = len(workers)
        here = _WORKERS.get(workers[0].name) if len(workers) == 1 else None
        if here is not None:
            here.reports, self._here = False, here.kv_worker
        runtime = current_runtime()
        self._runtime = runtime if runtime is not self._other_runtime else None
        stage = self._runtime.kv if self._runtime is not None else None
        settings, pool = self._settings, self._kv_cache_manager.block_pool
        policy = make_policy(
            settings.policy,
            num_slots,
            stage.next_use if stage is not None else NextUse(),  # which knows nothing
            settings.safe_blocks,
        )
        block_bytes = max(1, max(worker.block_bytes for worker in workers))
        held = max(1, int(_HELD_SHARE * pool.num_gpu_blocks))
        gpu = PoolBlocks(
            pool,
            self._block_tokens,
            self._promised_blocks,
            stage.gpu.upcoming if stage is not None else None,
        )
        limits = Limits(
            min_load_blocks=settings.min_load_blocks,
            load_timeout_s=settings.load_timeout_s,
            store_blocks=max(1, min(held, settings.store_queue_bytes // block_bytes)),
            held_blocks=held,
            ahead_blocks=int(settings.store_ahead * pool.num_gpu_blocks),
        )
        self._gpu = gpu
        self.kv_manager = KvManager(num_slots, policy, gpu, limits, block_bytes)
        events = self._vllm_config.kv_events_config
        if events is not None and events.enable_kv_cache_events:
            self.kv_manager.follow(on_change=lambda key, there: self._changes.append((key, there)))
        if stage is not None:
            stage.tier = self.kv_manager
            stage.follow(policy)
            stage.on_void.append(self.kv_manager.void)
            self._attach_preload(stage, min(worker.gbps for worker in workers), block_bytes)
        self._follow_switches()

    def _attach_preload(self, stage: KvStage, gbps: float, block_bytes: int) -> None:
        manager, runtime, gpu = self.kv_manager, self._runtime, self._gpu
        assert manager is not None
        assert runtime is not None
        loads = TierLoads(
            manager,
            gbps,
            block_bytes,
            lambda count, wait_s: min(gpu.spare(), stage.gpu.spare(count, wait_s)),
        )
        limits = PreloadLimits(
            max_bytes=self._settings.preload_bytes, max_sessions=self._config.max_sessions
        )
        stage.preload = KvPreload(
            loads,
            limits,
            lambda: runtime.switches.kv_preload,
            prefix_keys(self._vllm_config, self._block_tokens),
        )
        stage.signals.follow(lambda: runtime.preload(lambda p: p.preloader.fail_closed()))
        manager.follow(
            on_loaded=lambda load, num_loaded, now_s: runtime.preload(
                lambda preload: self._loaded(stage, preload, load, num_loaded, now_s)
            )
        )

    def _loaded(
        self, stage: KvStage, preload: KvPreload, load: Load[bytes], num_loaded: int, now_s: float
    ) -> None:
        preload.ended(load, num_loaded, now_s)
        if num_loaded and not load.waiters:
            # No request tells who reads these blocks.
            assert self.kv_manager is not None
            keys = self.kv_manager.history(load.session)
            found = (self._gpu.find(key) for key in keys)
            stage.gpu.used(str(load.session), [block for block in found if block is not None])

    def _relieve(self, preload: KvPreload) -> None:
        """Cancel preloads for those who need the blocks now: requests that run, and one that has
        waited for more than a round."""
        if not preload.preloader.num_jobs:
            return
        runtime, manager = self._runtime, self.kv_manager
        assert runtime is not None
        assert manager is not None
        first: Any = next((r for r in runtime.waiting() if not manager.waits(r.request_id)), None)
        needed = self._promised_blocks()
        if first is not None and first.request_id == self._waited:
            needed += -(-(first.num_tokens - first.num_computed_tokens) // self._block_tokens)
        self._waited = first.request_id if first is not None else ""
        short = needed - self._gpu.free()
        if short > 0:
            preload.preloader.pressure(short, time.monotonic())

    # ---- in the scheduler: requests --------------------------------------------------------

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """None while what the request needs is on its way; else nothing but what the GPU has."""
        manager, cache = self.kv_manager, self._kv_cache_manager
        if manager is None or cache is None or not cache.prefix_cache_lookup_enabled(request):
            return 0, False
        try:
            runtime, session = self._runtime, _session(request)
            self._follow_switches()
            now_s = time.monotonic()
            if runtime is not None and not is_warmup(request.request_id):
                runtime.preload(lambda preload: preload.arrived(session, now_s))
            # The last token is computed in any case.
            limit = (request.num_tokens - 1) // self._block_tokens
            waits = manager.lookup(
                request.request_id,
                session,
                self._keys_of(request)[:limit],
                num_computed_tokens // self._block_tokens,
                now_s,
            )
            if runtime is not None and runtime.profile.on:
                runtime.profile.looked(request.request_id, time.monotonic() - now_s, waits=waits)
        except Exception:
            self._failed("looking for KV")
            return 0, False
        return (None if waits else 0), False

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        if self.kv_manager is None:
            return
        try:
            self.kv_manager.admitted(request.request_id)
            if request.num_prompt_tokens > self._settings.ahead_tokens:
                self._long[request.request_id] = request
        except Exception:
            self._failed("admitting a request")

    def request_finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """The turn is over: its blocks are held and stored. Those of an interrupted answer are not
        held yet: which of them were heard is decided after this."""
        if self.kv_manager is not None:
            try:
                self._long.pop(request.request_id, None)
                self.kv_manager.gone(request.request_id)
                aborted = request.status == RequestStatus.FINISHED_ABORTED
                self._store(request, block_ids[0], request.num_computed_tokens, hold=not aborted)
            except Exception:
                self._failed("storing a turn")
            self._keys.pop(request.request_id, None)
        return False, None

    def _store(
        self, request: Request, blocks: Sequence[int], num_tokens: int, *, hold: bool
    ) -> None:
        """Store the full blocks of the first ``num_tokens`` tokens that are in the prefix cache."""
        manager = self.kv_manager
        assert manager is not None
        keys = self._keys_of(request)[: min(len(blocks), num_tokens // self._block_tokens)]
        count = 0
        for key, block in zip(keys, blocks, strict=False):
            if not self._gpu.holds(key, block):
                break
            count += 1
        if count:
            manager.store(
                _session(request), keys[:count], blocks[:count], time.monotonic(), hold=hold
            )

    def _keys_of(self, request: Request) -> list[bytes]:
        keys = self._keys.setdefault(request.request_id, [])
        hashes = request.block_hashes
        if len(keys) < len(hashes):
            keys += [make_block_hash_with_group_id(h, 0) for h in hashes[len(keys) :]]
        return keys

    # ---- in the scheduler: rounds ----------------------------------------------------------

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        manager = self.kv_manager
        self._running = len(scheduler_output.num_scheduled_tokens)
        if manager is None:
            return KvOrders(Orders())
        try:
            self._follow_switches()
            self._store_long_prompts()
            if self._runtime is not None:
                self._runtime.preload(self._relieve)
            return KvOrders(manager.plan(time.monotonic()))
        except Exception:
            self._failed("planning copies")
            return KvOrders(Orders())

    def _new_step_starts(self) -> None:
        """`KVCacheManager.new_step_starts`: a round begins, and has yet to look for prefixes."""
        manager, worker = self.kv_manager, self._here
        if manager is not None and worker is not None and worker.num_moving:
            try:
                if not self._running and manager.awaited:
                    worker.wait(_IDLE_WAIT_S)
                manager.ended(worker.poll(), time.monotonic())
            except Exception:
                self._failed("taking in copies")
        self._start_step()

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        report, manager = connector_output.kv_connector_worker_meta, self.kv_manager
        if manager is None or not isinstance(report, KvReport):
            return
        try:
            complete = []
            both = KvReport(self._partial).aggregate(report)
            assert isinstance(both, KvReport)
            self._partial = both.ended
            for number, (outcome, count) in list(self._partial.items()):
                if count >= self._num_workers:
                    del self._partial[number]
                    complete.append(outcome)
            manager.ended(complete, time.monotonic())
        except Exception:
            self._failed("taking in copies")

    def take_events(self) -> Iterable[KVCacheEvent]:
        changes, self._changes = self._changes, []
        return list(tier_events(changes, {0: self._block_tokens}))

    def has_pending_push_work(self) -> bool:
        """Keeps an engine without requests stepping while copies are under way."""
        return self.kv_manager is not None and self.kv_manager.busy

    def reset_cache(self) -> bool:
        if self.kv_manager is not None:
            self.kv_manager.reset(time.monotonic())
        return True

    def _reset_prefix_cache(self) -> bool:
        """`KVCacheManager.reset_prefix_cache`, which refuses while anybody refers to a block: what
        the tier holds counts as free for that moment. Loads go on into their blocks."""
        if self.kv_manager is None:
            return self._reset_gpu()
        return self._gpu.without(self.kv_manager.held, self._reset_gpu)

    def _store_long_prompts(self) -> None:
        for request_id, request in list(self._long.items()):
            if request.num_computed_tokens < request.num_prompt_tokens:
                continue
            del self._long[request_id]
            assert self._kv_cache_manager is not None
            blocks = self._kv_cache_manager.get_block_ids(request_id)[0]
            self._store(request, blocks, request.num_prompt_tokens, hold=True)

    def _follow_switches(self) -> None:
        manager = self.kv_manager
        assert manager is not None
        switches: Switches = (
            self._runtime.switches if self._runtime is not None else self._config.switches
        )
        manager.switch(loads=switches.kv_load, stores=switches.kv_store, policy=switches.kv_evict)

    def _promised_blocks(self) -> int:
        """A block for each running request, or what is reserved for them."""
        reserved = self.promised() if self.promised is not None else 0
        return max(self._running, reserved)

    def _failed(self, what: str) -> None:
        """Begin nothing new; what is under way still ends."""
        manager = self.kv_manager
        assert manager is not None
        was_broken = manager.broken
        manager.fail()
        if not was_broken:
            logger.exception(
                "LiveServe: %s failed; the KV tier begins nothing new from now on "
                "(counted, logged once)",
                what,
            )


def _session(request: Request) -> str:
    return getattr(request, "session_id", None) or session_of(request.request_id)
