"""What a thinker read of its prompts and what it computed again, from the CPU host's step record.

The record (`liveserve.host.cpu.record`) is the same in every server, with and without LiveServe.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from liveserve.host.sessions import is_warmup, session_of


@dataclass
class Reading:
    """One request of the thinker, in tokens.

    Attributes:
        prompt: of its prompt.
        cached: of it in the prefix cache when the request began.
        computed: of it that were run through the model; more than ``prompt - cached`` where the
            request was preempted and began again.
        answer: that it generated.
        ahead: it was no turn, but computed a part of one ahead of it (`liveserve.host.warmup`).
    """

    session: str
    prompt: int
    cached: int
    computed: int = 0
    answer: int = 0
    ahead: bool = False


def read_thinker(record: Path, *, skip_sessions: int = 0) -> list[Reading]:
    """Requests of the thinker in the order in which they began, from the folder ``record``.

    ``skip_sessions``: leave out those of the first so many sessions, which warmed the server up.
    """
    readings: dict[str, Reading] = {}
    scheduled: dict[str, int] = {}
    for line in (record / "stage0.jsonl").read_text().splitlines():
        step = json.loads(line)
        for request, (prompt, cached) in step.get("new", {}).items():
            # A preempted request is new again in some runners: its first start counts.
            session, ahead = session_of(request), is_warmup(request)
            readings.setdefault(request, Reading(session, prompt, cached, ahead=ahead))
        for request, count in step.get("tokens", {}).items():
            scheduled[request] = scheduled.get(request, 0) + count
        for request, tokens in step.get("sampled", {}).items():
            readings[request].answer += len(tokens)
    for request, reading in readings.items():
        # Every answer token but the last is run through the model once.
        reading.computed = scheduled[request] - max(0, reading.answer - 1)
    skipped = list(dict.fromkeys(r.session for r in readings.values()))[:skip_sessions]
    return [reading for reading in readings.values() if reading.session not in skipped]


def prefill_metrics(readings: Sequence[Reading]) -> dict[str, float | None]:
    """Token counts over all requests.

    *Recomputed* is what a turn computes of what its session's turn before had computed: that
    prompt, and the answer but for its last token. What was computed ahead of a turn counts as
    computed alone.
    """
    known: dict[str, int] = {}
    recomputed = repeated = 0
    turns = [reading for reading in readings if not reading.ahead]
    for reading in turns:
        before = min(known.get(reading.session, 0), reading.prompt)
        repeated += before
        recomputed += max(0, reading.computed - (reading.prompt - before))
        known[reading.session] = reading.prompt + max(0, reading.answer - 1)
    asked = _sum(r.prompt for r in turns)
    return {
        "prompt_tokens": asked,
        "prompt_tokens_repeated": float(repeated),
        "prefill_tokens_computed": _sum(r.computed for r in readings),
        "prefill_tokens_recomputed": float(recomputed),
        "prefix_hit_fraction": _sum(r.cached for r in turns) / asked if asked else None,
    }


def _sum(values: Iterable[int]) -> float:
    return float(sum(values))
