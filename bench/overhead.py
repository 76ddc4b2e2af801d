"""``liveserve bench overhead``: what LiveServe costs a stage's step while it only watches.

Stock and LiveServe servers take turns (A B A B ...) on the same seeded users. A step's time is from
the start of one `execute_model` to the start of the next while the stage is busy, so it contains
scheduling, events and output handling. Steps are compared at equal batch sizes.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shlex
import statistics
import sys
import tempfile
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from liveserve.bench.demo import ensure_tiny_model
from liveserve.bench.launch import WARM, ServerFailed, running_server
from liveserve.bench.result_file import build_result, write_result
from liveserve.bench.sessions import SessionsConfig, run_sessions
from liveserve.config import Switches

# LiveServe with every mechanism off: it carries events, ranks each request every round, reports.
OBSERVING = [
    "--liveserve-config",
    json.dumps({"switches": dict.fromkeys(Switches.__struct_fields__, False)}),
]
STAGES = ("thinker", "talker", "code2wav")
# A pause longer than this between two steps means that the stage had nothing to do.
IDLE_S = 0.005
# Fewer steps than this at a batch size say nothing.
MIN_STEPS = 20

# Step times in seconds by batch size.
Steps = dict[int, list[float]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--pairs", type=int, default=3, help="A B pairs (%(default)s)")
    parser.add_argument("--sessions", type=int, default=4, help="users at once (%(default)s)")
    parser.add_argument("--turns", type=int, default=3, help="turns per user (%(default)s)")
    parser.add_argument(
        "--model-dir", type=Path, default=Path(".cache/tiny-model"), help="(%(default)s)"
    )
    parser.add_argument("--json", metavar="FILE", type=Path, help="write the result file")


def run(args: argparse.Namespace) -> int:
    if args.pairs < 1 or args.sessions < 1 or args.turns < 1:
        print(
            "liveserve bench overhead: --pairs, --sessions, --turns: use 1 or more", file=sys.stderr
        )
        return 2
    console = Console()
    ensure_tiny_model(args.model_dir, console)
    config = SessionsConfig(
        sessions=args.sessions, turns=args.turns, answer_seconds=(8.0, 12.0), reply_gap=0.5, seed=1
    )
    pairs: list[dict[str, dict[str, Steps]]] = []
    columns = TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn()
    try:
        with Progress(*columns, console=console, transient=True) as progress:
            task = progress.add_task("stock and LiveServe in turn", total=2 * args.pairs)
            for pair in range(args.pairs):
                order = ("off", "on") if pair % 2 == 0 else ("on", "off")
                measured = {}
                for switch in order:
                    measured[switch] = measure(args.model_dir, config, switch)
                    progress.advance(task)
                pairs.append(measured)
    except ServerFailed as exc:
        print(f"liveserve bench overhead: {exc}", file=sys.stderr)
        return 1
    ratios = {
        stage: [step_ratio(p["on"][stage], p["off"][stage]) for p in pairs] for stage in STAGES
    }
    table = Table(title="step time, LiveServe / stock", title_justify="left")
    for name in ("stage", "median", "low", "high", "stock median step"):
        table.add_column(name)
    summary = {}
    for stage, values in ratios.items():
        known = [value for value in values if value is not None]
        if not known:
            continue
        middle = statistics.median(known)
        stock = [s for p in pairs for steps in p["off"][stage].values() for s in steps]
        table.add_row(
            stage,
            *(f"{value:.3f}" for value in (middle, min(known), max(known))),
            f"{1e3 * statistics.median(stock):.1f} ms",
        )
        summary[f"step_ratio_{stage}"] = {
            "value": middle,
            "low": min(known),
            "high": max(known),
            "better": "lower",
        }
    console.print(table)
    if args.json:
        cases = [
            {"params": {"pair": i, **asdict(config)}, "metrics": _metrics(pair)}
            for i, pair in enumerate(pairs)
        ]
        command = shlex.join(["liveserve", *sys.argv[1:]])
        write_result(args.json, build_result("overhead", cases, command=command, ratios=summary))
    return 0


def measure(model: Path, config: SessionsConfig, switch: str) -> dict[str, Steps]:
    """Run the users against a server with LiveServe ``switch``; step times by stage."""
    from liveserve.host.cpu.record import RECORD_ENV

    with tempfile.TemporaryDirectory(prefix="liveserve-overhead-") as folder:
        record = Path(folder) / "record"
        flags = ["--liveserve", "off"] if switch == "off" else OBSERVING
        with running_server(
            model,
            Path(folder) / "server.log",
            flags=[*flags, "--seed-codes", "7"],
            env=WARM | {RECORD_ENV: str(record)},
        ) as server:
            asyncio.run(run_sessions(replace(config, url=server.url, model=server.name)))
        return {
            stage: busy_steps(record / f"stage{index}.jsonl") for index, stage in enumerate(STAGES)
        }


def busy_steps(path: Path) -> Steps:
    """Start-to-start times of steps that followed one another without a pause."""
    steps: Steps = defaultdict(list)
    last: Mapping[str, float] | None = None
    for text in path.read_text().splitlines():
        line = json.loads(text)
        if "start_s" not in line:
            continue
        if last is not None and line["start_s"] - last["end_s"] < IDLE_S:
            steps[int(last["requests"])].append(line["start_s"] - last["start_s"])
        last = line
    return dict(steps)


def step_ratio(ours: Steps, stock: Steps) -> float | None:
    """Ratio of median step times at equal batch sizes, weighted by how many steps both had."""
    weighted, weight = 0.0, 0
    for size in ours.keys() & stock.keys():
        steps = min(len(ours[size]), len(stock[size]))
        if steps >= MIN_STEPS:
            ratio = statistics.median(ours[size]) / statistics.median(stock[size])
            weighted, weight = weighted + steps * ratio, weight + steps
    return weighted / weight if weight else None


def _metrics(pair: Mapping[str, Mapping[str, Steps]]) -> dict[str, float]:
    """Median step per stage, switch and batch size."""
    return {
        f"{stage}_{switch}_batch{size}_step_s": statistics.median(times)
        for switch, stages in pair.items()
        for stage, sizes in stages.items()
        for size, times in sorted(sizes.items())
        if len(times) >= MIN_STEPS
    }
