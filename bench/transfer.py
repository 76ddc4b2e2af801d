"""``liveserve bench transfer``: how fast blocks move, and what that costs decoding.

Every method copies fragments of 4 KiB to 2 MiB between a paged cache and pinned memory: each
direction alone and both at once, with the GPU idle and beside a decode-like loop. `limit` is one
large contiguous copy, the most that the link gives; `engine` is the TransferEngine, which chooses a
method by table and cuts transfers into pieces; `cudaMemcpyAsync` is a call for each fragment,
`reference` torch's index copies. Without a GPU the same code runs on small sizes in ordinary
memory, a dry run: its figures say nothing of a GPU, and its result is marked as simulated.
"""

from __future__ import annotations

import argparse
import shlex
import statistics
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from liveserve.bench.compute_load import SMALL, THINKER, DecodeLoop, ModelShape
from liveserve.bench.gpu_facts import gpu_facts
from liveserve.bench.result_file import build_result, write_result
from liveserve.bench.terminal import print_table, progress
from liveserve.bench.transfer_lanes import (
    Arena,
    Case,
    ContiguousCopy,
    CopyLane,
    DecodeRunner,
    EngineLane,
    FragmentCopy,
    Runner,
    run_together,
)
from liveserve.kernels.base import CopyMethod, Direction
from liveserve.kernels.calibrate import BUILT_IN, KIB, MIB, SIZES, Rate, Table
from liveserve.kernels.methods import all_methods
from liveserve.kernels.triton_copy import DEFAULT_PROGRAMS

LIMIT, ENGINE = ContiguousCopy.name, "engine"
KERNEL_METHODS = tuple(all_methods())
METHODS = (*KERNEL_METHODS, FragmentCopy.name, ENGINE)
TRAFFIC = ("load", "store", "both")
COMPUTE = ("idle", "decode")
DRY_RUN_NOTE = "CPU dry run, not a GPU's figures"


@dataclass(frozen=True, slots=True)
class Scale:
    """What a machine can take. ``decode_shape``: a few layers of the model, enough to fill a GPU's
    memory bandwidth."""

    sizes: tuple[int, ...]
    counts: tuple[int, ...]
    max_bytes: int
    repeats: int
    decode_steps: int
    decode_shape: ModelShape
    decode_batch: int
    decode_context: int
    dtype: torch.dtype


_DECODE_LAYERS = 16
GPU = Scale(
    sizes=SIZES,
    counts=(48, 480, 4800),
    max_bytes=64 * MIB,
    repeats=7,
    decode_steps=40,
    decode_shape=ModelShape(_DECODE_LAYERS, *(getattr(THINKER, n) for n in THINKER.__slots__[1:])),
    decode_batch=32,
    decode_context=2048,
    dtype=torch.bfloat16,
)
CPU = Scale(
    sizes=(4 * KIB, 16 * KIB, 64 * KIB, 2 * MIB),
    counts=(48,),
    max_bytes=4 * MIB,
    repeats=3,
    decode_steps=5,
    decode_shape=ModelShape(2, *(getattr(SMALL, n) for n in SMALL.__slots__[1:])),
    decode_batch=4,
    decode_context=64,
    dtype=torch.float32,
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--sizes", type=int, nargs="+", metavar="BYTES", help="of fragments (4096 … 2097152)"
    )
    parser.add_argument(
        "--counts",
        type=int,
        nargs="+",
        metavar="N",
        help="fragments in a copy (48 480 4800); fewer where the copy would be larger than "
        "--max-mib. Runs of both directions and beside decoding take the largest only",
    )
    parser.add_argument("--max-mib", type=int, metavar="MIB", help="of a copy (64)")
    parser.add_argument("--methods", nargs="+", choices=METHODS, help="(all that can run here)")
    parser.add_argument(
        "--traffic", nargs="+", choices=TRAFFIC, default=list(TRAFFIC), help="directions (all)"
    )
    parser.add_argument(
        "--compute", nargs="+", choices=COMPUTE, default=list(COMPUTE), help="beside it (both)"
    )
    parser.add_argument("--repeats", type=int, metavar="N", help="copies of a case, at least (7)")
    parser.add_argument(
        "--refcheck", action="store_true", help="check the bytes of every method in every case"
    )
    add_engine_arguments(parser, "dry run: rate of the engine's link")
    parser.add_argument(
        "--budget-s", type=float, metavar="S", help="start no more cases after so many seconds"
    )
    parser.add_argument("--json", metavar="FILE", type=Path, help="write the result file")
    parser.add_argument("--plot", metavar="FILE", type=Path, help="write heat maps (PNG)")


