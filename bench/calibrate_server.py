"""``liveserve calibrate FILE``: a cost model for the simulator, from a running server.

Voice sessions of its own load the server, a few at a time and then more; meanwhile each engine is
asked for its counts and step times. Step costs are fitted to those, or, better, to every single
step where the server records them (a CPU server started with ``LIVESERVE_CPU_RECORD=DIR``: give
``--record DIR``). What a turn takes on top of its steps (encoder, handovers) is what makes
the simulator agree with the first audio of one user alone. KV pools are read from the server.
Everything that cannot be seen from outside is ``--base``'s, and says so in the file.

(``liveserve bench calibrate`` is something else: it measures a GPU's copy methods.)
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from liveserve.bench.server import ServerUnreachable
from liveserve.bench.sessions import SessionsConfig, SessionsReport, run_sessions
from liveserve.bench.simulator.costs import PRESETS, load_costs, save_costs
from liveserve.bench.simulator.fit import (
    Fit,
    FitError,
    fit_steps,
    read_record,
    require,
    steps_of_polls,
    summary,
)
from liveserve.bench.simulator.measured import (
    Pace,
    in_slow_motion,
    listener_metrics,
    pace_of,
    workload_of,
)
from liveserve.bench.simulator.model import CostModel, ModelError, SimConfig
from liveserve.bench.simulator.simulate import simulate
from liveserve.bench.terminal import progress

_POLL_S = 0.1
_ROUNDS = 3
_SEEDS = 4
_OVERHEADS = ("encode_s", "handover_s", "deliver_s")


@dataclass
class Observed:
    """What a server showed under load.

    Attributes:
        reports: of the sessions, fewest users first.
        polls: answers of ``/liveserve/pressure``.
    """

    reports: list[SessionsReport] = field(default_factory=list)
    polls: list[Mapping[str, Any]] = field(default_factory=list)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", type=Path, metavar="FILE", help="cost model to write (JSON)")
    d = SessionsConfig()
    parser.add_argument("--url", default=d.url, help="the server (%(default)s)")
    parser.add_argument(
        "--users",
        type=_counts,
        default=(1, 2, 4, 8),
        metavar="N,N,…",
        help="users at once, one run after another; the first alone sets latencies (1,2,4,8)",
    )
    parser.add_argument(
        "--answer-seconds", type=float, default=6.0, metavar="S", help="of an answer (%(default)s)"
    )
    parser.add_argument("--turns", type=int, default=2, help="of each user (%(default)s)")
    parser.add_argument("--slow-motion", type=float, default=1.0, metavar="K", help="of the users")
    parser.add_argument(
        "--tokens-per-second", type=float, default=d.tokens_per_second, metavar="R",
        help="text tokens per second of the model's speech (%(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--record", type=Path, metavar="DIR", help="the CPU server's LIVESERVE_CPU_RECORD folder"
    )
    parser.add_argument(
        "--shared", action="store_true", help="the engines share one machine's cores (CPU server)"
    )
    parser.add_argument(
        "--base",
        default="qwen3-omni-h200",
        metavar="MODEL",
        help=f"for what cannot be seen: {', '.join(PRESETS)}, or a file (%(default)s)",
    )
    parser.add_argument("--name", help="of the cost model (the file's)")


def run(args: argparse.Namespace) -> int:
    """0: written; 1: the server showed too little; 2: flags, the base or the server are wrong."""
    try:
        base = load_costs(args.base)
        config = SessionsConfig(
            url=args.url,
            sessions=args.users[0],
            turns=args.turns,
            answer_seconds=(args.answer_seconds,),
            tokens_per_second=args.tokens_per_second,
            slow_motion=args.slow_motion,
            reply_gap=0.5,
            ramp=1.0,
        )
        config.validate()
        observed = asyncio.run(observe(config, args.users))
    except (ValueError, ServerUnreachable) as error:
        print(f"liveserve calibrate: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("liveserve calibrate: interrupted, nothing was written", file=sys.stderr)
        return 130
    try:
        name = args.name or args.file.stem
        costs, fit = fitted(observed, base, name, record=args.record, shared=args.shared)
        save_costs(args.file, costs)
    except (FitError, ModelError, OSError) as error:
        print(f"liveserve calibrate: {error}", file=sys.stderr)
        return 1
    for line in summary(fit):
        print(line)
    for name in _OVERHEADS:
        print(f"{name.removesuffix('_s')}: {1e3 * getattr(costs, name):.1f} ms")
    print(f"cost model: {args.file}")
    return 0


async def observe(config: SessionsConfig, users: Sequence[int]) -> Observed:
    """Load the server with ``users`` users at a time, one run after another, and watch it.

    Raises:
        ServerUnreachable: nothing serves at ``config.url``.
    """
    observed = Observed()
    watcher = asyncio.create_task(_watch(config.url, observed.polls))
    try:
        with progress("calibrate", len(users)) as advance:
            for index, count in enumerate(users):
                here = replace(config, sessions=count, seed=config.seed + index)
                if index:  # the server is warm
                    here = replace(here, warmup=0)
                observed.reports.append(await run_sessions(here))
                advance(f"{count} users")
    finally:
        watcher.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await watcher
    return observed


async def _watch(url: str, polls: list[Mapping[str, Any]]) -> None:
    """Ask again and again; a server without LiveServe has nothing to say."""
    address = url.rstrip("/") + "/liveserve/pressure"
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=5)) as http:
        while True:
            with contextlib.suppress(aiohttp.ClientError, TimeoutError, ValueError):
                async with http.get(address) as response:
                    if response.status == 200:
                        polls.append(await response.json())
            await asyncio.sleep(_POLL_S)


def fitted(
    observed: Observed,
    base: CostModel,
    name: str,
    *,
    record: Path | None = None,
    shared: bool = False,
) -> tuple[CostModel, Fit]:
    """The cost model of a server that was observed.

    Raises:
        FitError: it showed too few steps.
        ModelError: its answers have no text or no audio.
    """
    steps = read_record(record) if record is not None else steps_of_polls(observed.polls)
    fit = fit_steps(steps, shared=shared)
    require(fit, base.name)
    where = f"{record}" if record is not None else "/liveserve/pressure"
    named = msgspec.structs.replace(base, name=name)
    costs = _with_steps(named, fit, where, every_step=record is not None)
    costs = _with_pools(costs, observed.polls)
    if fit.code2wav is None:
        costs = _with_vocoder_time(costs, observed.polls)
    alone = min(observed.reports, key=lambda report: report.config.concurrent)
    pace = pace_of(alone.responses, costs.frame_rate_hz)
    return match_overheads(costs, alone.metrics, alone.config, pace, "liveserve"), fit


def _with_steps(costs: CostModel, fit: Fit, where: str, *, every_step: bool) -> CostModel:
    """The fitted stages in place of the base's; sources of all other figures name the base.
    ``every_step``: each was seen, not averages of several, so that their noise was as well.
    """
    changes: dict[str, Any] = {"parallel_steps": fit.parallel_steps}
    sources = {path: _of_base(costs, source) for path, source in costs.sources.items()}
    for stage, quality in fit.quality.items():
        cost = getattr(fit, stage)
        source = f"fitted to {quality.steps} steps of {where}; within {quality.spread:.2f}x"
        if stage == "code2wav":
            changes[stage] = msgspec.structs.replace(
                costs.code2wav, fixed_s=cost.fixed_s, per_frame_s=cost.per_frame_s
            )
            figures: tuple[str, ...] = ("code2wav.fixed_s", "code2wav.per_frame_s")
        else:
            if not cost.per_prefill_token_s:  # prompts did not show
                step = getattr(costs, stage).step
                cost = msgspec.structs.replace(
                    cost,
                    per_prefill_token_s=step.per_prefill_token_s,
                    per_prefill_pair_s=step.per_prefill_pair_s,
                )
                figures = tuple(f"{stage}.step.{f}" for f in cost.__struct_fields__[:3])
            else:
                figures = tuple(f"{stage}.step.{f}" for f in cost.__struct_fields__)
            changes[stage] = msgspec.structs.replace(getattr(costs, stage), step=cost)
        sources |= dict.fromkeys(figures, source)
    if every_step:
        changes["noise"] = fit.noise
        sources["noise"] = f"what the fit leaves of the steps of {where}"
    if fit.parallel_steps is not None:
        sources["parallel_steps"] = f"fitted to the steps of {where}"
    return msgspec.structs.replace(costs, sources=sources, **changes)


def _of_base(costs: CostModel, source: str) -> str:
    return source if source.startswith("of the base") else f"of the base: {source}"


def _with_pools(costs: CostModel, polls: Sequence[Mapping[str, Any]]) -> CostModel:
    """Blocks of the KV pools, as the engines report them."""
    changes: dict[str, Any] = {}
    sources = dict(costs.sources)
    for engine in polls[-1].get("engines", ()) if polls else ():
        snapshot = engine.get("snapshot") or {}
        stage, blocks = snapshot.get("stage"), snapshot.get("kv_blocks_total", 0)
        if stage not in ("thinker", "talker") or not blocks or stage in changes:
            continue
        before = getattr(costs, stage)
        token_bytes = snapshot.get("kv_block_bytes", 0) // before.block_tokens
        changes[stage] = msgspec.structs.replace(
            before, kv_blocks=blocks, kv_bytes_per_token=token_bytes or before.kv_bytes_per_token
        )
        sources[f"{stage}.kv_blocks"] = "the server's"
        if token_bytes:
            sources[f"{stage}.kv_bytes_per_token"] = (
                f"the server's bytes of a block, at {before.block_tokens} tokens"
            )
    return msgspec.structs.replace(costs, sources=sources, **changes)


def _with_vocoder_time(costs: CostModel, polls: Sequence[Mapping[str, Any]]) -> CostModel:
    """The base's vocoder, made as slow as the server's is on average."""
    seen = [
        engine["snapshot"]["step_ms"] / 1e3
        for poll in polls
        for engine in poll.get("engines", ())
        if engine.get("answered") and engine["snapshot"].get("stage") == "code2wav"
        and engine["snapshot"].get("steps_total", 0) and engine["snapshot"]["step_ms"] > 0
    ]  # fmt: skip
    if not seen:
        return costs
    before = costs.code2wav
    factor = statistics.median(seen) / before.seconds(
        1, costs.left_context_frames + costs.chunk_frames
    )
    source = "the base's, scaled to the server's average step; within 2x"
    return msgspec.structs.replace(
        costs,
        code2wav=msgspec.structs.replace(
            before, fixed_s=before.fixed_s * factor, per_frame_s=before.per_frame_s * factor
        ),
        sources=costs.sources | {"code2wav.fixed_s": source, "code2wav.per_frame_s": source},
    )


def match_overheads(
    costs: CostModel,
    measured: Mapping[str, Any],
    config: SessionsConfig,
    pace: Pace,
    system: str,
) -> CostModel:
    """What a turn takes beside its steps, so that the simulator gives the first text and the first
    audio that the users of ``config`` had (on the median). The delivery cannot be told from the
    encoder by that: text and audio both wait for it; it is left as it is.

    Args:
        costs: steps and all else.
        measured: the metrics of the run.
        config, pace: its users, see `workload_of`.
        system: what served them, see `liveserve.bench.simulator.model.system`.

    Raises:
        ModelError: the run has no text or no audio.
    """
    slow = config.slow_motion

    def missing_s(name: str, tried: CostModel) -> float:
        real = measured.get(name)
        ours = simulated_metrics(tried, config, pace, system).get(name)
        if not isinstance(real, float) or ours is None:
            raise ModelError(f"{name}: the server's answers have none")
        return slow * (real - ours)

    found = msgspec.structs.replace(costs, encode_s=0.0, handover_s=0.0, encode_token_s=0.0)
    encode_s = max(0.0, missing_s("text_ttfp_p50_s", found))
    found = msgspec.structs.replace(found, encode_s=encode_s)
    # Handovers shift steps against one another: what is missing is halved and looked at again.
    for _ in range(_ROUNDS):
        more_s = missing_s("ttfp_p50_s", found) / 2
        found = msgspec.structs.replace(found, handover_s=max(0.0, found.handover_s + more_s))
    source = f"first text and audio of {config.concurrent} at once, less the steps; within 1.5x"
    sources = {path: text for path, text in costs.sources.items() if path != "encode_token_s"}
    return msgspec.structs.replace(
        found, sources=sources | {"encode_s": source, "handover_s": source}
    )


def simulated_metrics(
    costs: CostModel, config: SessionsConfig, pace: Pace, system: str
) -> dict[str, Any]:
    """The metrics of the users of ``config``, served by the simulator; where steps differ by chance
    (`CostModel.noise`), of several runs together.
    """
    slow = config.slow_motion
    settings = SimConfig(
        ack_interval_s=0.2 * slow, max_gap_s=config.max_gap_ms / 1e3 * slow, prefix_caching=False
    )
    workload = workload_of(config, pace, costs)
    slowed = in_slow_motion(costs, config)
    seeds = range(_SEEDS if costs.noise else 1)
    runs = [simulate(workload, slowed, system, settings, seed) for seed in seeds]
    return listener_metrics(
        [(run.responses, run.sessions) for run in runs], config, costs.frame_rate_hz
    )


def _counts(text: str) -> tuple[int, ...]:
    try:
        counts = tuple(int(part) for part in text.split(","))
    except ValueError:
        counts = ()
    if not counts or min(counts) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: give numbers of users like 1,2,4,8")
    return counts
