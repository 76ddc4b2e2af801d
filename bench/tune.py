"""``liveserve tune``: α, β, P_safe, holds and DRAM for a workload, found in the simulator.

A sweep: random settings within their ranges, then half as many near the best of them. Every one
serves the same users. What is wanted is little of three things: *waste* (audio that nobody hears),
*stalls* (silence inside answers, as a share of their audio) and *TTFP* (its 90th percentile); the
settings that none beats in all of these are the Pareto front. The one that is taken is no worse
than the defaults in any and gains most in all together. Then it and the defaults serve other users
of the same kind (held-out seeds), and only if it is better there too it is written.
"""

from __future__ import annotations

import argparse
import math
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from liveserve.bench.result_file import build_result, ratio_of, write_result, write_whole
from liveserve.bench.simulator.command import (
    add_input_arguments,
    cores,
    pairs_of,
    require_least,
)
from liveserve.bench.simulator.costs import load_costs
from liveserve.bench.simulator.model import TALKER, CostModel, ModelError, SimConfig, system
from liveserve.bench.simulator.simulate import Job, metrics_of, simulate_all
from liveserve.bench.simulator.workloads import WorkloadSpec, build, spec_of
from liveserve.bench.terminal import print_table, progress
from liveserve.bench.traces import TraceError
from liveserve.config import ConfigError, LiveServeConfig, StageConfig, parse_config

# Ranges of the sweep, drawn log-uniformly.
RANGES = {
    "alpha": (0.1, 10.0),
    "beta": (1.0, 100.0),
    "p_safe_s": (0.1, 1.0),
    "p_release_s": (0.3, 3.0),
    "hold_ratio": (1.1, 3.0),
    # With KV reserved ahead a pool never fills up to the default: β counts below it.
    "kv_high_watermark": (0.1, 0.9),
}
# By how much a setting may be worse than the defaults and still count as no worse.
_SLACK = {"ttfp_p90_s": 0.005, "waste_fraction": 0.003, "stall_fraction": 0.0005}
# Below these amounts less is not worth more: ratios are of values with this added.
_FLOOR = {"ttfp_p90_s": 0.02, "waste_fraction": 0.01, "stall_fraction": 0.002}
OBJECTIVES = tuple(_SLACK)
_HELD_OUT = 1_000_000  # added to a seed


class Candidate(NamedTuple):
    """A setting of the talker's policy. All None: LiveServe's defaults.

    Attributes:
        hold_ratio: p_hold_s ÷ p_release_s.
        dram_gb: of each thinker's pool, 2^30 bytes; None: as the cost model has it.
    """

    alpha: float | None = None
    beta: float | None = None
    p_safe_s: float | None = None
    p_release_s: float | None = None
    hold_ratio: float | None = None
    kv_high_watermark: float | None = None
    dram_gb: float | None = None

    def config(self, base: LiveServeConfig) -> LiveServeConfig:
        """``base`` with this setting."""
        names = ("alpha", "beta", "p_safe_s", "p_release_s", "kv_high_watermark")
        changes = {name: getattr(self, name) for name in names}
        if self.p_release_s is not None and self.hold_ratio is not None:
            changes["p_hold_s"] = round(self.p_release_s * self.hold_ratio, 3)
        changes = {name: value for name, value in changes.items() if value is not None}
        config = base
        if changes:
            stage = msgspec.structs.replace(base.stages.get(TALKER) or StageConfig(), **changes)
            config = msgspec.structs.replace(config, stages={**base.stages, TALKER: stage})
        if self.dram_gb is not None:
            kv = msgspec.structs.replace(base.kv, dram_bytes=round(self.dram_gb * 2**30))
            config = msgspec.structs.replace(config, kv=kv)
        return config

    def costs(self, costs: CostModel) -> CostModel:
        if self.dram_gb is None:
            return costs
        return msgspec.structs.replace(costs, dram_bytes=round(self.dram_gb * 2**30))