def run(args: argparse.Namespace) -> int:
    try:
        bench = TransferBench.from_arguments(args)
        bench.run()
    except (ValueError, OSError) as error:
        print(f"liveserve bench transfer: {error}", file=sys.stderr)
        return 2
    bench.print_tables()
    if args.json:
        write_result(args.json, bench.result(shlex.join(["liveserve", *sys.argv[1:]])))
    if args.plot:
        save_plot(args.plot, bench.cases, bench.title)
    for case in bench.cases:
        if "error" in case["metrics"]:
            print(f"failed: {_label(case['params'])}: {case['metrics']['error']}", file=sys.stderr)
    if bench.skipped:
        print(f"{bench.skipped} cases not measured: --budget-s is over", file=sys.stderr)
    return 1 if any("error" in case["metrics"] for case in bench.cases) else 0


@dataclass(frozen=True, slots=True)
class Plan:
    """One case to measure."""

    method: str
    traffic: str
    compute: str
    fragment_bytes: int
    count: int

    @property
    def directions(self) -> tuple[Direction, ...]:
        return tuple(Direction) if self.traffic == "both" else (Direction(self.traffic),)


@dataclass
class TransferBench:
    """Measures; ``cases`` and ``ratios`` are those of the result file.

    Raises:
        ValueError: settings that make no sense, or methods that this machine cannot run; no
            memory.
    """

    device: str
    scale: Scale
    methods: Sequence[str]
    traffic: Sequence[str]
    compute: Sequence[str]
    table: Table | None = None
    link_gbps: float | None = None
    refcheck: bool = False
    budget_s: float | None = None
    cases: list[dict[str, Any]] = field(default_factory=list)
    skipped: int = 0
    nvml: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def from_arguments(cls, args: argparse.Namespace) -> TransferBench:
        device = bench_device(args)
        scale = GPU if device != "cpu" else CPU
        for name in ("sizes", "counts"):
            _check_positive(name, getattr(args, name))
        for name in ("max_mib", "repeats", "budget_s", "link_gbps"):
            _check_positive(name, [getattr(args, name)])
        if args.link_gbps is not None and device != "cpu":
            raise ValueError("--link-gbps imitates a link on a CPU: give --dry-run with it")
        chosen = Scale(
            sizes=tuple(sorted(set(args.sizes or scale.sizes))),
            counts=tuple(sorted(set(args.counts or scale.counts))),
            max_bytes=args.max_mib * MIB if args.max_mib else scale.max_bytes,
            repeats=args.repeats or scale.repeats,
            decode_steps=scale.decode_steps,
            decode_shape=scale.decode_shape,
            decode_batch=scale.decode_batch,
            decode_context=scale.decode_context,
            dtype=scale.dtype,
        )
        for size in chosen.sizes:
            if size % 16 or size > chosen.max_bytes:
                raise ValueError(
                    f"--sizes must be multiples of 16 bytes and at most --max-mib, got {size}"
                )
        able = {name for name, method in copy_methods().items() if method.available()} | {ENGINE}
        if args.methods and not able.issuperset(args.methods):
            missing = ", ".join(sorted(set(args.methods) - able))
            raise ValueError(f"--methods: not available on this machine: {missing}")
        return cls(
            device=device,
            scale=chosen,
            methods=args.methods or [name for name in METHODS if name in able],
            traffic=args.traffic,
            compute=args.compute,
            table=Table.load(args.table) if args.table else None,
            link_gbps=args.link_gbps,
            refcheck=args.refcheck,
            budget_s=args.budget_s,
        )

    @property
    def dry(self) -> bool:
        return self.device == "cpu"

    @property
    def title(self) -> str:
        if self.dry:
            return DRY_RUN_NOTE
        return torch.cuda.get_device_name(self.device)

    def plans(self) -> Iterator[Plan]:
        """The cases, what matters most first: the limits, each method alone, the rest."""
        scale = self.scale
        for compute in ("idle", *(c for c in self.compute if c != "idle")):
            for traffic in self.traffic:
                yield Plan(LIMIT, traffic, compute, scale.max_bytes, 1)
        ordered = sorted(self.methods, key=lambda name: name == ENGINE)
        for compute in self.compute:
            for traffic in self.traffic:
                for name in ordered:
                    for size in scale.sizes:
                        counts = counts_for(size, scale.counts, scale.max_bytes)
                        alone = compute == "idle" and traffic != "both"
                        for count in reversed(counts if alone else counts[-1:]):
                            yield Plan(name, traffic, compute, size, count)

    def run(self) -> None:
        """Measures all plans. What a method does wrong is recorded in its case."""
        deadline_s = None if self.budget_s is None else time.monotonic() + self.budget_s
        plans = list(self.plans())
        # Each direction has methods of its own, because each is a thread.
        self._copies = {direction: copy_methods() for direction in Direction}
        self._arenas: dict[Direction, Arena] = {}
        self._loop: DecodeLoop | None = None
        try:
            for direction in Direction:
                self._arenas[direction] = self._arena()
            if any(plan.compute == "decode" for plan in plans):
                self._loop = self._decode_loop()
            with progress("transfer", len(plans)) as advance:
                for plan in plans:
                    if deadline_s is not None and time.monotonic() > deadline_s:
                        self.skipped += 1
                    else:
                        self._measure(plan)
                    advance(_label(vars_of(plan)))
        finally:
            for arena in self._arenas.values():
                arena.close()

    def result(self, command: str) -> dict[str, Any]:
        """The result object; see result_file.py."""
        result = build_result(
            "transfer",
            self.cases,
            command=command,
            preset="dry-run" if self.dry else None,
            ratios=ratios_of(self.cases, self.table),
            simulated=self.dry,
        )
        result["machine"]["nvml"] = self.nvml or None
        result["cases_skipped"] = self.skipped
        return result

    def print_tables(self) -> None:
        for compute in self.compute:
            for traffic in self.traffic:
                columns, rows = table_of(self.cases, traffic, compute)
                if rows:
                    print_table(f"{traffic}, {compute}: GB/s ({self.title})", columns, rows)
        for name, ratio in ratios_of(self.cases, self.table).items():
            spread = f"{ratio['low']:.3f} to {ratio['high']:.3f}"
            print(f"{name} = {ratio['value']:.3f} ({spread}; {ratio['better']} is better)")

    def _arena(self) -> Arena:
        try:
            return Arena(self.device, self.scale.max_bytes)
        except RuntimeError as error:
            reason = " ".join(str(error).split())
            raise ValueError(
                f"--max-mib {self.scale.max_bytes // MIB} takes four times as much on either side: "
                f"{reason}"
            ) from error

    def _decode_loop(self) -> DecodeLoop:
        scale = self.scale
        return DecodeLoop(
            scale.decode_shape,
            batch=scale.decode_batch,
            context=scale.decode_context,
            device=self.device,
            dtype=scale.dtype,
        )

    def _measure(self, plan: Plan) -> None:
        metrics: dict[str, Any]
        lanes: list[tuple[Direction, Case, Runner]] = []
        try:
            for direction in plan.directions:
                case = self._arenas[direction].case(plan.fragment_bytes, plan.count)
                lane = self._lane(plan, case, direction)
                if lane is None:
                    return
                lanes.append((direction, case, lane))
            metrics = self._run(plan, lanes)
        except (RuntimeError, ValueError, OSError) as error:
            metrics = {"error": " ".join(str(error).split()) or type(error).__name__}
        finally:
            for _, _, lane in lanes:
                if isinstance(lane, EngineLane):
                    lane.close()
        self.cases.append({"params": vars_of(plan), "metrics": metrics})
        if plan.method == LIMIT and plan.compute == "idle" and not self.dry:
            self.nvml[f"after_{plan.traffic}_limit"] = gpu_facts(self.device)

    def _run(self, plan: Plan, lanes: list[tuple[Direction, Case, Runner]]) -> dict[str, Any]:
        checked = self.refcheck and plan.method != LIMIT and plan.compute == "idle"
        for direction, case, lane in lanes if checked else ():
            assert isinstance(lane, CopyLane | EngineLane)
            case.check(plan.method, direction, lane.copy)
        runners = [lane for _, _, lane in lanes]
        metrics: dict[str, Any] = {}
        if plan.compute == "decode":
            assert self._loop is not None
            alone = DecodeRunner(self._loop, self.scale.decode_steps)
            run_together([alone])
            beside = DecodeRunner(self._loop, self.scale.decode_steps)
            run_together([*runners, beside])
            before_s, during_s = (statistics.median(r.times_s) for r in (alone, beside))
            metrics = {
                "decode_step_alone_s": before_s,
                "decode_step_s": during_s,
                "decode_slowdown": during_s / before_s - 1,
            }
        else:
            run_together(runners)
        speeds = {
            direction.value: [case.nbytes / t / 1e9 for t in lane.times_s if t > 0]
            for direction, case, lane in lanes
        }
        for name, pick in (("", statistics.median), ("_low", min), ("_high", max)):
            metrics[f"bandwidth{name}_gbps"] = sum(pick(rates) for rates in speeds.values())
        if plan.traffic == "both":
            metrics |= {f"{d}_gbps": statistics.median(rates) for d, rates in speeds.items()}
        limit = limit_gbps(self.cases, plan.traffic)
        if plan.method != LIMIT and limit is not None:
            metrics["link_fraction"] = metrics["bandwidth_gbps"] / limit
        return metrics | {
            "copies": sum(len(lane.times_s) for lane in runners),
            "sms": sms_of(plan.method, self._copies[plan.directions[0]]),
            "checked": checked,
        }

    def _lane(self, plan: Plan, case: Case, direction: Direction) -> Runner | None:
        """None: the method cannot copy this case."""
        repeats = self.scale.repeats
        if plan.method == ENGINE:
            return EngineLane(
                case,
                direction,
                repeats,
                table=self.table or BUILT_IN,
                link_gbps=self.link_gbps,
            )
        method = self._copies[direction][plan.method]
        if not method.supports(case.cache, case.pool):
            return None
        return CopyLane(case, direction, method, repeats)


