"""Flags of ``liveserve bench sessions``: what they mean and how they are refused."""

import argparse
import asyncio
import socket
from dataclasses import asdict

import pytest

from liveserve.bench.client import ListenerClock, realtime_url
from liveserve.bench.sessions import SessionsConfig, add_arguments, config_from, main


def parse(*flags: str) -> SessionsConfig:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return config_from(parser.parse_args(flags))


def test_defaults_of_flags_and_of_the_library_are_one() -> None:
    assert parse() == SessionsConfig()


def test_flags_reach_the_run() -> None:
    cfg = parse(
        *("--sessions", "8", "--turns", "2", "--arrivals", "burst", "--rate", "0.5"),
        *("--p-barge-in", "0.5", "--answer-seconds", "10,60", "--slow-motion", "4"),
        *("--barge-in", "event", "--continuous-mic", "--ttfp-slo", "1.5", "--duration", "30"),
    )
    assert cfg.answer_seconds == (10.0, 60.0)
    assert (cfg.sessions, cfg.turns, cfg.arrivals, cfg.rate) == (8, 2, "burst", 0.5)
    assert cfg.client().barge_in == "event"
    assert cfg.client().continuous_mic
    assert cfg.workload(3).p_barge_in == 0.5
    assert asdict(cfg)["slow_motion"] == 4  # K is stated in every result


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (["--url", "localhost:8000"], "--url localhost:8000: give the server's address"),
        (["--sessions", "0"], "--sessions 0: use a whole number from 1"),
        (["--turns", "-1"], "--turns -1: use a whole number from 1"),
        (["--p-barge-in", "1.2"], "--p-barge-in 1.2: a probability is 0 to 1"),
        (["--p-barge-in", "nan"], "--p-barge-in nan: a probability is 0 to 1"),
        (["--slow-motion", "0"], "--slow-motion 0.0: use a number above 0"),
        (["--slow-motion", "inf"], "--slow-motion inf: use a number above 0"),
        (["--rate", "-1"], "--rate -1.0: use a number above 0"),
        (["--burst-shape", "0"], "--burst-shape 0.0: use a number above 0"),
        (["--reply-gap", "-0.1"], "--reply-gap -0.1: use a number from 0"),
        (["--reply-gap-cv", "nan"], "--reply-gap-cv nan: use a number from 0"),
        (["--answer-seconds", ""], "--answer-seconds : give lengths like 10,20,40"),
        (["--answer-seconds", "10,0"], "--answer-seconds 0.0: use a number above 0"),
        (["--duration", "0"], "--duration 0.0: use a number above 0"),
        (["--timeout", "nan"], "--timeout nan: use a number above 0"),
        (["--max-gap-ms", "-5"], "--max-gap-ms -5.0: use a number above 0"),
        (["--ttfp-slo", "0"], "--ttfp-slo 0.0: use a number above 0"),
        (["--vad-threshold", "0.1"], "--vad-threshold 0.1: the host takes above 0.15"),
        (["--seed", "-1"], "--seed -1: use a whole number from 0"),
        (["--warmup", "-1"], "--warmup -1: use a whole number from 0"),
        (["--end-of-speech", "commit"], "--barge-in speech: only the server's VAD hears"),
        (["--json", "."], "--json .: is a folder; name a file"),
        (["--plots", __file__], "is a file; name a folder"),
        (["--speech", "/nonexistent"], "/nonexistent: no .wav file"),
    ],
)
def test_bad_flags_get_one_clear_error(
    capsys: pytest.CaptureFixture[str], flags: list[str], complaint: str
) -> None:
    assert main([*flags, "--quiet"]) == 2
    error = capsys.readouterr().err
    assert complaint in error
    assert error.count("\n") == 1
    assert error.startswith("liveserve bench sessions: ")


@pytest.mark.parametrize("flags", [["--answer-seconds", "ten"], ["--turns", "2.5"]])
def test_unparsable_values_name_the_flag(
    capsys: pytest.CaptureFixture[str], flags: list[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(flags)
    assert f"argument {flags[0]}: " in capsys.readouterr().err


def test_no_server(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
        assert main(["--url", url, "--quiet"]) == 2
    error = capsys.readouterr().err
    assert f"--url {url}: no model server answers" in error
    assert "liveserve serve MODEL" in error


def test_realtime_url() -> None:
    assert realtime_url("http://h:1") == "ws://h:1/v1/realtime?duplex=1"
    assert realtime_url("https://h/gate/") == "wss://h/gate/v1/realtime?duplex=1"


def test_listener_time_runs_slower() -> None:
    async def measure() -> tuple[float, float]:
        loop, clock = asyncio.get_running_loop(), ListenerClock(4.0)
        begin_wall, begin = loop.time(), clock.now_s()
        await clock.sleep(0.05)
        await clock.sleep_until(clock.now_s() - 1)
        return loop.time() - begin_wall, clock.now_s() - begin

    wall, listener = asyncio.run(measure())
    assert 0.2 <= wall < 2
    assert listener == pytest.approx(wall / 4, abs=0.01)
