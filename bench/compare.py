"""``liveserve bench compare``: the stock host against LiveServe, side by side in one run.

Servers take turns (A B A B ...) on the same seeded users; every ratio is computed inside a pair.
The users are in slow motion (``K``) so that a small machine reaches the regime of a large one, and
K is the same for both.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shlex
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from liveserve.bench.demo import ensure_tiny_model
from liveserve.bench.launch import ServerFailed, running_server
from liveserve.bench.report import save_comparison
from liveserve.bench.result_file import build_result, write_result
from liveserve.bench.sessions import SessionsConfig, SessionsReport, run_sessions

STOCK, LIVE = "stock", "liveserve"


@dataclass(frozen=True)
class Arm:
    """One kind of server: a name and its flags of ``liveserve serve``."""

    name: str
    flags: tuple[str, ...]


def live_arm(name: str = LIVE, **switches: bool) -> Arm:
    """LiveServe with some of its switches off."""
    return Arm(name, ("--liveserve-config", json.dumps({"switches": switches})))


STOCK_ARM = Arm(STOCK, ("--liveserve", "off"))


@dataclass(frozen=True)
class Preset:
    """What a preset runs: ``cases`` in every server, servers in turn for ``pairs`` rounds.

    ``fast_codes``: both servers use the one-matmul code predictor, so that less slow motion is
    needed; the vocoder is then the bottleneck.
    """

    arms: tuple[Arm, ...]
    cases: Mapping[str, SessionsConfig]
    pairs: int
    fast_codes: bool = False


def _case(sessions: int, p_barge_in: float, **more: Any) -> SessionsConfig:
    base = SessionsConfig(
        sessions=sessions,
        p_barge_in=p_barge_in,
        turns=3,
        answer_seconds=(8.0, 12.0, 20.0),
        reply_gap=1.0,
        ramp=4.0,
        slow_motion=4.0,
        timeout=120.0,
        seed=11,
    )
    return replace(base, **more)


# Every mechanism alone, and every one left out.
_SWITCHES = ("order", "pace", "utility", "chunking")
_ABLATION = (
    *(live_arm(f"only {name}", **{s: s == name for s in _SWITCHES}) for name in _SWITCHES[::3]),
    *(live_arm(f"without {name}", **{name: False}) for name in _SWITCHES),
)

PRESETS = {
    "ci": Preset(
        (STOCK_ARM, live_arm()),
        {"c16": _case(16, 0.5, turns=2, answer_seconds=(8.0, 12.0, 16.0), slow_motion=2.0)},
        pairs=2,
        fast_codes=True,
    ),
    "light": Preset(
        (STOCK_ARM, live_arm()),
        {"c2": _case(2, 0.0, turns=3, answer_seconds=(8.0, 12.0), slow_motion=2.0)},
        pairs=2,
        fast_codes=True,
    ),
    "load": Preset(
        (STOCK_ARM, live_arm()),
        {f"c{c}": _case(c, 0.0) for c in (1, 4, 8, 12)},
        pairs=1,
    ),
    "barge-in": Preset(
        (STOCK_ARM, live_arm()),
        {"p0.5": _case(12, 0.5, answer_seconds=(20.0, 30.0), slow_motion=2.0)},
        pairs=1,
        fast_codes=True,
    ),
    "paper": Preset(
        (STOCK_ARM, live_arm()),
        {f"c{c}": _case(c, 0.0) for c in (1, 2, 4, 8, 12, 16)}
        | {f"c8 p{p}": _case(8, p) for p in (0.3, 0.5, 0.75, 1.0)}
        | {
            f"{kind}": _case(24, 0.0, arrivals=kind, rate=0.2, turns=2)
            for kind in ("poisson", "burst")
        },
        pairs=2,
    ),
    "ablation": Preset((STOCK_ARM, live_arm(), *_ABLATION), {"c8": _case(8, 0.5)}, pairs=1),
    "long": Preset(
        (STOCK_ARM, live_arm()),
        {"one": _case(1, 0.0, turns=1, answer_seconds=(60.0,)), "of 6": _case(6, 0.5, turns=2)},
        pairs=1,
    ),
}

# metric → (name of the ratio, how it is formed, better)
_QUOTIENTS = {
    "ttfp_p90_speedup": ("ttfp_p90_s", "stock/ours", "higher"),
    "ttfp_p50_speedup": ("ttfp_p50_s", "stock/ours", "higher"),
    "throughput_ratio": ("completed_turns_per_s", "ours/stock", "higher"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--preset", choices=PRESETS, default="ci", help="(%(default)s)")
    parser.add_argument("--pairs", type=int, help="rounds A B ... (the preset's)")
    parser.add_argument("--slow-motion", type=float, metavar="K", help="for every case")
    parser.add_argument("--seed", type=int, help="of every case")
    parser.add_argument("--fast-codes", action="store_true", help="for both servers, always")
    parser.add_argument(
        "--model-dir", type=Path, default=Path(".cache/tiny-model"), help="(%(default)s)"
    )
    parser.add_argument("--logs", type=Path, default=Path("out/compare"), help="(%(default)s)")
    parser.add_argument("--json", metavar="FILE", type=Path, help="write the result file")
    parser.add_argument("--plots", metavar="DIR", type=Path, help="write the plots")


@dataclass
class Run:
    """One case in one server."""

    arm: str
    case: str
    pair: int
    report: SessionsReport


def run(args: argparse.Namespace) -> int:
    # Wide enough for the table also where the output is a file.
    console, preset = Console(width=None if sys.stdout.isatty() else 140), PRESETS[args.preset]
    changes = {name: getattr(args, name) for name in ("slow_motion", "seed") if getattr(args, name)}
    cases = {name: replace(case, **changes) for name, case in preset.cases.items()}
    pairs = args.pairs if args.pairs is not None else preset.pairs
    try:
        if pairs < 1:
            raise ValueError("--pairs takes a whole number from 1")
        for case in cases.values():
            case.validate()
    except ValueError as exc:
        print(f"liveserve bench compare: {exc}", file=sys.stderr)
        return 2
    fast_codes = args.fast_codes or preset.fast_codes
    ensure_tiny_model(args.model_dir, console)
    runs: list[Run] = []
    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    )  # fmt: skip
    try:
        with Progress(*columns, console=console, transient=True) as progress:
            task = progress.add_task("", total=pairs * len(preset.arms) * len(cases))
            for pair in range(pairs):
                arms = preset.arms if pair % 2 == 0 else preset.arms[::-1]
                for arm in arms:
                    flags = [*arm.flags, *(["--fast-codes"] if fast_codes else [])]
                    log = args.logs / f"{arm.name.replace(' ', '-')}-{pair}.log"
                    progress.update(task, description=f"{arm.name}, round {pair + 1}")
                    with running_server(args.model_dir, log, flags=flags) as server:
                        for name, case in cases.items():
                            here = replace(case, url=server.url, model=server.name)
                            report = asyncio.run(run_sessions(here))
                            runs.append(Run(arm.name, name, pair, report))
                            progress.advance(task)
    except ServerFailed as exc:
        print(f"liveserve bench compare: {exc}", file=sys.stderr)
        return 1
    ratios = compare(runs, [arm.name for arm in preset.arms[1:]])
    for table in tables(runs, ratios):
        console.print(table)
    if args.plots:
        for path in save_comparison(
            args.plots, {(r.arm, r.case, r.pair): r.report.responses for r in runs}
        ):
            console.print(f"plot: {path}", soft_wrap=True)
    if args.json:
        result_cases = [
            {
                "params": {
                    "arm": r.arm,
                    "case": r.case,
                    "pair": r.pair,
                    "fast_codes": fast_codes,
                    **asdict(r.report.config),
                },
                "metrics": r.report.metrics,
            }
            for r in runs
        ]
        command = shlex.join(["liveserve", *sys.argv[1:]])
        write_result(
            args.json,
            build_result(
                "compare", result_cases, command=command, preset=args.preset, ratios=ratios
            ),
        )
        console.print(f"result: {args.json}", soft_wrap=True)
    return 1 if any(r.report.failed for r in runs) else 0


def compare(runs: Sequence[Run], arms: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Ratios of each arm against stock, pair by pair, with their spread.

    A name is the metric, then the case if there are several, then the arm if it is not LiveServe
    with everything on.
    """
    metrics: dict[tuple[str, str, int], dict[str, Any]] = {
        (r.arm, r.case, r.pair): dict(r.report.metrics) for r in runs
    }
    cases = list(dict.fromkeys(r.case for r in runs))
    found: dict[str, dict[str, Any]] = {}
    for arm in arms:
        for case in cases:
            suffix = ("" if len(cases) == 1 else f" {case}") + ("" if arm == LIVE else f" {arm}")
            both = [
                (metrics[(STOCK, case, r.pair)], metrics[(arm, case, r.pair)])
                for r in runs
                if r.arm == arm and r.case == case and (STOCK, case, r.pair) in metrics
            ]
            for name, (metric, form, better) in _QUOTIENTS.items():
                values = [
                    stock[metric] / ours[metric]
                    if form == "stock/ours"
                    else ours[metric] / stock[metric]
                    for stock, ours in both
                    if stock.get(metric) and ours.get(metric)
                ]
                _put(found, name + suffix, values, better)
            _put(
                found,
                "continuity_delta_pp" + suffix,
                [
                    100 * (ours["continuity_fraction"] - stock["continuity_fraction"])
                    for stock, ours in both
                    if None not in (ours["continuity_fraction"], stock["continuity_fraction"])
                ],
                "higher",
            )
            for which, index in (("stock", 0), ("ours", 1)):
                values = [pair[index]["waste_fraction"] for pair in both]
                _put(
                    found,
                    f"waste_{which}_fraction" + suffix,
                    [v for v in values if v is not None],
                    "lower",
                )
    return found


