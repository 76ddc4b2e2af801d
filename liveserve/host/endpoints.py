"""Our routes on the host's API server: ``/liveserve/sessions``, ``pressure``, ``kv``, ``switches``.

Entry point of group ``vllm.endpoint_plugins`` (vllm/plugins/endpoint_plugins/interface.py); the
host loads it where ``VLLM_PLUGINS`` names ``liveserve``, which ``liveserve serve`` sees to.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Annotated, Any

from fastapi import APIRouter, FastAPI, HTTPException, Query, Request

from liveserve.config import ConfigError, from_env
from liveserve.events import Batch, Prefetch, Reply, boot_id, decode_reply, encode
from liveserve.host import prefetch
from liveserve.host.engine import METHOD
from liveserve.plane import InteractionPlane, current_plane, engine_report, kv_report

ProfileS = Annotated[float, Query(gt=0, le=3600)]
TimeoutS = Annotated[float, Query(gt=0, le=30)]


def _plane() -> InteractionPlane:
    plane = current_plane()
    if plane is None:
        raise HTTPException(503, "LiveServe's interaction plane is not running in this server")
    return plane


class LiveServeEndpoints:
    """The host constructs one per server and calls both methods."""

    name = "liveserve"
    required_tasks = None

    def __init__(self) -> None:
        self._engine_client: Any = None
        self._client: Any = None

    def attach_router(self, app: FastAPI) -> None:
        if from_env() is None:
            return
        router = APIRouter(prefix="/liveserve", tags=["liveserve"])

        @router.get("/sessions")
        async def sessions() -> dict[str, object]:
            """Live sessions: phase, playback position and buffer; totals since the start."""
            plane = _plane()
            return await plane.call(plane.sessions())

        @router.get("/pressure")
        async def pressure(detail: bool = False, timeout_s: TimeoutS = 2.0) -> dict[str, object]:
            """Each stage engine's snapshot; ``detail=1`` asks every engine now and adds one row
            per request (P, class, age) and per session view.
            """
            if current_plane() is None and self._engine_client is not None:
                reply = await self._plain(detail=detail)
                return {"engines": [engine_report(0, 0, reply, detail=detail)]}
            plane = _plane()
            return await plane.call(plane.pressure(detail=detail, timeout_s=timeout_s))

        @router.get("/kv")
        async def kv(timeout_s: TimeoutS = 2.0) -> dict[str, object]:
            """Each stage engine's KV: policy in force, totals by tier, hits, evictions, copies,
            and which session has how many blocks where.
            """
            if current_plane() is None and self._engine_client is not None:
                return {"engines": [kv_report(0, 0, await self._plain(detail=True))]}
            plane = _plane()
            return await plane.call(plane.kv(timeout_s=timeout_s))

        @router.post("/profile")
        async def profile(seconds: ProfileS = 60.0, after: int = 0) -> dict[str, object]:
            """Note for ``seconds`` more where turns spend their time, and tell of the turns that
            are done, from number ``after`` + 1 on (see `liveserve.profile`).
            """
            plane = _plane()
            return await plane.call(plane.profile(seconds=seconds, after=after))

        @router.get("/switches")
        async def switches() -> dict[str, object]:
            """Which mechanisms are on."""
            plane = _plane()
            return await plane.call(plane.switches())

        @router.post("/switches")
        async def flip(request: Request) -> dict[str, object]:
            """Flip mechanisms in every engine, e.g. ``{"pace": false}``; no restart."""
            plane = _plane()
            try:
                return await plane.call(plane.switches(await request.body()))
            except ConfigError as exc:
                raise HTTPException(400, str(exc)) from None

        # vLLM-Omni has its engine client in the app's state alone.
        prefetch.add_route(
            router,
            self._prefetch,
            lambda: self._client or getattr(app.state, "engine_client", None),
        )
        app.include_router(router)

    async def init_state(self, engine_client: Any, state: Any, args: Any) -> None:
        self._client = engine_client
        core = getattr(engine_client, "engine_core", None)
        self._engine_client = core if hasattr(core, "call_utility_async") else None

    async def _prefetch(self, asked: Prefetch) -> None:
        if current_plane() is not None or self._engine_client is None:
            plane = _plane()
            await plane.call(plane.prefetch(asked))
        elif asked.compute:
            raise ValueError("prefetch: compute needs an omni server with duplex sessions")
        elif asked.token_ids:
            await self._plain(detail=False, asked=[asked])
        else:
            raise KeyError(asked.session_id)

    async def _plain(self, *, detail: bool, asked: Sequence[Prefetch] = ()) -> Reply:
        """Plain vLLM has one engine and no sessions to tell it about."""
        batch = Batch(
            boot_id(), time.monotonic(), 0, [], views=[], detail=detail, prefetch=list(asked)
        )
        return decode_reply(
            bytes(await self._engine_client.call_utility_async(METHOD, encode(batch)))
        )
