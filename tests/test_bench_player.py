"""The listener's clock: gaps, positions and the host's continuity as an oracle."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from liveserve.bench.player import Gap, Player

# Delays before a chunk and lengths of it, on a grid of 1/64 s so that sums are exact.
TICKS = st.integers(min_value=0, max_value=256).map(lambda n: n / 64)
CHUNKS = st.lists(st.tuples(TICKS, TICKS.filter(bool)), min_size=1, max_size=30)


def played(chunks: list[tuple[float, float]]) -> tuple[Player, list[float]]:
    """A player fed with (delay, length) pairs, and the arrival times."""
    player, now, times = Player(), 10.0, []
    for delay, length in chunks:
        now += delay
        times.append(now)
        player.push(now, length)
    return player, times


def test_stall_and_recovery() -> None:
    player = Player()
    player.push(1.0, 0.5)
    assert player.position_s(1.25) == 0.25
    assert player.position_s(3.0) == 0.5  # dry since 1.5
    player.push(2.0, 2.0)
    assert player.gaps == [Gap(start_s=1.5, position_s=0.5, duration_s=0.5)]
    assert player.position_s(3.0) == 1.5
    assert player.reaches_s(2.0) == 3.5
    assert not player.drained(4.0)  # more may come
    player.finish()
    assert not player.drained(3.75)
    assert player.drained(4.0)
    assert player.timeline(9.0) == [(1.0, 0.0), (1.5, 0.5), (2.0, 0.5), (4.0, 2.5)]


def test_audio_on_time_makes_no_gap() -> None:
    player, _ = played([(0, 1.0), (1.0, 1.0), (0.5, 1.0)])
    assert player.gaps == []
    assert player.position_s(13.0) == 3.0


def test_stop_freezes_and_late_audio_is_routed_only() -> None:
    player = Player()
    player.push(0.0, 2.0)
    player.stop(0.5)
    player.push(0.75, 2.0)
    player.stop(1.5)
    assert (player.position_s(9.0), player.routed_s, player.stopped_s) == (0.5, 4.0, 0.5)
    assert player.timeline(9.0) == [(0.0, 0.0), (0.5, 0.5)]


def test_interrupted_while_starved_counts_the_gap() -> None:
    player = Player()
    player.push(0.0, 1.0)
    player.stop(3.0)
    assert player.gaps == [Gap(start_s=1.0, position_s=1.0, duration_s=2.0)]


def test_end_of_a_complete_answer_is_no_gap() -> None:
    player = Player()
    player.push(0.0, 1.0)
    player.finish()
    player.stop(3.0)
    assert player.gaps == []
    assert player.position_s(3.0) == 1.0


def test_stop_before_audio() -> None:
    player = Player()
    player.stop(1.0)
    player.push(2.0, 1.0)
    assert player.position_s(5.0) == 0.0
    assert player.timeline(5.0) == []


@given(CHUNKS, st.lists(TICKS, min_size=1, max_size=20))
def test_position_laws(chunks: list[tuple[float, float]], probes: list[float]) -> None:
    """Monotonic, never past what arrived, never faster than 1x, and exact between gaps."""
    player, now, last_t, last_p = Player(), 10.0, None, 0.0
    for index, (delay, length) in enumerate(chunks):
        now += delay
        player.push(now, length)
        t = now + (probes[index % len(probes)] if index == len(chunks) - 1 else 0.0)
        position = player.position_s(t)
        assert last_p <= position <= player.routed_s
        if last_t is not None:
            assert position - last_p <= t - last_t
        last_t, last_p = t, position
    assert player.started_s is not None
    end = player.reaches_s(player.routed_s)
    stalled = sum(gap.duration_s for gap in player.gaps)
    assert end == player.started_s + player.routed_s + stalled
    assert player.position_s(end) == player.routed_s


@given(CHUNKS, TICKS)
def test_reaches_inverts_position(chunks: list[tuple[float, float]], ahead: float) -> None:
    player, times = played(chunks)
    target = player.position_s(times[-1]) + ahead
    if target <= player.routed_s:
        assert player.position_s(player.reaches_s(target)) == target


@pytest.fixture(scope="module")
def host_continuity() -> ModuleType:
    """vllm_omni/benchmarks/audio_continuity.py on its own: importing its package imports vLLM."""
    spec = importlib.util.find_spec("vllm_omni")
    if spec is None or spec.origin is None:
        pytest.skip("vllm-omni is not installed")
    path = Path(spec.origin).parent / "benchmarks" / "audio_continuity.py"
    found = importlib.util.spec_from_file_location("host_audio_continuity", path)
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    import sys

    sys.modules[found.name] = module  # its dataclass looks itself up there
    found.loader.exec_module(module)
    return module


@given(chunks=CHUNKS)
def test_total_stall_is_the_hosts_max_underrun(
    host_continuity: ModuleType, chunks: list[tuple[float, float]]
) -> None:
    """The host lets its player run on through a stall, so its worst deficit is our total stall."""
    player, times = played(chunks)
    stats = host_continuity.compute_continuity_stats(
        times, [int(length * 64_000) for _, length in chunks], sample_rate=32_000
    )
    assert stats.max_underrun_s == pytest.approx(sum(g.duration_s for g in player.gaps), abs=1e-9)
    assert (stats.underrun_event_count == 0) == (player.gaps == [])
