"""``liveserve bench warmup``: first text and audio against how long the user spoke.

One server; ``kv_prefill`` is switched off and on from one session to the next. Every session is new
and has instructions that no other begins with, so nothing of its first prompt is in any cache: what
is computed of it while the user speaks need not be computed afterwards. The longer they speak, the
more that is.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shlex
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import aiohttp
from rich.console import Console
from rich.progress import track
from rich.table import Table

from liveserve.bench.client import ClientConfig, ListenerClock, Session
from liveserve.bench.demo import ensure_tiny_model
from liveserve.bench.launch import (
    WARM,
    Server,
    ServerFailed,
    add_server_arguments,
    running_server,
)
from liveserve.bench.records import COMPLETED, ResponseRecord
from liveserve.bench.result_file import build_result, ratio_of, write_result
from liveserve.bench.server import kv_totals
from liveserve.bench.workload import (
    SAMPLE_RATE_HZ,
    SessionPlan,
    TurnPlan,
    Utterance,
    instructions_text,
    load_utterances,
)

ARMS = ("off", "on")
_ANSWER_TOKENS = 6
_FLAGS = ["--kv-connector", "liveserve", "--kv-dram-gb", "0.25", "--fast-codes"]


@dataclass(frozen=True)
class Trial:
    """What is run; wall seconds."""

    lengths_s: tuple[float, ...] = (0.25, 0.5, 1.0, 1.5, 2.5)
    pairs: int = 3
    instructions: int = 6000
    step_tokens: int = 256
    seed: int = 11


@dataclass
class Turn:
    """One session's turn."""

    arm: str
    length_s: float
    pair: int
    answer: ResponseRecord
    computed: int  # prompt tokens that warm-ups computed for it, and of these used by its turn
    used: int


def add_arguments(parser: argparse.ArgumentParser) -> None:
    d = Trial()
    parser.add_argument(
        "--lengths",
        default=",".join(f"{length:g}" for length in d.lengths_s),
        metavar="S,S",
        help="utterances, in seconds (%(default)s)",
    )
    parser.add_argument("--pairs", type=int, default=d.pairs, help="of each (%(default)s)")
    parser.add_argument(
        "--instructions",
        type=int,
        default=d.instructions,
        help="characters, which are tokens of the tiny model (%(default)s)",
    )
    parser.add_argument(
        "--step-tokens",
        type=int,
        default=d.step_tokens,
        help="of a warm-up in one step (%(default)s)",
    )
    parser.add_argument("--seed", type=int, default=d.seed, help="(%(default)s)")
    add_server_arguments(parser, "warmup")
    parser.add_argument("--json", metavar="FILE", type=Path, help="write the result file")
    parser.add_argument("--plots", metavar="DIR", type=Path, help="write the plot")


def run(args: argparse.Namespace) -> int:
    console = Console(width=None if sys.stdout.isatty() else 120)
    try:
        trial = _trial(args)
    except ValueError as exc:
        print(f"liveserve bench warmup: {exc}", file=sys.stderr)
        return 2
    ensure_tiny_model(args.model_dir, console)
    config = {
        "switches": {"kv_prefill": False},
        "kv": {"prefill_step_tokens": trial.step_tokens},
    }
    flags = [*_FLAGS, "--liveserve-config", json.dumps(config)]
    try:
        log = args.logs / "server.log"
        with running_server(args.model_dir, log, flags=flags, env=WARM) as server:
            turns = asyncio.run(measure(server, trial, console))
    except ServerFailed as exc:
        print(f"liveserve bench warmup: {exc}", file=sys.stderr)
        return 1
    cases, ratios = summary(turns, trial)
    console.print(_table(cases))
    if args.plots is not None:
        console.print(f"plot: {save_plot(args.plots, cases, trial)}", soft_wrap=True)
    if args.json is not None:
        command = shlex.join(["liveserve", *sys.argv[1:]])
        write_result(args.json, build_result("warmup", cases, command=command, ratios=ratios))
    failed = [turn for turn in turns if turn.answer.outcome != COMPLETED]
    if failed:
        print(f"liveserve bench warmup: {len(failed)} answers failed", file=sys.stderr)
    return int(bool(failed))


