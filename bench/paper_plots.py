"""The figures of ``liveserve bench paper``; every title says simulated or measured."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from liveserve.bench.paper_table import LIVE, NO_OFFLOAD, STOCK, Runs, measured_result

_COLOURS = {NO_OFFLOAD: "#9ca3af", STOCK: "#2563a8", LIVE: "#e07b1a"}
_MORE = ("#15803d", "#7c3aed", "#be185d", "#0e7490", "#a16207", "#374151")
# The paper's figures, where its text gives them: shown beside ours.
_PAPER_WASTE = {STOCK: 44.06, LIVE: 12.38}
Draw = Callable[[Any, Runs, Path], bool]


def save_plots(folder: Path, result: Mapping[str, Any], measured: Path) -> list[Path]:
    """Write every figure for which there are runs; returns the files."""
    from matplotlib.figure import Figure  # slow to import; needs no display this way

    folder.mkdir(parents=True, exist_ok=True)
    runs = Runs(result["cases"])
    written = []
    figures: tuple[tuple[str, Draw], ...] = (
        ("load", _load("load", "ShareGPT on Qwen3-Omni")),
        ("load-ming", _load("load-ming", "ShareGPT on Ming-flash-omni")),
        ("tail", _tail),
        ("arrivals", _arrivals),
        ("barge-in", _barge_in),
        ("ablation", _ablation),
        ("lead", _lead),
        ("residency", _residency),
        ("index", _index),
    )
    for name, draw in figures:
        figure = Figure(figsize=(9, 4), layout="constrained")
        if draw(figure, runs, measured):
            written.append(folder / f"{name}.png")
            figure.savefig(written[-1], dpi=110)
    return written


def _finish(axes: Any, x: str, y: str, title: str, *, legend: bool = True) -> None:
    axes.set(xlabel=x, ylabel=y)
    axes.set_title(title, fontsize=9, loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    if legend:
        axes.legend(fontsize=8, frameon=False)


def _line(
    axes: Any, runs: Runs, figure: str, system: str, metric: str, factor: float = 1.0
) -> bool:
    points = [
        (load, factor * value)
        for name in runs.settings(figure)
        if (load := runs.loads[figure, name]) is not None
        and (value := runs.get(figure, name, system, metric)) is not None
    ]
    if points:
        axes.plot(*zip(*points, strict=True), "o-", ms=4, color=_COLOURS.get(system), label=system)
    return bool(points)


def _load(figure_name: str, what: str) -> Draw:
    """Frontier: TTFP, continuity and useful answers over the load."""

    def draw(figure: Any, runs: Runs, _: Path) -> bool:
        parts = figure.subplots(1, 3)
        drawn = False
        for axes, metric, factor, label in zip(
            parts,
            ("ttfp_p90_s", "continuity_fraction", "useful_rps"),
            (1.0, 100.0, 1.0),
            ("P90 TTFP (s)", "continuous answers (%)", "useful answers/s"),
            strict=True,
        ):
            for system in runs.systems(figure_name):
                drawn = _line(axes, runs, figure_name, system, metric, factor) or drawn
            _finish(axes, "listeners at a time", label, "", legend=axes is parts[0] and drawn)
        parts[0].set_yscale("log")
        figure.suptitle(f"{what}, simulated", fontsize=10, x=0.01, ha="left")
        return drawn

    return draw


def _tail(figure: Any, runs: Runs, _: Path) -> bool:
    """The distribution of TTFP at loads at which stock ceases to be smooth."""
    names = [n for n in runs.settings("load") if (runs.loads["load", n] or 0) > 128][:3]
    if not names:
        return False
    for axes, name in zip(figure.subplots(1, len(names), squeeze=False)[0], names, strict=True):
        for system in runs.systems("load"):
            for metrics in runs.runs("load", name, system)[:1]:
                points = metrics["ttfp_quantiles_s"]
                shares = [index / (len(points) - 1) for index in range(len(points))]
                axes.plot(points, shares, color=_COLOURS.get(system), label=system)
        _finish(axes, "audio TTFP (s)", "share of answers", f"{name}, simulated")
    return True


def _arrivals(figure: Any, runs: Runs, _: Path) -> bool:
    kinds = runs.settings("arrivals")
    if not kinds:
        return False
    left, right = figure.subplots(1, 2)
    for axes, metric, label in (
        (left, "ttfp_p90_s", "P90 TTFP (s)"),
        (right, "useful_rps", "useful answers/s"),
    ):
        _bars(axes, runs, "arrivals", kinds, runs.systems("arrivals"), metric)
        _finish(axes, "", label, "arrivals, simulated")
    return True


def _bars(
    axes: Any,
    runs: Runs,
    figure: str,
    names: Sequence[str],
    systems: Sequence[str],
    metric: str,
    factor: float = 1.0,
) -> None:
    width = 0.8 / len(systems)
    for number, system in enumerate(systems):
        values = [factor * (runs.get(figure, n, system, metric) or 0.0) for n in names]
        places = [index + number * width for index in range(len(names))]
        axes.bar(places, values, width, color=_COLOURS.get(system), label=system)
    axes.set_xticks([i + 0.4 - width / 2 for i in range(len(names))], names)


def _barge_in(figure: Any, runs: Runs, _: Path) -> bool:
    left, right = figure.subplots(1, 2)
    drawn = False
    for system in runs.systems("barge-in"):
        drawn = _line(left, runs, "barge-in", system, "useful_rps") or drawn
        _line(right, runs, "barge-in", system, "generated_waste_fraction", 100.0)
    for system, most in _PAPER_WASTE.items():
        label = f"paper, {system}, at most"
        right.axhline(most, color=_COLOURS[system], ls=":", lw=1, label=label)
    if drawn:
        _finish(left, "chance of a barge-in", "useful answers/s", "barge-in, simulated")
        _finish(right, "chance of a barge-in", "audio nobody hears (%)", "waste, simulated")
    return drawn


def _ablation(figure: Any, runs: Runs, _: Path) -> bool:
    names = runs.settings("ablation")
    if not names:
        return False
    parts = figure.subplots(1, 3)
    for axes, metric, factor, label in zip(
        parts,
        ("ttfp_p90_s", "continuity_fraction", "generated_waste_fraction"),
        (1.0, 100.0, 100.0),
        ("P90 TTFP (s)", "continuous answers (%)", "audio nobody hears (%)"),
        strict=True,
    ):
        lines = [(s, "barge-in") for s in (STOCK, LIVE)]
        lines += [(s, "ablation") for s in runs.systems("ablation")]
        lines = [(s, f) for s, f in lines if any(runs.runs(f, n, s) for n in names)]
        height = 0.8 / len(names)
        for number, name in enumerate(names):
            values = [factor * (runs.get(f, name, s, metric) or 0.0) for s, f in lines]
            places = [index + number * height for index in range(len(lines))]
            axes.barh(places, values, height, color=_MORE[number], label=name)
        labels = [s.removeprefix(f"{LIVE}-").replace("-", " ") for s, _ in lines]
        axes.set_yticks([i + 0.4 - height / 2 for i in range(len(lines))], labels, fontsize=8)
        axes.invert_yaxis()
        _finish(axes, label, "", "", legend=axes is parts[-1])
    figure.suptitle("One mechanism left out, simulated", fontsize=10, x=0.01, ha="left")
    return True


def _lead(figure: Any, runs: Runs, _: Path) -> bool:
    """How far generation runs ahead of the listener, and RTF."""
    left, right = figure.subplots(1, 2)
    drawn = False
    for system in runs.systems("load"):
        drawn = _line(left, runs, "load", system, "lead_p50_s") or drawn
        _line(right, runs, "load", system, "rtf_p50")
    if drawn:
        right.axhline(1.0, color="#9ca3af", lw=0.8)
        _finish(left, "listeners at a time", "lead over the listener (s)", "lead, simulated")
        _finish(right, "listeners at a time", "RTF (median)", "RTF, simulated")
    return drawn


def _residency(figure: Any, runs: Runs, _: Path) -> bool:
    """What the KV pools hold over time, stock and LiveServe."""
    name = next(iter(runs.settings("kv")), None)
    shown = [s for s in (STOCK, LIVE) if name and runs.runs("kv", name, s)]
    shown = [s for s in shown if "timeline" in runs.runs("kv", str(name), s)[0]]
    if not shown:
        return False
    parts = figure.subplots(1, len(shown), sharey=True, squeeze=False)[0]
    for axes, system in zip(parts, shown, strict=True):
        seen = runs.runs("kv", str(name), system)[0]["timeline"]
        for number, what in enumerate(("gpu_used_blocks", "gpu_cached_blocks", "dram_blocks")):
            axes.plot(seen["at_s"], seen[what], color=_MORE[number], label=what.replace("_", " "))
        _finish(axes, "s", "blocks", f"residency, {system}, simulated")
    return True


def _index(figure: Any, _: Runs, measured: Path) -> bool:
    """What an eviction decision takes, from the eviction benchmark's result file."""
    result = measured_result(measured / "eviction-cost.json")
    if result is None:
        return False
    axes = figure.subplots()
    for number, policy in enumerate(("scan", "scan-numpy", "next-use")):
        points = sorted(
            (case["params"]["blocks"], case["metrics"]["decision_mean_ms"])
            for case in result["cases"]
            if case["params"].get("policy") == policy
        )
        if points:
            axes.plot(*zip(*points, strict=True), "o-", ms=4, color=_MORE[number], label=policy)
    axes.set(xscale="log", yscale="log")
    _finish(axes, "blocks in the pool", "ms a decision", "eviction index, measured on a CPU")
    return True
