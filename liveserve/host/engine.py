"""Seam: one method on the host's `EngineCore`, reached by the UTILITY message.

The host looks the method up by name (vllm/v1/engine/core.py, `_handle_client_request`), in order
with ADD and ABORT, between steps, also when the engine is idle. All three pass through the engine's
input queue, so an engine whose requests are all held can sleep on that.
"""

from __future__ import annotations

import queue
from typing import Any

from liveserve.events import PressureSnapshot, Reply, encode
from liveserve.host import seam
from liveserve.host.seam import expect
from liveserve.runtime import StageRuntime

METHOD = "liveserve_exchange"


def exchange(engine_core: Any, payload: bytes) -> bytes:
    """Apply an encoded Batch in this engine; answer with an encoded Reply."""
    runtime = getattr(engine_core.scheduler, "liveserve", None)
    if runtime is None:  # a stage with a scheduler of its own
        return encode(Reply(PressureSnapshot(attached=False)))
    if runtime.wait_for_message is None and hasattr(engine_core, "input_queue"):
        # Nothing is held before the first exchange, so this is in time.
        runtime.wait_for_message = runtime.nap
        seam.install("a sleeping engine", lambda: _sleep_on_messages(engine_core, runtime))
    return runtime.exchange(bytes(payload))


def _sleep_on_messages(engine_core: Any, runtime: StageRuntime) -> None:
    """Let ``runtime`` sleep until a message arrives, as the host's idle loop does
    (`EngineCoreProc._process_input_queue`), but leave the message for the host.
    """
    from vllm.v1.engine.core import EngineCoreProc

    inbox = engine_core.input_queue
    # An engine of a data-parallel group steps together with the others: it must not sleep alone.
    expect(
        type(engine_core).run_busy_loop is EngineCoreProc.run_busy_loop,
        "the engine has a loop of its own",
    )
    expect(type(inbox) is queue.Queue, "EngineCoreProc.input_queue is not a queue.Queue")

    def wait(seconds: float) -> None:
        with inbox.not_empty:
            if not inbox.queue:
                inbox.not_empty.wait(seconds)

    runtime.wait_for_message = wait


def install() -> None:
    from vllm.v1.engine.core import EngineCore, EngineCoreProc

    expect(
        hasattr(EngineCoreProc, "_handle_client_request"),
        "EngineCoreProc._handle_client_request is gone",
    )
    current = getattr(EngineCore, METHOD, None)
    expect(current in (None, exchange), f"EngineCore.{METHOD} is taken")
    setattr(EngineCore, METHOD, exchange)
