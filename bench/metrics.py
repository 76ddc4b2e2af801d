"""Numbers of a run from its records. Every time is in listener seconds (wall / slow motion)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from liveserve.bench.records import COMPLETED, FAILED, INTERRUPTED, ResponseRecord, SessionRecord

PERCENTILES = (50, 90, 95, 99)


def percentiles(
    name: str, values: Iterable[float | None], suffix: str = "_s"
) -> dict[str, float | None]:
    """``{name}_p50{suffix}`` and the others, linearly interpolated; None where nothing was seen."""
    seen = [value for value in values if value is not None]
    points = np.percentile(seen, PERCENTILES) if seen else [None] * len(PERCENTILES)
    return {
        f"{name}_p{p}{suffix}": None if point is None else float(point)
        for p, point in zip(PERCENTILES, points, strict=True)
    }


def aggregate(
    responses: Sequence[ResponseRecord],
    sessions: Sequence[SessionRecord],
    *,
    span_s: float,
    max_gap_s: float = 0.1,
    ttfp_slo_s: float | None = None,
    stage_tokens: Mapping[str, float] | None = None,
    stage_made: Mapping[str, Mapping[str, float]] | None = None,
    stage_prompts: Mapping[str, Mapping[str, float]] | None = None,
    codec_frame_rate_hz: float = 12.5,
) -> dict[str, object]:
    """All metrics of one run.

    ``span_s``: from the first session's start to the last one's end. ``stage_tokens``: tokens that
    each stage generated meanwhile, from the server's own counters (None: it gives none).
    ``stage_made``: what each stage made and wasted in responses that ended, where the server tells
    (`liveserve.session.StageTotals`). ``stage_prompts``: prompt tokens of each stage by where their
    KV came from (`liveserve.bench.server.parse_prompt_tokens`).

    A turn counts as served when its answer was heard to its end or up to the user's own barge-in.
    *Continuity* is the share of the answers that began to play in which no single gap was longer
    than ``max_gap_s``. *Useful* turns are served, continuous and, with ``ttfp_slo_s``, on time.
    *Waste* is what reached the client and was never heard; where the server counts its talker's
    frames, ``generated_waste_fraction`` also has what was made and never sent. *Later* turns are
    those that have a history: all but a session's first.
    """
    played = [r for r in responses if r.first_audio_s is not None]
    served = [r for r in played if r.outcome in (COMPLETED, INTERRUPTED)]
    continuous = [r for r in played if r.max_gap_s <= max_gap_s]
    on_time = [
        r for r in played if ttfp_slo_s is None or (r.ttfp_s is not None and r.ttfp_s <= ttfp_slo_s)
    ]
    good = {id(r) for r in continuous} & {id(r) for r in on_time}
    useful = [r for r in served if id(r) in good]
    outcomes = Counter(r.outcome for r in responses)
    errors: Counter[str] = Counter()
    for session in sessions:
        errors.update(session.errors)
    routed_s = sum(r.routed_s for r in responses)
    heard_s = sum(r.heard_s for r in responses)
    gaps = [gap.duration_s for r in played for gap in r.gaps]

    metrics: dict[str, object] = {
        "sessions": len(sessions),
        "sessions_failed": sum(s.error is not None for s in sessions),
        "responses": len(responses),
        "responses_completed": outcomes[COMPLETED],
        "responses_interrupted": outcomes[INTERRUPTED],
        "responses_failed": outcomes[FAILED],
        "span_s": span_s,
        **percentiles("ttfp", (r.ttfp_s for r in responses)),
        "ttfp_mean_s": _mean(r.ttfp_s for r in responses),
        **percentiles("ttfp_from_speech_end", (r.ttfp_from_speech_end_s for r in responses)),
        **percentiles("text_ttfp", (r.text_ttfp_s for r in responses)),
        **percentiles("later_ttfp", (r.ttfp_s for r in responses if r.turn)),
        **percentiles("later_text_ttfp", (r.text_ttfp_s for r in responses if r.turn)),
        **percentiles("rtf", (r.rtf for r in responses), ""),
        "rtf_mean": _mean(r.rtf for r in responses),
        **percentiles(
            "barge_in_stop",
            (
                r.stopped_s - r.barge_in_s
                for r in responses
                if r.outcome == INTERRUPTED and r.stopped_s is not None and r.barge_in_s is not None
            ),
        ),
        "continuity_fraction": _ratio(len(continuous), len(played)),
        "gaps": len(gaps),
        "gaps_over_limit": sum(gap > max_gap_s for gap in gaps),
        "gap_total_s": float(sum(gaps)),
        "gap_max_s": max(gaps, default=0.0),
        "answer_mean_s": _ratio(routed_s, len(played)),
        "routed_s": routed_s,
        "heard_s": heard_s,
        "waste_fraction": _ratio(routed_s - heard_s, routed_s),
        "completed_turns_per_s": _ratio(len(served), span_s),
        "useful_rps": _ratio(len(useful), span_s),
        "audio_throughput": _ratio(routed_s, span_s),
        "errors": dict(errors.most_common()),
    }
    if ttfp_slo_s is not None:
        metrics["ttfp_slo_fraction"] = _ratio(len(on_time), len(played))
    metrics |= _token_metrics(responses, stage_tokens or {}, codec_frame_rate_hz)
    metrics |= _stage_waste(responses, stage_made or {}, codec_frame_rate_hz)
    by_source = (stage_prompts or {}).get("0")
    if by_source:
        metrics |= prompt_metrics(by_source)
    return metrics


def prompt_metrics(by_source: Mapping[str, float]) -> dict[str, object]:
    """What a stage was asked to read, and what of it it computed: prompt tokens by where their KV
    came from.
    """
    asked, computed = sum(by_source.values()), by_source.get("local_compute", 0.0)
    return {
        "prompt_tokens": asked,
        "prefill_tokens_computed": computed,
        "prefix_hit_fraction": _ratio(asked - computed, asked),
    }


def _stage_waste(
    responses: Sequence[ResponseRecord],
    stage_made: Mapping[str, Mapping[str, float]],
    codec_frame_rate_hz: float,
) -> dict[str, object]:
    """``stage_waste``: tokens and seconds of speech that each stage made, and what of them nobody
    heard. ``stage_waste_source``: "server" has all of it; "client" only what reached the client.
    """
    made: dict[str, dict[str, float | None]] = {
        stage: dict(amounts) for stage, amounts in stage_made.items()
    }
    if not made:
        routed_s = sum(r.routed_s for r in responses)
        lost_s = routed_s - sum(r.heard_s for r in responses)
        text = sum(r.text_deltas for r in responses)
        text_lost = sum(
            r.text_deltas * (1 - r.heard_s / r.routed_s if r.routed_s else 1.0) for r in responses
        )
        for stage, tokens, lost in (
            ("thinker", text, text_lost),
            ("talker", routed_s * codec_frame_rate_hz, lost_s * codec_frame_rate_hz),
            ("code2wav", 0.0, 0.0),
        ):
            made[stage] = {
                "made_tokens": tokens,
                "wasted_tokens": lost,
                "made_s": routed_s,
                "wasted_s": lost_s,
            }
    for amounts in made.values():
        amounts["waste_fraction"] = _ratio(amounts["wasted_s"] or 0.0, amounts["made_s"] or 0.0)
    return {"stage_waste": made, "stage_waste_source": "server" if stage_made else "client"}


def _token_metrics(
    responses: Sequence[ResponseRecord],
    stage_tokens: Mapping[str, float],
    codec_frame_rate_hz: float,
) -> dict[str, object]:
    """Stage 0 is the thinker (text tokens), stage 1 the talker (one token is one codec frame)."""
    routed_s = sum(r.routed_s for r in responses)
    heard_s = sum(r.heard_s for r in responses)
    text_heard = sum(r.text_deltas * r.heard_s / r.routed_s for r in responses if r.routed_s)
    metrics: dict[str, object] = {
        "text_tokens_routed": sum(r.text_deltas for r in responses),
        "text_tokens_heard": text_heard,
        "codec_tokens_routed": routed_s * codec_frame_rate_hz,
        "codec_tokens_heard": heard_s * codec_frame_rate_hz,
    }
    if stage_tokens.get("0"):
        metrics["text_tokens_generated"] = stage_tokens["0"]
        metrics["text_waste_fraction"] = max(0.0, 1 - text_heard / stage_tokens["0"])
    if stage_tokens.get("1"):
        generated_s = stage_tokens["1"] / codec_frame_rate_hz
        metrics["codec_tokens_generated"] = stage_tokens["1"]
        metrics["generated_s"] = generated_s
        metrics["generated_waste_fraction"] = max(0.0, 1 - heard_s / generated_s)
    return metrics


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None


def _mean(values: Iterable[float | None]) -> float | None:
    seen = [value for value in values if value is not None]
    return float(np.mean(seen)) if seen else None
