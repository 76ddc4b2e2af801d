"""What a person sees of a run: the table and the plots."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Group
from rich.table import Table

from liveserve.bench.records import COMPLETED, INTERRUPTED, ResponseRecord

MAX_TIMELINES = 8
_BLUE, _ORANGE, _RED, _GREY = "#2563a8", "#e07b1a", "#c62828", "#6b7280"
_SERIES = (_GREY, _BLUE, _ORANGE, "#15803d", "#7c3aed", "#be185d", "#0e7490", "#a16207")


def results_table(metrics: Mapping[str, Any], title: str) -> Group:
    """The run's metrics: latencies by percentile, then the rest one a line."""
    latency = Table()
    for column in ("", "P50", "P90", "P95", "P99"):
        latency.add_column(column, justify="right" if column else "left", no_wrap=True)
    rows = (
        ("audio TTFP, from server endpoint", "ttfp", "_s", " s"),
        ("audio TTFP, from end of speech", "ttfp_from_speech_end", "_s", " s"),
        ("text TTFP, from server endpoint", "text_ttfp", "_s", " s"),
        ("RTF", "rtf", "", ""),
        ("barge-in to playback stop", "barge_in_stop", "_s", " s"),
    )
    for label, stem, suffix, unit in rows:
        values = [metrics.get(f"{stem}_p{p}{suffix}") for p in (50, 90, 95, 99)]
        if any(value is not None for value in values):
            latency.add_row(label, *(_number(value, unit) for value in values))
    rest = Table.grid(padding=(0, 2))
    for label, text in _summary(metrics):
        rest.add_row(f"  {label}", text)
    return Group(title, latency, rest)


def _summary(metrics: Mapping[str, Any]) -> list[tuple[str, str]]:
    answers = (
        f"{metrics['responses_completed']} heard out, {metrics['responses_interrupted']} "
        f"interrupted, {metrics['responses_failed']} failed"
    )
    rows = [
        ("sessions", f"{metrics['sessions']}, {metrics['sessions_failed']} failed"),
        ("answers", answers),
        ("continuity", _percent(metrics["continuity_fraction"])),
        (
            "gaps",
            f"{metrics['gaps_over_limit']} over the limit of {metrics['gaps']}, "
            f"longest {metrics['gap_max_s']:.2f} s, together {metrics['gap_total_s']:.1f} s",
        ),
    ]
    if "ttfp_slo_fraction" in metrics:
        rows.append(("TTFP within the SLO", _percent(metrics["ttfp_slo_fraction"])))
    audio = f"{metrics['routed_s']:.1f} s routed, {metrics['heard_s']:.1f} s heard"
    waste = f"{_percent(metrics['waste_fraction'])} of routed"
    if "generated_s" in metrics:
        audio = f"{metrics['generated_s']:.1f} s generated, " + audio
        waste += f", {_percent(metrics['generated_waste_fraction'])} of generated"
    rows += [("audio", audio), ("waste", waste)]
    by_stage = [
        f"{stage} {_percent(made['waste_fraction'])} ({made['wasted_s']:.1f} s, "
        f"{made['wasted_tokens']:.0f} tokens)"
        for stage, made in metrics["stage_waste"].items()
    ]
    rows.append((f"waste, as the {metrics['stage_waste_source']} sees it", "; ".join(by_stage)))
    for kind in ("text", "codec"):
        counts = [f"{metrics[f'{kind}_tokens_{what}']:.0f} {what}" for what in ("routed", "heard")]
        if f"{kind}_tokens_generated" in metrics:
            counts.insert(0, f"{metrics[f'{kind}_tokens_generated']:.0f} generated")
        rows.append((f"{kind} tokens", ", ".join(counts)))
    rows += [
        ("completed turns", _number(metrics["completed_turns_per_s"], " /s", 3)),
        ("useful", _number(metrics["useful_rps"], " /s", 3)),
    ]
    errors = ", ".join(f"{kind} {count}" for kind, count in metrics["errors"].items())
    rows.append(("errors", errors or "none"))
    return rows


def _number(value: float | None, unit: str, digits: int = 2) -> str:
    return "-" if value is None else f"{value:.{digits}f}{unit}"


def _percent(fraction: float | None) -> str:
    return "-" if fraction is None else f"{100 * fraction:.1f} %"


