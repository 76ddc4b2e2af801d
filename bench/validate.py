"""``liveserve bench validate``: the simulator against the real pipeline.

Servers on this machine's CPU (stock, LiveServe) serve first one user alone and then several at
once, and record every step. A cost model is fitted to each server (see `fit_all`: medians of first
text and first audio and the stock server's RTF are fitted; all else is predicted); with it the
simulator serves the same users, and what they get is compared. What was recorded goes into the
result file, so that ``--from FILE`` fits and compares again without a server. ``--costs`` writes
the stock server's model.
"""

from __future__ import annotations

import argparse
import asyncio
import shlex
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from rich.console import Console

from liveserve.bench.calibrate_server import match_overheads, simulated_metrics
from liveserve.bench.demo import ensure_tiny_model
from liveserve.bench.launch import WARM, ServerFailed, add_server_arguments, running_server
from liveserve.bench.result_file import (
    build_result,
    ratio_of,
    read_result,
    write_result,
)
from liveserve.bench.sessions import SessionsConfig, run_sessions
from liveserve.bench.simulator.costs import load_costs, save_costs
from liveserve.bench.simulator.fit import Fit, FitError, Step, fit_steps, read_record, summary
from liveserve.bench.simulator.measured import Compared, Pace, compare, pace_of
from liveserve.bench.simulator.model import CostModel, ModelError, StepCost
from liveserve.bench.terminal import print_table, progress

ARMS: Mapping[str, tuple[str, ...]] = {
    "stock": ("--liveserve", "off"),
    "liveserve": (),
}
# Errors that the simulator may have: of times relative; of shares absolute, and that of waste
# smaller, because waste is a small share.
JUDGED = {
    "ttfp_p50_s": 0.15,
    "ttfp_p90_s": 0.15,
    "continuity_fraction": 0.15,
    "waste_fraction": 0.05,
}

_ROUNDS = 2

ALONE = SessionsConfig(sessions=1, turns=3, answer_seconds=(3.0,), reply_gap=0.3, ramp=0.0, seed=5)
CROWD = SessionsConfig(
    sessions=12,
    turns=3,
    answer_seconds=(3.0, 5.0, 7.0),
    p_barge_in=0.4,
    reply_gap=1.0,
    ramp=4.0,
    slow_motion=2.0,
    timeout=120.0,
    warmup=0,
    seed=21,
)
# What the CPU host's deploy files and the tiny model are, instead of the base's.
_CPU = {
    "thinker.replicas": 1,
    "talker.replicas": 1,
    "code2wav.replicas": 1,
    "thinker.max_requests": 16,
    "talker.max_requests": 16,
    "code2wav.max_requests": 16,
    "thinker.max_step_tokens": 8192,
    "talker.max_step_tokens": 8192,
    "thinker.block_tokens": 32,
    "talker.block_tokens": 32,
    "thinker.kv_blocks": 4095,
    "talker.kv_blocks": 4095,
    "thinker.kv_bytes_per_token": 4096,
    "talker.kv_bytes_per_token": 3072,
    "talker_prompt_tokens": 6,
    "max_answer_tokens": 64,
    "max_answer_frames": 800,
    "dram_bytes": 0,
    "deliver_s": 0.002,
    "signal_s": 0.02,
    "talker_starts_after": 2,
    "alternate_steps": True,
}
_DEPLOYED = "liveserve/host/cpu/deploy_turn.yaml and the tiny model"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--arms", nargs="+", choices=ARMS, default=list(ARMS), help="servers to run (all)"
    )
    parser.add_argument(
        "--from",
        dest="source",
        type=Path,
        metavar="FILE",
        help="start no server; fit and compare what this result file recorded",
    )
    parser.add_argument(
        "--add-to", type=Path, metavar="FILE", help="keep the other servers of this result file"
    )
    add_server_arguments(parser, "validate")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result file")
    parser.add_argument("--costs", type=Path, metavar="FILE", help="write the fitted cost model")


