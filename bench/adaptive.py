"""``liveserve bench adaptive``: α and β that follow the load, beside every fixed choice of them.

`liveserve.scheduler.adapt` is driven from what the talkers see; the simulated world is the same
otherwise. It is compared with each of the levels held fixed: the best of them, chosen with
hindsight, is the offline optimum. No engine adapts its weights yet.

The load of the command: one replica of each stage whose talker has KV for few answers. First more
users than that, who never interrupt: what runs ahead should finish. Then fewer, who always do.
"""

from __future__ import annotations

import argparse
import math
import shlex
import sys
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from liveserve.bench.result_file import build_result, ratio_of, write_result
from liveserve.bench.simulator.costs import load_costs
from liveserve.bench.simulator.model import (
    TALKER,
    CostModel,
    ModelError,
    SimConfig,
    Workload,
    check_costs,
    check_workload,
    system,
)
from liveserve.bench.simulator.simulate import world_metrics
from liveserve.bench.simulator.workloads import build, spec_of
from liveserve.bench.simulator.world import World
from liveserve.bench.terminal import print_table, progress
from liveserve.config import LiveServeConfig, StageConfig
from liveserve.scheduler.adapt import Bounds, Observation, State, adapt, weights_at
from liveserve.scheduler.policy_config import PolicyConfig


class Outcome(NamedTuple):
    """A run. ``levels``: (time, level) at the end of every window."""

    metrics: dict[str, Any]
    levels: list[tuple[float, int]]


class _Driver:
    """Looks at a world's talkers every ``look_s``, and adapts them every ``window_s``."""

    def __init__(
        self, world: World, sessions: int, bounds: Bounds, window_s: float, look_s: float
    ) -> None:
        self.world, self._sessions, self.bounds = world, sessions, bounds
        self.window_s, self.look_s = window_s, look_s
        self.state = State()
        self.levels: list[tuple[float, int]] = []
        self._looks = self._waited = 0
        self._usage = 0.0
        self._window_end_s = window_s
        self._made_s = self._wasted_s = 0.0
        self._ended = 0
        world.at(look_s, self._look, None)

    def _look(self, now_s: float, _: None) -> None:
        talkers = self.world.talkers
        self._looks += 1
        self._waited += any(not r.blocked for t in talkers for r in t.waiting)
        self._usage += sum(t.pool.used / t.pool.total for t in talkers) / len(talkers)
        if now_s >= self._window_end_s:
            self._window(now_s)
        if self.world.users or len(self.world.sessions) < self._sessions:
            self.world.at(now_s + self.look_s, self._look, None)

    def _window(self, now_s: float) -> None:
        world = self.world
        made = world.tracker.totals.stages.get(TALKER)
        made_s, wasted_s = (made.made_s, made.wasted_s) if made is not None else (0.0, 0.0)
        ended = sum(a.stopped_s is not None for a in world.records)
        new_s = made_s - self._made_s
        runtime = world.talkers[0].runtime
        seen = Observation(
            ended - self._ended,
            runtime.barge_in_rate if runtime is not None else None,
            self._waited / self._looks,
            (wasted_s - self._wasted_s) / new_s if new_s > 0 else None,
            self._usage / self._looks,
        )
        before, self.state = self.state, adapt(self.state, seen, self.bounds)
        self.levels.append((now_s, self.state.level))
        if self.state.level != before.level:
            retune(world, self.state.level, now_s)
        self._made_s, self._wasted_s, self._ended = made_s, wasted_s, ended
        self._looks = self._waited = 0
        self._usage = 0.0
        self._window_end_s = now_s + self.window_s


def retune(world: World, level: int, now_s: float) -> None:
    """The talkers' α and β as of ``level``, from their next round."""
    given = world.live_config.stages.get(TALKER) or StageConfig()
    base = PolicyConfig()
    alpha, beta = weights_at(
        level,
        msgspec.structs.replace(
            base,
            alpha=base.alpha if given.alpha is None else given.alpha,
            beta=base.beta if given.beta is None else given.beta,
        ),
    )
    stage = msgspec.structs.replace(given, alpha=alpha, beta=beta)
    config = msgspec.structs.replace(
        world.live_config, stages={**world.live_config.stages, TALKER: stage}
    )
    for talker in world.talkers:
        if talker.runtime is not None:
            talker.runtime.retune(config)
            talker.kick(now_s)


def run_level(
    workload: Workload,
    costs: CostModel,
    config: SimConfig,
    seed: int,
    level: int | None,
    *,
    bounds: Bounds | None = None,
    window_s: float = 2.5,
    look_s: float = 0.25,
) -> Outcome:
    """LiveServe with its α and β at ``level`` all the time; None: adapted online.

    Raises:
        ModelError: an argument makes no sense; names the field.
        ValueError: ``bounds`` make none.
    """
    check_workload(workload)
    check_costs(costs)
    bounds = bounds or Bounds()
    bounds.check()
    world = World(workload, costs, system("liveserve"), config, seed)
    driver = (
        _Driver(world, len(workload.sessions), bounds, window_s, look_s) if level is None else None
    )
    if level:
        retune(world, level, 0.0)
    world.run()
    return Outcome(world_metrics(world), driver.levels if driver is not None else [])


