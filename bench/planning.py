"""``liveserve bench planning``: what one planning round costs, on this machine's CPU.

A round ranks every request by its session's view, then orders, holds and admits them; its two parts
are also timed apart. A bad case is measured: every class is present, the KV pool is above its
watermark, half of the long buffers were held before, everything fits, and the input comes in random
order.
"""

from __future__ import annotations

import argparse
import gc
import random
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from liveserve.bench.result_file import build_result, write_result
from liveserve.scheduler.plan import Budgets, Candidate, plan
from liveserve.scheduler.policy_config import PolicyConfig
from liveserve.scheduler.urgency import rank
from liveserve.scheduler.views import Phase, SessionView

SIZES = (16, 64, 256, 1024)
NOW_S = 100.0
ARRIVED_S = 90.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--sizes",
        type=int,
        nargs="+",
        default=list(SIZES),
        metavar="N",
        help="requests in a round (16 64 256 1024)",
    )
    parser.add_argument("--rounds", type=int, default=2000, help="per size (%(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="of the requests (%(default)s)")
    parser.add_argument("--json", metavar="FILE", type=Path, help="write the result file")


def run(args: argparse.Namespace) -> int:
    if args.rounds < 1 or min(args.sizes) < 1:
        print("liveserve bench planning: --rounds, --sizes: use 1 or more", file=sys.stderr)
        return 2
    table = Table(title="one planning round, ms", title_justify="left")
    for name in ("requests", "best", "median", "p95", "ranking: best", "planning: best"):
        table.add_column(name, justify="right")
    cases, figures = [], {}
    for size in args.sizes:
        metrics = measure(size, args.rounds, args.seed)
        table.add_row(str(size), *(f"{value:.3f}" for value in metrics.values()))
        params = {"requests": size, "rounds": args.rounds, "seed": args.seed}
        cases.append({"params": params, "metrics": metrics})
        figures[f"planning_round_ms_{size}"] = {
            "value": metrics["round_best_ms"],
            "low": metrics["round_best_ms"],
            "high": metrics["round_p95_ms"],
            "better": "lower",
        }
    Console().print(table)
    if args.json:
        command = shlex.join(["liveserve", *sys.argv[1:]])
        write_result(args.json, build_result("planning", cases, command=command, ratios=figures))
    return 0


def measure(size: int, rounds: int, seed: int) -> dict[str, float]:
    """Milliseconds of a round with ``size`` requests, and of its parts.

    The best is what the code costs; median and p95 also have what else ran on the machine.
    """
    config = PolicyConfig()
    views, requests = workload(size, seed)
    budgets = Budgets(tokens=8 * size, free_blocks=2 * size, total_blocks=64 * size)
    held = frozenset(
        request.request_id
        for index, request in enumerate(requests)
        if index % 2 and (request.rank.buffer_s or 0.0) > config.p_release_s
    )

    def ranking() -> None:
        for request, (view, made_s) in zip(requests, views, strict=True):
            rank(view, made_s, config.p_safe_s, ARRIVED_S, NOW_S, request.rank)

    def planning() -> None:
        plan(requests, budgets, held, NOW_S, config, barge_in_rate=0.5)

    def one_round() -> None:
        ranking()
        planning()

    times = _times_ms(one_round, rounds)
    return {
        "round_best_ms": times[0],
        "round_median_ms": statistics.median(times),
        "round_p95_ms": times[int(0.95 * len(times))],
        "rank_best_ms": _times_ms(ranking, rounds)[0],
        "plan_best_ms": _times_ms(planning, rounds)[0],
    }


def workload(
    size: int, seed: int
) -> tuple[Sequence[tuple[SessionView, float]], Sequence[Candidate]]:
    """Sessions with what the stage made for each (seconds of audio), and their requests.

    A fifth waits for first audio, about a tenth is close to running dry, the rest is ahead.
    """
    draw = random.Random(seed)
    views: list[tuple[SessionView, float]] = []
    requests: list[Candidate] = []
    for index in range(size):
        view = SessionView(
            f"session-{index}", phase=Phase.THINKING, ready_at_s=draw.uniform(90, 99)
        )
        made_s = draw.uniform(0.0, 1.0)
        if draw.random() > 0.2:
            view.phase = Phase.SPEAKING
            view.clock.route(draw.uniform(5.0, 20.0), draw.uniform(90.0, 99.0))
            made_s = view.clock.played_s(NOW_S) + draw.uniform(0.1, 4.5)
        is_prefill = not view.clock.started
        requests.append(
            Candidate(
                request_id=f"duplex-s.{draw.getrandbits(64):016x}.e.0.r.stage0-turn{index}",
                rank=rank(view, made_s, 0.5, ARRIVED_S, NOW_S),
                tokens_needed=32 if is_prefill else 1,
                kv_blocks_held=0 if is_prefill else draw.randint(8, 64),
                kv_blocks_needed=2 if is_prefill else draw.randint(0, 1),
                waiting=is_prefill,
                is_prefill=is_prefill,
                since_s=draw.uniform(96.0, 100.0),
            )
        )
        views.append((view, made_s))
    return views, requests


def _times_ms(call: Callable[[], object], rounds: int) -> list[float]:
    """Times of ``rounds`` calls, sorted."""
    for _ in range(20):
        call()
    times = []
    gc.collect()
    gc.freeze()  # as vLLM does once it is up: collections look at young objects only
    try:
        for _ in range(rounds):
            started = time.perf_counter()
            call()
            times.append(1e3 * (time.perf_counter() - started))
    finally:
        gc.unfreeze()
    return sorted(times)
