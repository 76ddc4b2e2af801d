"""``liveserve bench paper``: the paper's evaluation again, in the simulator.

Every figure and table of it that a simulation can show, theirs beside ours. What is simulated is
the shipped policies on the cost model of a deployment (`liveserve.bench.simulator`); what is
measured is read from result files and says so.

*Listeners* are users at a time who speak, wait, listen or think. The paper's concurrency ``c`` is
not that: its eight users make 0.8 answers a second of about a minute each, so some fifty people
listen. Eight listeners leave the cost model idle; the loads here are those at which its stock
system goes from continuous to not, as the paper's does between c=8 and c=16.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from liveserve.bench.paper_table import LIVE, NO_OFFLOAD, STOCK, markdown, ratios_of, tables
from liveserve.bench.records import COMPLETED
from liveserve.bench.result_file import build_result, read_result, write_result
from liveserve.bench.simulator.command import cores, require_least
from liveserve.bench.simulator.costs import load_costs
from liveserve.bench.simulator.model import ModelError, SimConfig, system
from liveserve.bench.simulator.simulate import Job, Result, simulate_all
from liveserve.bench.simulator.workloads import build, spec_of
from liveserve.bench.terminal import print_table, progress
from liveserve.bench.traces import TraceError

SLICE = Path(__file__).resolve().parent / "assets" / "mooncake_conversation_slice.jsonl"
RESULTS = Path(__file__).resolve().parent / "results"

QWEN, MING = "qwen3-omni-h200", "ming-flash-omni-h200"
BOTH = (STOCK, LIVE)
THREE = (NO_OFFLOAD, STOCK, LIVE)

# The paper's long example is 65.9 s; no answer is longer. Packets are late by 20 ms on average.
_USERS = {"max_answer_tokens": 211, "jitter_s": 0.02}
# What of a run's metrics the result file keeps.
_KEPT = (
    "ttfp_p50_s", "ttfp_p90_s", "ttfp_p95_s", "text_ttfp_p50_s", "text_ttfp_p90_s",
    "later_text_ttfp_p50_s", "later_text_ttfp_p90_s", "continuity_fraction", "gap_total_s",
    "gap_max_s", "generated_waste_fraction", "completed_turns_per_s", "useful_rps", "rtf_p50",
    "rtf_p90", "lead_p50_s", "lead_max_p50_s", "reloads", "reload_p50_s", "reload_p90_s",
    "reload_total_s", "preloads", "preloads_refused", "prefill_tokens_saved_fraction",
    "responses", "responses_completed", "responses_interrupted", "responses_failed", "span_s",
    "stalled_steps", "preempted", "thinker_busy_fraction", "talker_busy_fraction",
    "code2wav_busy_fraction", "policy_errors",
)  # fmt: skip
_QUANTILES = np.linspace(0.0, 1.0, 101)


class Setting(NamedTuple):
    """One workload on one deployment, run by several systems.

    Attributes:
        figure: which part of the evaluation it belongs to.
        name: unique within the figure.
        workload: a preset of `liveserve.bench.simulator.workloads`, or ``trace``.
        changes: to the workload's spec.
        cost_changes: to the cost model, by path.
        load: what the figure is drawn over: listeners at a time, or the chance of a barge-in.
        timeline_s: sample pools this often; 0: never.
    """

    figure: str
    name: str
    workload: str
    changes: Mapping[str, Any]
    systems: tuple[str, ...] = BOTH
    costs: str = QWEN
    cost_changes: Mapping[str, Any] = {}
    load: float | None = None
    timeline_s: float = 0.0


def _closed(listeners: int, sessions: int, **more: Any) -> dict[str, Any]:
    # They begin over as long a time as an answer lasts: not all at once.
    return {**_USERS, "concurrency": listeners, "sessions": sessions, "ramp_s": 45.0, **more}


def settings() -> list[Setting]:
    """The evaluation, figure by figure."""
    found = []
    for listeners in (8, 64, 128, 160, 192, 240, 320):
        users = _closed(listeners, max(48, int(2.5 * listeners)))
        name = f"{listeners} listeners"
        found.append(Setting("load", name, "sharegpt", users, THREE, load=listeners))
    for listeners in (4, 8, 12, 16, 24):
        users = _closed(listeners, 60)
        name = f"{listeners} listeners"
        found.append(Setting("load-ming", name, "sharegpt", users, THREE, MING, load=listeners))
    found.append(Setting("data", "sharegpt-zh", "sharegpt-zh", _closed(192, 440)))
    found.append(Setting("data", "video", "video", _closed(192, 260)))
    for kind in ("poisson", "burst"):
        users = {**_USERS, "arrivals": kind, "rate": 3.2, "sessions": 550}
        found.append(Setting("arrivals", kind, "sharegpt", users, THREE))
    for p in (0.0, 0.25, 0.5, 0.75, 1.0):
        users = _closed(192, 320, p_barge_in=p, turns=3)
        found.append(Setting("barge-in", f"p={p:g}", "interaction", users, load=p))
    parts = ("order", "pace", "utility", "chunking", "one_shot")
    for p in (0.0, 0.5):
        users = _closed(192, 320, p_barge_in=p, turns=3)
        systems = tuple(f"{LIVE}-no-{part}" for part in parts)
        found.append(Setting("ablation", f"p={p:g}", "interaction", users, systems, load=p))
    # Conversations with long histories, in pools that hold about half of them.
    users = {"max_answer_tokens": 64, "arrivals": "closed", "concurrency": 48, "sessions": 150}
    found.append(
        Setting(
            "kv",
            "long histories",
            "trace",
            {**users, "ramp_s": 120.0, "jitter_s": 0.02},
            (*THREE, f"{LIVE}-no-preload", f"{LIVE}-no-next_use"),
            cost_changes={"thinker.kv_blocks": 12_000},
            timeline_s=2.0,
        )
    )
    found.append(Setting("long", "8 users", "long", {**_USERS, "sessions": 8, "concurrency": 8}))
    return found


# ---- running -------------------------------------------------------------------------------


def add_arguments(parser: argparse.ArgumentParser) -> None:
    figures = ", ".join(dict.fromkeys(s.figure for s in settings()))
    parser.add_argument(
        "--only", metavar="FIGURE", action="append", help=f"some parts: {figures}; may be repeated"
    )
    parser.add_argument(
        "--scale",
        type=float,
        default=1.0,
        metavar="F",
        help="F times the users and sessions, for a quick look (%(default)s)",
    )
    parser.add_argument("--seeds", type=int, default=1, metavar="N", help="runs each (%(default)s)")
    parser.add_argument("--workers", type=int, metavar="N", help="processes (one a core)")
    parser.add_argument(
        "--from",
        dest="source",
        type=Path,
        metavar="FILE",
        help="simulate nothing: table and plots of an earlier result file",
    )
    parser.add_argument(
        "--json",
        type=Path,
        metavar="FILE",
        help="write the result file (committed ones: bench/results/simulated/paper.json)",
    )
    parser.add_argument("--plots", type=Path, metavar="DIR", help="write the figures")
    parser.add_argument(
        "--markdown", type=Path, metavar="FILE", help="write the table there instead of to stdout"
    )
    parser.add_argument(
        "--measured",
        type=Path,
        default=RESULTS / "cpu",
        metavar="DIR",
        help="result files of measured runs (%(default)s)",
    )


def run(args: argparse.Namespace) -> int:
    try:
        result = _read(args.source) if args.source is not None else _simulated(args)
    except (ModelError, TraceError) as error:
        print(f"liveserve bench paper: {error}", file=sys.stderr)
        return 2
    if args.json is not None:
        write_result(args.json, result)
    for title, columns, rows in tables(result):
        print_table(title, columns, rows)
        print()
    text = markdown(result, args.measured)
    if args.markdown is not None:
        args.markdown.write_text(text, encoding="utf-8")
    else:
        print(text)
    if args.plots is not None:
        from liveserve.bench.paper_plots import save_plots

        for path in save_plots(args.plots, result, args.measured):
            print(path)
    return 0


def _simulated(args: argparse.Namespace) -> dict[str, Any]:
    chosen = settings()
    known = dict.fromkeys(s.figure for s in chosen)
    for name in args.only or ():
        if name not in known:
            raise ModelError(f"--only {name!r}: use {', '.join(known)}")
    if args.only:
        chosen = [s for s in chosen if s.figure in args.only]
    if not (0 < args.scale <= 10):
        raise ModelError(f"--scale must be above 0 and at most 10, got {args.scale:g}")
    require_least(args, seeds=1, workers=1)
    cases = simulate_settings(chosen, args.seeds, args.scale, args.workers or cores())
    return build_result(
        "paper",
        cases,
        command=shlex.join(["liveserve", *sys.argv[1:]]),
        preset="all" if not args.only else ",".join(args.only),
        ratios=ratios_of(cases),
        simulated=True,
    )


def simulate_settings(
    chosen: Sequence[Setting], seeds: int, scale: float, workers: int
) -> list[dict[str, Any]]:
    """Every system of every setting, seed by seed: the cases of the result file.

    Raises:
        ModelError, TraceError: a setting makes no sense.
    """
    jobs, params = [], []
    for setting in chosen:
        for seed in range(seeds):
            made, about = _jobs(setting, seed, scale)
            jobs += made
            params += about
    # The longest first, so that none is left alone at the end.
    order = sorted(range(len(jobs)), key=lambda i: -_weight(jobs[i]))

    with progress("paper", len(jobs)) as advance:
        found = simulate_all([jobs[i] for i in order], workers, advance, _kept)
    metrics: list[Any] = [None] * len(jobs)
    for index, one in zip(order, found, strict=True):
        metrics[index] = one
    return [{"params": about, "metrics": one} for about, one in zip(params, metrics, strict=True)]


def _jobs(setting: Setting, seed: int, scale: float) -> tuple[list[Job], list[dict[str, Any]]]:
    changes = dict(setting.changes, seed=seed)
    for name in ("sessions", "concurrency"):
        if name in changes:
            changes[name] = max(2, round(scale * changes[name]))
    if "rate" in changes:
        changes["rate"] = scale * changes["rate"]
    source = str(SLICE) if setting.workload == "trace" else setting.workload
    workload = build(spec_of(source, **changes))
    costs = load_costs(setting.costs, setting.cost_changes)
    config = SimConfig(timeline_s=setting.timeline_s)
    about = {
        "figure": setting.figure,
        "setting": setting.name,
        "load": setting.load,
        "seed": seed,
        "costs": setting.costs,
        "cost_changes": dict(setting.cost_changes),
        "workload": setting.workload,
        "users": dict(workload.notes),
        "turns": workload.turns,
        "scale": scale,
    }
    jobs = [Job(workload, costs, system(name), config, seed) for name in setting.systems]
    return jobs, [{"system": name, **about} for name in setting.systems]


def _weight(job: Job) -> float:
    spoken_s = sum(turn.answer_s for s in job.workload.sessions for turn in s.turns)
    return spoken_s * (10.0 if job.system.live else 1.0)


def _kept(result: Result) -> dict[str, Any]:
    """What the result file keeps of a run. ``ttfp_quantiles_s``: the distribution of TTFP at
    0, 1, … 100 %. ``generation_*``: of the longest answer that was heard out.
    """
    kept: dict[str, Any] = {name: result.metrics.get(name) for name in _KEPT}
    seen = [r.ttfp_s for r in result.responses if r.ttfp_s is not None]
    kept["ttfp_quantiles_s"] = (
        [round(float(q), 5) for q in np.quantile(seen, _QUANTILES)] if seen else []
    )
    whole = [r for r in result.responses if r.outcome == COMPLETED and r.last_audio_s is not None]
    longest = max(whole, key=lambda r: r.routed_s, default=None)
    if longest is not None and longest.last_audio_s is not None and longest.created_s is not None:
        kept["generation_audio_s"] = longest.routed_s
        kept["generation_s"] = longest.last_audio_s - longest.created_s
    if result.samples:
        names = ("at_s", "sessions", "gpu_used_blocks", "gpu_cached_blocks", "dram_blocks")
        step = max(1, len(result.samples) // 250)
        kept["timeline"] = {
            name: [round(float(getattr(s, name)), 3) for s in result.samples[::step]]
            for name in names
        }
    return kept


def _read(path: Path) -> dict[str, Any]:
    try:
        return read_result(path, "paper")
    except ValueError as error:
        raise ModelError(f"--from {error}") from None
