"""One simulated run, and what came of it.

``simulate(workload, costs, system, config, seed)`` is a pure function: the same arguments give the
same result, to the last digit.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field
from multiprocessing import get_context
from typing import Any, NamedTuple

from liveserve.bench.metrics import aggregate, percentiles
from liveserve.bench.records import ResponseRecord, SessionRecord
from liveserve.bench.simulator.model import (
    CostModel,
    SimConfig,
    System,
    Workload,
    check_costs,
    check_workload,
)
from liveserve.bench.simulator.model import (
    system as named_system,
)
from liveserve.bench.simulator.world import Sample, World


@dataclass
class Result:
    """A run.

    Attributes:
        responses, sessions: as a measured run's (`liveserve.bench.records`).
        metrics: those of `liveserve.bench.metrics.aggregate`, and `extra_metrics`.
        run_s: what the run took, in seconds of this machine.
        samples: pools and queues over time, where `SimConfig.timeline_s` asks for them.
    """

    workload: str
    costs: str
    system: str
    seed: int
    responses: list[ResponseRecord]
    sessions: list[SessionRecord]
    metrics: dict[str, Any]
    run_s: float
    samples: list[Sample] = field(default_factory=list)


class Job(NamedTuple):
    """Arguments of one `simulate`."""

    workload: Workload
    costs: CostModel
    system: System
    config: SimConfig
    seed: int


def simulate(
    workload: Workload,
    costs: CostModel,
    system: System | str,
    config: SimConfig | None = None,
    seed: int = 0,
) -> Result:
    """Let ``workload`` be served by ``system``.

    Raises:
        ModelError: an argument makes no sense; names the field.
    """
    config = config or SimConfig()
    if isinstance(system, str):
        system = named_system(system)
    began_s = time.perf_counter()
    world = run_world(workload, costs, system, config, seed)
    run_s = time.perf_counter() - began_s
    return Result(
        workload.name,
        costs.name,
        system.name,
        seed,
        world.records,
        world.sessions,
        world_metrics(world),
        run_s,
        world.samples,
    )


def world_metrics(world: World) -> dict[str, Any]:
    """The metrics of a world that has run."""
    config = world.config
    starts_s = [s.start_s for s in world.sessions]
    ends_s = [s.end_s if s.end_s is not None else world.now_s for s in world.sessions]
    span_s = max(ends_s, default=0.0) - min(starts_s, default=0.0)
    metrics = aggregate(
        world.records,
        world.sessions,
        span_s=span_s,
        max_gap_s=config.max_gap_s,
        ttfp_slo_s=config.ttfp_slo_s,
        stage_tokens={
            "0": sum(engine.tokens for engine in world.thinkers),
            "1": sum(engine.tokens for engine in world.talkers),
        },
        stage_made={
            stage: asdict(totals) for stage, totals in sorted(world.tracker.totals.stages.items())
        },
        codec_frame_rate_hz=world.costs.frame_rate_hz,
    )
    return metrics | extra_metrics(world, span_s)


def run_world(
    workload: Workload, costs: CostModel, system: System, config: SimConfig, seed: int
) -> World:
    """A world that has run. The arguments are checked first."""
    check_workload(workload)
    check_costs(costs)
    world = World(workload, costs, system, config, seed)
    # A run makes few cycles and many objects: looking for the former costs a fifth of it.
    enabled = gc.isenabled()
    gc.disable()
    try:
        world.run()
    finally:
        if enabled:
            gc.enable()
    return world


def extra_metrics(world: World, span_s: float) -> dict[str, Any]:
    """What only a simulation can see.

    ``lead_*``: how far generation ran ahead of the listener when audio arrived, per answer on
    average, in listener seconds. ``reload_*``: what a turn waited for KV on its first-token path.
    ``history_*``: where the histories of turns came from, in tokens.
    """
    pools = [engine.pool for engine in world.thinkers]
    preloaders = [pool.preloader for pool in pools if pool.preloader is not None]
    loads = [wait_s for wait_s, blocks, _ in world.reloads if blocks]
    hit = sum(pool.hit_tokens for pool in pools)
    loaded = sum(pool.loaded_tokens for pool in pools)
    recomputed = sum(pool.recomputed_tokens for pool in pools)
    past = hit + loaded + recomputed

    def busy(engines: Sequence[Any]) -> float | None:
        return sum(e.busy_s for e in engines) / (len(engines) * span_s) if span_s else None

    samples = world.samples
    blocks = sum(pool.total for pool in pools)
    residency: dict[str, Any] = {}
    if samples:
        residency = {
            "gpu_used_mean_fraction": sum(s.gpu_used_blocks for s in samples)
            / (len(samples) * blocks),
            "gpu_cached_mean_fraction": sum(s.gpu_cached_blocks for s in samples)
            / (len(samples) * blocks),
            "dram_blocks_mean": sum(s.dram_blocks for s in samples) / len(samples),
        }
    return {
        **percentiles("lead", (mean_s for mean_s, _ in world.leads_s)),
        **percentiles("lead_max", (max_s for _, max_s in world.leads_s)),
        **percentiles("reload", loads),
        "reloads": len(loads),
        "reload_total_s": sum(loads),
        "history_hit_tokens": hit,
        "history_loaded_tokens": loaded,
        "history_recomputed_tokens": recomputed,
        "prefill_tokens_saved_fraction": (hit + loaded) / past if past else None,
        "preloads": sum(p.totals.admitted for p in preloaders),
        "preloads_refused": sum(sum(p.totals.refused.values()) for p in preloaders),
        "preload_hits": sum(p.totals.hits for p in preloaders),
        "preload_late": sum(p.totals.late + p.totals.short for p in preloaders),
        "preloaded_blocks": sum(pool.preloaded_blocks for pool in pools),
        "evicted_blocks": sum(pool.evicted for pool in pools),
        "preempted": sum(e.preempted for e in (*world.thinkers, *world.talkers)),
        "stalled_steps": sum(e.stalled for e in (*world.thinkers, *world.talkers)),
        "thinker_busy_fraction": busy(world.thinkers),
        "talker_busy_fraction": busy(world.talkers),
        "code2wav_busy_fraction": busy(world.vocoders),
        "steps": sum(e.steps for e in world.engines),
        "rounds": sum(e.rounds for e in world.engines),
        "policy_errors": sum(e.runtime.errors for e in world.engines if e.runtime is not None),
        "prefill_tokens": world.prefilled,
        **residency,
    }


def simulate_all(
    jobs: Sequence[Job],
    workers: int = 1,
    done: Callable[[str], None] | None = None,
    keep: Callable[[Result], Any] = lambda result: result,
) -> list[Any]:
    """Every job, in ``workers`` processes, in the order of ``jobs``.

    Args:
        done: told of each one that is finished.
        keep: what of a result is wanted; a function that a process can be sent. Records of a large
            run take longer to send than to make.
    """
    if workers <= 1 or len(jobs) <= 1:
        results = []
        for job in jobs:
            results.append(keep(simulate(*job)))
            if done is not None:
                done(job.system.name)
        return results
    found: dict[int, Any] = {}
    with ProcessPoolExecutor(min(workers, len(jobs)), mp_context=get_context("fork")) as pool:
        # LiveServe's take longest: the others fill up what is left at the end.
        order = sorted(range(len(jobs)), key=lambda index: not jobs[index].system.live)
        futures = {pool.submit(_one, jobs[index], keep): index for index in order}
        for future in as_completed(futures):
            index = futures[future]
            found[index] = future.result()
            if done is not None:
                done(jobs[index].system.name)
    return [found[index] for index in range(len(jobs))]


def _one(job: Job, keep: Callable[[Result], Any]) -> Any:
    return keep(simulate(*job))


def metrics_of(result: Result) -> dict[str, Any]:
    """For `simulate_all`: the metrics alone."""
    return result.metrics