def _trial(args: argparse.Namespace) -> Trial:
    """Raises:
    ValueError: names the flag.
    """
    try:
        lengths = tuple(sorted(float(part) for part in args.lengths.split(",")))
    except ValueError:
        raise ValueError(f"--lengths {args.lengths!r}: give seconds, for example 0.5,1,2") from None
    if len(lengths) < 2 or not all(0.1 <= length <= 30 for length in lengths):
        raise ValueError("--lengths: give two or more, from 0.1 to 30 seconds")
    for name in ("pairs", "instructions", "step_tokens"):
        if getattr(args, name) < 1:
            raise ValueError(f"--{name.replace('_', '-')}: use 1 or more")
    return Trial(lengths, args.pairs, args.instructions, args.step_tokens, args.seed)


async def measure(server: Server, trial: Trial, console: Console) -> list[Turn]:
    """Sessions one after another: of each length and pair one without and one with warm-ups."""
    timeout = aiohttp.ClientTimeout(total=None, connect=30)
    speech = b"".join(utterance.pcm for utterance in load_utterances())
    turns: list[Turn] = []
    plan = [
        (pair, length_s, arm)
        for pair in range(trial.pairs)
        for length_s in trial.lengths_s
        for arm in (ARMS if pair % 2 == 0 else ARMS[::-1])
    ]
    async with aiohttp.ClientSession(timeout=timeout) as http:
        await _say(http, server, trial, 0, trial.lengths_s[0], speech)  # the first one is slow
        for index, (pair, length_s, arm) in enumerate(track(plan, console=console), start=1):
            await _switch(http, server, arm)
            before = _warmups(server)
            answer = await _say(http, server, trial, index, length_s, speech)
            after = _warmups(server)
            computed, used = (after.get(n, 0) - before.get(n, 0) for n in ("computed", "used"))
            turns.append(Turn(arm, length_s, pair, answer, computed, used))
    return turns


async def _say(
    http: aiohttp.ClientSession,
    server: Server,
    trial: Trial,
    index: int,
    length_s: float,
    speech: bytes,
) -> ResponseRecord:
    """One session of one turn, that the user ends by pushing a button."""
    config = ClientConfig(
        server.url, server.name, end_of_speech="commit", tokens_per_answer_s=1.0, mic_chunk_s=0.05
    )
    pcm = speech[: 2 * round(SAMPLE_RATE_HZ * length_s)]
    plan = SessionPlan(index, (TurnPlan(0, float(_ANSWER_TOKENS), None, 0.0),))
    session = Session(
        plan,
        [Utterance("speech", pcm)],
        config,
        ListenerClock(),
        http,
        instructions=instructions_text(trial.seed, index, trial.instructions),
    )
    await session.run()
    return session.responses[0] if session.responses else ResponseRecord(index, 0, 0.0)


async def _switch(http: aiohttp.ClientSession, server: Server, arm: str) -> None:
    body = {"kv_prefill": arm == "on"}
    async with http.post(server.url + "/liveserve/switches", json=body) as response:
        response.raise_for_status()


def _warmups(server: Server) -> dict[str, int]:
    return dict(kv_totals(server.url).get("warmups") or {})


