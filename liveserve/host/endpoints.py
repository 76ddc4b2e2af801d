"""Our routes on the host's API server: ``/liveserve/sessions``, ``pressure`` and ``switches``.

Entry point of group ``vllm.endpoint_plugins`` (vllm/plugins/endpoint_plugins/interface.py); the
host loads it where ``VLLM_PLUGINS`` names ``liveserve``, which ``liveserve serve`` sees to.
"""

from __future__ import annotations

import time
from typing import Annotated, Any

from fastapi import APIRouter, FastAPI, HTTPException, Query, Request

from liveserve.config import ConfigError, from_env
from liveserve.events import Batch, boot_id, decode_reply, encode
from liveserve.host.engine import METHOD
from liveserve.plane import InteractionPlane, current_plane, engine_report

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
                return await self._plain_pressure(detail)
            plane = _plane()
            return await plane.call(plane.pressure(detail=detail, timeout_s=timeout_s))

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

        app.include_router(router)

    async def init_state(self, engine_client: Any, state: Any, args: Any) -> None:
        core = getattr(engine_client, "engine_core", None)
        self._engine_client = core if hasattr(core, "call_utility_async") else None

    async def _plain_pressure(self, detail: bool) -> dict[str, object]:
        """Plain vLLM has one engine and no sessions to tell it about."""
        batch = Batch(boot_id(), time.monotonic(), 0, [], views=[], detail=detail)
        raw = await self._engine_client.call_utility_async(METHOD, encode(batch))
        return {"engines": [engine_report(0, 0, decode_reply(bytes(raw)), detail=detail)]}
