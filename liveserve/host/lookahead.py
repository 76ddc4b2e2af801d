"""Seam: a stage looks for its requests' next inputs before it schedules, not while it computes.

vLLM-Omni's chunk adapter asks for a request's next chunk in the round after its last step and
finds it one round later, so that a talker runs each request in every other step, even where the
thinker is ahead. `Lookahead` gives the adapter one more tick (its own two public calls) in front of
the round, and reads what is there: in this thread where chunks are in shared memory, since the
adapter's own thread may have to wait for a core; else it gives that thread a moment. What is
computed does not change.

Only for synchronous scheduling, where a round follows the output of the step before it.
"""

from __future__ import annotations

import threading
import time
from typing import Any

from vllm_omni.distributed.omni_connectors.connectors.shm_connector import SharedMemoryConnector

from liveserve.host.seam import expect, install
from liveserve.runtime import StageRuntime

# The adapter's thread needs a few tenths of a millisecond per chunk that is there.
_FIRST_WAIT_S = 0.001
_LONGEST_WAIT_S = 0.005
_SLICE_S = 0.0002
_USED = (
    "process_pending_chunks",
    "restore_queues",
    "connector",
    "_pending_load_reqs",
    "_registered_load_entries",
    "_poll_single_request",
)


def _one_at_a_time(adapter: Any) -> None:
    """Let two threads poll ``adapter``. The host's own check on commit drops a chunk that both have
    read; the lock keeps one from opening what the other is about to unlink, which logs an error.
    """
    lock, poll = threading.Lock(), adapter._poll_single_request

    def locked(entry: Any) -> bool:
        with lock:
            return poll(entry)

    adapter._poll_single_request = locked


class Lookahead:
    """Goes before the host's autoregressive scheduler in the bases."""

    liveserve: StageRuntime | None
    chunk_transfer_adapter: Any
    scheduler_config: Any
    waiting: Any
    running: list[Any]
    requests: dict[str, Any]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._liveserve_reads_chunks = False
        self._liveserve_looks_ahead = install("chunk look-ahead", self._attach_adapter)

    def _attach_adapter(self) -> None:
        adapter = self.chunk_transfer_adapter
        if adapter is None or not getattr(adapter, "receives_chunks", False):
            return
        for name in _USED:
            expect(hasattr(adapter, name), f"the chunk adapter's {name} is gone")
        if isinstance(adapter.connector, SharedMemoryConnector):
            _one_at_a_time(adapter)
            self._liveserve_reads_chunks = True

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        live, adapter = self.liveserve, self.chunk_transfer_adapter
        if (
            live is not None
            and live.switches.lookahead
            and self._liveserve_looks_ahead
            and adapter is not None
            and adapter.receives_chunks
            and not self.scheduler_config.async_scheduling
        ):
            self._look_ahead(adapter)
        return super().schedule(*args, **kwargs)  # type: ignore[misc]

    def _look_ahead(self, adapter: Any) -> None:
        adapter.process_pending_chunks(self.waiting, self.running, scheduler_requests=self.requests)
        adapter.restore_queues(self.waiting, self.running, scheduler_requests=self.requests)
        if self._liveserve_reads_chunks:
            for entry in tuple(adapter._registered_load_entries.values()):
                adapter._poll_single_request(entry)
        else:
            self._wait_for(adapter._pending_load_reqs)

    def _wait_for(self, pending: Any) -> None:
        """Give the adapter's thread a moment for ``pending``, and more while chunks come."""
        now_s = time.monotonic()
        give_up_s, latest_s, left = now_s + _FIRST_WAIT_S, now_s + _LONGEST_WAIT_S, len(pending)
        while left and now_s < min(give_up_s, latest_s):
            time.sleep(_SLICE_S)
            now_s = time.monotonic()
            if len(pending) < left:  # they come: the others may too
                give_up_s = now_s + _FIRST_WAIT_S
            left = len(pending)
