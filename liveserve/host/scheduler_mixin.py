"""LiveServe in a host scheduler: a look at every round and step; order and holds before the loop.

`LiveRound` is a cooperative base: in ``class X(HostScheduler, LiveRound)`` its `schedule` runs
after the host's own queue work and before vLLM's core loop. `LiveSteps` goes in front and sees
complete steps. Both do nothing while LiveServe is off.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.request_queue import SchedulingPolicy
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request, RequestStatus

from liveserve.config import from_env
from liveserve.host import block_pool, unheard, warmup_round
from liveserve.host.seam import expect, install
from liveserve.host.sessions import is_warmup, session_of
from liveserve.host.stages import stage_info
from liveserve.runtime import StageRuntime
from liveserve.scheduler.plan import Plan

logger = logging.getLogger("vllm.liveserve")

# Every other status waits: for a chunk, an input, a grammar, remote KV.
# (A tuple: hashing an enum member is a Python call.)
_RUNNING = RequestStatus.RUNNING
_RUNNABLE = (_RUNNING, RequestStatus.WAITING, RequestStatus.PREEMPTED)
# Steps under way at once; more means that the host dropped some without telling us.
_MAX_STEPS_UNDER_WAY = 16


class SchedulerQueues:
    """`liveserve.runtime.Queues` over a vLLM scheduler.

    Reads `Scheduler.requests`, which also holds what vLLM-Omni parks while it waits for a chunk.
    Warm-ups are not shown: they run behind everybody (`liveserve.host.warmup_round`).
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler

    def running(self) -> Iterator[Request]:
        return (
            r
            for r in self._scheduler.requests.values()
            if r.status is _RUNNING and not is_warmup(r.request_id)
        )

    def waiting(self) -> Iterator[Request]:
        return (
            r
            for r in self._scheduler.requests.values()
            if r.status is not _RUNNING and not (r.is_finished() or is_warmup(r.request_id))
        )

    def can_run(self, request: Any) -> bool:
        return request.status in _RUNNABLE

    def kv_blocks(self) -> tuple[int, int]:
        pool = self._scheduler.kv_cache_manager.block_pool
        # One block is the pool's null block: never free, never in use.
        total = pool.num_gpu_blocks - 1
        return total - pool.get_num_free_blocks(), total

    def queued_tokens(self) -> int:
        """Tokens of prompts that are not computed yet, found in KV or not."""
        return sum(
            max(0, request.num_prompt_tokens - request.num_computed_tokens)
            for request in self._scheduler.requests.values()
            if not is_warmup(request.request_id)
        )

    def kv_blocks_of(self, request: Any) -> int:
        ids = self._scheduler.kv_cache_manager.get_block_ids(request.request_id)
        return sum(len(group) for group in ids)


class LiveRound(Scheduler):
    """Ranks every request before the core loop of each round, and orders and holds them.

    Order: running requests are sorted, so that vLLM's victims (its last) are the least urgent;
    both waiting queues are sorted, and the one with the more urgent head goes first. A hold goes
    through `Request.next_decode_eligible_step`: the request stays in ``running``, counts against
    the limits, and costs nothing. Taking it out of ``running`` would widen admission.
    """

    liveserve: StageRuntime | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._liveserve_order: dict[str, int] = {}
        self._liveserve_unheard: unheard.Unheard | None = None
        self._liveserve_kv: block_pool.Requests | None = None
        self._liveserve_warmups: warmup_round.Warmups | None = None
        install("the scheduler", self._attach)

    def _attach(self) -> None:
        config = from_env()
        if config is not None:
            for name in ("current_step", "skipped_waiting", "_select_waiting_queue_for_scheduling"):
                expect(hasattr(self, name), f"Scheduler.{name} is gone")
            info = stage_info(self.vllm_config, self.kv_cache_config)
            if self.num_spec_tokens and isinstance(self, AsyncScheduler):
                # The drafts of a step stay in the worker, for the next step alone.
                info = replace(info, may_hold=False)
                logger.warning(
                    "LiveServe: stage %s decodes speculatively and schedules asynchronously: its "
                    "requests are ordered, but never held.",
                    info.name,
                )
            queues = SchedulerQueues(self)
            self.liveserve = StageRuntime(info, config, queues, session_of)
            self.liveserve.queued_tokens = queues.queued_tokens
            self._liveserve_unheard = unheard.attach(self, self.liveserve, session_of)
            self._liveserve_kv = block_pool.attach(self, self.liveserve, session_of)
            self._liveserve_warmups = warmup_round.attach(self, self.liveserve, session_of)

    def _free_request_blocks(self, request: Request) -> None:
        if is_warmup(request.request_id):
            if self._liveserve_warmups is not None:
                self._liveserve_warmups.freed(request)
        elif self._liveserve_unheard is not None:
            self._liveserve_unheard.ending(request)
        if self._liveserve_kv is not None:
            self._liveserve_kv.ending(request)
        super()._free_request_blocks(request)

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        warmups = self._liveserve_warmups
        if self.liveserve is not None:
            self.liveserve.round()
            if warmups is not None:
                warmups.choose()
            self._apply(self.liveserve.plan())
        with warmups.round() if warmups is not None else contextlib.nullcontext():
            return super().schedule(*args, **kwargs)

    def _apply(self, plan: Plan | None) -> None:
        """Sort and hold as ``plan`` says; None leaves the host's order."""
        if plan is None or self.policy != SchedulingPolicy.FCFS:
            self._liveserve_order = {}
            return
        order = {request_id: index for index, request_id in enumerate(plan.order)}
        self._liveserve_order = order
        last = len(order)
        self.running.sort(key=lambda request: order.get(request.request_id, last))
        for queue in (self.waiting, self.skipped_waiting):
            if len(queue) > 1:
                requests = sorted(queue, key=lambda r: order.get(r.request_id, last))
                queue.clear()
                queue.extend(requests)
        if plan.held:
            # `schedule` counts the step up before it compares.
            eligible = self.current_step + 2
            for request in self.running:
                if request.request_id in plan.held:
                    request.next_decode_eligible_step = max(
                        request.next_decode_eligible_step, eligible
                    )

    def _select_waiting_queue_for_scheduling(self) -> Any:
        order = self._liveserve_order
        if not order or not self.waiting or not self.skipped_waiting:
            return super()._select_waiting_queue_for_scheduling()
        heads = (self.waiting.peek_request(), self.skipped_waiting.peek_request())
        first, second = (order.get(head.request_id, len(order)) for head in heads)
        return self.waiting if first < second else self.skipped_waiting


