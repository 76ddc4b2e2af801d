"""False alarms: what of the speech over an answer interrupts it, and what the host's VAD tells."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from liveserve.false_alarm import SpeechGate, VadChunk, Verdict

PASS, HOLD, COMMIT, DISMISS = Verdict
CHUNK_MS = 100.0
SILENCE_MS = 500.0
ONSET_MS = 96.0  # voiced audio after which a VAD reports speech


def chunks(*voiced: tuple[float, float], length_ms: float = 3000.0) -> list[VadChunk]:
    """What a VAD finds in 100 ms chunks of audio that is voiced from, to those milliseconds."""
    found, active, from_ms, last_ms = [], False, 0.0, 0.0
    for end_ms in (CHUNK_MS * (i + 1) for i in range(int(length_ms / CHUNK_MS))):
        started = stopped = False
        for begin_ms, until_ms in voiced:
            if not begin_ms < end_ms or until_ms <= end_ms - CHUNK_MS:
                continue
            upto_ms = min(end_ms, until_ms)
            if not active and upto_ms - begin_ms >= ONSET_MS:
                active, started, from_ms = True, True, begin_ms
            if active:
                last_ms = max(last_ms, upto_ms)
        if active and end_ms - last_ms >= SILENCE_MS:
            active, stopped = False, True
        found.append(VadChunk(started, stopped, active, from_ms, last_ms, end_ms))
    return found


def verdicts(heard: list[VadChunk], *, limit_ms: float = 250.0, answering: bool = True):
    gate = SpeechGate()
    return [gate.judge(chunk, answering=answering, limit_ms=limit_ms) for chunk in heard]


@pytest.mark.parametrize("voiced_ms", [100, 150, 249])
def test_a_blip_is_dismissed_when_the_vad_says_it_is_over(voiced_ms):
    seen = verdicts(chunks((310, 310 + voiced_ms)))
    assert seen.count(DISMISS) == 1
    assert COMMIT not in seen
    assert set(seen[seen.index(HOLD) : seen.index(DISMISS)]) == {HOLD}
    assert set(seen[seen.index(DISMISS) + 1 :]) == {PASS}


@pytest.mark.parametrize("voiced_ms", [250, 300, 1500])
def test_speech_interrupts_as_soon_as_it_has_lasted(voiced_ms):
    seen = verdicts(chunks((310, 310 + voiced_ms)))
    # 250 ms are over in the chunk that ends at 600 ms
    assert [v.name for v in seen[:6]] == ["PASS", "PASS", "PASS", "PASS", "HOLD", "COMMIT"]
    assert set(seen[6:]) == {PASS}  # the host has it from there, with its end


def test_long_chunks_need_no_hold():
    whole = VadChunk(True, False, True, 100.0, 1000.0, 1000.0)
    assert verdicts([whole]) == [PASS]
    blip = VadChunk(True, True, False, 100.0, 250.0, 1000.0)
    assert verdicts([blip]) == [DISMISS]
    word = VadChunk(True, True, False, 100.0, 400.0, 1000.0)
    assert verdicts([word]) == [PASS]


def test_silence_between_two_clicks_is_not_speech():
    clicks = chunks((100, 200), (500, 600), (900, 960))
    assert COMMIT not in verdicts(clicks, limit_ms=300)
    assert COMMIT in verdicts(clicks, limit_ms=220)


@pytest.mark.parametrize("voiced", [(310, 460), (310, 1500)])
def test_nothing_is_provisional_when_nothing_answers_or_at_zero(voiced):
    assert set(verdicts(chunks(voiced), answering=False)) == {PASS}
    assert set(verdicts(chunks(voiced), limit_ms=0)) == {PASS}


def test_it_stays_provisional_when_the_answer_ends_meanwhile():
    gate, heard = SpeechGate(), chunks((310, 460))
    seen = [gate.judge(c, answering=c.end_ms < 600, limit_ms=250) for c in heard]
    assert DISMISS in seen
    assert COMMIT not in seen


def test_the_clients_word_counts_at_once():
    gate = SpeechGate()
    gate.force()  # nothing to force
    heard = chunks((310, 460))
    seen = []
    for chunk in heard:
        seen.append(gate.judge(chunk, answering=True, limit_ms=250))
        if seen[-1] is HOLD:
            gate.force()
    assert seen.count(HOLD) == 1
    assert seen[seen.index(HOLD) + 1] is COMMIT


def test_flipping_it_off_lets_pending_speech_through():
    gate, heard = SpeechGate(), chunks((310, 460))
    assert [gate.judge(c, answering=True, limit_ms=250) for c in heard[:5]][-1] is HOLD
    assert gate.judge(heard[5], answering=True, limit_ms=0) is COMMIT


def test_a_detector_that_was_replaced_ends_it():
    gate, heard = SpeechGate(), chunks((310, 460))
    for chunk in heard[:5]:
        gate.judge(chunk, answering=True, limit_ms=250)
    silent = VadChunk(False, False, False, 0.0, 0.0, 32.0)
    assert gate.judge(silent, answering=True, limit_ms=250) is DISMISS
    assert not gate.provisional


def test_a_new_sound_in_the_chunk_in_which_the_blip_ended_starts_anew():
    gate, heard = SpeechGate(), chunks((310, 460))
    for chunk in heard[:8]:
        gate.judge(chunk, answering=True, limit_ms=250)
    both = VadChunk(True, True, True, 1100.0, 1200.0, 1200.0)
    assert gate.judge(both, answering=True, limit_ms=250) is HOLD
    assert gate.voiced_ms == 100.0
    more = VadChunk(False, False, True, 0.0, 1360.0, 1360.0)
    assert gate.judge(more, answering=True, limit_ms=250) is COMMIT


@given(
    st.lists(st.tuples(st.floats(20, 700), st.floats(20, 900)), max_size=6),
    st.floats(0, 1000),
    st.lists(st.booleans(), min_size=60, max_size=60),
)
def test_every_provisional_start_is_committed_or_dismissed_once(sounds, limit_ms, answering):
    voiced, at_ms = [], 0.0
    for gap_ms, for_ms in sounds:
        voiced.append((at_ms + gap_ms, at_ms + gap_ms + for_ms))
        at_ms = voiced[-1][1]
    gate, open_starts, committed_ms = SpeechGate(), 0, []
    for chunk, answer in zip(chunks(*voiced, length_ms=6000), answering, strict=True):
        was = gate.provisional
        verdict = gate.judge(chunk, answering=answer, limit_ms=limit_ms)
        assert gate.provisional == (verdict is HOLD)
        assert was or verdict in (PASS, HOLD, DISMISS)
        assert not was or verdict is not PASS
        if verdict is COMMIT:
            committed_ms.append(gate.voiced_ms)
        open_starts += gate.provisional - was
    assert open_starts in (0, 1)
    assert all(voiced_ms >= limit_ms for voiced_ms in committed_ms)


# ---- the host's VAD ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def host():
    return pytest.importorskip("liveserve.host.false_alarm")


def hear(host, probabilities: list[float], frames_per_chunk: int, prefix_ms: int = 300):
    """The chunks of a host VAD whose model gives those probabilities to 32 ms frames."""
    import numpy as np
    from vllm_omni.engine.duplex.turn_detection import ServerTurnDetector, TurnDetectionConfig

    config = TurnDetectionConfig(prefix_padding_ms=prefix_ms, silence_duration_ms=256)
    detector = ServerTurnDetector(config)
    scores = iter(probabilities)
    detector.vad._frame_scorer = lambda _frame: next(scores)
    import base64

    frame = base64.b64encode(np.zeros(512 * frames_per_chunk, np.float32).tobytes()).decode()
    found = []
    for _ in range(len(probabilities) // frames_per_chunk):
        result = detector.process(frame, fmt="pcm_f32le", sample_rate_hz=16_000)
        found.append(host.vad_chunk(result, detector.vad, config))
    return found


@pytest.mark.parametrize("frames_per_chunk", [1, 2, 5])
@pytest.mark.parametrize("voiced_frames", [3, 5, 7, 8, 12])
def test_voiced_time_is_exact_on_the_hosts_vad(host, frames_per_chunk, voiced_frames):
    probabilities = [0.0] * 15 + [0.9] * voiced_frames + [0.0] * 22
    found = hear(host, probabilities, frames_per_chunk)
    started = [chunk for chunk in found if chunk.started]
    assert [chunk.speech_from_ms for chunk in started] == [15 * 32]
    last = max(chunk.voiced_to_ms for chunk in found)
    assert last == (15 + voiced_frames) * 32
    assert [chunk.voiced_to_ms for chunk in found if chunk.stopped] == [last]
    seen = verdicts(found)
    assert (COMMIT in seen) == (voiced_frames * 32 >= 250)
    assert (DISMISS in seen) == (voiced_frames * 32 < 250)


def test_a_start_right_after_a_reset_is_not_earlier_than_the_stream(host):
    found = hear(host, [0.9] * 4 + [0.0] * 12, 1)
    assert [(c.speech_from_ms, c.voiced_to_ms) for c in found if c.started] == [(0.0, 96.0)]


def test_options_of_a_session_are_checked(host):
    from liveserve.host.duplex import LiveOptions, OptionError, live_options

    assert live_options(None) == live_options({}) == LiveOptions()
    given = {"liveserve": {"playback_rate": 0.5, "false_alarm_ms": 0, "events": True}}
    assert live_options(given) == LiveOptions(0.5, 0, True)
    for name, value in (
        ("playback_rate", 0),
        ("playback_rate", None),
        ("playback_rate", True),
        ("false_alarm_ms", -1),
        ("false_alarm_ms", float("nan")),
        ("false_alarm_ms", "1"),
        ("events", "yes"),
    ):
        with pytest.raises(OptionError, match=rf"liveserve\.{name} must be") as wrong:
            live_options({"liveserve": {name: value}})
        assert wrong.value.code == f"invalid_{name}"
    with pytest.raises(OptionError, match="playback_rate"):
        live_options({"liveserve": "fast"})
