"""Seam in the thinker's stage pool: which replica takes a session's turn.

The host picks a replica for every request anew, in turn (`StagePool.select_replica_id`) or by a
load balancer (`pick`); a turn is a request, so a session's history is wherever chance puts it. Here
the first stage's pool asks `liveserve.replicas.ReplicaBook` first, where a request belongs to a
session and is bound to no replica yet, and binds it as the host would (vllm_omni/engine/
stage_pool.py). Without an answer, and on any failure, the host picks.

The frontend's multimodal cache assumes that an engine has what was sent once. For chat requests the
host makes its keys local to the replica (`_scope_stage0_multimodal_cache_to_replica` in
async_omni_engine.py), for turns of duplex sessions it does not: a turn that meets another replica
than the one before would name audio that it never got. `scope` does the same for those.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from vllm_omni.engine.async_omni_engine import AsyncOmniEngine
from vllm_omni.engine.stage_pool import StagePool

from liveserve.events import Event, EventKind
from liveserve.host.seam import expect
from liveserve.host.sessions import is_warmup, session_of
from liveserve.plane import THINKER, InteractionPlane

if TYPE_CHECKING:
    from collections.abc import MutableMapping


class LivePool(StagePool):
    """The host's pool, asking `live` before it picks."""

    live: ReplicaRouter | None = None

    def select_replica_id(self, request_id: str, **kwargs: Any) -> int:
        self._liveserve_place(request_id, kwargs)
        return super().select_replica_id(request_id, **kwargs)

    # Both end in `select_replica_id` where there is no hub.
    async def pick(self, request_id: str, *args: Any, **kwargs: Any) -> int:
        if self.is_distributed:
            self._liveserve_place(request_id, kwargs)
        return await super().pick(request_id, *args, **kwargs)

    def preselect_replica_id(self, request_id: str, *args: Any, **kwargs: Any) -> int | None:
        if self.is_distributed:
            self._liveserve_place(request_id, kwargs)
        return super().preselect_replica_id(request_id, *args, **kwargs)

    def _liveserve_place(self, request_id: str, kwargs: dict[str, Any]) -> None:
        # Somebody's companion goes where that one is.
        if self.live is not None and kwargs.get("affinity_request_id") is None:
            try:
                self.live.place(self, request_id)
            except Exception:
                self.live.plane.failed("replica choice")


class ReplicaRouter:
    """Lives on the orchestrator's loop.

    Args:
        pool: of the first stage; becomes a `LivePool`.
        plane: knows the sessions and the replicas.

    Raises:
        SeamError: the host's pool is not as expected.
    """

    def __init__(self, pool: Any, plane: InteractionPlane) -> None:
        self.pool, self.plane = pool, plane
        expect(type(pool) in (StagePool, LivePool), "the first stage's pool is not a StagePool")
        for name in ("_request_bindings", "_affinity", "is_distributed", "num_replicas"):
            expect(hasattr(pool, name), f"StagePool.{name} is gone")
        for name in (
            "available_replica_ids", "bind", "get_bound_replica_id", "is_replica_available",
            "pick", "preselect_replica_id", "select_replica_id", "_client_input_addr",
            "_collect_serviceable_replicas",
        ):  # fmt: skip
            expect(callable(getattr(StagePool, name, None)), f"StagePool.{name} is gone")
        for name in ("pick", "preselect_replica_id", "select_replica_id"):
            known = inspect.signature(getattr(StagePool, name)).parameters
            expect("affinity_request_id" in known, f"StagePool.{name} has other parameters")
        self._scoper = _scoper(pool)
        pool.__class__ = LivePool
        pool.live = self

    @property
    def on(self) -> bool:
        """Whether there is a choice at all."""
        return self.pool.num_replicas > 1

    def place(self, pool: Any, request_id: str) -> None:
        """Bind a session's request to the replica that its turn is to go to, if it is bound to none
        and there is something to say.
        """
        session_id = session_of(request_id)
        if not self.on or session_id == request_id:
            return
        bound = pool.get_bound_replica_id(request_id)
        if bound is not None and pool.is_replica_available(bound):
            return  # an update of a request goes where the request is
        book, counted = self.plane.replicas, not is_warmup(request_id)
        if not self.plane.monitor.switches.replicas:
            if counted:
                book.left_to_host("off")
            return
        if pool.is_distributed:
            replica_ids = [replica_id for _, replica_id in pool._collect_serviceable_replicas()]
        else:
            replica_ids = pool.available_replica_ids()
        now_s = self.plane.now_s()
        chosen = book.choose(session_id, request_id, replica_ids, now_s, counted=counted)
        if chosen is None:
            return
        if pool.is_distributed:
            address = pool._client_input_addr(pool.clients[chosen])
            if address is not None:
                pool.bind(request_id, address)
        else:
            pool._request_bindings[request_id] = chosen

    def ahead(self, request_id: str) -> None:
        """Pick the replica of a request that is about to be made: its prompt depends on it."""
        if self.on:
            self.pool.preselect_replica_id(request_id)

    def scope(self, request_id: str, prompt: MutableMapping[str, Any]) -> None:
        """Make the multimodal keys of ``prompt`` those of the replica that it goes to. May run on
        any thread.
        """
        if not self.on or not prompt.get("multi_modal_data"):
            return
        replica_id = self.pool.get_bound_replica_id(request_id)
        if replica_id is not None:
            self._scoper._ensure_stage_replica_mm_uuids(
                prompt, stage_id=THINKER, replica_id=replica_id
            )

    def submitted(self, request_id: str, request: Any, *, session_owned: bool) -> None:
        """A request has left for the first stage."""
        replica_id = self.pool.get_bound_replica_id(request_id)
        if not self.on or replica_id is None:
            return
        tokens = len(getattr(request, "prompt_token_ids", None) or ())
        book, now_s = self.plane.replicas, self.plane.now_s()
        if not session_owned:
            book.sent(request_id, replica_id, tokens, now_s)
            return
        session_id = session_of(request_id)
        left = book.submitted(session_id, request_id, replica_id, tokens, now_s)
        if left is not None:
            moved = Event(EventKind.MOVED, session_id, now_s)
            self.plane.monitor.tell((THINKER, left), moved)

    def answered(self, replica_id: int, output: Any, request_id: str) -> None:
        """The first stage has output for a session's request."""
        prompt, made = getattr(output, "prompt_token_ids", None), output.outputs
        if self.on and prompt and made and not is_warmup(request_id):
            self.plane.replicas.answered(
                session_of(request_id),
                request_id,
                replica_id,
                len(prompt),
                getattr(output, "num_cached_tokens", None) or 0,
                len(made[0].token_ids),
            )


def _scoper(pool: Any) -> Any:
    """The host's own method, with what it reads of its engine."""
    expect(
        callable(getattr(AsyncOmniEngine, "_ensure_stage_replica_mm_uuids", None)),
        "AsyncOmniEngine._ensure_stage_replica_mm_uuids is gone",
    )
    engine = object.__new__(AsyncOmniEngine)
    config = pool.stage_vllm_config
    engine.stage_vllm_configs = [config]
    engine.model = str(getattr(getattr(config, "model_config", None), "model", ""))
    return engine
