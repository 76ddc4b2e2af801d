"""KV reserved ahead in a host scheduler: nobody is preempted in a stage where that loses output.

Preempting in a stage of vLLM-Omni 0.30.0 ends a talker's engine (IndexError in
gpu_ar_model_runner.py) and makes a thinker's requests end in silence. `ReservedRound` replaces it:

- A waiting request is let in through `KVCacheManager.allocate_slots`, which the host asks with
  the prefix blocks that it has found: None ends the host's admission for the round, as for want of
  blocks, so the most urgent request is next and nobody passes it.
- A running request whose next block would not be safe to give sits the round out
  (``next_decode_eligible_step``, as for a hold). While one does, nobody is admitted or paced.
- `Scheduler._request_blocks_can_be_freed` denies every victim while the core loop runs, where it
  decides whether the host may preempt. So it cannot, even if the accounts were wrong.
- If nobody can go on, the least urgent request fails with an error. These rules never lead there;
  switching them on in a pool that is full already may, or something else that takes blocks.

No request is too large to enter alone: the host starts only if ``max_model_len`` tokens fit the
pool without its null block (``_check_enough_kv_cache_memory`` in kv_cache_utils.py), and refuses
longer prompts. The rules themselves are `liveserve.scheduler.reserve`.
"""

from __future__ import annotations

import inspect
import logging
import math
from collections.abc import Collection
from typing import Any, NamedTuple

from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.engine import FinishReason
from vllm.v1.request import Request, RequestStatus
from vllm_omni.engine import OmniEngineCoreOutput

from liveserve.host.scheduler_mixin import LiveRound
from liveserve.host.seam import expect, install
from liveserve.scheduler.plan import Plan
from liveserve.scheduler.reserve import Claim, Lengths, may_enter, may_grow

logger = logging.getLogger("vllm.liveserve")

# An engine in which nobody can go on for this long is stuck: blocks of steps under way and of
# finished transfers have come back by then.
_STUCK_S = 2.0
_ALLOCATE = ("num_new_tokens", "new_computed_blocks", "num_lookahead_tokens")


class Extent(NamedTuple):
    """Blocks of one request: of its prompt, and at most. ``streams``: more input may come."""

    prompt: int
    total: int
    streams: bool