def add_device_arguments(parser: argparse.ArgumentParser) -> None:
    """Where a GPU benchmark runs: what `bench_device` reads."""
    parser.add_argument("--device", default="cuda:0", help="the GPU (%(default)s)")
    parser.add_argument(
        "--dry-run", action="store_true", help="on the CPU, small; the default without a GPU"
    )


def add_engine_arguments(parser: argparse.ArgumentParser, link_help: str) -> None:
    """Where and with what a benchmark of the TransferEngine runs."""
    parser.add_argument(
        "--table", type=Path, metavar="FILE", help="calibration that chooses (the built-in one)"
    )
    parser.add_argument("--link-gbps", type=float, metavar="GBPS", help=link_help)
    add_device_arguments(parser)


def bench_device(args: argparse.Namespace) -> str:
    """``cuda:N``, or ``cpu`` for a dry run.

    Raises:
        ValueError: ``--device`` is no GPU of this machine.
    """
    if args.dry_run or not torch.cuda.is_available():
        return "cpu"
    try:
        device = torch.device(args.device)
    except RuntimeError:
        raise ValueError(f"--device must be like cuda:0, got {args.device!r}") from None
    index = device.index or 0
    if device.type != "cuda" or index >= torch.cuda.device_count():
        raise ValueError(
            f"--device {args.device} is not one of the {torch.cuda.device_count()} GPUs here"
        )
    torch.cuda.set_device(index)
    return f"cuda:{index}"


