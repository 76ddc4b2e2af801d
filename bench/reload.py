"""``liveserve bench reload``: what a turn waits for when its session's KV is not on the GPU.

A session's history lies in a pool in host memory and its blocks on the GPU have gone to others. A
turn of new tokens comes and has to run through every layer of a transformer whose cache has the
shape of Qwen3-Omni's thinker. Cases:

recompute       the history is prefilled again, nothing is loaded
on path         an on-path load; the first layer starts when all of it is there
layer-wise      an on-path load in the order of the layers; each layer starts when its own is there
preloaded       a preload that ended before the turn came
… busy          the same while the link is full of somebody else's preload

The critical path from the turn's arrival to its last layer's end is cut into: *compute* (a layer
runs), *queue* (nothing runs, the load has not begun to move), *transfer* (nothing runs, bytes
move), *wait* (neither: wake-ups, launches). The four add up to the total. In every case the turn's
output is compared with that of a session that never left; the blocks hold NaN before, so a layer
that reads too early shows.
"""

from __future__ import annotations

import argparse
import shlex
import statistics
import sys
import time
from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from liveserve.bench.chrome_trace import Trace
from liveserve.bench.compute_load import SMALL, THINKER, ModelShape, PagedModel
from liveserve.bench.gpu_facts import gpu_facts
from liveserve.bench.result_file import build_result, write_result
from liveserve.bench.terminal import print_table, progress
from liveserve.bench.transfer import DRY_RUN_NOTE, add_engine_arguments, bench_device
from liveserve.kernels.calibrate import BUILT_IN, Table
from liveserve.kernels.layout import PagedCache
from liveserve.kvtier.links import open_link
from liveserve.kvtier.pool import HostPool, PoolError
from liveserve.kvtier.transfer import TransferEngine
from liveserve.kvtier.transfer_base import Kind, Transfer, TransferError

BLOCK_TOKENS = 16
PARTS = ("queue", "transfer", "wait", "compute")
TIMEOUT_S = 60.0
Span = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Case:
    """``load``: None: recompute. ``early``: the load ends before the turn comes."""

    name: str
    load: Kind | None
    layerwise: bool = False
    early: bool = False
    busy: bool = False


