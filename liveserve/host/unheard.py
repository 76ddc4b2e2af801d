"""KV of what an interrupted answer did not get to say is freed first.

The next turn's history is cut at the playback point (`liveserve.host.history`), so blocks that hold
tokens behind it can never be hit again: only with prefix caching on do they matter, and then they
would push out blocks that can. They lose their hash before the host frees them, or, where the
answer was complete and is interrupted while it plays, when the barge-in arrives; the host takes
blocks without a hash before any other (`BlockPool.free_blocks`).
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Any

from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request, RequestStatus

from liveserve.events import Event, EventKind
from liveserve.host.seam import expect, install
from liveserve.runtime import StageRuntime
from liveserve.scheduler.views import SessionView


class Unheard:
    """Watches the answers that one text stage has in its prefix cache.

    Args:
        scheduler: of the engine; its prefix cache is the one that is changed.
        runtime: what this engine knows of sessions; without a trustworthy view nothing is done.
        session_of: the session of a request id.
    """

    def __init__(
        self, scheduler: Scheduler, runtime: StageRuntime, session_of: Callable[[str], str]
    ) -> None:
        self._scheduler = scheduler
        self._runtime = runtime
        self._session_of = session_of
        # Per session, its complete answer: prompt tokens, answer tokens, and the blocks of it.
        self._complete: OrderedDict[str, tuple[int, int, list[tuple[Any, Any]]]] = OrderedDict()
        # Per session, seconds heard of an answer whose barge-in came before its abort.
        self._heard_s: dict[str, float] = {}

    @property
    def _active(self) -> bool:
        switched_on = self._runtime.switches.unheard
        return switched_on and bool(self._scheduler.kv_cache_manager.enable_caching)

    def ending(self, request: Request) -> None:
        """``request`` has finished and its blocks are about to be freed."""
        if not self._active or not request.is_finished():
            return
        try:
            self._ending(request)
        except Exception:
            self._runtime._failed("unheard KV")

    def _ending(self, request: Request) -> None:
        session_id = self._session_of(request.request_id)
        view = self._runtime.view_of(session_id)
        if view is None or not view.wants_audio:
            return
        blocks = self._blocks(request)
        if request.status == RequestStatus.FINISHED_ABORTED:
            heard_s = self._heard_s.pop(session_id, None)
            keep = self.kept_tokens(request, view, heard_s)
            self._evict((block for block, _ in blocks), keep, users=1)
            return
        answer = [
            (block, key) for block, key in blocks if _covers(block) > request.num_prompt_tokens
        ]
        self._complete.pop(session_id, None)
        self._complete[session_id] = (request.num_prompt_tokens, request.num_output_tokens, answer)
        while len(self._complete) > self._runtime.config.max_sessions:
            self._complete.popitem(last=False)

    def kept_tokens(self, request: Request, view: SessionView, heard_s: float | None = None) -> int:
        """How many tokens of ``request`` the conversation keeps if it is interrupted now: its
        prompt and what was heard of its answer.
        """
        if heard_s is None:
            heard_s = view.clock.played_s(self._runtime.now_s())
        return request.num_prompt_tokens + _heard_tokens(view, request.num_output_tokens, heard_s)

    def seen(self, event: Event) -> None:
        """An event that is about to change its session's view."""
        session_id = event.session_id
        if event.kind is EventKind.BARGE_IN:
            complete = self._complete.pop(session_id, None)
            view = self._runtime.view_of(session_id)
            if complete is None or view is None:
                if len(self._heard_s) >= self._runtime.config.max_sessions:
                    self._heard_s.clear()
                self._heard_s[session_id] = event.value_s
            elif self._active:
                prompt, made, blocks = complete
                keep = prompt + _heard_tokens(view, made, event.value_s)
                same = (block for block, key in blocks if block.block_hash == key)
                self._evict(same, keep, users=0)
        elif event.kind in (EventKind.COMMITTED, EventKind.CLOSED):
            self._complete.pop(session_id, None)
            self._heard_s.pop(session_id, None)

    def _blocks(self, request: Request) -> list[tuple[Any, Any]]:
        """The request's blocks that are in the prefix cache, with their keys."""
        groups = self._scheduler.kv_cache_manager.get_blocks(request.request_id).blocks
        return [
            (block, block.block_hash)
            for group in groups
            for block in group
            if not block.is_null and block.block_hash is not None
        ]

    def _evict(self, blocks: Iterable[Any], keep_tokens: int, users: int) -> None:
        """Take from the prefix cache what goes past ``keep_tokens`` and has ``users`` users; with
        none it also moves to where the host allocates next.
        """
        unheard = [b for b in blocks if _covers(b) > keep_tokens and b.ref_cnt == users]
        if not unheard:
            return
        if self._runtime.kv is not None:
            self._runtime.kv.void([block.block_hash for block in unheard])
        pool = self._scheduler.kv_cache_manager.block_pool
        self._scheduler.kv_cache_manager.evict_blocks({block.block_id for block in unheard})
        if not users:
            for block in unheard:
                pool.free_block_queue.remove(block)
            pool.free_block_queue.prepend_n(unheard)
        self._runtime.unheard_blocks += len(unheard)


def _covers(block: Any) -> int:
    """Tokens from the start of the sequence to the end of what the block's hash stands for."""
    return int(block.block_hash_num_tokens or 0)


def _heard_tokens(view: SessionView, made: int, heard_s: float) -> int:
    """Text tokens of ``made`` that were said in ``heard_s``, as `liveserve.host.history` cuts: over
    all of a complete answer's audio, else at the session's pace.
    """
    if heard_s <= 0 or not made:
        return 0
    clock = view.clock
    token_s = clock.routed_s / made if clock.complete and clock.started else view.text_token_s
    return min(made, math.ceil(heard_s / token_s)) if token_s > 0 else made


def attach(
    scheduler: Scheduler, runtime: StageRuntime, session_of: Callable[[str], str]
) -> Unheard | None:
    """Watch ``scheduler`` if it makes text; no other stage's KV outlives its answer."""
    if runtime.info.token_s is not None or runtime.info.routes_audio:
        return None
    if not install("freeing of unheard KV", lambda: _check(scheduler)):
        return None
    unheard = Unheard(scheduler, runtime, session_of)
    runtime.on_event.append(unheard.seen)
    return unheard


def _check(scheduler: Scheduler) -> None:
    manager = scheduler.kv_cache_manager
    for owner, names in (
        (Scheduler, ("_free_request_blocks",)),
        (manager, ("evict_blocks", "get_blocks", "enable_caching")),
        (manager.block_pool.free_block_queue, ("remove", "prepend_n")),
    ):
        for name in names:
            expect(hasattr(owner, name), f"{type(owner).__name__}.{name} is gone")
