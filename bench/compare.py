"""``liveserve bench compare``: the stock host against LiveServe, side by side in one run.

Servers take turns (A B B A ...) on the same seeded users; every ratio is computed inside a pair.
The users are in slow motion (``K``) so that a small machine reaches the regime of a large one, and
K is the same for both.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import shlex
import shutil
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Table

from liveserve.bench.demo import ensure_tiny_model
from liveserve.bench.launch import (
    WARM,
    Server,
    ServerFailed,
    add_server_arguments,
    running_server,
)
from liveserve.bench.prefill import prefill_metrics, read_thinker
from liveserve.bench.preload import preload_metrics, run_watched
from liveserve.bench.report import save_comparison, save_waits
from liveserve.bench.result_file import build_result, write_result
from liveserve.bench.server import ServerUnreachable, kv_totals
from liveserve.bench.sessions import SessionsConfig, SessionsReport, run_sessions
from liveserve.host.cpu.record import RECORD_ENV, ROWS_ENV

STOCK, LIVE, UNLOADED = "stock", "liveserve", "preload off"


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

    The first of ``arms`` is what the others are compared with.

    ``fast_codes``: both servers use the one-matmul code predictor, so that less slow motion is
    needed; the vocoder is then the bottleneck.
    ``regime``: "load" is in the slow motion in which stock's RTF is about `_REGIME_RTF` here.
    ``prefill``: count what the thinker computes, from its step record.
    ``preload``: watch what turns wait for their history, over a link of `link_gbps`.
    """

    arms: tuple[Arm, ...]
    cases: Mapping[str, SessionsConfig]
    pairs: int
    fast_codes: bool = False
    regime: bool = False
    prefill: bool = False
    preload: bool = False

    @property
    def together(self) -> bool:
        """All servers are up from the start to the end, and all but one are frozen: the machine is
        much faster in some minutes than in others, and what is compared must not be minutes apart.
        Not with more servers than memory is sure to hold, nor where what a server did before
        counts.
        """
        return len(self.arms) <= 2 and not self.prefill


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
_SWITCHES = ("order", "pace", "utility", "chunking", "lookahead")
_ABLATION = (
    *(live_arm(f"only {name}", **{s: s == name for s in _SWITCHES}) for name in _SWITCHES),
    *(live_arm(f"without {name}", **{name: False}) for name in _SWITCHES),
)

# Stock's RTF in the paper's regime (0.1 to 0.3), as `_in_the_regime` measures it; under the load
# itself it is larger by a third to a half. Where it is much larger nothing is ahead of its
# listener, and there is nothing to reorder; where it is much smaller nobody waits.
_REGIME_RTF = 0.15
_SLOWEST_MOTION = 5.0
# As many users as make stock's queues long. Their slow motion is found before the run, since the
# same machine can be twice as fast an hour later.
_LOAD = _case(16, 0.5, turns=2, answer_seconds=(6.0, 10.0, 12.0), slow_motion=2.0)
_EASY = {
    # Long answers, interrupted early by users whom the machine serves with ease.
    "barge-in": _case(
        3,
        0.5,
        turns=2,
        answer_seconds=(12.0,),
        slow_motion=1.5,
        ramp=2.0,
        barge_in_between=(0.1, 0.5),
    ),
    "light": _case(3, 0.0, turns=4, answer_seconds=(2.5, 3.0), slow_motion=1.25, ramp=2.0),
}

# Conversations that remember all of their turns, in a thinker whose KV cache holds two of the six.
# A session has 1,600 tokens of instructions (the tiny model has one per character) and gains about
# 60 a turn, so that its prefill costs a fraction of a second, as long histories do on a GPU.
_KV_TURNS = 6
_KV_SESSION_TOKENS = 2048
_KV_BYTES_PER_TOKEN = 4096  # 4 layers, 2 heads of 64, keys and values, float32