def run(args: argparse.Namespace) -> int:
    """0: every judged figure is within the tolerance; 1: one is not, or a server failed; 2: a file
    cannot be read."""
    try:
        known = args.source or args.add_to
        cases = list(read_result(known, "validate")["cases"]) if known else []
    except ValueError as error:
        print(f"liveserve bench validate: {error}", file=sys.stderr)
        return 2
    if args.source is None:
        ensure_tiny_model(args.model_dir, Console())
        cases = [case for case in cases if case["params"]["arm"] not in args.arms]
        try:
            with progress("validate", len(args.arms)) as advance:
                for arm in args.arms:
                    cases.append(record(arm, args.model_dir, args.logs))
                    advance(arm)
        except (ServerFailed, FitError) as error:
            print(f"liveserve bench validate: {error}", file=sys.stderr)
            return 1
    try:
        models = fit_all(cases)
        found = {
            case["params"]["arm"]: judge(case, models[case["params"]["arm"]].costs)
            for case in cases
        }
    except (FitError, ModelError) as error:
        print(f"liveserve bench validate: {error}", file=sys.stderr)
        return 1
    for arm, model in models.items():
        print(f"{arm}, steps x {model.scale:.2f}:")
        for line in summary(model.fit):
            print(f"  {line}")
    print_table(
        "measured and simulated (errors of times are relative, of shares absolute)",
        ("", "measured", "simulated", "error", "judged"),
        [_row(arm, figure) for arm, figures in found.items() for figure in figures],
    )
    if args.costs:
        save_costs(args.costs, next(iter(models.values())).costs)
        print(f"cost model: {args.costs}")
    if args.json:
        command = shlex.join(["liveserve", *sys.argv[1:]])
        write_result(
            args.json, build_result("validate", cases, command=command, ratios=_ratios(found))
        )
        print(f"result: {args.json}")
    return 0 if all(is_met(figure) for figures in found.values() for figure in figures) else 1


def record(arm: str, model: Path, logs: Path) -> dict[str, Any]:
    """Run one server with its users; a case of the result file.

    Raises:
        ServerFailed: it did not start.
        FitError: its record cannot be read.
    """
    from liveserve.host.cpu.record import RECORD_ENV

    with tempfile.TemporaryDirectory(prefix="liveserve-validate-") as folder:
        flags = [*ARMS[arm], "--fast-codes"]
        log = logs / f"{arm}.log"
        with running_server(model, log, flags=flags, env=WARM | {RECORD_ENV: folder}) as server:
            url, name = server.url, server.name
            alone = asyncio.run(run_sessions(replace(ALONE, url=url, model=name)))
            crowd = asyncio.run(run_sessions(replace(CROWD, url=url, model=name)))
        steps = read_record(Path(folder))
    pace = pace_of([*alone.responses, *crowd.responses], CROWD.codec_frame_rate)
    return {
        "params": {"arm": arm, **_plain(crowd.config)},
        "metrics": crowd.metrics,
        "alone": {"params": _plain(alone.config), "metrics": alone.metrics},
        "pace": pace._asdict(),
        "steps": {stage: [_compact(step) for step in seen] for stage, seen in steps.items()},
    }


def _plain(config: SessionsConfig) -> dict[str, Any]:
    """Without the address, which says nothing."""
    return asdict(replace(config, url=SessionsConfig().url, model=None))


def _compact(step: Step) -> str:
    """A step's fields in a line, to 10 microseconds."""
    return " ".join(f"{round(float(value), 5):g}" for value in step)


def _step(line: str) -> Step:
    """What `_compact` wrote.

    Raises:
        FitError: it is something else.
    """
    try:
        seconds, decodes, context, prefill, pairs, *counts = map(float, line.split())
        chunks, frames, active, fed = map(int, counts)
    except (ValueError, AttributeError):
        raise FitError(f"steps: {line!r} is no step") from None
    return Step(seconds, int(decodes), context, int(prefill), pairs, chunks, frames, active, fed)


class Fitted(NamedTuple):
    """A server's cost model. ``scale``: its steps take so many times what their records say: the
    host's work between steps is only in there where steps follow one another at once.
    """

    costs: CostModel
    fit: Fit
    scale: float


def fit_all(cases: Sequence[Mapping[str, Any]]) -> dict[str, Fitted]:
    """A cost model for each recorded server, by its name.

    Step costs are each server's own. Their scale is found with the stock server, from how fast it
    generates (RTF), and holds for the others. Encoder and handovers are those that give the first
    text and first audio (medians) of each server's users.

    Raises:
        FitError: too few steps, or no server.
        ModelError: a case has no answers.
    """
    if not cases:
        raise FitError("no server was recorded")
    found: dict[str, Fitted] = {}
    scale = 1.0
    for case in sorted(cases, key=lambda case: case["params"]["arm"] != "stock"):
        arm = case["params"]["arm"]
        bare, fit = _with_steps(case)
        config, pace = config_of(case["params"]), Pace(**case["pace"])
        costs = match_overheads(_scaled(bare, scale), case["metrics"], config, pace, arm)
        for _ in range(_ROUNDS if arm == "stock" else 0):
            simulated = simulated_metrics(costs, config, pace, arm)
            scale *= case["metrics"]["rtf_p50"] / simulated["rtf_p50"]
            costs = match_overheads(_scaled(bare, scale), case["metrics"], config, pace, arm)
        found[arm] = Fitted(costs, fit, scale)
    return found