def summary(
    turns: Sequence[Turn], trial: Trial
) -> tuple[list[dict[str, Any]], dict[str, dict[str, Any]]]:
    """Cases by length and arm, and what is said of the longest utterance, pair by pair."""
    cases = []
    for length_s in trial.lengths_s:
        for arm in ARMS:
            of = [turn for turn in turns if (turn.length_s, turn.arm) == (length_s, arm)]
            text = [s for turn in of if (s := turn.answer.text_ttfp_s) is not None]
            audio = [s for turn in of if (s := turn.answer.ttfp_s) is not None]
            metrics = {
                "text_ttfp_p50_s": statistics.median(text) if text else None,
                "audio_ttfp_p50_s": statistics.median(audio) if audio else None,
                "text_ttfp_s": text,
                "audio_ttfp_s": audio,
                "warmup_computed_tokens": sum(turn.computed for turn in of),
                "warmup_used_tokens": sum(turn.used for turn in of),
                "answers": len(of),
            }
            params = asdict(trial) | {"utterance_s": length_s, "kv_prefill": arm == "on"}
            cases.append({"params": params, "metrics": metrics})
    ratios = {}
    for kind in ("text", "audio"):
        pairs = []
        for pair in range(trial.pairs):
            seen = {
                turn.arm: turn.answer.text_ttfp_s if kind == "text" else turn.answer.ttfp_s
                for turn in turns
                if (turn.pair, turn.length_s) == (pair, trial.lengths_s[-1])
            }
            off, on = seen.get("off"), seen.get("on")
            if off and on:
                pairs.append(off / on)
        if pairs:
            ratios[f"{kind}_ttfp_speedup_longest"] = ratio_of(pairs, "higher")
    return cases, ratios


def _table(cases: Sequence[Mapping[str, Any]]) -> Table:
    table = Table(title="time from the end of speech, median", title_justify="left")
    for name in ("utterance", "kv_prefill", "first text", "first audio", "computed", "used"):
        table.add_column(name)
    for case in cases:
        params, metrics = case["params"], case["metrics"]
        times = (metrics["text_ttfp_p50_s"], metrics["audio_ttfp_p50_s"])
        table.add_row(
            f"{params['utterance_s']:g} s",
            "on" if params["kv_prefill"] else "off",
            *("–" if time_s is None else f"{time_s:.2f} s" for time_s in times),
            str(metrics["warmup_computed_tokens"]),
            str(metrics["warmup_used_tokens"]),
        )
    return table


def save_plot(folder: Path, cases: Sequence[Mapping[str, Any]], trial: Trial) -> Path:
    """First text and first audio against the utterance's length, with warm-ups and without."""
    from matplotlib.figure import Figure

    folder.mkdir(parents=True, exist_ok=True)
    figure = Figure(figsize=(8.4, 4.0), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    kinds = ("text_ttfp_s", "audio_ttfp_s")
    slowest_s = max((t for case in cases for k in kinds for t in case["metrics"][k]), default=1.0)
    for axes, kind in zip(panels, ("text", "audio"), strict=True):
        for on, colour, label in ((False, "#6b7280", "off"), (True, "#2563a8", "on")):
            of = [case for case in cases if case["params"]["kv_prefill"] is on]
            for case in of:
                times = case["metrics"][f"{kind}_ttfp_s"]
                at = [case["params"]["utterance_s"]] * len(times)
                axes.plot(at, times, "o", ms=4, color=colour, alpha=0.4)
            medians = [
                (case["params"]["utterance_s"], case["metrics"][f"{kind}_ttfp_p50_s"])
                for case in of
                if case["metrics"][f"{kind}_ttfp_p50_s"] is not None
            ]
            xs, ys = [x for x, _ in medians], [y for _, y in medians]
            axes.plot(xs, ys, color=colour, label=f"kv_prefill {label}")
        axes.set(xlabel="utterance (s)", title=f"first {kind}", xlim=(0, None))
        axes.set_ylim(0, 1.08 * slowest_s)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("time from the end of speech (s)")
    panels[0].legend(frameon=False, fontsize=9)
    figure.suptitle(
        f"New sessions with {trial.instructions} tokens of instructions, tiny model on a CPU",
        fontsize=10,
    )
    path = folder / "ttfp-by-utterance.png"
    figure.savefig(path, dpi=110)
    return path
