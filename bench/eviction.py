"""``liveserve bench eviction``: what choosing a victim costs, and what the choice is worth.

Cost: sessions take turns on a full pool of blocks. Each turn reads the session's blocks again,
evicts 16 to 64 blocks for the new ones, and frees all of them, with the events around it. A
*decision* is one `evict` call; the rest of what a policy does is charged to the blocks as well.

Replay: a trace under an overlay of voice interaction (see `overlay`), on a pool of a given size
behind a link. A block of the prompt is a hit if it and all before it are resident; what was
computed before and is not resident is read back over the link before the turn can run (reload).
Figures are of the second half of the trace's time. ``gap_closed_fraction`` is the share of the hit
rate between LRU and Belady's optimum that a policy gains. Blocks are the trace's, with the KV of
Qwen3-Omni-30B-A3B's thinker; a block that a prompt only starts is not cached, as in the host.
"""

from __future__ import annotations

import argparse
import gc
import heapq
import random
import shlex
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from liveserve.bench import queue_cost
from liveserve.bench.overlay import (
    OVERLAYS,
    Happening,
    Kind,
    VoiceModel,
    lay_over,
    of_long_sessions,
    with_blocks,
)
from liveserve.bench.result_file import build_result, write_result
from liveserve.bench.traces import (
    FORMATS,
    MOONCAKE_BLOCK_TOKENS,
    TraceError,
    TraceRequest,
    read_trace,
)
from liveserve.kernels.layout import PagedKVLayout
from liveserve.kvtier.baselines import Arc, Ttl
from liveserve.kvtier.next_use import Estimate, GapPrior, NextUse, ReplyGap
from liveserve.kvtier.optimal import Optimal
from liveserve.kvtier.policies import EvictionPolicy, Lru, NextUsePolicy, TailLru

SLICE = Path(__file__).resolve().parent / "assets" / "mooncake_conversation_slice.jsonl"
BLOCK_BYTES = PagedKVLayout(48, 1, MOONCAKE_BLOCK_TOKENS, 4, 128, 2).block_bytes
# A TTL of so many times what a history costs to compute again, at a usual prefill rate.
_TTL_RATIO, _PREFILL_TOKENS_PER_S = 60.0, 10_000.0
# T-LRU: so many tokens are recomputed at no pain.
_SAFE_BLOCKS = 2048 // MOONCAKE_BLOCK_TOKENS
_SESSION_BLOCKS = 128  # cost bench: blocks at which a session begins anew
_HEADLINE_BLOCKS = 60_000


@dataclass(frozen=True, slots=True)
class Preset:
    """Sizes: blocks for the cost, GiB for the replay."""

    blocks: tuple[int, ...]
    memory_gib: tuple[float, ...]
    needs_trace: bool = False