class Accounts:
    """Claims on a scheduler's block pool, read from the host's own block tables.

    Args:
        may_hold: a request that may not grow can sit out a step. Else nothing is guessed: everybody
            is likely to take all that it may take.
    """

    def __init__(self, scheduler: Any, may_hold: bool = True) -> None:
        manager = scheduler.kv_cache_manager
        self._scheduler = scheduler
        self._coordinator = manager.coordinator
        self._pool = manager.block_pool
        self._may_hold = may_hold
        # Drafts behind the last token; asynchronously those of the step under way count too.
        steps = 2 if isinstance(scheduler, AsyncScheduler) else 1
        self._drafts = steps * scheduler.num_spec_tokens
        self._nothing = manager.empty_kv_cache_blocks.blocks
        self._shares = manager.enable_caching
        # Window attention gives blocks back and leaves null blocks in the table.
        self._tables = [
            (group.req_to_blocks, group._max_admission_blocks_per_request is not None)
            for group in self._coordinator.single_type_managers
        ]
        self._sizes = [
            (group.req_to_blocks, group.block_size)
            for group in self._coordinator.single_type_managers
        ]
        # Of requests that have had blocks.
        self._extents: dict[str, tuple[Request, Extent]] = {}
        self.lengths = Lengths()

    @property
    def free(self) -> int:
        return self._pool.get_num_free_blocks()

    def refresh(self) -> None:
        """Learn from requests that have ended since the last round."""
        requests = self._scheduler.requests
        for request_id in self._extents.keys() - requests.keys():
            request, extent = self._extents.pop(request_id)
            if not extent.streams and request.num_output_tokens:
                self.lengths.learn(request.num_output_tokens, request.max_tokens)

    def extent(self, request: Request) -> Extent:
        """Blocks of ``request`` in an empty pool without cached prefixes."""
        known = self._extents.get(request.request_id)
        if known and known[0] is request and known[1].streams == request.resumable:
            return known[1]
        end = self._scheduler.max_model_len
        if not request.resumable:
            end = request.num_prompt_tokens + request.max_tokens + self._lookahead + self._drafts
        prompt = self._blocks_for("", request.num_prompt_tokens, 0, cap=True)
        total = min(self._blocks_for("", end, 0, cap=True), self._pool.num_gpu_blocks - 1)
        extent = Extent(min(prompt, total), total, request.resumable)
        self._extents[request.request_id] = request, extent
        return extent

    def used(self, request: Request) -> int:
        """Blocks in the request's tables."""
        used = 0
        for table, recycles in self._tables:
            blocks = table.get(request.request_id)
            if blocks:
                used += sum(not b.is_null for b in blocks) if recycles else len(blocks)
        return used

    def holders(self) -> dict[Request, int]:
        """Who has blocks, and how many."""
        holders = {}
        for request in self._scheduler.requests.values():
            if used := self.used(request):
                holders[request] = used
        return holders

    def promised(self, holders: dict[Request, int]) -> tuple[int, int]:
        """Blocks that ``holders`` may take yet: at most, and likely."""
        most = likely = 0
        for request, used in holders.items():
            extent = self.extent(request)
            if (more := extent.total - used) > 0:
                most += more
                likely += more if extent.streams else max(0, self._likely_total(extent) - used)
        return most, likely

    def _likely_total(self, extent: Extent) -> int:
        share = self.lengths.share if self._may_hold else 1.0
        return extent.prompt + math.ceil(share * (extent.total - extent.prompt))

    def claim(self, request: Request, used: int, hits: Collection[KVCacheBlock] = ()) -> Claim:
        """The claim of a request that has ``used`` blocks.

        Args:
            hits: blocks that others have for it already.
        """
        if request.is_finished() and not request.resumable:
            return Claim(used, 0, 0)  # its blocks come back when a transfer ends
        extent = self.extent(request)
        have = used + sum(block.ref_cnt > 0 for block in hits)
        more = max(0, extent.total - have)
        if extent.streams:
            return Claim(0, more, more, ends=False)
        likely = self._likely_total(extent) - have
        return Claim(used, more, max(likely, min(1, more)))

    def claims(
        self, holders: dict[Request, int], hits: Collection[KVCacheBlock] = ()
    ) -> list[Claim]:
        """Claims of ``holders`` once somebody uses ``hits`` too.

        A block that several use comes back with the last of them, so nobody counts on it.
        """
        claims = [self.claim(request, used) for request, used in holders.items()]
        if not self._shares:
            return claims
        hit = {block.block_id for block in hits}
        return [
            claim._replace(
                held=sum(
                    not block.is_null and block.ref_cnt == 1 and block.block_id not in hit
                    for table, _ in self._tables
                    for block in table.get(request.request_id) or ()
                )
                if claim.ends
                else 0
            )
            for request, claim in zip(holders, claims, strict=True)
        ]

    def wants(self, request: Request) -> int:
        """Blocks that the host's loop would take for a running request, at most."""
        computed = request.num_computed_tokens
        tokens = request.num_tokens_with_spec + request.num_output_placeholders - computed
        if tokens <= 0:
            return 0
        end = computed + min(tokens, self._scheduler.max_num_scheduled_tokens) + self._lookahead
        request_id = request.request_id
        if all(len(table.get(request_id) or ()) * size >= end for table, size in self._sizes):
            return 0  # most of the time; asking the host takes longer
        return self._blocks_for(request_id, end, computed)

    def first(self, request: Request, tokens: int, cached: int, hits: KVCacheBlocks) -> int:
        """Blocks that admitting ``request`` takes for ``tokens`` behind ``cached`` cached ones."""
        computed = request.num_computed_tokens + cached
        return self._blocks_for(request.request_id, computed + tokens, computed, hits=hits)

    @property
    def _lookahead(self) -> int:
        return self._scheduler.num_lookahead_tokens

    def _blocks_for(
        self,
        request_id: str,
        tokens: int,
        computed: int,
        *,
        hits: KVCacheBlocks | None = None,
        cap: bool = False,
    ) -> int:
        """Free blocks that ``request_id`` needs to hold ``tokens`` tokens."""
        tokens = min(tokens, self._scheduler.max_model_len)
        return self._coordinator.get_num_blocks_to_allocate(
            request_id=request_id,
            num_tokens=tokens,
            new_computed_blocks=self._nothing if hits is None else hits.blocks,
            num_encoder_tokens=0,
            total_computed_tokens=computed,
            num_local_computed_tokens=computed,
            num_tokens_main_model=tokens,
            apply_admission_cap=cap,
        )