def shifted(first: Workload, second: Workload, at_s: float) -> Workload:
    """The users of ``first``, and from ``at_s`` on those of ``second``: a load that shifts."""
    count = 1 + max(session.index for session in first.sessions)
    later = tuple(
        msgspec.structs.replace(s, index=s.index + count, arrival_s=s.arrival_s + at_s)
        for s in second.sessions
    )
    return Workload(f"{first.name}, then {second.name}", (*first.sessions, *later))


# ---- command -------------------------------------------------------------------------------

_SHIFT_S = 260.0
_COSTS = {
    "thinker.replicas": 1,
    "talker.replicas": 1,
    "code2wav.replicas": 1,
    "talker.kv_blocks": 700,
    "talker_sees_prompt": False,
    "max_answer_frames": 900,
}
# Ratios of losses are of values with this added: less than it is worth nothing.
_FLOOR = {"ttfp_p90_s": 0.02, "generated_waste_fraction": 0.01}


def load_shift(seed: int, scale: float = 1.0) -> tuple[Workload, CostModel, SimConfig]:
    """The command's users, deployment and settings."""
    parts = []
    for sessions, rate, p_barge_in in ((70, 0.32, 0.0), (90, 0.3, 1.0)):
        spec = spec_of(
            "interaction",
            sessions=max(2, round(scale * sessions)),
            rate=rate,
            p_barge_in=p_barge_in,
            seed=seed,
            arrivals="poisson",
            turns=2,
            answer_tokens=100,
            max_answer_tokens=211,
            gap_s=1.0,
            jitter_s=0.02,
        )
        parts.append(build(spec))
    # With KV reserved ahead a pool never fills up to the default watermark.
    live = LiveServeConfig(stages={TALKER: StageConfig(kv_high_watermark=0.1)})
    costs = load_costs("qwen3-omni-h200", _COSTS)
    return shifted(parts[0], parts[1], scale * _SHIFT_S), costs, SimConfig(live=live)


def loss(metrics: dict[str, Any], default: dict[str, Any]) -> float:
    """Logarithms of the ratios of P90 TTFP and waste to those of ``default``, together."""
    return sum(
        math.log((metrics[name] + floor) / (default[name] + floor))
        for name, floor in _FLOOR.items()
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seeds", type=int, default=2, metavar="N", help="(%(default)s)")
    # The bounds' defaults were chosen on seeds 0 and 1.
    parser.add_argument("--seed", type=int, default=2, help="the first (%(default)s)")
    parser.add_argument(
        "--scale", type=float, default=1.0, metavar="F", help="F times the users (%(default)s)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result file")


def run(args: argparse.Namespace) -> int:
    try:
        if args.seeds < 1 or args.seed < 0 or not 0 < args.scale <= 10:
            raise ModelError(
                "--seeds must be 1 or more, --seed 0 or more, --scale above 0 and at most 10"
            )
        most = Bounds().most
        levels = [0, *(level for level in range(-most, most + 1) if level), None]
        runs: dict[int | None, list[Outcome]] = {level: [] for level in levels}
        with progress("adaptive", args.seeds * len(levels)) as advance:
            for seed in range(args.seed, args.seed + args.seeds):
                users, costs, config = load_shift(seed, args.scale)
                for level in levels:
                    runs[level].append(run_level(users, costs, config, seed, level))
                    advance(_name(level))
    except ModelError as error:
        print(f"liveserve bench adaptive: {error}", file=sys.stderr)
        return 2
    losses = {
        level: sum(loss(o.metrics, d.metrics) for o, d in zip(of, runs[0], strict=True)) / len(of)
        for level, of in runs.items()
    }
    fixed = [level for level in levels if level is not None]
    best = min(fixed, key=lambda level: losses[level])
    lines = []
    for level in [*sorted(fixed), None]:
        means = [
            sum(o.metrics[name] for o in runs[level]) / args.seeds
            for name in ("ttfp_p90_s", "ttfp_mean_s", "generated_waste_fraction")
        ]
        note = " (offline optimum)" if level == best else ""
        lines.append(
            [
                _name(level) + note,
                f"{means[0]:.3f}",
                f"{means[1]:.3f}",
                f"{100 * means[2]:.2f}",
                f"{losses[level]:+.2f}",
            ]
        )
    columns = ["", "TTFP p90 s", "TTFP mean s", "waste %", "loss"]
    print_table("a load that shifts (simulated)", columns, lines)
    if args.json is not None:
        cases = [
            {
                "params": {"level": "adapted" if level is None else level, "seed": seed,
                           "scale": args.scale},
                "metrics": {**{k: o.metrics[k] for k in ("ttfp_p50_s", "ttfp_p90_s", "ttfp_mean_s",
                            "continuity_fraction", "generated_waste_fraction", "useful_rps")},
                            "moves": sum(a[1] != b[1] for a, b in zip(o.levels, o.levels[1:],
                                                                     strict=False))},
            }
            for level, of in runs.items()
            for seed, o in enumerate(of, args.seed)
        ]  # fmt: skip
        ratios = {}
        if losses[best] < 0:
            gain = losses[None] / losses[best]
            ratios["optimum_gain_fraction"] = ratio_of([gain], "higher")
        command = shlex.join(["liveserve", *sys.argv[1:]])
        result = build_result("adaptive", cases, command=command, ratios=ratios, simulated=True)
        write_result(args.json, result)
    return 0


def _name(level: int | None) -> str:
    return "adapted online" if level is None else f"level {level:+d}" if level else "defaults"
