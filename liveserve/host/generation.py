"""LiveServe over vLLM-Omni's one-shot generation scheduler (code2wav).

`OmniGenerationScheduler.schedule` is a loop of its own that reaches vLLM's only as a fallback, so
the round is observed in front of it.
"""

from __future__ import annotations

from typing import Any

from vllm_omni.core.sched.omni_generation_scheduler import OmniGenerationScheduler

from liveserve.host.scheduler_mixin import LiveRound, LiveSteps


class LiveGenerationScheduler(LiveSteps, OmniGenerationScheduler, LiveRound):
    """`OmniGenerationScheduler`, observed."""

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        if self.liveserve is not None:
            self.liveserve.round()
        return super().schedule(*args, **kwargs)
