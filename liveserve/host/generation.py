"""LiveServe over vLLM-Omni's one-shot generation scheduler (code2wav).

`OmniGenerationScheduler.schedule` is a loop of its own that batches every request with a chunk. A
round leaves it those that `liveserve.scheduler.one_shot` picks and sets the others aside. The
loop reaches vLLM's only as a fallback, hence the round goes in front.
"""

from __future__ import annotations

from typing import Any

from vllm_omni.core.sched.omni_generation_scheduler import OmniGenerationScheduler

from liveserve.host.scheduler_mixin import LiveRound, LiveSteps
from liveserve.runtime import StageRuntime
from liveserve.scheduler.one_shot import Chunk, one_shot_batch

# Sleep of an engine whose chunks all wait for another stage's first audio.
_DOZE_S = 0.002


class LiveGenerationScheduler(LiveSteps, OmniGenerationScheduler, LiveRound):
    """`OmniGenerationScheduler` with urgent chunks first and bounded steps."""

    running: list[Any]
    max_num_running_reqs: int

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        live = self.liveserve
        if live is None:
            return super().schedule(*args, **kwargs)
        live.round()
        self._apply(live.plan())
        ready = self._ready(live)
        if not ready:
            return super().schedule(*args, **kwargs)
        taken = self._take(live, ready)
        running, limit = self.running, self.max_num_running_reqs
        aside = [r for r in running if r.request_id in ready and r.request_id not in taken]
        new = sum(r.request_id in taken for r in self.waiting)
        if new < sum(r.request_id in ready for r in self.waiting):
            # Those that are taken come first in the queue: admit no more than them.
            self.max_num_running_reqs = min(limit, len(running) - len(aside) + new)
        else:
            self.max_num_running_reqs = limit - len(aside)
        self.running = [request for request in running if request not in aside]
        try:
            output = super().schedule(*args, **kwargs)
        finally:
            self.max_num_running_reqs = limit
            self.running = self.running + aside
        if not taken and not output.total_num_scheduled_tokens:
            live.nap(_DOZE_S)
        return output

    def _ready(self, live: StageRuntime) -> dict[str, Any]:
        """Requests whose next chunk is here; none where we do not choose."""
        adapter = self.chunk_transfer_adapter
        if not live.switches.order or live.ring.stale or adapter is None:
            return {}
        ready = getattr(adapter, "requests_with_ready_chunks", None)
        loaded = getattr(adapter, "_finished_load_reqs", None)
        if ready is None or loaded is None:
            return {}
        return {
            request.request_id: request
            for queue in (self.running, self.waiting)
            for request in queue
            if request.request_id in live.ranks
            and (request.request_id in ready or request.request_id in loaded)
        }

    def _take(self, live: StageRuntime, ready: dict[str, Any]) -> set[str]:
        order = self._liveserve_order
        chunks = []
        for name in sorted(ready, key=lambda n: order.get(n, len(order))):
            ranked = live.ranks[name]
            size = max(1, len(ready[name].prompt_token_ids or ()))
            chunks.append(Chunk(name, ranked.urgency, ranked.buffer_s, size, live.can_wait(name)))
        limit_s = live.config.generation_step_s
        batch = set(one_shot_batch(chunks, live.token_s, limit_s, live.first_audio_waits()))
        # The host admits from the front of its queue only: a gap there ends the batch.
        ended = False
        for request in self.waiting:
            name = request.request_id
            ended = ended or (name in ready and name not in batch)
            if ended:
                batch.discard(name)
        return batch
