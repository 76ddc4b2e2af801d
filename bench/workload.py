"""What the simulated users will do: seeded, drawn before the run, independent of the server.

A session's plan depends on ``(seed, session index)`` alone, so a run with more sessions, or another
server, faces the same users.
"""

from __future__ import annotations

import math
import wave
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

SAMPLE_RATE_HZ = 16_000
"""Input sample rate of the utterances; the duplex endpoint's default."""

ASSETS = Path(__file__).resolve().parent / "assets"

ARRIVALS = ("closed", "poisson", "burst")

_WORDS = ("answer", "briefly", "kindly", "never", "guess", "repeat", "numbers", "twice", "please")


@dataclass(frozen=True)
class Utterance:
    """One spoken input: ``pcm`` is 16 kHz mono s16le that ends on its last speech sample."""

    name: str
    pcm: bytes

    @property
    def duration_s(self) -> float:
        return len(self.pcm) / (2 * SAMPLE_RATE_HZ)


def load_utterances(folder: Path = ASSETS) -> list[Utterance]:
    """Read every ``*.wav`` of ``folder``, in name order.

    Raises:
        ValueError: there is none, or one is not 16 kHz mono 16-bit PCM, or it is empty.
    """
    utterances = []
    for path in sorted(folder.glob("*.wav")):
        with wave.open(str(path), "rb") as wav:
            shape = (wav.getframerate(), wav.getnchannels(), wav.getsampwidth())
            pcm = wav.readframes(wav.getnframes())
        if shape != (SAMPLE_RATE_HZ, 1, 2) or not pcm:
            raise ValueError(
                f"{path}: need non-empty 16000 Hz mono 16-bit PCM, got {shape[0]} Hz, "
                f"{shape[1]} channels, {8 * shape[2]} bits; convert it with "
                f"'sox {path.name} -r 16000 -c 1 -b 16 out.wav'"
            )
        utterances.append(Utterance(path.stem, pcm))
    if not utterances:
        raise ValueError(f"{folder}: no .wav file; put 16 kHz mono speech there")
    return utterances


@dataclass(frozen=True)
class TurnPlan:
    """One turn of a user, in listener seconds.

    ``barge_in_fraction``: the user speaks again once this share of the planned answer was heard
    (that speech is the next turn's utterance; at the last turn the user leaves); None: the answer
    is heard to its end.
    ``reply_gap_s``: silence between the end of this answer and the next utterance.
    """

    utterance: int
    answer_s: float
    barge_in_fraction: float | None
    reply_gap_s: float


@dataclass(frozen=True)
class SessionPlan:
    index: int
    turns: tuple[TurnPlan, ...]


@dataclass(frozen=True)
class WorkloadConfig:
    """The distributions. Times are listener seconds.

    Reply gaps are log-normal with the given mean and coefficient of variation. A user interrupts
    once a share of the answer was heard that is drawn evenly from ``barge_in_between``.
    """

    seed: int = 0
    turns: int = 3
    answer_choices_s: tuple[float, ...] = (10.0, 20.0, 40.0)
    p_barge_in: float = 0.0
    barge_in_between: tuple[float, float] = (0.1, 0.9)
    reply_gap_mean_s: float = 1.5
    reply_gap_cv: float = 0.5
    utterances: int = 1


def plan_session(cfg: WorkloadConfig, index: int) -> SessionPlan:
    """The plan of session ``index``: the same for every run with this ``cfg``."""
    rng = np.random.default_rng(np.random.SeedSequence(cfg.seed, spawn_key=(1, index)))
    sigma = math.sqrt(math.log1p(cfg.reply_gap_cv**2))
    turns = []
    for _turn in range(cfg.turns):
        # Every draw is made whether or not it is used, so that changing one probability leaves
        # the other draws as they were.
        utterance = int(rng.integers(cfg.utterances))
        answer_s = float(rng.choice(cfg.answer_choices_s))
        barge_in, fraction = bool(rng.random() < cfg.p_barge_in), float(rng.random())
        gap_s = cfg.reply_gap_mean_s * math.exp(sigma * rng.standard_normal() - sigma**2 / 2)
        low, high = cfg.barge_in_between
        fraction = low + (high - low) * fraction
        turns.append(TurnPlan(utterance, answer_s, fraction if barge_in else None, gap_s))
    return SessionPlan(index, tuple(turns))


def instructions_text(seed: int, index: int, chars: int) -> str:
    """Instructions of session ``index``: ``chars`` characters that no other session begins with."""
    rng = np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(2, index)))
    words = [f"Session {index} of run {seed}."]
    length = len(words[0])
    while length < chars:
        words.append(_WORDS[int(rng.integers(len(_WORDS)))])
        length += 1 + len(words[-1])
    return " ".join(words)[:chars]


def arrival_times_s(
    kind: str, seed: int, *, rate_per_s: float = 1.0, burst_shape: float = 0.25, ramp_s: float = 2.0
) -> Iterator[float]:
    """Endless start times of sessions, in listener seconds, ascending except for ``closed``.

    ``closed``: uniform in ``[0, ramp_s)``, so that concurrent users do not start in step.
    ``poisson``: exponential gaps. ``burst``: gamma gaps of the same mean; a ``burst_shape`` below 1
    makes bursts, as BurstGPT found (0.25: coefficient of variation 2; 1 is Poisson).
    """
    rng = np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(0,)))
    now_s = 0.0
    while True:
        if kind == "closed":
            yield float(rng.uniform(0, ramp_s)) if ramp_s > 0 else 0.0
            continue
        shape = 1.0 if kind == "poisson" else burst_shape
        now_s += float(rng.gamma(shape, 1.0 / (rate_per_s * shape)))
        yield now_s
