"""Seam in a host scheduler: warm-ups run in what nobody else needs.

A warm-up (`liveserve.host.warmup` submits it) is told by its request id. It is in nobody's plan:
`SchedulerQueues` does not show it, so no policy counts it or waits for it. In each round at most
one may run, with ``step_tokens`` at most, and only where `liveserve.scheduler.warmup.may_run` lets
it; the others sit the round out (``next_decode_eligible_step``, as for a hold, or outside of the
waiting queues). The bound goes through ``long_prefill_token_threshold``, for that round: no
ordinary request has more to compute than its next token then.

A warm-up ends here, before the host would sample for it: when its blocks are there, when its
session's turn comes, and as soon as it takes a slot or blocks that somebody waits for. What it has
computed stays in the prefix cache. The host then hears that it was aborted, so that no stage after
this one is sent anything.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason
from vllm.v1.request import Request, RequestStatus

from liveserve.events import Event, EventKind
from liveserve.host.seam import expect, install
from liveserve.host.sessions import is_warmup
from liveserve.runtime import StageRuntime
from liveserve.scheduler.warmup import Ledger, WarmupReport, last_useful, may_run, runs_dry

_RUNNING, _PREEMPTED = RequestStatus.RUNNING, RequestStatus.PREEMPTED
# A warm-up evicts nothing that is expected to be needed within this: about as long as its user
# still speaks. Then the turn would evict it.
_SOON_S = 2.0


class _Chosen(NamedTuple):
    """Who may run in a round, and the tokens it has to compute yet."""

    request: Request
    left: int


class Warmups:
    """The warm-ups of one scheduler.

    Args:
        scheduler: with prefix caching, of a stage that reads its history again.
        runtime: what this engine knows of sessions.
        session_of: the session of a request id.
    """

    def __init__(
        self, scheduler: Any, runtime: StageRuntime, session_of: Callable[[str], str]
    ) -> None:
        self._scheduler = scheduler
        self._runtime = runtime
        self._session_of = session_of
        self._block_tokens = scheduler.block_size
        self._step_tokens = max(runtime.config.kv.prefill_step_tokens, self._block_tokens)
        self.ledger = Ledger(self._block_tokens, runtime.config.max_sessions)
        # Of admitted warm-ups: tokens that were found, and computed in all.
        self._found: dict[str, int] = {}
        self._computed: dict[str, int] = {}
        self._why: dict[str, str] = {}
        self._outputs: list[tuple[int, EngineCoreOutput]] = []
        self._waited: frozenset[str] = frozenset()
        self._chosen: _Chosen | None = None
        self._others: list[Request] = []
        self.sat_out = False  # all that is left to do in this engine waits for others elsewhere
        manager = scheduler.kv_cache_manager
        self._record = manager.record_prefix_cache_stats
        manager.record_prefix_cache_stats = self._admitted
        runtime.on_event.append(self._seen)

    def report(self) -> WarmupReport:
        return self.ledger.report(sum(map(is_warmup, self._scheduler.requests)))

    def choose(self) -> None:
        """Once a round, before KV is reserved for it: end those that should not be here any more,
        and choose who may run. (Blocks that are given up later in a round are not free in it.)
        """
        warmups = [r for name, r in self._scheduler.requests.items() if is_warmup(name)]
        self._chosen, self._others = None, []
        if not warmups:
            self.sat_out, self._waited = False, frozenset()
            return
        try:
            self._chosen = chosen = self._choose(warmups)
            self._others = [
                r
                for r in warmups
                if not r.is_finished() and (chosen is None or r is not chosen.request)
            ]
        except Exception:
            self._fail(warmups)
        self.sat_out = self._chosen is None and bool(self._others)

    @contextlib.contextmanager
    def round(self) -> Iterator[None]:
        """Around the host's core loop."""
        scheduler, config = self._scheduler, self._scheduler.scheduler_config
        for request in self._others:
            request.next_decode_eligible_step = scheduler.current_step + 2
        parked = self._park({r.request_id for r in self._others if r.status is not _RUNNING})
        threshold = config.long_prefill_token_threshold
        if self._chosen is not None:
            config.long_prefill_token_threshold = min(self._step_tokens, self._chosen.left)
        try:
            yield
        finally:
            config.long_prefill_token_threshold = threshold
            scheduler.waiting.extend(parked)

    def outputs(self, by_client: dict[int, EngineCoreOutputs]) -> None:
        """Tell the clients of warm-ups that ended here."""
        for client, output in self._outputs:
            by_client.setdefault(client, EngineCoreOutputs()).outputs.append(output)
        self._outputs.clear()

    @property
    def to_tell(self) -> bool:
        """Whether a client has yet to hear of one that ended."""
        return bool(self._outputs)

    def freed(self, request: Request) -> None:
        """A warm-up gives its blocks up: it has ended, or is preempted."""
        request_id, size = request.request_id, self._block_tokens
        computed = max(request.num_computed_tokens, self._computed.pop(request_id, 0))
        if not request.is_finished():
            self._computed[request_id] = computed
            return
        keys = request.block_hashes[
            self._found.pop(request_id, computed) // size : computed // size
        ]
        reason = self._why.pop(request_id, "cancelled")
        self.ledger.ended(self._session_of(request_id), keys, reason)

    # ---- inside ----------------------------------------------------------------------------

    def _choose(self, warmups: list[Request]) -> _Chosen | None:
        """The warm-up that may run, if one may; those that should not be here are ended."""
        # Last, also without a plan: the host's victims are from the end.
        self._scheduler.running.sort(key=lambda request: is_warmup(request.request_id))
        waiting = frozenset(r.request_id for r in self._runtime.waiting())
        left = self._end_some(warmups, waiting)
        self._waited = waiting
        return self._next(left) if left and self._may_run(bool(waiting)) else None

    def _fail(self, warmups: list[Request]) -> None:
        """There are no warm-ups any more."""
        self._runtime._failed("prefill ahead of a turn")
        if self._runtime.kv is not None:
            self._runtime.kv.warmups = None
        with contextlib.suppress(Exception):
            for request in warmups:
                if not request.is_finished():
                    self._end(request, "failed")

    def _end_some(self, warmups: list[Request], waiting: frozenset[str]) -> list[Request]:
        """End those that are done or in somebody's way; returns the others."""
        scheduler, runtime = self._scheduler, self._runtime
        turns = {
            self._session_of(request_id)
            for request_id in scheduler.requests
            if not is_warmup(request_id)
        }
        full = len(scheduler.running) >= scheduler.max_num_running_reqs
        # Somebody waited through a round (and not for a load), or could not grow in the last one.
        tier = getattr(scheduler.connector, "kv_manager", None)
        stays = [name for name in waiting & self._waited if tier is None or not tier.waits(name)]
        pressed = bool(stays) or bool(getattr(scheduler, "_liveserve_gated", ()))
        left = []
        for request in warmups:
            useful = last_useful(request.num_prompt_tokens, self._block_tokens)
            holds = request.status is _RUNNING
            if not runtime.switches.kv_prefill:
                self._end(request, "off")
            elif self._session_of(request.request_id) in turns:
                self._end(request, "turn")
            elif request.status is _PREEMPTED or (holds and (pressed or (full and waiting))):
                self._end(request, "pressure")
            elif holds and request.num_computed_tokens >= useful:
                self._end(request, "done")
            else:
                left.append(request)
        return left

    def _may_run(self, others_wait: bool) -> bool:
        runtime, scheduler = self._runtime, self._scheduler
        prefill = others_wait or any(
            request.num_computed_tokens < request.num_prompt_tokens
            for request in scheduler.running
            if not is_warmup(request.request_id)
        )
        may = may_run(
            (rank.urgency for rank in runtime.ranks.values()),
            first_audio_waits=runtime.first_audio_waits(),
            others_prefill=prefill,
            trusted=not runtime.ring.stale,
        )
        return may and not runs_dry(runtime.table, runtime.policy.p_safe_s, runtime.now_s())

    def _next(self, warmups: list[Request]) -> _Chosen | None:
        """One that runs goes on; else the first for whose blocks there is room begins."""
        scheduler = self._scheduler
        size = self._block_tokens
        for request in warmups:
            if request.status is _RUNNING:
                useful = last_useful(request.num_prompt_tokens, size)
                return _Chosen(request, useful - request.num_computed_tokens)
        if len(scheduler.running) >= scheduler.max_num_running_reqs:
            return None
        for request in warmups:
            useful = last_useful(request.num_prompt_tokens, size)
            found = scheduler.kv_cache_manager.get_computed_blocks(request)[1]
            if found >= useful:
                self._end(request, "there")
                continue
            count = -(-(request.num_prompt_tokens - found) // size)
            kv = self._runtime.kv
            if kv is not None and kv.gpu.spare(count, _SOON_S) >= count:
                return _Chosen(request, useful - found)
        return None

    def _park(self, names: set[str]) -> list[Request]:
        """Take requests out of the waiting queues; returns them, oldest first."""
        parked: list[Request] = []
        for queue in (self._scheduler.skipped_waiting, self._scheduler.waiting):
            if names and queue:
                out = [request for request in queue if request.request_id in names]
                if out:
                    queue.remove_requests(out)
                    parked += out
        return parked

    def _end(self, request: Request, why: str) -> None:
        request_id = request.request_id
        self._why[request_id] = why
        self._scheduler.finish_requests(request_id, RequestStatus.FINISHED_ABORTED)
        output = EngineCoreOutput(request_id, [], finish_reason=FinishReason.ABORT)
        self._outputs.append((request.client_index, output))

    def _admitted(self, request: Request, num_hits: int) -> None:
        """`KVCacheManager.record_prefix_cache_stats`: called once per admission. A warm-up is not
        in those: nobody asked for its prompt.
        """
        request_id = request.request_id
        if is_warmup(request_id):
            self._found[request_id] = num_hits
            self.ledger.begun(num_hits)
            return
        if not request.num_preemptions:
            found = request.block_hashes[: num_hits // self._block_tokens]
            self.ledger.turn(self._session_of(request_id), found)
        self._record(request, num_hits)

    def _seen(self, event: Event) -> None:
        if event.kind is EventKind.CLOSED:
            self.ledger.over(event.session_id)


def attach(
    scheduler: Any, runtime: StageRuntime, session_of: Callable[[str], str]
) -> Warmups | None:
    """Let warm-ups run in ``scheduler`` if its prefix cache is one whose history is read again
    (`StageRuntime.kv`), and say so in `KvStage.warmups`. Else there are none.
    """
    if runtime.kv is None or runtime.info.token_s is not None or runtime.info.routes_audio:
        return None
    if not install("prefill ahead of a turn", lambda: _check(scheduler)):
        return None
    warmups = Warmups(scheduler, runtime, session_of)
    runtime.kv.warmups = warmups.report
    return warmups


def _check(scheduler: Scheduler) -> None:
    config = scheduler.scheduler_config
    expect(hasattr(config, "long_prefill_token_threshold"), "long_prefill_token_threshold is gone")
    expect(config.enable_chunked_prefill, "the stage does not prefill in chunks")
    for name in ("block_size", "current_step", "max_num_running_reqs", "finish_requests"):
        expect(hasattr(scheduler, name), f"Scheduler.{name} is gone")
    for queue in (scheduler.waiting, scheduler.skipped_waiting):
        expect(hasattr(queue, "remove_requests"), f"{type(queue).__name__}.remove_requests is gone")
    manager = scheduler.kv_cache_manager
    for name in ("record_prefix_cache_stats", "get_computed_blocks"):
        expect(hasattr(manager, name), f"KVCacheManager.{name} is gone")
    expect(len(manager.coordinator.single_type_managers) == 1, "the model has several KV groups")
    expect(manager.block_pool.hash_block_size == scheduler.block_size, "hashes of part blocks")
    names = inspect.signature(EngineCoreOutput).parameters
    expect("finish_reason" in names, "EngineCoreOutput.finish_reason is gone")
