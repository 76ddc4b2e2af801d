"""Step costs from observed steps: non-negative least squares, for each stage by itself.

Where engines share a machine (`parallel_steps`), a step
is taken to be longer by how many steps ran when it began, as the simulator does it; how many run at
full speed is what leaves the least noise.
"""

from __future__ import annotations

import itertools
import json
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from liveserve.bench.simulator.model import STAGES, StepCost, VocoderCost

# The host works between the steps of a busy stage. A longer pause means that there was no work;
# where the next step goes on with a request of this one, only a still longer one does.
_IDLE_S, _GOING_ON_S = 0.005, 0.03
# So few steps say nothing.
MIN_STEPS = 10
# The weights settle in so many rounds.
_REWEIGHTED = 6
_PARALLEL = tuple(float(p) for p in np.arange(1.0, 3.01, 0.1))


class FitError(ValueError):
    """What was observed does not determine a cost; the message says what is missing."""


class Step(NamedTuple):
    """One observed step of a stage.

    Attributes:
        decodes: requests that made a token.
        context_tokens: of KV that they read, together.
        prefill_tokens: prompt tokens computed.
        prefill_pairs: pairs of those and the tokens before them.
        chunks, frames: of a vocoder: chunks, and frames of the longest (its context included).
        seconds: the step's length, and what the host did until the next could begin.
        active: engines in a step when it began, this one included.
        fed: of a talker: requests that decoded while their text still came.
    """

    seconds: float
    decodes: int = 0
    context_tokens: float = 0.0
    prefill_tokens: int = 0
    prefill_pairs: float = 0.0
    chunks: int = 0
    frames: int = 0
    active: int = 1
    fed: int = 0


@dataclass
class Quality:
    """How well a fit explains what it was made from.

    Attributes:
        steps, seconds: how many there were, and their time together.
        error_p50, error_p90: of a step's relative error.
        bias: relative error of all steps' time together.
        noise: standard deviation of the logarithm of a step over what it should take.
    """

    steps: int
    seconds: float
    error_p50: float
    error_p90: float
    bias: float
    noise: float

    @property
    def spread(self) -> float:
        """The factor within which its costs are believed to lie."""
        return 1 + max(0.05, self.error_p50)


@dataclass
class Fit:
    """Costs of the stages that had enough steps, and how well they fit."""

    thinker: StepCost | None = None
    talker: StepCost | None = None
    code2wav: VocoderCost | None = None
    parallel_steps: float | None = None
    quality: dict[str, Quality] = field(default_factory=dict)

    @property
    def noise(self) -> float:
        """`CostModel.noise`: of the stages together, by their time."""
        weights = sum(q.seconds for q in self.quality.values())
        squares = sum(q.seconds * q.noise**2 for q in self.quality.values())
        return math.sqrt(squares / weights) if weights else 0.0


def fit_steps(stages: Mapping[str, Sequence[Step]], *, shared: bool = False) -> Fit:
    """Fit every stage that has steps.

    Args:
        stages: steps by the stage's name.
        shared: engines share a machine: also fit how many steps run at full speed.

    Raises:
        FitError: a stage has steps, but too few.
    """
    for name, steps in stages.items():
        if 0 < len(steps) < MIN_STEPS:
            raise FitError(
                f"{name}: {len(steps)} steps were seen, at least {MIN_STEPS} are needed: "
                "let more users take more turns"
            )
    candidates = _PARALLEL if shared else (math.inf,)
    best, best_noise = Fit(), math.inf
    for parallel in candidates:
        fitted = _fit_all(stages, parallel)
        if fitted.noise < best_noise - 1e-9:
            best, best_noise = fitted, fitted.noise
    return best


def _fit_all(stages: Mapping[str, Sequence[Step]], parallel: float) -> Fit:
    fitted = Fit(parallel_steps=None if math.isinf(parallel) else parallel)
    for name, steps in stages.items():
        if not steps:
            continue
        slower = np.array([max(1.0, step.active / parallel) for step in steps])
        alone = np.array([step.seconds for step in steps]) / slower
        if name == "code2wav":
            columns = [[1.0, step.chunks * step.frames] for step in steps]
            fixed, per_frame = _nonnegative(np.array(columns), alone)
            fitted.code2wav = VocoderCost(fixed, per_frame)
            model = fixed + per_frame * np.array(columns)[:, 1]
        else:
            columns = [[1.0, *_features(s)] for s in steps]
            cost = StepCost(*_nonnegative(np.array(columns), alone))
            setattr(fitted, name, cost)
            model = np.array([cost.seconds(*_features(step)) for step in steps])
        errors = np.abs(model / alone - 1)
        seconds = float((alone * slower).sum())
        fitted.quality[name] = Quality(
            len(steps),
            seconds,
            float(np.median(errors)),
            float(np.percentile(errors, 90)),
            float((model * slower).sum() / seconds - 1),
            float(np.std(np.log(alone / model))),
        )
    return fitted


