"""LiveServe over vLLM-Omni's one-shot generation scheduler (code2wav).

`OmniGenerationScheduler.schedule` is a loop of its own that batches every request with a chunk, and
a batch takes about as long as its chunks one after another. So a round takes the most urgent chunks
up to a bounded step time, and while a listener waits for one (U0, U1), those that can wait do. The
loop reaches vLLM's only as a fallback, hence the round goes in front.
"""

from __future__ import annotations

from typing import Any

from vllm_omni.core.sched.omni_generation_scheduler import OmniGenerationScheduler

from liveserve.host.scheduler_mixin import LiveRound, LiveSteps
from liveserve.scheduler.urgency import Urgency


class LiveGenerationScheduler(LiveSteps, OmniGenerationScheduler, LiveRound):
    """`OmniGenerationScheduler` with urgent chunks first and bounded steps."""

    running: list[Any]
    max_num_running_reqs: int

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        if self.liveserve is None:
            return super().schedule(*args, **kwargs)
        self.liveserve.round()
        self._apply(self.liveserve.plan())
        aside = self._set_aside()
        if not aside:
            return super().schedule(*args, **kwargs)
        limit = self.max_num_running_reqs
        self.running = [request for request in self.running if request not in aside]
        # They keep their places: nobody is admitted instead of them.
        self.max_num_running_reqs = limit - len(aside)
        try:
            return super().schedule(*args, **kwargs)
        finally:
            self.max_num_running_reqs = limit
            self.running = self.running + aside

    def _set_aside(self) -> list[Any]:
        """Running requests whose chunks wait for another round."""
        live, adapter = self.liveserve, self.chunk_transfer_adapter
        if live is None or not live.switches.order or live.ring.stale or adapter is None:
            return []
        ready = getattr(adapter, "requests_with_ready_chunks", None)
        loaded = getattr(adapter, "_finished_load_reqs", None)
        if ready is None or loaded is None:
            return []
        ids = {name for name in live.ranks if name in ready or name in loaded}
        urgent = {name for name in ids if live.ranks[name].urgency is not Urgency.U2}
        running = {request.request_id for request in self.running}
        # New requests are not set aside; they take their share of the step.
        room = live.config.generation_step_s / live.request_s if live.request_s else len(ids)
        room = max(1, int(room)) - sum(name not in running for name in ids)
        aside = []
        for request in self.running:  # most urgent first
            name = request.request_id
            if name not in ids:
                continue
            if name in urgent:
                room -= 1
            elif (urgent or room <= 0) and live.can_wait(name):
                aside.append(request)
            else:
                room -= 1
        return aside