def _kv_arm(name: str, *flags: str, prefix_cache: bool = False, resident: int = 2) -> Arm:
    """A server whose thinker's KV cache holds ``resident`` sessions."""
    thinker: dict[str, Any] = {
        "max_model_len": _KV_SESSION_TOKENS + 512,
        "kv_cache_memory_bytes": resident * _KV_SESSION_TOKENS * _KV_BYTES_PER_TOKEN,
    }
    if prefix_cache:
        thinker["enable_prefix_caching"] = True
    window = ("--history-turns", str(_KV_TURNS), "--stage-overrides", json.dumps({"0": thinker}))
    return Arm(name, (*window, *flags))


_TIER = ("--kv-connector", "liveserve", "--kv-dram-gb", "0.25")
_KV_STOCK = _kv_arm(STOCK, "--liveserve", "off")
_KV_CASE = _case(
    6,
    0.0,
    turns=_KV_TURNS,
    answer_seconds=(2.5, 3.0, 4.0),
    slow_motion=1.5,
    instructions_chars=1600,
)

# Twice as many users as the cache holds, so that most turns find their history in DRAM; mostly
# there is room for those who speak at the same time. They come in over most of a turn's length.
_PRELOAD_CASE = replace(_KV_CASE, sessions=8, turns=4, answer_seconds=(4.0, 6.0, 8.0), ramp=8.0)
# An H200 loads the KV of 8K tokens of Qwen3-Omni's thinker in so long, of 302 ms to the first token
# (the paper).
_RELOAD_S = 0.071
# What a turn adds to a history, about, in these workloads: 34 tokens of speech, 20 of answer.
_TURN_TOKENS = 60


def link_gbps(case: SessionsConfig) -> float:
    """The link on which the KV of a history of ``case`` takes `_RELOAD_S` of the listener's time,
    and K times that on the clock. 1e9 bytes/s.

    The history is that of the mean turn among those that have one: the instructions, and what half
    of the session's turns added. Companion rows lie in the host's memory and do not use the link.
    """
    tokens = case.instructions_chars + _TURN_TOKENS * case.turns / 2
    return tokens * _KV_BYTES_PER_TOKEN / (_RELOAD_S * case.slow_motion) / 1e9


PRESETS = {
    "ci": Preset(
        (STOCK_ARM, live_arm()), {"load": _LOAD, **_EASY}, pairs=1, fast_codes=True, regime=True
    ),
    "heavy": Preset(
        (STOCK_ARM, live_arm()), {"load": _LOAD}, pairs=3, fast_codes=True, regime=True
    ),
    "easy": Preset((STOCK_ARM, live_arm()), _EASY, pairs=3, fast_codes=True),
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
    "ablation": Preset(
        (STOCK_ARM, live_arm(), *_ABLATION),
        {"load": _LOAD},
        pairs=1,
        fast_codes=True,
        regime=True,
    ),
    # A hundred paced responses and more: nobody may hear a gap that stock would not have made.
    "paced": Preset(
        (STOCK_ARM, live_arm()),
        {"load": _case(8, 0.3, turns=13, answer_seconds=(3.0, 4.0, 5.0), slow_motion=2.0)},
        pairs=1,
        fast_codes=True,
    ),
    "kv": Preset(
        (
            _KV_STOCK,
            _kv_arm("stock prefix cache", "--liveserve", "off", prefix_cache=True),
            _kv_arm(LIVE, *_TIER),
        ),
        {"load": _KV_CASE},
        pairs=1,
        fast_codes=True,
        prefill=True,
    ),
    # What of that is the tier's, and what the policy's.
    "kv-ablation": Preset(
        (
            _KV_STOCK,
            _kv_arm("without tier"),
            _kv_arm("prefix cache alone", prefix_cache=True),
            _kv_arm("lru", *_TIER, "--kv-policy", "lru"),
        ),
        {"load": _KV_CASE},
        pairs=1,
        fast_codes=True,
        prefill=True,
    ),
    "preload": Preset(
        (
            _kv_arm(UNLOADED, *_TIER, *live_arm(kv_preload=False).flags, resident=4),
            _kv_arm(LIVE, *_TIER, resident=4),
        ),
        {"load": _PRELOAD_CASE},
        pairs=2,
        fast_codes=True,
        prefill=True,
        preload=True,
    ),
    "long": Preset(
        (STOCK_ARM, live_arm()),
        {"one": _case(1, 0.0, turns=1, answer_seconds=(60.0,), slow_motion=2.0)},
        pairs=1,
        fast_codes=True,
    ),
}

