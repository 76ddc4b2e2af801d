"""LiveServe over vLLM-Omni's autoregressive schedulers (thinker, talker).

Bases are ordered so that `LiveRound.schedule` runs after Omni's queue work and right before
vLLM's core loop.
"""

from __future__ import annotations

from vllm_omni.core.sched.omni_ar_scheduler import OmniARAsyncScheduler, OmniARScheduler

from liveserve.host.scheduler_mixin import AsyncByConfig, LiveRound, LiveSteps


class LiveARScheduler(AsyncByConfig, LiveSteps, OmniARScheduler, LiveRound):
    """`OmniARScheduler`, observed."""


class LiveARAsyncScheduler(LiveARScheduler, OmniARAsyncScheduler, LiveRound):
    """`OmniARAsyncScheduler`, observed."""


LiveARScheduler.async_class = LiveARAsyncScheduler
