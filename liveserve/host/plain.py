"""For plain vLLM: ``--scheduler-cls liveserve.host.plain.LiveScheduler``."""

from __future__ import annotations

from vllm.v1.core.sched.async_scheduler import AsyncScheduler

from liveserve.host.scheduler_mixin import AsyncByConfig, LiveRound, LiveSteps


class LiveScheduler(AsyncByConfig, LiveSteps, LiveRound):
    """vLLM's scheduler, observed."""


class LiveAsyncScheduler(LiveScheduler, AsyncScheduler, LiveRound):
    """vLLM's asynchronous scheduler, observed."""


LiveScheduler.async_class = LiveAsyncScheduler
