"""LiveServe in a host scheduler: a look at every round and step, the host's order unchanged.

`LiveRound` is a cooperative base: in ``class X(HostScheduler, LiveRound)`` its `schedule` runs
after the host's own queue work and before vLLM's core loop. `LiveSteps` goes in front and sees
complete steps. Both do nothing while LiveServe is off.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request, RequestStatus

from liveserve.config import from_env
from liveserve.host.seam import install
from liveserve.host.sessions import session_of
from liveserve.host.stages import stage_info
from liveserve.runtime import StageRuntime

# Steps under way at once; more means that the host dropped some without telling us.
_MAX_STEPS_UNDER_WAY = 16


class SchedulerQueues:
    """`liveserve.runtime.Queues` over a vLLM scheduler.

    Reads `Scheduler.requests`, which also holds what vLLM-Omni parks while it waits for a chunk.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler

    def running(self) -> Iterator[Request]:
        return (r for r in self._scheduler.requests.values() if r.status == RequestStatus.RUNNING)

    def waiting(self) -> Iterator[Request]:
        return (
            r
            for r in self._scheduler.requests.values()
            if r.status != RequestStatus.RUNNING and not r.is_finished()
        )

    def kv_blocks(self) -> tuple[int, int]:
        pool = self._scheduler.kv_cache_manager.block_pool
        # One block is the pool's null block: never free, never in use.
        total = pool.num_gpu_blocks - 1
        return total - pool.get_num_free_blocks(), total

    def kv_blocks_of(self, request: Any) -> int:
        ids = self._scheduler.kv_cache_manager.get_block_ids(request.request_id)
        return sum(len(group) for group in ids)


class LiveRound(Scheduler):
    """Ranks every request before the core loop of each round."""

    liveserve: StageRuntime | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        install("the scheduler", self._attach)

    def _attach(self) -> None:
        config = from_env()
        if config is not None:
            info = stage_info(self.vllm_config, self.kv_cache_config)
            self.liveserve = StageRuntime(info, config, SchedulerQueues(self), session_of)

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        if self.liveserve is not None:
            self.liveserve.round()
        return super().schedule(*args, **kwargs)


class LiveSteps:
    """Times steps and counts tokens. Goes before the host's class in the bases."""

    liveserve: StageRuntime | None

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        if self.liveserve is None:
            return super().schedule(*args, **kwargs)  # type: ignore[misc]
        began_s = self.liveserve.now_s()
        output = super().schedule(*args, **kwargs)  # type: ignore[misc]
        if output.total_num_scheduled_tokens:
            steps = self.__dict__.setdefault("_liveserve_steps", {})
            if len(steps) >= _MAX_STEPS_UNDER_WAY:
                steps.clear()
            steps[id(output)] = began_s
        return output

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        outputs = super().update_from_output(  # type: ignore[misc]
            scheduler_output, model_runner_output
        )
        if self.liveserve is not None:
            began_s = self.__dict__.get("_liveserve_steps", {}).pop(id(scheduler_output), None)
            if began_s is not None:
                sampled = getattr(model_runner_output, "sampled_token_ids", None) or ()
                self.liveserve.stepped(began_s, sum(map(len, sampled)))
        return outputs


class AsyncByConfig:
    """Lets one class name serve both kinds of engine: the host resolves the class by its name
    before it knows, and then constructs it, where `async_class` takes over if the engine
    schedules asynchronously.
    """

    async_class: type | None = None

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        vllm_config = kwargs.get("vllm_config", args[0] if args else None)
        is_async = vllm_config is not None and vllm_config.scheduler_config.async_scheduling
        return object.__new__(cls.async_class if is_async and cls.async_class else cls)