def _features(step: Step) -> tuple[int, float, int, float, int]:
    return (
        step.decodes, step.context_tokens, step.prefill_tokens, step.prefill_pairs, step.fed
    )  # fmt: skip


def _nonnegative(columns: np.ndarray, seconds: np.ndarray) -> list[float]:
    """Non-negative weights of ``columns`` that explain ``seconds`` best, the error of each relative
    to what it should be. Relative to what was seen, long steps would count for little, and the sum
    of all would come out short.
    """
    expected = np.full(len(seconds), float(np.mean(seconds)))
    weights = np.zeros(columns.shape[1])
    for _ in range(_REWEIGHTED):
        weights = _least_squares(columns / expected[:, None], seconds / expected)
        expected = np.maximum(columns @ weights, 1e-9)
    return [float(weight) for weight in weights]


def _least_squares(columns: np.ndarray, target: np.ndarray) -> np.ndarray:
    """Few columns: every choice of those that count is tried. The first, a step's fixed part, is
    always one of them.
    """
    width = columns.shape[1]
    scale = np.maximum(np.abs(columns).max(axis=0), 1e-300)
    scaled = columns / scale
    gram, moments = scaled.T @ scaled, scaled.T @ target
    usable = [index for index in range(1, width) if np.ptp(columns[:, index] / columns[:, 0]) > 0]
    best, best_error = np.zeros(width), math.inf
    for count in range(len(usable) + 1):
        for chosen in itertools.combinations(usable, count):
            which = np.array([0, *chosen])
            solution = np.linalg.lstsq(gram[np.ix_(which, which)], moments[which], rcond=None)[0]
            if (solution < 0).any() or solution[0] <= 0:
                continue
            error = solution @ gram[np.ix_(which, which)] @ solution - 2 * solution @ moments[which]
            if error < best_error - 1e-9 * abs(best_error if best_error < math.inf else 0.0):
                best_error = float(error)
                best = np.zeros(width)
                best[which] = solution / scale[which]
    return best


# ---- from recorded steps --------------------------------------------------------------------


def read_record(folder: Path, *, code_groups: int = 16) -> dict[str, list[Step]]:
    """The steps that a CPU server recorded (`liveserve.host.cpu.record`), by stage.

    Args:
        folder: with ``stage<N>.jsonl``; N 0, 1, 2 are thinker, talker and code2wav.
        code_groups: tokens per codec frame in the vocoder's input.

    Raises:
        FitError: there is no record, or a line is damaged; names file, line and field.
    """
    lines = {
        name: _lines(path)
        for index, name in enumerate(STAGES)
        if (path := folder / f"stage{index}.jsonl").exists()
    }
    if not lines:
        raise FitError(
            f"{folder}: holds no stage0.jsonl to stage2.jsonl; start the server with "
            "LIVESERVE_CPU_RECORD naming this folder"
        )
    found: dict[str, list[Step]] = {}
    for name, own in lines.items():
        others = [
            np.array([[step["start_s"], step["end_s"]] for step in steps])
            for other, steps in lines.items()
            if other != name and steps
        ]
        over_s = _text_over_s(lines.get("thinker", ())) if name == "talker" else {}
        found[name] = _steps(name, own, others, code_groups, over_s)
    return found


def _lines(path: Path) -> list[dict[str, Any]]:
    steps = []
    for number, text in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            line = json.loads(text)
            if not isinstance(line, dict):
                raise ValueError("not an object")
            if "start_s" in line:
                start_s, end_s = float(line["start_s"]), float(line["end_s"])
                tokens = {str(name): int(count) for name, count in line["tokens"].items()}
                if not (math.isfinite(start_s) and end_s > start_s and tokens):
                    raise ValueError("end_s is not after start_s, or tokens is empty")
                steps.append({"start_s": start_s, "end_s": end_s, "tokens": tokens})
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise FitError(f"{path}:{number}: is no step: {error}") from None
    return steps