def copy_methods() -> dict[str, CopyMethod]:
    """New objects of all methods and baselines, by name."""
    return {**all_methods(), FragmentCopy.name: FragmentCopy(), LIMIT: ContiguousCopy()}


def counts_for(fragment_bytes: int, counts: Iterable[int], max_bytes: int) -> list[int]:
    """The counts to measure, ascending: none above what ``max_bytes`` hold, each as many as a case
    has (whole blocks of up to 48 layers), and at least one."""
    fit = max_bytes // fragment_bytes
    kept = {min(count, fit) for count in counts}
    return sorted({count - count % min(48, count) for count in kept})


def sms_of(method: str, methods: dict[str, CopyMethod]) -> int | None:
    """How many SMs a method keeps busy at most: the grid of its kernel; None: no such bound."""
    programs = getattr(methods.get(method), "programs", None)
    if isinstance(programs, int):
        return programs
    if method == "staged":
        return DEFAULT_PROGRAMS
    return 0 if method in ("batch", "memcpy", FragmentCopy.name, LIMIT) else None


def limit_gbps(cases: Sequence[dict[str, Any]], traffic: str) -> float | None:
    """Measured limit of the idle link."""
    return next(
        (
            case["metrics"].get("bandwidth_gbps")
            for case in cases
            if _is(case, method=LIMIT, traffic=traffic, compute="idle")
        ),
        None,
    )