def save_plots(
    folder: Path, responses: Sequence[ResponseRecord], *, subtitle: str, max_gap_s: float = 0.1
) -> list[Path]:
    """Write the CDF of TTFP and the timelines of the first sessions into ``folder``."""
    from matplotlib.figure import Figure  # slow to import; needs no display this way

    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for name, figure in (
        ("ttfp_cdf.png", _ttfp_cdf(Figure, responses, subtitle)),
        ("timeline.png", _timelines(Figure, responses, subtitle, max_gap_s)),
    ):
        path = folder / name
        figure.savefig(path, dpi=110)
        written.append(path)
    return written


def _ttfp_cdf(figure_type: Any, responses: Sequence[ResponseRecord], subtitle: str) -> Any:
    figure = figure_type(figsize=(7.5, 4.6), layout="constrained")
    axes = figure.subplots()
    series = (
        ("text, from server endpoint", [r.text_ttfp_s for r in responses], _GREY, ":"),
        ("audio, from server endpoint", [r.ttfp_s for r in responses], _BLUE, "-"),
        ("audio, from end of speech", [r.ttfp_from_speech_end_s for r in responses], _ORANGE, "--"),
    )
    for label, values, colour, style in series:
        seen = sorted(value for value in values if value is not None)
        if seen:
            shares = [(i + 1) / len(seen) for i in range(len(seen))]
            axes.step(
                [seen[0], *seen],
                [0.0, *shares],
                where="post",
                color=colour,
                linestyle=style,
                linewidth=1.8,
                label=f"{label} (n={len(seen)})",
            )
    for share in (0.5, 0.9):
        axes.axhline(share, color="#d1d5db", linewidth=0.8, zorder=0)
        axes.text(0.995, share, f"P{share * 100:.0f}", transform=axes.get_yaxis_transform(),
                  ha="right", va="bottom", fontsize=8, color=_GREY)  # fmt: skip
    axes.set(xlabel="time to first packet (listener s)", ylabel="share of answers", ylim=(0, 1.02))
    axes.set_xlim(left=0)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(loc="lower right", fontsize=9, frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_title(f"Time to first packet\n{subtitle}", fontsize=10, loc="left")
    return figure


def _timelines(
    figure_type: Any, responses: Sequence[ResponseRecord], subtitle: str, max_gap_s: float
) -> Any:
    """Per session: what has arrived and what has been heard of each answer, over time."""
    sessions = sorted({r.session for r in responses})[:MAX_TIMELINES] or [0]
    figure = figure_type(figsize=(11, 1.2 + 1.75 * len(sessions)), layout="constrained")
    rows = figure.subplots(len(sessions), 1, sharex=True, sharey=True, squeeze=False)[:, 0]
    for axes, session in zip(rows, sessions, strict=True):
        for record in (r for r in responses if r.session == session):
            _draw_answer(axes, record, max_gap_s)
        axes.set_ylabel(f"session {session}\naudio (s)", fontsize=8)
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(labelsize=8)
    # Once for all: a limit set while rows share their axis would freeze it at the first row's.
    longest_s = max((r.routed_s for r in responses if r.session in sessions), default=0.0)
    rows[0].set_ylim(0, 1.08 * longest_s or 1.0)
    rows[-1].set_xlabel("time (listener s)")
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    handles = [
        Line2D([], [], color=_BLUE, label="generated, as it reached the client"),
        Line2D([], [], color=_ORANGE, label="heard"),
        Patch(color=_BLUE, alpha=0.15, label="run-ahead"),
        Patch(color=_RED, alpha=0.35, label=f"gap over {max_gap_s * 1000:.0f} ms"),
        Line2D([], [], color=_RED, marker="x", linestyle="", label="barge-in"),
        Line2D([], [], color=_GREY, marker="|", linestyle="", label="server endpoint"),
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=6, fontsize=8, frameon=False)
    figure.suptitle(
        f"Generation and playback frontiers, {subtitle}", fontsize=10, x=0.01, ha="left"
    )
    return figure


def _draw_answer(axes: Any, record: ResponseRecord, max_gap_s: float) -> None:
    if record.endpoint_s is not None:
        axes.plot(record.endpoint_s, 0, color=_GREY, marker="|", markersize=9, clip_on=False)
    if not record.arrivals or not record.playback:
        return
    end_s = max(record.playback[-1][0], record.arrivals[-1][0])
    times = [record.arrivals[0][0], *(t for t, _ in record.arrivals), end_s]
    arrived = [0.0, *(s for _, s in record.arrivals), record.arrivals[-1][1]]
    played_t = [t for t, _ in record.playback]
    played = [s for _, s in record.playback]
    axes.step(times, arrived, where="post", color=_BLUE, linewidth=1.3)
    axes.plot(played_t, played, color=_ORANGE, linewidth=1.3)
    _fill_between(axes, times, arrived, played_t, played)
    for gap in record.gaps:
        if gap.duration_s > max_gap_s:
            axes.axvspan(gap.start_s, gap.start_s + gap.duration_s, color=_RED, alpha=0.35, lw=0)
    if record.outcome == INTERRUPTED:
        axes.plot(played_t[-1], played[-1], color=_RED, marker="x", markersize=7)
    elif record.outcome != COMPLETED:
        axes.annotate(record.error or "failed", (played_t[-1], played[-1]), fontsize=7, color=_RED)


def _fill_between(
    axes: Any, times: list[float], arrived: list[float], played_t: list[float], played: list[float]
) -> None:
    import numpy as np

    grid = np.linspace(times[0], played_t[-1], 400)
    upper = np.asarray(arrived)[np.searchsorted(times, grid, side="right") - 1]
    axes.fill_between(grid, np.interp(grid, played_t, played), upper, color=_BLUE, alpha=0.15, lw=0)


def save_comparison(
    folder: Path, runs: Mapping[tuple[str, str, int], Sequence[ResponseRecord]]
) -> list[Path]:
    """Plots of several runs, keyed by (server, case, round), into ``folder``.

    The CDF of TTFP with all servers of a case together, and one timeline for each run.
    """
    from matplotlib.figure import Figure

    folder.mkdir(parents=True, exist_ok=True)
    written = []
    colours = dict(zip(dict.fromkeys(arm for arm, _, _ in runs), _SERIES * 3, strict=False))
    for case in dict.fromkeys(case for _, case, _ in runs):
        figure = Figure(figsize=(7.5, 4.6), layout="constrained")
        axes = figure.subplots()
        for arm, colour in colours.items():
            records = [r for (a, c, _), rs in runs.items() if (a, c) == (arm, case) for r in rs]
            seen = sorted(r.ttfp_s for r in records if r.ttfp_s is not None)
            if seen:
                shares = [(i + 1) / len(seen) for i in range(len(seen))]
                label = f"{arm} (n={len(seen)})"
                axes.step([seen[0], *seen], [0.0, *shares], where="post", color=colour, label=label)
        axes.set(xlabel="audio TTFP (listener s)", ylabel="share of answers", ylim=(0, 1.02))
        axes.set_xlim(left=0)
        axes.legend(loc="lower right", fontsize=9, frameon=False)
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_title(f"Time to first packet, {case}", fontsize=10, loc="left")
        written.append(folder / f"ttfp-{case.replace(' ', '-')}.png")
        figure.savefig(written[-1], dpi=110)
    for (arm, case, pair), answers in runs.items():
        if pair == 0:
            name = f"timeline-{case}-{arm}".replace(" ", "-")
            written.append(folder / f"{name}.png")
            _timelines(Figure, answers, f"{arm}, {case}", 0.1).savefig(written[-1], dpi=110)
    return written


def save_waits(path: Path, waits: Mapping[str, Mapping[str, Sequence[float]]], title: str) -> Path:
    """A plot with the CDF of each kind of wait side by side, a line for each server.

    Args:
        waits: by server, then by kind; the kind names its axis.
    """
    from matplotlib.figure import Figure

    kinds = list(dict.fromkeys(kind for of_arm in waits.values() for kind in of_arm))
    figure = Figure(figsize=(4.2 * len(kinds), 4.2), layout="constrained")
    panels = figure.subplots(1, len(kinds), squeeze=False)[0]
    for axes, kind in zip(panels, kinds, strict=True):
        for (arm, of_arm), colour in zip(waits.items(), _SERIES, strict=False):
            seen = sorted(of_arm.get(kind, ()))
            if seen:
                shares = [(i + 1) / len(seen) for i in range(len(seen))]
                label = f"{arm} (n={len(seen)})"
                axes.step([seen[0], *seen], [0.0, *shares], where="post", color=colour, label=label)
        for share in (0.5, 0.9):
            axes.axhline(share, color="#d1d5db", linewidth=0.8, zorder=0)
        axes.set(xlabel=kind, ylim=(0, 1.02))
        axes.set_xlim(left=-0.02 * axes.get_xlim()[1])  # a line at 0 is seen
        if axes.get_legend_handles_labels()[0]:
            axes.legend(loc="lower right", fontsize=8, frameon=False)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel(f"share of {title}")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    return path