def _text_over_s(lines: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """When each request's last text token was made."""
    return {request: step["end_s"] for step in lines for request in step["tokens"]}


def _steps(
    name: str,
    lines: Sequence[Mapping[str, Any]],
    others: Sequence[np.ndarray],
    code_groups: int,
    text_over_s: Mapping[str, float],
) -> list[Step]:
    between = [
        after["start_s"] - step["end_s"]
        for step, after in itertools.pairwise(lines)
        if after["start_s"] - step["end_s"] < _IDLE_S
    ]
    usual_s = float(np.median(between)) if between else 0.0
    context: dict[str, int] = defaultdict(int)
    found = []
    for step, after in itertools.zip_longest(lines, lines[1:]):
        start_s = step["start_s"]
        pause_s = after["start_s"] - step["end_s"] if after else math.inf
        active = 1 + sum(_is_inside(intervals, start_s) for intervals in others)
        tokens: dict[str, int] = step["tokens"]
        fed = sum(
            count == 1 and context[request] > 0 and start_s < text_over_s.get(request, 0.0)
            for request, count in tokens.items()
        )
        goes_on = after is not None and not tokens.keys().isdisjoint(after["tokens"])
        limit_s = _GOING_ON_S if goes_on else _IDLE_S
        seconds = step["end_s"] - start_s + (pause_s if pause_s < limit_s else usual_s)
        if name == "code2wav":
            frames = -(-max(tokens.values()) // code_groups)
            found.append(Step(seconds, chunks=len(tokens), frames=frames, active=active))
            continue
        decodes, read, prefill, pairs = 0, 0, 0, 0.0
        for request, count in tokens.items():
            before = context[request]
            if before and count == 1:
                decodes += 1
                read += before
            else:
                prefill += count
                pairs += count * (before + count / 2)
            context[request] += count
        found.append(Step(seconds, decodes, read, prefill, pairs, active=active, fed=fed))
    return found


def _is_inside(intervals: np.ndarray, at_s: float) -> bool:
    index = int(np.searchsorted(intervals[:, 0], at_s, side="right")) - 1
    return index >= 0 and at_s < intervals[index, 1]


# ---- from a server's own figures ------------------------------------------------------------


def steps_of_polls(polls: Sequence[Mapping[str, Any]]) -> dict[str, list[Step]]:
    """Average steps between looks at ``/liveserve/pressure``, by stage.

    A look has each engine's counts of steps and tokens and its moving average of a step, so that
    two of them have the average batch between them. Prompts do not show.

    Args:
        polls: answers of ``/liveserve/pressure`` in order.

    Raises:
        FitError: an answer is not one; names the field.
    """
    last: dict[tuple[int, int], Mapping[str, Any]] = {}
    found: dict[str, list[Step]] = defaultdict(list)
    for poll in polls:
        for engine in poll.get("engines", ()):
            snapshot = engine.get("snapshot")
            if not engine.get("answered") or not snapshot or not snapshot.get("attached"):
                continue
            try:
                key = (int(engine["stage_id"]), int(engine["replica_id"]))
                before = last.get(key)
                last[key] = snapshot
                if before is None:
                    continue
                steps = snapshot["steps_total"] - before["steps_total"]
                tokens = snapshot["tokens_total"] - before["tokens_total"]
                seconds, name = snapshot["step_ms"] / 1e3, str(snapshot["stage"])
            except (KeyError, TypeError, ValueError) as error:
                raise FitError(f"/liveserve/pressure: no snapshot of an engine: {error}") from None
            # Fewer steps than the average remembers, or a restarted counter, say nothing.
            if steps < 2 or tokens <= 0 or seconds <= 0 or name not in ("thinker", "talker"):
                continue
            found[name].append(Step(seconds, decodes=max(1, round(tokens / steps))))
    return dict(found)


def require(fit: Fit, base_name: str) -> None:
    """Raises:
    FitError: a stage was not fitted, so that all of its figures would be the base's.
    """
    missing = [name for name in ("thinker", "talker") if getattr(fit, name) is None]
    if missing:
        raise FitError(
            f"no steps of {' and '.join(missing)} were seen: is the server's LiveServe on and was "
            f"there any load? Without them the model would be {base_name}"
        )


_SHOWN = ("fixed_s", "per_request_s", "per_fed_s", "per_prefill_token_s", "per_frame_s")


def summary(fit: Fit) -> list[str]:
    """One line per stage."""
    lines = []
    for name, quality in fit.quality.items():
        cost = getattr(fit, name)
        parts = [
            f"{part.removesuffix('_s').replace('_', ' ')} {1e3 * getattr(cost, part):.4g} ms"
            for part in _SHOWN
            if getattr(cost, part, 0.0)
        ]
        lines.append(
            f"{name}: {', '.join(parts)}; {quality.steps} steps, error "
            f"{100 * quality.error_p50:.0f} % median, {100 * quality.error_p90:.0f} % P90"
        )
    if fit.parallel_steps is not None:
        lines.append(f"steps at full speed at a time: {fit.parallel_steps:.1f}")
    lines.append(f"noise: {fit.noise:.2f} (standard deviation of a step's logarithm)")
    return lines


__all__ = [
    "MIN_STEPS",
    "Fit",
    "FitError",
    "Quality",
    "Step",
    "fit_steps",
    "read_record",
    "require",
    "steps_of_polls",
    "summary",
]