CASES = (
    Case("recompute", None),
    Case("on path", Kind.ON_PATH),
    Case("layer-wise", Kind.ON_PATH, layerwise=True),
    Case("preloaded", Kind.PRELOAD, early=True),
    Case("on path, busy", Kind.ON_PATH, busy=True),
    Case("layer-wise, busy", Kind.ON_PATH, layerwise=True, busy=True),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--layers", type=int, help="of the model and its cache (48; dry run: 4)")
    parser.add_argument(
        "--history-tokens", type=int, help="to reload, multiple of 16 (8192; dry run: 512)"
    )
    parser.add_argument("--new-tokens", type=int, help="of the turn (256; dry run: 32)")
    parser.add_argument(
        "--other-tokens", type=int, help="of the preload that busies the link (4096; dry run: 512)"
    )
    parser.add_argument("--chunk-tokens", type=int, help="of a prefill chunk (2048; dry run: 256)")
    parser.add_argument("--repeats", type=int, help="rounds over all cases (5; dry run: 3)")
    add_engine_arguments(parser, "rate of the CPU's link (dry run: 1)")
    parser.add_argument("--json", metavar="FILE", type=Path, help="write the result file")
    parser.add_argument("--plot", metavar="FILE", type=Path, help="write the critical paths (PNG)")
    parser.add_argument(
        "--trace", metavar="FILE", type=Path, help="write a timeline for ui.perfetto.dev (JSON)"
    )


@dataclass(frozen=True, slots=True)
class Setting:
    """Sizes of a run.

    Raises:
        ValueError: names the flag that makes no sense.
    """

    device: str
    shape: ModelShape
    dtype: torch.dtype
    history_tokens: int
    new_tokens: int
    other_tokens: int
    chunk_tokens: int
    repeats: int
    link_gbps: float | None = None

    def __post_init__(self) -> None:
        for name in ("history_tokens", "new_tokens", "other_tokens", "chunk_tokens"):
            value = getattr(self, name)
            if value < 1 or value % BLOCK_TOKENS:
                flag = name.replace("_", "-")
                raise ValueError(f"--{flag} must be a positive multiple of 16, got {value}")
        if self.shape.layers < 1 or self.repeats < 1:
            raise ValueError("--layers and --repeats must be 1 or more")
        if self.link_gbps is not None and not self.link_gbps > 0:
            raise ValueError(f"--link-gbps must be positive, got {self.link_gbps}")

    @classmethod
    def from_arguments(cls, args: argparse.Namespace) -> Setting:
        device = bench_device(args)
        dry = device == "cpu"
        if args.link_gbps is not None and not dry:
            raise ValueError("--link-gbps imitates a link on a CPU: give --dry-run with it")
        base = SMALL if dry else THINKER
        layers = base.layers if args.layers is None else args.layers

        def given(value: int | None, full: int, small: int) -> int:
            return value if value is not None else small if dry else full

        return cls(
            device=device,
            shape=ModelShape(layers, *(getattr(base, n) for n in base.__slots__[1:])),
            dtype=torch.float32 if dry else torch.bfloat16,
            history_tokens=given(args.history_tokens, 8192, 512),
            new_tokens=given(args.new_tokens, 256, 32),
            other_tokens=given(args.other_tokens, 4096, 512),
            chunk_tokens=given(args.chunk_tokens, 2048, 256),
            repeats=given(args.repeats, 5, 3),
            link_gbps=(1.0 if args.link_gbps is None else args.link_gbps) if dry else None,
        )


def run(args: argparse.Namespace) -> int:
    try:
        setting = Setting.from_arguments(args)
        table = Table.load(args.table) if args.table else BUILT_IN
        with ReloadBench(setting, table) as bench:
            turns = bench.run()
            nvml = gpu_facts(setting.device)
    except (ValueError, OSError, RuntimeError) as error:
        print(f"liveserve bench reload: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    dry = setting.device == "cpu"
    title = DRY_RUN_NOTE if dry else torch.cuda.get_device_name(setting.device)
    cases = cases_of(turns, setting)
    _print(cases, setting, title)
    if args.json:
        result = build_result(
            "reload",
            cases,
            command=shlex.join(["liveserve", *sys.argv[1:]]),
            preset="dry-run" if dry else None,
            ratios=ratios_of(turns),
            simulated=dry,
        )
        result["machine"]["nvml"] = nvml
        write_result(args.json, result)
    if args.plot:
        save_plot(args.plot, cases, title)
    if args.trace:
        trace_of(turns).write(args.trace)
    wrong = sorted({turn.case.name for turn in turns if not turn.correct})
    if wrong:
        print(f"failed: wrong output in: {', '.join(wrong)}", file=sys.stderr)
    return 1 if wrong else 0


@dataclass(frozen=True, slots=True)
class Turn:
    """One measured turn; times are monotonic seconds.

    ``layers``: when each layer of each chunk ran. ``moved``: when the load was submitted, began to
    move, and had arrived.
    """

    case: Case
    arrived_s: float
    ended_s: float
    layers: tuple[tuple[int, Span], ...]
    moved: tuple[float, float, float] | None
    num_bytes: int
    correct: bool

    @property
    def total_s(self) -> float:
        return self.ended_s - self.arrived_s

    def parts_s(self) -> dict[str, float]:
        """The critical path: seconds by ``PARTS``, in all ``total_s``."""
        started_s, finished_s = self.moved[1:] if self.moved else (0.0, 0.0)
        parts = dict.fromkeys(PARTS, 0.0)
        now_s = self.arrived_s
        idle: list[Span] = []
        for _, (start_s, end_s) in self.layers:
            idle.append((now_s, max(now_s, start_s)))
            parts["compute"] += max(0.0, end_s - max(now_s, start_s))
            now_s = max(now_s, end_s)
        idle.append((now_s, max(now_s, self.ended_s)))
        for start_s, end_s in idle:
            moving_s = max(0.0, min(end_s, finished_s) - max(start_s, started_s))
            queued_s = max(0.0, min(end_s, started_s) - start_s)
            parts["queue"] += queued_s
            parts["transfer"] += moving_s
            parts["wait"] += end_s - start_s - moving_s - queued_s
        return parts


class ReloadBench:
    """The model, its cache, the pool and the engine of a run.

    Raises:
        PoolError: no memory for the pool.
        ValueError: the link cannot be had so.
    """

    def __init__(self, setting: Setting, table: Table) -> None:
        self.setting = s = setting
        self.gpu = s.device.startswith("cuda")
        self.history, self.new, self.other = (
            n // BLOCK_TOKENS for n in (s.history_tokens, s.new_tokens, s.other_tokens)
        )
        num_blocks = self.history + self.new + self.other
        kv = (2, num_blocks, BLOCK_TOKENS, s.shape.kv_heads, s.shape.head_dim)
        torch.manual_seed(1)
        self.layers = [
            torch.zeros(kv, dtype=torch.bfloat16, device=s.device) for _ in range(s.shape.layers)
        ]
        self.cache = PagedCache.from_layers(self.layers, block_dim=1)
        self.model = PagedModel(s.shape, self.layers, device=s.device, dtype=s.dtype)
        # As blocks of a long-running server are: in no order.
        order = torch.randperm(num_blocks)
        self.blocks = order[: self.history + self.new]
        self.other_blocks = order[self.history + self.new :].tolist()
        self.blocks_there = self.blocks.to(s.device)
        self.slots = torch.randperm(self.history).tolist()
        self.other_slots = range(self.history, self.history + self.other)
        tokens = s.history_tokens + s.new_tokens
        self.x = torch.randn(tokens, s.shape.hidden, dtype=s.dtype, device=s.device)
        slots, slot_bytes = self.history + self.other, self.cache.slot_bytes
        try:
            self.pool = HostPool(slots, slot_bytes, device=s.device)
        except PoolError as error:
            raise PoolError(
                f"--history-tokens and --other-tokens take {slots * slot_bytes / 1e9:.1f} GB of "
                f"host memory, too much here: {error}"
            ) from error
        try:
            link = open_link(self.cache, self.pool.data, link_gbps=s.link_gbps, table=table)
            self.engine = TransferEngine(self.cache, self.pool.data, link)
        except BaseException:
            self.pool.close()
            raise
        self.expected = torch.empty(0)

    def __enter__(self) -> ReloadBench:
        return self

    def __exit__(self, *exc: object) -> None:
        self.engine.close(drain=False)
        self._synchronize()
        self.pool.close()

    def run(self, cases: Sequence[Case] = CASES) -> list[Turn]:
        """All cases in turn, ``repeats`` times, after a round that does not count.

        Raises:
            TransferError: a transfer failed.
        """
        self._prepare()
        turns: list[Turn] = []
        rounds = self.setting.repeats + 1
        with progress("reload", rounds * len(cases)) as advance:
            for number in range(rounds):
                for case in cases:
                    turn = self.measure(case)
                    if number:
                        turns.append(turn)
                    advance(case.name)
        return turns

    def _prepare(self) -> None:
        """The session's first turn, its history stored, and what its next turn should give."""
        s = self.setting
        self._prefill(0)
        self.expected = self._prefill(s.history_tokens).clone()
        if not bool(self.expected.isfinite().all()):
            raise ValueError("the model's output is not finite: use fewer --layers")
        event = None
        if self.gpu:
            event = torch.cuda.Event()
            event.record()
        stored = self.engine.submit(
            Kind.STORE, self.blocks[: self.history], self.slots, after=event
        )
        self._wait(stored)

    def _prefill(self, start: int, **hooks: Any) -> torch.Tensor:
        """From token ``start``: the history in chunks, then the new tokens in theirs."""
        s = self.setting
        sequence = {"chunk": s.chunk_tokens, **hooks}
        if start < s.history_tokens:
            self.model.prefill(self.x[: s.history_tokens], self.blocks_there, start=0, **sequence)
        new = self.x[s.history_tokens :]
        return self.model.prefill(new, self.blocks_there, start=s.history_tokens, **sequence)

    def measure(self, case: Case) -> Turn:
        """One turn.

        Raises:
            TransferError: a transfer failed.
        """
        self._forget()
        other = self._fill_link() if case.busy else None
        load: Transfer | None = None
        if case.early:
            load = self._submit(case)
            self._wait(load)
        clock = _GpuClock(self.setting.device) if self.gpu else _HostClock()
        with _range(self.gpu, case.name):
            arrived_s = time.monotonic()
            if case.load is not None and load is None:
                load = self._submit(case)
            needed = self.cache.num_layers

            def before(layer: int) -> None:
                if load is not None and (case.layerwise or layer == 0):
                    self.engine.order_compute(load, layer + 1 if case.layerwise else needed)
                clock.begin(layer)

            start = self.setting.history_tokens if case.load is not None else 0
            output = self._prefill(start, before=before, after=clock.end)
            layers = clock.read()
            ended_s = max(layers[-1][1][1], arrived_s)
        moved = None
        if load is not None:
            self._wait(load)
            assert load.started_s is not None
            assert load.finished_s is not None
            moved = load.submitted_s, load.started_s, load.finished_s
        if other is not None:
            self._wait(other)
        correct = torch.allclose(output, self.expected, rtol=0.02, atol=0.02)
        num_bytes = 0 if load is None else load.num_bytes
        return Turn(case, arrived_s, ended_s, layers, moved, num_bytes, correct)

    def _forget(self) -> None:
        """Others have written all over the session's blocks."""
        for layer in self.layers:
            layer.index_fill_(1, self.blocks_there, float("nan"))
        self._synchronize()

    def _fill_link(self) -> Transfer:
        """Somebody else's preload, under way."""
        other = self.engine.submit(Kind.PRELOAD, self.other_blocks, list(self.other_slots))
        end_s = time.monotonic() + TIMEOUT_S
        while other.started_s is None and not other.ended and time.monotonic() < end_s:
            time.sleep(0.0001)
        return other

    def _submit(self, case: Case) -> Transfer:
        assert case.load is not None
        return self.engine.submit(
            case.load, self.blocks[: self.history], self.slots, layerwise=case.layerwise
        )

    def _wait(self, transfer: Transfer) -> None:
        ended = self.engine.wait(transfer, TIMEOUT_S)
        self.engine.poll()
        if not ended:
            raise TransferError(f"transfer {transfer.number} takes more than {TIMEOUT_S:.0f} s")
        if not transfer.ok:
            raise TransferError(
                f"transfer {transfer.number} {transfer.state.value}: {transfer.error}"
            )

    def _synchronize(self) -> None:
        if self.gpu:
            torch.cuda.synchronize(self.setting.device)


class _HostClock:
    """When layers ran, on a CPU. (Transfers use the same monotonic clock.)"""

    def __init__(self) -> None:
        self._layers: list[tuple[int, Span]] = []
        self._begun_s = 0.0

    def begin(self, layer: int) -> None:
        self._begun_s = time.monotonic()

    def end(self, layer: int) -> None:
        self._layers.append((layer, (self._begun_s, time.monotonic())))

    def read(self) -> tuple[tuple[int, Span], ...]:
        return tuple(self._layers)


class _GpuClock:
    """When layers ran, by events on the current stream, as times of the host's clock: right to some
    10 µs, which the host needs to see an event."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._base = torch.cuda.Event(enable_timing=True)
        self._base.record()
        self._base.synchronize()
        self._base_s = time.monotonic()
        self._events: list[tuple[int, torch.cuda.Event, torch.cuda.Event]] = []

    def begin(self, layer: int) -> None:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._events.append((layer, begin, end))
        torch.cuda.nvtx.range_push(f"layer {layer}")
        begin.record()

    def end(self, layer: int) -> None:
        self._events[-1][2].record()
        torch.cuda.nvtx.range_pop()

    def read(self) -> tuple[tuple[int, Span], ...]:
        self._events[-1][2].synchronize()
        return tuple((layer, (self._at_s(begin), self._at_s(end)))
                     for layer, begin, end in self._events)  # fmt: skip

    def _at_s(self, event: torch.cuda.Event) -> float:
        return self._base_s + self._base.elapsed_time(event) * 1e-3


@contextmanager
def _range(gpu: bool, name: str) -> Any:
    if not gpu:
        yield
        return
    torch.cuda.nvtx.range_push(name)
    try:
        yield
    finally:
        torch.cuda.nvtx.range_pop()


def cases_of(turns: Sequence[Turn], setting: Setting) -> list[dict[str, Any]]:
    """Cases of the result file: medians over the rounds; of the total also best and worst.

    ``move_s`` is the load's own time, ``hidden_fraction`` the share of it that the turn did not
    stand still for.
    """
    cases = []
    for case in dict.fromkeys(turn.case for turn in turns):
        mine = [turn for turn in turns if turn.case == case]
        parts = [turn.parts_s() for turn in mine]
        metrics: dict[str, Any] = {
            "total_s": statistics.median(turn.total_s for turn in mine),
            "total_low_s": min(turn.total_s for turn in mine),
            "total_high_s": max(turn.total_s for turn in mine),
            **{f"{name}_s": statistics.median(p[name] for p in parts) for name in PARTS},
            "correct": all(turn.correct for turn in mine),
        }
        loads = [(turn, turn.moved[2] - turn.moved[1]) for turn in mine if turn.moved]
        if loads:
            metrics |= {
                "loaded_bytes": loads[0][0].num_bytes,
                "move_s": statistics.median(move_s for _, move_s in loads),
                "bandwidth_gbps": statistics.median(t.num_bytes / m / 1e9 for t, m in loads),
                "hidden_fraction": statistics.median(
                    max(0.0, 1 - turn.parts_s()["transfer"] / move_s) for turn, move_s in loads
                ),
            }
        params = {
            "case": case.name,
            "layers": setting.shape.layers,
            "history_tokens": setting.history_tokens,
            "new_tokens": setting.new_tokens,
            "other_tokens": setting.other_tokens if case.busy else 0,
            "chunk_tokens": setting.chunk_tokens,
            "link_gbps": setting.link_gbps,
            "rounds": len(mine),
        }
        cases.append({"params": params, "metrics": metrics})
    return cases


def ratios_of(turns: Sequence[Turn]) -> dict[str, dict[str, Any]]:
    """How many times faster a turn ends, pair by pair within a round."""
    totals: dict[str, list[float]] = {}
    for turn in turns:
        totals.setdefault(turn.case.name, []).append(turn.total_s)
    found = {}
    for name, slow, fast in (
        ("reload_speedup", "recompute", "on path"),
        ("layerwise_speedup", "on path", "layer-wise"),
        ("preload_speedup", "on path", "preloaded"),
        ("busy_layerwise_speedup", "on path, busy", "layer-wise, busy"),
    ):
        if slow in totals and fast in totals:
            pairs = [a / b for a, b in zip(totals[slow], totals[fast], strict=True)]
            found[name] = {
                "value": statistics.median(pairs),
                "low": min(pairs),
                "high": max(pairs),
                "better": "higher",
            }
    return found


def trace_of(turns: Sequence[Turn]) -> Trace:
    """The last round: a process for each case, with its critical path, its layers and its load.
    Each case starts at 0."""
    trace = Trace()
    last = {turn.case.name: turn for turn in turns}
    for name, turn in last.items():
        zero_s = min(turn.arrived_s, turn.moved[0] if turn.moved else turn.arrived_s)
        parts = {f"{part}_ms": 1e3 * value for part, value in turn.parts_s().items()}
        trace.span(name, "turn", name, turn.arrived_s - zero_s, turn.ended_s - zero_s, **parts)
        for layer, (start_s, end_s) in turn.layers:
            trace.span(name, "compute", f"layer {layer}", start_s - zero_s, end_s - zero_s)
        if turn.moved is not None:
            submitted_s, started_s, finished_s = (t - zero_s for t in turn.moved)
            trace.span(name, "load", "queue", submitted_s, started_s)
            trace.span(name, "load", "transfer", started_s, finished_s, bytes=turn.num_bytes)
    return trace


def save_plot(path: Path, cases: Sequence[dict[str, Any]], title: str) -> bool:
    """Critical paths as stacked bars. False: there is no matplotlib, nothing was written."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        print("no plot: matplotlib is not installed", file=sys.stderr)
        return False
    figure = Figure(figsize=(8.5, 1.2 + 0.45 * len(cases)), layout="constrained")
    axes = figure.subplots()
    names = [case["params"]["case"] for case in cases]
    left = [0.0] * len(cases)
    for part, colour in zip(PARTS, ("#6b7280", "#e07b1a", "#c62828", "#2563a8"), strict=True):
        widths = [1e3 * case["metrics"][f"{part}_s"] for case in cases]
        axes.barh(names, widths, left=left, color=colour, label=part, height=0.6)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    # Recomputing may take so long that nothing else would be seen.
    others = [t for t, name in zip(left, names, strict=True) if name != CASES[0].name]
    end = min(max(left), 3 * max(others, default=max(left)))
    axes.set_xlim(0, 1.12 * end)
    for row, total in enumerate(left):
        text, colour = (f" {total:.1f}", "black") if total <= end else (f"{total:.1f} →", "white")
        axes.text(min(total, end), row, text, va="center", fontsize=8, color=colour)
    axes.invert_yaxis()
    axes.set_xlabel("ms from the turn's arrival to its last layer's end (medians)")
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(fontsize=8, frameon=False, ncols=4, loc="outside lower center")
    axes.set_title(f"What a turn waits for, {title}", fontsize=10, loc="left")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    return True


def _print(cases: Sequence[dict[str, Any]], setting: Setting, title: str) -> None:
    columns = ["case", "total", *PARTS, "move", "hidden", "GB/s", "correct"]
    rows = []
    for case in cases:
        m = case["metrics"]
        times = [f"{1e3 * m[name]:.2f}" for name in ("total_s", *(f"{p}_s" for p in PARTS))]
        load = ["-"] * 3
        if "move_s" in m:
            hidden = f"{100 * m['hidden_fraction']:.0f} %"
            load = [f"{1e3 * m['move_s']:.2f}", hidden, f"{m['bandwidth_gbps']:.1f}"]
        rows.append([case["params"]["case"], *times, *load, "yes" if m["correct"] else "NO"])
    print_table(
        f"a turn of {setting.new_tokens} tokens on {setting.history_tokens}, "
        f"{setting.shape.layers} layers, ms ({title})",
        columns,
        rows,
    )