# The case that a ratio is named for without its case: "load" where it is not listed.
_BARE = {"waste_stock_fraction": "barge-in", "waste_ours_fraction": "barge-in"}
# What the CPU pipeline must reach: (ratio, at least or at most, value).
TARGETS = {
    "ttfp_p90_speedup": (">=", 1.55),
    "continuity_delta_pp": (">=", 10.0),
    "waste_stock_fraction": (">=", 0.30),  # else the answers are too short to tell
    "waste_ours_fraction": ("<=", 0.12),
    "lowload_worst_regression": ("<=", 0.03),
    "prefill_tokens_saved_fraction": (">=", 0.8),
}
# What preload must reach there, against the same server without it.
PRELOAD_TARGETS = {
    "preload_hit_fraction": (">=", 0.9),
    "onpath_reload_p50_ms": ("<=", 0.0),
    "onpath_reload_p90_fraction": ("<=", 0.05),
}
# What may not get worse at low load: metric -> the larger is better.
_LOW_LOAD = {
    "ttfp_p50_s": False,
    "ttfp_p90_s": False,
    "text_ttfp_p50_s": False,
    "completed_turns_per_s": True,
    "continuity_fraction": True,
}

# metric → (name of the ratio, how it is formed, better)
_QUOTIENTS = {
    "ttfp_p90_speedup": ("ttfp_p90_s", "stock/ours", "higher"),
    "ttfp_p50_speedup": ("ttfp_p50_s", "stock/ours", "higher"),
    "throughput_ratio": ("completed_turns_per_s", "ours/stock", "higher"),
    "later_ttfp_p50_speedup": ("later_ttfp_p50_s", "stock/ours", "higher"),
    "later_ttfp_p90_speedup": ("later_ttfp_p90_s", "stock/ours", "higher"),
    "later_text_ttfp_p50_speedup": ("later_text_ttfp_p50_s", "stock/ours", "higher"),
    "later_text_ttfp_p90_speedup": ("later_text_ttfp_p90_s", "stock/ours", "higher"),
    "onpath_reload_p90_fraction": ("onpath_reload_p90_ms", "ours/stock", "lower"),
}
# name of the ratio → (metric of ours alone, better)
_OURS = {
    "preload_hit_fraction": ("resident_fraction", "higher"),
    "onpath_reload_p50_ms": ("onpath_reload_p50_ms", "lower"),
}
# name of the ratio → metric of which ours has less than stock; the share that is saved. Of all that
# is computed a tier can save at most what is not new: 0.82 in the kv presets.
_SAVINGS = {
    "prefill_tokens_saved_fraction": "prefill_tokens_recomputed",
    "prefill_computed_saved_fraction": "prefill_tokens_computed",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--preset", choices=PRESETS, default="ci", help="(%(default)s)")
    parser.add_argument(
        "--arms", metavar="A,B", help="the preset's first server and these (default: all)"
    )
    parser.add_argument("--pairs", type=int, help="rounds A B ... (the preset's)")
    parser.add_argument("--slow-motion", type=float, metavar="K", help="for every case")
    parser.add_argument("--seed", type=int, help="of every case")
    parser.add_argument("--fast-codes", action="store_true", help="for both servers, always")
    add_server_arguments(parser, "compare")
    parser.add_argument("--json", metavar="FILE", type=Path, help="write the result file")
    parser.add_argument("--plots", metavar="DIR", type=Path, help="write the plots")


def _chosen(arms: tuple[Arm, ...], names: str | None) -> tuple[Arm, ...]:
    """The first, and those of ``names`` (with commas between them).

    Raises:
        ValueError: a name is none of the preset's.
    """
    if names is None:
        return arms
    wanted = [name.strip() for name in names.split(",")]
    for name in wanted:
        if name not in [arm.name for arm in arms]:
            known = ", ".join(arm.name for arm in arms)
            raise ValueError(f"--arms {name!r} is not in this preset: it has {known}")
    return tuple(arm for arm in arms if arm.name in {arms[0].name, *wanted})


@dataclass
class Run:
    """One case in one server."""

    arm: str
    case: str
    pair: int
    report: SessionsReport
    more: dict[str, Any] = field(default_factory=dict)

    @property
    def metrics(self) -> dict[str, Any]:
        return dict(self.report.metrics) | self.more


def run(args: argparse.Namespace) -> int:
    # Wide enough for the table also where the output is a file.
    console, preset = Console(width=None if sys.stdout.isatty() else 140), PRESETS[args.preset]
    changes = {name: getattr(args, name) for name in ("slow_motion", "seed") if getattr(args, name)}
    cases = {name: replace(case, **changes) for name, case in preset.cases.items()}
    pairs = args.pairs if args.pairs is not None else preset.pairs
    try:
        preset = replace(preset, arms=_chosen(preset.arms, args.arms))
        if pairs < 1:
            raise ValueError("--pairs takes a whole number from 1")
        for case in cases.values():
            case.validate()
    except ValueError as exc:
        print(f"liveserve bench compare: {exc}", file=sys.stderr)
        return 2
    fast_codes = args.fast_codes or preset.fast_codes
    ensure_tiny_model(args.model_dir, console)
    gbps = min(map(link_gbps, cases.values())) if preset.preload else None
    link = [] if gbps is None else ["--link-gbps", f"{gbps:.4f}"]
    flags = [*(["--fast-codes"] if fast_codes else []), *link]
    runs: list[Run] = []
    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    )  # fmt: skip
    try:
        with (
            Progress(*columns, console=console, transient=True) as progress,
            _Servers(args.model_dir, args.logs, flags, preset) as servers,
        ):
            task = progress.add_task("", total=pairs * len(preset.arms) * len(cases))
            servers.start(progress, task)
            for pair, arm, name in in_turn(preset.arms, list(cases), pairs, preset.together):
                progress.update(task, description=f"{name}, {arm.name}, round {pair + 1}")
                server, record, is_new = servers.get(arm, pair)
                if preset.regime and not runs and not args.slow_motion:
                    cases["load"] = _in_the_regime(server, cases["load"])
                here = replace(cases[name], url=server.url, model=server.name)
                if not is_new:  # the server is warm
                    here = replace(here, warmup=0)
                if preset.preload:
                    report, turns = asyncio.run(run_watched(here))
                else:
                    report, turns = asyncio.run(run_sessions(here)), []
                more = _kv_metrics(server, record, here) if preset.prefill else {}
                if preset.preload:
                    found = more["kv"].get("preload") or {}
                    more |= preload_metrics(turns, found, here.slow_motion)
                runs.append(Run(arm.name, name, pair, report, more))
                progress.advance(task)
    except (ServerFailed, ServerUnreachable) as exc:
        print(f"liveserve bench compare: {exc}", file=sys.stderr)
        return 1
    ratios = compare(runs, [arm.name for arm in preset.arms[1:]])
    for arm in preset.arms[1:]:
        if arm.name.startswith(STOCK):
            ratios |= compare(runs, [LIVE], against=arm.name)
    for table in tables(runs, ratios):
        console.print(table)
    if args.plots:
        for path in save_comparison(
            args.plots, {(r.arm, r.case, r.pair): r.report.responses for r in runs}
        ):
            console.print(f"plot: {path}", soft_wrap=True)
        if preset.preload:
            console.print(f"plot: {_plot_reloads(args.plots, runs)}", soft_wrap=True)
    if args.json:
        result_cases = [
            {
                "params": {
                    "arm": r.arm,
                    "case": r.case,
                    "pair": r.pair,
                    "fast_codes": fast_codes,
                    **({} if gbps is None else {"link_gbps": gbps}),
                    **asdict(r.report.config),
                },
                "metrics": r.metrics,
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


def in_turn(
    arms: Sequence[Arm], cases: Sequence[str], pairs: int, together: bool
) -> Iterator[tuple[int, Arm, str]]:
    """Round, server and case of each run. Who was first is last the next time.

    ``together``: a case runs in one server right after the other; else a server does all its cases.
    """
    for pair in range(pairs):
        if together:
            for index, case in enumerate(cases):
                order = arms if (pair + index) % 2 == 0 else arms[::-1]
                yield from ((pair, arm, case) for arm in order)
        else:
            order = arms if pair % 2 == 0 else arms[::-1]
            yield from ((pair, arm, case) for arm in order for case in cases)


class _Servers:
    """The servers of a comparison: all from the start, or one at a time."""

    def __init__(self, model: Path, logs: Path, flags: Sequence[str], preset: Preset) -> None:
        self._model, self._logs, self._flags, self._preset = model, logs, flags, preset
        self._up: dict[tuple[str, int], tuple[Server, Path]] = {}
        self._used: set[tuple[str, int]] = set()
        self._frozen: dict[tuple[str, int], contextlib.ExitStack] = {}
        self._stack = contextlib.ExitStack()

    def start(self, progress: Progress, task: TaskID) -> None:
        """Start all, where servers are together: none may run while others are not up yet.

        Raises:
            ServerFailed: one does not start.
        """
        progress.update(task, description="starting the servers")
        for arm in self._preset.arms if self._preset.together else ():
            self._start(arm, (arm.name, 0), wait=False)
        for server, _ in self._up.values():
            server.wait_until_up()
        self._freeze_all_but(None)

    def _freeze_all_but(self, awake: tuple[str, int] | None) -> None:
        if awake in self._frozen:
            self._frozen.pop(awake).close()
        for key in self._up.keys() - self._frozen.keys() - {awake}:
            frozen = self._frozen[key] = self._stack.enter_context(contextlib.ExitStack())
            frozen.enter_context(self._up[key][0].frozen())

    def __enter__(self) -> _Servers:
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()

    def get(self, arm: Arm, pair: int) -> tuple[Server, Path, bool]:
        """The server of ``arm``, the folder of its record, and whether nothing ran in it yet.

        Where servers are not together, each round has its own, and no other one is up then.

        Raises:
            ServerFailed: it does not start.
        """
        key = arm.name, 0 if self._preset.together else pair
        if key not in self._up:
            self._stack.close()
            self._up.clear()
            self._start(arm, key)
        self._freeze_all_but(key)
        is_new = key not in self._used
        self._used.add(key)
        return *self._up[key], is_new

    def _start(self, arm: Arm, key: tuple[str, int], *, wait: bool = True) -> None:
        log = self._logs / f"{arm.name.replace(' ', '-')}-{key[1]}.log"
        record = log.with_suffix(".record")
        shutil.rmtree(record, ignore_errors=True)
        env = dict(WARM)
        if self._preset.prefill:
            env |= {RECORD_ENV: str(record), ROWS_ENV: "off"}
        server = self._stack.enter_context(
            running_server(self._model, log, flags=[*arm.flags, *self._flags], env=env, wait=wait)
        )
        self._up[key] = server, record


def _in_the_regime(server: Server, case: SessionsConfig) -> SessionsConfig:
    """``case`` in the slow motion that `regime_slow_motion` says, from an answer of half the users:
    about as many are answered at a time as later, when they do not all begin together.
    """
    probe = replace(case, url=server.url, model=server.name, turns=1, p_barge_in=0.0)
    probe = replace(
        probe, sessions=max(1, (case.sessions or 2) // 2), answer_seconds=case.answer_seconds[:1]
    )
    rtf = asyncio.run(run_sessions(probe)).metrics["rtf_p50"]
    if not isinstance(rtf, float):  # it answers nobody, as the run will show
        return case
    return replace(case, slow_motion=regime_slow_motion(rtf, case.slow_motion))


def regime_slow_motion(rtf: float, slow_motion: float) -> float:
    """The slow motion in which stock's RTF is about `_REGIME_RTF` if it is ``rtf`` in this one.

    The slower the users, the fewer answers are made at once: RTF falls faster than with 1/K. The
    exponent is what runs on two cores had. At least 1, and bounded for runs that end.
    """
    wanted = slow_motion * (rtf / _REGIME_RTF) ** (2 / 3)
    return round(min(max(wanted, 1.0), _SLOWEST_MOTION), 1)


def _plot_reloads(folder: Path, runs: Sequence[Run]) -> Path:
    """What turns with a history waited for, by server, all rounds together."""
    waits: dict[str, dict[str, list[float]]] = {}
    for r in runs:
        of_arm = waits.setdefault(r.arm, {})
        later = [answer for answer in r.report.responses if answer.turn]
        for name, values in (
            ("on-path reload (listener ms)", r.metrics["onpath_reloads_ms"]),
            ("text TTFP (listener s)", [answer.text_ttfp_s for answer in later]),
            ("audio TTFP (listener s)", [answer.ttfp_s for answer in later]),
        ):
            of_arm.setdefault(name, []).extend(v for v in values if v is not None)
    return save_waits(folder / "reload.png", waits, "turns that have a history")


def _kv_metrics(server: Server, record: Path, case: SessionsConfig) -> dict[str, Any]:
    """Of the one case that ran in ``server``: tokens by the thinker's record, and the tier's own
    totals where there is one.
    """
    readings = read_thinker(record, skip_sessions=case.warmup)
    return prefill_metrics(readings) | {"kv": kv_totals(server.url)}


def compare(
    runs: Sequence[Run], arms: Sequence[str], *, against: str | None = None
) -> dict[str, dict[str, Any]]:
    """Ratios of each arm against the first run's, or another arm, pair by pair, with their spread.

    A name is the metric, then the case (unless it is the metric's own, `_BARE`, or the only one),
    then the arm if it is not LiveServe with everything on, then what it is compared with if that is
    not the first run's. Where nobody interrupts there is no waste to speak of.
    """
    baseline = runs[0].arm
    against = baseline if against is None else against
    metrics: dict[tuple[str, str, int], dict[str, Any]] = {
        (r.arm, r.case, r.pair): r.metrics for r in runs
    }
    cases = list(dict.fromkeys(r.case for r in runs))
    found: dict[str, dict[str, Any]] = {}
    for arm in arms:
        for case in cases:
            of_arm = "" if arm == LIVE else f" {arm}"
            of_arm += "" if against == baseline else f" vs {against}"

            def named(name: str, case: str = case, of_arm: str = of_arm) -> str:
                bare = len(cases) == 1 or case == _BARE.get(name, "load")
                return name + ("" if bare else f" {case}") + of_arm

            both = [
                (metrics[(against, case, r.pair)], metrics[(arm, case, r.pair)])
                for r in runs
                if r.arm == arm and r.case == case and (against, case, r.pair) in metrics
            ]
            for name, (metric, form, better) in _QUOTIENTS.items():
                values = [
                    stock[metric] / ours[metric]
                    if form == "stock/ours"
                    else ours[metric] / stock[metric]
                    for stock, ours in both
                    if stock.get(metric)
                    and ours.get(metric) is not None
                    and (ours[metric] or form == "ours/stock")
                ]
                _put(found, named(name), values, better)
            for name, (metric, better) in _OURS.items():
                known = [ours[metric] for _, ours in both if ours.get(metric) is not None]
                _put(found, named(name), known, better)
            for name, metric in _SAVINGS.items():
                saved = [
                    1 - ours[metric] / stock[metric]
                    for stock, ours in both
                    if stock.get(metric) and ours.get(metric) is not None
                ]
                _put(found, named(name), saved, "higher")
            _put(
                found,
                named("continuity_delta_pp"),
                [
                    100 * (ours["continuity_fraction"] - stock["continuity_fraction"])
                    for stock, ours in both
                    if None not in (ours["continuity_fraction"], stock["continuity_fraction"])
                ],
                "higher",
            )
            for which, index in (("stock", 0), ("ours", 1)):
                values = [
                    pair[index]["waste_fraction"]
                    for pair in both
                    if pair[0].get("responses_interrupted") != 0
                ]
                _put(
                    found,
                    named(f"waste_{which}_fraction"),
                    [v for v in values if v is not None],
                    "lower",
                )
            if case == "light":
                _put(found, "lowload_worst_regression" + of_arm, _worst_losses(both), "lower")
    return found


def _worst_losses(pairs: Sequence[tuple[Mapping[str, Any], Mapping[str, Any]]]) -> list[float]:
    """Relative losses, pair by pair, in the metric that lost most at low load: the one whose median
    over the pairs is largest. Negative: it won.
    """
    losses: dict[str, list[float]] = {}
    for stock, ours in pairs:
        for name, larger in _LOW_LOAD.items():
            if stock.get(name) and ours.get(name):
                ratio = ours[name] / stock[name]
                losses.setdefault(name, []).append(1 - ratio if larger else ratio - 1)
    return max(losses.values(), key=statistics.median, default=[])


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


_PRELOAD_COLUMNS = (
    ("offloaded", "turns_offloaded", "#"),
    ("resident", "resident_fraction", "%"),
    ("reload P50", "onpath_reload_p50_ms", " ms"),
    ("P90", "onpath_reload_p90_ms", " ms"),
    ("text 2+ P50", "later_text_ttfp_p50_s", " s"),
    ("P90", "later_text_ttfp_p90_s", " s"),
    ("TTFP 2+ P50", "later_ttfp_p50_s", " s"),
    ("P90", "later_ttfp_p90_s", " s"),
    ("again", "prefill_tokens_recomputed", "n"),
    ("failed", "responses_failed", "#"),
)


_KV_COLUMNS = (
    ("TTFP 2+ P50", "later_ttfp_p50_s", " s"),
    ("P90", "later_ttfp_p90_s", " s"),
    ("text P50", "later_text_ttfp_p50_s", " s"),
    ("P90", "later_text_ttfp_p90_s", " s"),
    ("asked", "prompt_tokens", "n"),
    ("computed", "prefill_tokens_computed", "n"),
    ("again", "prefill_tokens_recomputed", "n"),
    ("hits", "prefix_hit_fraction", "%"),
    ("continuity", "continuity_fraction", "%"),
    ("turns/s", "completed_turns_per_s", ""),
    ("failed", "responses_failed", "#"),
)


def tables(runs: Sequence[Run], ratios: Mapping[str, Mapping[str, Any]]) -> list[Table]:
    """The runs, and the ratios with their spread."""
    baseline = runs[0].arm
    k_of = {r.case: f"{r.report.config.slow_motion:g}" for r in runs}
    ks = ", ".join(k if len(k_of) == 1 else f"{k} ({case})" for case, k in k_of.items())
    every = Table(title=f"every run (users in slow motion, K = {ks})", title_justify="left")
    prefill = any("prefill_tokens_computed" in r.metrics for r in runs)
    columns: Sequence[tuple[str, str, str]] = _KV_COLUMNS if prefill else _COLUMNS
    if any("resident_fraction" in r.metrics for r in runs):
        columns = _PRELOAD_COLUMNS
    for column in ("case", "server", "round", *(c[0] for c in columns)):
        every.add_column(column)
    for r in sorted(runs, key=lambda r: (r.case, r.pair, r.arm != baseline, r.arm)):
        cells = [_cell(r.metrics.get(key), unit) for _, key, unit in columns]
        every.add_row(r.case, r.arm, str(r.pair + 1), *cells)
    summary = Table(title=f"LiveServe against {baseline}", title_justify="left")
    for column in ("", "median", "low", "high", "target"):
        summary.add_column(column)
    targets = TARGETS if baseline == STOCK else PRELOAD_TARGETS
    for name, ratio in ratios.items():
        figures = (f"{ratio[key]:.3f}" for key in ("value", "low", "high"))
        summary.add_row(name, *figures, _verdict(name, ratio["value"], targets))
    return [every, summary]


def _verdict(name: str, value: float, targets: Mapping[str, tuple[str, float]] = TARGETS) -> str:
    if name not in targets:
        return ""
    sign, target = targets[name]
    met = value >= target if sign == ">=" else value <= target
    return f"{sign} {target:g} {'met' if met else 'missed'}"


def _cell(value: Any, unit: str) -> str:
    if value is None:
        return "-"
    if unit == "#":
        return str(value)
    if unit == "n":
        return f"{value:,.0f}"
    return f"{100 * value:.0f} %" if unit == "%" else f"{value:.2f}{unit}"
