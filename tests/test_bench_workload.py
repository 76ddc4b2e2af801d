"""The users: the same for the same seed, and distributed as asked."""

import itertools
import wave
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from liveserve.bench.workload import (
    ASSETS,
    SAMPLE_RATE_HZ,
    WorkloadConfig,
    arrival_times_s,
    load_utterances,
    plan_session,
)

CFG = WorkloadConfig(seed=5, turns=50, p_barge_in=0.4, utterances=8)


def turns(cfg: WorkloadConfig, sessions: int = 100) -> list:
    return [turn for i in range(sessions) for turn in plan_session(cfg, i).turns]


def test_same_seed_same_users() -> None:
    assert plan_session(CFG, 3) == plan_session(CFG, 3)
    assert plan_session(CFG, 3).turns != plan_session(CFG, 4).turns
    assert plan_session(CFG, 3).turns != plan_session(replace(CFG, seed=6), 3).turns


def test_one_knob_moves_one_thing() -> None:
    """Comparing p_bi=0 with p_bi=1 must not change answers, gaps or who says what."""
    never, always = (turns(replace(CFG, p_barge_in=p), 5) for p in (0.0, 1.0))
    assert [(t.utterance, t.answer_s, t.reply_gap_s) for t in never] == [
        (t.utterance, t.answer_s, t.reply_gap_s) for t in always
    ]
    assert all(t.barge_in_fraction is None for t in never)


def test_fewer_turns_are_a_prefix() -> None:
    short = plan_session(replace(CFG, turns=3), 0).turns
    assert short == plan_session(CFG, 0).turns[:3]


def test_distributions() -> None:
    drawn = turns(CFG)
    barged = [t.barge_in_fraction for t in drawn if t.barge_in_fraction is not None]
    assert len(barged) / len(drawn) == pytest.approx(0.4, abs=0.02)
    assert 0.1 <= min(barged) < 0.12 < 0.88 < max(barged) <= 0.9
    early = turns(replace(CFG, barge_in_between=(0.2, 0.3)))
    shares = [t.barge_in_fraction for t in early if t.barge_in_fraction is not None]
    assert len(shares) == len(barged)
    assert 0.2 <= min(shares) < 0.21 < 0.29 < max(shares) <= 0.3
    gaps = np.array([t.reply_gap_s for t in drawn])
    assert gaps.mean() == pytest.approx(1.5, rel=0.03)
    assert gaps.std() / gaps.mean() == pytest.approx(0.5, rel=0.06)
    lengths, counts = np.unique([t.answer_s for t in drawn], return_counts=True)
    assert list(lengths) == [10, 20, 40]
    assert counts.min() / len(drawn) > 0.31
    assert {t.utterance for t in drawn} == set(range(8))


def test_constant_gaps() -> None:
    assert {t.reply_gap_s for t in turns(replace(CFG, reply_gap_cv=0.0), 2)} == {1.5}


@pytest.mark.parametrize(("kind", "cv"), [("poisson", 1.0), ("burst", 2.0)])
def test_arrivals(kind: str, cv: float) -> None:
    times = list(itertools.islice(arrival_times_s(kind, 1, rate_per_s=4.0), 20_000))
    gaps = np.diff([0.0, *times])
    assert gaps.min() >= 0
    assert gaps.mean() == pytest.approx(0.25, rel=0.05)
    assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.06)
    again = itertools.islice(arrival_times_s(kind, 1, rate_per_s=4.0), 20_000)
    assert times == list(again)


def test_closed_arrivals_are_spread_over_the_ramp() -> None:
    times = list(itertools.islice(arrival_times_s("closed", 0, ramp_s=4.0), 1000))
    assert 0 <= min(times) < 0.1
    assert 3.9 < max(times) < 4
    assert next(arrival_times_s("closed", 0, ramp_s=0.0)) == 0


def test_built_in_speech() -> None:
    utterances = load_utterances()
    assert 6 <= len(utterances) <= 8
    assert all(1 <= u.duration_s <= 4 for u in utterances)
    assert sum(path.stat().st_size for path in ASSETS.glob("*.wav")) < 1_000_000
    for utterance in utterances:
        samples = np.frombuffer(utterance.pcm, "<i2").astype(float)
        peak = np.abs(samples).max()
        assert peak > 8000
        # The end of the file is the end of the speech: TTFP from speech end counts from there.
        assert np.abs(samples[-SAMPLE_RATE_HZ // 50 :]).max() > 0.01 * peak


def test_wrong_speech_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no \.wav file"):
        load_utterances(tmp_path)
    with wave.open(str(tmp_path / "cd.wav"), "wb") as wav:
        wav.setnchannels(2)
        wav.setsampwidth(2)
        wav.setframerate(44_100)
        wav.writeframes(bytes(400))
    with pytest.raises(ValueError, match=r"44100 Hz, 2 channels.*sox cd.wav"):
        load_utterances(tmp_path)