# The slice in the repository has a sixteenth of the trace's sessions, so of the memory.
PRESETS = {
    "ci": Preset((1_000, 10_000, 60_000), (2, 4, 8, 16)),
    "full": Preset((1_000, 5_000, 20_000, 60_000, 200_000), (32, 64, 128, 256), True),
}
COSTS = ("lru", "scan", "scan-numpy", "block-heap", "next-use")
REPLAYED = ("lru", "arc", "t-lru", "ttl", "next-use eq. 4", "next-use", "next-use told", "optimal")
_NOTES = {
    "next-use eq. 4": "T_next alone, without the chance of another turn",
    "next-use told": "bound: told at each turn whether it is the last; cannot be had",
    "optimal": "Belady's bound",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--preset", choices=PRESETS, default="ci", help="sizes (%(default)s); full needs --trace"
    )
    parser.add_argument(
        "--trace", type=Path, metavar="FILE", help="trace to replay (a slice of Mooncake's)"
    )
    parser.add_argument("--trace-format", choices=FORMATS, help="told from the first line")
    parser.add_argument(
        "--overlays", nargs="+", choices=OVERLAYS, default=list(OVERLAYS), metavar="NAME",
        help=f"of {', '.join(OVERLAYS)}; all",
    )  # fmt: skip
    parser.add_argument(
        "--only", choices=("cost", "replay", "queue"),
        help="one part of the benchmark; queue, our free queue against vLLM's own, needs vLLM",
    )  # fmt: skip
    parser.add_argument(
        "--blocks", type=int, nargs="+", metavar="N", help="pool sizes for the cost"
    )
    parser.add_argument(
        "--memory-gib", type=float, nargs="+", metavar="GIB", help="pool sizes for the replay"
    )
    parser.add_argument(
        "--link-gbps", type=float, default=55.0, help="link, 1e9 bytes/s (%(default)s)"
    )
    parser.add_argument(
        "--barge-in", type=float, default=0.0, metavar="FRACTION",
        help="answers that are spoken over (%(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--hangup", type=float, default=VoiceModel().hangup_fraction, metavar="FRACTION",
        help="users who close their session (%(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--min-turns", type=int, default=1, metavar="N",
        help="replay only sessions of so many turns or more (%(default)s)",
    )  # fmt: skip
    parser.add_argument("--turns", type=int, default=2000, help="timed, per size (%(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="of everything drawn (%(default)s)")
    parser.add_argument("--json", metavar="FILE", type=Path, help="write the result file")
    parser.add_argument("--plots", metavar="FOLDER", type=Path, help="write plots")


def run(args: argparse.Namespace) -> int:
    preset = PRESETS[args.preset]
    sizes = args.blocks or preset.blocks
    memory_gib = args.memory_gib or preset.memory_gib
    try:
        _check(args, preset, sizes, memory_gib)
        cases: list[dict[str, Any]] = []
        ratios: dict[str, dict[str, Any]] = {}
        console = Console(stderr=True)
        columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
        with Progress(*columns, console=console, transient=True) as progress:
            if args.only == "queue":
                queues = queue_cost.measure(max(sizes), args.turns, args.seed)
                cases += queues
                ratios |= queue_cost.ratios(queues)
            if args.only in (None, "cost"):
                costs = cost_cases(sizes, args.turns, args.seed, progress)
                cases += costs
                ratios |= cost_ratios(costs)
            if args.only in (None, "replay"):
                trace = args.trace or SLICE
                requests = with_blocks(read_trace(trace, args.trace_format))
                requests = of_long_sessions(requests, args.min_turns)
                model = VoiceModel(barge_in_fraction=args.barge_in, hangup_fraction=args.hangup)
                replays = replay_cases(
                    requests, args.overlays, memory_gib, model, args.link_gbps, args.seed, progress
                )
                for case in replays:
                    case["params"] |= {"trace": trace.name, "min_turns": args.min_turns}
                cases += replays
                ratios |= replay_ratios(replays)
    except (TraceError, ValueError, ImportError) as error:
        print(f"liveserve bench eviction: {error}", file=sys.stderr)
        return 2
    _print(cases, ratios)
    if args.plots:
        for path in save_plots(args.plots, cases):
            print(path)
    if args.json:
        command = shlex.join(["liveserve", *sys.argv[1:]])
        result = build_result(
            "eviction", cases, command=command, preset=args.preset, ratios=ratios,
            simulated=args.only in (None, "replay"),
        )  # fmt: skip
        write_result(args.json, result)
    return 0


def _check(
    args: argparse.Namespace, preset: Preset, sizes: Sequence[int], memory_gib: Sequence[float]
) -> None:
    if preset.needs_trace and args.only in (None, "replay") and not args.trace:
        raise ValueError(f"--preset {args.preset} replays a whole trace: name it with --trace FILE")
    if min(sizes) < 4 * _SESSION_BLOCKS and args.only != "replay":
        raise ValueError(f"--blocks: use {4 * _SESSION_BLOCKS} or more")
    if not all(0 < gib < 1e6 for gib in memory_gib):
        raise ValueError("--memory-gib: use sizes above 0")
    if min(memory_gib) * 2**30 < BLOCK_BYTES:
        raise ValueError(f"--memory-gib: one block takes {BLOCK_BYTES / 2**30:.3f} GiB")
    if not 0 < args.link_gbps < 1e6:
        raise ValueError("--link-gbps: use a rate above 0")
    if args.turns < 10:
        raise ValueError("--turns: use 10 or more")
    for name in ("barge_in", "hangup"):
        if not 0 <= getattr(args, name) <= 1:
            raise ValueError(f"--{name.replace('_', '-')}: use a fraction from 0 to 1")


# ---- cost ----------------------------------------------------------------------------------


class _PerBlock(EvictionPolicy):
    """Next use kept per block: what `BlockHeap` and `Scan` share."""

    def __init__(self, num_blocks: int, estimator: NextUse) -> None:
        super().__init__(num_blocks)
        self._estimator = estimator
        self._next_use_s = [0.0] * num_blocks
        self._blocks: dict[Hashable, Sequence[int]] = {}
        self._size = 0
        estimator.subscribe(self._heard)

    def __len__(self) -> int:
        return self._size

    def use(self, session: Hashable, blocks: Sequence[int], now_s: float) -> None:
        self._blocks[session] = blocks
        for depth, block in enumerate(blocks):
            self.table.depth[block] = depth
        self._heard(session, self._estimator.get(session), False)

    def free(self, blocks: Iterable[int], now_s: float, *, blank: bool = False) -> None:
        for block in blocks:
            self.table.freed(block, now_s)
            self._size += 1

    def remove(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            self._unfree(block)
            self._size -= 1

    def _heard(self, session: Hashable, known: Estimate | None, over: bool) -> None:
        if known is not None:
            for block in self._blocks.get(session, ()):
                self._next_use_s[block] = known.next_use_s


class Scan(_PerBlock):
    """Looks at every evictable block at each decision."""

    name = "scan"

    def evict(self, count: int, now_s: float) -> list[int]:
        self._estimator.advance(now_s)
        next_use_s, depth = self._next_use_s, self.table.depth
        candidates = [block for block, is_free in enumerate(self.table.evictable) if is_free]
        victims = heapq.nlargest(count, candidates, lambda b: (next_use_s[b], depth[b]))
        self.remove(victims)
        return victims


class NumpyScan(_PerBlock):
    """As `Scan`, with the keys in an array: the fastest scan that Python can have."""

    name = "scan-numpy"

    def __init__(self, num_blocks: int, estimator: NextUse) -> None:
        self._keys = np.zeros(num_blocks)
        super().__init__(num_blocks, estimator)
        self._is_free = np.frombuffer(self.table.evictable, dtype=np.uint8)

    def evict(self, count: int, now_s: float) -> list[int]:
        self._estimator.advance(now_s)
        candidates = np.flatnonzero(self._is_free)
        count = min(count, len(candidates))
        last = np.argpartition(self._keys[candidates], -count)[-count:]
        victims: list[int] = candidates[last].tolist()
        self.remove(victims)
        return victims

    def _heard(self, session: Hashable, known: Estimate | None, over: bool) -> None:
        blocks = self._blocks.get(session)
        if known is not None and blocks:
            # Of one session's blocks the deepest first: times differ by seconds, depths by less.
            self._keys[blocks] = known.next_use_s + 1e-6 * np.arange(len(blocks))


class BlockHeap(_PerBlock):
    """One heap of all blocks: a session's event moves each of its blocks."""

    name = "block-heap"

    def __init__(self, num_blocks: int, estimator: NextUse) -> None:
        self._heap: list[tuple[float, int, int]] = []
        super().__init__(num_blocks, estimator)

    def free(self, blocks: Iterable[int], now_s: float, *, blank: bool = False) -> None:
        blocks = list(blocks)
        super().free(blocks, now_s, blank=blank)
        self._push(blocks)

    def evict(self, count: int, now_s: float) -> list[int]:
        self._estimator.advance(now_s)
        victims: list[int] = []
        while self._heap and len(victims) < count:
            next_use_s, _, block = heapq.heappop(self._heap)
            if self.table.evictable[block] and -next_use_s == self._next_use_s[block]:
                self.remove((block,))
                victims.append(block)
        return victims

    def _heard(self, session: Hashable, known: Estimate | None, over: bool) -> None:
        super()._heard(session, known, over)
        evictable = self.table.evictable
        self._push(block for block in self._blocks.get(session, ()) if evictable[block])

    def _push(self, blocks: Iterable[int]) -> None:
        heap, depth = self._heap, self.table.depth
        for block in blocks:
            heapq.heappush(heap, (-self._next_use_s[block], -depth[block], block))
        if len(heap) > 4 * self.table.num_blocks:
            self._heap = [
                entry
                for entry in heap
                if self.table.evictable[entry[2]] and -entry[0] == self._next_use_s[entry[2]]
            ]
            heapq.heapify(self._heap)


def cost_cases(
    sizes: Sequence[int], turns: int, seed: int, progress: Progress
) -> list[dict[str, Any]]:
    """One case per size and policy."""
    task = progress.add_task("cost", total=len(sizes) * len(COSTS))
    cases = []
    for size in sizes:
        for name in COSTS:
            progress.update(task, description=f"cost: {name}, {size} blocks")
            # A scan takes milliseconds; fewer turns tell as much.
            timed = max(10, min(turns, 10_000_000 // size)) if name == "scan" else turns
            metrics = measure_cost(name, size, timed, seed)
            params = {"part": "cost", "policy": name, "blocks": size, "turns": timed, "seed": seed}
            cases.append({"params": params, "metrics": metrics})
            progress.advance(task)
    return cases


def measure_cost(name: str, num_blocks: int, turns: int, seed: int) -> dict[str, float]:
    """Times of ``turns`` turns on a pool of ``num_blocks`` blocks, all of them held by sessions."""
    draw = random.Random(seed)
    estimator = NextUse(max_sessions=num_blocks)
    policy: EvictionPolicy
    if name == "lru":
        policy = Lru(num_blocks)
    elif name == "next-use":
        policy = NextUsePolicy(num_blocks, estimator)
    else:
        scans: dict[str, Callable[[int, NextUse], EvictionPolicy]] = {
            "scan": Scan,
            "scan-numpy": NumpyScan,
            "block-heap": BlockHeap,
        }
        policy = scans[name](num_blocks, estimator)
    sessions = max(4, num_blocks // (_SESSION_BLOCKS // 2))
    chains: list[list[int]] = [[] for _ in range(sessions)]
    owner = [-1] * num_blocks
    free = list(range(num_blocks))
    now_s = 0.0
    decisions_s: list[float] = []
    others_s: list[float] = []
    evicted = handled = 0

    def turn(session: int, timed: bool) -> None:
        nonlocal now_s, evicted, handled
        now_s += draw.expovariate(sessions / 60.0)
        chain = chains[session]
        if len(chain) > _SESSION_BLOCKS:
            chain = chains[session] = []  # a new conversation: the old blocks are nobody's
        wanted = draw.randint(16, 64)
        plays_s, gap_s = draw.uniform(5.0, 60.0), draw.lognormvariate(0.7, 0.6)
        started = time.perf_counter()
        estimator.needed(session, now_s)
        policy.remove(chain)
        before = time.perf_counter()
        missing = wanted - len(free)
        victims = policy.evict(missing, now_s) if missing > 0 else []
        after = time.perf_counter()
        for block in victims:
            if owner[block] >= 0:
                lost = chains[owner[block]]
                if block in lost:
                    lost.remove(block)
        free.extend(victims)
        new = [free.pop() for _ in range(min(wanted, len(free)))]
        chain += new
        for block in new:
            owner[block] = session
        resumed = time.perf_counter()
        policy.use(session, chain, now_s)
        policy.free(reversed(chain), now_s)
        estimator.waiting(session, now_s + plays_s, gap_s, now_s)
        ended = time.perf_counter()
        if timed and victims:
            decisions_s.append(after - before)
            others_s.append((before - started) + (ended - resumed))
            evicted += len(victims)
            handled += len(chain)

    order = list(range(sessions))
    while free:
        turn(draw.choice(order), False)
    for _ in range(min(turns, 200)):
        turn(draw.choice(order), False)
    gc.collect()
    gc.freeze()  # as vLLM does once it is up: collections look at young objects only
    try:
        while len(decisions_s) < turns:
            turn(draw.choice(order), True)
    finally:
        gc.unfreeze()
    decide_s = sum(decisions_s)
    decisions_s.sort()
    return {
        "decision_mean_ms": 1e3 * statistics.fmean(decisions_s),
        "decision_p50_ms": 1e3 * statistics.median(decisions_s),
        "decision_p90_ms": 1e3 * decisions_s[int(0.9 * len(decisions_s))],
        "decision_us_per_block": 1e6 * decide_s / evicted,
        # evicted, hashed to a session and freed again: each block's share of all of it
        "cycle_us_per_block": 1e6 * (decide_s / evicted + sum(others_s) / handled),
        "evicted_per_decision": evicted / len(decisions_s),
    }


def cost_ratios(cases: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The targets' figures, at 60k blocks or at the largest size below."""
    sizes = sorted({case["params"]["blocks"] for case in cases})
    size = max([s for s in sizes if s <= _HEADLINE_BLOCKS], default=sizes[0])
    at = {c["params"]["policy"]: c["metrics"] for c in cases if c["params"]["blocks"] == size}
    ours, mean = at["next-use"], "decision_mean_ms"
    return {
        "index_us_per_block": _ratio(ours["cycle_us_per_block"], "lower"),
        "index_p90_ms": _ratio(ours["decision_p90_ms"], "lower"),
        "index_scan_speedup": _ratio(at["scan"][mean] / ours[mean], "higher"),
        "index_numpy_scan_speedup": _ratio(at["scan-numpy"][mean] / ours[mean], "higher"),
    }


def _ratio(value: float, better: str) -> dict[str, Any]:
    return {"value": value, "low": value, "high": value, "better": better}


# ---- replay --------------------------------------------------------------------------------


@dataclass(slots=True)
class Replay:
    """What came of one replay, over the turns that count.

    Attributes:
        reload_s: per turn that continues a session, time to read back what was evicted of it.
        victims: every block evicted, in order.
    """

    hits: int
    blocks: int
    reload_s: list[float]
    victims: list[int]

    @property
    def hit_fraction(self) -> float:
        return self.hits / self.blocks if self.blocks else 0.0


def full_blocks(request: TraceRequest) -> tuple[int, ...]:
    return request.blocks[: request.input_tokens // MOONCAKE_BLOCK_TOKENS]


def replay(
    cached: Sequence[Sequence[int]],
    seen: Sequence[Happening],
    policy: EvictionPolicy,
    estimator: NextUse,
    capacity: int,
    *,
    from_s: float = 0.0,
    until_s: float = float("inf"),
    link_gbps: float = 55.0,
    told: bool = False,
) -> Replay:
    """Run ``seen`` against a pool of ``capacity`` blocks.

    Args:
        cached: blocks of each request, first one first; their ids are the policy's block ids.
        from_s, until_s: turns that count.
        told: a session closes at its last turn, as if the future were known.
    """
    resident = bytearray(policy.table.num_blocks)
    computed = bytearray(policy.table.num_blocks)
    size = 0
    prior = GapPrior()
    gaps: dict[int, ReplyGap] = {}
    ends_s: dict[int, float] = {}
    turns: Counter[int] = Counter()
    over: set[int] = set()
    out = Replay(0, 0, [], [])
    for what in seen:
        session, now_s = what.session, what.at_s
        if what.kind is Kind.TURN:
            blocks = cached[what.request][:capacity]
            hits = next((n for n, b in enumerate(blocks) if not resident[b]), len(blocks))
            policy.use(session, blocks, now_s)
            present = [block for block in blocks if resident[block]]
            policy.remove(present)
            size += len(blocks) - len(present)
            if size > capacity:
                victims = policy.evict(size - capacity, now_s)
                out.victims += victims
                size -= len(victims)
                for block in victims:
                    resident[block] = 0
            if from_s <= now_s <= until_s:
                out.hits += hits
                out.blocks += len(cached[what.request])
                if turns[session]:
                    again = sum(computed[block] for block in blocks) - hits
                    out.reload_s.append(again * BLOCK_BYTES / (link_gbps * 1e9))
            for block in blocks:
                resident[block] = computed[block] = 1
            policy.free(reversed(blocks), now_s)
            turns[session] += 1
            if told and what.is_last:
                over.add(session)
                estimator.close(session, now_s)
        elif what.kind is Kind.CLOSE:
            estimator.close(session, now_s)
        elif session in over:
            continue
        elif what.kind is Kind.SPEECH:
            if session in ends_s:
                gaps[session].observe(now_s - ends_s.pop(session))
            estimator.needed(session, now_s)
        else:
            gap = gaps.setdefault(session, ReplyGap(prior))
            ends_s[session] = what.ends_s
            estimator.waiting(session, what.ends_s, gap.mean_s, now_s)
    return out


def replay_cases(
    requests: Sequence[TraceRequest],
    overlays: Sequence[str],
    memory_gib: Sequence[float],
    model: VoiceModel,
    link_gbps: float,
    seed: int,
    progress: Progress,
) -> list[dict[str, Any]]:
    """One case per overlay, memory size and policy."""
    dense: dict[int, int] = {}
    cached = [
        tuple(dense.setdefault(block, len(dense)) for block in full_blocks(request))
        for request in requests
    ]
    if not dense:
        raise TraceError(f"no prompt fills a block of {MOONCAKE_BLOCK_TOKENS} tokens")
    span_s = requests[-1].at_s
    task = progress.add_task("replay", total=len(overlays) * len(memory_gib) * len(REPLAYED))
    cases = []
    for overlay in overlays:
        seen = lay_over(requests, overlay, model, seed)
        for gib in memory_gib:
            capacity = int(gib * 2**30 // BLOCK_BYTES)
            done: dict[str, Replay] = {}
            for name in REPLAYED:
                progress.update(task, description=f"replay: {overlay}, {gib:g} GiB, {name}")
                estimator = NextUse(len(requests), weigh_chance=name != "next-use eq. 4")
                policy = _policy(name, len(dense), capacity, estimator, cached, seen)
                done[name] = replay(
                    cached, seen, policy, estimator, capacity, from_s=span_s / 2,
                    until_s=span_s, link_gbps=link_gbps, told=name == "next-use told",
                )  # fmt: skip
                progress.advance(task)
            low, high = done["lru"].hit_fraction, done["optimal"].hit_fraction
            for name, result in done.items():
                params = {"part": "replay", "overlay": overlay, "memory_gib": gib, "policy": name,
                          "blocks": capacity, "link_gbps": link_gbps, "seed": seed,
                          "barge_in_fraction": model.barge_in_fraction,
                          "hangup_fraction": model.hangup_fraction}  # fmt: skip
                metrics = {
                    "hit_fraction": result.hit_fraction,
                    "reload_p50_ms": _percentile_ms(result.reload_s, 0.5),
                    "reload_p90_ms": _percentile_ms(result.reload_s, 0.9),
                    "gap_closed_fraction": (
                        (result.hit_fraction - low) / (high - low) if high > low else None
                    ),
                    "evicted_blocks": len(result.victims),
                    "victims_as_lru": result.victims == done["lru"].victims,
                }
                cases.append({"params": params, "metrics": metrics})
    return cases


def _policy(
    name: str,
    num_blocks: int,
    capacity: int,
    estimator: NextUse,
    cached: Sequence[Sequence[int]],
    seen: Sequence[Happening],
) -> EvictionPolicy:
    makers: dict[str, Callable[[], EvictionPolicy]] = {
        "lru": lambda: Lru(num_blocks),
        "arc": lambda: Arc(num_blocks, capacity),
        "t-lru": lambda: TailLru(num_blocks, _SAFE_BLOCKS),
        "ttl": lambda: Ttl(
            num_blocks,
            lambda blocks: _TTL_RATIO * blocks * MOONCAKE_BLOCK_TOKENS / _PREFILL_TOKENS_PER_S,
        ),
        "optimal": lambda: Optimal(
            num_blocks,
            (cached[what.request][:capacity] for what in seen if what.kind is Kind.TURN),
        ),
    }
    return makers.get(name, lambda: NextUsePolicy(num_blocks, estimator))()


def replay_ratios(cases: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Share of the LRU→optimal gap that next use closes: mean over memory sizes, and the range.

    ``gap_closed_fraction`` is of the voice overlay, the others name theirs.
    """
    ratios = {}
    for overlay in OVERLAYS:
        closed = [
            case["metrics"]["gap_closed_fraction"]
            for case in cases
            if (case["params"]["overlay"], case["params"]["policy"]) == (overlay, "next-use")
            and case["metrics"]["gap_closed_fraction"] is not None
        ]
        if closed:
            name = "gap_closed_fraction" + ("" if overlay == "voice" else f"_{overlay}")
            ratios[name] = {
                "value": statistics.fmean(closed),
                "low": min(closed),
                "high": max(closed),
                "better": "higher",
            }
    return ratios


def _percentile_ms(values_s: Sequence[float], share: float) -> float | None:
    ordered = sorted(values_s)
    return 1e3 * ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else None


# ---- what a person sees --------------------------------------------------------------------


def _print(cases: Sequence[dict[str, Any]], ratios: dict[str, dict[str, Any]]) -> None:
    console = Console()
    costs = [case for case in cases if case["params"]["part"] == "cost"]
    if costs:
        table = Table(title="cost of choosing victims", title_justify="left")
        for column in ("blocks", "policy", "decision mean", "P90 (ms)", "per block", "cycle (µs)"):
            table.add_column(column, justify="left" if column == "policy" else "right")
        for case in costs:
            params, metrics = case["params"], case["metrics"]
            table.add_row(
                str(params["blocks"]),
                params["policy"],
                f"{metrics['decision_mean_ms']:.3f}",
                f"{metrics['decision_p90_ms']:.3f}",
                f"{metrics['decision_us_per_block']:.2f}",
                f"{metrics['cycle_us_per_block']:.2f}",
            )
        console.print(table)
    queues = [case for case in cases if case["params"]["part"] == "queue"]
    if queues:
        table = Table(title="a block taken, hashed and freed", title_justify="left")
        for column in ("blocks", "free queue", "µs", "of the host's"):
            table.add_column(column, justify="left" if column == "free queue" else "right")
        for case in queues:
            params, metrics = case["params"], case["metrics"]
            figures = (f"{metrics['us_per_block']:.2f}", f"{metrics['host_ratio']:.2f}")
            table.add_row(str(params["blocks"]), params["queue"], *figures)
        console.print(table)
    replays = [case for case in cases if case["params"]["part"] == "replay"]
    for overlay in dict.fromkeys(case["params"]["overlay"] for case in replays):
        title = f"overlay {overlay}: hits %, gap closed %, reload P90 ms, by memory"
        table = Table(title=title, title_justify="left")
        table.add_column("policy", no_wrap=True)
        chosen = [case for case in replays if case["params"]["overlay"] == overlay]
        sizes = list(dict.fromkeys(case["params"]["memory_gib"] for case in chosen))
        for size in sizes:
            table.add_column(f"{size:g} GiB", justify="right", no_wrap=True)
        for policy in REPLAYED:
            cells = []
            for size in sizes:
                for case in chosen:
                    if (case["params"]["memory_gib"], case["params"]["policy"]) == (size, policy):
                        cells.append(_cell(case["metrics"]))
            table.add_row(policy, *cells)
        console.print(table)
    if replays:
        for policy, note in _NOTES.items():
            console.print(f"  {policy}: {note}", style="dim")
    for name, ratio in ratios.items():
        spread = f" ({ratio['low']:.3g} to {ratio['high']:.3g})"
        console.print(
            f"{name} = {ratio['value']:.3g}{spread if ratio['low'] != ratio['high'] else ''}"
        )


def _cell(metrics: dict[str, Any]) -> str:
    closed, reload_ms = metrics["gap_closed_fraction"], metrics["reload_p90_ms"]
    return " ".join(
        (
            f"{100 * metrics['hit_fraction']:.1f}",
            f"{'-' if closed is None else f'{100 * closed:.0f}':>3}",
            f"{'-' if reload_ms is None else f'{reload_ms:.0f}':>3}",
        )
    )


def save_plots(folder: Path, cases: Sequence[dict[str, Any]]) -> list[Path]:
    """Cost over pool size, and hit rate over memory for each overlay, into ``folder``."""
    from matplotlib.figure import Figure  # slow to import; needs no display this way

    folder.mkdir(parents=True, exist_ok=True)
    written = []
    colours = (
        "#6b7280",
        "#a16207",
        "#0e7490",
        "#7c3aed",
        "#e07b1a",
        "#2563a8",
        "#93c5fd",
        "#15803d",
    )

    def finish(figure: Any, axes: Any, title: str, name: str) -> None:
        axes.legend(fontsize=9, frameon=False)
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_title(title, fontsize=10, loc="left")
        written.append(folder / name)
        figure.savefig(written[-1], dpi=110)

    costs = [case for case in cases if case["params"]["part"] == "cost"]
    if costs:
        figure = Figure(figsize=(7.5, 4.6), layout="constrained")
        axes = figure.subplots()
        for policy, colour in zip(COSTS, colours, strict=False):
            mine = [case for case in costs if case["params"]["policy"] == policy]
            sizes = [case["params"]["blocks"] for case in mine]
            for metric, style in (("decision_mean_ms", "-"), ("decision_p90_ms", ":")):
                values = [case["metrics"][metric] for case in mine]
                label = policy if style == "-" else None
                axes.plot(sizes, values, style, color=colour, marker="o", ms=3, label=label)
        axes.set(xscale="log", yscale="log", xlabel="evictable blocks", ylabel="one decision (ms)")
        finish(
            figure, axes, "An eviction decision of 16 to 64 blocks: mean, P90 dotted", "cost.png"
        )
    replays = [case for case in cases if case["params"]["part"] == "replay"]
    for overlay in dict.fromkeys(case["params"]["overlay"] for case in replays):
        figure = Figure(figsize=(7.5, 4.6), layout="constrained")
        axes = figure.subplots()
        for policy, colour in zip(REPLAYED, colours, strict=True):
            mine = [
                case
                for case in replays
                if (case["params"]["overlay"], case["params"]["policy"]) == (overlay, policy)
            ]
            sizes = [case["params"]["memory_gib"] for case in mine]
            hits = [100 * case["metrics"]["hit_fraction"] for case in mine]
            style = "--" if policy in ("next-use told", "optimal") else "-"
            axes.plot(sizes, hits, style, color=colour, marker="o", ms=3, label=policy)
        axes.set(xscale="log", xlabel="memory (GiB)", ylabel="blocks hit (%)", ylim=(0, None))
        axes.set_xticks(sizes, labels=[f"{size:g}" for size in sizes])
        axes.minorticks_off()
        finish(figure, axes, f"Prefix hits, overlay {overlay}", f"replay-{overlay}.png")
    return written
