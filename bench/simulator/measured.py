"""A measured run of ``bench sessions`` for the simulator: the same users, and the figures compared.

The users of a run are drawn from its seed, so the simulator can face exactly them. In slow motion
(K) a listener's second is K wall seconds: the simulator runs in wall seconds with listeners who
play at 1 / K, and its times are divided by K, as the run's are.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from liveserve.bench.metrics import aggregate
from liveserve.bench.player import Gap
from liveserve.bench.records import ResponseRecord, SessionRecord
from liveserve.bench.sessions import SessionsConfig
from liveserve.bench.simulator.model import CostModel, ModelError, Session, Turn, Workload
from liveserve.bench.simulator.workloads import AUDIO_TOKENS_PER_S, TEMPLATE_TOKENS
from liveserve.bench.workload import Utterance, arrival_times_s, load_utterances, plan_session


class Pace(NamedTuple):
    """How a deployment speaks.

    Attributes:
        frames_per_token: codec frames of a text token.
        audio_tokens_per_s: prompt tokens of a second of speech.
        template_tokens: prompt tokens of a question beside its speech.
    """

    frames_per_token: float
    audio_tokens_per_s: float = AUDIO_TOKENS_PER_S
    template_tokens: int = TEMPLATE_TOKENS


def pace_of(responses: Sequence[ResponseRecord], frame_rate_hz: float) -> Pace:
    """The pace of answers that were heard to their end.

    Raises:
        ModelError: there is none with text and audio.
    """
    whole = [r for r in responses if r.outcome == "completed" and r.text_deltas and r.routed_s]
    if not whole:
        raise ModelError("no answer was heard to its end: its text and audio cannot be compared")
    # A stream's last frames are cut by the vocoder: whole frames were made.
    frames = sum(math.ceil(r.routed_s * frame_rate_hz) for r in whole)
    return Pace(frames / sum(r.text_deltas for r in whole))


def workload_of(
    config: SessionsConfig,
    pace: Pace,
    costs: CostModel,
    utterances: Sequence[Utterance] | None = None,
) -> Workload:
    """The users of a run with ``config`` (closed loop, one session each, or open), in wall seconds.

    Args:
        config: of the run; ``duration`` is not supported.
        pace: see `Pace`.
        costs: for the codec's frame rate.
        utterances: what was said; None: the built-in ones.

    Raises:
        ModelError: the run has a feature that has no counterpart here.
    """
    if config.duration is not None:
        raise ModelError("duration: a run that is cut by time cannot be simulated; use sessions")
    if config.speech is not None and utterances is None:
        raise ModelError("speech: pass the utterances of the run")
    spoken = list(utterances or load_utterances())
    slow = config.slow_motion
    arrivals = arrival_times_s(
        config.arrivals,
        config.seed,
        rate_per_s=config.rate,
        burst_shape=config.burst_shape,
        ramp_s=config.ramp,
    )
    sessions = []
    for index, at_s in enumerate(itertools.islice(arrivals, config.concurrent)):
        turns = []
        for plan in plan_session(config.workload(len(spoken)), index).turns:
            speech_s = spoken[plan.utterance].duration_s
            tokens = max(1, round(plan.answer_s * config.tokens_per_second))
            audio_tokens = max(1, round(speech_s * pace.audio_tokens_per_s))
            fraction = plan.barge_in_fraction
            turns.append(
                Turn(
                    prompt_tokens=pace.template_tokens + audio_tokens,
                    encoder_tokens=audio_tokens,
                    answer_tokens=tokens,
                    answer_s=max(1, round(tokens * pace.frames_per_token)) / costs.frame_rate_hz,
                    speech_s=speech_s * slow,
                    reply_gap_s=plan.reply_gap_s * slow,
                    barge_in_s=None if fraction is None else fraction * plan.answer_s,
                )
            )
        sessions.append(
            Session(
                index=index,
                arrival_s=at_s * slow,
                turns=tuple(turns),
                playback_rate=1 / slow,
                network_delay_s=0.0,
            )
        )
    notes: dict[str, str | int | float | bool | None] = {
        "seed": config.seed,
        "slow_motion": slow,
        "p_barge_in": config.p_barge_in,
    }
    return Workload("measured", tuple(sessions), notes=notes)


def in_slow_motion(costs: CostModel, config: SessionsConfig) -> CostModel:
    """``costs`` for ``config``: the server's VAD waits for silence in the user's time."""
    silence_s = config.vad_silence_ms / 1e3
    slower_s = (config.slow_motion - 1) * silence_s if config.end_of_speech == "vad" else 0.0
    return msgspec.structs.replace(costs, endpoint_s=costs.endpoint_s + slower_s)


Run = tuple[Sequence[ResponseRecord], Sequence[SessionRecord]]


def listener_metrics(
    runs: Sequence[Run], config: SessionsConfig, frame_rate_hz: float = 12.5
) -> dict[str, Any]:
    """The metrics of simulated records as ``bench sessions`` gives them, in listener seconds; of
    several runs of the same users together.
    """
    slow = config.slow_motion
    responses = [_slower(r, slow) for run, _ in runs for r in run]
    sessions = [s for _, run in runs for s in run]
    span_s = 0.0
    for _, run in runs:
        ends = [s.end_s for s in run if s.end_s is not None]
        span_s += (max(ends) - min(s.start_s for s in run)) / slow if ends else 0.0
    return aggregate(
        responses,
        sessions,
        span_s=span_s,
        max_gap_s=config.max_gap_ms / 1e3,
        ttfp_slo_s=config.ttfp_slo,
        codec_frame_rate_hz=frame_rate_hz,
    )


_TIMES = (
    "speech_end_s", "endpoint_s", "created_s", "first_text_s", "first_audio_s", "last_audio_s",
    "done_s", "barge_in_s", "stopped_s",
)  # fmt: skip


def _slower(record: ResponseRecord, slow: float) -> ResponseRecord:
    """``record``'s wall times in listener seconds; amounts of audio are what they are."""
    changes: dict[str, Any] = {
        name: value / slow for name in _TIMES if (value := getattr(record, name)) is not None
    }
    fields = {name: getattr(record, name) for name in ResponseRecord.__dataclass_fields__}
    gaps = [Gap(g.start_s / slow, g.position_s / slow, g.duration_s / slow) for g in record.gaps]
    return ResponseRecord(**(fields | changes | {"gaps": gaps}))


class Compared(NamedTuple):
    """One figure, measured and simulated. ``error``: relative to ``measured``, or, for shares (of
    answers, of audio), the difference itself.
    """

    name: str
    measured: float
    simulated: float
    error: float


# Figure → whether it is a share: then its error is absolute.
FIGURES: Mapping[str, bool] = {
    "text_ttfp_p50_s": False,
    "ttfp_p50_s": False,
    "ttfp_p90_s": False,
    "rtf_p50": False,
    "completed_turns_per_s": False,
    "continuity_fraction": True,
    "waste_fraction": True,
}


def compare(measured: Mapping[str, Any], simulated: Mapping[str, Any]) -> list[Compared]:
    """Every figure of `FIGURES` that both have."""
    found = []
    for name, share in FIGURES.items():
        real, ours = measured.get(name), simulated.get(name)
        if real is None or ours is None:
            continue
        error = ours - real if share else ours / real - 1 if real else math.inf
        found.append(Compared(name, real, ours, error))
    return found