def rates_of(cases: Sequence[dict[str, Any]]) -> Table:
    """What the run knows of our own methods, as a calibration table."""
    return Table(
        Rate(
            p["method"],
            Direction(p["traffic"]),
            p["fragment_bytes"],
            p["count"],
            case["metrics"]["bandwidth_gbps"],
        )
        for case in cases
        for p in [case["params"]]
        if p["method"] in KERNEL_METHODS
        and _is(case, compute="idle")
        and p["traffic"] != "both"
        and "bandwidth_gbps" in case["metrics"]
    )


def ratios_of(
    cases: Sequence[dict[str, Any]], table: Table | None = None
) -> dict[str, dict[str, Any]]:
    """What the targets speak of, always the worst over fragment sizes and directions.

    ``link_fraction_min``: the method that ``table`` chooses (None: a table of this run's own idle
    rates) ÷ the measured limit, at the largest count of each size; ``_built_in``: chosen by the
    built-in table. ``decode_slowdown``: of those, beside decoding. ``kernel_sms_max``: SMs of
    those. ``engine_…``: of the engine.
    """
    measured = rates_of(cases)
    ours = table or (measured if measured.rates else BUILT_IN)
    found: dict[str, dict[str, Any]] = {}
    for prefix, chooser in (("", ours), ("built_in_", BUILT_IN), ("engine_", None)):
        idle = [
            case
            for traffic in ("load", "store")
            for case in chosen_cases(cases, traffic, "idle", chooser)
        ]
        fractions = [case["metrics"] for case in idle if "link_fraction" in case["metrics"]]
        if fractions:
            worst = min(fractions, key=lambda m: m["link_fraction"])
            limit = worst["bandwidth_gbps"] / worst["link_fraction"]
            found[f"{prefix}link_fraction_min"] = {
                "value": worst["link_fraction"],
                "low": worst["bandwidth_low_gbps"] / limit,
                "high": worst["bandwidth_high_gbps"] / limit,
                "better": "higher",
            }
        beside = [
            case["metrics"]
            for traffic in TRAFFIC
            for case in chosen_cases(cases, traffic, "decode", chooser)
        ]
        if beside:
            slowdowns = [metrics["decode_slowdown"] for metrics in beside]
            found[f"{prefix}decode_slowdown"] = {
                "value": max(slowdowns),
                "low": min(slowdowns),
                "high": max(slowdowns),
                "better": "lower",
            }
        sms = [case["metrics"]["sms"] for case in idle if case["metrics"]["sms"] is not None]
        if prefix == "" and sms:
            found["kernel_sms_max"] = {
                "value": max(sms),
                "low": min(sms),
                "high": max(sms),
                "better": "lower",
            }
    return found


