"""Seam: one method on the host's `EngineCore`, reached by the UTILITY message.

The host looks the method up by name (vllm/v1/engine/core.py, `_handle_client_request`), in order
with ADD and ABORT, between steps, also when the engine is idle.
"""

from __future__ import annotations

from typing import Any

from liveserve.events import PressureSnapshot, Reply, encode
from liveserve.host.seam import expect

METHOD = "liveserve_exchange"


def exchange(engine_core: Any, payload: bytes) -> bytes:
    """Apply an encoded Batch in this engine; answer with an encoded Reply."""
    runtime = getattr(engine_core.scheduler, "liveserve", None)
    if runtime is None:  # a stage with a scheduler of its own
        return encode(Reply(PressureSnapshot(attached=False)))
    return runtime.exchange(bytes(payload))


def install() -> None:
    from vllm.v1.engine.core import EngineCore, EngineCoreProc

    expect(
        hasattr(EngineCoreProc, "_handle_client_request"),
        "EngineCoreProc._handle_client_request is gone",
    )
    current = getattr(EngineCore, METHOD, None)
    expect(current in (None, exchange), f"EngineCore.{METHOD} is taken")
    setattr(EngineCore, METHOD, exchange)