class LiveSteps:
    """Times steps and counts tokens. Goes before the host's class in the bases."""

    liveserve: StageRuntime | None
    _liveserve_warmups: warmup_round.Warmups | None = None
    connector: Any
    ec_connector: Any
    requests: dict[str, Request]

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        if self.liveserve is None:
            return super().schedule(*args, **kwargs)  # type: ignore[misc]
        began_s = self.liveserve.now_s()
        output = super().schedule(*args, **kwargs)  # type: ignore[misc]
        if output.total_num_scheduled_tokens:
            self.liveserve.scheduled(output.num_scheduled_tokens)
            steps = self.__dict__.setdefault("_liveserve_steps", {})
            if len(steps) >= _MAX_STEPS_UNDER_WAY:
                steps.clear()
            steps[id(output)] = began_s
        elif self.liveserve.held and not self.__dict__.get("_liveserve_steps"):
            # Everything that could run is held: do not spin until somebody may go on.
            self.liveserve.doze(self._only_held(output))
        elif self._idles():
            self.liveserve.nap(1.0)
        return output

    def _idles(self) -> bool:
        """Whether nothing is left to do here but warm-ups, which may not run now."""
        warmups = self._liveserve_warmups
        if warmups is None or not warmups.sat_out or self.__dict__.get("_liveserve_steps"):
            return False
        return not warmups.to_tell and all(map(is_warmup, self.requests))

    def _only_held(self, output: Any) -> bool:
        """Whether only a message or a deadline lets anything happen in this engine."""
        held = self.liveserve.held if self.liveserve is not None else frozenset()
        try:
            if self.connector is not None or self.ec_connector is not None:
                return False  # their transfers end when they end
            adapter = getattr(self, "chunk_transfer_adapter", None)
            # A one-shot stage looks only in its own loop for who waits for a chunk.
            if adapter is not None and adapter.model_mode != "ar":
                return False
            # The workers have yet to hear of finished requests.
            return not output.finished_req_ids and held.issuperset(self.requests)
        except AttributeError:
            return False

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        outputs = super().update_from_output(  # type: ignore[misc]
            scheduler_output, model_runner_output
        )
        if self._liveserve_warmups is not None:
            self._liveserve_warmups.outputs(outputs)
        if self.liveserve is not None:
            if self.liveserve.profile.on:
                groups = outputs.values()
                self.liveserve.profile.made(o.request_id for g in groups for o in g.outputs)
            began_s = self.__dict__.get("_liveserve_steps", {}).pop(id(scheduler_output), None)
            if began_s is not None:
                sampled = getattr(model_runner_output, "sampled_token_ids", None) or ()
                sizes = scheduler_output.num_scheduled_tokens.values()
                padded = len(sizes) * max(sizes, default=0)
                made = sum(map(len, sampled))
                self.liveserve.stepped(began_s, made, padded, sum(sizes))
        return outputs


class AsyncByConfig:
    """Lets one class name serve both kinds of engine: the host resolves the class by its name
    before it knows, and then constructs it, where `async_class` takes over if the engine
    schedules asynchronously.
    """

    async_class: type | None = None

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        vllm_config = kwargs.get("vllm_config", args[0] if args else None)
        is_async = vllm_config is not None and vllm_config.scheduler_config.async_scheduling
        return object.__new__(cls.async_class if is_async and cls.async_class else cls)
