"""Chunk sizes that follow the buffer, on a simulated listener, against the host's fixed sizes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from liveserve.scheduler.chunking import ChunkPolicy, ChunkProgress, ChunkTimes
from liveserve.scheduler.playback import PlaybackClock

FRAME_AUDIO_S = 0.08
POLICY = ChunkPolicy()


def stream(frames: int, frame_s: float, deliver_s, *, adaptive: bool, rate: float = 1.0):
    """Make ``frames`` frames, one each ``frame_s``; a chunk of n arrives ``deliver_s(n)`` later.

    Returns the chunk sizes and the seconds for which the listener waited for audio.
    """
    progress, clock = ChunkProgress(ChunkTimes()), PlaybackClock(rate=rate)
    arrivals: list[tuple[float, float]] = []
    sizes, dry_s, now_s, free_at_s = [], 0.0, 0.0, 0.0
    for index in range(frames):
        now_s += frame_s
        while arrivals and arrivals[0][0] <= now_s:
            at_s, total_s = arrivals.pop(0)
            if clock.started:
                dry_s += max(0.0, at_s - clock.ends_at_s())
            clock.route(total_s, at_s)
        progress.made(now_s)
        view = clock if adaptive else None
        progress.observe(view, now_s)
        if progress.is_due(POLICY, view, FRAME_AUDIO_S, now_s) or index == frames - 1:
            sizes.append(progress.leave(FRAME_AUDIO_S, now_s))
            # the vocoder works on one chunk at a time
            free_at_s = max(now_s, free_at_s) + deliver_s(sizes[-1])
            arrivals.append((free_at_s, progress.sent * FRAME_AUDIO_S))
    for at_s, total_s in arrivals:
        if clock.started:
            dry_s += max(0.0, at_s - clock.ends_at_s())
        clock.route(total_s, at_s)
    return sizes, dry_s


def test_without_a_clock_the_sizes_are_the_hosts():
    sizes, _ = stream(104, 0.03, lambda n: 0.1, adaptive=False)
    assert sizes == [4, 25, 25, 25, 25]


@pytest.mark.parametrize("frame_s", [0.02, 0.04, 0.06])
@pytest.mark.parametrize("vocoder_s", [0.02, 0.08, 0.15])
def test_the_second_chunk_is_there_in_time(frame_s, vocoder_s):
    """Where frames are made faster than they are heard, the listener waits less than stock's."""
    deliver = lambda n: vocoder_s * (25 + n) / 50  # noqa: E731  left context costs too
    fixed_sizes, fixed = stream(300, frame_s, deliver, adaptive=False)
    sizes, ours = stream(300, frame_s, deliver, adaptive=True)
    assert sum(sizes) == sum(fixed_sizes) == 300
    assert ours < fixed
    assert ours <= 0.35 * fixed
    assert max(sizes) <= POLICY.largest
    assert all(size >= POLICY.smallest for size in sizes[1:-1])


def test_sizes_grow_with_the_buffer_to_the_efficient_one():
    sizes, _ = stream(400, 0.02, lambda n: 0.05, adaptive=True)
    assert sizes[1] < 25
    assert sizes[-4:-1] == [25, 25, 25]


def test_a_slow_listener_gets_large_chunks_soon():
    fast, _ = stream(200, 0.05, lambda n: 0.1, adaptive=True)
    slow, _ = stream(200, 0.05, lambda n: 0.1, adaptive=True, rate=0.25)
    assert len(slow) < len(fast)


@given(
    st.lists(st.tuples(st.floats(0, 1), st.booleans(), st.floats(0, 3)), max_size=200),
    st.integers(1, 10),
    st.integers(1, 30),
)
def test_every_frame_leaves_once_and_bounds_hold(steps, smallest, extra):
    policy = ChunkPolicy(first=2, smallest=smallest, largest=smallest + extra)
    progress, clock, now_s, sent = ChunkProgress(ChunkTimes()), PlaybackClock(), 0.0, 0
    for wait_s, routed, ahead_s in steps:
        now_s += wait_s
        if routed:
            clock.route(min(progress.sent * FRAME_AUDIO_S, clock.routed_s + ahead_s), now_s)
        progress.made(now_s)
        progress.observe(clock, now_s)
        if progress.is_due(policy, clock, FRAME_AUDIO_S, now_s):
            low, high = (smallest, policy.largest) if progress.sent else (1, policy.first)
            count = progress.leave(FRAME_AUDIO_S, now_s)
            assert low <= count <= high
            sent += count
        assert progress.pending < max(policy.largest, policy.first)
    assert sent + progress.pending == len(steps)
    assert progress.times.deliver_s >= 0
    assert progress.times.frame_s >= 0


def test_chunks_that_may_be_interrupted_last_as_long_as_deliveries_ask():
    times = ChunkTimes()
    sizes = []
    for deliver_s in (0.01, 0.06, 0.0765, 5.0):
        times.deliver_s = deliver_s
        sizes.append(times.enough(POLICY, FRAME_AUDIO_S))
    # 16 deliveries in frames of 0.08 s, between `small` and `largest`
    assert sizes == [10, 12, 16, 25]
    times.deliver_s = 0.105
    for _ in range(100):
        times.delivered(0.105, 0.58)  # listeners play slowly: the same time takes fewer frames
    assert times.enough(POLICY, FRAME_AUDIO_S) == 13


def test_a_delivery_ends_when_its_audio_is_there_though_the_vocoder_trims_it():
    """555 samples of each answer never come; the next chunk must not be waited for."""
    progress, clock = ChunkProgress(ChunkTimes()), PlaybackClock()
    for frame in range(80):
        now_s = 0.1 * frame
        if frame % 10 == 3 and progress.sent:
            clock.route(progress.sent * FRAME_AUDIO_S - 555 / 24_000, now_s)
        progress.made(now_s)
        progress.observe(clock, now_s)
        if frame % 10 == 0:
            progress.leave(FRAME_AUDIO_S, now_s)
    assert progress.times.deliver_s == pytest.approx(0.3 - 0.2 * 0.9**8, abs=0.001)
    assert not progress._under_way


def test_a_lead_outlasts_late_deliveries_and_somebodys_first_chunk():
    steady, shaky = ChunkTimes(), ChunkTimes()
    for index in range(200):
        steady.delivered(0.1, 1.0)
        shaky.delivered(0.15 if index % 2 else 0.05, 1.0)
    assert steady.deliver_s == pytest.approx(shaky.deliver_s, abs=0.01)
    for times, late_s in ((steady, 0.1), (shaky, 0.1 + 2 * 0.05)):
        times.frame_s = 0.02
        mine = times.lead_s(10, POLICY, makes_way=True)
        assert mine == pytest.approx(10 * 0.02 + late_s + POLICY.margin_s, abs=0.03)
        # the other one's chunk takes its frames and a delivery
        both = times.lead_s(10, POLICY)
        assert both - mine == pytest.approx(POLICY.first * 0.02 + late_s, abs=0.03)


def test_a_hold_is_no_part_of_what_a_frame_takes():
    times = ChunkTimes()
    progress = ChunkProgress(times)
    assert not times.measured
    progress.made(10.0)
    assert not times.measured
    progress.made(10.02)
    assert times.measured
    assert times.frame_s == pytest.approx(0.02)  # instead of the guess
    progress.made(10.3, rested=True)
    assert times.frame_s == pytest.approx(0.02)
    progress.made(10.34)
    assert times.frame_s == pytest.approx(0.022)