def _put(found: dict[str, dict[str, Any]], name: str, values: list[float], better: str) -> None:
    if values:
        found[name] = {
            "value": statistics.median(values),
            "low": min(values),
            "high": max(values),
            "better": better,
        }


_COLUMNS = (
    ("TTFP P50", "ttfp_p50_s", " s"),
    ("P90", "ttfp_p90_s", " s"),
    ("P95", "ttfp_p95_s", " s"),
    ("continuity", "continuity_fraction", "%"),
    ("gaps", "gap_total_s", " s"),
    ("waste", "waste_fraction", "%"),
    ("RTF P50", "rtf_p50", ""),
    ("turns/s", "completed_turns_per_s", ""),
    ("failed", "responses_failed", "#"),
)


def tables(runs: Sequence[Run], ratios: Mapping[str, Mapping[str, Any]]) -> list[Table]:
    """The runs, and the ratios with their spread."""
    k = runs[0].report.config.slow_motion
    every = Table(title=f"every run (users in slow motion, K = {k:g})", title_justify="left")
    for column in ("case", "server", "round", *(c[0] for c in _COLUMNS)):
        every.add_column(column)
    for r in sorted(runs, key=lambda r: (r.case, r.pair, r.arm != STOCK, r.arm)):
        metrics = r.report.metrics
        cells = [_cell(metrics.get(key), unit) for _, key, unit in _COLUMNS]
        every.add_row(r.case, r.arm, str(r.pair + 1), *cells)
    summary = Table(title="LiveServe against stock", title_justify="left")
    for column in ("", "median", "low", "high"):
        summary.add_column(column)
    for name, ratio in ratios.items():
        summary.add_row(name, *(f"{ratio[key]:.3f}" for key in ("value", "low", "high")))
    return [every, summary]


def _cell(value: Any, unit: str) -> str:
    if value is None:
        return "-"
    if unit == "#":
        return str(value)
    return f"{100 * value:.0f} %" if unit == "%" else f"{value:.2f}{unit}"
