"""``liveserve simulate``: a workload on a deployment that need not exist.

Every system sees the same users. Runs are simulated in as many processes as there are cores; what
is printed is the mean over the seeds, and a ratio's range is that of the seeds, pair by pair. The
last column, turns a minute, is this machine's: what one process simulated.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from liveserve.bench.records import ResponseRecord
from liveserve.bench.result_file import build_result, ratio_of, write_result
from liveserve.bench.simulator.costs import PRESETS as COSTS
from liveserve.bench.simulator.costs import load_costs
from liveserve.bench.simulator.model import ModelError, SimConfig, System, Workload, system
from liveserve.bench.simulator.simulate import Job, Result, simulate_all
from liveserve.bench.simulator.workloads import PRESETS as WORKLOADS
from liveserve.bench.simulator.workloads import build, spec_of
from liveserve.bench.simulator.world import Sample
from liveserve.bench.terminal import print_table, progress
from liveserve.bench.traces import TraceError
from liveserve.config import ConfigError, parse_config

# (column, metric, factor, digits)
_COLUMNS = (
    ("TTFP p50 s", "ttfp_p50_s", 1, 3),
    ("p90 s", "ttfp_p90_s", 1, 3),
    ("text p90 s", "text_ttfp_p90_s", 1, 3),
    ("continuity %", "continuity_fraction", 100, 1),
    ("gaps s", "gap_total_s", 1, 1),
    ("waste %", "generated_waste_fraction", 100, 1),
    ("turns/s", "completed_turns_per_s", 1, 3),
    ("useful/s", "useful_rps", 1, 3),
    ("RTF", "rtf_p50", 1, 2),
    ("lead s", "lead_p50_s", 1, 2),
    ("reloads", "reloads", 1, 0),
    ("reload p90 ms", "reload_p90_s", 1000, 1),
)
# Ratio → (metric, how a pair of runs forms it, better).
_RATIOS = {
    "ttfp_p50_speedup": ("ttfp_p50_s", "first/other", "higher"),
    "ttfp_p90_speedup": ("ttfp_p90_s", "first/other", "higher"),
    "throughput_ratio": ("completed_turns_per_s", "other/first", "higher"),
    "useful_rps_ratio": ("useful_rps", "other/first", "higher"),
    "continuity_delta_pp": ("continuity_fraction", "difference", "higher"),
    "waste_delta_pp": ("generated_waste_fraction", "difference", "lower"),
}


class Kept(NamedTuple):
    """What a run's process sends back; records and samples only for plots."""

    metrics: dict[str, Any]
    run_s: float
    responses: list[ResponseRecord]
    samples: list[Sample]