def _scaled(costs: CostModel, scale: float) -> CostModel:
    """``costs`` with every step ``scale`` times as long."""

    def longer(struct: Any, names: Sequence[str]) -> Any:
        return msgspec.structs.replace(struct, **{n: scale * getattr(struct, n) for n in names})

    changes = {
        stage: msgspec.structs.replace(
            getattr(costs, stage),
            step=longer(getattr(costs, stage).step, StepCost.__struct_fields__),
        )
        for stage in ("thinker", "talker")
    }
    vocoder = longer(costs.code2wav, ("fixed_s", "per_frame_s"))
    why = f" x {scale:.2f} (the host's work between steps); within"
    sources = {
        path: text.replace("; within", why) if text.startswith("fitted to") else text
        for path, text in costs.sources.items()
    }
    return msgspec.structs.replace(costs, code2wav=vocoder, sources=sources, **changes)


def _with_steps(case: Mapping[str, Any]) -> tuple[CostModel, Fit]:
    """The CPU host's cost model with the steps of one server."""
    steps = {stage: [_step(line) for line in seen] for stage, seen in case["steps"].items()}
    fit = fit_steps(steps, shared=True)
    if fit.thinker is None or fit.talker is None or fit.code2wav is None:
        raise FitError("a stage recorded no steps")
    base = load_costs("qwen3-omni-h200", _CPU)
    sources = {path: source for path, source in base.sources.items() if path not in _CPU}
    sources |= dict.fromkeys((path for path, value in _CPU.items() if value), _DEPLOYED)
    sources["deliver_s"] = "of the order of a localhost packet; cannot be told from encode_s"
    sources["talker_starts_after"] = "seen in the records of its steps"
    sources["signal_s"] = "flush interval of 10 ms and half a step"
    for stage in ("thinker", "talker", "code2wav"):
        quality = fit.quality[stage]
        part = stage if stage == "code2wav" else f"{stage}.step"
        cost = getattr(fit, stage)
        names = ("fixed_s", "per_frame_s") if stage == "code2wav" else cost.__struct_fields__
        for name in names:
            sources.pop(f"{part}.{name}", None)
            if getattr(cost, name):
                sources[f"{part}.{name}"] = (
                    f"fitted to {quality.steps} steps; within {quality.spread:.2f}x"
                )
    sources["noise"] = "what the fit leaves of the steps"
    sources["noise_s"] = "steps' errors are alike for some 0.3 s (autocorrelation 0.3); within 2x"
    if fit.parallel_steps is not None:
        sources["parallel_steps"] = "fitted to the same steps"
    replaced = msgspec.structs.replace
    costs = replaced(
        base,
        name="cpu-tiny",
        thinker=replaced(base.thinker, step=fit.thinker),
        talker=replaced(base.talker, step=fit.talker),
        code2wav=replaced(
            base.code2wav, fixed_s=fit.code2wav.fixed_s, per_frame_s=fit.code2wav.per_frame_s
        ),
        parallel_steps=fit.parallel_steps,
        noise=fit.noise,
        encode_token_s=0.0,
        sources={path: source for path, source in sources.items() if path != "encode_token_s"},
    )
    return costs, fit


def judge(case: Mapping[str, Any], costs: CostModel) -> list[Compared]:
    """The users of ``case`` in the simulator, against the run."""
    params = dict(case["params"])
    arm = params.pop("arm")
    simulated = simulated_metrics(costs, config_of(params), Pace(**case["pace"]), arm)
    return compare(case["metrics"], simulated)


def is_met(figure: Compared) -> bool:
    return figure.name not in JUDGED or abs(figure.error) <= JUDGED[figure.name]


def config_of(params: Mapping[str, Any]) -> SessionsConfig:
    """The run that a result file's parameters describe."""
    fields: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in params.items()
        if name in SessionsConfig.__dataclass_fields__
    }
    return SessionsConfig(**fields)


def _row(arm: str, figure: Compared) -> tuple[str, str, str, str, str]:
    judged = ""
    if figure.name in JUDGED:
        judged = f"{100 * JUDGED[figure.name]:.0f} %, {'met' if is_met(figure) else 'missed'}"
    return (
        f"{arm} {figure.name}",
        f"{figure.measured:.3f}",
        f"{figure.simulated:.3f}",
        f"{100 * figure.error:+.0f} %",
        judged,
    )


def _ratios(found: Mapping[str, Sequence[Compared]]) -> dict[str, dict[str, Any]]:
    return {
        f"{figure.name.removesuffix('_s')}_error {arm}": ratio_of([figure.error], "lower")
        for arm, figures in found.items()
        for figure in figures
        if figure.name in JUDGED
    }


__all__ = ["ALONE", "CROWD", "Fitted", "fit_all", "judge", "record"]
