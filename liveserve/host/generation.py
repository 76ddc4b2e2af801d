"""LiveServe over vLLM-Omni's one-shot generation scheduler (code2wav).

`OmniGenerationScheduler.schedule` is a loop of its own that batches every request with a chunk, and
a batch takes as long as its chunks together. So when a chunk is there that a listener waits for
(U0, U1), chunks that can wait are set aside for the round: their listeners have more buffer than
such a round takes. The loop reaches vLLM's only as a fallback, hence the round goes in front.
"""

from __future__ import annotations

from typing import Any

from vllm_omni.core.sched.omni_generation_scheduler import OmniGenerationScheduler

from liveserve.host.scheduler_mixin import LiveRound, LiveSteps
from liveserve.scheduler.urgency import Urgency


class LiveGenerationScheduler(LiveSteps, OmniGenerationScheduler, LiveRound):
    """`OmniGenerationScheduler` with urgent chunks first."""

    running: list[Any]
    max_num_running_reqs: int

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        if self.liveserve is None:
            return super().schedule(*args, **kwargs)
        self.liveserve.round()
        self._apply(self.liveserve.plan())
        aside = self._can_wait()
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

    def _can_wait(self) -> list[Any]:
        """Running requests whose chunks may wait a round, if an urgent chunk is ready."""
        live, adapter = self.liveserve, self.chunk_transfer_adapter
        if live is None or not live.switches.order or live.ring.stale or adapter is None:
            return []
        ready = getattr(adapter, "requests_with_ready_chunks", None)
        loaded = getattr(adapter, "_finished_load_reqs", None)
        if ready is None or loaded is None:
            return []
        urgent, others = False, []
        for request_id, ranked in live.ranks.items():
            if request_id not in ready and request_id not in loaded:
                continue
            if ranked.urgency is Urgency.U2:
                others.append(request_id)
            else:
                urgent = True
        if not urgent or not others:
            return []
        patient = live.patient(others)
        return [request for request in self.running if request.request_id in patient]