def chosen_cases(
    cases: Sequence[dict[str, Any]], traffic: str, compute: str, table: Table | None
) -> list[dict[str, Any]]:
    """The measured case of each fragment size that ``table`` chooses, at the size's largest count;
    None: the engine's."""
    usable = [
        case
        for case in cases
        if _is(case, traffic=traffic, compute=compute) and "error" not in case["metrics"]
    ]
    found = []
    for size in sorted({case["params"]["fragment_bytes"] for case in usable}):
        here = [case for case in usable if case["params"]["fragment_bytes"] == size]
        count = max(case["params"]["count"] for case in here)
        by_method = {
            case["params"]["method"]: case for case in here if case["params"]["count"] == count
        }
        if table is None:
            name = ENGINE
        else:
            ours = [name for name in by_method if name in KERNEL_METHODS]
            if not ours:
                continue
            direction = Direction.STORE if traffic == "store" else Direction.LOAD
            slot_bytes = min(48, count) * size
            name = table.choose(direction, size, count, slot_bytes=slot_bytes, methods=ours)
        if name in by_method:
            found.append(by_method[name])
    return found


def table_of(
    cases: Sequence[dict[str, Any]], traffic: str, compute: str
) -> tuple[list[str], list[list[str]]]:
    """Columns and rows: fragment sizes by methods, each at its largest count, in GB/s; beside
    decoding with the slowdown in per cent."""
    values: dict[tuple[int, str], tuple[int, str]] = {}
    methods: dict[str, None] = {}
    for case in cases:
        if not _is(case, traffic=traffic, compute=compute):
            continue
        p, m = case["params"], case["metrics"]
        if p["method"] == LIMIT:
            continue
        methods[p["method"]] = None
        text = "failed" if "error" in m else f"{m['bandwidth_gbps']:.1f}"
        if "decode_slowdown" in m:
            text += f" {100 * m['decode_slowdown']:+.0f}%"
        key = p["fragment_bytes"], p["method"]
        values[key] = max(values.get(key, (0, "")), (p["count"], text))
    rows = []
    for size in sorted({size for size, _ in values}):
        count = max(c for (s, _), (c, _) in values.items() if s == size)
        cells = [values.get((size, name), (0, "-"))[1] for name in methods]
        rows.append([size_label(size), str(count), *cells])
    limit = next(
        (
            case["metrics"]
            for case in cases
            if _is(case, traffic=traffic, compute=compute, method=LIMIT)
        ),
        None,
    )
    if rows and limit is not None and "error" not in limit:
        slowdown = limit.get("decode_slowdown")
        extra = "" if slowdown is None else f" {100 * slowdown:+.0f}%"
        cell = f"{limit['bandwidth_gbps']:.1f}{extra}"
        rows.append([LIMIT, "1", cell, *[""] * (len(methods) - 1)])
    return ["fragment", "count", *methods], rows