def add_input_arguments(parser: argparse.ArgumentParser, workload: str) -> None:
    """What a simulation is given: users (``workload`` by default) and costs."""
    parser.add_argument(
        "--workload",
        default=workload,
        metavar="NAME|FILE",
        help=f"{', '.join(WORKLOADS)}, a .json spec, or a trace (%(default)s)",
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="FIELD=VALUE",
        help="of the workload's spec: sessions=500, concurrency=16, p_barge_in=0.5, …",
    )
    parser.add_argument(
        "--costs",
        default=COSTS[0],
        metavar="NAME|FILE",
        help=f"{', '.join(COSTS)}, or a .json file of 'liveserve calibrate' (%(default)s)",
    )
    parser.add_argument(
        "--costs-set",
        action="append",
        default=[],
        metavar="PATH=VALUE",
        help="of the cost model: thinker.replicas=1, link.gbps=25, …",
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_input_arguments(parser, "interaction")
    parser.add_argument(
        "--systems",
        nargs="+",
        default=["stock", "liveserve"],
        metavar="NAME",
        help="stock, stock-no-offload, liveserve, liveserve-no-pace, … (%(default)s)",
    )
    parser.add_argument(
        "--config", metavar="JSON|FILE", help="LiveServe's configuration, as 'serve' takes it"
    )
    parser.add_argument("--seeds", type=int, default=1, metavar="N", help="runs each (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="the first (%(default)s)")
    parser.add_argument("--ttfp-slo", type=float, metavar="S", help="useful turns are that fast")
    parser.add_argument("--max-gap-ms", type=float, default=100.0, help="(%(default)s)")
    parser.add_argument("--until", type=float, metavar="S", help="cut the run off then")
    parser.add_argument("--workers", type=int, metavar="N", help="processes (one a core)")
    parser.add_argument("--json", metavar="FILE", type=Path, help="write the result file")
    parser.add_argument("--plot", metavar="DIR", type=Path, help="write plots")


def run(args: argparse.Namespace) -> int:
    try:
        jobs = jobs_of(args)
    except (ModelError, TraceError, ConfigError) as error:
        print(f"liveserve simulate: {error}", file=sys.stderr)
        return 2
    workers = args.workers or cores()
    began_s = time.perf_counter()
    with progress("simulate", len(jobs)) as advance:
        try:
            kept: list[Kept] = simulate_all(
                jobs, workers, advance, keep_all if args.plot else keep_metrics
            )
        except ModelError as error:
            print(f"liveserve simulate: {error}", file=sys.stderr)
            return 2
    took_s = time.perf_counter() - began_s
    names = [job.system.name for job in jobs]
    turns = sum(one.metrics["responses"] for one in kept)
    _print(jobs[0].workload, jobs[0].costs.name, names, kept)
    processes = min(workers, len(jobs))
    print(
        f"{turns} turns simulated in {took_s:.1f} s by {processes} "
        f"process{'es' if processes > 1 else ''}: {60 * turns / took_s:,.0f} a minute"
    )
    if args.json:
        cases = [
            {"params": params_of(job), "metrics": one.metrics}
            for job, one in zip(jobs, kept, strict=True)
        ]
        result = build_result(
            "simulate",
            cases,
            command=shlex.join(["liveserve", *sys.argv[1:]]),
            ratios=ratios_of(names, [one.metrics for one in kept]) | rates_of(names, kept, took_s),
            simulated=True,
        )
        write_result(args.json, result)
    if args.plot:
        for path in plots(args.plot, names, kept):
            print(path)
    return 0


def jobs_of(args: argparse.Namespace) -> list[Job]:
    """The runs that the command line asks for, system by system in each seed.

    Raises:
        ModelError, TraceError, ConfigError: an argument makes no sense; names it.
    """
    require_least(args, seeds=1, seed=0, workers=1)
    systems: list[System] = [system(name) for name in dict.fromkeys(args.systems)]
    changes = pairs_of("--set", args.set)
    costs = load_costs(args.costs, pairs_of("--costs-set", args.costs_set))
    fields: dict[str, Any] = {"max_gap_s": args.max_gap_ms / 1e3}
    if args.ttfp_slo is not None:
        fields["ttfp_slo_s"] = args.ttfp_slo
    if args.until is not None:
        fields["until_s"] = args.until
    if args.config:
        fields["live"] = msgspec.to_builtins(parse_config(args.config))
    jobs = []
    for seed in range(args.seed, args.seed + args.seeds):
        seeded = changes if "seed" in changes else {**changes, "seed": seed}
        workload = build(spec_of(args.workload, **seeded))
        if args.plot:
            fields["timeline_s"] = max(0.1, _length_s(workload) / 500)
        try:
            config = msgspec.convert(fields, SimConfig)
        except msgspec.ValidationError as error:
            raise ModelError(f"settings: {error}") from None
        jobs += [Job(workload, costs, one, config, seed) for one in systems]
    return jobs


def cores() -> int:
    """How many processes can simulate at once."""
    return len(os.sched_getaffinity(0))


def require_least(args: argparse.Namespace, **least: int) -> None:
    """Raises:
    ModelError: a flag that was given is below its least value; names it.
    """
    for name, bound in least.items():
        value = getattr(args, name)
        if value is not None and value < bound:
            raise ModelError(f"--{name} must be {bound} or more, got {value}")


def pairs_of(flag: str, given: Sequence[str]) -> dict[str, str]:
    """``FIELD=VALUE`` texts of ``flag`` as a mapping.

    Raises:
        ModelError: one is none; quotes it.
    """
    pairs = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not (name and equals and value):
            raise ModelError(f"{flag} {text!r}: write FIELD=VALUE")
        pairs[name] = value
    return pairs


def _length_s(workload: Workload) -> float:
    """About how long a run lasts if nobody waits."""
    last_s = max(session.arrival_s for session in workload.sessions)
    spoken_s = sum(
        turn.answer_s + turn.speech_s + turn.reply_gap_s
        for session in workload.sessions
        for turn in session.turns
    )
    return last_s + spoken_s / (workload.concurrency or len(workload.sessions))


def keep_metrics(result: Result) -> Kept:
    return Kept(result.metrics, result.run_s, [], [])


def keep_all(result: Result) -> Kept:
    return Kept(result.metrics, result.run_s, result.responses, result.samples)


def params_of(job: Job) -> dict[str, Any]:
    """A run's settings, for a result file."""
    config = msgspec.to_builtins(job.config)
    return {
        "system": job.system.name,
        "switches": msgspec.to_builtins(job.system),
        "seed": job.seed,
        "workload": job.workload.name,
        "workload_notes": dict(job.workload.notes),
        "sessions": len(job.workload.sessions),
        "turns": job.workload.turns,
        "concurrency": job.workload.concurrency,
        "costs": job.costs.name,
        "config": config,
    }


def ratios_of(
    names: Sequence[str], metrics: Sequence[Mapping[str, Any]]
) -> dict[str, dict[str, Any]]:
    """Every other system against the first, seed by seed: mean, least and most.

    With two systems a ratio has its plain name; with more ``<name>_<system>``.
    """
    systems = list(dict.fromkeys(names))
    runs = {s: [m for n, m in zip(names, metrics, strict=True) if n == s] for s in systems}
    found: dict[str, dict[str, Any]] = {}
    for other in systems[1:]:
        for ratio, (metric, how, better) in _RATIOS.items():
            values = []
            for ours, theirs in zip(runs[systems[0]], runs[other], strict=True):
                first, second = ours.get(metric), theirs.get(metric)
                if first is None or second is None:
                    continue
                if how == "difference":
                    values.append(100 * (second - first))
                elif how == "first/other" and second:
                    values.append(first / second)
                elif how == "other/first" and first:
                    values.append(second / first)
            if values:
                name = ratio if len(systems) == 2 else f"{ratio}_{other.replace('-', '_')}"
                found[name] = ratio_of(values, better)
    return found


def rates_of(
    names: Sequence[str], kept: Sequence[Kept], took_s: float
) -> dict[str, dict[str, Any]]:
    """Turns simulated per minute of this machine: by all processes together within ``took_s``, and
    by one of them for each system."""
    turns = sum(one.metrics["responses"] for one in kept)
    found = {"simulated_turns_per_min": ratio_of([60 * turns / took_s], "higher")}
    for name in dict.fromkeys(names):
        values = [_turns_per_min(one) for n, one in zip(names, kept, strict=True) if n == name]
        found[f"simulated_turns_per_min_{name.replace('-', '_')}"] = ratio_of(values, "higher")
    return found


def _turns_per_min(one: Kept) -> float:
    return 60 * one.metrics["responses"] / one.run_s


def _print(workload: Workload, costs: str, names: Sequence[str], kept: Sequence[Kept]) -> None:
    rows = []
    for name in dict.fromkeys(names):
        runs = [one.metrics for n, one in zip(names, kept, strict=True) if n == name]
        row = [name]
        for _, metric, factor, digits in _COLUMNS:
            values = [m[metric] for m in runs if m.get(metric) is not None]
            mean = sum(values) / len(values) if values else None
            row.append("-" if mean is None else f"{factor * mean:.{digits}f}")
        rates = [_turns_per_min(one) for n, one in zip(names, kept, strict=True) if n == name]
        row.append(f"{sum(rates) / len(rates):.0f}")
        rows.append(row)
    title = f"{workload.name}: {workload.turns} turns a run on {costs} (simulated)"
    print_table(title, ["system", *(column for column, *_ in _COLUMNS), "turns/min"], rows)


def plots(folder: Path, names: Sequence[str], kept: Sequence[Kept]) -> list[Path]:
    """TTFP of every system as a distribution; pools and queues over time of its first run."""
    from matplotlib.figure import Figure  # slow to import; needs no display this way

    folder.mkdir(parents=True, exist_ok=True)
    figure = Figure(figsize=(7.5, 4.6), layout="constrained")
    axes = figure.subplots()
    for name in dict.fromkeys(names):
        seen = sorted(
            record.ttfp_s
            for n, one in zip(names, kept, strict=True)
            if n == name
            for record in one.responses
            if record.ttfp_s is not None
        )
        if seen:
            shares = [(index + 1) / len(seen) for index in range(len(seen))]
            axes.step(seen, shares, where="post", label=f"{name} (n={len(seen)})")
    axes.set(xlabel="audio TTFP (s)", ylabel="share of answers", ylim=(0, 1.02))
    axes.set_xlim(left=0)
    axes.set_title("Time to first packet, simulated", fontsize=10, loc="left")
    axes.legend(loc="lower right", fontsize=9, frameon=False)
    written = [folder / "ttfp.png"]
    figure.savefig(written[0], dpi=110)
    for name in dict.fromkeys(names):
        samples = kept[names.index(name)].samples
        if not samples:
            continue
        figure = Figure(figsize=(8, 6), layout="constrained")
        upper, lower = figure.subplots(2, sharex=True)
        times = [sample.at_s for sample in samples]
        for what in ("sessions", "talker_running", "talker_held", "vocoder_chunks"):
            upper.plot(times, [getattr(s, what) for s in samples], label=what.replace("_", " "))
        for what in ("gpu_used_blocks", "gpu_cached_blocks", "dram_blocks"):
            lower.plot(times, [getattr(s, what) for s in samples], label=what.replace("_", " "))
        upper.set_ylabel("requests")
        lower.set(xlabel="s", ylabel="blocks")
        for part in (upper, lower):
            part.legend(fontsize=8, frameon=False)
        upper.set_title(f"{name}, simulated", fontsize=10, loc="left")
        written.append(folder / f"timeline-{name}.png")
        figure.savefig(written[-1], dpi=110)
    return written
