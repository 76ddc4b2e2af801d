"""``liveserve profile``: what each turn's first text and first audio wait for, on a live server.

Asks the server to note it (`liveserve.profile`) for as long as this runs, and shows percentiles of
the parts, every turn as a result file, and a timeline for Perfetto.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import shlex
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import aiohttp

from liveserve.bench.chrome_trace import Trace
from liveserve.bench.metrics import percentiles
from liveserve.bench.result_file import build_result, write_result
from liveserve.bench.server import ServerUnreachable
from liveserve.bench.terminal import print_table
from liveserve.profile import TO_AUDIO, TO_TEXT, TO_TOKEN

_POLL_S = 0.5
# The server goes on noting for so long after the last question.
_LEASE_S = 10.0
WHAT = {
    "encode": "end of speech to request: endpoint, features",
    "queue": "request to first step, without the two below",
    "match": "looking for its history",
    "load": "waiting for its history from DRAM",
    "prefill": "first step to first text token",
    "text_route": "first text token to client",
    "talker": "first text token to first codec chunk",
    "vocoder": "first codec chunk to its audio",
    "route": "its audio to client",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="the server (%(default)s)")
    parser.add_argument(
        "--seconds", type=float, default=60.0, help="how long to watch (%(default)s)"
    )
    parser.add_argument("--turns", type=int, metavar="N", help="stop after so many turns")
    parser.add_argument("--json", metavar="FILE", type=Path, help="write the result file")
    parser.add_argument(
        "--trace", metavar="FILE", type=Path, help="write a timeline for ui.perfetto.dev"
    )


def run(args: argparse.Namespace) -> int:
    """Exit code 0: at least one turn was seen; 1: none, or no such server; 2: bad flags."""
    try:
        _check(args)
    except ValueError as exc:
        print(f"liveserve profile: {exc}", file=sys.stderr)
        return 2
    turns: list[dict[str, Any]] = []
    print("liveserve profile: watching; Ctrl-C ends it", file=sys.stderr)
    try:
        with suppress(KeyboardInterrupt):
            asyncio.run(watch(args.url, args.seconds, args.turns, turns.extend))
    except ServerUnreachable as exc:
        print(f"liveserve profile: {exc}", file=sys.stderr)
        return 1
    if not turns:
        print(
            "liveserve profile: no turn was answered meanwhile; talk to the server, for example "
            f"with 'liveserve bench sessions --url {args.url}'",
            file=sys.stderr,
        )
        return 1
    show(turns)
    if args.json:
        params = {"url": args.url, "seconds": args.seconds, "turns": len(turns)}
        cases = [{"params": params, "metrics": {**summary(turns), "turns": turns}}]
        write_result(
            args.json,
            build_result("profile", cases, command=shlex.join(["liveserve", *sys.argv[1:]])),
        )
    if args.trace:
        trace(turns).write(args.trace)
    return 0


async def watch(
    url: str,
    seconds: float,
    max_turns: int | None,
    on_turns: Callable[[list[dict[str, Any]]], None],
) -> None:
    """Profile for ``seconds``, or until ``max_turns`` turns.

    Raises:
        ServerUnreachable: nothing answers at ``url``, or it is no LiveServe server.
    """
    address = url.rstrip("/") + "/liveserve/profile"
    seen, after, deadline_s = 0, -1, time.monotonic() + seconds
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=30)) as http:
        while time.monotonic() < deadline_s and (max_turns is None or seen < max_turns):
            try:
                async with http.post(
                    address, params={"seconds": _LEASE_S, "after": after}
                ) as response:
                    response.raise_for_status()
                    report = await response.json()
                    found = report["turns"][: None if max_turns is None else max_turns - seen]
                    if after < 0:  # of an earlier watch
                        found = []
                    after = max(after, report["newest"])
            except (aiohttp.ClientError, OSError, TimeoutError, ValueError, LookupError) as exc:
                raise ServerUnreachable(
                    f"--url {url}: no LiveServe server answers at {address} "
                    f"({type(exc).__name__}: {exc}); start one with 'liveserve serve MODEL', or "
                    "correct --url"
                ) from exc
            seen += len(found)
            on_turns(found)
            await asyncio.sleep(_POLL_S)


def summary(turns: Sequence[Mapping[str, Any]]) -> dict[str, float | int | None]:
    """Percentiles of the wholes and of their parts, in seconds."""
    metrics: dict[str, float | int | None] = {"turns_seen": len(turns)}
    for whole in ("to_text", "to_audio"):
        metrics |= percentiles(whole, (turn[f"{whole}_s"] for turn in turns))
    for part in WHAT:
        metrics |= percentiles(part, (turn["parts"].get(part) for turn in turns))
    return metrics


def show(turns: Sequence[Mapping[str, Any]]) -> None:
    metrics = summary(turns)

    def cells(name: str) -> list[str]:
        values = [metrics[f"{name}_p{p}_s"] for p in (50, 90, 99)]
        return ["-" if value is None else f"{1e3 * value:.1f}" for value in values]

    rows = [[part, *cells(part), what] for part, what in WHAT.items()]
    rows.append(["to first text", *cells("to_text"), " + ".join(TO_TEXT)])
    rows.append(["to first audio", *cells("to_audio"), " + ".join(TO_AUDIO)])
    unsplit = sum(not turn["parts"] for turn in turns)
    title = f"{len(turns)} turns; milliseconds" + (f"; {unsplit} not split" if unsplit else "")
    print_table(title, ("", "P50", "P90", "P99", "what"), rows)


def trace(turns: Iterable[Mapping[str, Any]]) -> Trace:
    """A timeline: one group per session; what leads to audio, and text beside it."""
    made = Trace()
    for turn in turns:
        group, parts, start_s = f"session {turn['session_id']}", turn["parts"], turn["speech_end_s"]
        end_s = max(filter(None, (turn["text_s"], turn["audio_s"])), default=start_s)
        name = f"turn {turn['number']}: {turn['outcome']}"
        made.span(group, "turn", name, start_s, end_s, request=turn["request_id"])
        for part in TO_AUDIO:
            if part not in parts:
                continue
            # The clocks of two machines can differ by more than a part takes.
            next_s = start_s + max(0.0, parts[part])
            if parts[part] > 0:
                made.span(group, "critical path", part, start_s, next_s, ms=1e3 * parts[part])
            start_s = next_s
            if part == TO_TOKEN[-1] and "text_route" in parts:
                text_end_s = start_s + max(0.0, parts["text_route"])
                made.span(group, "text", "text_route", start_s, text_end_s)
    return made


def _check(args: argparse.Namespace) -> None:
    if not args.url.startswith(("http://", "https://")):
        raise ValueError(f"--url {args.url}: give an address like http://127.0.0.1:8000")
    if not (math.isfinite(args.seconds) and args.seconds > 0):
        raise ValueError(f"--seconds {args.seconds}: use a number above 0")
    if args.turns is not None and args.turns < 1:
        raise ValueError(f"--turns {args.turns}: use a whole number from 1")
