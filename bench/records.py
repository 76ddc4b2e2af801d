"""What a run leaves behind: one record per response and per session, in listener seconds."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from liveserve.bench.player import Gap

COMPLETED = "completed"
"""Heard to its end."""
INTERRUPTED = "interrupted"
"""Cut by the user's barge-in, as planned."""
FAILED = "failed"
"""Ended by an error, a timeout, without audio, or by the server's own decision; see ``error``."""


@dataclass
class ResponseRecord:
    """One answer. Times count from the start of the run; None: did not happen."""

    session: int
    turn: int
    planned_answer_s: float
    planned_barge_in_s: float | None = None
    utterance: str = ""
    outcome: str = FAILED
    error: str | None = None
    speech_end_s: float | None = None
    """The utterance's last speech sample was sent."""
    endpoint_s: float | None = None
    """The server's speech_stopped arrived."""
    created_s: float | None = None
    first_text_s: float | None = None
    first_audio_s: float | None = None
    last_audio_s: float | None = None
    done_s: float | None = None
    barge_in_s: float | None = None
    """The interrupting user began to speak."""
    stopped_s: float | None = None
    """Playback stopped: the end of the answer, or the barge-in as the client learned of it."""
    routed_s: float = 0.0
    heard_s: float = 0.0
    text: str = ""
    text_deltas: int = 0
    """Non-empty text deltas; the host sends one per token that completes a character."""
    audio_sha256: str = ""
    gaps: list[Gap] = field(default_factory=list)
    arrivals: list[tuple[float, float]] = field(default_factory=list)
    """Generation frontier as the client sees it: (time, seconds of audio arrived so far)."""
    playback: list[tuple[float, float]] = field(default_factory=list)
    """Playback frontier: corner points (time, seconds heard)."""

    @property
    def ttfp_s(self) -> float | None:
        """First audio after the server's speech_stopped."""
        return _delta(self.endpoint_s, self.first_audio_s)

    @property
    def ttfp_from_speech_end_s(self) -> float | None:
        """First audio after the user's last speech sample: adds the VAD's trailing silence."""
        return _delta(self.speech_end_s, self.first_audio_s)

    @property
    def text_ttfp_s(self) -> float | None:
        """First text after the server's speech_stopped."""
        return _delta(self.endpoint_s, self.first_text_s)

    @property
    def rtf(self) -> float | None:
        """(last audio - response.created) / seconds of audio: mirrors compute_audio_rtf in
        vllm_omni/metrics/definitions.py and the host's ``duplex_request_metrics``."""
        generation_s = _delta(self.created_s, self.last_audio_s)
        return generation_s / self.routed_s if generation_s is not None and self.routed_s else None

    @property
    def max_gap_s(self) -> float:
        return max((gap.duration_s for gap in self.gaps), default=0.0)


@dataclass
class SessionRecord:
    index: int
    planned_start_s: float
    start_s: float
    end_s: float | None = None
    turns_planned: int = 0
    turns_done: int = 0
    error: str | None = None
    errors: Counter[str] = field(default_factory=Counter)
    """Every error the session saw, by kind; the server's ``error.code`` where it gave one."""


def _delta(start_s: float | None, end_s: float | None) -> float | None:
    return None if start_s is None or end_s is None else end_s - start_s
