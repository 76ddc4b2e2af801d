"""``liveserve demo``: spoken conversations through the real three-stage pipeline on a CPU.

Writes a tiny random model, starts a server with LiveServe on, runs a few users who talk, listen and
interrupt, shows what LiveServe sees while they do, and saves a report.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import shlex
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
from rich.console import Console
from rich.live import Live
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from liveserve.bench.launch import WARM, Server, ServerFailed, running_server
from liveserve.bench.records import INTERRUPTED
from liveserve.bench.report import results_table, save_plots
from liveserve.bench.result_file import build_result, write_result
from liveserve.bench.sessions import SessionsConfig, SessionsReport, run_sessions

_BAR = 24  # characters of the playback bar


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--sessions", type=int, default=4, help="users at once (%(default)s)")
    parser.add_argument("--turns", type=int, default=3, help="turns per user (%(default)s)")
    parser.add_argument(
        "--p-barge-in", type=float, default=0.4, help="chance to interrupt (%(default)s)"
    )
    parser.add_argument("--seed", type=int, default=3, help="(%(default)s)")
    parser.add_argument(
        "--model-dir", type=Path, default=Path(".cache/tiny-model"), help="(%(default)s)"
    )
    parser.add_argument("--out", type=Path, default=Path("out/demo"), help="(%(default)s)")
    parser.add_argument(
        "--liveserve", choices=("on", "off"), default="on", help="off: the stock host"
    )


def run(args: argparse.Namespace) -> int:
    """Exit code 0: every conversation went well and somebody interrupted."""
    console = Console()
    try:
        cfg = SessionsConfig(
            sessions=args.sessions,
            turns=args.turns,
            p_barge_in=args.p_barge_in,
            answer_seconds=(4.0, 8.0, 12.0),
            reply_gap=1.0,
            seed=args.seed,
        )
        cfg.validate()
    except ValueError as exc:
        print(f"liveserve demo: {exc}", file=sys.stderr)
        return 2
    ensure_tiny_model(args.model_dir, console)
    flags = ["--liveserve", args.liveserve]
    try:
        with contextlib.ExitStack() as stack:
            spinner = stack.enter_context(_spinner(console))
            task = spinner.add_task("starting thinker, talker and code2wav", total=None)
            server = stack.enter_context(
                running_server(args.model_dir, args.out / "server.log", flags=flags, env=WARM)
            )
            spinner.remove_task(task)
            spinner.stop()
            console.print(f"server ready after {server.started_in_s:.0f} s at {server.url}")
            report = asyncio.run(_converse(server, cfg, console, watch=args.liveserve == "on"))
    except ServerFailed as exc:
        print(f"liveserve demo: {exc}", file=sys.stderr)
        return 1
    return _save(report, args, console)


def ensure_tiny_model(folder: Path, console: Console | None = None) -> None:
    """Write the tiny model into ``folder`` unless it is there; several processes may at once."""
    from liveserve.host.cpu.tiny_model import write_tiny_model

    if (folder / "config.json").exists():
        return
    if console:
        console.print(f"writing a tiny random Qwen3-Omni to {folder}")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as own:
        made = write_tiny_model(Path(own) / folder.name)
        try:
            made.rename(folder)
        except OSError:
            if not (folder / "config.json").exists():  # else another process was quicker
                raise


def _spinner(console: Console) -> Progress:
    columns = SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn()
    return Progress(*columns, console=console, transient=True)


async def _converse(
    server: Server, cfg: SessionsConfig, console: Console, *, watch: bool
) -> SessionsReport:
    """Run the users; meanwhile show the sessions as LiveServe sees them."""
    with Live(console=console, refresh_per_second=4, transient=True) as live:
        watcher = asyncio.ensure_future(_watch(server.url, live)) if watch else None
        try:
            return await run_sessions(replace(cfg, url=server.url, model=server.name))
        finally:
            if watcher is not None:
                watcher.cancel()


async def _watch(url: str, live: Live) -> None:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=2)) as http:
        while True:
            with contextlib.suppress(aiohttp.ClientError, asyncio.TimeoutError):
                async with http.get(url + "/liveserve/sessions") as response:
                    live.update(sessions_table(await response.json()))
            await asyncio.sleep(0.25)


def sessions_table(state: dict[str, Any]) -> Table:
    """The answer of ``GET /liveserve/sessions`` as a table with a playback bar per session."""
    table = Table(title="what the engines are told", title_justify="left")
    for name in ("session", "phase", "heard ▓ / routed ░", "buffer", "clock", "barge-ins"):
        table.add_column(name)
    for row in state["sessions"]:
        routed_s, played_s = row["routed_s"], row["played_s"]
        scale = _BAR / max(12.0, routed_s)
        heard, ahead = int(played_s * scale), int((routed_s - played_s) * scale)
        table.add_row(
            row["session_id"][-6:],
            row["phase"] + (" (user speaks)" if row["speech_active"] else ""),
            "▓" * heard + "░" * ahead,
            f"{row['buffer_s']:.1f} s",
            row["clock_source"],
            str(row["barge_ins"]),
        )
    return table


def _save(report: SessionsReport, args: argparse.Namespace, console: Console) -> int:
    title = f"{args.sessions} users x {args.turns} turns, LiveServe {args.liveserve}"
    console.print(results_table(report.metrics, title))
    for path in save_plots(args.out, report.responses, subtitle=title, max_gap_s=0.1):
        console.print(f"plot: {path}", soft_wrap=True)
    command = shlex.join(["liveserve", *sys.argv[1:]])
    path = args.out / "sessions.json"
    write_result(path, build_result("demo", [report.case()], command=command))
    console.print(f"result: {path}\nserver log: {args.out / 'server.log'}", soft_wrap=True)
    if report.failed:
        print("liveserve demo: some responses failed, see the table", file=sys.stderr)
        return 1
    if args.p_barge_in > 0 and not any(r.outcome == INTERRUPTED for r in report.responses):
        print("liveserve demo: nobody interrupted; try another --seed", file=sys.stderr)
        return 1
    return 0