class ReservedRound(LiveRound):
    """`LiveRound` of a stage in which nothing may be preempted."""

    _liveserve_accounts: Accounts | None = None
    _liveserve_gated: frozenset[str] = frozenset()
    _liveserve_core = False
    _liveserve_stuck_since_s: float | None = None

    def _attach(self) -> None:
        super()._attach()
        if self.liveserve is not None:
            install("KV admission", self._attach_reserve)

    def _attach_reserve(self) -> None:
        manager = self.kv_cache_manager
        names = inspect.signature(manager.allocate_slots).parameters
        for name in _ALLOCATE:
            expect(name in names, f"KVCacheManager.allocate_slots has no {name}")
        for name in (
            "_request_blocks_can_be_freed",
            "num_lookahead_tokens",
            "num_spec_tokens",
            "finish_requests",
        ):
            expect(hasattr(self, name), f"Scheduler.{name} is gone")
        assert self.liveserve is not None
        self._liveserve_accounts = Accounts(self, self.liveserve.info.may_hold)
        self._liveserve_allocate = manager.allocate_slots
        manager.allocate_slots = self._allocate
        if hasattr(self.connector, "promised"):  # `liveserve.host.connector`
            self.connector.promised = self._promised

    @property
    def _reserves(self) -> bool:
        live = self.liveserve
        return self._liveserve_accounts is not None and bool(live and live.switches.reserve)

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().schedule(*args, **kwargs)
        finally:
            self._liveserve_core = False

    def _apply(self, plan: Plan | None) -> None:
        self._liveserve_gated = frozenset()
        if self.liveserve is not None:
            self.liveserve.promised_blocks = 0
        if self._reserves:
            try:
                self._liveserve_gated = self._gate(plan)
            except Exception:
                self._reserve_failed()
            self._liveserve_core = True
        if plan is not None and self._liveserve_gated:
            plan = plan._replace(held=frozenset())  # whoever can finish frees blocks
        super()._apply(plan)
        for request in self.running:
            if request.request_id in self._liveserve_gated:
                request.next_decode_eligible_step = max(
                    request.next_decode_eligible_step, self.current_step + 2
                )

    def _promised(self) -> int:
        """Free blocks that those in the pool are likely to take yet: loads leave them alone."""
        accounts = self._liveserve_accounts
        if accounts is None or not self._reserves:
            return 0
        return sum(claim.likely for claim in accounts.claims(accounts.holders()))

    def _gate(self, plan: Plan | None) -> frozenset[str]:
        """Who must not grow this round."""
        accounts, live = self._liveserve_accounts, self.liveserve
        assert accounts is not None
        assert live is not None
        accounts.refresh()
        holders = accounts.holders()
        most, live.promised_blocks = accounts.promised(holders)
        if most <= accounts.free:
            self._liveserve_stuck_since_s = None
            return frozenset()
        requests = list(holders)
        if plan is not None:
            order = {request_id: index for index, request_id in enumerate(plan.order)}
            requests.sort(key=lambda request: order.get(request.request_id, len(order)))
            holders = {request: holders[request] for request in requests}
        running = set(self.running)
        wants = [accounts.wants(r) if r in running else 0 for r in requests]
        granted = may_grow(accounts.free, accounts.claims(holders), wants)
        gated = [r.request_id for r, go in zip(requests, granted, strict=True) if not go]
        self._check_stuck(requests, gated)
        return frozenset(gated)

    def _check_stuck(self, requests: list[Request], gated: list[str]) -> None:
        """Fail the least urgent request if nobody has been able to go on for some time."""
        live = self.liveserve
        assert live is not None
        if len(gated) < len(requests) or any(r.num_in_flight_tokens for r in requests):
            self._liveserve_stuck_since_s = None
            return
        now_s = live.now_s()
        if self._liveserve_stuck_since_s is None:
            self._liveserve_stuck_since_s = now_s
        elif now_s - self._liveserve_stuck_since_s > _STUCK_S:
            self._liveserve_stuck_since_s = None
            self._fail(requests[-1])

    def _allocate(self, request: Request, num_new_tokens: int, **given: Any) -> Any:
        """`KVCacheManager.allocate_slots`: None also where a request may not be admitted."""
        waits = request.status in (RequestStatus.WAITING, RequestStatus.PREEMPTED)
        if waits and self._reserves:
            try:
                admitted = self._may_enter(request, num_new_tokens, **given)
            except Exception:
                self._reserve_failed()
                admitted = True
            if not admitted:
                return None
        return self._liveserve_allocate(request, num_new_tokens, **given)

    def _may_enter(
        self,
        request: Request,
        num_new_tokens: int,
        *,
        num_new_computed_tokens: int = 0,
        num_external_computed_tokens: int = 0,
        new_computed_blocks: KVCacheBlocks,
        num_lookahead_tokens: int = 0,
        **_given: Any,
    ) -> bool:
        accounts = self._liveserve_accounts
        assert accounts is not None
        cached = num_new_computed_tokens + num_external_computed_tokens
        first = accounts.first(
            request, num_new_tokens + num_lookahead_tokens, cached, new_computed_blocks
        )
        holders = accounts.holders()
        if request in holders:  # it has entered before: a session's next input, or loaded KV
            wants = [first if other is request else 0 for other in holders]
            granted = may_grow(accounts.free, accounts.claims(holders), wants)
            return granted[list(holders).index(request)]
        if self._liveserve_gated:
            return False
        hits = [b for group in new_computed_blocks.blocks for b in group if not b.is_null]
        new = accounts.claim(request, 0, hits)
        return may_enter(accounts.free, accounts.claims(holders, hits), new, first)

    def _request_blocks_can_be_freed(self, request: Request) -> bool:
        if self._liveserve_core and self._reserves:
            return False
        return super()._request_blocks_can_be_freed(request)

    def _fail(self, request: Request) -> None:
        """End ``request`` with an error that reaches its client.

        Mirrors `OmniSchedulerMixin._finish_input_timeout_requests`, whose outputs the host sends.
        """
        error = "The KV cache of a stage is used up and no request there can go on."
        logger.error("LiveServe: %s Request %s fails.", error, request.request_id)
        request.stop_reason = error
        outputs = self.__dict__.setdefault("_pending_input_timeout_outputs", {})
        outputs[request.request_id] = (
            request.client_index,
            OmniEngineCoreOutput(
                request_id=request.request_id,
                new_token_ids=[],
                finish_reason=FinishReason.ERROR,
                stop_reason=error,
            ),
        )
        self.finish_requests(request.request_id, RequestStatus.FINISHED_ERROR)

    def _reserve_failed(self) -> None:
        if self.liveserve is not None:
            self.liveserve._failed("reserving KV")
