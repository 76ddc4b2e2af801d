"""LiveServe over vLLM-Omni's autoregressive schedulers (thinker, talker).

Bases are ordered so that `LiveRound.schedule` runs after Omni's queue work and right before
vLLM's core loop. Preempting is unsafe in these stages: KV is reserved ahead instead.
"""

from __future__ import annotations

from vllm_omni.core.sched.omni_ar_scheduler import OmniARAsyncScheduler, OmniARScheduler

from liveserve.host.lookahead import Lookahead
from liveserve.host.reserve import ReservedRound
from liveserve.host.scheduler_mixin import AsyncByConfig, LiveSteps


class LiveARScheduler(AsyncByConfig, Lookahead, LiveSteps, OmniARScheduler, ReservedRound):
    """`OmniARScheduler`, observed."""


class LiveARAsyncScheduler(LiveARScheduler, OmniARAsyncScheduler, ReservedRound):
    """`OmniARAsyncScheduler`, observed."""


LiveARScheduler.async_class = LiveARAsyncScheduler