def save_plot(path: Path, cases: Sequence[dict[str, Any]], title: str) -> bool:
    """Heat maps, one for each traffic and compute: method by fragment size, GB/s at the largest
    count, coloured by the share of the limit. False: there is no matplotlib, nothing was written.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        print("no plot: matplotlib is not installed", file=sys.stderr)
        return False
    panels = [
        (traffic, compute)
        for compute in COMPUTE
        for traffic in TRAFFIC
        if any(
            _is(c, traffic=traffic, compute=compute) and "link_fraction" in c["metrics"]
            for c in cases
        )
    ]
    columns = min(3, len(panels)) or 1
    lines = -(-len(panels) // columns) or 1
    figure = Figure(figsize=(6.4 * columns, 3.6 * lines + 0.6), layout="constrained")
    all_axes = figure.subplots(lines, columns, squeeze=False).ravel()
    for axes in all_axes[len(panels) :]:
        axes.set_visible(False)
    image = None
    for axes, (traffic, compute) in zip(all_axes, panels, strict=False):
        image = _heat_map(axes, cases, traffic, compute)
    if image is not None:
        figure.colorbar(image, ax=list(all_axes), label="share of the measured limit", shrink=0.8)
    figure.suptitle(f"Transfers, {title}", fontsize=11, x=0.01, ha="left")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    return True


def _heat_map(axes: Any, cases: Sequence[dict[str, Any]], traffic: str, compute: str) -> Any:
    largest: dict[tuple[str, int], dict[str, Any]] = {}
    for case in cases:
        p = case["params"]
        if _is(case, traffic=traffic, compute=compute) and "link_fraction" in case["metrics"]:
            key = p["method"], p["fragment_bytes"]
            if key not in largest or p["count"] > largest[key]["params"]["count"]:
                largest[key] = case
    methods = [name for name in METHODS if any(name == m for m, _ in largest)]
    sizes = sorted({size for _, size in largest})
    what = "both directions" if traffic == "both" else f"{traffic}s"
    limit = limit_gbps(cases, traffic)
    most = "" if limit is None else f", limit {limit:.1f} GB/s"
    axes.set_title(f"{what}, {'beside decoding' if compute == 'decode' else 'idle'}{most}",
                   fontsize=9, loc="left")  # fmt: skip
    shares = [
        [_metric(largest.get((method, size)), "link_fraction") for size in sizes]
        for method in methods
    ]
    image = axes.imshow(shares, vmin=0, vmax=1, cmap="viridis", aspect="auto")
    axes.set_xticks(range(len(sizes)), [size_label(size) for size in sizes], fontsize=7)
    axes.set_yticks(range(len(methods)), methods, fontsize=8)
    for row, method in enumerate(methods):
        for column, size in enumerate(sizes):
            measured = largest.get((method, size))
            if measured is None:
                continue
            text = f"{measured['metrics']['bandwidth_gbps']:.1f}"
            slowdown = measured["metrics"].get("decode_slowdown")
            if slowdown is not None:
                text += f"\n{100 * slowdown:+.0f} %"
            shade = "black" if shares[row][column] > 0.6 else "white"
            axes.text(column, row, text, ha="center", va="center", fontsize=6.5, color=shade)
    return image


def _metric(case: dict[str, Any] | None, name: str) -> float:
    return float("nan") if case is None else case["metrics"][name]


def size_label(num_bytes: int) -> str:
    for unit, name in ((MIB, "MiB"), (KIB, "KiB")):
        if num_bytes % unit == 0:
            return f"{num_bytes // unit} {name}"
    return f"{num_bytes} B"


def vars_of(plan: Plan) -> dict[str, Any]:
    return {name: getattr(plan, name) for name in plan.__slots__}


def _label(params: dict[str, Any]) -> str:
    return (
        f"{params['method']}, {params['traffic']}, {params['compute']}, "
        f"{params['count']} × {size_label(params['fragment_bytes'])}"
    )


def _is(case: dict[str, Any], **params: Any) -> bool:
    return all(case["params"][name] == value for name, value in params.items())


def _check_positive(name: str, values: Sequence[float | None] | None) -> None:
    for value in values or ():
        if value is not None and not value > 0:
            raise ValueError(f"--{name.replace('_', '-')} must be positive, got {value}")
