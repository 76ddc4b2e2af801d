"""Seam: a stage looks for its requests' next inputs before it schedules, not while it computes.

vLLM-Omni's chunk adapter asks for a request's next chunk in the round after its last step and
finds it one round later, so that a talker runs each request in every other step, even where the
thinker is ahead. `Lookahead` gives the adapter one more tick (its own two public calls) in front of
the round and a moment for chunks that are there already. What is computed does not change.

Only for synchronous scheduling, where a round follows the output of the step before it.
"""

from __future__ import annotations

import time
from typing import Any

from liveserve.host.seam import expect, install
from liveserve.runtime import StageRuntime

# The adapter's thread needs a few tenths of a millisecond per chunk that is there.
_FIRST_WAIT_S = 0.001
_LONGEST_WAIT_S = 0.005
_SLICE_S = 0.0002


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
        self._liveserve_looks_ahead = install("chunk look-ahead", self._check_adapter)

    def _check_adapter(self) -> None:
        adapter = self.chunk_transfer_adapter
        if adapter is None or not getattr(adapter, "receives_chunks", False):
            return
        for name in ("process_pending_chunks", "restore_queues", "_pending_load_reqs"):
            expect(hasattr(adapter, name), f"the chunk adapter's {name} is gone")

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
        pending = adapter._pending_load_reqs
        now_s = time.monotonic()
        give_up_s, latest_s, left = now_s + _FIRST_WAIT_S, now_s + _LONGEST_WAIT_S, len(pending)
        while left and now_s < min(give_up_s, latest_s):
            time.sleep(_SLICE_S)
            now_s = time.monotonic()
            if len(pending) < left:  # they come: the others may too
                give_up_s = now_s + _FIRST_WAIT_S
            left = len(pending)