class Trial(NamedTuple):
    """A candidate and what came of it, on average over the seeds."""

    candidate: Candidate
    ttfp_p90_s: float
    waste_fraction: float
    stall_fraction: float

    def loss(self, default: Trial) -> float:
        """Sum of the logarithms of the objectives' ratios to those of ``default``; 0: as good."""
        return sum(
            math.log((getattr(self, o) + _FLOOR[o]) / (getattr(default, o) + _FLOOR[o]))
            for o in OBJECTIVES
        )

    def no_worse(self, default: Trial) -> bool:
        return all(getattr(self, o) <= getattr(default, o) + _SLACK[o] for o in OBJECTIVES)


class Tuned(NamedTuple):
    """What a sweep found.

    Attributes:
        trials: the first is the defaults.
        held_out: the defaults and the choice on other users.
    """

    trials: list[Trial]
    front: list[Trial]
    choice: Trial
    held_out: tuple[Trial, Trial]

    @property
    def better(self) -> bool:
        """Whether the choice is better than the defaults for users that it was not chosen on."""
        default, chosen = self.held_out
        return chosen.loss(default) < 0 and chosen.no_worse(default)


def tune(
    spec: WorkloadSpec,
    costs: CostModel,
    base: LiveServeConfig,
    *,
    trials: int = 24,
    seeds: int = 1,
    dram_gb: Sequence[float] = (),
    max_gap_s: float = 0.1,
    workers: int = 1,
    title: str = "tune",
) -> Tuned:
    """Sweep ``trials`` settings, then half as many near the best, on ``seeds`` sets of users.

    Raises:
        ModelError, TraceError: the workload or the cost model makes no sense.
        ConfigError: ``base`` contradicts itself.
    """
    draw = np.random.default_rng(spec.seed)
    drams: list[float | None] = [*dram_gb] or [None]
    first = [Candidate(), *_drawn(draw, trials, drams)]
    total = (len(first) + trials // 2 + 4) * seeds
    with progress(title, total) as advance:

        def run(candidates: Sequence[Candidate], count: int, offset: int = 0) -> list[Trial]:
            jobs = []
            for candidate in candidates:
                config = SimConfig(live=candidate.config(base), max_gap_s=max_gap_s)
                for seed in range(spec.seed + offset, spec.seed + offset + count):
                    users = build(msgspec.structs.replace(spec, seed=seed))
                    jobs.append(
                        Job(users, candidate.costs(costs), system("liveserve"), config, seed)
                    )
            found = simulate_all(jobs, workers, advance, metrics_of)
            return [
                _trial(candidate, found[i * count : (i + 1) * count])
                for i, candidate in enumerate(candidates)
            ]

        done = run(first, seeds)
        best = sorted(done, key=lambda t: t.loss(done[0]))[:3]
        near = [_near(draw, best[i % len(best)].candidate) for i in range(trials // 2)]
        done += run(near, seeds)
        default = done[0]
        allowed = [trial for trial in done if trial.no_worse(default)]
        choice = min(allowed, key=lambda t: (round(t.loss(default), 6), t.candidate.dram_gb or 0))
        held = run([Candidate(), choice.candidate], 2 * seeds, _HELD_OUT)
    return Tuned(done, pareto(done), choice, (held[0], held[1]))


def _drawn(
    draw: np.random.Generator, count: int, drams: Sequence[float | None]
) -> Iterator[Candidate]:
    """Settings that fill the ranges evenly: one in each of ``count`` slices of every range."""
    slices = {name: draw.permutation(count) for name in RANGES}
    for index in range(count):
        values = {}
        for name, (low, high) in RANGES.items():
            share = (slices[name][index] + draw.random()) / count
            values[name] = low * (high / low) ** share
        yield _candidate(values, drams[index % len(drams)])


def _near(draw: np.random.Generator, candidate: Candidate) -> Candidate:
    values = {}
    for name, (low, high) in RANGES.items():
        middle = getattr(candidate, name)
        if middle is None:  # the defaults
            middle = math.sqrt(low * high)
        values[name] = min(high, max(low, middle * math.exp(0.25 * draw.standard_normal())))
    return _candidate(values, candidate.dram_gb)


def _candidate(values: Mapping[str, float], dram_gb: float | None) -> Candidate:
    rounded = {name: float(f"{value:.3g}") for name, value in values.items()}
    rounded["p_release_s"] = max(rounded["p_release_s"], rounded["p_safe_s"])
    return Candidate(**rounded, dram_gb=dram_gb)


def _trial(candidate: Candidate, runs: Sequence[Mapping[str, Any]]) -> Trial:
    def mean(values: Sequence[float]) -> float:
        return sum(values) / len(values)

    return Trial(
        candidate,
        # Nobody heard anything: as bad as can be.
        mean([m["ttfp_p90_s"] if m["ttfp_p90_s"] is not None else 1e6 for m in runs]),
        mean([m.get("generated_waste_fraction") or 0.0 for m in runs]),
        mean([m["gap_total_s"] / m["routed_s"] if m["routed_s"] else 1.0 for m in runs]),
    )


def pareto(trials: Sequence[Trial]) -> list[Trial]:
    """Those that no other is at least as good as in everything, and better in something. DRAM
    counts: the less the better."""

    def goals(trial: Trial) -> tuple[float, ...]:
        return (*(getattr(trial, o) for o in OBJECTIVES), trial.candidate.dram_gb or 0.0)

    points = [goals(trial) for trial in trials]
    return [
        trial
        for trial, mine in zip(trials, points, strict=True)
        if not any(
            other != mine and all(a <= b for a, b in zip(other, mine, strict=True))
            for other in points
        )
    ]


# ---- command -------------------------------------------------------------------------------


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_input_arguments(parser, "barge-in")
    parser.add_argument(
        "--config", metavar="JSON|FILE", help="the configuration to start from ({})"
    )
    parser.add_argument(
        "--trials", type=int, default=24, metavar="N", help="settings at first (%(default)s)"
    )
    parser.add_argument("--seeds", type=int, default=1, metavar="N", help="sets of users")
    parser.add_argument(
        "--dram-gb", type=float, nargs="+", default=[], metavar="GB", help="sizes to try as well"
    )
    parser.add_argument("--max-gap-ms", type=float, default=100.0, help="(%(default)s)")
    parser.add_argument("--workers", type=int, metavar="N", help="processes (one a core)")
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="write the configuration for 'liveserve serve'"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result file")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="write the Pareto front as PNG")


def run(args: argparse.Namespace) -> int:
    try:
        require_least(args, trials=1, seeds=1, workers=1)
        if not all(math.isfinite(gb) and gb >= 0 for gb in args.dram_gb):
            raise ModelError(f"--dram-gb must be finite and 0 or more, got {args.dram_gb}")
        base = parse_config(args.config) if args.config else LiveServeConfig()
        spec = spec_of(args.workload, **pairs_of("--set", args.set))
        costs = load_costs(args.costs, pairs_of("--costs-set", args.costs_set))
        found = tune(
            spec,
            costs,
            base,
            trials=args.trials,
            seeds=args.seeds,
            dram_gb=args.dram_gb,
            max_gap_s=args.max_gap_ms / 1e3,
            workers=args.workers or cores(),
        )
    except (ModelError, TraceError, ConfigError) as error:
        print(f"liveserve tune: {error}", file=sys.stderr)
        return 2
    _print(found)
    if args.out is not None:
        candidate = found.choice.candidate if found.better else Candidate()
        write_config(args.out, candidate.config(base))
        print(f"{args.out}: liveserve serve … --liveserve-config {args.out}")
    if args.json is not None:
        write_result(args.json, _result(found, spec, costs))
    if args.plot is not None:
        _plot(args.plot, found)
        print(args.plot)
    return 0


def write_config(path: Path, config: LiveServeConfig) -> None:
    """Write what of ``config`` is not default, in one step, once it reads back as ``config``.

    Raises:
        ConfigError: it does not; nothing is written.
    """
    text = msgspec.json.format(msgspec.json.encode(_changed(config)), indent=1).decode()
    if parse_config(text) != config:
        raise ConfigError(f"{path}: what would be written does not read back the same")
    write_whole(path, text + "\n")


def _changed(config: LiveServeConfig) -> dict[str, Any]:
    def differ(mine: Any, plain: Any) -> Any:
        if isinstance(mine, dict) and isinstance(plain, dict):
            return {
                name: differ(value, plain.get(name))
                for name, value in mine.items()
                if name not in plain or value != plain[name]
            }
        return mine

    fields = differ(msgspec.to_builtins(config), msgspec.to_builtins(LiveServeConfig()))
    for stage in fields.get("stages", {}).values():
        for name in [name for name, value in stage.items() if value is None]:
            del stage[name]
    return fields


def _cells(trial: Trial) -> list[str]:
    settings = ["-" if value is None else f"{value:g}" for value in trial.candidate]
    return [
        *settings,
        f"{trial.ttfp_p90_s:.3f}",
        f"{100 * trial.waste_fraction:.2f}",
        f"{100 * trial.stall_fraction:.3f}",
    ]


def _print(found: Tuned) -> None:
    columns = ["", "α", "β", "P_safe s", "release s", "hold/rel.", "watermark", "DRAM GiB",
               "TTFP p90 s", "waste %", "stalls %"]  # fmt: skip
    lines = [["defaults", *_cells(found.trials[0])], ["chosen", *_cells(found.choice)]]
    lines += [[f"front {i + 1}", *_cells(trial)] for i, trial in enumerate(found.front)]
    lines.append(["defaults, held out", *_cells(found.held_out[0])])
    lines.append(["chosen, held out", *_cells(found.held_out[1])])
    print_table(f"{len(found.trials)} settings (simulated)", columns, lines)
    default, chosen = found.held_out
    text = ", ".join(
        f"{name} {_change(getattr(default, o), getattr(chosen, o))}"
        for name, o in zip(("P90 TTFP", "waste", "stalls"), OBJECTIVES, strict=True)
    )
    print(f"on users that it was not chosen on, against the defaults: {text}")
    if not found.better:
        print("that is no improvement: the defaults stay")


def _change(before: float, after: float) -> str:
    if before < 1e-9:
        return "none in both" if after < 1e-9 else f"0 → {after:.4g}"
    return f"{100 * (after / before - 1):+.1f} %"


def _result(found: Tuned, spec: WorkloadSpec, costs: CostModel) -> dict[str, Any]:
    def case(trial: Trial, part: str) -> dict[str, Any]:
        return {
            "params": {
                "part": part,
                "costs": costs.name,
                "workload": msgspec.to_builtins(spec),
                **trial.candidate._asdict(),
            },
            "metrics": {o: getattr(trial, o) for o in OBJECTIVES},
        }

    cases = [case(t, "front" if t in found.front else "sweep") for t in found.trials]
    cases += [
        case(t, f"held-out {w}")
        for w, t in zip(("defaults", "chosen"), found.held_out, strict=True)
    ]
    default, chosen = found.held_out
    ratios = {}
    for name, objective in (
        ("heldout_ttfp_p90_ratio", "ttfp_p90_s"),
        ("heldout_waste_ratio", "waste_fraction"),
        ("heldout_stall_ratio", "stall_fraction"),
    ):
        before = getattr(default, objective)
        if before > 0:
            ratios[name] = ratio_of([getattr(chosen, objective) / before], "lower")
    command = shlex.join(["liveserve", *sys.argv[1:]])
    return build_result("tune", cases, command=command, ratios=ratios, simulated=True)


def _plot(path: Path, found: Tuned) -> None:
    from matplotlib.figure import Figure  # slow to import; needs no display this way

    figure = Figure(figsize=(7.5, 4.6), layout="constrained")
    axes = figure.subplots()
    shown = axes.scatter(
        [100 * t.waste_fraction for t in found.trials],
        [t.ttfp_p90_s for t in found.trials],
        c=[100 * t.stall_fraction for t in found.trials],
        cmap="viridis_r",
        s=28,
    )
    figure.colorbar(shown, ax=axes, label="stalls (% of the audio)")
    for trials, marker, label in (
        (found.front, "o", "Pareto front"),
        (found.trials[:1], "s", "defaults"),
        ([found.choice], "*", "chosen"),
    ):
        axes.plot(
            [100 * t.waste_fraction for t in trials],
            [t.ttfp_p90_s for t in trials],
            marker,
            ms=14 if marker == "*" else 9,
            mfc="none",
            mec="#c62828" if marker != "o" else "#374151",
            label=label,
        )
    axes.set(xlabel="audio nobody hears (%)", ylabel="P90 TTFP (s)")
    axes.set_title("Settings of the sweep, simulated", fontsize=10, loc="left")
    axes.legend(fontsize=8, frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
